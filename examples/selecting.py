"""A model of a part of its users' events: the most relevant, the newest, or random ones."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from events import LONGEST_DWELL, Events
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRMTrain
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_jagged_attn.events import EventSelection, Relevance

HISTORY = ["item_history", "category_history", "dwell_history"]


class ShareOfHistory(nn.Module):
    """The budget of each user: a part of the history, at least one event of it.

    Args:
        key: of a feature of the events.
        budget: the part, over 0 and at most 1.
    """

    def __init__(self, key: str, budget: float) -> None:
        super().__init__()
        self.key, self.budget = key, budget

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return (features[self.key].lengths() * self.budget).ceil().long()


class ByRelevance(nn.Module):
    """How likely each event converts.

    Args:
        relevance: fitted.
        dwell: key of the events' dwell times.
        surface: key of where they were.
    """

    def __init__(self, relevance: Relevance, dwell: str, surface: str) -> None:
        super().__init__()
        self.relevance, self.dwell, self.surface = relevance, dwell, surface

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.relevance(features[self.dwell].values(), features[self.surface].values())


class AtRandom(nn.Module):
    """A random score for each event."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        events = features[self.key].values()
        return torch.rand(events.numel(), device=events.device)


def selection_of(way: str, budget: float, keys: list[str], relevance: ByRelevance) -> nn.Module:
    """Keeps a part of each user's events by `way`: "relevance", "newest" or "random"."""
    scores = {"relevance": relevance, "newest": None, "random": AtRandom(keys[0])}[way]
    return EventSelection(keys, ShareOfHistory(keys[0], budget), scores=scores)


def fit_relevance(events: Events) -> ByRelevance:
    """Fits the relevance of all events in training time; surfaces are categories of items.

    Each rank counts a share of them, and all get the same coefficients.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    log, rows = events.log, events.rows_of_training[rank::world_size]
    surface = log.category[log.item]
    relevance = Relevance(int(log.category.max()) + 1, max_dwell=LONGEST_DWELL)
    relevance.update(*(torch.from_numpy(np.ascontiguousarray(x[rows]))
                       for x in (log.dwell, surface, log.converted)))  # fmt: skip
    relevance.fit()
    return ByRelevance(relevance, "dwell_history", "category_history")


class SelectingTrain(DLRMTrain):
    """Trains a DLRM on the events that a module keeps; others are removed before the lookups.

    Args:
        train: whose DLRM is trained.
        selection: from the features of a batch to those that are kept.
    """

    def __init__(self, train: DLRMTrain, selection: nn.Module) -> None:
        super().__init__(train.model)
        self.selection = selection

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        features = self.selection(batch.sparse_features)
        logits = self.model(batch.dense_features, features).squeeze(-1)
        loss = self.loss_fn(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())
