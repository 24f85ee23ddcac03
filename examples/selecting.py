"""Train a DLRM on a share of each user's events: the most relevant, the newest, or random ones."""

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
    """Returns the budget of each user, a share of the history, rounded up.

    Args:
        key: key of a feature of the events.
        budget: the share, above 0 and at most 1.
    """

    def __init__(self, key: str, budget: float) -> None:
        super().__init__()
        self.key, self.budget = key, budget

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return (features[self.key].lengths() * self.budget).ceil().long()


class ByRelevance(nn.Module):
    """Returns the probability that each event converts.

    Args:
        relevance: a fitted module.
        dwell: key of the dwell times.
        surface: key of the surfaces.
    """

    def __init__(self, relevance: Relevance, dwell: str, surface: str) -> None:
        super().__init__()
        self.relevance, self.dwell, self.surface = relevance, dwell, surface

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.relevance(features[self.dwell].values(), features[self.surface].values())


class AtRandom(nn.Module):
    """Returns a random score for each event."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        events = features[self.key].values()
        return torch.rand(events.numel(), device=events.device)


def selection_of(way: str, budget: float, keys: list[str], relevance: ByRelevance) -> nn.Module:
    """Return a module that keeps a share of each user's events: relevant, newest or random ones."""
    scores = {"relevance": relevance, "newest": None, "random": AtRandom(keys[0])}[way]
    return EventSelection(keys, ShareOfHistory(keys[0], budget), scores=scores)


def fit_relevance(events: Events) -> ByRelevance:
    """Fit the relevance to all events in the training period; surfaces are categories of items.

    Each rank counts a share of the events, and all ranks get the same coefficients.
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
    """Trains a DLRM on the events that a module keeps; other events are removed before the lookups.

    Args:
        train: the DLRM and its loss.
        selection: a module that takes and returns the features of a batch.
    """

    def __init__(self, train: DLRMTrain, selection: nn.Module) -> None:
        super().__init__(train.model)
        self.selection = selection

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        features = self.selection(batch.sparse_features)
        logits = self.model(batch.dense_features, features).squeeze(-1)
        loss = self.loss_fn(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())
