"""The comparison of poolings: its data, its order in time, and its tuning."""

import dataclasses
import gzip

import numpy as np
import pandas as pd
import pytest
import torch
import torch.multiprocessing as mp

pytest.importorskip("torchmetrics")

import quality
import quality_models
from events import DataError
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.processes import start_method
from torchrec_jagged_attn import JaggedTargetAttention

DATA = "synthetic@30"
RUN = quality.Run(DATA, "mean", max_history=20, width=8, batch_size=256)


@pytest.fixture
def lines(tmp_path):
    """A file of users with 5 to 24 events each."""
    path = tmp_path / "few.txt.gz"
    rng = np.random.default_rng(0)
    with gzip.open(path, "wt") as file:
        for user in range(20):
            file.writelines(f"{user} {item}\n" for item in rng.permutation(40)[: user + 5])
    return path


def test_users_without_times_go_on_side_by_side(lines):
    log = quality.read(str(lines))
    counts = np.bincount(log.user)
    position = np.arange(len(log.user)) - (np.cumsum(counts) - counts)[log.user]
    with gzip.open(lines, "rt") as file:
        written = np.loadtxt(file, dtype=int)
    assert np.array_equal(log.user, written[:, 0])
    assert np.array_equal(log.item, np.unique(written[:, 1], return_inverse=True)[1])
    expected = position / counts[log.user]
    assert (log.time >= (1e6 * expected).astype(int)).all()
    assert (log.time < 1e6 * (expected + 1 / counts[log.user])).all()


def test_batches_are_in_order_of_time():
    events = quality.load_events(DATA, 20, 0)
    trainer = quality.Trainer(RUN, events, "cpu")
    for examples in (events.training(0), events.testing()):
        labels = [batch.labels for batch in trainer.batches(examples)]
        assert torch.cat(labels).sum() == len(examples) / 2
        order = examples.time.argsort(stable=True)
        assert torch.equal(torch.cat(labels), examples.label[order])
        assert examples.time[order].diff().min() >= 0
    assert events.training(0).time.max() < events.testing().time.min()


def test_the_lowest_ids():
    whole = quality.read(DATA)
    part = quality.first_users(whole, 7)
    assert np.array_equal(part.item, whole.item[whole.user < 7])
    assert part.user.max() == 6


def test_a_batch_is_scored_before_it_is_learned(monkeypatch):
    calls = []
    score, learn = quality.Trainer.score, quality.Trainer.learn

    def counted(name, function):
        def call(self, batch):
            calls.append((name, batch.labels.sum().item(), len(batch.labels)))
            return function(self, batch)

        return call

    monkeypatch.setattr(quality.Trainer, "score", counted("score", score))
    monkeypatch.setattr(quality.Trainer, "learn", counted("learn", learn))
    quality.train(RUN, "cpu")
    first = next(i for i, (name, *_) in enumerate(calls) if name == "score")
    assert [name for name, *_ in calls[first::2]] == ["score"] * len(calls[first::2])
    assert [call[1:] for call in calls[first::2]] == [call[1:] for call in calls[first + 1 :: 2]]


@pytest.mark.parametrize("pooling", quality.POOLINGS)
def test_each_pooling_learns(pooling):
    assert 0.4 < quality.train(dataclasses.replace(RUN, pooling=pooling), "cpu")["auc"] < 1


def test_each_regularizer_changes_the_training():
    aucs = [quality.train(run, "cpu")["auc"] for run in (RUN, *quality.regularizers(RUN))]
    assert len({*aucs}) == 1 + len(quality.REGULARIZERS)


def test_lines_have_no_features(lines):
    model = quality.Trainer(dataclasses.replace(RUN, data=str(lines)),
                            quality.load_events(str(lines), 20, 0), "cpu").model  # fmt: skip
    assert [*model.tables.embeddings] == ["item_table"]
    assert model.layers[0].in_features == 3 * RUN.width
    assert 0 < quality.train(dataclasses.replace(RUN, data=str(lines)), "cpu")["auc"] < 1


def test_poolings_by_a_loop():
    rows = JaggedTensor(torch.randn(9, 4), lengths=torch.tensor([2, 0, 4, 3]))
    target = torch.randn(4, 4)
    run = dataclasses.replace(RUN, max_history=4, half_life=1.0)
    mean, recency = (quality_models.POOLINGS[name](run, 4) for name in ("mean", "recency"))
    unit = quality_models.POOLINGS["din"](run, 4)
    for i, x in enumerate(rows.values().split([2, 0, 4, 3])):
        weights = 2.0 ** torch.arange(len(x)).unsqueeze(1)
        q = target[i].expand_as(x)
        unit_weights = unit.weigh(torch.cat([q, x, q - x, q * x], 1))
        for pooling, expected in (
            (mean, x.sum(0) / max(len(x), 1)),
            (recency, (weights * x).sum(0) / weights.sum().clamp(min=1)),
            (unit, (unit_weights * x).sum(0)),
        ):
            torch.testing.assert_close(pooling(target, rows)[i], expected)


def test_attention_is_the_default():
    attention = quality_models.POOLINGS["attention"](RUN, 16)
    assert str(attention) == str(JaggedTargetAttention(16))


class FakeTraining:
    """In place of ``train``: figures by a run's settings, and a list of the runs."""

    def __init__(self):
        self.runs = []

    def __call__(self, run, device):
        self.runs.append(run)
        best = {"dense_lr": 1e-2, "table_lr": quality.TABLE_LRS[0], "half_life": 1.5,
                "weight_decay": 0.1}  # fmt: skip
        misses = sum(getattr(run, name) != value for name, value in best.items())
        auc = 0.6 + 0.1 * (run.pooling == "recency") + run.seed / 100
        return {**dataclasses.asdict(run), "tune_auc": 1 - misses / 10, "auc": auc, "seconds": 1.0}


def test_order_of_tuning(monkeypatch):
    fake = FakeTraining()
    monkeypatch.setattr(quality, "train", fake)
    poolings = ["mean", "recency", "attention"]
    args = quality.parse_args(["--data", DATA, "--poolings", *poolings])
    frame = quality.compare(args, quality.Runs(None, 1, "cpu")).set_index("pooling")
    rates = len(quality.DENSE_LRS) * len(quality.TABLE_LRS)
    untried = int(quality.Run(DATA, "mean").table_lr not in quality.TABLE_LRS)
    counts = {name: sum(run.pooling == name for run in fake.runs) for name in poolings}
    assert counts == {
        "mean": rates + untried + len(quality.REGULARIZERS) + 2,
        "recency": rates + untried + len(quality.HALF_LIVES) - 1 + len(quality.REGULARIZERS) + 2,
        "attention": rates + untried + len(quality.REGULARIZERS) + 2,
    }
    assert frame["dense_lr"].tolist() == [1e-2] * 3
    assert frame["table_lr"].tolist() == [quality.TABLE_LRS[0]] * 3
    assert frame["weight_decay"].tolist() == [0.1] * 3
    assert frame["half_life"].tolist() == [6.0, 1.5, 6.0]
    np.testing.assert_allclose(frame["auc"], [0.61, 0.71, 0.61])
    np.testing.assert_allclose(frame["auc_se"], 0.01 / 3**0.5)
    np.testing.assert_allclose(frame["ahead"], [-0.1, 0, -0.1])  # of the same seeds
    np.testing.assert_allclose(frame["ahead_se"], 0, atol=1e-12)


def test_finished_runs_are_not_repeated(tmp_path, monkeypatch, capsys):
    fake = FakeTraining()
    monkeypatch.setattr(quality, "train", fake)
    csv = tmp_path / "quality.csv"
    options = ["--data", DATA, "--csv", str(csv), "--seeds", "2", "--poolings"]
    assert quality.main([*options, "recency"]) == 0
    first = pd.read_csv(csv)
    assert len(first) == len(fake.runs)
    assert first["date"].str.startswith("20").all()
    fake.runs.clear()
    assert quality.main([*options, "recency", "mean"]) == 0
    assert {run.pooling for run in fake.runs} == {"mean"}
    assert " recency " in capsys.readouterr().out
    pd.testing.assert_frame_equal(pd.read_csv(csv)[: len(first)], first)
    csv.write_text("data,pooling,auc\nsynthetic,mean,0.5\n")
    assert quality.main([*options, "mean"]) == 1
    assert f"--csv {csv} has no column batch_size, dense_lr, " in capsys.readouterr().err


def test_results_do_not_depend_on_how_many_run_at_a_time(monkeypatch):
    forking = mp.get_context(start_method())  # which imports less than "spawn"
    monkeypatch.setattr(quality.multiprocessing, "get_context", lambda method: forking)
    runs = [dataclasses.replace(RUN, pooling=name) for name in ("mean", "din")]
    found = []
    for jobs in (1, 2):
        with quality.Runs(None, jobs, "cpu") as all_runs:
            all_runs.train(runs)
        found.append([{**all_runs.done[run], "seconds": 0, "date": ""} for run in runs])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2\n1\n", r"bad.txt:2: expected two numbers, user item; got '1'"),
        ("1 x\n", r"bad.txt:1: expected two numbers"),
        ("", "bad.txt has no line"),
    ],
)
def test_bad_lines_are_named(text, message, tmp_path, capsys):
    path = tmp_path / "bad.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        quality.read_lines(path)
    assert quality.main(["--data", str(path)]) == 1
    assert "bad.txt" in capsys.readouterr().err
    assert quality.main(["--data", "nowhere"]) == 1
    assert "--data must be 'synthetic', a folder" in capsys.readouterr().err
