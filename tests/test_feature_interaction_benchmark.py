"""The paper's Table 1: every op is right by every provider that runs here, and has its row."""

import sys
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import run
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
    forward, both = (part.split() for part in printed.split("Table 1, cpu, ")[1:])
    for name, op in table1.OPS.items():
        assert name in both
        own = forward[forward.index(name) :]
        assert {f"{op.time_ratio:.2f}", f"{op.memory_ratio:.2f}"} <= set(own)
