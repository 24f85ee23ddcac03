"""The ranking model of ``quality.py``, and its poolings of a history."""

from __future__ import annotations

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
    """

    def __init__(self, pooling: str, num_items: int, width: int, half_life: float) -> None:
        super().__init__()
        self.items = nn.Embedding(num_items, width)
        nn.init.normal_(self.items.weight, std=width**-0.5)
        # Before the pooling, so that they start alike with each.
        self.layers = nn.Sequential(nn.Linear(3 * width, 64), nn.ReLU(), nn.Linear(64, 1))
        self.pooling = POOLINGS[pooling](width, half_life)

    def forward(self, history: Tensor, offsets: Tensor, candidates: Tensor) -> Tensor:
        """``[B, T]`` of ``candidates`` ``[B, T]``; ``history`` has ``[N]`` items of ``B`` users."""
        targets = self.items(candidates)
        rows = JaggedTensor(self.items(history), offsets=offsets)
        user = self.pooling(targets, rows).expand_as(targets)
        return self.layers(torch.cat([user, targets, user * targets], 2)).squeeze(2)


def padded(rows: JaggedTensor) -> tuple[Tensor, Tensor]:
    """``[B, L, W]`` and which of them are rows, ``[B, L]``; the newest is the last of a user's."""
    lengths = rows.lengths()
    places = torch.arange(int(lengths.max()), device=lengths.device)
    is_row = places < lengths.unsqueeze(1)
    dense = rows.values().new_zeros(*is_row.shape, rows.values().shape[1])
    dense[is_row] = rows.values()
    return dense, is_row


class NoHistory(nn.Module):
    """Zeros."""

    def forward(self, targets: Tensor, rows: JaggedTensor) -> Tensor:
        return torch.zeros_like(targets)


class Weighted(nn.Module):
    """A sum of rows by their position: ``weigh`` makes ``[N]`` weights of events from the end."""

    def __init__(self, weigh: Callable[[Tensor], Tensor], is_mean: bool) -> None:
        super().__init__()
        self.weigh, self.is_mean = weigh, is_mean

    def forward(self, targets: Tensor, rows: JaggedTensor) -> Tensor:
        x, lengths, offsets = rows.values(), rows.lengths(), rows.offsets()
        index = torch.arange(len(x), device=x.device)
        weights = self.weigh(offsets[1:].repeat_interleave(lengths) - 1 - index).to(x.dtype)
        sums = torch.cat([x * weights.unsqueeze(1), weights.unsqueeze(1)], 1)
        sums = torch.segment_reduce(sums, "sum", lengths=lengths, initial=0, unsafe=True)
        pooled, total = sums.split([x.shape[1], 1], dim=1)
        return (pooled / total.clamp(min=1e-30) if self.is_mean else pooled).unsqueeze(1)


class ActivationUnit(nn.Module):
    """DIN's: a weight of each row by an MLP of ``[q, x, q - x, q · x]``, and a sum, on padded rows.

    Source:
        Deep Interest Network (KDD '18, https://arxiv.org/abs/1706.06978).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            nn.Linear(4 * width, 64), nn.PReLU(), nn.Linear(64, 16), nn.PReLU(), nn.Linear(16, 1)
        )

    def forward(self, targets: Tensor, rows: JaggedTensor) -> Tensor:
        x, is_row = padded(rows)
        q, x = targets.unsqueeze(2), x.unsqueeze(1)
        q, x = torch.broadcast_tensors(q, x)
        weights = self.weigh(torch.cat([q, x, q - x, q * x], 3)).squeeze(3)
        weights = weights.masked_fill(~is_row.unsqueeze(1), 0)
        return torch.einsum("btl,btld->btd", weights, x)


class Attention(nn.Module):
    """Layers of self-attention, and then target attention."""

    def __init__(self, width: int, layers: int = 0, **options) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(HistoryEncoderLayer(width, HEADS) for _ in range(layers)))
        self.attention = JaggedTargetAttention(width, HEADS, **options)

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
        index = torch.arange(num_samples, device=targets.device).repeat_interleave(num_targets)
        repeated = JaggedLayout.from_lengths(rows.lengths()[index])
        of_sample = index[repeated.sample_ids()]
        there = rows.offsets()[1:][of_sample] - 1 - repeated.positions_from_end()
        history = JaggedTensor(rows.values()[there], offsets=repeated.offsets)
        return self.attention(targets.flatten(0, 1), history).view(num_samples, -1, width)


class PaddedAttention(nn.Module):
    """The pooling ``attention-mha`` on padded rows; it starts from the same weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        start = JaggedTargetAttention(width, HEADS, recency_bias=False, value_projection=True)
        self.attention = nn.MultiheadAttention(width, HEADS, batch_first=True)
        self.attention.load_state_dict(start.state_dict())

    def forward(self, targets: Tensor, rows: JaggedTensor) -> Tensor:
        x, is_row = padded(rows)
        return self.attention(targets, x, x, key_padding_mask=~is_row, need_weights=False)[0]


class CausalEncoder(nn.Module):
    """Layers of causal self-attention; the newest row is the user."""

    def __init__(self, width: int, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(HistoryEncoderLayer(width, HEADS, causal=True) for _ in range(layers))
        )

    def forward(self, targets: Tensor, rows: JaggedTensor) -> Tensor:
        return self.layers(rows).values()[rows.offsets()[1:] - 1].unsqueeze(1)


class Similar(nn.Module):
    """Target attention over the rows that are most similar to the target, as SIM's first stage.

    Source:
        Search-based Interest Model (CIKM '20, https://arxiv.org/abs/2006.05639).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = JaggedTargetAttention(width, HEADS)

    def forward(self, targets: Tensor, rows: JaggedTensor) -> Tensor:
        x, is_row = padded(rows)
        scores = torch.einsum("btd,bld->btl", targets, x).detach()
        scores = scores.masked_fill(~is_row.unsqueeze(1), -torch.inf)
        k = min(SIMILAR, x.shape[1])
        chosen = scores.topk(k, dim=2).indices.sort(dim=2).values  # in order of time
        there = is_row.unsqueeze(1).expand_as(scores).gather(2, chosen).flatten(0, 1)
        index = chosen.flatten(1).unsqueeze(2).expand(-1, -1, x.shape[2])
        values = x.gather(1, index).view(-1, k, x.shape[2])
        history = JaggedTensor(values[there], lengths=there.sum(1))
        return self.attention(targets.flatten(0, 1), history).view_as(targets)


POOLINGS: dict[str, Callable[[int, float], nn.Module]] = {
    "none": lambda width, half_life: NoHistory(),
    "sum": lambda width, half_life: Weighted(torch.ones_like, is_mean=False),
    "mean": lambda width, half_life: Weighted(torch.ones_like, is_mean=True),
    "recency": lambda width, half_life: Weighted(
        lambda position: torch.exp2(-position / half_life), is_mean=True
    ),
    "din": lambda width, half_life: ActivationUnit(width),
    "attention": lambda width, half_life: Attention(width),
    "attention-dropout": lambda width, half_life: Attention(width, row_dropout=0.2),
    "attention-values": lambda width, half_life: Attention(width, value_projection=True),
    "attention-no-bias": lambda width, half_life: Attention(width, recency_bias=False),
    "attention-mha": lambda width, half_life: Attention(
        width, recency_bias=False, value_projection=True
    ),
    "attention-padded": lambda width, half_life: PaddedAttention(width),
    "attention-silu": lambda width, half_life: Attention(width, score="silu"),
    "attention-din": lambda width, half_life: FusedActivationUnit(width),
    "attention-sigmoid": lambda width, half_life: Attention(width, score="sigmoid"),
    "encoder+attention": lambda width, half_life: Attention(width, layers=1),
    "causal-encoder": lambda width, half_life: CausalEncoder(width),
    "sim": lambda width, half_life: Similar(width),
}
"""By name: from the width of embeddings, and the half-life of recency, to what pools."""
