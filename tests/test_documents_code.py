"""The Python of the documents runs: all blocks of a page in their order, in one namespace."""

import os
import re
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchrec.pt2.utils import deregister_fake_classes

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?P<before>[^\n]*)\n+ *```python\n(?P<code>.*?)^ *```$"
    r"(?:\n\n```text\n(?P<printed>.*?)^```$)?",
    re.M | re.S,
)
"""A block, the line above it, and its expected output, a block of text right below."""
NOT_RUN = "*Not run by the tests:"
"""How the line above a block begins that cannot run here; the rest of it says why."""


def blocks(page: Path) -> list[re.Match[str]]:
    return list(BLOCK.finditer(page.read_text()))


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """An empty folder; neither variables, a process group nor fake classes are left behind."""
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
    deregister_fake_classes()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem
)
def test_blocks_run(page, alone, capsys):
    torch.manual_seed(0)
    namespace = {"__name__": page.stem}
    text = page.read_text()
    for block in blocks(page):
        if block["before"].startswith(NOT_RUN):
            continue
        first_line = text.count("\n", 0, block.start("code"))
        code = "\n" * first_line + textwrap.dedent(block["code"])  # a traceback names the line
        capsys.readouterr()
        exec(compile(code, page, "exec"), namespace)
        if block["printed"] is not None:
            assert capsys.readouterr().out == block["printed"]


def test_few_blocks_are_not_run():
    found = [block["before"] for page in PAGES for block in blocks(page)]
    not_run = [line for line in found if line.startswith(NOT_RUN)]
    assert len(found) == sum(page.read_text().count("```python\n") for page in PAGES)
    assert len(not_run) <= 2
