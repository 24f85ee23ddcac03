"""From requests to scores: checks requests, makes batches of them, keeps users' rows in between.

What a server needs beside the exported or compiled model; see serve_dlrm.py for what a request is.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchrec_jagged_attn import HistoryCache

T = TypeVar("T", int, list, dict)
TARGETS = ["item", "category"]
HISTORIES = ["item_history", "category_history"]
MAX_ROWS = 10_000
"""Of a request's history, and of its candidates."""
MAX_BYTES = 16 * 2**20
"""Of a request's file."""
MAX_COUNT = 2**63 - 1
KINDS = {int: "an integer from {} to {}", list: "a list of {} to {}", dict: "an object"}

CACHE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


class RequestError(Exception):
    """The request or the checkpoint cannot be used; the message says where and why."""


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
        user: who it is, as it was given; `None` where nobody asked.
        num_events: the user has had.
        dense: `[C, NUM_DENSE_FEATURES]`, normalised.
        candidates: ids by target.
        histories: ids by history, from the oldest event to the newest.
        users: one id for each feature of users.
    """

    user: int | None
    num_events: int
    dense: np.ndarray
    candidates: list[list[int]]
    histories: list[list[int]]
    users: list[int]


def make_cache(features: dict, device: torch.device) -> HistoryCache | None:
    """As the features of a checkpoint and the options of serve_dlrm.py say."""
    if features["cache"] is None:
        return None
    return HistoryCache(
        features["history_width"],
        min(features["max_history"], MAX_ROWS),
        capacity_bytes=features["cache_mib"] * 2**20,
        dtype=CACHE_DTYPES[features["cache"]],
        device=device,
    )


class Requests:
    """Checks requests, and makes batches of them.

    Args:
        features: of the checkpoint: ids per feature, and mean and deviation of dense features.
        device: of the tensors.
    """

    def __init__(self, features: dict, device: torch.device) -> None:
        self._cardinalities: dict[str, int] = features["cardinalities"]
        self._mean, self._std = (np.array(features[f"dense_{name}"]) for name in ("mean", "std"))
        self._user_keys = [name for name in self._cardinalities if name not in TARGETS]
        self._device = device
        self._nobody = Request(
            None, 0, np.zeros((1, len(self._mean))), [[0] for _ in TARGETS],
            [[] for _ in HISTORIES], [0 for _ in self._user_keys],
        )  # fmt: skip

    @property
    def keys(self) -> list[str]:
        """The features, in the order of `tensors`."""
        return [*TARGETS, *HISTORIES, *self._user_keys]

    def check(self, request: object, cache: HistoryCache | None = None) -> Request:
        """The request, with all that scoring reads of it.

        Args:
            request: of parsed JSON.
            cache: that it will be scored with, if there is one.

        Raises:
            RequestError: something is missing, of another kind, or out of range.
        """
        user = _field(request, "user", "the request", dict)
        history = _field(request, "history", "the request", list, most=MAX_ROWS)
        candidates = _field(request, "candidates", "the request", list, least=1, most=MAX_ROWS)
        num_events = _field(user, "events", "user", int)
        if cache is not None:
            least, most = (min(num_events, x) for x in (cache.max_history, MAX_ROWS))
            _field(request, "history", "the request", list, least, most)
        since_last = _field(user, "seconds_since_last", "user", int)
        counts = [
            [num_events, since_last, _field(candidate, "events", f"candidates[{index}]", int)]
            for index, candidate in enumerate(candidates)
        ]
        return Request(
            None if cache is None else _field(user, "id", "user", int),
            num_events,
            (np.log1p(counts) - self._mean) / self._std,
            *(
                [
                    [self._id(row, name, f"{where}[{index}]") for index, row in enumerate(some)]
                    for name in TARGETS
                ]
                for where, some in (("candidates", candidates), ("history", history))
            ),
            [self._id(user, name, "user") for name in self._user_keys],
        )

    def tensors(
        self, requests: Sequence[Request], lacks: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of `Scorer.forward` for a batch, with one request of nobody at its end.

        The exported model takes two requests, and candidates, or more.

        Args:
            requests: checked ones.
            lacks: how many of the newest events of each history to take; all by default.
        """
        requests = [*requests, self._nobody]
        if lacks is None:
            lacks = [len(request.histories[0]) for request in requests]
        histories = [
            [ids[len(ids) - lack :] for ids in request.histories]
            for request, lack in zip(requests, lacks, strict=True)
        ]
        columns = [
            *zip(*(request.candidates for request in requests), strict=True),
            *zip(*histories, strict=True),
            *zip(*([[id_] for id_ in request.users] for request in requests), strict=True),
        ]
        dense = np.concatenate([request.dense for request in requests])
        ids = [id_ for column in columns for ids in column for id_ in ids]
        lengths = [[len(ids) for ids in column] for column in columns]
        return (
            torch.tensor(dense, dtype=torch.float32, device=self._device),
            torch.tensor(ids, device=self._device),
            torch.tensor(lengths, device=self._device),
        )

    def _id(self, row: object, name: str, where: str) -> int:
        return _field(row, name, where, int, most=self._cardinalities[name] - 1)


class Server:
    """Scores batches of requests; for one thread at a time.

    Args:
        scorer: a `Scorer`, or what it was exported or compiled to.
        requests: for its features.
        cache: of users' rows, if the scorer takes histories from one.
    """

    def __init__(
        self,
        scorer: Callable[..., Tensor],
        requests: Requests,
        cache: HistoryCache | None = None,
    ) -> None:
        self._scorer, self._requests, self._cache = scorer, requests, cache

    def scores(self, some: Sequence[object]) -> list[np.ndarray | RequestError]:
        """Of each request its candidates' probabilities, or what is wrong with it.

        Args:
            some: requests, as JSON or parsed.
        """
        results: dict[int, np.ndarray | RequestError] = {}
        waiting: dict[int, Request] = {}
        for at, request in enumerate(some):
            try:
                parsed = parse(request) if isinstance(request, bytes) else request
                waiting[at] = self._requests.check(parsed, self._cache)
            except RequestError as error:
                results[at] = error
        while waiting:
            batch = waiting
            if self._cache is not None:  # of one user's requests, each in a batch of its own
                first = {x.user: at for at, x in reversed(waiting.items())}
                batch = {at: waiting[at] for at in sorted(first.values())[: self._cache.max_users]}
            waiting = {at: request for at, request in waiting.items() if at not in batch}
            results |= zip(batch, self._score(list(batch.values())), strict=True)
        return [results[at] for at in range(len(some))]

    @torch.no_grad()
    def _score(self, batch: list[Request]) -> list[np.ndarray]:
        """Of one request for each user."""
        if self._cache is None:
            scores = self._scorer(*self._requests.tensors(batch))
        else:
            users = [*(request.user for request in batch), None]
            num_events = [*(request.num_events for request in batch), 0]
            lacks, cached = self._cache.append(users, num_events)
            try:
                scores = self._scorer(*self._requests.tensors(batch, lacks), *cached)
            except BaseException:
                self._cache.remove(users)  # their new rows may not be there
                raise
        ends = [*accumulate(len(request.dense) for request in batch)]
        return np.split(scores.cpu().numpy(), ends)[: len(batch)]


def _field(
    row: object, name: str, where: str, kind: type[T], least: int = 0, most: int = MAX_COUNT
) -> T:
    """`row[name]`, an integer in a range, a list of as many members, or an object."""
    if not isinstance(row, dict):
        raise RequestError(f"{where} must be an object, got {reprlib.repr(row)}")
    value = row.get(name)
    # True is an int, too, but not of this type.
    if type(value) is not kind or not least <= (value if kind is int else len(value)) <= most:
        got = f"a list of {len(value)}" if isinstance(value, list) else reprlib.repr(value)
        expected = KINDS[kind].format(least, most)
        raise RequestError(f"{name} of {where} must be {expected}, got {got}")
    return value


def parse(content: bytes) -> Any:
    """What JSON holds; integers past 64 bits as text, for a message that names their field.

    Raises:
        RequestError: it is too large, or not JSON in UTF-8.
    """
    try:
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        return json.loads(
            content.decode(), parse_int=lambda text: int(text) if len(text) < 20 else text
        )
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request must be JSON in UTF-8: {error}") from None


def read_request(path: Path) -> object:
    """What the file holds.

    Raises:
        RequestError: the file cannot be read, is too large, or not JSON in UTF-8.
    """
    try:
        with path.open("rb") as file:
            return parse(file.read(MAX_BYTES + 1))
    except (OSError, RequestError) as error:
        raise RequestError(f"--request {path} cannot be read: {error}") from None
