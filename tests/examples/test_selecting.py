"""``--select`` of the training script: its data, the input of the model, short trainings."""

import json
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
import train_dlrm
from events import Events
from planted import planted_log
from selecting import HISTORY, SelectingTrain, fit_relevance, selection_of


def parsed(monkeypatch, *options: str):
    monkeypatch.setattr(sys, "argv", ["train_dlrm.py", *options])
    return train_dlrm.parse_args()


def test_examples_are_events_that_converted_and_histories_are_of_all():
    log = planted_log(num_users=40, noise=0.5)
    events = Events(log, max_history=10, conversions=True)
    assert log.converted[np.concatenate([events.train_rows, events.test_rows])].all()
    assert not log.converted[events.rows_of_training].all()
    assert {*events.train_rows} == {*np.flatnonzero(log.converted)} & {*events.rows_of_training}
    examples = events.training(0)
    batch = examples[torch.arange(20)]
    assert batch.sparse_features.keys()[-1] == "dwell_history"
    histories = batch.sparse_features["dwell_history"].to_dense()
    for row, history in zip(events.train_rows[:20], histories, strict=True):
        begin, end = events.history_start[row], events.history_end[row]
        assert history.tolist() == log.dwell[begin:end].tolist()
    plain = Events(log).training(0)[torch.arange(2)]
    assert "dwell_history" not in plain.sparse_features.to_dict()


def test_relevance_is_fitted_to_training_time_alone():
    log = planted_log(num_users=60, noise=0.5)
    events = Events(log, conversions=True)
    before = fit_relevance(events).relevance.coefficients
    later = np.setdiff1d(np.arange(len(log.time)), events.rows_of_training)
    log.converted[later] = ~log.converted[later]
    assert torch.equal(fit_relevance(events).relevance.coefficients, before)


@pytest.mark.parametrize("way", train_dlrm.WAYS)
def test_model_input_is_the_selection(way, monkeypatch, tmp_path):
    args = parsed(monkeypatch, f"--out={tmp_path}", "--width=8")
    log = planted_log(num_users=40, noise=0.5)
    events = Events(log, max_history=20, conversions=True)
    batch = events.training(0)[torch.arange(30)]
    relevance = fit_relevance(events)
    selection = selection_of(way, 0.5, HISTORY, relevance)
    train = train_dlrm.build_model("attention", log.cardinalities(), args)
    torch.manual_seed(0)
    loss, _ = SelectingTrain(train, selection)(batch)

    seen = batch.sparse_features
    lengths = seen["item_history"].lengths()
    torch.manual_seed(0)
    kept = selection(seen)
    assert torch.equal(kept["item_history"].lengths(), (lengths + 1) // 2)
    assert torch.equal(kept["item"].values(), seen["item"].values())
    if way == "relevance":
        scores = torch.split(relevance(seen), lengths.tolist())
        left = torch.split(relevance(kept), kept["item_history"].lengths().tolist())
        for every, some in zip(scores, left, strict=True):
            assert torch.equal(some.sort().values, every.sort().values[len(every) - len(some) :])
    batch.sparse_features = kept
    torch.testing.assert_close(loss, train(batch)[0], rtol=0, atol=0)


def test_every_way_is_trained_with_every_budget(monkeypatch):
    args = parsed(monkeypatch, "--select", "newest", "relevance", "--budget", "1", "0.25")
    assert [run.name for run in args.runs] == [
        "attention",
        "attention, 0.25 by newest",
        "attention, 0.25 by relevance",
    ]
    assert args.runs[1].folder == "attention-0.25-by-newest"
    assert (args.noise, args.epochs) == (0.75, 3)
    args = parsed(monkeypatch, "--select", "random", "--budget", "0.5", "--pooling", "sum", "mean")
    assert [run.name for run in args.runs] == ["sum, 0.5 by random", "mean, 0.5 by random"]
    args = parsed(monkeypatch)
    assert [run.name for run in args.runs] == [*train_dlrm.POOLINGS]
    assert (args.noise, args.epochs) == (0, 2)


def test_trained_in_a_pipeline(tmp_path, monkeypatch, capsys):
    options = ["--users=30", "--batch-size=64", "--max-history=20", "--width=8", "--epochs=1"]
    options += ["--select", "relevance", "--budget", "1", "0.5", "--workers=0", f"--out={tmp_path}"]
    # Else TorchRec plans tables for a GPU where there is one.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        train_dlrm.compare(parsed(monkeypatch, *options), torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert "attention, 0.5 by" in capsys.readouterr().out
    runs = json.loads((tmp_path / "results.json").read_text())
    assert [(run["way"], run["budget"]) for run in runs] == [("all", 1), ("relevance", 0.5)]
    assert runs[0]["losses"] != runs[1]["losses"]
    for run in runs:
        assert 0 < run["auc"] < 1
        assert run["ne"] > 0
        assert run["test_speed"] > 0
    assert (tmp_path / "results.png").exists()
    assert list((tmp_path / "attention-0.5-by-relevance").glob("step-*"))
