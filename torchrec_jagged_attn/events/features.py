"""``EventBasedFeature``: one row an event, of all that is known of it."""

# FX reads annotations, so they are no strings here.
import math

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_jagged_attn.checks import (
    check_bool,
    check_device,
    check_int,
    check_integers,
    check_real,
    check_same,
    check_shape,
)
from torchrec_jagged_attn.collection.batch_checks import pad_empty_batch
from torchrec_jagged_attn.collection.config import check_list
from torchrec_jagged_attn.events.layout import Events
from torchrec_jagged_attn.layout import JaggedLayout, check_offsets_values, check_order

HOUR, DAY, WEEK = 3600.0, 86_400.0, 604_800.0


class TimeEncoding(nn.Module):
    r"""Encodes the time of an event by its age and its phase in several periods.

    .. math:: \log(1 + age_n), \quad \sin(2 \pi t_n / p), \quad \cos(2 \pi t_n / p)

    The age is the time until the newest event of the same user. The module has no parameters.

    Args:
        periods: ``p``, in the unit of timestamps; by default an hour, a day and a week in seconds.

    Raises:
        TypeError: ``periods`` is not a tuple of numbers.
        ValueError: a period is not positive.

    Example:
        >>> encoding = TimeEncoding(periods=(4.0,))
        >>> encoding(torch.tensor([0, 3, 4]), torch.tensor([0, 2, 3])).round(decimals=2)
        tensor([[ 1.3900,  0.0000,  1.0000],
                [ 0.0000, -1.0000, -0.0000],
                [ 0.0000,  0.0000,  1.0000]])
    """

    def __init__(self, periods: tuple[float, ...] = (HOUR, DAY, WEEK)) -> None:
        super().__init__()
        if not isinstance(periods, (tuple, list)):
            raise TypeError(f"periods must be a tuple of numbers, got {periods!r}")
        self.periods = tuple(check_real(period, "periods", positive=True) for period in periods)

    @property
    def width(self) -> int:
        """How many numbers a time becomes."""
        return 1 + 2 * len(self.periods)

    def forward(self, timestamps: Tensor, offsets: Tensor) -> Tensor:
        """Encode the times of all users' events.

        Args:
            timestamps: ``[E]`` int32 or int64, never decreasing within a user.
            offsets: ``[B + 1]``, of the users' events.

        Returns:
            ``[E, width]`` fp32.

        Raises:
            TypeError: a dtype does not fit.
            ValueError: a shape or a device does not fit; or (on CPU, or under
                ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) timestamps decrease, or the values of offsets
                do not fit.
        """
        check_shape(timestamps, "timestamps", "[N]", (None,))
        check_integers(timestamps, "timestamps")
        layout = JaggedLayout(offsets, timestamps.shape[0])
        check_same(offsets, "offsets", dtype=False, timestamps=timestamps)
        check_offsets_values(offsets, layout.num_rows, "offsets")
        check_order(timestamps, offsets)
        timestamps = timestamps.long()  # differences of int32 may not fit in int32
        newest = offsets[1:][layout.sample_ids()] - 1
        ages = (timestamps[newest] - timestamps).clamp(min=0).double()
        columns = [ages.log1p()]
        for period in self.periods:  # in fp64: fp32 does not tell seconds of this century apart
            phase = timestamps.double().remainder(period) * (2 * math.pi / period)
            columns += [phase.sin(), phase.cos()]
        return torch.stack(columns, 1).float()


class EventBasedFeature(nn.Module):
    """Turns the attributes of events into one row per event, a history for attention.

    The ids of each attribute are looked up and pooled, as by an ``EmbeddingBagCollection`` whose
    samples are events. A linear layer projects the rows of all attributes and the encoding of the
    event's time to ``out_dim`` columns.

    TorchRec shards its tables. Attributes of events that :meth:`Events.truncate` or
    :meth:`Events.select` removed are not looked up.

    Args:
        tables: of the attributes. An attribute may have any number of ids in an event.
        out_dim: width of an event's row.
        periods: of the :class:`TimeEncoding`; ``None``, for events without timestamps.
        is_weighted: whether the ids of attributes have weights.
        device: of all parameters.

    Raises:
        TypeError: ``tables`` is not a list of EmbeddingBagConfigs, ``out_dim`` not an int,
            ``is_weighted`` not a bool, or ``periods`` not a tuple of numbers.
        ValueError: there is no table, or ``out_dim`` or a period is not positive.

    Example:
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> tables = [
        ...     EmbeddingBagConfig(
        ...         name=f"{name}_table", embedding_dim=8, num_embeddings=10, feature_names=[name]
        ...     )
        ...     for name in ("item", "surface")
        ... ]
        >>> features = KeyedJaggedTensor.from_lengths_sync(
        ...     ["item", "surface", "time"],
        ...     torch.tensor([7, 3, 5, 1, 0, 1, 50, 60, 55]),
        ...     torch.tensor([2, 1, 2, 1, 2, 1]),
        ... )
        >>> events = Events.of_features(features, ["item", "surface"], timestamps="time")
        >>> history = EventBasedFeature(tables, 16)(events)
        >>> history.values().shape, history.lengths()
        (torch.Size([3, 16]), tensor([2, 1]))

    Source:
        After the abstract of DynamiX (https://arxiv.org/abs/2511.18331), which names Event Based
        Features. How a row is made here is ours.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        out_dim: int,
        *,
        periods: tuple[float, ...] | None = (HOUR, DAY, WEEK),
        is_weighted: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        check_list(tables, "tables", EmbeddingBagConfig)
        if not tables:
            raise ValueError("tables must hold at least one EmbeddingBagConfig, got none")
        check_device(device)
        check_int(out_dim, "out_dim", 1)
        check_bool(is_weighted, "is_weighted")
        self.embedding_bag_collection = EmbeddingBagCollection(tables, is_weighted, device)
        self.attributes = [name for table in tables for name in table.feature_names]
        self.is_weighted = is_weighted
        self.time_encoding = None if periods is None else TimeEncoding(periods)
        width = sum(table.embedding_dim * len(table.feature_names) for table in tables)
        width += 0 if self.time_encoding is None else self.time_encoding.width
        self.compression = nn.Linear(width, out_dim, device=device)

    def forward(self, events: Events) -> JaggedTensor:
        """Rows of ``events``, ``[E, out_dim]``, jagged by user.

        Raises:
            TypeError: ``events`` are no :class:`Events`, or have no timestamps where these are
                encoded.
            ValueError: an attribute of the tables is missing, or ids have weights where
                ``is_weighted`` is False, or none where it is True.
        """
        _check(events, self.attributes, self.is_weighted)
        dtype = self.compression.weight.dtype  # lookups may give another
        attributes = pad_empty_batch(events.attributes)
        rows = self.embedding_bag_collection(attributes).values().to(dtype)
        if attributes is not events.attributes:
            rows = rows[:0]
        if self.time_encoding is not None:
            times = self.time_encoding(events.timestamps, events.offsets)
            rows = torch.cat([rows, times.to(dtype)], 1)
        return JaggedTensor(self.compression(rows), offsets=events.offsets)


@torch.fx.wrap  # what branches on the batch is a leaf for FX
def _check(events: Events, attributes: list[str], is_weighted: bool) -> None:
    if not isinstance(events, Events):
        raise TypeError(f"events must be Events, got a {type(events).__name__}")
    known = events.attributes.keys()
    if missing := [name for name in attributes if name not in known]:
        raise ValueError(f"events must have the attributes {missing}, got {known}")
    if is_weighted != (events.attributes.weights_or_none() is not None):
        expected, given = ("weights", "none") if is_weighted else ("no weights", "some")
        raise ValueError(
            f"events must have {expected} of ids for is_weighted={is_weighted}, got {given}"
        )
