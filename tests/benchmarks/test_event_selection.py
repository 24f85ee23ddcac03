"""The comparison of selections: its data, its examples, and its results on planted noise."""

import gzip

import numpy as np
import pandas as pd
import pytest
import torch

pytest.importorskip("torchmetrics")

import event_selection
from events import DataError


@pytest.fixture
def set_up(monkeypatch):
    """Sets constants of the benchmark."""

    def set_all(**constants):
        for name, value in constants.items():
            monkeypatch.setattr(event_selection, name, value)

    return set_all


def test_planted_relevance_is_worth_more_than_the_newest(set_up, tmp_path, capsys):
    path = tmp_path / "new/figures.csv"
    arguments = ["--users", "200", "--epochs", "3", "--seeds", "1", "--seconds", "0.01"]
    # With these, models learn in few steps: NE differs by 0.09 or more with each of 20 seeds.
    set_up(EVENTS=100, NOISE=0.5, BUDGETS=(1.0, 0.25), BATCH=256, LR=0.015)
    assert event_selection.main([*arguments, "--csv", str(path)]) == 0
    assert "relevance" in capsys.readouterr().out
    lines = pd.read_csv(path).set_index(["way", "budget"])
    assert lines.index.tolist() == [
        ("all", 1),
        ("boosted", 1),
        *((way, 0.25) for way in event_selection.WAYS),
    ]
    ne = lines["ne"]
    for other in (("all", 1), ("newest", 0.25), ("random", 0.25)):
        assert ne["relevance", 0.25] < ne[other]
    assert ne["boosted", 1] < ne["all", 1]
    assert lines["auc"].between(0, 1).all()
    assert (lines[event_selection.FIGURES[2:]] > 0).all(axis=None)


def make_examples(max_history=5, **options):
    log = event_selection.synthetic_log(users=30, events=40, **options)
    return log, event_selection.Examples(log, max_history, "cpu", seed=0)


def test_examples_are_events_that_converted():
    log, examples = make_examples()
    both = torch.cat([examples.train, examples.test]).sort().values.numpy()
    first = np.flatnonzero(np.append(True, np.diff(log.user) != 0))
    expected = np.setdiff1d(np.flatnonzero(log.converted), first)
    assert np.array_equal(both, expected)
    users = torch.from_numpy(log.user)
    assert examples.test.unique().numel() == users[examples.test].unique().numel()
    for place in examples.train.tolist():  # the last of a user is for the test
        assert any(
            other > place and users[other] == users[place] for other in examples.test.tolist()
        )
    assert not examples.in_training[examples.test].any()
    assert examples.in_training[examples.train].all()


def test_histories_are_the_newest_events_before():
    log, examples = make_examples()
    (features, labels), *_ = examples.batches(examples.train, 20, shuffled=False)
    assert labels.tolist() == [1] * 10 + [0] * 10
    for at, place in enumerate([*examples.train[:10].tolist()] * 2):
        begin = max(int(np.searchsorted(log.user, log.user[place])), place - 5)
        for key, values in (("history", log.item), ("surface", log.surface), ("dwell", log.dwell)):
            got = features[key].to_dense()[at]
            assert got.tolist() == values[begin:place].tolist()
    assert features["item"].values()[:10].tolist() == log.item[examples.train[:10]].tolist()


@pytest.fixture
def movielens(tmp_path):
    ratings = ["7::10::5::100", "7::12::3::160", "7::11::4::130", "9::11::4::90", "9::10::5::9000"]
    ratings += ["9::12::4::9010"]
    movies = ["10::A (1990)::Drama|War", "11::B (1991)::Comedy", "12::C (1992)::Drama"]
    (tmp_path / "ratings.dat").write_text("\n".join(ratings))
    (tmp_path / "users.dat").write_text("7::F::1::10::48067\n9::M::56::16::70072")
    with gzip.open(tmp_path / "movies.dat.gz", "wt") as file:  # either may be compressed
        file.write("\n".join(movies))
    return tmp_path


def test_ratings_are_events(movielens):
    log = event_selection.read_movielens(movielens)
    assert log.user.tolist() == [0, 0, 0, 1, 1, 1]
    assert log.item.tolist() == [0, 1, 2, 1, 0, 2]
    assert log.surface.tolist() == [1, 0, 1, 0, 1, 1]
    assert log.dwell.tolist() == [30, 30, 0, 3600, 10, 0]
    assert log.converted.tolist() == [True, True, False, True, True, True]
    assert event_selection.read_movielens(movielens, users=1).item.tolist() == [0, 1, 2]
    examples = event_selection.Examples(log, 10, "cpu", seed=0)
    assert examples.train.tolist() == [4]
    assert examples.test.tolist() == [1, 5]


def test_missing_files_are_named(tmp_path, capsys):
    assert event_selection.main(["--data", str(tmp_path)]) == 1
    assert "ratings.dat is missing; give --data the folder" in capsys.readouterr().err


def test_events_must_convert():
    log = event_selection.synthetic_log(users=3, events=5, noise=0.5)
    never = event_selection.EventLog(**vars(log) | {"converted": np.zeros(15, dtype=bool)})
    with pytest.raises(DataError, match="no event that converted has another before it"):
        event_selection.Examples(never, 5, "cpu", seed=0)
