"""Compare one ranking model trained on all events and on parts of them.

    python benchmarks/event_selection.py                            # synthetic events
    python benchmarks/event_selection.py --data data/ml-1m --csv event_selection.csv

A positive example is an event that converted, with the user's newest events before it as history.
Its negative example has another item, drawn by popularity. The last event of a user that converted
is in the test set, earlier ones in the training set. ``EventSelection`` removes events from the
histories before the lookups. The compared ways, each with a share of the events (budget):

    all         every event
    boosted     every event, with its relevance as prior weight
    relevance   the most relevant events: ``Relevance`` estimates the probability of conversion by
                dwell time and surface from the events of the training set
    newest      the newest events
    random      random events

Synthetic users are interested in a few kinds of items. Of their 200 events, three quarters are
noise: items of any kind with short dwell times, which rarely convert and are independent of the
user's interests. Dwell times and the share of noise depend on the surface. With --data, a folder of
MovieLens-1M in GroupLens' format, an event is a rating, which converts with at least four stars.
Its surface is the film's first genre. Its dwell time is the time to the user's next rating, because
this data set has no dwell times.

    ne          normalized entropy: cross-entropy of the test set, relative to the base rate
    auc         area under the ROC curve of the test set
    training    examples per second, of whole training steps
    inference   examples per second, without gradients

Each result is written to --csv at once; runs that the file already has are skipped.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))  # a checkout runs without being installed
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import movielens
import quality
from events import LONGEST_DWELL, DataError
from options import HelpFormatter, number, writable_file
from quality_models import rate
from selecting import ByRelevance, selection_of

from torchrec_jagged_attn import TargetAttentionConfig, TargetAttentionEmbeddingBagCollection
from torchrec_jagged_attn.events import EventBoosting, Relevance, boost_weights

WAYS = ("relevance", "newest", "random")
HISTORY = ["history", "surface", "dwell"]
KEY = ["data", "users", "events", "noise", "max_history", "width", "epochs", "batch_size", "lr",
       "way", "budget", "seed"]  # fmt: skip
"""Columns that identify a run."""
FIGURES = ["ne", "auc", "training, samples/s", "inference, samples/s"]
EVENTS, NOISE = 200, 0.75
"""Number of events per synthetic user, and the share of noise."""
KINDS, ITEMS_PER_KIND, SURFACES = 20, 20, 4
BUDGETS = (1.0, 0.5, 0.25, 0.125)
WIDTH, BATCH, LR = 32, 512, 5e-3


@dataclass(frozen=True)
class EventLog:
    """Events of all users, one user after the other, each from the oldest to the newest.

    Args:
        user, item, surface, dwell: ``[N]`` int64; dwell times in seconds.
        converted: ``[N]`` bool.
    """

    user: np.ndarray
    item: np.ndarray
    surface: np.ndarray
    dwell: np.ndarray
    converted: np.ndarray


def synthetic_log(users: int, events: int = EVENTS, noise: float = NOISE) -> EventLog:
    """Events of synthetic users with three interests each, and noise."""
    rng = np.random.default_rng(0)
    shape = (users, events)
    interests = rng.integers(KINDS, size=(users, 3))
    surface = rng.integers(SURFACES, size=shape)
    # Surfaces differ: both the share of noise and dwell times grow with the number of the surface.
    step = np.linspace(-1, 1, SURFACES)
    chance = np.clip(noise + 0.15 * step, 0, 1)[surface]
    is_noise = rng.random(shape) < chance
    liked_kind = np.take_along_axis(interests, rng.integers(3, size=shape), 1)
    kind = np.where(is_noise, rng.integers(KINDS, size=shape), liked_kind)
    typical = np.where(is_noise, 4.0, 40.0) * 2.0 ** step[surface]
    dwell = np.exp(np.log(typical) + 0.8 * rng.standard_normal(shape))
    return EventLog(
        user=np.repeat(np.arange(users), events),
        item=(kind * ITEMS_PER_KIND + rng.integers(ITEMS_PER_KIND, size=shape)).ravel(),
        surface=surface.ravel(),
        dwell=dwell.clip(max=LONGEST_DWELL).astype(np.int64).ravel(),
        converted=(rng.random(shape) < np.where(is_noise, 0.01, 0.4)).ravel(),
    )


def read_movielens(folder: Path, users: int | None = None) -> EventLog:
    """Read the ratings of the ``users`` with the lowest ids, by default of all users."""
    log = movielens.read_movielens(folder)
    genres = np.array([genres.partition("|")[0] for genres in movielens.read_films(folder)[1]])
    kept = log.user < (users or len(log.user))
    return EventLog(
        user=log.user[kept],
        item=np.unique(log.item[kept], return_inverse=True)[1],
        surface=np.unique(genres[log.item[kept]], return_inverse=True)[1],
        dwell=log.dwell[kept],
        converted=log.converted[kept],
    )


class Examples:
    """Training and test examples of a log, one for each event that converted and has a history.

    Args:
        log: the events.
        max_history: maximum number of events in a history, the newest ones.
        device: device of the batches.
        seed: seed of negatives and order.

    Attributes:
        train, test: ``[M]`` rows of the log.
        in_training: ``[N]`` bool: whether an event is before its user's test example.
    """

    def __init__(self, log: EventLog, max_history: int, device: str, seed: int) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(seed)
        starts = np.searchsorted(log.user, log.user)
        row = np.arange(len(log.user))
        positive = np.flatnonzero(log.converted & (row > starts))
        if not len(positive):
            raise DataError("no event that converted has another before it")
        is_last = np.append(np.diff(log.user[positive]) != 0, True)
        self.train = torch.from_numpy(positive[~is_last])
        self.test = torch.from_numpy(positive[is_last])
        if not len(self.train):
            raise DataError("no user has two events that converted, to train and to test on")
        self.lengths = torch.from_numpy(np.minimum(row - starts, max_history))
        self.item, self.surface, self.dwell = (
            torch.from_numpy(x) for x in (log.item, log.surface, log.dwell)
        )
        self.converted = torch.from_numpy(log.converted)
        self.num_items, self.num_surfaces = (int(x.max()) + 1 for x in (log.item, log.surface))
        last = np.full(int(log.user.max()) + 1, -1)
        last[log.user[positive[is_last]]] = positive[is_last]
        self.in_training = torch.from_numpy(row < last[log.user])

    def relevance(self) -> Relevance:
        """Fit the relevance to the events of the training set."""
        relevance = Relevance(self.num_surfaces, max_dwell=LONGEST_DWELL)
        rows = self.in_training
        relevance.update(self.dwell[rows], self.surface[rows], self.converted[rows])
        relevance.fit()
        return relevance.to(self.device)

    def batches(
        self, rows: Tensor, size: int, *, shuffled: bool
    ) -> Iterator[tuple[KeyedJaggedTensor, Tensor]]:
        """Yield features and labels, a negative for each positive example."""
        if shuffled:
            rows = rows[torch.randperm(len(rows), generator=self.generator)]
        for positives in rows.split(size // 2):
            drawn = torch.randint(len(self.item), (len(positives),), generator=self.generator)
            items = torch.cat([self.item[positives], self.item[drawn]])
            yield (
                self._features(items, positives.repeat(2)),
                (torch.arange(len(items)) < len(positives)).to(self.device, torch.float32),
            )

    def _features(self, items: Tensor, examples: Tensor) -> KeyedJaggedTensor:
        lengths = self.lengths[examples]
        rows = torch.arange(int(lengths.sum()))
        rows += torch.repeat_interleave(examples - lengths.cumsum(0), lengths)
        events = [x[rows] for x in (self.item, self.surface, self.dwell)]
        return KeyedJaggedTensor(
            ["item", *HISTORY],
            torch.cat([items, *events]),
            lengths=torch.cat([torch.ones_like(lengths), *[lengths] * len(HISTORY)]),
            length_per_key=[len(items), *[len(rows)] * len(HISTORY)],
        ).to(self.device)


def make_selection(way: str, budget: float, relevance: Relevance) -> nn.Module:
    """Return the module that selects or boosts the events of a batch."""
    by_relevance = ByRelevance(relevance, "dwell", "surface")
    if way == "all":
        return nn.Identity()
    if way == "boosted":
        return EventBoosting(HISTORY, lambda features: boost_weights(by_relevance(features)))
    return selection_of(way, budget, HISTORY, by_relevance)


class Ranker(nn.Module):
    """Attention of the candidate to selected or boosted events, and a network of two layers."""

    def __init__(self, num_items: int, width: int, selection: nn.Module, device: str) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t_item",
            embedding_dim=width,
            num_embeddings=num_items,
            feature_names=["item", "history"],
            init_fn=functools.partial(nn.init.normal_, std=width**-0.5),
        )
        attention = TargetAttentionConfig("item", "history", num_heads=2)
        self.selection = selection
        self.collection = TargetAttentionEmbeddingBagCollection(
            [table],
            [attention],
            isinstance(selection, EventBoosting),
            torch.device(device),
        )
        self.layers = nn.Sequential(nn.Linear(3 * width, 64), nn.ReLU(), nn.Linear(64, 1))
        self.layers.to(device)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Logits ``[B]``."""
        pooled = self.collection(self.selection(features))
        item, history = pooled["item"], pooled["history"]
        return self.layers(torch.cat([item, history, item * history], 1)).squeeze(1)


@torch.no_grad()
def evaluate(model: Ranker, examples: Examples, size: int) -> tuple[float, float]:
    """Return NE and AUC of the test set."""
    logits, labels = [], []
    examples.generator.manual_seed(1)  # the same negatives for all
    for features, batch_labels in examples.batches(examples.test, size, shuffled=False):
        logits.append(model(features))
        labels.append(batch_labels)
    auc, ne = rate(torch.cat(logits), torch.cat(labels))
    return ne, auc


def examples_per_second(
    call: Callable[[KeyedJaggedTensor, Tensor], object],
    batches: list[tuple[KeyedJaggedTensor, Tensor]],
    seconds: float,
) -> float:
    """Return the number of examples per second of ``call``, with batches in memory."""

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    for batch in batches:
        call(*batch)
    wait()
    count, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds:
        for features, labels in batches:
            call(features, labels)
            count += len(labels)
        wait()
    return count / spent


def compare(log: EventLog, args: argparse.Namespace, device: str) -> Iterator[dict[str, object]]:
    """Yield one line of results for each seed, way and budget."""
    examples = Examples(log, args.max_history, device, seed=0)
    relevance = examples.relevance()
    runs = [("all", 1.0), ("boosted", 1.0)] if 1.0 in BUDGETS else []
    runs += [(way, budget) for budget in BUDGETS if budget < 1 for way in WAYS]
    data = [
        "synthetic" if args.data is None else args.data.name,
        int(log.user[-1]) + 1,
        len(log.user),
        NOISE if args.data is None else 0.0,
    ]
    settings = [args.max_history, WIDTH, args.epochs, BATCH, LR]
    done = quality.finished(args.csv, [*KEY, *FIGURES])
    done = {tuple(line[name] for name in KEY): line for line in done}
    for seed in range(args.seeds):
        for way, budget in runs:
            key = (*data, *settings, way, budget, seed)
            if key not in done:
                figures = train(
                    examples, make_selection(way, budget, relevance), args, device, seed
                )
                line = dict(zip(KEY, key, strict=True)) | dict(zip(FIGURES, figures, strict=True))
                done[key] = quality.append(args.csv, line, device)
            yield done[key]


def train(
    examples: Examples, selection: nn.Module, args: argparse.Namespace, device: str, seed: int
) -> tuple[float, float, float, float]:
    """Train a model after ``selection``; return NE, AUC and rates, NaN without --seconds."""
    torch.manual_seed(seed)
    examples.generator.manual_seed(seed + 2)
    model = Ranker(examples.num_items, WIDTH, selection, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)

    def learn(features: KeyedJaggedTensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(features), labels).backward()
        optimizer.step()

    for _ in range(args.epochs):
        for batch in examples.batches(examples.train, BATCH, shuffled=True):
            learn(*batch)
    ne, auc = evaluate(model, examples, BATCH)
    if args.seconds == 0:
        return ne, auc, np.nan, np.nan
    timed = examples.batches(examples.train, BATCH, shuffled=True)
    batches = [batch for batch, _ in zip(timed, range(4), strict=False)]
    infer = torch.no_grad()(lambda features, _: model(features))
    return ne, auc, *(examples_per_second(f, batches, args.seconds) for f in (learn, infer))


def format_table(lines: pd.DataFrame) -> str:
    """Return means over seeds, the deviation of NE, and rates relative to all events."""
    by_run = lines.groupby(["way", "budget"], sort=False)
    table = by_run[FIGURES].mean()
    table.insert(1, "±", by_run["ne"].std())
    for figure in FIGURES[2:]:
        if ("all", 1.0) in table.index:
            table[f"{figure.partition(',')[0]}, ×"] = (
                table[figure] / table.loc[("all", 1.0), figure]
            )
    return table.dropna(axis=1, how="all").to_string(float_format="{:,.4g}".format, na_rep="–")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add, count = parser.add_argument, number(int, 1, 10**7)
    add("--data", type=Path, help="a folder of MovieLens-1M")
    add("--users", type=count, help="number of users, with the lowest ids; without --data, 1000")
    add(
        "--max-history", type=count, default=200, help="number of events to select from, the newest"
    )
    add("--epochs", type=count, default=10)
    add("--seeds", type=count, default=3)
    add("--seconds", type=number(float, 0, 3600), default=2,
        help="duration of a rate measurement; 0 to skip it")  # fmt: skip
    add("--csv", type=writable_file, help="file of all results; runs in it are skipped")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if args.data is None:
            log = synthetic_log(args.users or 1000, EVENTS, NOISE)
        else:
            log = read_movielens(args.data, args.users)
        lines = pd.DataFrame(list(compare(log, args, device)))
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    print(format_table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
