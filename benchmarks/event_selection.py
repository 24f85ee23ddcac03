"""Train one ranking model on parts of the events: by relevance, the newest, or any, and compare.

    python benchmarks/event_selection.py                            # of synthetic events
    python benchmarks/event_selection.py --data data/ml-1m --csv event_selection.csv

An example is an event that converted and the user's newest events before it, of which the model
sees a part, the budget; beside it stands one with another item, drawn by popularity. A user's
last event that converted is for the test, those before are for training. Events that are left out
are never looked up: ``EventSelection`` removes them first.

    all         every event
    boosted     every event, weighed by the probability to convert that ``relevance`` uses
    relevance   those that are likeliest to convert, by dwell time and surface, as ``Relevance``
                finds from the events of training
    newest      the newest
    random      any

Synthetic users follow a few kinds of items. Of their 200 events, three quarters are noise: of any
kind, looked at shortly, and hardly ever converting, they tell nothing of what the user will take.
How long events are looked at, and how many are noise, differs between surfaces. With --data, a
folder of MovieLens-1M in GroupLens' form, an event is a rating. It converts with four stars or
more. Its surface is the film's first genre. Its dwell time is the time to the user's next rating,
which is all that this log has.

    ne          cross-entropy of the test's examples, in that of the base rate
    auc         of all the test's examples
    training    examples a second, of whole steps
    inference   examples a second, without gradients

Finished trainings are written to --csv at once; those that are in it are not run again.
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
"""What tells a training from others."""
FIGURES = ["ne", "auc", "training, samples/s", "inference, samples/s"]
EVENTS, NOISE = 200, 0.75
"""Of each synthetic user, and the share of them that is noise."""
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


def make_up(users: int, events: int = EVENTS, noise: float = NOISE) -> EventLog:
    """Users with three interests each, and events that have nothing to do with these."""
    rng = np.random.default_rng(0)
    shape = (users, events)
    interests = rng.integers(KINDS, size=(users, 3))
    surface = rng.integers(SURFACES, size=shape)
    # From one surface to the next, noise is more likely, and all is looked at longer.
    step = np.linspace(-1, 1, SURFACES)
    chance = np.clip(noise + 0.15 * step, 0, 1)[surface]
    is_noise = rng.random(shape) < chance
    of_interest = np.take_along_axis(interests, rng.integers(3, size=shape), 1)
    kind = np.where(is_noise, rng.integers(KINDS, size=shape), of_interest)
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
    """Ratings of so many users with the lowest ids, or of all."""
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
    """A log on a device, whose events that converted are examples.

    Args:
        log: the events.
        max_history: newest events that an example may see.
        device: of all tensors.
        seed: of negatives and order.

    Attributes:
        train, test: ``[M]`` places of events, which have one before them.
    """

    def __init__(self, log: EventLog, max_history: int, device: str, seed: int) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(seed)
        starts = np.searchsorted(log.user, log.user)
        place = np.arange(len(log.user))
        positive = np.flatnonzero(log.converted & (place > starts))
        if not len(positive):
            raise DataError("no event that converted has another before it")
        is_last = np.append(np.diff(log.user[positive]) != 0, True)
        self.train = torch.from_numpy(positive[~is_last])
        self.test = torch.from_numpy(positive[is_last])
        if not len(self.train):
            raise DataError("no user has two events that converted, to train and to test on")
        self.lengths = torch.from_numpy(np.minimum(place - starts, max_history))
        self.item, self.surface, self.dwell = (
            torch.from_numpy(x) for x in (log.item, log.surface, log.dwell)
        )
        self.converted = torch.from_numpy(log.converted)
        self.num_items, self.num_surfaces = (int(x.max()) + 1 for x in (log.item, log.surface))
        # Of each user, events of training come before the last one that converted.
        last = np.full(int(log.user.max()) + 1, -1)
        last[log.user[positive[is_last]]] = positive[is_last]
        self.of_training = torch.from_numpy(place < last[log.user])

    def relevance(self) -> Relevance:
        """Fitted to the events of training."""
        relevance = Relevance(self.num_surfaces, max_dwell=LONGEST_DWELL)
        own = self.of_training
        relevance.update(self.dwell[own], self.surface[own], self.converted[own])
        relevance.fit()
        return relevance.to(self.device)

    def batches(
        self, places: Tensor, size: int, *, shuffled: bool
    ) -> Iterator[tuple[KeyedJaggedTensor, Tensor]]:
        """Features and labels, a negative beside each event; what fills no batch comes last."""
        if shuffled:
            places = places[torch.randperm(len(places), generator=self.generator)]
        for part in places.split(size // 2):
            drawn = torch.randint(len(self.item), (len(part),), generator=self.generator)
            items = torch.cat([self.item[part], self.item[drawn]])
            yield (
                self._features(items, part.repeat(2)),
                (torch.arange(len(items)) < len(part)).to(self.device, torch.float32),
            )

    def _features(self, items: Tensor, places: Tensor) -> KeyedJaggedTensor:
        lengths = self.lengths[places]
        rows = torch.arange(int(lengths.sum()))
        rows += torch.repeat_interleave(places - lengths.cumsum(0), lengths)
        of_events = [x[rows] for x in (self.item, self.surface, self.dwell)]
        return KeyedJaggedTensor(
            ["item", *HISTORY],
            torch.cat([items, *of_events]),
            lengths=torch.cat([torch.ones_like(lengths), *[lengths] * len(HISTORY)]),
            length_per_key=[len(items), *[len(rows)] * len(HISTORY)],
        ).to(self.device)


def reduced(way: str, budget: float, relevance: Relevance) -> nn.Module:
    """What makes of features what a model sees of them."""
    by_relevance = ByRelevance(relevance, "dwell", "surface")
    if way == "all":
        return nn.Identity()
    if way == "boosted":
        return EventBoosting(HISTORY, lambda features: boost_weights(by_relevance(features)))
    return selection_of(way, budget, HISTORY, by_relevance)


class Ranker(nn.Module):
    """Attention of the candidate to events as they are selected or boosted, and two layers."""

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
    """NE and AUC of the test."""
    logits, labels = [], []
    examples.generator.manual_seed(1)  # the same negatives for all
    for features, of_batch in examples.batches(examples.test, size, shuffled=False):
        logits.append(model(features))
        labels.append(of_batch)
    auc, ne = rate(torch.cat(logits), torch.cat(labels))
    return ne, auc


def examples_per_second(
    call: Callable[[KeyedJaggedTensor, Tensor], object],
    batches: list[tuple[KeyedJaggedTensor, Tensor]],
    seconds: float,
) -> float:
    """How many examples ``call`` takes in a second, of batches that are there."""

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
    """A line of the table for each seed, way and budget."""
    examples = Examples(log, args.max_history, device, seed=0)
    relevance = examples.relevance()
    runs = [("all", 1.0), ("boosted", 1.0)] if 1.0 in BUDGETS else []
    runs += [(way, budget) for budget in BUDGETS if budget < 1 for way in WAYS]
    of_log = [
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
            key = (*of_log, *settings, way, budget, seed)
            if key not in done:
                figures = train(examples, reduced(way, budget, relevance), args, device, seed)
                line = dict(zip(KEY, key, strict=True)) | dict(zip(FIGURES, figures, strict=True))
                done[key] = quality.append(args.csv, line, device)
            yield done[key]


def train(
    examples: Examples, selection: nn.Module, args: argparse.Namespace, device: str, seed: int
) -> tuple[float, float, float, float]:
    """NE, AUC and rates of a model that sees what ``selection`` leaves; NaN for no rates."""
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


def table_of(lines: pd.DataFrame) -> str:
    """Means over seeds, the deviation of NE, and rates also in those of all events."""
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
    add("--users", type=count, help="of the lowest ids; without --data, 1000")
    add("--max-history", type=count, default=200, help="newest events to select from")
    add("--epochs", type=count, default=10)
    add("--seeds", type=count, default=3)
    add("--seconds", type=number(float, 0, 3600), default=2,
        help="for which a rate is taken; 0 for no rates")  # fmt: skip
    add("--csv", type=writable_file, help="of all trainings; those in it are not run again")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if args.data is None:
            log = make_up(args.users or 1000, EVENTS, NOISE)
        else:
            log = read_movielens(args.data, args.users)
        lines = pd.DataFrame(list(compare(log, args, device)))
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    print(table_of(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
