"""Train one ranking model with different poolings of the history, all tuned alike, and compare.

    python benchmarks/quality.py --data data/ml-1m video_games.txt.gz --csv quality.csv
    python benchmarks/quality.py --poolings mean attention          # of made-up data

Data are folders of MovieLens-1M in GroupLens' form, or of KuaiRand's logs; Taobao's user behavior,
a CSV; or files of ``user item`` lines in order of time. ``PATH@1000`` takes the 1000 users of the
lowest ids. A user's last event is for the test, the one before it for tuning, those before train.
An example is an event and the user's newest events before it; events of one second are in the order
of the file. While training, each event has one negative beside it, drawn by popularity; in tuning
and test, an event has 49, never taken before.

Each pooling is tuned on the same grid, by the AUC of the tuning events with seed 0: learning rate
and weight decay of Adam, and then the half-life of recency pooling. All stop early by these events,
too. The best run again with each seed, and on the test events. Finished runs are written to --csv
at once; those that are in it are not run again.

    auc       share of an event's negatives that score below it, mean of all users, that is, grouped
              by user (gAUC); ties count half
    hr@10     share of events among the 10 best of their 50 candidates
    ne        cross-entropy of all candidates, in that of the base rate
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import gzip
import importlib.metadata
import multiprocessing
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator
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
from quality_logs import first_users, is_kuairand, is_taobao, read_kuairand, read_taobao
from quality_models import POOLINGS, Ranker

import torchrec_jagged_attn

MADE_UP = "made-up"
NEGATIVES = 49  # beside an event that is looked at, 1 while training
BATCH = 1024
GRID = {"lr": (1e-3, 3e-3, 1e-2), "weight_decay": (0.0, 1e-5, 1e-4)}
HALF_LIVES = (1.5, 3.0, 6.0, 12.0, 20.0, 40.0)
HALF_LIFE = 6.0  # while the others are tuned
PATIENCE = 4  # epochs without a better AUC; the first may be spent on a slow start


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
    """One training.

    Attributes:
        stage: ``"tune"``, or ``"test"``, which looks at the test events at last.
    """

    data: str
    max_history: int
    pooling: str
    stage: str
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
    ahead = (negatives >= positive).sum(1)
    base = 1 / logits.shape[1]
    labels = torch.zeros_like(logits, dtype=torch.float64)
    labels[:, 0] = 1
    corrected = logits.double() + np.log(base / (1 - base))
    entropy = F.binary_cross_entropy_with_logits(corrected, labels)
    of_base = -(base * np.log(base) + (1 - base) * np.log(1 - base))
    return Scores(
        below.mean().item(), (ahead < 10).double().mean().item(), entropy.item() / of_base
    )


class Examples:
    """A log as batches on a device, built there by arithmetic of indices.

    Attributes:
        train: ``[M]`` places of training events that have one before them.
        tune, test: ``[U]`` places of the events that are looked at.
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

        self.items, self.begins = to(log.items), to(begins[user])
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
        taken = np.concatenate(
            [
                u * log.num_items + log.items[log.offsets[u] : place + 1]
                for u, place in enumerate(places)
            ]
        )
        taken = np.unique(taken)
        users = np.arange(len(places))[:, None] * log.num_items
        bounds = np.cumsum(counts) / counts.sum()
        drawn = np.searchsorted(bounds, rng.random((len(places), NEGATIVES)), side="right")
        for _ in range(1000):
            wrong = np.isin(users + drawn, taken)
            if not wrong.any():
                return drawn
            drawn[wrong] = np.searchsorted(bounds, rng.random(wrong.sum()), side="right")
        raise DataError("a user has taken nearly all that is popular: no negatives are left")

    def history(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Items of the newest events before ``places``, ``[N]``, and ``[B + 1]`` offsets."""
        lengths = (places - self.begins[places]).clamp(max=self.max_history)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        rows = torch.arange(int(offsets[-1]), device=self.device)
        return self.items[rows + (places - offsets[1:]).repeat_interleave(lengths)], offsets

    def batches(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """An epoch: history, offsets, and ``[B, 2]`` of an event and a negative."""
        order = torch.randperm(len(self.train), generator=generator, device=self.device)
        for places in self.train[order].split(BATCH):
            drawn = torch.rand(len(places), generator=generator, device=self.device)
            drawn = torch.searchsorted(self.popularity, drawn.double(), right=True)
            events = self.items[places]
            yield *self.history(places), torch.stack([events, drawn], 1)

    def looked_at(self, stage: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """History, offsets, and ``[B, 50]`` of an event and its negatives."""
        places = self.tune if stage == "tune" else self.test
        for some, negatives in zip(
            places.split(256), self.negatives[stage].split(256), strict=True
        ):
            candidates = torch.cat([self.items[some].unsqueeze(1), negatives], 1)
            yield *self.history(some), candidates


def evaluate(model: Ranker, examples: Examples, stage: str) -> Scores:
    """Of all users."""
    model.eval()
    with torch.no_grad():
        return rate(torch.cat([model(*batch) for batch in examples.looked_at(stage)]))


@functools.cache
def examples_of(data: str, max_history: int, device: str) -> Examples:
    """Made once in a process."""
    return Examples(read(data), max_history, torch.device(device))


def train(run: Run, device: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A training's figures, by the events of its stage."""
    start = time.perf_counter()
    examples = examples_of(run.data, run.max_history, device)
    torch.manual_seed(run.seed)
    model = Ranker(run.pooling, examples.num_items, run.width, run.half_life).to(device, dtype)
    generator = torch.Generator(device).manual_seed(run.seed)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=run.lr, weight_decay=run.weight_decay, fused=device == "cuda"
    )
    best, kept, epoch, best_epoch = -1.0, {}, 0, 0
    for epoch in range(1, run.epochs + 1):
        model.train()
        for history, offsets, candidates in examples.batches(generator):
            logits = model(history, offsets, candidates)
            labels = torch.zeros_like(logits)
            labels[:, 0] = 1
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(logits, labels).backward()
            optimizer.step()
        auc = evaluate(model, examples, "tune").auc
        if auc > best:
            best, best_epoch = auc, epoch
            kept = {name: x.clone() for name, x in model.state_dict().items()}
        elif epoch - best_epoch >= PATIENCE:
            break
    model.load_state_dict(kept)
    scores = evaluate(model, examples, run.stage)
    return {
        **dataclasses.asdict(run),
        **scores._asdict(),
        "best_epoch": best_epoch,
        "seconds": time.perf_counter() - start,
    }


KEY = [field.name for field in dataclasses.fields(Run)]


class Runs:
    """Trainings, by some processes at a time; what is finished is in a file at once."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        self.csv, self.jobs, self.device = args.csv, args.jobs, device
        self.pool: concurrent.futures.Executor | None = None
        self.done: dict[Run, dict[str, Any]] = {}
        if args.csv is not None and args.csv.exists():
            for row in pd.read_csv(args.csv, float_precision="round_trip").to_dict("records"):
                self.done[Run(**{name: row[name] for name in KEY})] = row

    def results(self, runs: Iterable[Run]) -> pd.DataFrame:
        """Of all ``runs``; those that are not done are trained."""
        runs = list(dict.fromkeys(runs))
        missing = [run for run in runs if run not in self.done]
        if self.jobs == 1:
            for run in missing:
                self._finish(run, train(run, self.device))
        elif missing:
            if self.pool is None:
                context = multiprocessing.get_context("spawn")
                self.pool = concurrent.futures.ProcessPoolExecutor(self.jobs, context)
            started = {self.pool.submit(train, run, self.device): run for run in missing}
            for future in concurrent.futures.as_completed(started):
                self._finish(started[future], future.result())
        return pd.DataFrame([self.done[run] for run in runs])

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def _finish(self, run: Run, figures: dict[str, Any]) -> None:
        self.done[run] = figures | stamp(self.device)
        if self.csv is not None:
            row = pd.DataFrame([self.done[run]])
            row.to_csv(self.csv, mode="a", header=not self.csv.exists(), index=False)


def stamp(device: str) -> dict[str, str]:
    """What figures were taken with."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "torchrec": importlib.metadata.version("torchrec"),
        "torchrec_jagged_attn": torchrec_jagged_attn.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def compare(args: argparse.Namespace, runs: Runs) -> pd.DataFrame:
    """For each data set, history length and pooling: what was tuned, and the test's figures."""
    cases = [
        (data, max_history, pooling)
        for data in args.data
        for max_history in args.max_history
        for pooling in args.poolings
    ]
    grid = [
        {"lr": lr, "weight_decay": weight_decay}
        for lr in (GRID["lr"] if not args.quick else (3e-3,))
        for weight_decay in (GRID["weight_decay"] if not args.quick else (1e-5,))
    ]

    def run_of(case: tuple, stage: str, seed: int, half_life: float = HALF_LIFE, **tuned) -> Run:
        return Run(
            *case, stage=stage, half_life=half_life, seed=seed, epochs=args.epochs,
            width=args.width, **tuned,
        )  # fmt: skip

    def best(results: pd.DataFrame, case: tuple) -> dict[str, float]:
        of_case = results[(results[["data", "max_history", "pooling"]] == case).all(axis=1)]
        row = of_case.loc[of_case["auc"].idxmax()]
        return {name: float(row[name]) for name in ("lr", "weight_decay", "half_life")}

    tuned = runs.results(run_of(case, "tune", 0, **point) for case in cases for point in grid)
    chosen = {case: best(tuned, case) for case in cases}
    of_recency = [case for case in cases if case[2] == "recency"]
    half_lives = HALF_LIVES if not args.quick else HALF_LIVES[:1]
    if of_recency:
        tuned = runs.results(
            run_of(case, "tune", 0, **chosen[case] | {"half_life": half_life})
            for case in of_recency
            for half_life in half_lives
        )
        chosen |= {case: best(tuned, case) for case in of_recency}
    tested = runs.results(
        run_of(case, "test", seed, **chosen[case]) for case in cases for seed in range(args.seeds)
    )
    rows = []
    for case in cases:
        of_case = tested[(tested[["data", "max_history", "pooling"]] == case).all(axis=1)]
        row = dict(zip(("data", "max_history", "pooling"), case, strict=True)) | chosen[case]
        for name in (*Scores._fields, "seconds"):
            row[name] = of_case[name].mean()
            row[f"{name}_se"] = of_case[name].sem() if len(of_case) > 1 else float("nan")
        rows.append(row)
    return pd.DataFrame(rows)


def with_error(mean: float, error: float) -> str:
    """A figure, and its standard error if there is one."""
    return f"{mean:.4f}" if np.isnan(error) else f"{mean:.4f} ± {error:.4f}"


def print_comparison(frame: pd.DataFrame, console: Console) -> None:
    """A table for each data set and history length."""
    for (data, max_history), part in frame.groupby(["data", "max_history"], sort=False):
        table = Table(
            *("pooling", "AUC", "HR@10", "NE", "lr", "decay", "half-life", "s"),
            title=f"{Path(data).name}, up to {max_history} events",
            box=None,
        )
        for row in part.to_dict("records"):
            table.add_row(
                row["pooling"],
                *(with_error(row[name], row[f"{name}_se"]) for name in Scores._fields),
                f"{row['lr']:g}",
                f"{row['weight_decay']:g}",
                f"{row['half_life']:g}" if row["pooling"] == "recency" else "–",
                f"{row['seconds']:.0f}",
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
    parser.add_argument("--seeds", type=int, default=3, help="tests of each pooling")
    parser.add_argument("--epochs", type=int, default=20, help="at most")
    parser.add_argument("--width", type=int, default=32, help="of embeddings")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--csv", type=Path, help="of all trainings; those in it are not run again")
    parser.add_argument("--quick", action="store_true", help="one point of the grid")
    # fmt: on
    args = parser.parse_args(argv)
    for name in ("seeds", "epochs", "jobs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
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
