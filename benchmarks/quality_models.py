"""The ranking model of ``quality.py``, and its poolings of a history."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_jagged_attn import HistoryEncoderLayer, JaggedLayout, JaggedTargetAttention

__all__ = ["POOLINGS", "Ranker"]

HEADS = 4
SIMILAR = 16  # rows that ``sim`` attends to


class Ranker(nn.Module):
    """Logits of candidates by the pooled history, the candidate, and their product.

    Args:
        pooling: one of ``POOLINGS``.
        num_items: rows of the only table.
        width: of embeddings.
        half_life: of recency pooling, in events.
        max_history: events of a history at most.
        items: from ids to rows; a table that starts at random by default.
    """

    def __init__(
        self,
        pooling: str,
        num_items: int,
        width: int,
        half_life: float,
        max_history: int,
        items: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if items is None:
            items = nn.Embedding(num_items, width)
            nn.init.normal_(items.weight, std=width**-0.5)
        self.items = items
        # Before the pooling, so that they start alike with each.
        self.layers = nn.Sequential(nn.Linear(3 * width, 64), nn.ReLU(), nn.Linear(64, 1))
        self.pooling = POOLINGS[pooling](width, half_life, max_history)

    def forward(self, history: Tensor, offsets: Tensor, candidates: Tensor) -> Tensor:
        """``[B, T]`` of ``candidates`` ``[B, T]``; ``history`` has ``[N]`` items of ``B`` users."""
        looked_up = self.items(torch.cat([history, candidates.flatten()]))  # one gradient
        rows, targets = looked_up.split([len(history), candidates.numel()])
        targets = targets.view(*candidates.shape, -1)
        rows = JaggedTensor(rows, offsets=offsets)
        user = self.pooling(targets, rows).expand_as(targets)
        return self.layers(torch.cat([user, targets, user * targets], 2)).squeeze(2)


def padded(rows: JaggedTensor, length: int) -> tuple[Tensor, Tensor]:
    """``[B, length, W]`` and which of them are rows, ``[B, length]``; the newest is the last."""
    begins, ends = rows.offsets()[:-1].unsqueeze(1), rows.offsets()[1:].unsqueeze(1)
    index = ends - length + torch.arange(length, device=ends.device)
    is_row = index >= begins
    dense = rows.values().index_select(0, index.clamp(min=0).flatten()).view(*index.shape, -1)
    return dense * is_row.unsqueeze(2), is_row


class NoHistory(nn.Module):
    """Zeros."""

    def forward(self, targets: Tensor, rows: JaggedTensor) -> Tensor:
        return torch.zeros_like(targets)


class Weighted(nn.Module):
    """A sum of rows by their positions from the newest and the lengths of their histories."""

    def __init__(self, max_history: int, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.max_history, self.weigh = max_history, weigh

    def forward(self, targets: Tensor, rows: JaggedTensor) -> Tensor:
        x, is_row = padded(rows, self.max_history)
        position = torch.arange(self.max_history - 1, -1, -1, device=x.device)
        weights = self.weigh(position, is_row.sum(1, keepdim=True).clamp(min=1))
        return (weights * is_row).to(x.dtype).unsqueeze(1) @ x


def recency(position: Tensor, length: Tensor, half_life: float) -> Tensor:
    """Weights that halve every so many rows, and sum to one."""
    decay = 0.5 ** (1 / half_life)
    return decay**position * ((1 - decay) / (1 - decay**length))


class ActivationUnit(nn.Module):
    """DIN's: a weight of each row by an MLP of ``[q, x, q - x, q · x]``, and a sum, on padded rows.

    Source:
        Deep Interest Network (KDD '18, https://arxiv.org/abs/1706.06978).
    """

    def __init__(self, width: int, max_history: int) -> None:
        super().__init__()
        self.max_history = max_history
        self.weigh = nn.Sequential(
            nn.Linear(4 * width, 64), nn.PReLU(), nn.Linear(64, 16), nn.PReLU(), nn.Linear(16, 1)
        )

    def forward(self, targets: Tensor, rows: JaggedTensor) -> Tensor:
        x, is_row = padded(rows, self.max_history)
        q, x = targets.unsqueeze(2), x.unsqueeze(1)
        q, x = torch.broadcast_tensors(q, x)
        weights = self.weigh(torch.cat([q, x, q - x, q * x], 3)).squeeze(3)
        weights = weights.masked_fill(~is_row.unsqueeze(1), 0)
        return torch.einsum("btl,btld->btd", weights, x)


class Attention(nn.Module):
    """Layers of self-attention, and then target attention."""

    def __init__(
        self, width: int, num_heads: int | None = HEADS, layers: int = 0, **options
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(HistoryEncoderLayer(width, HEADS) for _ in range(layers)))
        self.attention = JaggedTargetAttention(width, num_heads, **options)

    def forward(self, targets: Tensor, rows: JaggedTensor) -> Tensor:
        return self.attention(targets, self.layers(rows))


class FusedActivationUnit(nn.Module):
    """DIN's, fused, with a factor by recency."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = JaggedTargetAttention(width, 1, score="din")

    def forward(self, targets: Tensor, rows: JaggedTensor) -> Tensor:
        num_samples, num_targets, width = targets.shape
        if num_targets == 1:
            return self.attention(targets.squeeze(1), rows).unsqueeze(1)
        lengths = rows.lengths().repeat_interleave(num_targets)
        repeated = JaggedLayout.from_lengths(lengths, num_targets * len(rows.values()))
        of_sample = repeated.sample_ids() // num_targets
        there = rows.offsets()[1:][of_sample] - 1 - repeated.positions_from_end()
        history = JaggedTensor(rows.values().index_select(0, there), offsets=repeated.offsets)
        return self.attention(targets.flatten(0, 1), history).view(num_samples, -1, width)


class PaddedAttention(nn.Module):
    """The pooling ``attention-mha`` on padded rows; it starts from the same weights."""

    def __init__(self, width: int, max_history: int) -> None:
        super().__init__()
        self.max_history = max_history
        start = JaggedTargetAttention(width, HEADS, recency_bias=False, value_projection=True)
        self.attention = nn.MultiheadAttention(width, HEADS, batch_first=True)
        self.attention.load_state_dict(start.state_dict())

    def forward(self, targets: Tensor, rows: JaggedTensor) -> Tensor:
        x, is_row = padded(rows, self.max_history)
        return self.attention(targets, x, x, key_padding_mask=~is_row, need_weights=False)[0]


class CausalEncoder(nn.Module):
    """Layers of causal self-attention; the newest row is the user."""

    def __init__(self, width: int, layers: int = 2, **options) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(HistoryEncoderLayer(width, HEADS, causal=True, **options) for _ in range(layers))
        )

    def forward(self, targets: Tensor, rows: JaggedTensor) -> Tensor:
        newest = rows.offsets()[1:] - 1
        return self.layers(rows).values().index_select(0, newest).unsqueeze(1)


class Similar(nn.Module):
    """Target attention over the rows that are most similar to the target, as SIM's first stage.

    Source:
        Search-based Interest Model (CIKM '20, https://arxiv.org/abs/2006.05639).
    """

    def __init__(self, width: int, max_history: int) -> None:
        super().__init__()
        self.max_history = max_history
        self.attention = JaggedTargetAttention(width, HEADS)

    def forward(self, targets: Tensor, rows: JaggedTensor) -> Tensor:
        x, is_row = padded(rows, self.max_history)
        scores = torch.einsum("btd,bld->btl", targets, x).detach()
        scores = scores.masked_fill(~is_row.unsqueeze(1), -torch.inf)
        k = min(SIMILAR, self.max_history)
        chosen = scores.topk(k, dim=2).indices.sort(dim=2).values.flatten(1)  # in order of time
        values = x.gather(1, chosen.unsqueeze(2).expand(-1, -1, x.shape[2])).flatten(0, 1)
        # What is no row comes first, and counts nothing.
        weights = is_row.gather(1, chosen).flatten().to(values.dtype)
        offsets = torch.arange(targets.shape[0] * targets.shape[1] + 1, device=values.device) * k
        history = JaggedTensor(values, offsets=offsets)
        pooled = self.attention(targets.flatten(0, 1), history, prior_weights=weights)
        return pooled.view_as(targets)


POOLINGS: dict[str, Callable[[int, float, int], nn.Module]] = {
    "none": lambda width, half_life, max_history: NoHistory(),
    "sum": lambda width, half_life, max_history: Weighted(
        max_history, lambda position, length: torch.ones_like(position)
    ),
    "mean": lambda width, half_life, max_history: Weighted(
        max_history, lambda position, length: 1 / length
    ),
    "recency": lambda width, half_life, max_history: Weighted(
        max_history, functools.partial(recency, half_life=half_life)
    ),
    "din": lambda width, half_life, max_history: ActivationUnit(width, max_history),
    "attention": lambda width, half_life, max_history: Attention(width, None),
    "attention-4-heads": lambda width, half_life, max_history: Attention(width),
    "attention-values": lambda width, half_life, max_history: Attention(
        width, value_projection=True
    ),
    "attention-no-bias": lambda width, half_life, max_history: Attention(width, recency_bias=False),
    "attention-mha": lambda width, half_life, max_history: Attention(
        width, recency_bias=False, value_projection=True
    ),
    "attention-padded": lambda width, half_life, max_history: PaddedAttention(width, max_history),
    "attention-silu": lambda width, half_life, max_history: Attention(width, score="silu"),
    "attention-din": lambda width, half_life, max_history: FusedActivationUnit(width),
    "attention-sigmoid": lambda width, half_life, max_history: Attention(width, score="sigmoid"),
    "encoder+attention": lambda width, half_life, max_history: Attention(width, layers=1),
    "causal-encoder": lambda width, half_life, max_history: CausalEncoder(width),
    "causal-encoder-dropout": lambda width, half_life, max_history: CausalEncoder(
        width, dropout=0.1
    ),
    "sim": lambda width, half_life, max_history: Similar(width, max_history),
}
"""By name: from width, half-life of recency and events of a history at most, to what pools."""
