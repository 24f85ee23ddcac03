"""``examples/train_dlrm.py``: its data, and short trainings."""

import gzip
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import movielens
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import train_dlrm
from checkpoint import (
    CheckpointError,
    Checkpoints,
    describe_checkpoint,
    load_state,
    newest_checkpoint,
)
from events import DataError, Events, InteractionLog, evaluation_batches, training_batches
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planted import planted_log
from torchmetrics.functional.classification import binary_auroc
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.optim.keyed import KeyedOptimizerWrapper

from tests.processes import run_script, started_script, variables_of_ranks
from tests.rounding import RoundingErrors
from tests.runs import assert_same_run
from tests.tolerance import assert_close
from torchrec_jagged_attn import TrainPipelineCudaGraph
from torchrec_jagged_attn.pipeline.train_pipeline import WARM_UP_STEPS

logging.disable(logging.NOTSET)  # which the examples turn off

ROOT = Path(__file__).parents[2]
RATINGS = ["1::20::5::100", "2::10::3::300", "1::10::4::50", "1::30::1::100", "2::30::2::400"]
MOVIES = ["10::Amélie (2001)::Comedy|Romance", "30::Heat (1995)::Action", "20::Pi (1998)::Action"]
USERS = ["1::F::25::10::48067", "2::M::18::4::70072"]


def write_movielens(directory, ratings=RATINGS, movies=MOVIES, users=USERS):
    for name, lines in (("ratings", ratings), ("movies", movies), ("users", users)):
        content = "".join(f"{line}\n" for line in lines)
        (directory / f"{name}.dat").write_text(content, encoding="latin-1")
    return directory


def test_movielens_is_read_in_order_of_user_and_time(tmp_path):
    log = movielens.read_movielens(write_movielens(tmp_path))
    assert log.user.tolist() == [0, 0, 0, 1, 1]
    assert log.item.tolist() == [0, 2, 1, 0, 1]  # rows of movies.dat
    assert log.time.tolist() == [50, 100, 100, 300, 400]
    assert log.category.tolist() == [1, 0, 0]
    assert log.converted.tolist() == [True, True, False, False, False]
    assert log.dwell.tolist() == [50, 0, 0, 100, 0]  # to the user's next rating
    assert {name: ids.tolist() for name, ids in log.user_features.items()} == {
        "gender": [0, 1],
        "age": [1, 0],
        "occupation": [0, 1],
    }
    assert log.cardinalities() == {"item": 3, "category": 2, "gender": 2, "age": 2, "occupation": 2}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"ratings": ["1::20::5::100", "1::10::5"]}, r"ratings\.dat, line 2: expected 4 columns"),
        ({"ratings": ["1::20::5::noon"]}, r"line 1, column Timestamp: expected an integer.*'noon'"),
        ({"ratings": ["1::20::5::" + "9" * 20]}, r"line 1, .*: expected .* at most 18 digits, got"),
        ({"movies": ["1.5::Heat::Action"]}, r"movies\.dat, line 1, column MovieID"),
        (
            {"ratings": ["1::20::5::1", "1::21::5::2"]},
            r"line 2, column MovieID: .* movies\.dat knows",
        ),
        ({"movies": []}, r"movies\.dat is empty"),
    ],
)
def test_invalid_lines(tmp_path, files, message):
    write_movielens(tmp_path, **files)
    with pytest.raises(DataError, match=message) as error:
        movielens.read_movielens(tmp_path)
    assert "\n" not in str(error.value)


def test_compressed_ratings_are_read_and_a_damaged_archive_is_named(tmp_path):
    ratings = write_movielens(tmp_path) / "ratings.dat"
    expected = movielens.read_movielens(tmp_path).time.tolist()
    compressed = gzip.compress(ratings.read_bytes())
    ratings.unlink()
    archive = tmp_path / "ratings.dat.gz"
    archive.write_bytes(compressed)
    assert movielens.read_movielens(tmp_path).time.tolist() == expected
    archive.write_bytes(compressed[:-9])
    with pytest.raises(DataError, match=r"cannot read .*ratings\.dat\.gz"):
        movielens.read_movielens(tmp_path)


def archive_of(directory) -> bytes:
    """An archive as GroupLens serves it, with the files of ``directory``."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in directory.iterdir():
            archive.write(path, f"ml-1m/{path.name}")
    return content.getvalue()


def serve(monkeypatch, content: bytes) -> list[str]:
    """Let downloads return ``content``; returns the requested addresses."""
    asked = []

    def urlopen(url, timeout):
        asked.append(url)
        return io.BytesIO(content)

    monkeypatch.setattr(movielens.urllib.request, "urlopen", urlopen)
    return asked


def test_download_fetches_files_of_the_reader_once(tmp_path, monkeypatch):
    (tmp_path / "served").mkdir()
    asked = serve(monkeypatch, archive_of(write_movielens(tmp_path / "served")))
    for _ in range(2):
        movielens.download_movielens(tmp_path / "data")
    assert asked == [movielens.URL]
    assert len(movielens.read_movielens(tmp_path / "data").time) == len(RATINGS)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == sorted(movielens.COLUMNS)


@pytest.mark.parametrize("fault", ["no archive", "flipped bit", "other archive"])
def test_download_leaves_nothing_of_a_wrong_archive(tmp_path, monkeypatch, fault):
    (tmp_path / "served").mkdir()
    write_movielens(tmp_path / "served")
    if fault == "other archive":
        (tmp_path / "served" / "users.dat").unlink()
    content = bytearray(archive_of(tmp_path / "served"))
    if fault == "no archive":
        content = b"<html>moved</html>"
    elif fault == "flipped bit":
        content[content.index(b"Heat")] ^= 1
    serve(monkeypatch, bytes(content))
    with pytest.raises(DataError, match=r"cannot download https://.*ml-1m\.zip: .*; try again"):
        movielens.download_movielens(tmp_path / "data")
    assert not (tmp_path / "data").exists()


@st.composite
def logs(draw) -> InteractionLog:
    """Small logs with equal times, in any order, of users who repeat no item."""
    size = draw(st.integers(8, 40))
    pairs = draw(
        st.lists(
            st.tuples(st.integers(0, 3), st.integers(0, 19)),
            min_size=size,
            max_size=size,
            unique=True,
        )
    )
    times = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    times[:2] = [0, 10]
    # Some rows to train on, and some, the last tenth, to test on.
    assume(np.quantile(times, 0.9, method="higher") > 0)
    user, item = np.array(pairs).T
    return InteractionLog(
        user, item, np.array(times), np.arange(20) % 3, {"age": np.array([0, 1, 1, 0])}
    )


def everything(examples):
    """All examples as one batch."""
    return examples[torch.arange(len(examples))]


@settings(max_examples=30)
@given(logs(), st.integers(1, 5), st.booleans())
def test_history_precedes_the_event(log, max_history, train):
    events = Events(log, max_history=max_history)
    rows = events.train_rows if train else events.test_rows
    examples = events.training(0) if train else events.testing()
    batch = everything(examples)
    items = batch.sparse_features["item_history"].to_dense()
    categories = batch.sparse_features["category_history"].to_dense()
    for position, row in enumerate(rows):  # Positives come first, in the order of their rows.
        before = (log.user == log.user[row]) & (log.time < log.time[row])
        expected = log.item[before][-max_history:]
        assert batch.labels[position] == 1
        assert examples.item[position] == log.item[row]
        assert items[position].tolist() == expected.tolist()
        assert categories[position].tolist() == log.category[expected].tolist()


@settings(max_examples=30)
@given(logs())
def test_negatives(log):
    events = Events(log, negatives=3)
    training_items = set(log.item[events.train_rows])
    for examples in (events.training(0), events.testing()):
        for position in torch.nonzero(examples.label == 0).flatten().tolist():
            item, user = int(examples.item[position]), int(examples.user[position])
            assert item in training_items
            taken = (log.user == user) & (log.item == item)
            # The history ends where the example's second starts.
            second = log.time[int(examples.history_end[position])]
            assert not taken.any() or log.time[taken].min() > second


def test_frequencies_of_negatives():
    count = 4000
    log = InteractionLog(
        user=np.arange(2 * count),
        item=np.concatenate(
            [np.arange(count) % 4 // 3, np.full(count, 2)]
        ),  # 0, 0, 0, 1, …, then 2
        time=np.arange(2 * count),
        category=np.zeros(3, dtype=np.int64),
        user_features={},
    )
    examples = Events(log, test_fraction=0.5).testing()
    drawn = torch.bincount(examples.item[examples.label == 0], minlength=3).tolist()
    assert sum(drawn) == count
    assert drawn[2] == 0
    # Five standard deviations of a binomial distribution.
    assert abs(drawn[1] - count / 4) < 5 * (count * 1 / 4 * 3 / 4) ** 0.5
    events = Events(planted_log(num_users=50))
    assert not torch.equal(events.training(0).item, events.training(1).item)


def test_another_seed_gives_other_examples_and_each_epoch_other_batches():
    events, other = (Events(planted_log(num_users=50), seed=seed) for seed in (1, 2))
    assert not torch.equal(events.training(0).item, other.training(0).item)
    batches, *others = (
        torch.cat(training_batches(103, 20, seed=seed, epoch=epoch))
        for seed, epoch in ((0, 0), (1, 0), (0, 1))
    )
    assert len(batches.unique()) == 100
    assert not any(torch.equal(batches, shuffled) for shuffled in others)


@settings(max_examples=30)
@given(logs())
def test_training_does_not_know_the_test_items(log):
    events = Events(log)
    changed = log.item.copy()
    changed[events.test_rows] = 0
    other = InteractionLog(log.user, changed, log.time, log.category, log.user_features)
    assert_equal(everything(events.training(3)), everything(Events(other).training(3)))


@settings(max_examples=30)
@given(logs(), st.booleans())
def test_dense_features_are_logs_of_past_events(log, train):
    events = Events(log)

    def expected(row: int, item: int) -> list[int]:
        before = log.time < log.time[row]
        user_events = before & (log.user == log.user[row])
        since = log.time[row] - log.time[user_events].max() if user_events.any() else 0
        return [user_events.sum(), since, (before & (log.item == item)).sum()]

    raw = np.log1p([expected(row, log.item[row]) for row in events.train_rows])
    rows = events.train_rows if train else events.test_rows
    examples = events.training(0) if train else events.testing()
    positives = np.log1p([expected(row, log.item[row]) for row in rows])
    with RoundingErrors(torch.float32) as errors:
        centered = torch.from_numpy(positives) - torch.from_numpy(raw).mean(0)
        expected_dense = centered / torch.from_numpy(raw.std(0) + 1e-6)
    assert_close(examples.dense[: len(rows)], expected_dense, errors)


def assert_equal(batch, other):
    assert torch.equal(batch.dense_features, other.dense_features)
    assert torch.equal(batch.labels, other.labels)
    assert batch.sparse_features.keys() == other.sparse_features.keys()
    assert torch.equal(batch.sparse_features.lengths(), other.sparse_features.lengths())
    assert torch.equal(batch.sparse_features.values(), other.sparse_features.values())


def test_batch_has_one_id_per_candidate_feature_and_a_half_life_of_weights():
    log = planted_log(num_users=50)
    examples = Events(log, max_history=30).training(0, half_life=2)
    index = torch.tensor([5, 0, len(examples) - 1, 5])
    batch = examples[index]
    features = batch.sparse_features.to_dict()
    assert list(features) == [
        "item",
        "item_history",
        "category",
        "category_history",
        "cohort",
        "device",
    ]
    assert features["item"].values().tolist() == examples.item[index].tolist()
    for name, candidate in (("category", "item"), ("category_history", "item_history")):
        categories = log.category[features[candidate].values()]
        np.testing.assert_array_equal(features[name].values(), categories)
    for name in ("cohort", "device"):
        ids = log.user_features[name][examples.user[index]]
        np.testing.assert_array_equal(features[name].values(), ids)
    for name, feature in features.items():
        if not name.endswith("_history"):
            assert feature.lengths().tolist() == [1, 1, 1, 1]
            assert feature.weights().tolist() == [1, 1, 1, 1]
            continue
        for weights in torch.split(feature.weights(), feature.lengths().tolist()):
            assert_same_run(weights[2:], 2 * weights[:-2], num_terms=30)
            assert_same_run(weights.sum(), float(len(weights) > 0), num_terms=30)


@pytest.mark.parametrize("count", [1, 100, 103])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_the_evaluation_and_have_equally_many_batches(count, world_size):
    shares = [
        evaluation_batches(count, 20, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert len({tuple(len(part) for part in share) for share in shares}) == 1
    in_order = torch.stack([torch.cat(share) for share in shares], dim=1).flatten()
    assert in_order[:count].tolist() == list(range(count))


@pytest.mark.parametrize(
    ("time", "options", "message"),
    [
        ([0, 0, 0, 0], {}, "4 events leave 0 to train and 4 to test on; give more"),
        (
            [0, 10**18, 1, 2],
            {"test_fraction": 0.5},
            r"must be under 2\*\*63, got 4 · 4 · 10{17}2; ",
        ),
    ],
    ids=["all at once", "too far apart"],
)
def test_times_that_cannot_be_used_are_refused(time, options, message):
    zeros = np.zeros(4, dtype=np.int64)
    log = InteractionLog(np.arange(4), np.arange(4), np.array(time), zeros, {})
    with pytest.raises(DataError, match=message):
        Events(log, **options)


def test_planted_recency():
    log = planted_log(num_users=300)
    assert len(set(zip(log.user, log.item, strict=True))) == len(log.item)
    assert (np.diff(log.time)[np.diff(log.user) == 0] == 0).any()

    batch = everything(Events(log).testing())
    category = batch.sparse_features["category"].values().tolist()
    mean, last_seen = [], []
    for kind, history in zip(
        category, batch.sparse_features["category_history"].to_dense(), strict=True
    ):
        same = history == kind
        mean.append(same.float().mean().nan_to_num())
        last_seen.append(same.nonzero().max() - len(history) if same.any() else -len(log.item))
    labels = batch.labels.long()
    auc_mean, auc_last_seen = (
        binary_auroc(torch.tensor(score, dtype=torch.float64), labels)
        for score in (mean, last_seen)
    )
    assert auc_last_seen > auc_mean + 0.02


SCRIPT = ROOT / "examples" / "train_dlrm.py"
OPTIONS = ["--users=40", "--batch-size=256", "--max-history=50"]
POOLINGS = ["sum", "mean", "recency", "attention"]


def environment(device: str = "cpu") -> dict[str, str]:
    """Environment variables for reproducible sums."""
    unset = {"TRITON_INTERPRET", "WORLD_SIZE", "RANK"}
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return inherited | hidden | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def run(out: Path, *options: str, device: str = "cpu") -> subprocess.CompletedProcess:
    return run_script(SCRIPT, f"--out={out}", *OPTIONS, *options, env=environment(device))


def run_ranks(*options: str, ranks: int) -> list[subprocess.CompletedProcess]:
    """Run all ranks, like ``torchrun``."""
    with ThreadPoolExecutor(ranks) as threads:
        started = [
            threads.submit(run_script, SCRIPT, *OPTIONS, *options, env=environment() | variables)
            for variables in variables_of_ranks(ranks)
        ]
    return [process.result() for process in started]


def results(out: Path) -> dict[str, dict]:
    return {result["pooling"]: result for result in json.loads((out / "results.json").read_text())}


def parsed(monkeypatch, *options: str):
    monkeypatch.setattr(sys, "argv", ["train_dlrm.py", *options])
    return train_dlrm.parse_args()


@pytest.fixture
def train_here(monkeypatch):
    """The script in this process, on the CPU, in one thread as in :func:`environment`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    num_threads = torch.get_num_threads()
    with torch.autograd.set_multithreading_enabled(True):  # as before, afterwards
        yield lambda *options: train_dlrm.main(parsed(monkeypatch, *OPTIONS, *options))
    torch.set_num_threads(num_threads)


def assert_same_losses(actual: dict, expected: dict, *, epochs: int = 1) -> None:
    """Compare the first ``epochs`` of two. Layers, and gradient sums, have up to 400 terms."""
    losses = expected["losses"][: len(expected["losses"]) // 2 * epochs]
    num_terms = 2 * (400 + 50 + 256)  # layers, a history, a batch
    assert_same_run(actual["losses"], losses, num_terms=num_terms, num_steps=None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """All poolings after two epochs."""
    out = tmp_path_factory.mktemp("finished")
    return out, run(out, "--epochs=2")


@pytest.fixture(scope="module")
def balanced(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """Attention after two epochs of batches whose histories are shared out evenly."""
    out = tmp_path_factory.mktemp("balanced")
    return out, run(out, "--epochs=2", "--pooling=attention", "--balance")


def test_all_poolings_train_and_are_compared(finished):
    out, process = finished
    assert process.returncode == 0, process.stderr
    assert "arning" not in process.stderr
    assert list(results(out)) == POOLINGS
    for pooling, result in results(out).items():
        assert result["epoch"] == 2
        assert sum(result["losses"][-10:]) < sum(result["losses"][:10])
        assert 0.5 < result["auc"] < 1
        assert result["ne"] > 0
        assert f"{result['auc']:.4f}" in process.stdout.split("Test set", 1)[1]
        assert f"{pooling}, epoch 2: AUC {result['auc']:.4f}" in process.stdout
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("whole", "options"), [("finished", []), ("balanced", ["--balance"])])
def test_two_ranks_train_like_one_and_resume(tmp_path, request, train_here, whole, options):
    """Ranks start like from ``torchrun``; ``--balance`` gives them even shares of the rows."""
    options = [f"--out={tmp_path}", "--pooling=attention", *options]
    for process in run_ranks(*options, "--epochs=1", "--workers=1", ranks=2):
        assert process.returncode == 0, process.stderr
    out, process = request.getfixturevalue(whole)
    assert process.returncode == 0, process.stderr
    one = results(out)["attention"]
    assert_same_losses(results(tmp_path)["attention"], one)

    train_here(*options, "--epochs=2", "--resume")
    assert_same_losses(results(tmp_path)["attention"], one, epochs=2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "options",
    [
        ["--pooling", "recency"],
        ["--select", "relevance", "--budget=0.5", "--users=150"],
    ],
    ids=["recency", "selection"],
)
def test_captured_steps_equal_eager_steps(tmp_path, monkeypatch, train_here, device, options):
    """On a CPU, the same padded steps without a capture."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    pipelines = []

    class Captured(TrainPipelineCudaGraph):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            pipelines.append(self)

    outs = [tmp_path / "eager", tmp_path / "captured"]
    for out, pipeline in zip(outs, (TrainPipelineSparseDist, Captured), strict=True):
        for name in ("TrainPipelineSparseDist", "TrainPipelineCudaGraph"):
            monkeypatch.setattr(train_dlrm, name, pipeline)
        train_here(f"--out={out}", "--epochs=2", "--workers=0", *options)
    eager, captured = map(results, outs)
    assert eager.keys() == captured.keys()
    assert len(pipelines) == len(eager)
    for losses, pipeline in zip(eager.values(), pipelines, strict=True):
        assert pipeline.num_replayed_steps == len(losses["losses"]) - WARM_UP_STEPS
        assert pipeline.num_captures == 1
    for name in eager:
        assert_same_losses(captured[name], eager[name], epochs=2)


@pytest.mark.parametrize(
    ("number", "whole", "options"),
    [(signal.SIGTERM, "finished", []), (signal.SIGINT, "balanced", ["--balance"])],
)
def test_resume_after_a_signal(tmp_path, request, train_here, number, whole, options):
    whole, options = request.getfixturevalue(whole)[0], ["--pooling=attention", *options]
    command = [SCRIPT, f"--out={tmp_path}", *OPTIONS, "--epochs=50", "--workers=1", *options]
    with started_script(*command, env=environment()) as (process, _, stderr):
        while "loss=" not in stderr.read_text() and process.is_alive():
            time.sleep(0.02)
        os.killpg(process.pid, number)  # As a terminal does: to the workers, too.
        process.join(timeout=60)
        message = stderr.read_text()
    assert process.exitcode == 128 + number, message
    assert "go on from it with --resume" in message
    (checkpoint,) = (tmp_path / "attention").iterdir()
    assert (checkpoint / "run.json").exists()

    train_here(f"--out={tmp_path}", "--epochs=2", "--resume", *options)
    resumed, uninterrupted = results(tmp_path)["attention"], results(whole)["attention"]
    assert resumed["losses"] == uninterrupted["losses"]
    assert resumed["auc"] == uninterrupted["auc"]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_histories_may_attend_to_themselves_first(tmp_path, train_here):
    few = ["--users=20", "--batch-size=128", "--epochs=1"]
    train_here(f"--out={tmp_path}", *few, "--pooling=attention", "--encoder-layers=1")
    assert 0.5 < results(tmp_path)["attention"]["auc"] < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data=nowhere"], "nowhere/ratings.dat is missing; "),
        (["--batch-size=1000000"], "--batch-size 1000000 is more than the "),
        (["--resume", "--width=32"], "was made with width 16, not 32; give the same options"),
        ([], "; give another folder, --resume to go on, or --overwrite to delete that run"),
    ],
)
def test_unusable_options_end_with_one_line(
    finished, tmp_path, train_here, capsys, options, message
):
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    with pytest.raises(SystemExit) as error:
        train_here(f"--out={tmp_path}", *options)
    assert error.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1


def test_runs_in_the_default_folder_are_moved_aside(tmp_path, monkeypatch, train_here, capsys):
    """Default output folder, like in ``make demo``."""
    monkeypatch.chdir(tmp_path)
    options = ["--users=20", "--epochs=1", "--pooling=sum"]
    train_here(*options, "--resume")
    said = capsys.readouterr().out
    assert "runs/train_dlrm/sum holds no checkpoint to resume: sum starts anew" in said
    left = contents(tmp_path / "runs" / "train_dlrm")

    train_here(*options, "--lr=0.01")
    moved = "runs/train_dlrm held an earlier run, which is in runs/train_dlrm-1 now"
    assert moved in capsys.readouterr().out
    assert contents(tmp_path / "runs" / "train_dlrm-1") == left
    assert contents(tmp_path / "runs" / "train_dlrm").keys() == left.keys()


@pytest.fixture
def group():
    """A process group of one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def write_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


def test_overwrite(tmp_path, monkeypatch, group):
    out = tmp_path / "out"
    earlier = {"sum/step-9/run.json", "sum/step-10/run.json", "results.json", "results.png"}
    others = {"sum/step-old/run.json", "mean/step-9/run.json", "notes"}
    write_files(out, *earlier, *others)
    options = [f"--out={out}", "--pooling=sum"]
    with pytest.raises(CheckpointError, match=f"--out must hold no earlier run, got {out} with "):
        train_dlrm.make_room(parsed(monkeypatch, *options))
    train_dlrm.make_room(parsed(monkeypatch, *options, "--resume"))
    assert contents(out).keys() == earlier | others
    train_dlrm.make_room(parsed(monkeypatch, *options, "--overwrite"))
    assert contents(out).keys() == others
    train_dlrm.make_room(parsed(monkeypatch, *options))


INTEGER, NUMBER = "must be an integer from", "must be a number from"
BAD_OPTIONS = {
    "--noise 2": f"argument --noise: {NUMBER} 0 to 1, got '2'",
    "--noise 0.5 --data x": "--noise is for synthetic data, got --data, too",
    "--select oldest": "argument --select: invalid choice: 'oldest' (choose from",
    "--select newest newest": "--select must name nothing twice, got newest newest",
    "--select newest --pooling recency": "--select cannot go with --pooling recency, ",
    "--budget 0": f"argument --budget: {NUMBER} 0.001 to 1, got '0'",
    "--pooling sum mean sum": "--pooling must name no pooling twice, got sum mean sum",
    "--pooling all sum": "--pooling must name no pooling twice, got all sum",
    "--width 10": "--width must be a multiple of 4, ",
    "--heads 3": "and --heads divide twice the width: got --width 16 and --heads 3",
    "--half-life inf": f"argument --half-life: {NUMBER} 0.01 to 1000, got 'inf'",
    "--lr -1": f"argument --lr: {NUMBER} 0 to 100, got '-1'",
    f"--seed {'1' * 5000}": "9223372036854775807, got '111111111111...1111111111111'",
    "--out file": "argument --out: must be a folder that can be written, got 'file': Not a dir",
    f"--out {'x' * 300}": "xxx': File name too long",
    "--download": "--download needs --data",
    "--resume --overwrite": "argument --overwrite: not allowed with argument --resume",
}


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=lambda options: options[:20])
def test_invalid_options(tmp_path, monkeypatch, capsys, options):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(SystemExit) as error:
        parsed(monkeypatch, *options.split())
    assert error.value.code == 2
    assert BAD_OPTIONS[options] in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def script_with_custom_torch(tmp_path: Path, torch_py: str, *command: str):
    """Runs an example where ``import torch`` runs ``torch_py``."""
    (tmp_path / "torch.py").write_text(torch_py)
    script, *options = command
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *options],
        cwd=tmp_path,
        env=environment() | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("script", ["train_dlrm.py", "serve_dlrm.py", "fuse_content.py"])
@pytest.mark.parametrize(("options", "code"), [("--help", 0), ("--nonsense", 2)])
def test_options_are_parsed_before_the_slow_imports(tmp_path, script, options, code):
    process = script_with_custom_torch(tmp_path, "raise ImportError('too early')", script, options)
    assert process.returncode == code, process.stderr
    assert "usage: " in process.stdout + process.stderr


@pytest.mark.parametrize("script", ["train_dlrm.py", "serve_dlrm.py"])
def test_ctrl_c_ends_the_start_without_a_traceback(tmp_path, script):
    code = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)"
    process = script_with_custom_torch(tmp_path, code, script)
    assert process.returncode == 130
    assert process.stderr == ""


def linear_model():
    model = torch.nn.Linear(2, 1)
    optimizer = KeyedOptimizerWrapper(dict(model.named_parameters()), torch.optim.Adam)
    optimizer.init_state()
    return model, optimizer


def test_checkpoint_is_synced_before_it_is_renamed(tmp_path, monkeypatch, group):
    done = []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(descriptor):
        done.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def recorded_rename(self, target):
        if self.name == "partial":
            done.append("renamed")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    Checkpoints(tmp_path, options={}).save(*linear_model(), 1, {})
    checkpoint = tmp_path / "step-1"
    written = {path.stat().st_ino for path in (checkpoint, *checkpoint.iterdir())}
    assert len(written) == 4  # the folder, .metadata, one rank's file, run.json
    assert written <= set(done[: done.index("renamed")])
    assert tmp_path.stat().st_ino in done[done.index("renamed") :]


def test_only_folders_named_by_steps_are_checkpoints(tmp_path, group):
    for name in ("step-old", "step-", "step--3", "step-9", "step-10", "step-9.5", "my-step-11"):
        (tmp_path / name).mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "step-10"
    Checkpoints(tmp_path, options={}).save(*linear_model(), 12, {})
    assert {path.name for path in tmp_path.iterdir()} == {
        *("step-old", "step-", "step--3", "step-9.5", "my-step-11"),
        "step-12",
    }


def test_checkpoints_that_cannot_be_written_or_read_are_named(tmp_path, group):
    model, optimizer = linear_model()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/partial: .*Not a dir") as error:
        Checkpoints(tmp_path / "file", options={}).save(model, optimizer, 1, {})
    assert "\n" not in str(error.value)
    checkpoints = Checkpoints(tmp_path, options={})
    checkpoints.save(model, optimizer, 1, {})
    for content in (b"{", b"[]", b"{}", b"\xff"):
        (tmp_path / "step-1" / "run.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"step-1/run\.json"):
            describe_checkpoint(tmp_path / "step-1")
    for path in (tmp_path / "step-1").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"cannot read .*step-1: ") as error:
        load_state({"model": model.state_dict()}, tmp_path / "step-1")
    assert "\n" not in str(error.value)


def test_a_save_that_fails_leaves_the_older_checkpoint(tmp_path, monkeypatch, group):
    def die(*_, checkpoint_id, **__):
        checkpoint_id.mkdir()
        raise OSError("no space left on device")

    model, optimizer = linear_model()
    saved = model.weight.detach().clone()
    checkpoints = Checkpoints(tmp_path, options={})
    assert checkpoints.load(model, optimizer) is None
    checkpoints.save(model, optimizer, 9, {"epoch": 1})
    torch.nn.init.zeros_(model.weight)
    with monkeypatch.context() as patch:
        patch.setattr(dcp, "save", die)
        with pytest.raises(OSError, match="no space"):
            checkpoints.save(model, optimizer, 10, {"epoch": 2})
    assert checkpoints.load(model, optimizer) == {"epoch": 1}
    assert torch.equal(model.weight, saved)

    checkpoints.save(model, optimizer, 10, {"epoch": 2})
    assert checkpoints.load(model, optimizer) == {"epoch": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]
