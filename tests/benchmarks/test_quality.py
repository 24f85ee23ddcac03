"""The comparison of poolings: its data, its figures, and that nothing of them leaks."""

import dataclasses
import gzip
import itertools

import numpy as np
import pandas as pd
import pytest
import torch
import torch.multiprocessing as mp

pytest.importorskip("rich")

import quality
import quality_models
from events import DataError
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.processes import start_method

CPU = torch.device("cpu")
RUN = quality.Run(quality.MADE_UP, 50, "mean", 3e-3, 1e-5, 6.0, 0, 2, 8)


@pytest.fixture
def few(tmp_path):
    """The name of a file of a few users' events."""
    log = quality.make_up(seed=1, users=60, items=40, kinds=4)
    path = tmp_path / "few.txt.gz"
    with gzip.open(path, "wt") as file:
        for user, (begin, end) in enumerate(itertools.pairwise(log.offsets)):
            file.writelines(f"{user} {item}\n" for item in log.items[begin:end])
    return str(path)


def test_figures_of_known_logits():
    best, worst, alike = torch.zeros(3, 4, 50), torch.zeros(4, 50), torch.zeros(4, 50)
    best = torch.zeros(4, 50)
    best[:, 0], worst[:, 0] = 9, -9
    assert quality.rate(best)[:2] == (1, 1)
    assert quality.rate(worst)[:2] == (0, 0)
    auc, hit_rate, ne = quality.rate(alike)
    assert auc == 0.5
    assert hit_rate == 0  # whoever ranks all alike does not find the event
    assert ne == pytest.approx(1)
    third = torch.arange(50.0).repeat(4, 1)
    third[:, 0] = 46.5  # below 47, 48 and 49
    assert quality.rate(third)[:2] == (pytest.approx(46 / 49), 1)
    assert quality.rate(best * torch.nan)[:2] == (0, 0)


def assert_batches_are_of_the_log(batches, log, max_history):
    """Each is what its places say, and has the shapes of the others."""
    shapes = set()
    for places, negatives in zip(batches.places, batches.negatives, strict=True):
        history, offsets, candidates = batches.next()
        shapes.add((history.shape, offsets.shape, candidates.shape))
        assert offsets[-1] == len(history)
        assert offsets.diff().min() >= 0
        assert offsets.diff().max() <= max_history
        assert candidates[: len(places), 0].tolist() == log.items[places].tolist()
        assert torch.equal(candidates[: len(places), 1:], negatives.long())
        for place, begin, end in zip(places.tolist(), offsets[:-1], offsets[1:], strict=False):
            user = np.searchsorted(log.offsets, place, side="right") - 1
            first = max(log.offsets[user], place - max_history)
            assert history[begin:end].tolist() == log.items[first:place].tolist()
    assert len(shapes) == 1


def test_histories_are_the_users_own_and_earlier(few, monkeypatch):
    monkeypatch.setattr(quality, "BATCH", 100)
    monkeypatch.setattr(quality, "BATCH_OF_USERS", 16)
    log = quality.read(few)
    examples = quality.Examples(log, 7, CPU)
    assert len(log.offsets) == 61
    ends = log.offsets[1:]

    training = examples.training(2, torch.Generator())
    assert training.places.shape == (2 * training.steps, 100)
    assert training.steps == (len(log.items) - 3 * 60) // 100
    first, second = training.places.view(2, -1)
    for epoch in (first, second):
        assert len(epoch.unique()) == len(epoch)
        assert np.isin(epoch, examples.train).all()
    assert not torch.equal(first, second)
    assert_batches_are_of_the_log(training, log, 7)

    looking = examples.looking()
    of_tuning, of_test = looking.places.split(looking.steps)
    assert of_tuning.flatten()[:60].tolist() == (ends - 2).tolist()
    assert of_test.flatten()[:60].tolist() == (ends - 1).tolist()
    assert np.isin([*of_tuning, *of_test], examples.train).sum() == 0
    assert_batches_are_of_the_log(looking, log, 7)


def test_negatives_are_items_that_the_user_has_not_taken(few):
    log = quality.read(few)
    examples = quality.Examples(log, 7, CPU)
    for stage, places in (("tune", examples.tune), ("test", examples.test)):
        for user, place in enumerate(places.tolist()):
            taken = log.items[log.offsets[user] : place + 1]
            assert not np.isin(examples.negatives[stage][user], taken).any()
    drawn = examples.training(1, torch.Generator()).negatives
    counts = np.bincount(log.items, minlength=log.num_items)
    popular = np.argsort(counts)[-10:]
    assert np.isin(drawn, popular).mean() > 0.25 * 1.2  # of 40 items


def test_users_of_two_events_are_left_out():
    log = quality.log_of(np.array([1, 0, 1, 0, 1, 1]), np.array([5, 7, 6, 7, 5, 9]))
    assert log.items.tolist() == [0, 1, 0, 2]
    assert log.offsets.tolist() == [0, 4]
    with pytest.raises(DataError, match="no user has three events"):
        quality.log_of(np.array([0, 0]), np.array([1, 2]))


KUAIRAND_COLUMNS = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,"
    "long_view,play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,"
    "is_rand,tab"
)


def kuairand_line(user: int, video: int, time_ms: int, is_click: int) -> str:
    signals = ",".join("0" * 10)
    return f"{user},{video},20220408,100,{time_ms},{is_click},{signals},0,0,1"


@pytest.fixture
def kuairand(tmp_path):
    """A folder in KuaiRand's form: a user's log is spread over two files."""
    early = [kuairand_line(7, 40, 200, 1), kuairand_line(7, 90, 100, 1), kuairand_line(2, 40, 1, 1)]
    late = [
        kuairand_line(7, 50, 400, 1),
        kuairand_line(7, 60, 300, 0),  # not clicked
        kuairand_line(2, 90, 500, 1),
        kuairand_line(2, 90, 600, 1),
    ]
    for name, lines in (("4_22_to_5_08_1k", late), ("4_08_to_4_21_1k", early)):
        text = "\n".join([KUAIRAND_COLUMNS, *lines])
        (tmp_path / f"log_standard_{name}.csv").write_text(f"{text}\n")
    (tmp_path / "log_random_4_22_to_5_08_1k.csv").write_text("not read\n")
    return tmp_path


def test_clicks_of_kuairand(kuairand):
    log = quality.read(str(kuairand))
    assert log.offsets.tolist() == [0, 3, 6]
    assert log.items.tolist() == [0, 2, 2, 2, 0, 1]  # of videos 40, 50 and 90
    assert quality.read(f"{kuairand}@1").items.tolist() == [0, 1, 1]


TAOBAO_LINES = """\
1,2268318,2520377,pv,1511544070
1,2333346,2520771,pv,1511540000
1,2333346,2520771,buy,1511561733
100,2268318,149192,pv,1512316799
1,5002615,2520377,pv,1511733732
100,2268318,149192,pv,1512316800
100,2333346,149192,pv,1511539200
100,5002615,149192,fav,1511600000
100,5002615,149192,pv,1511600001
"""


@pytest.mark.parametrize("name", ["UserBehavior.csv", "UserBehavior.csv.gz"])
def test_page_views_of_taobao(name, tmp_path):
    path = tmp_path / name
    with (gzip.open if name.endswith(".gz") else open)(path, "wt") as file:
        file.write(TAOBAO_LINES)
    log = quality.read(str(path))
    assert log.offsets.tolist() == [0, 3, 6]
    assert log.items.tolist() == [1, 0, 2, 1, 2, 0]  # the last second counts, the next does not


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("UserBehavior.csv", "1,2,3,pv\n", "UserBehavior.csv:1: expected user,item,category"),
        ("UserBehavior.csv", "1,x,3,pv,1511544070\n", "UserBehavior.csv: expected integers in"),
        ("UserBehavior.csv", "1,2,3,buy,1511544070\n", "UserBehavior.csv has no event"),
        ("log_standard_1.csv", "user_id,video_id\n1,2\n", "log_standard_1.csv: expected integers"),
        ("log_standard_1.csv", f"{KUAIRAND_COLUMNS}\n1,2,\n", "expected integers in user_id"),
    ],
)
def test_logs_of_another_form_are_refused(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        quality.read(str(tmp_path if name.startswith("log") else tmp_path / name))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2\n1\n", r"bad.txt:2: expected two numbers, user item; got '1\\n'"),
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--width", "6"], "--width must be a multiple of 4, got 6"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--jobs", "33"], "--jobs must be at most 32, got 33"),
        (["--max-history", "0"], "--max-history must be at least 1, got 0"),
    ],
)
def test_bad_options_are_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        quality.main(options)
    assert message in capsys.readouterr().err
    assert quality.main(["--data", "nowhere"]) == 1


def test_a_history_helps():
    aucs = {
        pooling: quality.train(dataclasses.replace(RUN, pooling=pooling), "cpu")["auc"]
        for pooling in ("none", "sum")
    }
    assert aucs["sum"] > aucs["none"] + 0.02


@pytest.mark.parametrize("pooling", quality.POOLINGS)
def test_each_pooling_learns_and_repeats(pooling, few):
    run = dataclasses.replace(RUN, data=few, pooling=pooling, epochs=1)
    first, second = (quality.train(run, "cpu") for _ in range(2))
    for name in quality.Scores._fields:
        assert first[name] == second[name]
    assert 0.4 < first["auc"] < 1


def test_jagged_and_padded_attention_have_the_same_auc(few):
    aucs = [
        quality.train(
            dataclasses.replace(RUN, data=few, pooling=pooling, epochs=4), "cpu", torch.float64
        )["auc"]
        for pooling in ("attention-mha", "attention-padded")
    ]
    assert aucs[0] == pytest.approx(aucs[1], abs=5e-5)


def test_users_that_fill_a_batch_up_change_nothing(few, monkeypatch):
    monkeypatch.setattr(quality, "BATCH", 100)
    batches = quality.Examples(quality.read(few), 7, CPU).training(1, torch.Generator())
    for pooling in quality.POOLINGS:
        torch.manual_seed(0)
        model = quality.Ranker(pooling, 40, 8, 6.0, 7).double().eval()
        batches.step.zero_()
        for _ in range(3):
            history, offsets, candidates = batches.next()
            own = offsets[: batches.size + 1]
            expected = model(history[: own[-1]], own, candidates[: batches.size])
            logits = model(history, offsets, candidates)[: batches.size]
            torch.testing.assert_close(logits, expected)


def test_sums_by_position():
    x = torch.arange(1.0, 7).view(6, 1)
    rows = JaggedTensor(x, lengths=torch.tensor([2, 0, 4]))
    for pooling, expected in (
        ("sum", (3, 0, 18)),
        ("mean", (1.5, 0, 4.5)),
        ("recency", ((1 + 2 * 2) / 3, 0, (3 + 4 * 2 + 5 * 4 + 6 * 8) / 15)),
    ):
        pooled = quality.POOLINGS[pooling](1, 1.0, 4)(torch.zeros(3, 1, 1), rows)
        torch.testing.assert_close(pooled.flatten(), torch.tensor(expected).float())


def test_the_most_similar_rows_are_attended(monkeypatch):
    monkeypatch.setattr(quality_models, "SIMILAR", 2)
    pooling = quality.POOLINGS["sim"](8, 1.0, 5).double().eval()
    torch.nn.init.normal_(pooling.attention.q_proj_weight)
    rows = JaggedTensor(torch.randn(8, 8).double(), lengths=torch.tensor([1, 2, 5]))
    targets = torch.randn(3, 4, 8).double()
    pooled = pooling(targets, rows)
    for target, of_user, x in zip(targets, pooled, rows.values().split([1, 2, 5]), strict=True):
        for one, out in zip(target, of_user, strict=True):
            chosen = (x @ one).topk(min(2, len(x))).indices.sort().values
            few = JaggedTensor(x[chosen], lengths=torch.tensor([len(chosen)]))
            torch.testing.assert_close(out, pooling.attention(one.unsqueeze(0), few)[0])


class FakeTraining:
    """Stands for ``train``: figures by a run's points, and a list of the runs."""

    def __init__(self):
        self.runs = []

    def __call__(self, run, device):
        self.runs.append(run)
        distance = abs(run.lr - 1e-2) + abs(run.weight_decay - 1e-4) + abs(run.half_life - 1.5)
        return {**dataclasses.asdict(run), "tune_auc": 1 - distance / 100, "auc": run.seed / 10,
                "hit_rate_10": 0.5, "ne": 1.0, "best_epoch": 1, "seconds": 1.0}  # fmt: skip


def test_what_is_tuned_in_which_order(monkeypatch, few):
    fake = FakeTraining()
    monkeypatch.setattr(quality, "train", fake)
    args = quality.parse_args(["--data", few, "--poolings", "mean", "recency"])
    frame = quality.compare(args, quality.Runs(args, "cpu")).set_index("pooling")
    # Three learning rates, two more decays and seeds; of recency five more half-lives.
    assert {name: sum(run.pooling == name for run in fake.runs) for name in frame.index} == {
        "mean": 3 + 2 + 2,
        "recency": 3 + 2 + 5 + 2,
    }
    assert frame["lr"].tolist() == [1e-2] * 2
    assert frame["weight_decay"].tolist() == [1e-4] * 2
    assert frame["half_life"].tolist() == [quality.UNTUNED["half_life"], 1.5]
    np.testing.assert_allclose(frame["auc"], 0.1)
    np.testing.assert_allclose(frame["auc_se"], 0.1 / 3**0.5)


def test_test_events_do_not_choose_the_epoch(few, monkeypatch):
    figures = iter([(0.6, 0.9), (0.7, 0.5), (0.65, 0.8), (0.7, 0.9)])
    scores = []

    def rate(logits):
        if not scores:
            tuning, test = next(figures)
            scores.extend([tuning, test] if tuning > max(best) else [tuning])
            best.append(tuning)
        return quality.Scores(scores.pop(0), 0.5, 1.0)

    best = [0.0]
    monkeypatch.setattr(quality, "rate", rate)
    result = quality.train(dataclasses.replace(RUN, data=few, epochs=4), "cpu")
    assert (result["tune_auc"], result["auc"], result["best_epoch"]) == (0.7, 0.5, 2)


def test_what_is_finished_is_not_run_again(few, tmp_path, monkeypatch, capsys):
    csv, runs, train = tmp_path / "quality.csv", [], quality.train

    def counted(run, *rest):
        runs.append(run)
        return train(run, *rest)

    monkeypatch.setattr(quality, "train", counted)
    options = ["--data", few, "--quick", "--epochs", "1", "--width", "8", "--csv", str(csv)]
    assert quality.main([*options, "--poolings", "mean", "recency", "--seeds", "2"]) == 0
    # On a GPU the last begin, in threads.
    expected = [("mean", 0), ("mean", 1), ("recency", 0), ("recency", 1)]
    assert sorted((run.pooling, run.seed) for run in runs) == expected
    first = capsys.readouterr().out
    runs.clear()
    assert quality.main([*options, "--poolings", "mean", "recency", "none", "--seeds", "2"]) == 0
    assert {run.pooling for run in runs} == {"none"}
    assert len(pd.read_csv(csv)) == 6
    second = capsys.readouterr().out.splitlines()
    for line in first.splitlines():
        if "mean" in line or "recency" in line:
            assert line in second


def test_a_file_from_before_samples_per_s_goes_on(few, tmp_path, capsys):
    csv = tmp_path / "quality.csv"
    options = ["--data", few, "--quick", "--epochs", "1", "--width", "8", "--csv", str(csv)]
    assert quality.main([*options, "--poolings", "mean", "--seeds", "1"]) == 0
    frame = pd.read_csv(csv)
    assert frame["samples_per_s"].item() > 0
    assert f"{frame['samples_per_s'].item():,.0f}" in capsys.readouterr().out
    frame.drop(columns="samples_per_s").to_csv(csv, index=False)
    assert quality.main([*options, "--poolings", "mean", "sum", "--seeds", "1"]) == 0
    frame = pd.read_csv(csv)
    assert frame["pooling"].tolist() == ["mean", "sum"]
    assert frame["date"].str.startswith("20").all()
    (mean,) = [line for line in capsys.readouterr().out.splitlines() if " mean " in line]
    assert mean.split()[-1] == "–"


def test_results_do_not_depend_on_how_many_run_at_a_time(few, tmp_path, monkeypatch):
    forking = mp.get_context(start_method())  # which imports less than "spawn"
    monkeypatch.setattr(quality.multiprocessing, "get_context", lambda method: forking)
    options = ["--data", few, "--quick", "--epochs", "3", "--width", "8", "--seeds", "1"]
    poolings = ["mean", "din", "attention-4-heads"]
    frames = []
    for jobs in ("1", "2"):
        csv = tmp_path / f"{jobs}.csv"
        more = ["--poolings", *poolings, "--jobs", jobs, "--csv", str(csv)]
        assert quality.main([*options, *more]) == 0
        frame = pd.read_csv(csv).sort_values(quality.KEY).reset_index(drop=True)
        frames.append(frame[[*quality.KEY, *quality.Scores._fields]])
    pd.testing.assert_frame_equal(*frames)


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", quality.POOLINGS)
def test_a_graph_trains_as_its_function_does(pooling, few, monkeypatch):
    monkeypatch.setattr(quality, "BATCH", 100)
    run = dataclasses.replace(RUN, data=few, pooling=pooling)
    figures = []
    for eager_calls in (2, 10**6):
        monkeypatch.setattr(quality, "EAGER_CALLS", eager_calls)
        with quality.workers(1, "cuda") as threads:
            result = threads.submit(quality.train, run, "cuda").result()
        figures.append({name: result[name] for name in quality.Scores._fields})
    assert figures[0] == figures[1]


def test_figures_of_another_form_are_refused(tmp_path, capsys):
    csv = tmp_path / "old.csv"
    csv.write_text("data,max_history,pooling,stage,auc\nmade-up,50,mean,tune,0.5\n")
    assert quality.main(["--quick", "--poolings", "mean", "--csv", str(csv)]) == 1
    assert f"--csv {csv} has no column epochs, half_life, " in capsys.readouterr().err
