"""Models of a ``TrainPipelineCudaGraph``: tables of any size and pooling, layers of any kind."""

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.pipeline.training import (
    SHORT_WARM_UP,
    Run,
    WithLayer,
    make_batch,
    make_dlrm,
    make_pipeline,
    short_warm_up,
    train,
    train_alike,
)
from tests.torchrec.two_ranks import collection_of, make_model
from torchrec_jagged_attn.pipeline import train_pipeline
from torchrec_jagged_attn.pipeline.learning_rates import LearningRateError
from torchrec_jagged_attn.pipeline.padded_step import PaddedStep

NUM_STEPS = 8
USE_TORCHREC = "use TrainPipelineSparseDist"


@pytest.fixture(autouse=True)
def captured_early() -> Iterator[None]:
    with short_warm_up():
        yield


def train_model(
    device: torch.device,
    model: Callable[[], nn.Module],
    batches: Callable[[], Iterable[Batch]] = lambda: map(make_batch, range(NUM_STEPS)),
    **options: Any,
) -> Run:
    return train_alike(device, model, batches, **options)


# Tables


@pytest.mark.parametrize("num_cats", [5, 1])
def test_padding_of_a_small_table(num_cats: int, device: torch.device):
    """Padding has ids of its own feature, which FBGEMM checks."""
    sharding = {"fused_params": {"bounds_check_mode": BoundsCheckMode.FATAL}}
    run = train_model(
        device,
        lambda: make_model(single_lookup=True, rows={"t_cat": num_cats}),
        lambda: (make_batch(step, num_cats=num_cats) for step in range(NUM_STEPS)),
        sharding=sharding,
    )
    assert run.lookups == {"inside"}
    assert run.num_replayed_steps == NUM_STEPS - SHORT_WARM_UP


def with_moved_ids(step: int) -> Batch:
    """Tags of sample ``i`` may become items that it bought: the number of all ids is constant."""
    batch, rng = make_batch(step, bag_length=2, length=4), random.Random(step)
    features = batch.sparse_features
    keys = features.keys()
    lengths = features.lengths().view(len(keys), -1).clone()
    for sample in range(features.stride()):
        moved = rng.randint(0, 2)
        lengths[keys.index("tags"), sample] -= moved
        lengths[keys.index("bought"), sample] += moved
    features = KeyedJaggedTensor(keys, features.values(), lengths=lengths.flatten())
    return dataclasses.replace(batch, sparse_features=features)


@pytest.mark.parametrize("first", [0, 5])
def test_ids_of_sum_and_mean_tables(first: int, device: torch.device):
    """Two lookups of one collection, from step ``first`` on with ids that vary."""
    num_steps = 12

    def batches() -> Iterator[Batch]:
        for step in range(num_steps):
            if step >= first:
                yield with_moved_ids(step)
            else:
                yield make_batch(step, bag_length=2, length=4)

    run = train_model(device, make_dlrm, batches)
    assert run.num_replayed_steps > 0
    assert run.num_replayed_steps + sum(run.eager_steps.values()) == num_steps


def test_half_precision_tables(device: torch.device):
    run = train_model(
        device,
        lambda: make_model(data_type=DataType.FP16),
        dtype=torch.float16,
        sharding={"fused_params": {"stochastic_rounding": False}},
    )
    assert run.num_replayed_steps == NUM_STEPS - SHORT_WARM_UP


class TwoCollections(nn.Module):
    """A DLRM with attention, and another collection with attention of several heads."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model(single_lookup=True)
        self.collection = collection_of(make_model(side_by_side=False, init="mha"))
        self.linear = nn.Linear(7 * 8, 1)

    def forward(self, batch: Any) -> tuple[Tensor, Any]:
        loss, outputs = self.model(batch)
        x = self.linear(self.collection(batch.sparse_features).values()).squeeze(-1)
        return loss + F.binary_cross_entropy_with_logits(x, batch.labels.float()), outputs


def test_two_collections(device: torch.device):
    run = train_model(device, TwoCollections)
    assert run.num_replayed_steps == NUM_STEPS - SHORT_WARM_UP


# Layers


class Tied(nn.Module):
    """Reads a weight as an attribute, and from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)
        self.weights = [self.first.weight]

    def forward(self, logits: Tensor, batch: Any) -> Tensor:
        x = torch.tanh(self.first(batch.dense_features))
        return logits + self.last(F.linear(x, self.weights[0].t())).squeeze(-1)


def test_parameters_in_lists(device: torch.device):
    pipeline = make_pipeline(device, WithLayer(make_model(), Tied()))
    match = rf"read as attributes of their modules .*\['layer.first.weight'\].*{USE_TORCHREC}"
    with pytest.raises(NotImplementedError, match=match):
        train(pipeline, map(make_batch, range(NUM_STEPS)))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(3, 3), nn.Linear(3, 1)
        self.use_reentrant = use_reentrant

    def forward(self, logits: Tensor, batch: Any) -> Tensor:
        x = batch.dense_features.detach().requires_grad_()
        x = checkpoint(lambda x: torch.tanh(self.hidden(x)), x, use_reentrant=self.use_reentrant)
        return logits + self.last(x).squeeze(-1)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant: bool, device: torch.device):
    run = train_model(device, lambda: WithLayer(make_model(), Checkpointed(use_reentrant)))
    assert run.num_replayed_steps == NUM_STEPS - SHORT_WARM_UP


class Averaged(nn.Module):
    """Replaces a buffer in each forward."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, logits: Tensor, batch: Any) -> Tensor:
        x = batch.dense_features
        self.average = 0.9 * self.average + 0.1 * x.mean(dim=0)
        return logits + self.linear(x - self.average).squeeze(-1)


def test_replaced_buffers(device: torch.device):
    pipeline = make_pipeline(device, WithLayer(make_model(), Averaged()))
    match = rf"must change buffers in place .*for \['layer.average'\]: {USE_TORCHREC}"
    with pytest.raises(NotImplementedError, match=match):
        train(pipeline, map(make_batch, range(NUM_STEPS)))


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, logits: Tensor, batch: Any) -> Tensor:
        return logits + self.linear(self.norm(batch.dense_features)).squeeze(-1)


class FailingStep(PaddedStep):
    """Fails behind its passes if lookups are inside."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self._ids:
            raise LearningRateError("no learning rate was found")


def test_buffers_after_a_capture_that_fails(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """Lookups are outside in the next one, which starts from the same buffers."""
    monkeypatch.setattr(train_pipeline, "PaddedStep", FailingStep)
    run = train_model(device, lambda: WithLayer(make_model(), Normalized()))
    assert run.lookups == {"outside"}
    assert run.num_captures == 1
    assert run.state["model"]["layer.norm.num_batches_tracked"] == NUM_STEPS


class ReturningFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def forward(self, batch: Any) -> tuple[Tensor, Any]:
        loss, _ = self.model(batch)
        return loss, (loss.detach(), batch.sparse_features)


def test_features_in_outputs(device: torch.device):
    pipeline = make_pipeline(device, ReturningFeatures())
    match = f"outputs of the model must have no KeyedJaggedTensor .*{USE_TORCHREC}"
    with pytest.raises(NotImplementedError, match=match):
        train(pipeline, map(make_batch, range(NUM_STEPS)))
