"""What ``end_to_end.py --quality`` trains: a DLRM on logs of users, from the same weights."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from end_to_end_models import Provider, make_collection, make_pipeline
from events import NUM_DENSE_FEATURES, Events, Examples, evaluation_batches, training_batches
from movielens import read_movielens
from planted import planted_log
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.metrics.ne import compute_ne, get_ne_states
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_jagged_attn import TargetAttentionConfig

__all__ = ["BATCH", "WIDTH", "Point", "curve", "read_events"]

BATCH = 1024  # of all ranks
WIDTH, HEADS = 16, 4
MAX_HISTORY = 200
TABLE_LR = 0.05
POINTS = 10
"""Of an epoch, where figures are taken."""
ATTENDED = ("item", "category")


@dataclass
class Point:
    """Figures of a training.

    Attributes:
        epoch: how much of it is done; 1.5 is in the middle of the second one.
        figures: by ``"train"``, of the batches since the last point, or ``"test"``; and by
            ``"loss"``, ``"ne"`` or ``"auc"``.
    """

    epoch: float
    figures: dict[tuple[str, str], float] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(f"{mode} {name} {x:.4f}" for (mode, name), x in self.figures.items())


def read_events(data: str) -> Events:
    """Of ``"planted"``, or of a folder of MovieLens-1M."""
    log = planted_log() if data == "planted" else read_movielens(Path(data))
    return Events(log, max_history=MAX_HISTORY)


def make_model(provider: Provider, events: Events) -> DLRMTrain:
    """As in ``examples/train_dlrm.py``, but that no attention has a bias by recency."""
    tables = [
        EmbeddingBagConfig(
            name=f"{name}_table",
            embedding_dim=WIDTH,
            num_embeddings=rows,
            feature_names=[name, f"{name}_history"] if name in ATTENDED else [name],
        )
        for name, rows in events.log.cardinalities().items()
    ]
    config = TargetAttentionConfig(
        target=[*ATTENDED],
        history=[f"{name}_history" for name in ATTENDED],
        num_heads=HEADS,
        recency_bias=False,
        value_projection=True,
    )
    return DLRMTrain(
        DLRM(
            embedding_bag_collection=make_collection(provider, tables, [config], MAX_HISTORY),  # pyright: ignore[reportArgumentType]
            dense_in_features=NUM_DENSE_FEATURES,
            dense_arch_layer_sizes=[64, WIDTH],
            over_arch_layer_sizes=[128, 64, 1],
            dense_device=None,
        )
    )


def curve(
    provider: Provider, data: str, epochs: int, device: torch.device, events: Events | None = None
) -> Iterator[Point]:
    """Trains, and gives figures ``POINTS`` times in each epoch; on a GPU with autocast to bf16.

    Args:
        data: as for :func:`read_events`.
        events: what that gives, if it is known.
    """
    events = read_events(data) if events is None else events
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pipeline = make_pipeline(
        provider, make_model(provider, events), BATCH // ranks, device, table_lr=TABLE_LR
    )
    for epoch in range(epochs):
        examples = events.training(epoch)
        batches = training_batches(
            len(examples), BATCH, seed=0, epoch=epoch, rank=rank, world_size=ranks
        )
        bounds = [len(batches) * i // POINTS for i in range(POINTS + 1)]
        for i, (first, last) in enumerate(itertools.pairwise(bounds), 1):
            point = Point(epoch + i / POINTS)
            parts = [("train", examples, batches[first:last])]
            testing = events.testing()
            parts.append(
                (
                    "test",
                    testing,
                    evaluation_batches(len(testing), BATCH, rank=rank, world_size=ranks),
                )
            )
            for mode, of, some in parts:
                if some:
                    logits, labels = run(pipeline, of, some, mode == "train", device)
                    for name, value in rate(logits, labels).items():
                        point.figures[mode, name] = value
            yield point


def run(
    pipeline: TrainPipelineSparseDist,
    examples: Examples,
    batches: list[Tensor],
    trains: bool,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Logits and labels of ``batches``, ``[S]``, of all ranks."""
    on_gpu = device.type == "cuda"
    pipeline._model.train(trains)
    made = (examples[index] for index in batches)
    loader = iter([batch.pin_memory() for batch in made] if on_gpu else made)
    logits, labels = [], []
    autocast = torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext()
    with torch.set_grad_enabled(trains), autocast:
        for _ in batches:
            _, of_logits, of_labels = pipeline.progress(loader)
            logits.append(of_logits.float())
            labels.append(of_labels)
    both = torch.stack([torch.cat(logits), torch.cat(labels)])
    of_ranks = [torch.empty_like(both) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, both)
    all_logits, all_labels = torch.stack(of_ranks, 2).flatten(1)
    return all_logits[: len(examples)], all_labels[: len(examples)]


def rate(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Cross-entropy in nats, NE, and AUC."""
    states = get_ne_states(labels, logits.sigmoid(), torch.ones_like(labels), eta=1e-12)
    ne = compute_ne(
        states["cross_entropy_sum"],
        states["weighted_num_samples"],
        states["pos_labels"],
        states["neg_labels"],
        eta=1e-12,
    )
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), labels.double())
    auc = binary_auroc(logits.sigmoid(), labels.long())
    return {"loss": loss.item(), "ne": ne.item(), "auc": auc.item()}
