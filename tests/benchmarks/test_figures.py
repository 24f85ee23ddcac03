"""The figures under ``benchmarks/results``, and figures computed from them."""

import csv
from decimal import Decimal
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("torchrec")

import pandas as pd
import quality_results
from figures import RESULTS, FigureQuery, Figures, parse_query, read_rows, result_files, shown

from tests.benchmarks import synthetic_results

FILES = sorted(RESULTS.glob("*.csv"))
COLUMNS = {"suite", "case", "provider", "mode", "metric", "median", "unit", "gpu", "torch", "date"}


def write(
    path: Path, *rows: tuple[str, str, str, str, str], case: str = "c", mode: str = "both"
) -> None:
    """Write a CSV of provider, metric, median, unit and note, with one case and mode."""
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
    synthetic_results.write_all(tmp_path)
    return tmp_path


def test_a_figure_is_named_in_words():
    assert parse_query("ours", "c") == FigureQuery("c", "ours", "both", "graph_time", "ms")
    assert parse_query("a + b-* auc × @x-*", "8", "test") == FigureQuery(
        "x-8", "a + b-8", "test", "auc", "× ours"
    )
    assert parse_query("p forward memory saved named", "c").named


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_figure_has_its_origin(path):
    rows = read_rows(path)
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
    run_figures = figures(
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

    def find(words: str) -> Decimal | None:
        return run_figures.find(parse_query(words, "c"))

    assert find("ours") == 2
    assert find("ours µs") == 2000
    assert find("ours floor") == Decimal("0.25")
    assert find("padded ×") == 5
    assert find("best-peer ×") == 4
    assert run_figures.best(parse_query("best-peer ×", "c")) == "dense-flash"
    assert find("fbgemm ×") == 5  # eager, as no graph captures it
    assert run_figures.note(parse_query("fbgemm ×", "c")).startswith("eager")
    assert run_figures.note(parse_query("padded ×", "c")) == ""
    assert find("dense-flash memory ×") == Decimal("2.5")
    assert find("dense-flash memory saved") == Decimal("0.6")
    assert find("nobody ×") is None


def test_recorded_ratios_are_unchanged(tmp_path):
    run_figures = figures(
        tmp_path, ("ours", "graph_time", "2", "ms"), ("p", "graph_time", "3", "× ours")
    )
    assert run_figures.find(parse_query("p ×", "c")) == 3


def test_duplicated_figures_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"run\.csv must have each figure once.*'ours'"):
        figures(tmp_path, *[("ours", "time", "2", "ms")] * 2)


def test_times_of_a_case_are_from_one_kind_of_gpu_unlike_scores(tmp_path):
    def two_gpu_figures(metric: str, unit: str) -> Figures:
        path = tmp_path / "run.csv"
        write(path, *((name, metric, "0.8", unit, "") for name in ("mean", "sum")))
        rows = pd.read_csv(path)
        rows.loc[1, "gpu"] = "another"
        rows.to_csv(path, index=False)
        return Figures([path])

    with pytest.raises(ValueError, match="of c from one kind of GPU, got a GPU and another"):
        two_gpu_figures("time", "ms")
    scores = two_gpu_figures("auc", "AUC")
    assert scores.find(parse_query("sum auc", "c")) == Decimal("0.8")
    assert [stamp.split(",")[0] for stamp in scores.stamps().split("; ")] == ["a GPU", "another"]


def test_suites_may_have_a_case_of_one_name(tmp_path):
    for suite, ms in (("first", "2"), ("second", "4")):
        write(tmp_path / f"{suite}.csv", ("floor", "time", "1", "ms", ""),
              ("ours", "time", ms, "ms", ""))  # fmt: skip
        rows = pd.read_csv(tmp_path / f"{suite}.csv").assign(suite=suite)
        rows.to_csv(tmp_path / f"{suite}.csv", index=False)
    files = result_files(["first", "second"], tmp_path)
    with pytest.raises(ValueError, match=r"second\.csv must have each figure once"):
        Figures(files)
    both = Figures(files, by_suite=True)
    assert both.find(parse_query("ours time floor @first/c")) == Decimal("0.5")
    assert both.find(parse_query("ours time floor @second/c")) == Decimal("0.25")


@pytest.mark.parametrize(
    ("name", "compare", "setting"),
    [
        ("quality", quality_results.comparison, "width"),
        ("event_selection", quality_results.ways_rows, "noise"),
    ],
)
def test_trainings_with_other_settings_are_not_compared(results, name, compare, setting):
    frame = pd.read_csv(results / f"{name}.csv")
    frame[setting] = frame[setting].astype(float)
    frame.loc[0, setting] = 0.5
    with pytest.raises(ValueError, match=rf"{setting} must be the same.*\[0\.5"):
        compare(frame)
