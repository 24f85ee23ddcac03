"""Changes between the steps of a ``TrainPipelineCudaGraph``: layers, optimizers, settings."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.pipeline.training import (
    OTHER_SIZE,
    OVERFLOW,
    PIPELINES,
    SHORT_WARM_UP,
    Run,
    WithLayer,
    assert_equal_on_cpu,
    count_reasons,
    make_batch,
    make_dlrm,
    make_pipeline,
    short_warm_up,
    to_host,
    train,
    train_alike,
)
from tests.torchrec.two_ranks import assert_same_run, make_model

NUM_STEPS = 9
CHANGED = 5
"""The step before which something changes: captured ones are verified by then."""


@pytest.fixture(autouse=True)
def captured_early() -> Iterator[None]:
    with short_warm_up():
        yield


class Normalization(nn.Module):
    """Adds to the logits what batch normalization and a linear layer make of dense features."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, logits: Tensor, batch: Any) -> Tensor:
        x = self.dropout(self.norm(batch.dense_features))
        return logits + self.linear(x).squeeze(-1)


def make_layered(dropout: float = 0.0) -> WithLayer:
    return WithLayer(make_model(), Normalization(dropout))


def dense_sgd(model: DistributedModelParallel) -> torch.optim.Optimizer:
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return torch.optim.SGD(dense.values(), lr=0.1, momentum=0.9)


def layer_of(pipeline: Any) -> Any:
    return pipeline._model.module.layer


def replace_parameters(pipeline: Any) -> None:
    """Replace parameters by ``load_state_dict(assign=True)``, also in the optimizer."""
    layer = layer_of(pipeline)
    before = dict(layer.named_parameters())
    layer.load_state_dict({k: v * 0.5 for k, v in layer.state_dict().items()}, assign=True)
    new = {before[name]: x for name, x in layer.named_parameters()}
    for old, x in new.items():
        pipeline._optimizer.state[x] = pipeline._optimizer.state.pop(old)
    for group in pipeline._optimizer.param_groups:
        group["params"] = [new.get(x, x) for x in group["params"]]


def load_weights(pipeline: Any) -> None:
    layer = layer_of(pipeline)
    layer.load_state_dict({name: x * 0.5 for name, x in layer.state_dict().items()})


def load_optimizer(pipeline: Any) -> None:
    state = pipeline._optimizer.state_dict()
    for x in state["state"].values():
        x["momentum_buffer"] = x["momentum_buffer"] * 0.5
    pipeline._optimizer.load_state_dict(state)


def swap_weights(pipeline: Any) -> None:
    """Replace ``data`` of parameters, like swapping in averaged weights."""
    for x in layer_of(pipeline).parameters():
        x.data = x.data * 0.5


def freeze(pipeline: Any) -> None:
    layer_of(pipeline).linear.requires_grad_(False)


def evaluate_layer(pipeline: Any) -> None:
    layer_of(pipeline).eval()


def replace_layer(pipeline: Any) -> None:
    torch.manual_seed(1)
    layer_of(pipeline).linear = nn.Linear(3, 1, device=pipeline._device)


def lower_precision(_: Any) -> None:
    torch.set_float32_matmul_precision("high")


# Changes before a step, and the number of captures with them.
CHANGES: dict[str, tuple[Callable[[Any], None], int]] = {
    "nothing": (lambda _: None, 1),
    "load_state_dict": (load_weights, 1),
    "optimizer.load_state_dict": (load_optimizer, 1),
    "load_state_dict(assign=True)": (replace_parameters, 2),
    "other storages of weights": (swap_weights, 2),
    "requires_grad_": (freeze, 2),
    "eval() of a layer": (evaluate_layer, 2),
    "another layer": (replace_layer, 2),
    "set_float32_matmul_precision": (lower_precision, 2),
}


@pytest.fixture
def default_precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def make_undistributed(device: torch.device, model: nn.Module, pipeline_type: type) -> Any:
    pipeline = make_pipeline(device, model, pipeline_type, dense_sgd)
    # DistributedDataParallel, which TorchRec gives a static graph, permits no other parameters.
    pipeline._model._dmp_wrapped_module = pipeline._model.module
    torch.set_float32_matmul_precision("highest")
    return pipeline


def train_changed(
    device: torch.device,
    change: Callable[[int, Any], None],
    batches: Sequence[dict[str, Any]] = ({},) * NUM_STEPS,
    **options: Any,
) -> Run:
    """Train with both pipelines. ``batches`` are the options of the batch of each step."""
    all_batches = [make_batch(step, **x) for step, x in enumerate(batches)]
    make = make_undistributed
    return train_alike(device, make_layered, lambda: all_batches, change, make=make, **options)


@pytest.mark.parametrize("name", CHANGES)
def test_recapture(name: str, device: torch.device, default_precision: None):
    change, num_captures = CHANGES[name]

    def change_once(step: int, pipeline: Any) -> None:
        if step == CHANGED:
            change(pipeline)

    dtype = torch.bfloat16 if "precision" in name else torch.float32  # on a GPU
    run = train_changed(device, change_once, dtype=dtype)
    assert run.num_captures == num_captures
    assert run.num_replayed_steps == NUM_STEPS - SHORT_WARM_UP


def test_autocast_from_a_step_on(device: torch.device):
    def context(step: int) -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=step >= CHANGED)

    run = train_changed(device, lambda *_: None, dtype=torch.bfloat16, context=context)
    assert run.num_captures == 2


def test_evaluation_between_steps(device: torch.device):
    """It is eager, and nothing is captured again."""

    def change(step: int, pipeline: Any) -> None:
        pipeline._model.train(step not in (CHANGED, CHANGED + 1))

    run = train_changed(device, change)
    assert run.num_captures == 1
    assert run.eager_steps == {"warm-up": SHORT_WARM_UP, "evaluation": 2}


def test_evaluation_and_other_batch_sizes_are_no_overflows(device: torch.device):
    """They and two batches with more rows do not cause another capture."""
    options = [{}] * 13 + [{"num_samples": 3}, {}] * 4 + [{"length": 40}, {}, {"length": 40}, {}]

    def change(step: int, pipeline: Any) -> None:
        pipeline._model.train(not CHANGED <= step < 12)

    run = train_changed(device, change, batches=options)
    assert run.num_captures == 1
    assert run.eager_steps.pop("warm-up") == SHORT_WARM_UP
    assert run.eager_steps.pop("evaluation") == 12 - CHANGED
    assert count_reasons(run, OTHER_SIZE) == 4
    assert count_reasons(run, OVERFLOW) == 2


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_buffers_and_random_generators(dropout: float, device: torch.device):
    """Captures and verifications do not change them. On a GPU, graphs draw other numbers."""
    runs, drawn = [], []
    for pipeline_type in PIPELINES:
        pipeline = make_pipeline(device, make_layered(dropout), pipeline_type)
        torch.manual_seed(0)
        runs.append(train(pipeline, (make_batch(step) for step in range(NUM_STEPS))))
        drawn.append(torch.rand(1, device=device))
    expected, run = runs
    assert run.state["model"]["layer.norm.num_batches_tracked"] == NUM_STEPS
    if dropout == 0 or device.type == "cpu":
        assert_equal_on_cpu(run, expected, device)
        assert torch.equal(*drawn)
    assert run.losses.isfinite().all()


class Clipping(torch.optim.SGD):
    """Clips gradients, and may set gradients to zero instead of None."""

    set_to_none = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(self.set_to_none)

    def step(self, closure: Any = None) -> None:
        parameters = [x for group in self.param_groups for x in group["params"]]
        self.norms.append(nn.utils.clip_grad_norm_(parameters, 0.1).item())
        super().step(closure)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_dense_parameters(set_to_none: bool, device: torch.device):
    """An optimizer, and the caller of ``progress``, read the gradients of the same step."""

    def clipping(model: DistributedModelParallel) -> Clipping:
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        optimizer = Clipping(dense.values(), lr=0.1, momentum=0.9)
        optimizer.set_to_none, optimizer.norms = set_to_none, []
        return optimizer

    lengths = [6, 4, 4, 4, 4, 40, 4, 4, 4]  # one of which does not fit
    results = []
    for pipeline_type in PIPELINES:
        pipeline = make_pipeline(device, make_layered(), pipeline_type, clipping)
        batches = iter([make_batch(step, length=x) for step, x in enumerate(lengths)])
        gradients = []
        for _ in lengths:
            pipeline.progress(batches)
            dense = in_backward_optimizer_filter(pipeline._model.named_parameters())
            gradients.append({name: to_host(x.grad) for name, x in dense})
        results.append((gradients, pipeline._optimizer.norms))
    (expected, norms), (actual, actual_norms) = results
    assert pipeline.num_replayed_steps == len(lengths) - SHORT_WARM_UP - 1
    assert max(norms) > 0.1
    assert_same_run(actual_norms, norms, num_steps=None)
    for step, (x, y) in enumerate(zip(actual, expected, strict=True)):
        assert x.keys() == y.keys()
        for name in y:
            assert_same_run(x[name], y[name], num_steps=step + 1, name=f"{name}, step {step}")


class Accumulating(torch.optim.SGD):
    """Clears gradients, and trains, in every second step."""

    num_steps = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.num_steps % 2 == 0:
            super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            super().step()


def test_optimizers_that_accumulate_gradients(device: torch.device):
    def accumulating(model: DistributedModelParallel) -> Accumulating:
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        return Accumulating(dense.values(), lr=0.1)

    pipeline = make_pipeline(device, optimizer=accumulating)
    match = "must clear gradients before each step .*use TrainPipelineSparseDist"
    with pytest.raises(NotImplementedError, match=match):
        train(pipeline, map(make_batch, range(NUM_STEPS)))


def test_parameters_without_optimizer(device: torch.device):
    """Nothing clears their gradients."""

    def layer_sgd(model: DistributedModelParallel) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.module.layer.parameters(), lr=0.1, momentum=0.9)

    batches = [make_batch(step) for step in range(NUM_STEPS)]
    run = train_alike(device, make_layered, lambda: batches, optimizer=layer_sgd)
    assert run.num_replayed_steps == NUM_STEPS - SHORT_WARM_UP


# Hooks are added before a warm-up step, or after the capture.
@pytest.mark.parametrize("first", [1, CHANGED])
@pytest.mark.parametrize("add", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters(add: str, first: int, device: torch.device):
    def change(step: int, pipeline: Any) -> None:
        if step == first:
            getattr(layer_of(pipeline).linear.weight, add)(lambda x: None)

    pipeline = make_pipeline(device, make_layered())
    match = "must have no hooks .*hooks of 'layer.linear.weight': use TrainPipelineSparseDist"
    with pytest.raises(NotImplementedError, match=match):
        train(pipeline, map(make_batch, range(NUM_STEPS)), change)
    assert pipeline.num_replayed_steps == max(0, first - SHORT_WARM_UP)


def detach_and_attach(step: int, pipeline: Any) -> None:
    if step in (CHANGED, CHANGED + 1):
        pipeline.attach(pipeline.detach())


def test_detached_and_attached(device: torch.device):
    """The step is captured again."""
    run = train_changed(device, detach_and_attach)
    assert run.num_captures == 3
    assert run.num_replayed_steps == NUM_STEPS - SHORT_WARM_UP


def num_uses(pipeline: Any, group: dist.ProcessGroup) -> int:
    """The number of attributes in input dists that are ``group``."""
    dists = [x for module in pipeline._model.modules() for x in getattr(module, "_input_dists", ())]
    parts = {part for input_dist in dists for part in input_dist.modules()}
    return sum(x is group for part in parts for x in vars(part).values())


def test_detached_modules_communicate_in_the_group_of_the_model(device: torch.device):
    """With several GPUs, input dists of the pipeline have a group of their own."""
    pipeline = make_pipeline(device, make_dlrm())
    group, input_group = pipeline._model._env.process_group, dist.new_group([0])
    pipeline._input_group = input_group
    pipeline.progress(map(make_batch, range(NUM_STEPS)))
    assert num_uses(pipeline, group) == 0
    assert num_uses(pipeline, input_group) > 0
    pipeline.detach()
    assert num_uses(pipeline, group) > 0
    assert num_uses(pipeline, input_group) == 0


def test_a_detached_pipeline_has_no_graph(device: torch.device):
    """NCCL waits for graphs with its collectives when a process group is destroyed."""
    pipeline = make_pipeline(device)
    batches = map(make_batch, range(NUM_STEPS))
    for _ in range(CHANGED):
        pipeline.progress(batches)
    captured_step = weakref.ref(pipeline._captured_step)
    assert captured_step() is not None
    pipeline.detach()
    gc.collect()
    assert captured_step() is None


def test_outputs_are_copies(device: torch.device):
    pipeline = make_pipeline(device)
    batches = (make_batch(step) for step in range(NUM_STEPS))
    outputs = [pipeline.progress(batches) for _ in range(NUM_STEPS)]
    assert pipeline.num_replayed_steps == NUM_STEPS - SHORT_WARM_UP
    expected = make_pipeline(device, pipeline_type=PIPELINES[0])
    batches = (make_batch(step) for step in range(NUM_STEPS))
    for step, output in enumerate(outputs):
        for x, y in zip(output, expected.progress(batches), strict=True):
            assert_same_run(x, y, num_steps=step + 1)


def test_nonfinite_losses(device: torch.device):
    """A replay may have them, if an eager step has."""
    batches = [make_batch(step) for step in range(5)]
    batches[SHORT_WARM_UP + 1].dense_features[0] = torch.nan
    run = train(make_pipeline(device), batches)
    assert run.losses.isfinite().tolist() == [True, True, True, False, False]
    assert run.num_replayed_steps == 3


class Counting(nn.Module):
    """Scales logits by a Python number that changes in each forward."""

    step = 0

    def forward(self, logits: Tensor, batch: Any) -> Tensor:
        self.step += 1
        return logits * self.step


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_python_numbers_that_change_in_a_forward(dropout: float, device: torch.device):
    pipeline = make_pipeline(device, WithLayer(make_model(dropout=dropout), Counting()))
    batches = (make_batch(step) for step in range(NUM_STEPS))
    with pytest.raises(RuntimeError, match="must use TrainPipelineSparseDist"):
        train(pipeline, batches)
    assert pipeline.num_captures == 1


class Scaling(nn.Module):
    scale = 1.0

    def forward(self, logits: Tensor, batch: Any) -> Tensor:
        return logits * self.scale


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_python_numbers_that_change_between_steps(device: torch.device):
    """A replay uses the number of its capture."""

    def change(step: int, pipeline: Any) -> None:
        layer_of(pipeline).scale = 1.0 + step

    pipeline = make_pipeline(device, WithLayer(make_model(), Scaling()))
    batches = (make_batch(step) for step in range(NUM_STEPS))
    with pytest.raises(RuntimeError, match="must use TrainPipelineSparseDist"):
        train(pipeline, batches, change)


class UsedAtFirst(nn.Module):
    """A parameter that is used in eager steps alone."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.num_calls = 0

    def forward(self, logits: Tensor, batch: Any) -> Tensor:
        self.num_calls += 1
        return logits + self.bias if self.num_calls <= SHORT_WARM_UP else logits


def test_a_parameter_without_a_gradient_in_captured_steps(device: torch.device):
    pipeline = make_pipeline(device, WithLayer(make_model(), UsedAtFirst()))
    batches = (make_batch(step) for step in range(NUM_STEPS))
    with pytest.raises(RuntimeError, match=r"got none for \['layer.bias'\]"):
        train(pipeline, batches)


def test_seeds_change_no_verification(device: torch.device):
    """With dropout, losses of few samples differ much from seed to seed."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = make_layered(0.5)
        pipeline = make_pipeline(device, model)
        run = train(pipeline, (make_batch(step) for step in range(SHORT_WARM_UP + 2)))
        assert run.num_replayed_steps == 2
