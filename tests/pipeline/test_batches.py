"""Batches of a ``TrainPipelineCudaGraph``: of any class, with Python values, read by any layer."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict
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
    assert_equal_on_cpu,
    count_reasons,
    make_batch,
    make_pipeline,
    poison,
    short_warm_up,
    train,
)
from tests.torchrec.two_ranks import make_model
from torchrec_jagged_attn.collection.sharding.padding import (
    PaddedFeatures,
    PaddedValuesError,
    Segments,
)
from torchrec_jagged_attn.pipeline.batches import (
    StepInputs,
    clone_tensors,
    difference,
    replace_tensors,
    tensors_of,
    with_static_tensors,
)

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


def as_tensor_dict(features: KeyedJaggedTensor) -> TensorDict:
    nested = {
        key: torch.nested.nested_tensor_from_jagged(x.values(), x.offsets())
        for key, x in features.to_dict().items()
    }
    return TensorDict(nested, batch_size=[features.stride()])


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
    runs = []
    for pipeline_type in PIPELINES:
        pipeline = make_pipeline(device, Reading(make_model(), parts), pipeline_type)
        batches = (convert(make_batch(step)) for step in range(NUM_STEPS))
        runs.append(train(pipeline, batches, poison))
    expected, run = runs
    assert_equal_on_cpu(run, expected, device)
    assert run.num_replayed_steps == NUM_STEPS - SHORT_WARM_UP


class Scaling(nn.Module):
    def forward(self, logits: Tensor, batch: Any) -> Tensor:
        return logits * batch.scale


def test_another_python_value_in_a_batch(device: torch.device):
    """A step on it is eager."""
    scales = [1.0] * 5 + [2.0] + [1.0] * 3
    runs = []
    for pipeline_type in PIPELINES:
        pipeline = make_pipeline(device, WithLayer(make_model(), Scaling()), pipeline_type)
        batches = (
            ScaledBatch(**vars(make_batch(step)), scale=scale) for step, scale in enumerate(scales)
        )
        runs.append(train(pipeline, batches))
    expected, run = runs
    assert_equal_on_cpu(run, expected, device)
    assert run.eager_steps == {"warm-up": SHORT_WARM_UP, "another value: batch.scale": 1}
    assert run.num_captures == 1


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
    runs = []
    for pipeline_type in PIPELINES:
        pipeline = make_pipeline(device, make_model(**options), pipeline_type, sharding=OPTIMIZER)
        batches = (
            with_features(step, change, is_weighted="is_weighted" in options) for step in range(12)
        )
        runs.append(train(pipeline, batches))
    expected, run = runs
    assert_equal_on_cpu(run, expected, device)
    assert run.num_captures == 2
    assert count_reasons(run, OTHER_DTYPES) == 5


def test_weights_that_disappear(device: torch.device):
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
    runs = []
    for pipeline_type in PIPELINES:
        pipeline = make_pipeline(device, WithLayer(make_model(), ReadingLengths()), pipeline_type)
        runs.append(train(pipeline, (make_batch(step) for step in range(NUM_STEPS)), poison))
    expected, run = runs
    assert_equal_on_cpu(run, expected, device)
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


def make_features() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["a", "b"], torch.arange(5), torch.arange(5) / 2, lengths=torch.tensor([2, 0, 1, 2])
    )


def make_nested() -> dict[str, Any]:
    return {"x": [torch.ones(2), Nested(make_batch(0))], "features": make_features(), "n": 3}


def inputs_of(batch: Any, keys: set[str] | None = None, fixed: tuple[str, ...] = ()) -> StepInputs:
    inputs = StepInputs("cpu")
    inputs.add_batch("batch", batch, fixed, keys)
    return inputs


def test_inputs_of_a_batch():
    inputs = inputs_of({"features": make_features(), "x": torch.ones(2, 3), "n": 3}, fixed=("b",))
    path = "batch['features']"
    assert inputs.counts == {f"{path}[a]": 2}
    assert inputs.constants == {
        f"the keys of {path}": ["a", "b"],
        f"the number of samples of {path}": 2,
        f"the dtypes of {path}": [torch.int64, torch.int64, torch.float32],
        f"the number of rows of {path}[b]": 3,
        "the shape of batch['x']": (2, 3),
        "the dtype of batch['x']": torch.float32,
        "batch['n']": 3,
    }
    segments = inputs.tensors[f"{path}[b]"]
    assert isinstance(segments, Segments)
    assert segments.tensor.tolist() == [2, 3, 4]
    assert (segments.counts, segments.names) == ([3], [None])
    weights = inputs.tensors[f"{path}[a].weights"]
    assert isinstance(weights, Segments)
    assert weights.tensor.tolist() == [0, 0.5]
    assert weights.names == [f"{path}[a]"]


def test_inputs_have_the_keys_that_are_read():
    inputs = inputs_of(make_features(), keys={"batch[b]"})
    assert inputs.tensors.keys() == {"batch.lengths", "batch[b]", "batch[b].weights"}
    assert inputs.counts == {"batch[b]": 3}


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
    constants = inputs_of(batch).constants
    assert difference(constants, inputs_of(make_nested()).constants) is None
    change(batch)
    assert difference(inputs_of(batch).constants, constants) == name


class Incomparable:
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise ValueError

    __hash__ = None


def test_values_that_cannot_be_compared_differ():
    assert difference({"x": Incomparable()}, {"x": Incomparable()}) == "x"


def test_a_batch_without_a_sample():
    assert not inputs_of(make_nested()).has_no_sample()
    empty = make_batch(0, num_samples=0)
    assert inputs_of({"x": [empty]}).has_no_sample()


def test_copies_with_other_tensors():
    """The batch itself and values without tensors do not change."""
    batch = make_nested()
    features = batch["x"][1].features
    new = replace_tensors(batch, lambda path, _: path, path="batch")
    assert new["x"][0] == "batch['x'][0]"
    assert new["x"][1].features["dense"] == "batch['x'][1].features['dense']"
    assert (new["n"], new["x"][1].name, new["features"]) == (3, "a batch", "batch['features']")
    assert type(new["x"][1]) is Nested
    assert batch["x"][1].features is features
    assert isinstance(features["dense"], Tensor)


def test_a_copy_with_static_tensors():
    batch = {"features": make_features(), "x": torch.ones(2)}
    static = {
        "batch['x']": torch.zeros(2),
        "batch['features'].lengths": make_features().lengths(),
        "batch['features'][b]": torch.arange(9),
        "batch['features'][b].weights": torch.ones(9),
    }
    read: list[str] = []
    new = with_static_tensors(batch, "batch", static.__getitem__, read.append)
    assert new["x"] is static["batch['x']"]
    features = new["features"]
    assert isinstance(features, PaddedFeatures)
    assert features.keys() == ["a", "b"]
    assert not read
    assert features.rows_of("b").values() is static["batch['features'][b]"]
    assert features.rows_of("b").weights() is static["batch['features'][b].weights"]
    assert features["b"].lengths().tolist() == [1, 2]
    assert read == ["batch['features'][b]"]
    with pytest.raises(PaddedValuesError, match="the values of 'b'"):
        features["b"].values()


def test_clones_have_their_own_memory():
    x = {"loss": torch.ones(1, requires_grad=True) * 2, "n": 3, "logits": [torch.zeros(3)]}
    new = clone_tensors(x)
    assert not new["loss"].requires_grad
    x["logits"][0] += 1
    assert new["logits"][0].tolist() == [0, 0, 0]
    assert new["n"] == 3
    assert [tensor.shape for tensor in tensors_of(new)] == [(1,), (3,)]
