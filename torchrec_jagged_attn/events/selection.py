"""``select_events`` keeps looked-up events, and ``EventSelection`` events of a batch."""

# FX reads annotations, so they are no strings here.
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_jagged_attn.base.checks import (
    check_float,
    check_int,
    check_integers,
    check_offsets_metadata,
    check_same,
    check_shape,
    should_validate,
)
from torchrec_jagged_attn.base.devices import implementation
from torchrec_jagged_attn.base.layout import check_offsets_values
from torchrec_jagged_attn.base.module_checks import check_jagged
from torchrec_jagged_attn.collection.batch_checks import (
    check_equal_keys,
    check_equal_lengths,
    replace_rows,
)
from torchrec_jagged_attn.events.rows import select_rows, take_rows

Histories = TypeVar("Histories", JaggedTensor, dict[str, JaggedTensor])
NO_LIMIT = 2**62


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

    An event is kept if its score is at least ``threshold`` and among the ``keep`` highest of its
    user (and segment); of equal scores, newer events are kept first. Without scores, the newest
    events are kept. Values and weights have gradients, scores have none.

    The selection is deterministic, and does not depend on the events of other users.

    Args:
        events: of ``B`` users with ``N`` events in all, the oldest first; several histories of the
            same events by name, whose events are kept or removed together.
        scores: ``[N]`` of fp32, bf16 or fp16 (on CPU also fp64).
        keep: maximum number of events per user: one number, or ``[B]`` integers. With ``segments``,
            per user and segment: ``S`` numbers, or ``[B, S]`` integers. By default, no maximum.
        threshold: lowest score that is kept.
        segments: ``[N]`` int32 or int64, the segment of each event in 0…S - 1; events with other
            numbers are not kept.
        capacity: maximum number of kept events of all users; events beyond it, of the last users,
            are dropped. Values then have this number of rows, zeros after the last event, and the
            host does not wait for the device. By default, they have one row per kept event, and the
            host waits once for their number.

    Returns:
        Like ``events``, with the kept ones.

    Raises:
        TypeError: a dtype or type does not fit.
        ValueError: a shape, a device, a number or (on CPU, or under
            ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) the values of offsets or of ``keep`` do not fit, a
            score is NaN (otherwise its event is not kept), or more events are kept than
            ``capacity``; there is neither ``keep`` nor ``threshold``; or histories of several names
            differ in length.
        NotImplementedError: the device is neither CPU nor CUDA.

    Example:
        >>> clicks = JaggedTensor(torch.tensor([7, 3, 5, 9]), lengths=torch.tensor([3, 1]))
        >>> select_events(clicks, torch.tensor([0.9, 0.1, 0.5, 0.2]), keep=2).to_dense()
        [tensor([7, 5]), tensor([9])]
        >>> select_events(clicks, keep=2).to_dense()
        [tensor([3, 5]), tensor([9])]
    """
    histories = events if isinstance(events, dict) else {"events": events}
    if not histories:
        raise ValueError("events must have one history or more, got none")
    for name, history in histories.items():
        check_jagged(history, name)
    (first_name, first), *others = histories.items()
    for name, history in others:
        check_equal_lengths(history, name, first, first_name, "events", "events")
    _check_limits(keep, threshold, scores)
    if capacity is not None:
        capacity = check_int(capacity, "capacity", 0, "an int or None")
    rows, offsets = _select_rows(first, scores, keep, threshold, segments, capacity)
    lengths, is_padded = offsets.diff().to(first.lengths().dtype), capacity is not None
    kept = {}
    for name, history in histories.items():
        values, weights = history.values(), history.weights_or_none()
        kept[name] = JaggedTensor(
            take_rows(values, rows, is_padded=is_padded),
            None if weights is None else take_rows(weights, rows, is_padded=is_padded),
            lengths,
            offsets,
        )
    return cast("Histories", kept if isinstance(events, dict) else kept["events"])


def _select_rows(
    history: JaggedTensor,
    scores: Tensor | None,
    keep: int | Sequence[int] | Tensor | None,
    threshold: float | None,
    segments: Tensor | None,
    capacity: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The rows to keep and their offsets; checks all tensors."""
    offsets, num_rows = history.offsets(), history.values().shape[0]
    check_offsets_metadata(offsets)
    implementation(offsets.device)
    if scores is not None:
        check_shape(scores, "scores", "[N]", (num_rows,))
        check_float(scores, "scores")
        if should_validate(scores) and (wrong := torch.nonzero(scores.isnan())).numel():
            raise ValueError(f"scores must not be NaN, got one at position {int(wrong[0])}")
    if segments is not None:
        check_shape(segments, "segments", "[N]", (num_rows,))
        check_integers(segments, "segments")
    check_same(offsets, "offsets", dtype=False, scores=scores, segments=segments)
    check_offsets_values(offsets, num_rows, "offsets")
    budgets = _budgets(keep, segments, offsets)
    return select_rows(offsets, num_rows, scores, segments, budgets, threshold, capacity)


def _budgets(
    keep: int | Sequence[int] | Tensor | None, segments: Tensor | None, offsets: Tensor
) -> Tensor:
    """``[B, S]`` int64: how many events of each user and segment may be kept."""
    num_users = offsets.shape[0] - 1
    if isinstance(keep, Tensor):
        if segments is None:
            check_shape(keep, "keep", "[B]", (num_users,))
        else:
            check_shape(keep, "keep", "[B, S]", (num_users, None))
            if keep.shape[1] == 0:
                raise ValueError(f"keep must have one segment or more, got {list(keep.shape)}")
        check_integers(keep, "keep")
        check_same(offsets, "offsets", dtype=False, keep=keep)
        if should_validate(keep) and keep.numel() and (least := int(keep.min())) < 0:
            raise ValueError(f"keep must be at least 0, got {least}")
        return keep.long().unsqueeze(1) if segments is None else keep.long()
    limits = _check_keep(keep, segments is not None)
    # Filled on the device, since a copy from the host would synchronize.
    columns = [torch.full((num_users,), limit, device=offsets.device) for limit in limits]
    return torch.stack(columns, 1)


class EventSelection(nn.Module):
    """Keeps the highest-scored or newest events of each user in a KeyedJaggedTensor.

    All features of an event are kept or removed together; other keys are unchanged. The module has
    no sharded child, so TorchRec's pipelines with ``pipeline_postproc=True`` run it before the
    lookups: removed events are neither sent to other ranks nor looked up. Without a pipeline, the
    host waits for the number of kept events.

    Args:
        keys: the features of an event, equally long in each sample, the oldest event first.
        keep: maximum number of events per sample; with ``segments``, a list with a number for each
            segment. Or a function of the KeyedJaggedTensor that returns ``[B]`` integers, or with
            ``segments`` ``[B, S]``: budgets of users. By default, with a threshold, no maximum.
        scores: a function of the KeyedJaggedTensor that returns the score of each event, ``[N]`` in
            the order of the keys' rows. By default, the newest events are kept.
        threshold: lowest score that is kept.
        segments: a function of the KeyedJaggedTensor that returns the segment of each event,
            ``[N]`` integers.

    Raises:
        TypeError: an argument has another type.
        ValueError: no keys, or a key twice; neither ``keep`` nor ``threshold``; no budget, or a
            negative one; or a threshold without scores.

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
        segments of users. The algorithm is ours.
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
        for name, function in (("scores", scores), ("segments", segments)):
            if function is not None:
                check_callable(function, name)
        _check_limits(keep, threshold, scores)
        if not callable(keep):
            _check_keep(keep, segments is not None)
        self.keys, self.keep, self.threshold = keys, keep, threshold
        self.scores, self.segments = scores, segments

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return ``features`` with the same keys and samples, and only the events that are kept.

        Raises:
            TypeError: ``features`` are of another type, or a dtype does not fit.
            ValueError: a key is missing, or keys differ in length or batch size; scores or segments
                are not one for each event; or budgets not of each sample.
        """
        scores = None if self.scores is None else self.scores(features)
        segments = None if self.segments is None else self.segments(features)
        keep = self.keep(features) if callable(self.keep) else self.keep
        return _select(features, self.keys, keep, scores, self.threshold, segments)


@torch.fx.wrap  # a leaf for FX, because it branches on the batch
def _select(
    features: KeyedJaggedTensor,
    keys: list[str],
    keep: int | list[int] | Tensor | None,
    scores: Tensor | None,
    threshold: float | None,
    segments: Tensor | None,
) -> KeyedJaggedTensor:
    check_events(features, keys)
    rows, offsets = _select_rows(features[keys[0]], scores, keep, threshold, segments)
    counts, lengths = features.length_per_key(), offsets.diff()
    weights = features.weights_or_none()

    def replaced(x: Tensor, sizes: list[int], function: Callable[[Tensor], Tensor]) -> Tensor:
        """``x`` of all keys, with ``function`` applied to the keys of events."""
        parts = zip(features.keys(), x.split(sizes), strict=True)
        return torch.cat([function(part) if key in keys else part for key, part in parts])

    return replace_rows(
        features,
        replaced(features.values(), counts, lambda x: x[rows]),
        None if weights is None else replaced(weights, counts, lambda x: x[rows]),
        replaced(features.lengths(), features.stride_per_key(), lambda x: lengths.to(x.dtype)),
        [
            rows.numel() if key in keys else count
            for key, count in zip(features.keys(), counts, strict=True)
        ],
    )


def _check_keep(keep: object, has_segments: bool) -> list[int]:
    """Return the budgets of a user: one for each segment, or a single one."""
    if not has_segments:
        limit = NO_LIMIT if keep is None else keep
        return [check_int(limit, "keep", 0, "an int or [B] integers")]
    if not isinstance(keep, Sequence):
        raise TypeError(f"keep must have a number for each segment, got {keep!r}")
    if not keep:
        raise ValueError(f"keep must have a number for each segment, got {keep!r}")
    return [check_int(limit, "keep", 0, "ints, one for each segment") for limit in keep]


def _check_limits(keep: object, threshold: object, scores: object) -> None:
    """One of the limits must be given, and a threshold must be a number, with scores."""
    if keep is None and threshold is None:
        raise ValueError("keep or threshold must be given, got neither: all events would be kept")
    if threshold is None:
        return
    if isinstance(threshold, bool) or not isinstance(threshold, Real):
        raise TypeError(f"threshold must be a number or None, got {threshold!r}")
    if math.isnan(threshold):
        raise ValueError("threshold must be a number or None, got nan")
    if scores is None:
        raise ValueError(f"threshold must be None without scores, got {threshold}")


def check_callable(function: object, name: str) -> None:
    """``function`` must be callable."""
    if not callable(function):
        raise TypeError(f"{name} must be a function of a KeyedJaggedTensor, got {function!r}")


def check_keys(keys: list[str]) -> None:
    """``keys`` must be different names, at least one."""
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
