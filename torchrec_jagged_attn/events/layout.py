"""``Events``: jagged in jagged, attributes of the events of users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_jagged_attn.checks import (
    check_integers,
    check_offsets_metadata,
    check_same,
    check_shape,
)
from torchrec_jagged_attn.events.selection import check_events, check_keys, check_limits
from torchrec_jagged_attn.layout import check_offsets_values, check_order
from torchrec_jagged_attn.selection.api import select_rows, take_rows


@dataclass(frozen=True)
class Events:
    """Events of ``B`` users, one user after the other, and any number of ids of each attribute.

    There are two layouts. Offsets divide ``E`` events among the users, the oldest first. A
    KeyedJaggedTensor whose samples are events divides the ids of each attribute among the events.

    Args:
        offsets: ``[B + 1]`` int32 or int64, of users, see :class:`JaggedLayout`.
        attributes: of ``E`` samples, a key for each attribute.
        timestamps: ``[E]`` int32 or int64, never decreasing within a user; or None.

    Raises:
        TypeError: a dtype or type does not fit.
        ValueError: a shape or a device does not fit; or (on CPU, or under
            ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) the values of offsets do not fit, or timestamps
            decrease.

    Example:
        >>> events = Events(
        ...     torch.tensor([0, 2, 3]),
        ...     KeyedJaggedTensor.from_lengths_sync(
        ...         ["item", "tags"],
        ...         torch.tensor([7, 3, 5, 1, 2, 4]),
        ...         torch.tensor([1, 1, 1, 2, 0, 1]),
        ...     ),
        ... )
        >>> newest = events.truncate(1)
        >>> newest.offsets
        tensor([0, 1, 2])
        >>> newest.attributes["tags"].to_dense()
        [tensor([], dtype=torch.int64), tensor([4])]
    """

    offsets: Tensor
    attributes: KeyedJaggedTensor
    timestamps: Tensor | None = None

    def __post_init__(self) -> None:
        check_offsets_metadata(self.offsets)
        if not isinstance(self.attributes, KeyedJaggedTensor):
            raise TypeError(
                f"attributes must be a KeyedJaggedTensor, got a {type(self.attributes).__name__}"
            )
        if self.attributes.variable_stride_per_key():
            raise ValueError(
                "attributes must have one batch size, the number of events, got "
                f"{self.attributes.stride_per_key()} for {self.attributes.keys()}"
            )
        if self.timestamps is not None:
            check_shape(self.timestamps, "timestamps", "[N]", (self.num_events,))
            check_integers(self.timestamps, "timestamps")
        values = self.attributes.values()
        check_same(
            values, "attributes", dtype=False, offsets=self.offsets, timestamps=self.timestamps
        )
        check_offsets_values(self.offsets, self.num_events, "offsets")
        if self.timestamps is not None:
            check_order(self.timestamps, self.offsets)

    @classmethod
    def of_features(
        cls, features: KeyedJaggedTensor, keys: list[str], timestamps: str | None = None
    ) -> Events:
        """Of features that have one id an event, as batches of histories have them.

        Args:
            features: of ``B`` users.
            keys: of attributes, equally long in each sample.
            timestamps: key of the events' times, likewise.

        Raises:
            TypeError: ``keys`` is not a list of names, or a dtype does not fit.
            ValueError: there is no key, or one twice or missing; keys differ in length or batch
                size; or timestamps decrease, where their values are read.
        """
        check_keys(keys)
        if timestamps is not None and not isinstance(timestamps, str):
            raise TypeError(f"timestamps must be a key or None, got {timestamps!r}")
        check_events(features, keys if timestamps is None else [*keys, timestamps])
        first = features[keys[0]]
        num_events = first.values().numel()
        values = torch.cat([features[key].values() for key in keys])
        weighted = features.weights_or_none() is not None
        attributes = KeyedJaggedTensor(
            keys,
            values,
            torch.cat([features[key].weights() for key in keys]) if weighted else None,
            lengths=features.lengths().new_ones(len(keys) * num_events),
            stride=num_events,
        )
        times = None if timestamps is None else features[timestamps].values()
        return cls(first.offsets(), attributes, times)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Events:
        """On ``device``."""
        device = torch.device(device)
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Events:
        """In memory that a GPU can copy from while the host goes on."""
        return self._map(lambda x: x.pin_memory())

    def _map(self, function: Callable[[Any], Any]) -> Events:
        timestamps = None if self.timestamps is None else function(self.timestamps)
        return Events(function(self.offsets), function(self.attributes), timestamps)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Its memory is not given to others before ``stream`` has used it."""
        self.offsets.record_stream(stream)
        self.attributes.record_stream(stream)
        if self.timestamps is not None:
            self.timestamps.record_stream(stream)

    @property
    def num_events(self) -> int:
        """``E``, of all users."""
        return self.attributes.stride()

    def select(
        self,
        scores: Tensor | None = None,
        *,
        keep: int | list[int] | Tensor | None = None,
        threshold: float | None = None,
        segments: Tensor | None = None,
    ) -> Events:
        """Keep the events of each user with the highest scores, or the newest, with all attributes.

        Weights of attributes and timestamps have gradients. The host waits for the number of events
        and of ids that are left. Arguments, scores of ``[E]`` among them, are those of
        :func:`select_events`.

        Raises:
            TypeError, ValueError, NotImplementedError: as there.
        """
        check_limits(keep, threshold)
        selected = select_rows(
            self.offsets, scores, num_rows=self.num_events, keep=keep, threshold=threshold,
            segments=segments,
        )  # fmt: skip
        old = self.attributes
        # All ids of an event that is kept, none of another.
        limits = torch.where(selected.inverse_indices >= 0, 2**31 - 1, 0).repeat(len(old.keys()))
        ids = select_rows(old.offsets(), num_rows=old.values().numel(), keep=limits)
        weights = old.weights_or_none()
        lengths = old.lengths().view(len(old.keys()), self.num_events)[:, selected.rows]
        attributes = KeyedJaggedTensor(
            old.keys(),
            take_rows(old.values(), ids),
            None if weights is None else take_rows(weights, ids),
            lengths=lengths.flatten(),
            stride=selected.rows.numel(),
        )
        timestamps = self.timestamps
        return replace(
            self,
            offsets=selected.offsets,
            attributes=attributes,
            timestamps=None if timestamps is None else take_rows(timestamps, selected),
        )

    def truncate(self, keep: int | Tensor) -> Events:
        """Keep the newest events of each user, and all of their attributes."""
        return self.select(keep=keep)
