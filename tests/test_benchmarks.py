"""The benchmark harness: what it writes, and that it times nothing that is wrong."""

import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import run
from suites import Cost, UnavailableError, target_attention, target_attention_kernel

SUITES = {suite.SUITE.name: suite.SUITE for suite in (target_attention, target_attention_kernel)}
KERNEL = target_attention_kernel.SUITE
COLUMNS = [
    *("suite", "case", "provider", "mode", "metric", "median", "p20", "p80", "unit"),
    *("gpu", "torch", "triton", "torchrec_jagged_attn", "date"),
]


def run_quickly(tmp_path: Path, *argv: str, known=None) -> tuple[int, pd.DataFrame]:
    """Exit status and CSV of a quick run on CPU."""
    csv = tmp_path / "figures.csv"
    status = run.main(["--quick", "--device", "cpu", "--csv", str(csv), *argv], known)
    return status, pd.read_csv(csv)


def test_every_suite_file_is_found():
    assert run.load_suites() == SUITES


def test_list_prints_all_names(capsys):
    assert run.main(["--list"]) == 0
    printed = capsys.readouterr().out
    for suite in SUITES.values():
        for name in (suite.name, *suite.cases, *suite.providers):
            assert name in printed


def test_quick_run_writes_csv_table_and_pictures(tmp_path, capsys):
    argv = ["--cases", "rank-*-fp32", "--modes", "forward,both", "--plot", str(tmp_path)]
    status, frame = run_quickly(tmp_path, *argv)
    assert status == 0
    assert list(frame.columns) == COLUMNS
    assert set(frame["suite"]) == set(SUITES)
    assert set(frame["case"]) == {"rank-1k-fp32-quick", "rank-200-fp32-quick"}
    assert set(frame["mode"]) == {"forward", "both"}
    assert set(frame["metric"]) == {"time"}
    assert {"floor", "ours", "ours-kernel", "padded-sdpa"} <= set(frame["provider"])
    assert (frame["median"] > 0).all()
    assert ((frame["p20"] <= frame["median"]) & (frame["median"] <= frame["p80"])).all()
    assert not frame.duplicated(["suite", "case", "provider", "mode", "metric"]).any()
    printed = capsys.readouterr().out
    assert "torch-varlen: not run here: needs CUDA" in printed
    for suite in SUITES:
        assert (tmp_path / f"{suite}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_all_that_runs_here_is_right_on_empty_histories(suite, tmp_path, capsys):
    cases = {"edges": replace(suite.cases["rank-1k-fp32"], lengths="edges")}
    known = {suite.name: replace(suite, cases=cases)}
    status, frame = run_quickly(tmp_path, "--modes", "forward", known=known)
    printed = capsys.readouterr().out
    assert status == 0
    assert frame["provider"].str.startswith("ours").any()
    assert frame["provider"].str.contains("padded-sdpa").any()
    assert "WRONG" not in printed
    assert "FAILED" not in printed


def wrong_output(x):
    call = target_attention_kernel.ours(x)
    return lambda: call() * 1.01


def wrong_gradient(x):
    call = target_attention_kernel.ours(x)

    def doubled():
        out = call()
        return 2 * out - out.detach()

    return doubled


def not_a_number(x):
    call = target_attention_kernel.ours(x)
    return lambda: call() * float("nan")


def raises(x):
    raise RuntimeError("no such kernel [here]")


def unavailable(x):
    raise UnavailableError("needs a kettle")


@pytest.mark.parametrize(
    ("provider", "reason", "expected_status"),
    [
        (wrong_output, "WRONG, so not timed: out: error", 1),
        (wrong_gradient, "WRONG, so not timed: gradient of query: error", 1),
        (not_a_number, "WRONG, so not timed: out: error nan", 1),
        (raises, "FAILED: RuntimeError: no such kernel [here]", 1),
        (unavailable, "not run here: needs a kettle", 0),
    ],
)
def test_a_provider_that_is_wrong_has_no_figure(
    provider, reason, expected_status, tmp_path, capsys
):
    providers = {"ours-kernel": provider, "padded-sdpa": KERNEL.providers["padded-sdpa"]}
    known = {KERNEL.name: replace(KERNEL, providers=providers)}
    status, frame = run_quickly(tmp_path, "--cases", "rank-1k-fp32", known=known)
    assert status == expected_status
    assert set(frame["provider"]) == {"floor", "padded-sdpa"}
    assert f"ours-kernel: {reason}" in capsys.readouterr().out


def test_floor_is_the_longer_of_bytes_and_flops():
    costs = [Cost(bytes=4e9, flops=run.PEAK_FLOPS), Cost(bytes=2e9, flops=run.PEAK_FLOPS)]
    assert run.floor_ms(costs, "cuda", bandwidth=1e9) == pytest.approx(6000)
    assert run.floor_ms(costs, "cuda", bandwidth=1e10) == pytest.approx(2000)


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_floor_of_both_is_three_passes_over_the_history(suite):
    case = replace(suite.cases["rank-1k"], batch_size=2, max_length=4096, lengths="uniform")
    x = suite.inputs(case, "cpu")
    history = x.leaves["history"]
    total = sum(cost.bytes for cost in suite.cost(x).values())
    others = sum(t.nbytes for name, t in x.leaves.items() if name != "history")
    assert 3 * history.nbytes < total < 3 * history.nbytes + 8 * others


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no-suite"], "no suite is called 'no-suite'; there are: target_attention"),
        (["--cases", "rank-7"], "no case is called 'rank-7'; there are: rank-1k"),
        (["--providers", "ours,oars"], "no provider is called 'oars'; there are: ours"),
        (["--modes", "sideways"], "no mode is called 'sideways'; there are: forward, backward"),
    ],
)
def test_an_unknown_name_lists_the_known_ones(argv, message):
    with pytest.raises(SystemExit, match=message):
        run.main(["--device", "cpu", "--quick", *argv])


def test_full_cases_are_refused_on_cpu(capsys):
    with pytest.raises(SystemExit):
        run.main(["--device", "cpu"])
    assert "add --quick" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_quick_run_on_a_gpu_measures_graphs_and_memory(tmp_path):
    csv = tmp_path / "figures.csv"
    argv = ["--quick", "--device", "cuda", "--graph", "--providers", "ours*", "--csv", str(csv)]
    assert run.main([*argv, "--cases", "rank-1k,rank-200-fp32"]) == 0
    frame = pd.read_csv(csv)
    ours = frame[frame["provider"] != "floor"]
    assert set(ours["metric"]) == {"time", "graph_time", "peak_memory"}
