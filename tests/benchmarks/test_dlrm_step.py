"""The benchmark of whole steps: what it writes, and that it times nothing that is wrong."""

from pathlib import Path

import pandas as pd
import pytest
import torch

pytest.importorskip("rich")

import dlrm_step

FEW_STEPS = ("--quick", "--steps", "1", "--rounds", "2", "--warmup", "1")


def test_each_pooling_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture):
    csv = tmp_path / "steps.csv"
    dlrm_step.main([*FEW_STEPS, "--host", "--csv", str(csv)])
    figures = pd.read_csv(csv)
    cannot = [] if torch.cuda.is_available() else ["linear+torch-varlen"]
    steps = figures[figures["metric"] == "time"]
    assert [*steps["provider"]] == [name for name in dlrm_step.POOLINGS if name not in cannot]
    assert (figures["median"] > 0).all()
    printed = capsys.readouterr().out
    for name in cannot:
        assert f"{name}: not measured, " in printed
    assert "backward" in printed


def test_a_wrong_attention_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    right = dlrm_step.PEERS["linear+padded-sdpa"]
    monkeypatch.setitem(dlrm_step.PEERS, "linear+padded-sdpa", lambda *args: 1.1 * right(*args))
    dlrm_step.main([*FEW_STEPS, "--poolings", "sum", "linear+padded-sdpa"])
    printed = capsys.readouterr().out
    assert "linear+padded-sdpa: not measured, AssertionError: out: error" in printed
    assert " sum " in printed


def test_quantiles_lie_among_the_times():
    training = object.__new__(dlrm_step.Training)
    training.pooling, training.sizes, training.on_gpu = "sum", dlrm_step.QUICK[0], False
    training.rows_per_sample, training.times = 5.0, [1.0, 2.0]
    figures = training.figures()
    assert 1.0 <= figures.step_ms_p20 <= figures.step_ms == 1.5 <= figures.step_ms_p80 <= 2.0


def test_unknown_sizes_are_refused(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        dlrm_step.main([*FEW_STEPS, "--means", "7"])
    assert "--means must be of [5], got [7]" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can capture graphs")
def test_graphs_without_a_gpu_are_refused(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        dlrm_step.main([*FEW_STEPS, "--cuda-graph"])
    assert "--cuda-graph needs a GPU, got none" in capsys.readouterr().err


@pytest.mark.gpu
def test_graphs_of_dense_layers(tmp_path: Path):
    csv = tmp_path / "steps.csv"
    dlrm_step.main([*FEW_STEPS, "--cuda-graph", "--csv", str(csv)])
    figures = pd.read_csv(csv)
    assert (figures["dense_layers"] == "CUDA graphs, fused Adam").all()
    steps = figures[figures["metric"] == "time"]
    assert [*steps["provider"]] == [*dlrm_step.POOLINGS]


def test_histories_are_as_long_as_asked_for():
    sizes = dlrm_step.Sizes(mean=200, batch=4096)
    lengths = dlrm_step.make_lengths(sizes, torch.Generator().manual_seed(0))
    assert lengths.min() >= 1
    assert lengths.max() == dlrm_step.CLIP * sizes.mean
    assert 160 < lengths.double().mean() < 200
