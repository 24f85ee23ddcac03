"""The tables of the documents are what the figures under ``benchmarks/results`` say."""

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
from figures import RESULTS, Figures, files_of
from quality_models import POOLINGS
from specs import TABLES

from tests.benchmarks import made_up_results

PLACE = "<!-- table: self_attention -->\n"


def test_nothing_is_stale():
    assert report.main(["--check"]) == 0


def test_every_table_and_plot_has_its_place():
    text = "".join(path.read_text() for path in report.DOCUMENTS)
    for kind, names in (
        ("table", {*TABLES, "absorbed_or_materialized"}),
        ("plot", {plots.name_of(plot) for plot in plots.PLOTS}),
    ):
        found = [match["name"] for match in report.places(kind).finditer(text)]
        assert names <= {*found}
        assert text.count(f"<!-- {kind}: ") == len(found)


def test_a_stale_table_is_found_and_made_anew(tmp_path, capsys):
    document = tmp_path / "guide.md"
    document.write_text(f"before\n{PLACE}| old |\n<!-- end of table -->\nafter\n")
    assert report.main(["--check"], [document]) == 1
    assert capsys.readouterr().out.startswith("guide.md: stale")
    assert "| old |" in document.read_text()
    assert report.main([], [document]) == 0
    text = document.read_text()
    assert "| old |" not in text
    assert text.startswith(f"before\n{PLACE}| lengths | B × H × D |")
    assert text.endswith("<!-- end of table -->\nafter\n")
    assert report.main(["--check"], [document]) == 0


def test_the_place_of_a_table_without_its_file_says_so(tmp_path, monkeypatch):
    document = tmp_path / "guide.md"
    document.write_text(f"{PLACE}| old |\n<!-- end of table -->\n")
    table = replace(TABLES["self_attention"], results=("absent",))
    monkeypatch.setitem(TABLES, "self_attention", table)
    assert report.main([], [document]) == 0
    assert document.read_text() == f"{PLACE}Not measured yet.\n<!-- end of table -->\n"
    assert report.main(["--check"], [document]) == 0


def test_every_file_has_a_table():
    used = {name for shown in (*TABLES.values(), *plots.PLOTS) for name in shown.results}
    assert used >= {path.stem for path in RESULTS.glob("*.csv")}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with a small file of each benchmark of whole models."""
    made_up_results.write_all(tmp_path)
    return tmp_path


def cells_of(lines: str) -> dict[str, list[str]]:
    """The rows of a table, its head among them, by their first cell."""
    rows = [line.strip("| ").split(" | ") for line in lines.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows}


def test_words_for_all_that_is_measured():
    assert {*specs.STEP_PROVIDERS} == {*PROVIDERS}
    assert {*specs.POOLINGS} == {*POOLINGS}
    assert {*specs.EVENTS} == {"all", "boosted", *event_selection.WAYS}
    trained = Figures(files_of(["quality"], RESULTS)).cases
    by_epoch = Figures(files_of(["end_to_end_quality"], RESULTS)).cases
    assert {*trained, *(case.rpartition("-")[0] for case in by_epoch)} <= {*specs.LOGS}


def test_a_part_of_the_figures_makes_a_part_of_the_table(results):
    path = results / "end_to_end.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:1] + [x for x in lines if ",mean-200,padded," in x]))
    rows = cells_of(report.figures_table(TABLES["end_to_end"], results))
    assert [*rows] == ["pooling", "linear + padded SDPA"]
    assert {len(row) for row in rows.values()} == {1}


def test_the_table_of_absorbed_or_materialized_follows_the_rule():
    rows = cells_of(report.crossover_table())
    # By hand: T > (16·D·E + f·(D + 16·E)) / (18·(a·H·D − E)), with f = 128 and a = 3.5.
    assert rows["GPU, bf16 and fp16"] == ["40, 19, 9", "27, 13, 6"]


def test_every_family_has_a_table_of_its_paths():
    families = {path.parent.name for path in (report.ROOT / report.PACKAGE).glob("ops/*/plan.py")}
    text = "".join(path.read_text() for path in report.DOCUMENTS)
    assert len(families) == 3
    assert all(f"<!-- table: {family}.plan -->" in text for family in families)
