"""Batches for a TorchRec model from a log of interactions of users with items.

A data source returns an `InteractionLog`. `Events` makes examples of its rows: each row is a
positive example, and items that the user has not taken are negative examples. The history of an
example is the user's *strictly earlier* rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

NUM_DENSE_FEATURES = 3
LONGEST_DWELL = 3600
"""Maximum dwell time in seconds that is derived from the pause before the next event."""
MAX_REDRAWS = 50
"""Maximum number of draws of a negative item that the user has not taken."""


class DataError(Exception):
    """The data cannot be used; the message says where, why, and what to do."""


@dataclass
class InteractionLog:
    """Rows `(user, item, time)`, sorted on creation by user and, within a user, by time.

    Args:
        user, item, time: int64 `[M]`; ids from 0, time in seconds.
        category: int64 `[num_items]`, one id per item.
        user_features: name -> int64 `[num_users]`, one id per user.
        dwell: int64 `[M]`, dwell times in seconds. By default the time to the user's next row, at
            most an hour, and 0 for the last row.
        converted: bool `[M]`, whether each row converted. By default all rows convert.
    """

    user: np.ndarray
    item: np.ndarray
    time: np.ndarray
    category: np.ndarray
    user_features: dict[str, np.ndarray]
    dwell: np.ndarray | None = None
    converted: np.ndarray | None = None

    def __post_init__(self) -> None:
        order = np.lexsort((self.time, self.user))
        self.user, self.item, self.time = self.user[order], self.item[order], self.time[order]
        if self.dwell is None:
            pause = np.diff(self.time, append=self.time[-1:]).clip(max=LONGEST_DWELL)
            self.dwell = np.where(np.diff(self.user, append=-1) == 0, pause, 0)
        else:
            self.dwell = self.dwell[order]
        if self.converted is None:
            self.converted = np.ones(len(order), dtype=bool)
        else:
            self.converted = self.converted[order]

    @property
    def num_items(self) -> int:
        return len(self.category)

    def cardinalities(self) -> dict[str, int]:
        """Return the number of ids of each feature, by name."""
        features = {"category": self.category, **self.user_features}
        return {"item": self.num_items} | {name: int(i.max()) + 1 for name, i in features.items()}


class Events:
    """Training and test examples from a log, split at one time.

    An example is a row of the log with a candidate item: the item that was taken (label 1), or an
    item that the user has not taken so far (label 0), drawn with its frequency in the training
    period. The example's history is the user's newest `max_history` rows strictly before the row's
    second, since rows of one second have no order.

    Args:
        log: the interactions.
        test_fraction: share of the rows, the latest, for the test.
        max_history: maximum number of history rows of an example.
        negatives: number of examples of label 0 per example of label 1.
        conversions: if True, only rows that converted are examples, and histories have dwell times,
            for a model that selects events.
        seed: random seed.

    Attributes:
        rows_of_training: rows of the log in the training period.
        train_rows, test_rows: rows of the log that are examples.

    Raises:
        DataError: there are no training or no test examples, or times are too far apart.
    """

    def __init__(
        self,
        log: InteractionLog,
        *,
        test_fraction: float = 0.1,
        max_history: int = 200,
        negatives: int = 1,
        conversions: bool = False,
        seed: int = 0,
    ) -> None:
        self.log, self.conversions = log, conversions
        self._negatives, self._seed = negatives, seed

        test_time = np.quantile(log.time, 1 - test_fraction, method="higher")
        is_test, is_example = log.time >= test_time, log.converted | (not conversions)
        self.rows_of_training = np.flatnonzero(~is_test)
        self.train_rows = np.flatnonzero(~is_test & is_example)
        self.test_rows = np.flatnonzero(is_test & is_example)
        if not len(self.train_rows) or not len(self.test_rows):
            raise DataError(
                f"{is_example.sum()} events leave {len(self.train_rows)} to train and "
                f"{len(self.test_rows)} to test on; give more, over a longer time"
            )

        new_second = np.ones(len(log.time), dtype=bool)
        new_second[1:] = (np.diff(log.user) != 0) | (np.diff(log.time) != 0)
        self.history_end = np.flatnonzero(new_second)[np.cumsum(new_second) - 1]
        user_start = np.searchsorted(log.user, log.user)
        self.history_start = np.maximum(user_start, self.history_end - max_history)

        seconds = int(log.time.max()) - int(log.time.min()) + 2
        if (int(log.user.max()) + 1) * log.num_items * seconds >= 2**63:
            raise DataError(
                f"users · items · seconds must be under 2**63, got {log.user.max() + 1} · "
                f"{log.num_items} · {seconds}; look for wrong times"
            )
        self._pairs = _Sightings(log.user * log.num_items + log.item, log.time)
        self._items = _Sightings(log.item, log.time)
        newest = np.maximum(self.history_end - 1, user_start)
        self._row_dense = np.stack([self.history_end - user_start, log.time - log.time[newest]])
        train = self._dense(self.train_rows, log.item[self.train_rows])
        self._dense_mean, self._dense_std = train.mean(0), train.std(0) + 1e-6

    def features(self) -> dict:
        """Return ids per feature, and statistics of dense features, for serving."""
        return {
            "cardinalities": self.log.cardinalities(),
            "dense_mean": self._dense_mean.tolist(),
            "dense_std": self._dense_std.tolist(),
        }

    def training(self, epoch: int, half_life: float | None = None) -> Examples:
        """Return all training examples, with new negatives in each epoch; see `Examples`."""
        rng = np.random.default_rng((self._seed, epoch))
        return self._examples(self.train_rows, rng, half_life)

    def testing(self, half_life: float | None = None) -> Examples:
        """Return all test examples, with the same negatives in each call."""
        return self._examples(self.test_rows, np.random.default_rng(self._seed), half_life)

    def _examples(
        self, rows: np.ndarray, rng: np.random.Generator, half_life: float | None
    ) -> Examples:
        negative_rows = np.repeat(rows, self._negatives)
        negatives = np.empty_like(negative_rows)
        pending = np.arange(len(negatives))
        for _ in range(MAX_REDRAWS):
            negatives[pending] = self.log.item[rng.choice(self.train_rows, len(pending))]
            pending = pending[self._taken(negative_rows[pending], negatives[pending])]

        row = np.concatenate([rows, np.delete(negative_rows, pending)])
        item = np.concatenate([self.log.item[rows], np.delete(negatives, pending)])
        dense = (self._dense(row, item) - self._dense_mean) / self._dense_std
        label = np.arange(len(row)) < len(rows)
        return Examples(self, row, item, label, dense, half_life)

    def _taken(self, row: np.ndarray, item: np.ndarray) -> np.ndarray:
        """Return whether the row's user has taken the item before or in the row's second."""
        pair = self.log.user[row] * self.log.num_items + item
        return self._pairs.count(pair, self.log.time[row] + 1) > 0

    def _dense(self, row: np.ndarray, item: np.ndarray) -> np.ndarray:
        """Return `[S, 3]`: earlier rows of user, seconds since the last, earlier rows of item."""
        seen = self._items.count(item, self.log.time[row])
        return np.log1p(np.stack([*self._row_dense[:, row], seen], axis=1))


class _Sightings:
    """Counts the occurrences of keys before given times."""

    def __init__(self, keys: np.ndarray, times: np.ndarray) -> None:
        self._first_time = int(times.min())
        self._span = int(times.max()) - self._first_time + 2
        self._sorted = np.sort(keys * self._span + times - self._first_time)

    def count(self, keys: np.ndarray, before: np.ndarray) -> np.ndarray:
        start = keys * self._span
        end = start + before - self._first_time
        return np.searchsorted(self._sorted, end) - np.searchsorted(self._sorted, start)


class Examples(Dataset):
    """Examples that are indexed with the positions of a whole batch.

    Args:
        events: the events whose log contains the histories.
        row, item, label: `[S]`, the log row, the candidate, and whether it was taken.
        dense: `[S, NUM_DENSE_FEATURES]`.
        half_life: if given, history rows have weights, which halve every `half_life` rows from the
            newest to the oldest and sum to one.
    """

    def __init__(
        self,
        events: Events,
        row: np.ndarray,
        item: np.ndarray,
        label: np.ndarray,
        dense: np.ndarray,
        half_life: float | None = None,
    ) -> None:
        log = events.log
        self.label = torch.from_numpy(label).float()
        self.dense = torch.from_numpy(dense).float()
        self.time = torch.from_numpy(log.time[row])
        self.user, self.item = torch.from_numpy(log.user[row]), torch.from_numpy(item)
        self.history_start = torch.from_numpy(events.history_start[row])
        self.history_end = torch.from_numpy(events.history_end[row])
        self._half_life = half_life
        self._category = torch.from_numpy(log.category)
        self._log_item = torch.from_numpy(log.item)
        self._log_category = self._category[self._log_item]
        self._log_dwell = torch.from_numpy(log.dwell) if events.conversions else None
        self._user_features = {
            name: torch.from_numpy(ids) for name, ids in log.user_features.items()
        }

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: Tensor | list[int]) -> Batch:
        """Return the batch of the examples at `index` `[B]`; histories are oldest first."""
        user, item, end = self.user[index], self.item[index], self.history_end[index]
        lengths = end - self.history_start[index]
        total = int(lengths.sum())

        def per_row(value: Tensor) -> Tensor:
            return torch.repeat_interleave(value, lengths, output_size=total)

        history = torch.arange(total) + per_row(end - lengths.cumsum(0))  # [N], rows of the log
        one = torch.ones_like(lengths)
        features = {
            "item": (item, one),
            "item_history": (self._log_item[history], lengths),
            "category": (self._category[item], one),
            "category_history": (self._log_category[history], lengths),
            **{name: (ids[user], one) for name, ids in self._user_features.items()},
        }
        if self._log_dwell is not None:
            features["dwell_history"] = self._log_dwell[history], lengths
        weights = None
        if self._half_life is not None:
            decay = 0.5 ** (1 / self._half_life)
            decayed = decay ** (per_row(end) - 1 - history)
            decayed *= per_row((1 - decay) / (1 - decay**lengths))
            weights = torch.cat(
                [decayed if rows is lengths else one.float() for _, rows in features.values()]
            )
        return Batch(
            dense_features=self.dense[index],
            sparse_features=KeyedJaggedTensor(
                keys=list(features),
                values=torch.cat([ids for ids, _ in features.values()]),
                lengths=torch.cat([rows for _, rows in features.values()]),
                weights=weights,
                # Computing it on a GPU would synchronize.
                length_per_key=[len(ids) for ids, _ in features.values()],
            ),
            labels=self.label[index],
        )


def training_batches(
    count: int, batch_size: int, *, seed: int, epoch: int, rank: int = 0, world_size: int = 1
) -> list[Tensor]:
    """Return this rank's share of each shuffled global batch; an incomplete batch is dropped.

    All ranks use the same order and take equal shares, so that the mean of their losses is the loss
    of one process with the whole batch.
    """
    shuffled = torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(count))
    full = count // batch_size * batch_size
    return list(shuffled[:full].view(-1, batch_size)[:, rank::world_size].contiguous())


def evaluation_batches(
    count: int, batch_size: int, *, rank: int = 0, world_size: int = 1
) -> list[Tensor]:
    """Return every `world_size`-th example from `rank` on, padded with the last example."""
    padded = torch.arange(-(-count // world_size) * world_size).clamp(max=count - 1)
    return list(padded[rank::world_size].split(batch_size // world_size))
