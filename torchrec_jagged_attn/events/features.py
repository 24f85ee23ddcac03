"""``EventBasedFeature``: one row an event, of all that is known of it."""

# FX reads annotations, so they are no strings here.
import math

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_jagged_attn.checks import check_same, check_tensor, check_timestamps
from torchrec_jagged_attn.events.layout import Events
from torchrec_jagged_attn.layout import JaggedLayout

__all__ = ["EventBasedFeature", "TimeEncoding"]

HOUR, DAY, WEEK = 3600.0, 86_400.0, 604_800.0


class TimeEncoding(nn.Module):
    r"""When an event was, as a few numbers: its age and the time in some periods.

    .. math:: \log(1 + age_n), \quad \sin(2 \pi t_n / p), \quad \cos(2 \pi t_n / p)

    The age is the time until the newest event of the same user. It has no parameter.

    Args:
        periods: ``p``, in the unit of timestamps; by default an hour, a day and a week in seconds.

    Raises:
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
        for period in periods:
            if not 0 < period < math.inf:
                raise ValueError(f"periods must be positive and finite, got {periods}")
        self.periods = periods

    @property
    def width(self) -> int:
        """How many numbers a time becomes."""
        return 1 + 2 * len(self.periods)

    def forward(self, timestamps: Tensor, offsets: Tensor) -> Tensor:
        """Encode the times of all users' events.

        Args:
            timestamps: ``[E]`` int32, int64, fp32 or fp64, never decreasing within a user.
            offsets: ``[B + 1]``, of the users' events.

        Returns:
            ``[E, width]`` fp32.

        Raises:
            TypeError: a dtype does not fit.
            ValueError: a shape or a device does not fit.
        """
        check_tensor(timestamps, "timestamps")
        layout = JaggedLayout(offsets, timestamps.shape[0])
        check_timestamps(timestamps, layout.num_rows)
        check_same(offsets, "offsets", dtype=False, timestamps=timestamps)
        newest = offsets[1:][layout.sample_ids()] - 1
        ages = (timestamps[newest] - timestamps).clamp(min=0).double()
        columns = [ages.log1p()]
        for period in self.periods:  # in fp64: fp32 does not tell seconds of this century apart
            phase = timestamps.double().remainder(period) * (2 * math.pi / period)
            columns += [phase.sin(), phase.cos()]
        return torch.stack(columns, 1).float()


class EventBasedFeature(nn.Module):
    """Turns attributes of events into one row an event, a history for attention.

    Ids of each attribute are looked up and pooled by a table, as an ``EmbeddingBagCollection`` does
    whose samples are events. A linear layer compresses the row of all attributes and the encoding
    of the event's time to ``out_dim`` columns.

    TorchRec shards its tables as any others. No row of attributes is looked up for events that
    :meth:`Events.truncate` or :meth:`Events.select` removed before.

    Args:
        tables: of the attributes. An attribute may have any number of ids in an event.
        out_dim: width of an event's row.
        periods: of the :class:`TimeEncoding`; ``None``, for events without timestamps.
        is_weighted: whether the ids of attributes have weights.
        device: of all parameters.

    Raises:
        ValueError: ``out_dim`` is not positive.

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
        if out_dim < 1:
            raise ValueError(f"out_dim must be at least 1, got {out_dim}")
        self.embedding_bag_collection = EmbeddingBagCollection(tables, is_weighted, device)
        self.time_encoding = None if periods is None else TimeEncoding(periods)
        width = sum(table.embedding_dim * len(table.feature_names) for table in tables)
        width += 0 if self.time_encoding is None else self.time_encoding.width
        self.compression = nn.Linear(width, out_dim, device=device)

    def forward(self, events: Events) -> JaggedTensor:
        """Rows of ``events``, ``[E, out_dim]``, jagged by user.

        Raises:
            TypeError: events have no timestamps where these are encoded.
            ValueError: there is no event at all, which TorchRec's lookups do not take.
        """
        _check(events)
        dtype = self.compression.weight.dtype  # lookups may give another
        rows = self.embedding_bag_collection(events.attributes).values().to(dtype)
        if self.time_encoding is not None:
            times = self.time_encoding(events.timestamps, events.offsets)
            rows = torch.cat([rows, times.to(dtype)], 1)
        return JaggedTensor(self.compression(rows), offsets=events.offsets)


@torch.fx.wrap  # what branches on the batch is a leaf for FX
def _check(events: Events) -> None:
    if events.num_events == 0:
        raise ValueError("events must be one or more, got none")
