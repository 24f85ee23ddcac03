"""The paper's Table 1: every op is right by every provider that runs here."""

import importlib.util

import pandas as pd
import run
from suites import table1


def test_every_op_is_right_by_every_provider(tmp_path, capsys):
    csv = tmp_path / "table1.csv"
    argv = ["table1", "--quick", "--device", "cpu", "--cases", "*-cpu", "--csv", str(csv)]
    assert run.main([*argv, "--modes", "forward,both"]) == 0
    assert "WRONG" not in capsys.readouterr().out
    frame = pd.read_csv(csv)
    assert set(frame["case"]) == {f"{op}-cpu-quick" for op in table1.OPS}
    assert {"ours", "padded", "jagged-padded-jagged"} <= set(frame["provider"])
    if importlib.util.find_spec("fbgemm_gpu"):  # what has figures was found right, gradients too
        of_fbgemm = set(frame.loc[frame["provider"] == "fbgemm-cuda", "case"])
        assert of_fbgemm == {f"{op}-cpu-quick" for op in list(table1.OPS)[:3]}
