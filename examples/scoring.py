"""Checks requests, converts them to batches and scores them.

A server needs this file and the exported or compiled model. serve_dlrm.py documents requests.
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

T = TypeVar("T", int, list, dict)
TARGETS = ["item", "category"]
HISTORIES = ["item_history", "category_history"]
MAX_ROWS = 10_000
"""Maximum number of events, and of candidates, of a request."""
MAX_BYTES = 16 * 2**20
"""Maximum size of a request."""
MAX_COUNT = 2**63 - 1
KINDS = {int: "an integer from {} to {}", list: "a list of {} to {}", dict: "an object"}


class RequestError(Exception):
    """A request or checkpoint cannot be used; the message says where and why."""


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
        dense: `[C, NUM_DENSE_FEATURES]`, normalized.
        candidates: ids of each target feature.
        histories: ids of each history feature, from the oldest event to the newest.
        users: one id per user feature.
    """

    dense: np.ndarray
    candidates: list[list[int]]
    histories: list[list[int]]
    users: list[int]


class Requests:
    """Checks requests and converts them to batches.

    Args:
        features: features of the checkpoint: ids per feature, mean and deviation of dense features.
        device: device of the tensors.
    """

    def __init__(self, features: dict, device: torch.device) -> None:
        self._cardinalities: dict[str, int] = features["cardinalities"]
        self._mean, self._std = (np.array(features[f"dense_{name}"]) for name in ("mean", "std"))
        self._user_keys = [name for name in self._cardinalities if name not in TARGETS]
        self._device = device
        self._dummy = Request(
            np.zeros((1, len(self._mean))), [[0] for _ in TARGETS], [[] for _ in HISTORIES],
            [0 for _ in self._user_keys],
        )  # fmt: skip

    @property
    def keys(self) -> list[str]:
        """Features, in the order of `tensors`."""
        return [*TARGETS, *HISTORIES, *self._user_keys]

    def check(self, request: object) -> Request:
        """Check a request, given as parsed JSON.

        Raises:
            RequestError: a field is missing, of another type, or out of range.
        """
        user = _field(request, "user", "the request", dict)
        history = _field(request, "history", "the request", list, most=MAX_ROWS)
        candidates = _field(request, "candidates", "the request", list, least=1, most=MAX_ROWS)
        num_events = _field(user, "events", "user", int)
        since_last = _field(user, "seconds_since_last", "user", int)
        counts = [
            [num_events, since_last, _field(candidate, "events", f"candidates[{index}]", int)]
            for index, candidate in enumerate(candidates)
        ]
        return Request(
            (np.log1p(counts) - self._mean) / self._std,
            *(
                [
                    [self._id(row, name, f"{where}[{index}]") for index, row in enumerate(rows)]
                    for name in TARGETS
                ]
                for where, rows in (("candidates", candidates), ("history", history))
            ),
            [self._id(user, name, "user") for name in self._user_keys],
        )

    def tensors(self, requests: Sequence[Request]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the arguments of `Scorer.forward` for a batch, with a dummy request at its end.

        The exported model needs at least two requests and two candidates.
        """
        requests = [*requests, self._dummy]
        columns = [
            *zip(*(request.candidates for request in requests), strict=True),
            *zip(*(request.histories for request in requests), strict=True),
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
    """Scores batches of requests, in one thread at a time.

    Args:
        scorer: a `Scorer`, as trained, exported or compiled.
        requests: the requests for its features.
    """

    def __init__(self, scorer: Callable[..., Tensor], requests: Requests) -> None:
        self._scorer, self._requests = scorer, requests

    @torch.no_grad()
    def scores(self, requests: Sequence[object]) -> list[np.ndarray | RequestError]:
        """Return the probabilities of the candidates of each request, or its error.

        Args:
            requests: requests as JSON, or parsed.
        """
        results: dict[int, np.ndarray | RequestError] = {}
        batch: dict[int, Request] = {}
        for i, request in enumerate(requests):
            try:
                parsed = parse(request) if isinstance(request, bytes) else request
                batch[i] = self._requests.check(parsed)
            except RequestError as error:
                results[i] = error
        if batch:
            scores = self._scorer(*self._requests.tensors([*batch.values()])).cpu().numpy()
            ends = [*accumulate(len(request.dense) for request in batch.values())]
            results |= zip(batch, np.split(scores, ends), strict=False)  # without the dummy
        return [results[i] for i in range(len(requests))]


def _field(
    row: object, name: str, where: str, kind: type[T], least: int = 0, most: int = MAX_COUNT
) -> T:
    """Return `row[name]`: an object, or an integer or length of a list in a range."""
    if not isinstance(row, dict):
        raise RequestError(f"{where} must be an object, got {reprlib.repr(row)}")
    value = row.get(name)
    # isinstance(True, int) holds, type(True) is int does not.
    if type(value) is not kind or not least <= (value if kind is int else len(value)) <= most:
        got = f"a list of {len(value)}" if isinstance(value, list) else reprlib.repr(value)
        expected = KINDS[kind].format(least, most)
        raise RequestError(f"{name} of {where} must be {expected}, got {got}")
    return value


def parse(content: bytes) -> Any:
    """Parse JSON. Integers beyond 64 bits are returned as text, for an error that names the field.

    Raises:
        RequestError: the content is too large, or not JSON in UTF-8.
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
    """Parse a file.

    Raises:
        RequestError: the file cannot be read, is too large, or not JSON in UTF-8.
    """
    try:
        with path.open("rb") as file:
            return parse(file.read(MAX_BYTES + 1))
    except (OSError, RequestError) as error:
        raise RequestError(f"--request {path} cannot be read: {error}") from None
