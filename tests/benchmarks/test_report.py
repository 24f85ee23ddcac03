"""The tables of the documents agree with the figures under ``benchmarks/results``."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("torchrec")

import event_selection
import plots
import report
import specs
from end_to_end_peers import PROVIDERS
from figures import RESULTS, Figures, result_files
from quality_models import POOLINGS
from specs import TABLES

from tests.benchmarks import synthetic_results

BLOCK = "<!-- table: self_attention -->\n"


def test_nothing_is_stale():
    assert report.main(["--check"]) == 0


def test_every_table_and_plot_has_a_block():
    text = "".join(path.read_text() for path in report.DOCUMENTS)
    for kind, names in (
        ("table", {*TABLES, "absorbed_or_materialized"}),
        ("plot", {plots.plot_name(plot) for plot in plots.PLOTS}),
    ):
        found = [match["name"] for match in report.find_blocks(kind).finditer(text)]
        assert names <= {*found}
        assert text.count(f"<!-- {kind}: ") == len(found)


def test_stale_tables_are_found_and_replaced(tmp_path, capsys):
    document = tmp_path / "guide.md"
    document.write_text(f"before\n{BLOCK}| old |\n<!-- end of table -->\nafter\n")
    assert report.main(["--check"], [document]) == 1
    assert capsys.readouterr().out.startswith("guide.md: stale")
    assert "| old |" in document.read_text()
    assert report.main([], [document]) == 0
    text = document.read_text()
    assert "| old |" not in text
    assert text.startswith(f"before\n{BLOCK}| lengths | B × H × D |")
    assert text.endswith("<!-- end of table -->\nafter\n")
    assert report.main(["--check"], [document]) == 0


def test_blocks_of_tables_without_a_file_say_so(tmp_path, monkeypatch):
    document = tmp_path / "guide.md"
    document.write_text(f"{BLOCK}| old |\n<!-- end of table -->\n")
    table = replace(TABLES["self_attention"], results=("absent",))
    monkeypatch.setitem(TABLES, "self_attention", table)
    assert report.main([], [document]) == 0
    assert document.read_text() == f"{BLOCK}Not measured yet.\n<!-- end of table -->\n"
    assert report.main(["--check"], [document]) == 0


def test_every_file_has_a_table():
    used = {name for shown in (*TABLES.values(), *plots.PLOTS) for name in shown.results}
    assert used >= {path.stem for path in RESULTS.glob("*.csv")}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with a small file of each benchmark of whole models."""
    synthetic_results.write_all(tmp_path)
    return tmp_path


def table_cells(lines: str) -> dict[str, list[str]]:
    """Return the rows of a table, including the head, by their first entry."""
    rows = [line.strip("| ").split(" | ") for line in lines.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows}


def test_all_measured_names_have_displayed_names():
    assert {*specs.STEP_PROVIDERS} == {*PROVIDERS}
    assert {*specs.POOLINGS} == {*POOLINGS}
    assert {*specs.EVENTS} == {"all", "boosted", *event_selection.WAYS}
    trained = Figures(result_files(["quality"], RESULTS)).cases
    by_epoch = Figures(result_files(["end_to_end_quality"], RESULTS)).cases
    assert {*trained, *(case.rpartition("-")[0] for case in by_epoch)} <= {*specs.LOGS}


def test_missing_figures_leave_out_rows_and_columns(results):
    path = results / "end_to_end.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:1] + [x for x in lines if ",mean-200,padded," in x]))
    rows = table_cells(report.figures_table(TABLES["end_to_end"], results))
    assert [*rows] == ["pooling", "linear + padded SDPA"]
    assert {len(row) for row in rows.values()} == {1}


def test_the_table_of_absorbed_or_materialized_follows_the_rule():
    rows = table_cells(report.crossover_table())
    # By hand: T > (16·D·E + f·(D + 16·E)) / (18·(a·H·D − E)), with f = 128 and a = 3.5.
    assert rows["GPU, bf16 and fp16"] == ["40, 19, 9", "27, 13, 6"]


def test_every_operation_has_a_table_of_its_variants():
    families = {path.parent.name for path in (report.ROOT / report.PACKAGE).glob("ops/*/plan.py")}
    text = "".join(path.read_text() for path in report.DOCUMENTS)
    assert len(families) == 3
    assert all(f"<!-- table: {family}.plan -->" in text for family in families)
