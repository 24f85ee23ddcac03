"""The figures under ``benchmarks/results``, and what is computed from them."""

import csv
import re
from decimal import Decimal
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("torchrec")

import pandas as pd
import quality_results
import run
from figures import RESULTS, Cell, Figures, files_of, parsed, rows_of, shown

from tests.benchmarks import made_up_results

FILES = sorted(RESULTS.glob("*.csv"))
COLUMNS = {"suite", "case", "provider", "mode", "metric", "median", "unit", "gpu", "torch", "date"}


def write(
    path: Path, *rows: tuple[str, str, str, str, str], case: str = "c", mode: str = "both"
) -> None:
    """A CSV of provider, metric, median, unit and note, of one case and mode."""
    names = ("provider", "metric", "median", "unit", "note")
    fixed = {"case": case, "mode": mode, "gpu": "a GPU", "torch": "2", "date": "2026-11-22T01:02"}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*fixed, *names])
        writer.writeheader()
        for row in rows:
            writer.writerow(fixed | dict(zip(names, row, strict=True)))


def figures(tmp_path: Path, *rows: tuple[str, ...]) -> Figures:
    write(tmp_path / "run.csv", *((*row, "") for row in rows))
    return Figures([tmp_path / "run.csv"])


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with a small file of each benchmark of whole models."""
    made_up_results.write_all(tmp_path)
    return tmp_path


def test_a_figure_is_named_in_words():
    assert parsed("ours", "c") == Cell("c", "ours", "both", "graph_time", "ms")
    assert parsed("a + b-* auc × @x-*", "8", "test") == Cell(
        "x-8", "a + b-8", "test", "auc", "× ours"
    )
    assert parsed("p forward memory saved named", "c").named


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_figure_says_where_it_is_from(path):
    rows = rows_of(path)
    assert {*rows[0]} >= COLUMNS
    for row in rows:
        assert float(row["median"]) >= 0 or row["metric"] == "ahead"
        assert row["date"]
        assert row["gpu"] or row["provider"] == "paper"
        assert row["torch"] or row["provider"] == "paper"


def test_a_figure_keeps_its_digits_and_a_run_has_three():
    expected = {
        ("0.270", "ms"): "0.270",
        ("7.1", "× ours"): "7.1",
        ("1.30", "ms"): "1.30",
        ("0.26951", "ms"): "0.270",
        ("12.3456", "ms"): "12.3",
        ("17570.0001", "µs"): "17,570",
        ("0.7964", "of floor"): "80 %",
        ("0.81234", "AUC"): "0.8123",
        ("123456", "samples/s"): "123,456",
    }
    assert {key: shown(Decimal(key[0]), key[1]) for key in expected} == expected


def test_ratios_are_computed_from_a_run(tmp_path):
    of_run = figures(
        tmp_path,
        ("floor", "time", "0.5", "ms"),
        ("ours", "graph_time", "2", "ms"),
        ("ours", "time", "4", "ms"),
        ("ours", "operands", "3", "MiB"),
        ("ours", "peak_memory", "1", "MiB"),
        ("padded", "graph_time", "10", "ms"),
        ("dense-flash", "graph_time", "8", "ms"),
        ("dense-flash", "operands", "9", "MiB"),
        ("dense-flash", "peak_memory", "1", "MiB"),
        ("fbgemm-cuda", "time", "20", "ms"),
    )

    def of(words: str) -> Decimal | None:
        return of_run.find(parsed(words, "c"))

    assert of("ours") == 2
    assert of("ours µs") == 2000
    assert of("ours floor") == Decimal("0.25")
    assert of("padded ×") == 5
    assert of("best-peer ×") == 4
    assert of_run.best(parsed("best-peer ×", "c")) == "dense-flash"
    assert of("fbgemm ×") == 5  # eager, as no graph captures it
    assert of("dense-flash memory ×") == Decimal("2.5")
    assert of("dense-flash memory saved") == Decimal("0.6")
    assert of("nobody ×") is None


def test_the_csv_of_a_run_is_read(tmp_path, capsys):
    path = tmp_path / "run.csv"
    argv = [
        "table1",
        "--cases",
        "jagged_softmax-cpu",
        "--device",
        "cpu",
        "--quick",
        "--csv",
        str(path),
    ]
    assert run.main(argv) == 0
    of_run = Figures([path])
    found = [
        of_run.find(parsed(f"{words} forward time", "jagged_softmax-cpu-quick"))
        for words in ("ours", "ours floor", "best-peer ×")
    ]
    assert all(x > 0 for x in found)
    assert found[1] < 1
    assert re.search(r", torch \S+, triton \S+, \d{4}-\d\d-\d\d$", of_run.stamps())


def test_a_recorded_ratio_is_shown_as_it_is(tmp_path):
    of_run = figures(
        tmp_path, ("ours", "graph_time", "2", "ms"), ("p", "graph_time", "3", "× ours")
    )
    assert of_run.find(parsed("p ×", "c")) == 3


def test_a_figure_that_is_there_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"run\.csv must have each figure once.*'ours'"):
        figures(tmp_path, *[("ours", "time", "2", "ms")] * 2)


def test_two_kinds_of_gpu_in_one_case_are_refused(tmp_path):
    write(tmp_path / "run.csv", *((name, "time", "2", "ms", "") for name in ("ours", "padded")))
    rows = pd.read_csv(tmp_path / "run.csv")
    rows.loc[1, "gpu"] = "another"
    rows.to_csv(tmp_path / "run.csv", index=False)
    with pytest.raises(ValueError, match="of c from one kind of GPU, got a GPU and another"):
        Figures([tmp_path / "run.csv"])


def test_scores_of_a_model_may_be_of_two_kinds_of_gpu(tmp_path):
    """And are from both of them."""
    write(tmp_path / "run.csv", *((name, "auc", "0.8", "AUC", "") for name in ("mean", "sum")))
    rows = pd.read_csv(tmp_path / "run.csv")
    rows.loc[1, "gpu"] = "another"
    rows.to_csv(tmp_path / "run.csv", index=False)
    of_both = Figures([tmp_path / "run.csv"])
    assert of_both.find(parsed("sum auc", "c")) == Decimal("0.8")
    assert [stamp.split(",")[0] for stamp in of_both.stamps().split("; ")] == ["a GPU", "another"]


def test_suites_may_have_a_case_of_one_name(tmp_path):
    for suite, ms in (("first", "2"), ("second", "4")):
        write(tmp_path / f"{suite}.csv", ("floor", "time", "1", "ms", ""),
              ("ours", "time", ms, "ms", ""))  # fmt: skip
        rows = pd.read_csv(tmp_path / f"{suite}.csv").assign(suite=suite)
        rows.to_csv(tmp_path / f"{suite}.csv", index=False)
    files = files_of(["first", "second"], tmp_path)
    with pytest.raises(ValueError, match=r"second\.csv must have each figure once"):
        Figures(files)
    of_both = Figures(files, by_suite=True)
    assert of_both.find(parsed("ours time floor @first/c")) == Decimal("0.5")
    assert of_both.find(parsed("ours time floor @second/c")) == Decimal("0.25")


def test_trainings_of_other_sizes_are_not_compared(results):
    frame = pd.read_csv(results / "quality.csv")
    frame.loc[0, "width"] = 64
    with pytest.raises(ValueError, match=r"width must be the same.*got \[64, 16\]"):
        quality_results.comparison(frame)


def test_ways_with_other_settings_are_not_compared(results):
    frame = pd.read_csv(results / "event_selection.csv")
    frame.loc[0, "noise"] = 0.5
    with pytest.raises(ValueError, match=r"noise must be the same for all of synthetic, .*\[0\.5"):
        quality_results.ways_rows(frame)
