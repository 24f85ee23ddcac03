"""``select_events``, of looked-up rows; ``EventSelection``, before that."""

# FX reads annotations, so they are no strings here.
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_jagged_attn.checks import check_int
from torchrec_jagged_attn.collection.batch_checks import (
    check_equal_keys,
    check_equal_lengths,
    replace_rows,
)
from torchrec_jagged_attn.selection.api import check_threshold, select_rows, take_rows

Histories = TypeVar("Histories", JaggedTensor, dict[str, JaggedTensor])


def select_events(
    events: Histories,
    scores: Tensor | None = None,
    *,
    keep: int | Sequence[int] | Tensor | None = None,
    threshold: float | None = None,
    segments: Tensor | None = None,
    capacity: int | None = None,
) -> Histories:
    """Keep the events of each user with the highest scores, or the newest, in their order.

    If scores are equal, the newer event is kept first. Values and weights have gradients, scores
    have none. :func:`select_rows` finds the events.

    Args:
        events: of ``B`` users with ``N`` events in all, the oldest first; several histories of the
            same events by name, whose events are kept or removed together.
        scores, keep, threshold, segments: as for :func:`select_rows`, of events and users.
        capacity: maximum number of kept events of all users. Values then have this number of rows,
            zeros after the last event, and the host does not wait for the device. By default, they
            have one row per kept event.

    Returns:
        Like ``events``, with the kept ones.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`select_rows`; there is neither
            ``keep`` nor ``threshold``; or histories of several names differ in length.

    Example:
        >>> clicks = JaggedTensor(torch.tensor([7, 3, 5, 9]), lengths=torch.tensor([3, 1]))
        >>> select_events(clicks, torch.tensor([0.9, 0.1, 0.5, 0.2]), keep=2).to_dense()
        [tensor([7, 5]), tensor([9])]
        >>> select_events(clicks, keep=2).to_dense()
        [tensor([3, 5]), tensor([9])]
    """
    check_limits(keep, threshold)
    options = {"keep": keep, "threshold": threshold, "segments": segments, "capacity": capacity}
    if not isinstance(events, dict):
        return select_events({"events": events}, scores, **options)["events"]
    if not events:
        raise ValueError("events must have one history or more, got none")
    for name, history in events.items():
        if not isinstance(history, JaggedTensor):
            raise TypeError(f"{name} must be a JaggedTensor, got a {type(history).__name__}")
    first_name, first = next(iter(events.items()))
    for name, history in events.items():
        check_equal_lengths(history, name, first, first_name)
    return cast("Histories", _selected(events, scores, **options))


def _selected(
    histories: dict[str, JaggedTensor], scores: Tensor | None, **options: Any
) -> dict[str, JaggedTensor]:
    """Of histories of the same events, those that ``select_rows`` keeps."""
    first = next(iter(histories.values()))
    num_rows = first.values().shape[0]
    selected = select_rows(first.offsets(), scores, num_rows=num_rows, **options)
    lengths = selected.offsets.diff().to(first.lengths().dtype)
    kept = {}
    for name, history in histories.items():
        weights = history.weights_or_none()
        kept[name] = JaggedTensor(
            take_rows(history.values(), selected),
            None if weights is None else take_rows(weights, selected),
            lengths,
            selected.offsets,
        )
    return kept


class EventSelection(nn.Module):
    """Keeps the highest-scored or newest events of each user in a KeyedJaggedTensor.

    All features of an event are kept or removed together; other keys are unchanged. The module has
    no sharded child, so TorchRec's pipelines with ``pipeline_postproc=True`` run it before the
    lookups: removed events are neither sent to other ranks nor looked up. Without a pipeline, the
    host waits for the number of kept events.

    Args:
        keys: of the features of an event, equally long in each sample, the oldest event first.
        keep: maximum number of events per sample; with ``segments``, a list with a number for each
            segment. Or a function of the KeyedJaggedTensor that returns ``[B]`` integers, or with
            ``segments`` ``[B, S]``: budgets of users. By default, with a threshold, no maximum.
        scores: a function of the KeyedJaggedTensor that returns the score of each event, ``[N]`` in
            the order of the keys' rows. By default, the newest events are kept.
        threshold: lowest score that is kept.
        segments: a function of it that returns the segment of each event, ``[N]`` integers.

    Raises:
        TypeError: an argument has another type.
        ValueError: no keys, or a key twice; neither ``keep`` nor ``threshold``; a budget is
            negative; or a threshold without scores.

    Example:
        >>> features = KeyedJaggedTensor.from_lengths_sync(
        ...     ["user", "item", "dwell"],
        ...     torch.tensor([1, 2, 7, 3, 5, 9, 30, 0, 12, 4]),
        ...     torch.tensor([1, 1, 3, 1, 3, 1]),
        ... )
        >>> selection = EventSelection(
        ...     ["item", "dwell"], 2, scores=lambda features: features["dwell"].values().float()
        ... )
        >>> selection(features)["item"].to_dense()
        [tensor([7, 5]), tensor([9])]

    Source:
        After the abstract of DynamiX (https://arxiv.org/abs/2511.18331), which removes events for
        segments of users. How it is done here is ours.
    """

    def __init__(
        self,
        keys: list[str],
        keep: int | list[int] | Callable[[KeyedJaggedTensor], Tensor] | None = None,
        *,
        scores: Callable[[KeyedJaggedTensor], Tensor] | None = None,
        threshold: float | None = None,
        segments: Callable[[KeyedJaggedTensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        check_keys(keys)
        check_limits(keep, threshold)
        for name, function in (("scores", scores), ("segments", segments)):
            if function is not None:
                check_callable(function, name)
        if threshold is not None and scores is None:
            raise ValueError(f"threshold must be None without scores, got {threshold}")
        if not callable(keep) and isinstance(keep, list) != (segments is not None):
            raise ValueError(f"keep must be a list if and only if there are segments, got {keep!r}")
        if isinstance(keep, list) and not keep:
            raise ValueError("keep must have a number for each segment, got []")
        if keep is not None and not callable(keep):
            for budget in keep if isinstance(keep, list) else [keep]:
                check_int(budget, "keep", 0)
        self.keys, self.keep, self.threshold = keys, keep, threshold
        self.scores, self.segments = scores, segments

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features`` with the same keys and samples, without the events that are not kept.

        Raises:
            TypeError: ``features`` are of another type, or a dtype does not fit.
            ValueError: a key is missing, or keys differ in length or batch size; scores or segments
                are not one for each event; or budgets not of each sample.
        """
        scores = None if self.scores is None else self.scores(features)
        segments = None if self.segments is None else self.segments(features)
        keep = self.keep(features) if callable(self.keep) else self.keep
        return _select(features, self.keys, keep, scores, self.threshold, segments)


@torch.fx.wrap  # what branches on the batch is a leaf for FX
def _select(
    features: KeyedJaggedTensor,
    keys: list[str],
    keep: int | list[int] | Tensor | None,
    scores: Tensor | None,
    threshold: float | None,
    segments: Tensor | None,
) -> KeyedJaggedTensor:
    check_events(features, keys)
    kept = _selected(
        {key: features[key] for key in keys},
        scores,
        keep=keep,
        threshold=threshold,
        segments=segments,
    )

    def joined(x: Tensor, sizes: list[int], of_kept: Callable[[JaggedTensor], Tensor]) -> Tensor:
        """``x`` of all keys, in which that of events is replaced."""
        of_keys = zip(features.keys(), x.split(sizes), strict=True)
        return torch.cat([of_kept(kept[key]) if key in kept else old for key, old in of_keys])

    counts, weights = features.length_per_key(), features.weights_or_none()
    return replace_rows(
        features,
        joined(features.values(), counts, JaggedTensor.values),
        None if weights is None else joined(weights, counts, JaggedTensor.weights),
        joined(features.lengths(), features.stride_per_key(), JaggedTensor.lengths),
        [
            kept[key].values().numel() if key in kept else count
            for key, count in zip(features.keys(), counts, strict=True)
        ],
    )


def check_limits(keep: object, threshold: object) -> None:
    """One of the two must be given, and a threshold must be a number: else all events are kept."""
    if keep is None and threshold is None:
        raise ValueError("keep or threshold must be given, got neither: all events would be kept")
    check_threshold(threshold)


def check_callable(function: object, name: str) -> None:
    """``function`` must be one, of a batch."""
    if not callable(function):
        raise TypeError(f"{name} must be a function of a KeyedJaggedTensor, got {function!r}")


def check_keys(keys: list[str]) -> None:
    """There must be some ``keys``, each once."""
    if not isinstance(keys, (list, tuple)) or not all(isinstance(key, str) for key in keys):
        raise TypeError(f"keys must be a list of names, got {keys!r}")
    if not keys or len(set(keys)) < len(keys):
        raise ValueError(f"keys must be at least one name, each once, got {keys}")


def check_events(features: KeyedJaggedTensor, keys: list[str]) -> None:
    """``features`` must have the ``keys``, equally long in each sample."""
    if not isinstance(features, KeyedJaggedTensor):
        raise TypeError(f"features must be a KeyedJaggedTensor, got a {type(features).__name__}")
    known = features.keys()
    if missing := [key for key in keys if key not in known]:
        raise ValueError(f"features must have the keys {missing}, got {known}")
    strides = dict(zip(known, features.stride_per_key(), strict=True))
    for key in keys[1:]:
        if strides[key] != strides[keys[0]]:
            raise ValueError(
                f"{key!r} must have the batch size of {keys[0]!r}, {strides[keys[0]]}, "
                f"got {strides[key]}"
            )
    check_equal_keys(features, keys)
