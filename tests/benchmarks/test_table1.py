"""The paper's Table 1: every op is right by every provider that runs here, and has its row."""

import importlib.util

import pandas as pd
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

import run
from rich.console import Console
from suites import table1


def test_prints_the_table_in_the_papers_form(tmp_path, capsys):
    csv = tmp_path / "table1.csv"
    argv = ["table1", "--quick", "--device", "cpu", "--cases", "*-cpu", "--csv", str(csv)]
    assert run.main([*argv, "--modes", "forward,both"]) == 0
    printed = capsys.readouterr().out
    assert "WRONG" not in printed
    frame = pd.read_csv(csv)
    assert set(frame["case"]) == {f"{op}-cpu-quick" for op in table1.OPS}
    assert {"ours", "padded", "jagged-padded-jagged"} <= set(frame["provider"])
    if importlib.util.find_spec("fbgemm_gpu"):  # what has figures was found right, gradients too
        of_fbgemm = set(frame.loc[frame["provider"] == "fbgemm-cuda", "case"])
        assert of_fbgemm == {f"{op}-cpu-quick" for op in list(table1.OPS)[:3]}
    forward, both = (part.split() for part in printed.split("Table 1, cpu, ")[1:])
    for name, op in table1.OPS.items():
        assert name in both
        own = forward[forward.index(name) :]
        assert {f"{op.time_ratio:.2f}", f"{op.memory_ratio:.2f}"} <= set(own)


def test_says_what_is_reached():
    ms = {"ours": 1.0, "padded": 2.0, "fbgemm-cuda": 1.2, "fbgemm-sll": 3.0}
    figures = [("floor", "time", 0.5)]
    figures += [(provider, clock, ms[provider]) for clock in table1.CLOCKS for provider in ms]
    shape = {"case": "jagged_softmax-paper", "B": 4, "L": 9, "D": 8, "T": 2, "flops": 1e9}
    rows = [
        {"provider": provider, "mode": mode, "metric": metric, "median": median, **shape}
        | {"bytes": 1e6 if mode == "forward" else 1e9}  # only the second is past the L2 cache
        for mode in ("forward", "both")
        for provider, metric, median in figures
    ]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table1.summary(pd.DataFrame(rows)))
    printed = " ".join(capture.get().split())
    assert "padded, forward, graph 2.00 ≥ 1.38" in printed
    assert "FBGEMM, forward, graph 1.20 < 1.30" in printed
    assert "FBGEMM, both, graph 1.20 < 2.00" in printed
    assert "FBGEMM, both, eager 1.20 ≥ 1.00" in printed
    assert "padded, forward, memory –" in printed
    assert "floor, forward, graph 0.50 floor, both, graph 0.50 < 0.75" in printed
