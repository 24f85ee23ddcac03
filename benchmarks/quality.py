"""Compare the AUC of one ranking model with different poolings of the history, all tuned.

    python benchmarks/quality.py --csv quality.csv                  # synthetic data
    python benchmarks/quality.py --data data/ml-1m video_games.txt.gz synthetic --jobs 14 --csv F

As in production, each model is trained on all examples once, in order of time. Tables have row-wise
Adagrad and TorchRec's initial values, the other layers AdamW. The first 80 % of the time are for
training. In the last 20 %, each batch is scored before the model is trained on it (progressive
validation): the first half is for tuning, the second half is the test set.

A positive example is an event, with the user's earlier events as the history. Its negative example
has another item that is new to the user, drawn by popularity in training time. Data are

    a folder of MovieLens-1M in GroupLens' format, with genre, gender, age, occupation, the length
    of the history, the time since the newest event, and the number of earlier events of the item;

    a file of lines ``user item``, each user's in order of time, without features. Event ``i`` of
    ``n`` of a user has the time ``(i + u) / n``, with uniform ``u``, so that the test set has the
    last tenth of every user's events; or

    ``synthetic``: the data of ``examples/train_dlrm.py``, with features like MovieLens.

``PATH@1000`` selects the 1000 users with the lowest ids.

Each pooling is tuned on the same grid with seed 0, by the AUC of the tuning events: first learning
rates, then the half-life of recency pooling, then at most one regularizer. The best settings are
trained with the other seeds, which also change the negatives. Finished trainings are appended to
--csv at once and not repeated. --jobs processes share the device.
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
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))  # a checkout runs without being installed
sys.path.append(str(Path(__file__).parents[1] / "examples"))

from events import NUM_DENSE_FEATURES, DataError, Events, Examples, InteractionLog
from movielens import read_movielens
from options import HelpFormatter, number, writable_file
from planted import planted_log
from quality_models import POOLINGS, Ranker, Run, rate
from quality_results import TUNED, comparison
from stamps import stamp

SYNTHETIC, SYNTHETIC_USERS = "synthetic", 4000
DENSE_LRS, TABLE_LRS = (1e-3, 3e-3, 1e-2), (0.06, 0.2, 0.6)
HALF_LIVES = (1.5, 3.0, 6.0, 12.0, 24.0)
REGULARIZERS = {"dropout": 0.2, "weight_decay": 0.1, "table_decay": 1e-2}
"""Tuned settings, in this order: both learning rates jointly, then each of the others."""
KEY = [field.name for field in dataclasses.fields(Run)]


def read_lines(path: Path) -> InteractionLog:
    """Read lines ``user item``, each user's in order of time, from a text or gzip file."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        words = [line.split() for line in file]
    for i, line in enumerate(words, 1):
        if len(line) != 2 or not all(word.isdecimal() for word in line):
            raise DataError(f"{path}:{i}: expected two numbers, user item; got {' '.join(line)!r}")
    if not words:
        raise DataError(f"{path} has no line")
    user, item = np.array(words, dtype=np.int64).T
    order = np.argsort(user, kind="stable")
    _, user, counts = np.unique(user[order], return_inverse=True, return_counts=True)
    _, item = np.unique(item[order], return_inverse=True)
    position = np.arange(len(user)) - (np.cumsum(counts) - counts)[user]
    phase = np.random.default_rng(0).random(len(counts))[user]
    times = ((position + phase) / counts[user] * 1e6).astype(np.int64)
    return InteractionLog(user, item, times, np.zeros(item.max() + 1, dtype=np.int64), {})


def first_users(log: InteractionLog, count: int) -> InteractionLog:
    """Return the events of the ``count`` users with the lowest ids."""
    kept = log.user < count
    columns = {name: getattr(log, name)[kept] for name in ("user", "item", "time")}
    return dataclasses.replace(log, **columns, dwell=None, converted=None)


@functools.cache
def read(source: str) -> InteractionLog:
    """Return the log named ``source``."""
    name, _, count = source.rpartition("@") if re.search(r"@\d+$", source) else (source, "", "")
    path = Path(name)
    if name == SYNTHETIC:
        return planted_log(num_users=int(count or SYNTHETIC_USERS))
    if not path.exists():
        raise DataError(
            f"--data must be {SYNTHETIC!r}, a folder of MovieLens-1M, or a file, each optionally "
            f"with @ and a number of users; got {source!r}"
        )
    log = read_movielens(path) if path.is_dir() else read_lines(path)
    return first_users(log, int(count)) if count else log


@functools.cache
def load_events(data: str, max_history: int, seed: int) -> Events:
    """Return the events of a log, cached per process."""
    return Events(read(data), test_fraction=0.2, max_history=max_history, seed=seed)


class Trainer:
    """A model and its optimizers.

    Args:
        run: settings of the training.
        events: events of the data of ``run``.
        device: ``"cuda"`` or ``"cpu"``.
    """

    def __init__(self, run: Run, events: Events, device: str) -> None:
        self.run, self.device = run, device
        torch.manual_seed(run.seed)
        cardinalities = {name: n for name, n in events.log.cardinalities().items() if n > 1}
        num_dense = NUM_DENSE_FEATURES if len(cardinalities) > 1 else 0
        self.model = Ranker(run, cardinalities, num_dense).to(device)
        self.tables = [*self.model.tables.parameters()]
        tables = {*self.tables}
        others = [value for value in self.model.parameters() if value not in tables]
        self.optimizers = [
            RowWiseAdagrad(self.tables, lr=run.table_lr),
            torch.optim.AdamW(others, lr=run.dense_lr, weight_decay=run.weight_decay),
        ]

    def batches(self, examples: Examples) -> Iterator[Batch]:
        """Yield ``examples`` in order of time."""
        for index in examples.time.argsort(stable=True).split(self.run.batch_size):
            yield examples[index].to(torch.device(self.device))

    def learn(self, batch: Batch) -> None:
        """Train one step."""
        self.model.train()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        logits = self.model(batch.dense_features, batch.sparse_features)
        F.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        if self.run.table_decay > 0:
            with torch.no_grad():
                torch._foreach_mul_(self.tables, 1 - self.run.table_lr * self.run.table_decay)

    @torch.no_grad()
    def score(self, batch: Batch) -> Tensor:
        """Return logits ``[B]``, without dropout."""
        self.model.eval()
        return self.model(batch.dense_features, batch.sparse_features)


def train(run: Run, device: str) -> dict[str, Any]:
    """Train a model and return its settings and figures."""
    start = time.perf_counter()
    torch.set_num_threads(1)
    events = load_events(run.data, run.max_history, run.seed)
    trainer = Trainer(run, events, device)
    for batch in trainer.batches(events.training(0)):
        trainer.learn(batch)
    logits, labels = [], []
    for batch in trainer.batches(events.testing()):
        logits.append(trainer.score(batch))
        labels.append(batch.labels)
        trainer.learn(batch)
    halves = zip(*(torch.cat(x).tensor_split(2) for x in (logits, labels)), strict=True)
    (tune_auc, _), (auc, ne) = (rate(*half) for half in halves)
    seconds = time.perf_counter() - start
    figures = {"tune_auc": tune_auc, "auc": auc, "ne": ne, "seconds": seconds}
    return dataclasses.asdict(run) | figures


def finished(csv: Path | None, columns: Iterable[str]) -> list[dict[str, Any]]:
    """Return the lines of a file of :func:`append`, if it exists.

    Raises:
        DataError: the file lacks one of ``columns``.
    """
    if csv is None or not csv.exists():
        return []
    frame = pd.read_csv(csv, float_precision="round_trip")
    if missing := {*columns} - {*frame.columns}:
        raise DataError(f"--csv {csv} has no column {', '.join(sorted(missing))}")
    return frame.to_dict("records")


def append(csv: Path | None, figures: dict[str, Any], device: str) -> dict[str, Any]:
    """Append ``figures``, with hardware, versions and date, to a file, and return the line."""
    measured = stamp("torchrec", device=device)
    line = figures | {"device": measured.pop("gpu"), **measured}
    if csv is not None:
        row, begins = pd.DataFrame([line]), not csv.exists()
        csv.parent.mkdir(parents=True, exist_ok=True)
        if not begins:  # an older version may have written other columns
            row = row.reindex(columns=pd.read_csv(csv, nrows=0).columns)
        row.to_csv(csv, mode="a", header=begins, index=False)
    return line


class Runs:
    """Results of trainings by their settings.

    Args:
        csv: file of finished trainings, to which others are appended.
        jobs: number of processes, which share the device.
        device: ``"cuda"`` or ``"cpu"``.
    """

    def __init__(self, csv: Path | None, jobs: int, device: str) -> None:
        self.csv, self.device, self.pool = csv, device, None
        lines = finished(csv, [*KEY, "tune_auc", "auc"])
        self.done = {Run(**{name: line[name] for name in KEY}): line for line in lines}
        if jobs > 1:
            spawn = multiprocessing.get_context("spawn")
            self.pool = concurrent.futures.ProcessPoolExecutor(jobs, spawn)

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def train(self, runs: Iterable[Run]) -> None:
        """Train the unfinished ``runs``."""
        missing = [run for run in dict.fromkeys(runs) if run not in self.done]
        if self.pool is None:
            for run in missing:
                self.done[run] = append(self.csv, train(run, self.device), self.device)
            return
        started = {self.pool.submit(train, run, self.device): run for run in missing}
        for future in concurrent.futures.as_completed(started):
            self.done[started[future]] = append(self.csv, future.result(), self.device)


def learning_rates(run: Run) -> list[Run]:
    """Return ``run`` with each pair of learning rates."""
    pairs = itertools.product(DENSE_LRS, TABLE_LRS)
    return [dataclasses.replace(run, dense_lr=a, table_lr=b) for a, b in pairs]


def half_lives(run: Run) -> list[Run]:
    """Return ``run`` with each half-life, for recency pooling only."""
    is_recency = run.pooling == "recency"
    return [dataclasses.replace(run, half_life=x) for x in HALF_LIVES if is_recency]


def regularizers(run: Run) -> list[Run]:
    """Return ``run`` with each regularizer."""
    return [dataclasses.replace(run, **{name: value}) for name, value in REGULARIZERS.items()]


def compare(args: argparse.Namespace, runs: Runs) -> pd.DataFrame:
    """Tune each pooling on each data set, and train the best settings with all seeds."""
    best = [Run(data, name) for data, name in itertools.product(args.data, args.poolings)]
    for stage in (learning_rates, half_lives, regularizers):
        tried = [[run, *stage(run)] for run in best]
        runs.train(itertools.chain(*tried))
        best = [
            max(case_trainings, key=lambda run: runs.done[run]["tune_auc"])
            for case_trainings in tried
        ]
    chosen = [dataclasses.replace(run, seed=seed) for run in best for seed in range(args.seeds)]
    runs.train(chosen)
    return comparison(pd.DataFrame([runs.done[run] for run in chosen]))


def format_table(frame: pd.DataFrame) -> str:
    """Return a table with a line for each data set and pooling."""
    scores = {}
    for head, name, form in (("AUC", "auc", "{:.4f}"), ("minus recency", "ahead", "{:+.4f}")):
        errors = frame[f"{name}_se"].map(" ± {:.4f}".format)
        scores[head] = frame[name].map(form.format) + errors
    labels = {"data": frame["data"].map(lambda data: Path(data).name), "pooling": frame["pooling"]}
    return pd.DataFrame({**labels, **scores, **frame[TUNED]}).to_string(index=False)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--data", nargs="+", default=[SYNTHETIC], help="as above")
    parser.add_argument("--poolings", nargs="+", choices=POOLINGS, default=[*POOLINGS])
    parser.add_argument("--seeds", type=number(int, 1, 1000), default=3, help="number of seeds")
    parser.add_argument("--jobs", type=number(int, 1, 256), default=1, help="parallel trainings")
    parser.add_argument("--csv", type=writable_file, help="file of all trainings")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        for data in args.data:
            read(data)
        with Runs(args.csv, args.jobs, "cuda" if torch.cuda.is_available() else "cpu") as runs:
            print(format_table(compare(args, runs)))
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
