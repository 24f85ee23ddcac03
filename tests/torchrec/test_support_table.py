"""``docs/torchrec.md`` agrees with the tests."""

import ast
import functools
from pathlib import Path

from tests.torchrec.test_options import OPTIONS, REFUSED

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "torchrec.md"
STATES = {"yes", "no", "error", "untested", "–"}


def rows() -> list[list[str]]:
    """The cells of each row of each table, without the heads."""
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("|")]
    heads = {at - 1 for at, line in enumerate(lines) if line.startswith("|---")}
    return [
        [column.strip() for column in line.strip("|").split("|")]
        for at, line in enumerate(lines)
        if at not in heads and not line.startswith("|---")
    ]


@functools.cache
def functions(file: str) -> dict[str, ast.FunctionDef]:
    body = ast.parse((TESTS / file).read_text()).body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def test_each_row_names_its_test():
    assert len(rows()) > 30
    for *_, test in rows():
        file, name = test.strip("`").split("::")
        assert name in functions(file), test


def test_states_of_options():
    states = {}
    for what, cpu, gpu, _ in (row for row in rows() if len(row) == 4):
        assert {cpu, gpu} <= STATES, what
        option = what.split("`")[1] if what.startswith("`") else None
        if option in OPTIONS:
            states[option] = (cpu, gpu)
    assert set(states) == set(OPTIONS) - {"plain"}
    for backend, column in (("gloo", 0), ("nccl", 1)):
        not_trained = {name for name, state in states.items() if state[column] in ("no", "error")}
        refused = {
            "variable batch sizes without inverse indices",
            "refused with owner-side attention",
        }
        assert not_trained == {*REFUSED[backend], *refused}
