"""The ranking model of ``quality.py``, its poolings of histories, and scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_jagged_attn import HistoryEncoderLayer, JaggedTargetAttention

ATTENDED = ("item", "category")
Table = TypeVar("Table", bound=BaseEmbeddingConfig)


def rate(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return AUC and NE, the cross-entropy divided by the entropy of the base rate."""
    labels = labels.double()
    loss = F.binary_cross_entropy_with_logits(logits.double(), labels)
    base = torch.distributions.Bernoulli(labels.mean()).entropy()
    return binary_auroc(logits, labels.long()).item(), (loss / base).item()


@dataclass(frozen=True)
class Run:
    """Settings of one training."""

    data: str
    pooling: str
    seed: int = 0
    max_history: int = 200
    width: int = 16
    batch_size: int = 1024
    dense_lr: float = 3e-3
    table_lr: float = 0.2
    half_life: float = 6.0
    dropout: float = 0.0
    weight_decay: float = 0.0
    table_decay: float = 0.0


def make_tables(kind: type[Table], cardinalities: dict[str, int], width: int) -> list[Table]:
    """Return a table per feature; a history shares the table of its feature."""
    return [
        kind(
            name=f"{name}_table",
            embedding_dim=width,
            num_embeddings=rows,
            feature_names=[name, f"{name}_history"] if name in ATTENDED else [name],
        )
        for name, rows in cardinalities.items()
    ]


class Ranker(nn.Module):
    """Logits from a candidate, the pooled history, their product, and further features.

    The features ``item`` and ``category`` share tables with ``item_history`` and
    ``category_history``. Their concatenated embeddings are the candidate and the events.

    Args:
        run: the pooling, sizes and dropout.
        cardinalities: number of ids by feature.
        num_dense: number of dense features.
    """

    def __init__(self, run: Run, cardinalities: dict[str, int], num_dense: int) -> None:
        super().__init__()
        self.num_dense = num_dense
        self.attended = [name for name in ATTENDED if name in cardinalities]
        self.others = [name for name in cardinalities if name not in self.attended]
        self.tables = EmbeddingCollection(make_tables(EmbeddingConfig, cardinalities, run.width))
        embed_dim = run.width * len(self.attended)
        # Created before the pooling, so that initial values do not depend on it.
        self.layers = nn.Sequential(
            nn.Linear(3 * embed_dim + run.width * len(self.others) + num_dense, 128),
            *(nn.ReLU(), nn.Dropout(run.dropout), nn.Linear(128, 64)),
            *(nn.ReLU(), nn.Dropout(run.dropout), nn.Linear(64, 1)),
        )
        self.pooling = POOLINGS[run.pooling](run, embed_dim)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Return logits ``[B]``."""
        embedded = self.tables(sparse)
        target = torch.cat([embedded[name].values() for name in self.attended], 1)
        histories = [embedded[f"{name}_history"] for name in self.attended]
        rows = torch.cat([history.values() for history in histories], 1)
        pooled = self.pooling(target, JaggedTensor(rows, lengths=histories[0].lengths()))
        others = [embedded[name].values() for name in self.others]
        dense = dense[:, : self.num_dense]
        return self.layers(torch.cat([target, pooled, target * pooled, *others, dense], 1)).squeeze(
            1
        )


class PaddedPooling(nn.Module):
    """Base class of poolings that pad histories."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.max_history = run.max_history

    def padded(self, rows: JaggedTensor) -> tuple[Tensor, Tensor]:
        """Return rows ``[B, L, E]``, the newest last, and a mask of events ``[B, L]``."""
        begins, ends = rows.offsets()[:-1].unsqueeze(1), rows.offsets()[1:].unsqueeze(1)
        index = ends - self.max_history + torch.arange(self.max_history, device=ends.device)
        is_event = index >= begins
        x = nn.functional.pad(
            rows.values(), (0, 0, 0, 1)
        )  # an extra row, for batches without events
        return x[index.clamp(min=0)], is_event


class Mean(PaddedPooling):
    """Mean weighted by recency, whose weights halve every ``half_life`` events."""

    def __init__(self, run: Run, half_life: float = torch.inf) -> None:
        super().__init__(run)
        self.half_life = half_life

    def forward(self, target: Tensor, rows: JaggedTensor) -> Tensor:
        x, is_event = self.padded(rows)
        position = torch.arange(self.max_history - 1, -1, -1, device=x.device)
        weights = is_event * 0.5 ** (position / self.half_life)
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-30)
        return torch.einsum("bl,ble->be", weights, x)


class ActivationUnit(PaddedPooling):
    """DIN's activation unit: a sum weighted by an MLP of ``[q, x, q - x, q · x]``.

    Source:
        Deep Interest Network (KDD '18, https://arxiv.org/abs/1706.06978).
    """

    def __init__(self, run: Run, embed_dim: int) -> None:
        super().__init__(run)
        self.weigh = nn.Sequential(
            *(nn.Linear(4 * embed_dim, 64), nn.PReLU(), nn.Linear(64, 16), nn.PReLU()),
            nn.Linear(16, 1),
        )

    def forward(self, target: Tensor, rows: JaggedTensor) -> Tensor:
        x, is_event = self.padded(rows)
        q = target.unsqueeze(1).expand_as(x)
        weights = self.weigh(torch.cat([q, x, q - x, q * x], 2)).squeeze(2)
        return torch.einsum("bl,ble->be", weights * is_event, x)


class EncodedAttention(nn.Module):
    """Attention behind an encoder layer, as with ``EncoderConfig()`` in a collection."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.attention = JaggedTargetAttention(embed_dim)
        self.encoder = HistoryEncoderLayer(embed_dim, min(4, self.attention.num_heads))

    def forward(self, target: Tensor, rows: JaggedTensor) -> Tensor:
        return self.attention(target, self.encoder(rows))


POOLINGS: dict[str, Callable[[Run, int], nn.Module]] = {
    "mean": lambda run, embed_dim: Mean(run),
    "recency": lambda run, embed_dim: Mean(run, run.half_life),
    "din": ActivationUnit,
    "attention": lambda run, embed_dim: JaggedTargetAttention(embed_dim),
    "encoder": lambda run, embed_dim: EncodedAttention(embed_dim),
}
"""Factories by name; arguments are the run and the width of history rows."""
