"""The tables of the docs are what the figures under ``benchmarks/results`` say."""

import csv
import re
from dataclasses import replace
from decimal import Decimal
from fnmatch import fnmatch
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

pytest.importorskip("torchrec")

import event_selection
import model_specs
import pandas as pd
import quality_results
import run
import tables
from end_to_end_peers import PROVIDERS
from quality_models import POOLINGS
from table_specs import Cell, Column, Table
from tables import TABLES

from tests.benchmarks import made_up_results
from torchrec_jagged_attn import paths
from torchrec_jagged_attn.ops import multi_head_target_attention
from torchrec_jagged_attn.paths import Condition

FILES = sorted(tables.RESULTS.glob("*.csv"))
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


def figures(tmp_path: Path, *rows: tuple[str, ...]) -> tables.Figures:
    write(tmp_path / "run.csv", *((*row, "") for row in rows))
    return tables.Figures([tmp_path / "run.csv"], "ours")


def test_no_table_is_stale():
    assert tables.main(["--check"]) == 0


def test_every_table_has_its_place():
    text = "".join(path.read_text() for path in tables.DOCUMENTS)
    found = [match["name"] for match in tables.places("table").finditer(text)]
    assert {*TABLES, *tables.GOALS, "absorbed_or_explicit"} <= {*found}
    assert text.count("<!-- table: ") == len(found)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_figure_says_where_it_is_from(path):
    rows = tables.rows_of(path)
    assert {*rows[0]} >= COLUMNS
    for row in rows:
        assert float(row["median"]) >= 0 or row["metric"] == "ahead"
        assert row["date"]
        assert row["gpu"] or row["provider"] == "paper"
        assert row["torch"] or row["provider"] == "paper"


@pytest.mark.parametrize(
    ("table", "suite", "left_out"),
    [
        ("requests", "targets", "targets-*"),
        ("ikbo", "ikbo", ""),
        ("target_attention_rows", "target_attention_rows", ""),
        ("semantic_ids", "semantic_ids", ""),
        ("target_attention_scores", "target_attention_scores", ""),
        ("select_events", "select_events", ""),
        ("serving", "serving", "*"),
    ],
)
def test_rows_and_columns_are_cases_and_providers(table, suite, left_out):
    """Also of a table whose figures are not there yet; it does not show cases ``left_out``."""
    suite = run.load_suites()[suite]
    large = {name for name, case in suite.cases.items() if case.large}
    rows = {*TABLES[table].rows.values()}
    if {column.case for column in TABLES[table].columns} != {"{}"}:
        rows = {c.case.format(row) for c in TABLES[table].columns for row in rows}
    assert rows <= large
    assert all(fnmatch(name, left_out) for name in large - rows)
    cells = [cell for column in TABLES[table].columns for cell in column.cells]
    assert {cell.provider for cell in cells} <= {*suite.providers, "floor"}
    assert {cell.mode for cell in cells} <= {*suite.modes, "both"}


def test_every_file_has_a_table():
    used = {name for table in TABLES.values() for name in table.results}
    assert used >= {path.stem for path in FILES}


def test_a_stale_table_is_found_and_made_anew(tmp_path, capsys):
    document = tmp_path / "guide.md"
    document.write_text("before\n<!-- table: giant -->\n| old |\n<!-- end of table -->\nafter\n")
    assert tables.main(["--check"], [document]) == 1
    assert "guide.md" in capsys.readouterr().out
    assert "| old |" in document.read_text()
    assert tables.main([], [document]) == 0
    text = document.read_text()
    assert "| old |" not in text
    assert text.startswith("before\n<!-- table: giant -->\n| 24,501 samples | forward, µs |")
    assert text.endswith("<!-- end of table -->\nafter\n")
    assert tables.main(["--check"], [document]) == 0


def test_a_figure_keeps_its_digits_and_a_run_has_three():
    shown = {
        ("0.270", "ms"): "0.270",
        ("7.1", "× ours"): "7.1",
        ("1.30", "ms"): "1.30",
        ("0.26951", "ms"): "0.270",
        ("12.3456", "ms"): "12.3",
        ("17.5700001", "µs"): "17,570",
        ("0.0403", "µs"): "40.3",
        ("0.7964", "of floor"): "80 %",
        ("0.81234", "AUC"): "0.8123",
        ("123456", "samples/s"): "123,456",
    }
    assert {key: tables.shown(Decimal(key[0]), key[1]) for key in shown} == shown


def test_ratios_are_computed_from_a_run(tmp_path):
    of_run = figures(
        tmp_path,
        ("floor", "time", "0.5", "ms"),
        ("ours", "graph_time", "2", "ms"),
        ("ours", "time", "4", "ms"),
        ("ours", "operands", "3", "MiB"),
        ("ours", "peak_memory", "1", "MiB"),
        ("padded-flash", "graph_time", "10", "ms"),
        ("full-flash", "graph_time", "8", "ms"),
        ("full-flash", "operands", "9", "MiB"),
        ("full-flash", "peak_memory", "1", "MiB"),
        ("fbgemm-cuda", "time", "20", "ms"),
    )

    def of(provider: str, unit: str, metric: str = "graph_time") -> Decimal | None:
        return of_run.find("c", Cell(provider, metric=metric, unit=unit))

    assert of("ours", "of floor") == Decimal("0.25")
    assert of("padded-flash", "× ours") == 5
    assert of("dense-flash", "× ours") == of("best-peer", "× ours") == 4
    assert of_run.best("c", Cell("best-peer", unit="× ours")) == "full-flash"
    assert of("fbgemm", "× ours") == 5  # eager, as no graph captures it
    assert of("full-flash", "× ours", "memory") == Decimal("2.5")
    assert of("dense-flash", "saved", "memory") == Decimal("0.6")
    assert of("nobody", "× ours") is None


def test_the_csv_of_a_run_is_read(tmp_path, capsys):
    path = tmp_path / "giant.csv"
    argv = ["giant", "--cases", "giant", "--modes", "forward", "--device", "cpu", "--quick"]
    assert run.main([*argv, "--csv", str(path)]) == 0
    of_run = tables.Figures([path], "ours-kernel")
    ours = Cell("ours-kernel", "forward", "time")
    assert of_run.find("giant-quick", ours) > 0
    assert 0 < of_run.find("giant-quick", replace(ours, unit="of floor")) < 1
    assert of_run.find("giant-quick", Cell("best-peer", "forward", "time", "× ours")) > 0
    assert re.search(r", torch \S+, triton \S+, \d{4}-\d\d-\d\d$", of_run.stamps())


def test_a_recorded_ratio_is_shown_as_it_is(tmp_path):
    of_run = figures(
        tmp_path, ("ours", "graph_time", "2", "ms"), ("p", "graph_time", "3", "× ours")
    )
    assert of_run.find("c", Cell("p", unit="× ours")) == 3


def test_a_figure_that_is_there_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"run\.csv must have each figure once.*'ours'"):
        figures(tmp_path, *[("ours", "time", "2", "ms")] * 2)


def test_two_kinds_of_gpu_in_one_case_are_refused(tmp_path):
    write(tmp_path / "run.csv", *((name, "time", "2", "ms", "") for name in ("ours", "padded")))
    rows = pd.read_csv(tmp_path / "run.csv")
    rows.loc[1, "gpu"] = "another"
    rows.to_csv(tmp_path / "run.csv", index=False)
    with pytest.raises(ValueError, match="of c from one kind of GPU, got a GPU and another"):
        tables.Figures([tmp_path / "run.csv"], "ours")


def test_scores_of_a_model_may_be_of_two_kinds_of_gpu(tmp_path):
    """And are from both of them."""
    write(tmp_path / "run.csv", *((name, "auc", "0.8", "AUC", "") for name in ("mean", "sum")))
    rows = pd.read_csv(tmp_path / "run.csv")
    rows.loc[1, "gpu"] = "another"
    rows.to_csv(tmp_path / "run.csv", index=False)
    of_both = tables.Figures([tmp_path / "run.csv"], "ours")
    assert of_both.find("c", Cell("sum", metric="auc", unit="AUC")) == Decimal("0.8")
    assert [stamp.split(",")[0] for stamp in of_both.stamps().split("; ")] == ["a GPU", "another"]


def test_suites_may_have_a_case_of_one_name(tmp_path):
    for suite, ms in (("first", "2"), ("second", "4")):
        write(tmp_path / f"{suite}.csv", ("floor", "time", "1", "ms", ""),
              ("ours", "time", ms, "ms", ""))  # fmt: skip
        rows = pd.read_csv(tmp_path / f"{suite}.csv").assign(suite=suite)
        rows.to_csv(tmp_path / f"{suite}.csv", index=False)
    files = tables.files_of(["first", "second"], tmp_path)
    with pytest.raises(ValueError, match=r"second\.csv must have each figure once"):
        tables.Figures(files, "ours")
    of_both = tables.Figures(files, "ours", by_suite=True)
    ours = Cell("ours", metric="time", unit="of floor")
    assert of_both.find("first/c", ours) == Decimal("0.5")
    assert of_both.find("second/c", ours) == Decimal("0.25")


def test_notes_and_the_place_of_a_run_stand_below(tmp_path):
    write(tmp_path / "run.csv", ("ours", "time", "2", "ms", "of old kernels"))
    cells = (Cell("ours", metric="time"),)
    table = Table(("run",), "case", {"first": "c"}, (Column("ours, ms", "{}", cells),))
    assert tables.figures_table(table, tmp_path).splitlines() == [
        "| case | ours, ms |",
        "|---|---|",
        "| first | 2 ¹ |",
        "",
        "¹ of old kernels.",
        "",
        "From `run.csv`: a GPU, torch 2, 2026-11-22.",
    ]


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
    assert {*model_specs.STEP_PROVIDERS} == {*PROVIDERS}
    assert {*model_specs.POOLINGS} == {*POOLINGS}


def test_steps_by_mean_length(results):
    rows = cells_of(tables.figures_table(TABLES["end_to_end"], results))
    assert rows["pooling"] == [f"{n} events, 8,192 samples" for n in ("200", "1,000", "4,000")]
    assert rows["sum pooling"] == ["10 (6), 20,480"] * 3
    assert rows["linear + padded SDPA"] == ["9.5 (5.7), 19,456"] * 2 + ["– ¹"]
    assert len(rows) == 1 + len(PROVIDERS)


def test_goals_are_met_or_not(results):
    rows = cells_of(tables.goals_table(tables.GOALS["end_to_end_goals"], results))
    assert rows == {
        "what": ["aim", "measured", "met"],
        "mean 200, step time: ours over sum pooling": ["at most 1.35", "0.75", "yes"],
        "mean 200, samples/s: ours over linear + FlashAttention-2": ["at least 1.6", "1.07", "no"],
        "mean 200, samples/s: ours over linear + padded SDPA": ["at least 2", "1.27", "no"],
        "mean 1,000, samples/s: ours over linear + FlashAttention-2": [
            "at least 1.8",
            "1.07",
            "no",
        ],
        "mean 1,000, samples/s: ours over linear + padded SDPA": ["at least 4", "1.27", "no"],
        "mean 4,000, samples/s: ours over linear + padded SDPA": [
            *("at least 6", "the peer is out of memory", "yes")
        ],
        "mean 200, peak memory: ours over linear + padded SDPA": ["at most 0.82", "0.789", "yes"],
        "mean 200, peak memory: ours over linear + FlashAttention-2": [
            "at most 0.82",
            "0.938",
            "no",
        ],
        "mean 1,000, peak memory: ours over linear + padded SDPA": ["at most 0.82", "0.789", "yes"],
        "mean 1,000, peak memory: ours over linear + FlashAttention-2": [
            "at most 0.82",
            "0.938",
            "no",
        ],
    }


def test_figures_of_two_kinds_of_gpu_say_which_and_are_no_ratio(results):
    path = results / "end_to_end_gpus.csv"
    frame = pd.read_csv(path, dtype={"note": str})
    frame.loc[frame["gpus"] == 2, "gpu"] = "another"
    frame.to_csv(path, index=False)
    goals = cells_of(tables.goals_table(tables.GOALS["end_to_end_gpus_goals"], results))
    assert goals["mean 1,000, samples/s: 2 GPUs over one"] == [
        *("at least 1.7", "–", "not measured on one kind of GPU")
    ]
    assert goals["mean 4,000, samples/s: 2 GPUs over one"][2] == "not measured"


def test_several_gpus_and_what_was_not_measured(results):
    lines = tables.figures_table(TABLES["end_to_end_gpus"], results).splitlines()
    heads, _, one, two = ([*map(str.strip, line.split("|")[1:-1])] for line in lines[:4])
    assert one[:3] == ["1,000", "1", "whole"]
    assert two[:3] == ["1,000", "2", "row-wise"]
    assert two[heads.index("sum pooling")] == "10 (6), 1,638,400"
    assert len(heads) == 3 + len(PROVIDERS)
    goals = cells_of(tables.goals_table(tables.GOALS["end_to_end_gpus_goals"], results))
    assert goals["mean 1,000, samples/s: 2 GPUs over one"] == ["at least 1.7", "2.00", "yes"]
    assert tables.figures_table(TABLES["end_to_end_sent"], results) == ""
    assert tables.figures_table(TABLES["end_to_end_requests"], results) == ""


def test_what_fits_in_memory_says_what_came_next(results):
    lines = tables.figures_table(TABLES["end_to_end_memory"], results)
    assert cells_of(lines)["ours"] == ["3,000 ¹", "3,000 ¹"]
    assert lines.count("the next larger size: out of memory.") == 1


def test_curves_end_in_a_table(results):
    rows = cells_of(tables.figures_table(TABLES["end_to_end_quality"], results))
    assert rows["pooling"] == ["synthetic: AUC", "synthetic: NE"]
    assert rows["ours"] == ["0.8002", "0.9002"]


def test_the_best_of_each_pooling_and_its_difference_to_recency(results):
    rows = cells_of(tables.figures_table(TABLES["quality"], results))
    heads = ("AUC", "less recency's")
    logs = ("MovieLens-1M", "synthetic")
    assert rows["pooling"] == [f"{log}: {head}" for log in logs for head in heads]
    # Of the same seeds; the other has one seed.
    mean = ["0.7005 ± 0.0005", "-0.0095 ± 0.0005", "0.7000", "-0.0100"]
    assert rows["mean"] == mean
    assert rows["mean weighted by recency"][:2] == ["0.7100 ± 0.0000", "0.0000 ± 0.0000"]
    assert len(rows) == 1 + len(POOLINGS)


def test_all_poolings_have_words():
    assert {*model_specs.POOLINGS} == {*POOLINGS}


def test_trainings_of_other_sizes_are_not_compared(results):
    frame = pd.read_csv(results / "quality.csv")
    frame.loc[0, "width"] = 64
    with pytest.raises(ValueError, match=r"width must be the same.*got \[64, 16\]"):
        quality_results.comparison(frame)


def test_ways_and_their_budgets(results):
    rows = cells_of(tables.figures_table(TABLES["event_selection"], results))
    heads = ("NE", "AUC", "training, samples/s")
    assert rows["events"] == ["budget", *(f"made up: {head}" for head in heads)]
    assert rows["all"] == ["1", "0.6 ± 0", "0.9", "100 (1 ×)"]
    assert rows["by relevance"] == ["½", "0.5 ± 0", "0.9", "200 (2 ×)"]
    rows = cells_of(tables.figures_table(TABLES["semantic_ids_ranking"], results))
    assert rows["the same, tables trained"] == ["8", "541", "0.8505 ± 0.0005", "0.8 ± 0"]


def test_words_for_all_ways():
    assert {*model_specs.EVENTS} == {"all", "boosted", *event_selection.WAYS}


def test_ways_with_other_settings_are_not_compared(results):
    frame = pd.read_csv(results / "event_selection.csv")
    frame.loc[0, "noise"] = 0.5
    with pytest.raises(ValueError, match=r"noise must be the same for all of made-up, got \[0\.5"):
        quality_results.ways_rows(frame)


def test_a_part_of_the_figures_makes_a_part_of_the_table(results):
    path = results / "end_to_end.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:1] + [x for x in lines if ",mean-200,padded," in x]))
    rows = cells_of(tables.figures_table(TABLES["end_to_end"], results))
    assert [*rows] == ["pooling", "linear + padded SDPA"]
    assert {len(row) for row in rows.values()} == {1}


def test_the_place_of_a_table_without_its_file_says_so(tmp_path, monkeypatch):
    document = tmp_path / "guide.md"
    document.write_text("<!-- table: giant -->\n| old |\n<!-- end of table -->\n")
    monkeypatch.setitem(TABLES, "giant", replace(TABLES["giant"], results=("absent",)))
    assert tables.main([], [document]) == 0
    empty = "<!-- table: giant -->\nNot measured yet.\n<!-- end of table -->\n"
    assert document.read_text() == empty
    assert tables.main(["--check"], [document]) == 0
    assert tables.goals_table(tables.GOALS["end_to_end_goals"], tmp_path) == ""


def test_all_histories_have_words():
    for name in ("quality", "end_to_end_quality"):
        if tables.are_there([name]):
            cases = tables.Figures(tables.files_of([name]), "ours").cases
            if name != "quality":  # of an epoch
                cases = [case.rpartition("-")[0] for case in cases]
            assert {*cases} <= {*model_specs.LOGS}


def test_the_table_of_paths_has_the_conditions_of_their_rules(monkeypatch):
    a, b, c = (Condition(text, bool) for text in "abc")
    narrow = paths.Path("narrow", (a, b), lambda device: False, device="a Hopper GPU")
    wide = paths.Path("wide", (b, c), samples="short ones")
    general = paths.Path("general")
    monkeypatch.setattr(paths, "PATHS", (narrow, wide, general), raising=False)
    assert tables.paths_table("paths").splitlines()[2:] == [
        "| `narrow` | a Hopper GPU | a |",
        "| `wide` | any | short ones; c |",
        "| `general` | any | all else |",
        "",
        "All but `general` ask for these, too: b.",
    ]
    monkeypatch.setattr(paths, "PATHS", {"op": (narrow, general)})
    assert tables.paths_table("paths").splitlines() == [
        "| op | path | GPU | takes |",
        "|---|---|---|---|",
        "| `op` | `narrow` | a Hopper GPU | a; b |",
        "| `op` | `general` | any | all else |",
    ]


def test_the_table_of_absorbed_or_explicit_follows_the_rule(monkeypatch):
    rows = cells_of(tables.crossover_table())
    assert rows["GPU, bf16 and fp16"] == ["128", "3.5", "40, 19, 9", "27, 13, 6"]
    of_absorbed = multi_head_target_attention.FLOPS_OF_ABSORBED
    monkeypatch.setitem(of_absorbed, ("cuda", 2), 2 * of_absorbed["cuda", 2])
    changed = cells_of(tables.crossover_table())
    # By hand: T > (16·D·E + f·(D + 16·E)) / (18·(a·H·D − E)), with f = 128 and a = 7.
    assert changed.pop("GPU, bf16 and fp16")[:3] == ["128", "7.0", "19, 9, 5"]
    assert changed == {name: rows[name] for name in changed}


def test_every_family_has_a_table_of_its_paths():
    kernels = tables.ROOT / tables.PACKAGE / "kernels"
    families = {path.parent.name for path in kernels.glob("*/plan.py")}
    text = "".join(path.read_text() for path in tables.DOCUMENTS)
    assert len(families) == 3
    assert all(f"<!-- table: kernels.{family}.plan -->" in text for family in families)
