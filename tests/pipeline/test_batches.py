"""Batches of a ``TrainPipelineCudaGraph``: of any class, with Python values, read by any layer."""

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRMTrain
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from tests.pipeline.training import (
    PIPELINES,
    SHORT_WARM_UP,
    ScaledBatch,
    WithLayer,
    count_reasons,
    make_batch,
    make_pipeline,
    poison,
    short_warm_up,
    train,
    train_alike,
)
from tests.torchrec.test_batches_of_ranks import as_tensor_dict
from tests.torchrec.two_ranks import make_model
from torchrec_jagged_attn.pipeline.batches import StepInputs, difference

NUM_STEPS = 8


@pytest.fixture(autouse=True)
def captured_early() -> Iterator[None]:
    with short_warm_up():
        yield


@Pipelineable.register
class NamedBatch(NamedTuple):
    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "NamedBatch":
        return NamedBatch(*(x.to(device, non_blocking=non_blocking) for x in self))

    def record_stream(self, stream: Any) -> None:
        for x in self:
            x.record_stream(stream)


@Pipelineable.register
class TupleBatch(tuple):
    def to(self, device: torch.device, non_blocking: bool = False) -> "TupleBatch":
        return TupleBatch(x.to(device, non_blocking=non_blocking) for x in self)

    def record_stream(self, stream: Any) -> None:
        for x in self:
            x.record_stream(stream)


@Pipelineable.register
class DictBatch(dict):
    def to(self, device: torch.device, non_blocking: bool = False) -> "DictBatch":
        parts = self.items()
        return DictBatch({name: x.to(device, non_blocking=non_blocking) for name, x in parts})

    def record_stream(self, stream: Any) -> None:
        for x in self.values():
            x.record_stream(stream)


@Pipelineable.register
class Nested:
    """An object with attributes, which hold a dict and a list."""

    def __init__(self, batch: Batch) -> None:
        self.features = {"dense": batch.dense_features, "sparse": batch.sparse_features}
        self.labels = [batch.labels]
        self.name, self.weight = "a batch", 2.0

    def to(self, device: torch.device, non_blocking: bool = False) -> "Nested":
        moved = copy.copy(self)
        moved.features = {name: x.to(device) for name, x in self.features.items()}
        moved.labels = [x.to(device) for x in self.labels]
        return moved

    def record_stream(self, stream: Any) -> None:
        for x in (*self.features.values(), *self.labels):
            x.record_stream(stream)


@Pipelineable.register
@dataclasses.dataclass(slots=True)
class SlotBatch:
    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "SlotBatch":
        parts = (self.dense, self.sparse, self.labels)
        return SlotBatch(*(x.to(device, non_blocking=non_blocking) for x in parts))

    def record_stream(self, stream: Any) -> None:
        for x in (self.dense, self.sparse, self.labels):
            x.record_stream(stream)


class Reading(DLRMTrain):
    """A DLRM on a batch of another class, whose tensors ``parts`` returns."""

    def __init__(self, model: DLRMTrain, parts: Callable[[Any], Any]) -> None:
        super().__init__(model.model)
        self._parts = parts

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        dense, sparse, labels = self._parts(batch)
        logits = self.model(dense, sparse).squeeze(-1)
        loss = self.loss_fn(logits, labels.float())
        return loss, logits.detach()


# How a batch becomes one of each class, and its tensors.
CLASSES: dict[str, tuple[Callable[[Batch], Any], Callable[[Any], Any]]] = {
    "dataclass": (
        lambda batch: batch,
        lambda x: (x.dense_features, x.sparse_features, x.labels),
    ),
    "NamedTuple": (
        lambda x: NamedBatch(x.dense_features, x.sparse_features, x.labels),
        lambda x: (x.dense, x.sparse, x.labels),
    ),
    "dataclass with slots": (
        lambda x: SlotBatch(x.dense_features, x.sparse_features, x.labels),
        lambda x: (x.dense, x.sparse, x.labels),
    ),
    "tuple": (
        lambda x: TupleBatch((x.dense_features, x.sparse_features, x.labels)),
        lambda x: (x[0], x[1], x[2]),
    ),
    "dict": (
        lambda x: DictBatch(dense=x.dense_features, sparse=x.sparse_features, labels=x.labels),
        lambda x: (x["dense"], x["sparse"], x["labels"]),
    ),
    "nested": (
        Nested,
        lambda x: (x.features["dense"], x.features["sparse"], x.labels[0]),
    ),
    "TensorDict": (
        lambda x: dataclasses.replace(x, sparse_features=as_tensor_dict(x.sparse_features)),
        lambda x: (x.dense_features, x.sparse_features, x.labels),
    ),
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_batches(name: str, device: torch.device):
    if name == "TensorDict" and device.type == "cuda":
        pytest.skip("tensordict refuses the second stream of TorchRec's pipelines")
    convert, parts = CLASSES[name]
    run = train_alike(
        device,
        lambda: Reading(make_model(), parts),
        lambda: (convert(make_batch(step)) for step in range(NUM_STEPS)),
        poison,
    )
    assert run.num_replayed_steps == NUM_STEPS - SHORT_WARM_UP


def test_a_tensor_dict_among_other_batches(device: torch.device):
    """TorchRec exchanges its ids; its input dists misread the batch after it."""
    if device.type == "cuda":
        pytest.skip("tensordict refuses the second stream of TorchRec's pipelines")
    batches = [make_batch(step) for step in range(NUM_STEPS)]
    later = batches[-2]
    tensor_dict = dataclasses.replace(later, sparse_features=as_tensor_dict(later.sparse_features))
    with short_warm_up():
        expected = train(make_pipeline(device), batches)
        run = train(make_pipeline(device), [*batches[:-2], tensor_dict, batches[-1]])
    assert torch.equal(run.losses, expected.losses)
    assert run.exchanges == {"fixed"}


class Scaling(nn.Module):
    def forward(self, logits: Tensor, batch: Any) -> Tensor:
        return logits * batch.scale


def test_another_python_value_in_a_batch(device: torch.device):
    """A step on it is eager."""
    scales = [1.0] * 5 + [2.0] + [1.0] * 3
    batches = [ScaledBatch(**vars(make_batch(i)), scale=scale) for i, scale in enumerate(scales)]
    run = train_alike(device, lambda: WithLayer(make_model(), Scaling()), lambda: batches)
    assert run.eager_steps == {"warm-up": SHORT_WARM_UP, "another value: batch.scale": 1}
    assert run.num_captures == 1


def test_sizes_in_the_warning(device: torch.device, caplog: pytest.LogCaptureFixture):
    """Sizes vary, so that the step is not captured again."""
    sizes = [4] * 4 + [3, 4] * 6
    pipeline = make_pipeline(device)
    name = "torchrec_jagged_attn.pipeline.train_pipeline"
    with caplog.at_level(logging.WARNING, name):
        train(pipeline, (make_batch(i, num_samples=size) for i, size in enumerate(sizes)))
    ((reason, count),) = [x for x in pipeline.eager_steps.items() if x[0] != "warm-up"]
    assert (reason, count) == ("another value: the shape of batch.dense_features", 6)
    sizes_of_both = "got [3, 3], captured [4, 3]; with drop_last=True batches have one size"
    messages = [record.message for record in caplog.records if record.name == name]
    assert messages == [f"6 steps were eager: {reason}: {sizes_of_both}"]


OTHER_DTYPES = r"another value: the dtypes of batch\.sparse_features"
CHANGED = 5
"""The first step with features of another dtype, or without weights."""


def with_features(
    step: int, change: Callable[[KeyedJaggedTensor], KeyedJaggedTensor], **options: Any
) -> Batch:
    """A batch whose features are ``change(features)`` before the step ``CHANGED``."""
    batch = make_batch(step, **options)
    if step >= CHANGED:
        return batch
    return dataclasses.replace(batch, sparse_features=change(batch.sparse_features))


def with_int32_values(x: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(x.keys(), x.values().int(), lengths=x.lengths())


def with_half_weights(x: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(x.keys(), x.values(), x.weights().half(), lengths=x.lengths())


WEIGHTED = {"is_weighted": True, "tags": PoolingType.SUM}
OPTIMIZER = {"optimizer": "RowWiseAdagrad"}


@pytest.mark.parametrize(
    ("change", "options"), [(with_int32_values, {}), (with_half_weights, WEIGHTED)]
)
def test_other_dtypes_of_features(
    change: Callable[[KeyedJaggedTensor], KeyedJaggedTensor],
    options: dict[str, Any],
    device: torch.device,
):
    """A step on them is eager, until they are captured."""
    is_weighted = "is_weighted" in options
    batches = [with_features(step, change, is_weighted=is_weighted) for step in range(12)]
    run = train_alike(device, lambda: make_model(**options), lambda: batches, sharding=OPTIMIZER)
    assert run.num_captures == 2
    assert count_reasons(run, OTHER_DTYPES) == 5


def test_missing_weights(device: torch.device):
    """A step without them is eager, and has the error of an eager step."""
    errors = []
    for pipeline_type in PIPELINES:
        model = make_model(**WEIGHTED)
        pipeline = make_pipeline(device, model, pipeline_type, sharding=OPTIMIZER)
        batches = (make_batch(step, is_weighted=step < CHANGED) for step in range(NUM_STEPS))
        with pytest.raises(Exception) as error:  # noqa: PT011
            train(pipeline, batches)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]
    assert pipeline.num_replayed_steps == CHANGED - SHORT_WARM_UP
    assert set(pipeline.eager_steps) == {"warm-up", OTHER_DTYPES.replace("\\", "")}


class ReadingLengths(nn.Module):
    """Reads all of a KeyedJaggedTensor that is not padded."""

    def forward(self, logits: Tensor, batch: Any) -> Tensor:
        features = batch.sparse_features
        lengths = features.lengths().view(len(features.keys()), features.stride())
        return logits + 0.1 * (features["hist"].lengths() + lengths.sum(dim=0))


def test_layers_may_read_lengths(device: torch.device):
    run = train_alike(
        device,
        lambda: WithLayer(make_model(), ReadingLengths()),
        lambda: map(make_batch, range(NUM_STEPS)),
        poison,
    )
    assert run.num_replayed_steps == NUM_STEPS - SHORT_WARM_UP


class ReadingValues(nn.Module):
    def __init__(self, read: Callable[[KeyedJaggedTensor], Tensor]) -> None:
        super().__init__()
        self._read = read

    def forward(self, logits: Tensor, batch: Any) -> Tensor:
        return logits + 0.1 * self._read(batch.sparse_features)


READS: dict[str, tuple[Callable[[KeyedJaggedTensor], Tensor], str]] = {
    "values": (lambda x: x.values().sum(), "the values"),
    "values of a feature": (lambda x: x["user"].values(), "the values of 'user'"),
    "offsets": (lambda x: x.offsets().sum(), "the values"),
    "to_dict": (lambda x: x.to_dict()["user"].values(), "the values"),
    "a dense feature": (lambda x: x["user"].to_padded_dense(1).sum(1), "the values of 'user'"),
}


@pytest.mark.parametrize("name", READS)
def test_layers_must_not_read_values(name: str, device: torch.device):
    """They would be padded, and are read in eager steps."""
    read, what = READS[name]
    pipeline = make_pipeline(device, WithLayer(make_model(), ReadingValues(read)))
    match = f"got 'layer', a ReadingValues, which reads {what}: use TrainPipelineSparseDist"
    with pytest.raises(NotImplementedError, match=match):
        train(pipeline, (make_batch(step) for step in range(NUM_STEPS)))
    assert pipeline.eager_steps["warm-up"] == SHORT_WARM_UP


# Of pipeline/batches.py


def make_nested() -> dict[str, Any]:
    return {"x": [torch.ones(2), Nested(make_batch(0))], "n": 3}


def constants_of(batch: Any) -> dict[str, Any]:
    inputs = StepInputs("cpu")
    inputs.add_batch("batch", batch, (), None)
    return inputs.constants


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda x: x.update(n=4), "batch['n']"),
        (lambda x: x.update(n=3.0), "batch['n']"),
        (lambda x: x.update(m=3), "batch['m']"),
        (lambda x: setattr(x["x"][1], "weight", 1.0), "batch['x'][1].weight"),
        (lambda x: x.update(x=[torch.ones(3), x["x"][1]]), "the shape of batch['x'][0]"),
        (lambda x: x.update(x=[torch.ones(2).half(), x["x"][1]]), "the dtype of batch['x'][0]"),
    ],
)
def test_differences_are_named(change: Callable[[Any], None], name: str):
    batch = make_nested()
    constants = constants_of(batch)
    assert difference(constants, constants_of(make_nested())) is None
    change(batch)
    assert difference(constants_of(batch), constants) == name


class Incomparable:
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise ValueError

    __hash__ = None


def test_values_that_cannot_be_compared_differ():
    assert difference({"x": Incomparable()}, {"x": Incomparable()}) == "x"
