"""Train one ranking model with different poolings of the history, all tuned alike, and compare.

    python benchmarks/quality.py --data data/ml-1m video_games.txt.gz --csv quality.csv
    python benchmarks/quality.py --poolings mean attention          # of made-up data

Data are folders of MovieLens-1M in GroupLens' form, or of KuaiRand's logs; Taobao's user behavior,
a CSV; or files of ``user item`` lines in order of time. ``PATH@1000`` takes the 1000 users of the
lowest ids. A user's last event is for the test, the one before it for tuning, those before train.
An example is an event and the user's newest events before it; events of one second are in the order
of the file. While training, each event has one negative beside it, drawn by popularity; in tuning
and test, an event has 49, never taken before.

Each pooling is tuned on the same grid, by the AUC of the tuning events with seed 0. First comes
Adam's learning rate, then its weight decay, then the half-life of recency pooling, each at the best
of those before it. All stop early by these events, too. The best is trained with the other seeds. A
run's figures are those of the test events at the epoch that is best by the tuning events. Finished
runs are written to --csv at once; those that are in it are not run again.

On a GPU, a step is a CUDA graph, and --jobs trainings share the device, each in a thread and on a
stream of its own; on a CPU, each in a process. They slow each other down: for samples/s, --jobs 1.

    auc       share of an event's negatives that score below it, mean of all users, that is, grouped
              by user (gAUC); ties count half
    hr@10     share of events among the 10 best of their 50 candidates
    ne        cross-entropy of all candidates, in that of the base rate
    samples/s training events a second, by the median epoch, without tuning and test
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import gzip
import itertools
import multiprocessing
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))  # a checkout runs without being installed
sys.path.append(str(Path(__file__).parents[1] / "examples"))

from events import DataError
from movielens import read_movielens
from options import writable_file
from quality_logs import first_users, is_kuairand, is_taobao, read_kuairand, read_taobao
from quality_models import POOLINGS, Ranker
from quality_results import SCORES, comparison
from stamps import stamp

from torchrec_jagged_attn import JaggedLayout

MADE_UP = "made-up"
NEGATIVES = 49  # beside an event that is looked at, 1 while training
BATCH = 1024
BATCH_OF_USERS = 256  # with 50 candidates each
GRID = {
    "lr": (1e-3, 3e-3, 1e-2),
    "weight_decay": (0.0, 1e-5, 1e-4),
    "half_life": (1.5, 3.0, 6.0, 12.0, 20.0, 40.0),
}
"""What is tuned, in this order."""
UNTUNED = {"lr": 3e-3, "weight_decay": 1e-5, "half_life": 6.0}
PATIENCE = 8  # epochs without a better AUC; with 4, trainings end on a plateau
MOST_JOBS = 32  # PyTorch has as many streams on a GPU
EAGER_CALLS = 2  # before a graph is captured: kernels are compiled, and states of Adam made
SETTING_UP = threading.Lock()  # of what all threads share: random generators, compiled kernels
THREAD = threading.local()


class Log(NamedTuple):
    """Events of all users, one user after the other, each from the oldest to the newest.

    Attributes:
        items: ``[N]`` ids.
        offsets: ``[U + 1]``: where users begin; each has three events or more.
    """

    items: np.ndarray
    offsets: np.ndarray

    @property
    def num_items(self) -> int:
        """How many ids there may be."""
        return int(self.items.max()) + 1


def log_of(user: np.ndarray, item: np.ndarray) -> Log:
    """Of events in order of time; users of fewer than three are left out."""
    order = np.argsort(user, kind="stable")
    _, user, counts = np.unique(user[order], return_inverse=True, return_counts=True)
    kept = counts[user] >= 3
    if not kept.any():
        raise DataError("no user has three events, to train, to tune and to test on")
    _, items = np.unique(item[order][kept], return_inverse=True)
    return Log(items, np.concatenate([[0], np.cumsum(counts[counts >= 3])]))


def read_lines(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Users and items of a text file, perhaps compressed by gzip: ``user item`` lines in order of
    time.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    rows = []
    with opened(path, "rt") as file:
        for number, line in enumerate(file, 1):
            words = line.split()
            if len(words) != 2 or not all(word.isdecimal() for word in words):
                raise DataError(f"{path}:{number}: expected two numbers, user item; got {line!r}")
            rows.append((int(words[0]), int(words[1])))
    if not rows:
        raise DataError(f"{path} has no line")
    users, items = np.array(rows).T
    return users, items


def make_up(seed: int = 0, users: int = 1500, items: int = 400, kinds: int = 20) -> Log:
    """Users who come back to a few kinds of items, and who wander off now and then."""
    rng = np.random.default_rng(seed)
    kind_of = rng.integers(kinds, size=items)
    popularity = rng.zipf(1.3, size=items).clip(max=100).astype(float)
    own_items = [np.flatnonzero(kind_of == kind) for kind in range(kinds)]
    user, item = [], []
    for u in range(users):
        favourites = rng.choice(kinds, size=3, replace=False)
        for _ in range(rng.integers(3, 40)):
            choice = own_items[rng.choice(favourites)] if rng.random() < 0.8 else np.arange(items)
            weights = popularity[choice]
            user.append(u)
            item.append(rng.choice(choice, p=weights / weights.sum()))
    return log_of(np.array(user), np.array(item))


@functools.cache
def read(source: str) -> Log:
    """The events that ``source`` names."""
    if source == MADE_UP:
        return make_up()
    name, _, count = source.rpartition("@") if re.search(r"@\d+$", source) else (source, "", "")
    path = Path(name)
    if not path.exists():
        raise DataError(
            "--data must name a folder of MovieLens-1M or KuaiRand, or a file, each perhaps with "
            f"@ and a number of users; got {source!r}"
        )
    if is_kuairand(path):
        user, item = read_kuairand(path)
    elif path.is_dir():
        log = read_movielens(path)
        user, item = log.user, log.item
    else:
        user, item = (read_taobao if is_taobao(path) else read_lines)(path)
    return log_of(*first_users(user, item, int(count)) if count else (user, item))


@dataclasses.dataclass(frozen=True)
class Run:
    """One training."""

    data: str
    max_history: int
    pooling: str
    lr: float
    weight_decay: float
    half_life: float
    seed: int
    epochs: int
    width: int


class Scores(NamedTuple):
    """How well candidates are ranked."""

    auc: float
    hit_rate_10: float
    ne: float


def rate(logits: Tensor) -> Scores:
    """Of ``[U, 1 + negatives]``, of which the first is the event.

    The model has seen as many events as negatives; its logits are corrected for what is here.
    """
    positive, negatives = logits.double().split([1, logits.shape[1] - 1], dim=1)
    below = (negatives < positive).double() + (negatives == positive).double() / 2
    ahead = (~(negatives < positive)).sum(1)  # also what is NaN
    base = 1 / logits.shape[1]
    labels = torch.zeros_like(logits, dtype=torch.float64)
    labels[:, 0] = 1
    corrected = logits.double() + np.log(base / (1 - base))
    entropy = F.binary_cross_entropy_with_logits(corrected, labels)
    of_base = -(base * np.log(base) + (1 - base) * np.log(1 - base))
    return Scores(
        below.mean().item(), (ahead < 10).double().mean().item(), float(entropy.item() / of_base)
    )


class Examples:
    """A log on a device, whose events are examples.

    Attributes:
        items: ``[N]`` of all events.
        lengths: ``[N]`` events in the history of each.
        train: ``[M]`` places of training events that have one before them.
        tune, test: ``[U]`` places of the events that are looked at.
        negatives: ``[U, 49]`` of ``"tune"`` and ``"test"``.
    """

    def __init__(self, log: Log, max_history: int, device: torch.device, seed: int = 0) -> None:
        self.max_history, self.device, self.num_items = max_history, device, log.num_items
        ends, begins = log.offsets[1:], log.offsets[:-1]
        place = np.arange(len(log.items))
        user = np.repeat(np.arange(len(ends)), np.diff(log.offsets))
        is_train = place < ends[user] - 2
        counts = np.bincount(log.items[is_train], minlength=log.num_items)

        def to(x: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(x)).to(device)

        self.items = to(log.items)
        self.lengths = to((place - begins[user]).clip(max=max_history))
        self.train = to(place[is_train & (place > begins[user])])
        self.tune, self.test = to(ends - 2), to(ends - 1)
        self.popularity = to(np.cumsum(counts) / counts.sum())
        rng = np.random.default_rng(seed)
        self.negatives = {
            "tune": to(self._negatives(log, counts, ends - 2, rng)),
            "test": to(self._negatives(log, counts, ends - 1, rng)),
        }

    @staticmethod
    def _negatives(
        log: Log, counts: np.ndarray, places: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """``[U, 49]`` items by popularity, none of which a user has taken up to ``places``."""
        user = np.repeat(np.arange(len(places)), np.diff(log.offsets))
        is_before = np.arange(len(log.items)) <= places[user]
        taken = np.unique(user[is_before] * log.num_items + log.items[is_before])
        of_user = np.repeat(np.arange(len(places)), NEGATIVES) * log.num_items
        bounds = np.cumsum(counts) / counts.sum()
        drawn, pending = np.empty_like(of_user), np.arange(len(of_user))
        for _ in range(1000):
            drawn[pending] = np.searchsorted(bounds, rng.random(len(pending)), side="right")
            pending = pending[np.isin(of_user[pending] + drawn[pending], taken)]
            if not len(pending):
                return drawn.reshape(-1, NEGATIVES)
        raise DataError("a user has taken nearly all that is popular: no negatives are left")

    def training(self, epochs: int, generator: torch.Generator) -> Batches:
        """All training events in another order each epoch, each with a negative.

        What fills no batch is left out of an epoch.
        """
        size = min(BATCH, len(self.train))
        steps = len(self.train) // size
        places = torch.stack(
            [
                self.train[
                    torch.randperm(len(self.train), generator=generator, device=self.device)
                ][: steps * size]
                for _ in range(epochs)
            ]
        ).view(-1, size)
        shape, options = (*places.shape, 1), {"generator": generator, "device": self.device}
        drawn = torch.rand(shape, dtype=torch.float64, **options)
        negatives = torch.searchsorted(self.popularity, drawn, right=True)
        return Batches(self, places, negatives, steps)

    def looking(self) -> Batches:
        """All tuning events, and then as many batches of test events.

        The last user stands again for those that a last batch lacks.
        """
        size = min(BATCH_OF_USERS, len(self.test))
        steps = -(-len(self.test) // size)
        users = torch.arange(steps * size, device=self.device).clamp(max=len(self.test) - 1)
        users = users.view(steps, size)
        places = torch.cat([self.tune[users], self.test[users]])
        negatives = torch.cat([self.negatives["tune"][users], self.negatives["test"][users]])
        return Batches(self, places, negatives, steps)


class Batches:
    """Batches of one shape, so that a CUDA graph can take the next one each time it is replayed.

    Users are added whose histories fill a batch up to as many rows as the largest has, with
    whatever events: they have a place in the batch, but no loss and no logits.

    Args:
        examples: of which they are.
        places: ``[S, B]`` of the events of all batches.
        negatives: ``[S, B, T - 1]``.
        steps: batches of an epoch, or of a stage.
    """

    def __init__(self, examples: Examples, places: Tensor, negatives: Tensor, steps: int) -> None:
        self.examples, self.steps = examples, steps
        self.places, self.negatives = places.int(), negatives.int()
        self.size = places.shape[1]
        totals = examples.lengths[places].sum(1)
        self.num_rows = int(totals.max())
        self.num_added = -(-(self.num_rows - int(totals.min())) // examples.max_history)
        self.step = torch.zeros(1, dtype=torch.int64, device=places.device)

    def next(self) -> tuple[Tensor, Tensor, Tensor]:
        """Items of histories, ``[N]``, their ``[B + added + 1]`` offsets, and the candidates.

        These are ``[B + added, T]``: an event and its negatives, each.
        """
        places = self.places.index_select(0, self.step).squeeze(0).long()
        negatives = self.negatives.index_select(0, self.step).squeeze(0).long()
        self.step += 1
        max_history, items = self.examples.max_history, self.examples.items
        ends = self.examples.lengths[places].cumsum(0)
        added = torch.arange(1, self.num_added + 1, device=ends.device) * max_history
        ends = torch.cat([ends, (ends[-1] + added).clamp(max=self.num_rows)])
        offsets = F.pad(ends, (1, 0))
        sample = JaggedLayout(offsets, self.num_rows).sample_ids()
        # An added user's rows are those of the log's begin.
        shift = F.pad(places - ends[: self.size], (0, self.num_added))
        rows = torch.arange(self.num_rows, device=ends.device)
        history = items[(rows + shift[sample]) % len(items)]
        candidates = torch.cat([items[places].unsqueeze(1), negatives], 1)
        return history, offsets, F.pad(candidates, (0, 0, 0, self.num_added))


class Replayed:
    """A function that is called again and again: on a GPU, a CUDA graph of it.

    Args:
        function: takes nothing and returns nothing; its shapes never change.
        generator: of what it draws, where it runs on a GPU.
    """

    def __init__(self, function: Callable[[], None], generator: torch.Generator) -> None:
        self.function, self.generator = function, generator
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls = 0

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        elif self.generator.device.type == "cuda":
            self._set_up()
        else:
            self.function()

    def _set_up(self) -> None:
        """Calls the function, at last captures it, and draws from its own generator in both."""
        default = torch.cuda.default_generators[torch.cuda.current_device()]
        with SETTING_UP:
            of_all = default.graphsafe_get_state()
            default.graphsafe_set_state(self.generator)
            try:
                if self.calls < EAGER_CALLS:
                    self.calls += 1
                    self.function()
                    return
                graph = captured(self.function)
            finally:
                default.graphsafe_set_state(of_all)
        self.graph = graph
        graph.replay()


def captured(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """On the thread's stream and of its memory; ``torch.cuda.graph`` waits for other threads."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(THREAD.pool, capture_error_mode="thread_local")
    try:
        function()
    finally:
        graph.capture_end()
    return graph


def start_thread() -> None:
    """Gives it a stream, and memory for its graphs, which one of them keeps for those to come."""
    torch.cuda.set_stream(torch.cuda.Stream())
    THREAD.pool = torch.cuda.graph_pool_handle()
    kept = torch.zeros(1, device="cuda") + 1  # kernels are loaded before they are captured
    with SETTING_UP:
        THREAD.graph = captured(lambda: kept + 1)


@functools.cache
def examples_of(data: str, max_history: int, device: str) -> Examples:
    """Made once in a process."""
    return Examples(read(data), max_history, torch.device(device))


def train(
    run: Run,
    device: str,
    dtype: torch.dtype = torch.float32,
    items: torch.nn.Module | None = None,
) -> dict[str, Any]:
    """A training's figures; for ``items`` see :class:`Ranker`."""
    start = time.perf_counter()
    generator = torch.Generator(device).manual_seed(run.seed)
    with SETTING_UP:
        examples = examples_of(run.data, run.max_history, device)
        torch.manual_seed(run.seed)
        model = Ranker(
            run.pooling, examples.num_items, run.width, run.half_life, run.max_history, items
        ).to(device, dtype)
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=run.lr,
        weight_decay=run.weight_decay,
        fused=True,
        capturable=device == "cuda",
    )
    training, looking = examples.training(run.epochs, generator), examples.looking()
    labels = torch.tensor([[1.0, 0.0]], dtype=dtype, device=device).expand(training.size, 2)
    logits = torch.empty(
        *looking.places.shape, 1 + NEGATIVES, dtype=dtype, device=looking.places.device
    )

    def learn() -> None:
        model.train()
        optimizer.zero_grad()
        scores = model(*training.next())[: training.size]
        F.binary_cross_entropy_with_logits(scores, labels).backward()
        optimizer.step()

    @torch.no_grad()
    def look() -> None:
        model.eval()
        step = looking.step.clone()
        scores = model(*looking.next())[: looking.size]
        logits.index_copy_(0, step, scores.unsqueeze(0))

    learn_next, look_next = Replayed(learn, generator), Replayed(look, generator)

    def scores_of(first: int) -> Scores:
        """Of a stage that begins with this batch."""
        looking.step.fill_(first)
        for _ in range(looking.steps):
            look_next()
        of_users = logits[first : first + looking.steps].flatten(0, 1)
        return rate(of_users[: len(examples.test)])

    def learn_epoch() -> float:
        """Its seconds."""
        begin = time.perf_counter()
        for _ in range(training.steps):
            learn_next()
        if device == "cuda":
            torch.cuda.current_stream().synchronize()
        return time.perf_counter() - begin

    tune_auc, scores, epoch, best_epoch = -1.0, Scores(0, 0, 0), 0, 0
    epochs: list[float] = []
    for epoch in range(1, run.epochs + 1):
        epochs.append(learn_epoch())
        auc = scores_of(0).auc
        if auc > tune_auc:
            tune_auc, best_epoch, scores = auc, epoch, scores_of(looking.steps)
        elif epoch - best_epoch >= PATIENCE:
            break
    return {
        **dataclasses.asdict(run),
        "tune_auc": tune_auc,
        **scores._asdict(),
        "best_epoch": best_epoch,
        "epochs_trained": epoch,
        "seconds": time.perf_counter() - start,
        "samples_per_s": training.steps * training.size / float(np.median(epochs)),
    }


KEY = [field.name for field in dataclasses.fields(Run)]


class Runs:
    """Trainings, some at a time; what is finished is in a file at once."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        self.csv, self.jobs, self.device = args.csv, args.jobs, device
        self.pool: concurrent.futures.Executor | None = None
        self.done: dict[Run, dict[str, Any]] = {}
        for row in finished(args.csv, [*KEY, "tune_auc", *Scores._fields]):
            self.done[Run(**{name: row[name] for name in KEY})] = row

    def results(self, runs: Iterable[Run]) -> pd.DataFrame:
        """A row for each of ``runs``; those that are not done are trained."""
        runs = list(runs)
        missing = [run for run in dict.fromkeys(runs) if run not in self.done]
        if self.jobs == 1 and self.device == "cpu":
            for run in missing:
                self._finish(run, train(run, self.device))
        elif missing:
            if self.pool is None:
                self.pool = workers(self.jobs, self.device)
            # The slowest poolings are the last of their list: they begin.
            started = {self.pool.submit(train, run, self.device): run for run in missing[::-1]}
            for future in concurrent.futures.as_completed(started):
                self._finish(started[future], future.result())
        return pd.DataFrame([self.done[run] for run in runs])

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def _finish(self, run: Run, figures: dict[str, Any]) -> None:
        self.done[run] = append(self.csv, figures, self.device)


def workers(jobs: int, device: str) -> concurrent.futures.Executor:
    """Threads that share a GPU, each on a stream; or processes, each with a generator."""
    if device == "cuda":
        return concurrent.futures.ThreadPoolExecutor(jobs, initializer=start_thread)
    return concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))


def taken_with(device: str) -> dict[str, str]:
    """What figures were taken with."""
    measured = stamp("torchrec", device=device)
    return {"device": measured.pop("gpu"), **measured}


def finished(csv: Path | None, columns: Iterable[str]) -> list[dict[str, Any]]:
    """The lines of a file that :func:`append` writes, if there is one.

    Raises:
        DataError: it lacks one of ``columns``.
    """
    if csv is None or not csv.exists():
        return []
    frame = pd.read_csv(csv, float_precision="round_trip")
    if missing := {*columns} - {*frame.columns}:
        raise DataError(f"--csv {csv} has no column {', '.join(sorted(missing))}")
    return frame.to_dict("records")


def append(csv: Path | None, figures: dict[str, Any], device: str) -> dict[str, Any]:
    """``figures`` and what they were taken with, which go to the end of a file, if one is named."""
    line = figures | taken_with(device)
    if csv is not None:
        row, begins = pd.DataFrame([line]), not csv.exists()
        csv.parent.mkdir(parents=True, exist_ok=True)
        if not begins:  # perhaps by an older version, with other columns
            row = row.reindex(columns=pd.read_csv(csv, nrows=0).columns)
        row.to_csv(csv, mode="a", header=begins, index=False)
    return line


def write(csv: Path, lines: Iterable[dict[str, Any]] | pd.DataFrame, device: str) -> None:
    """Write ``lines``, and what they were taken with, in a folder that is made if it must be."""
    csv.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(lines).assign(**taken_with(device)).to_csv(csv, index=False)


def compare(args: argparse.Namespace, runs: Runs) -> pd.DataFrame:
    """For each data set, history length and pooling: what was tuned, and the test's figures."""
    cases = list(itertools.product(args.data, args.max_history, args.poolings))
    chosen = {case: dict(UNTUNED) for case in cases}

    def run_of(case: tuple, seed: int, **tuned: float) -> Run:
        return Run(*case, seed=seed, epochs=args.epochs, width=args.width, **tuned)

    for name, values in GRID.items() if not args.quick else ():
        tuned = [case for case in cases if name != "half_life" or case[2] == "recency"]
        points = [(case, chosen[case] | {name: value}) for case in tuned for value in values]
        results = runs.results(run_of(case, 0, **point) for case, point in points)
        aucs = dict.fromkeys(tuned, -1.0)
        for (case, point), auc in zip(points, results.get("tune_auc", ()), strict=True):
            if auc > aucs[case]:
                aucs[case], chosen[case] = auc, point

    best = [(case, seed) for case in cases for seed in range(args.seeds)]
    return comparison(runs.results(run_of(case, seed, **chosen[case]) for case, seed in best))


def with_error(mean: float, error: float) -> str:
    """A figure, and its standard error if there is one."""
    return f"{mean:.4f}" if np.isnan(error) else f"{mean:.4f} ± {error:.4f}"


def print_comparison(frame: pd.DataFrame, console: Console) -> None:
    """A table for each data set and history length."""
    for (data, max_history), part in frame.groupby(["data", "max_history"], sort=False):
        table = Table(
            *("pooling", *SCORES.values(), "lr", "decay", "half-life", "samples/s"),
            title=f"{Path(data).name}, up to {max_history} events",
            box=None,
        )
        for row in part.to_dict("records"):
            table.add_row(
                row["pooling"],
                *(with_error(row[name], row[f"{name}_se"]) for name in SCORES),
                f"{row['lr']:g}",
                f"{row['weight_decay']:g}",
                f"{row['half_life']:g}" if row["pooling"] == "recency" else "–",
                f"{row['samples_per_s']:,.0f}" if row["samples_per_s"] > 0 else "–",
            )
        console.print(table)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # fmt: off
    parser.add_argument("--data", nargs="+", default=[MADE_UP], help=f"default: {MADE_UP}")
    parser.add_argument("--max-history", nargs="+", type=int, default=[50], help="newest events")
    parser.add_argument("--poolings", nargs="+", choices=POOLINGS, default=[*POOLINGS])
    parser.add_argument("--seeds", type=int, default=3, help="trainings of the best")
    parser.add_argument("--epochs", type=int, default=40, help="at most")
    parser.add_argument("--width", type=int, default=32, help="of embeddings")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--csv", type=writable_file,
                        help="of all trainings; those in it are not run again")
    parser.add_argument("--quick", action="store_true", help="nothing is tuned")
    # fmt: on
    args = parser.parse_args(argv)
    for name in ("seeds", "epochs", "jobs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.jobs > MOST_JOBS:
        parser.error(f"--jobs must be at most {MOST_JOBS}, got {args.jobs}")
    if min(args.max_history) < 1:
        parser.error(f"--max-history must be at least 1, got {min(args.max_history)}")
    if args.width < 4 or args.width % 4:
        parser.error(f"--width must be a multiple of 4, got {args.width}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        for data in args.data:
            read(data)
        with Runs(args, device) as runs:
            print_comparison(compare(args, runs), Console())
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
