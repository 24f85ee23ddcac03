"""Models, batches and training runs of the tests of ``TrainPipelineCudaGraph``."""

import contextlib
import dataclasses
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.collection.scenarios import to_features
from tests.torchrec.two_ranks import (
    FEATURES,
    NUM_IDS,
    assert_same_run,
    make_model,
    make_tables,
    shard_with_weights,
    use_softplus,
)
from torchrec_jagged_attn import HistoryEmbeddingCollectionSharder
from torchrec_jagged_attn.pipeline import TrainPipelineCudaGraph, train_pipeline

CPU = torch.device("cpu")
PIPELINES = (TrainPipelineSparseDist, TrainPipelineCudaGraph)
CANDIDATE_COUNTS = [2, 0, 1, 1]
SHORT_WARM_UP = 2


def short_warm_up(headroom: float = train_pipeline.HEADROOM) -> Any:
    """A context in which steps are captured after ``SHORT_WARM_UP`` eager ones."""
    return mock.patch.multiple(train_pipeline, WARM_UP_STEPS=SHORT_WARM_UP, HEADROOM=headroom)


def make_batch(
    step: int,
    rank: int = 0,
    *,
    num_samples: int = 4,
    max_length: int = 6,
    length: int | None = None,
    is_weighted: bool = False,
    candidates: Sequence[int] | None = None,
    bag_length: int | None = None,
    num_cats: int = NUM_IDS,
) -> Batch:
    """Small ids are much more frequent.

    ``candidates`` are the numbers of target ids, ``length`` is the length of each history and
    ``bag_length`` the number of ids of each pooled feature. Categories are less than ``num_cats``.

    The batch of step 0 has the most rows.
    """
    rng = random.Random(f"{step} {rank}")

    def draw_lengths(longest: int) -> list[int]:
        return [longest if step == 0 else rng.randint(0, longest) for _ in range(num_samples)]

    history_lengths = draw_lengths(max_length) if length is None else [length] * num_samples
    ids = {}
    for name in [*(name for names in FEATURES.values() for name in names), "times", "now"]:
        if name in ("item", "cat", "now", "user"):
            lengths = [1] * num_samples
            if candidates is not None and name in ("item", "cat"):
                lengths = [*candidates]
        elif name in ("hist", "hist_cat", "times"):
            lengths = history_lengths
        else:
            lengths = draw_lengths(3) if bag_length is None else [bag_length] * num_samples
        num_ids = num_cats if name in ("cat", "hist_cat") else NUM_IDS
        ids[name] = [[int(num_ids * rng.random() ** 3) for _ in range(n)] for n in lengths]
    ids["times"] = [sorted(times) for times in ids["times"]]
    generator = torch.Generator().manual_seed(1000 * step + rank)
    num_rows = num_samples if candidates is None else sum(candidates)
    return Batch(
        dense_features=torch.randn(num_rows, 3, generator=generator),
        sparse_features=to_features(ids, is_weighted=is_weighted),
        labels=torch.arange(num_rows) % 2,
    )


@dataclasses.dataclass
class ScaledBatch(Batch):
    """With a Python value, which a layer may read."""

    scale: float = 1.0

    def to(self, device: torch.device, non_blocking: bool = False) -> "ScaledBatch":
        return ScaledBatch(**vars(super().to(device, non_blocking)), scale=self.scale)


def make_dlrm(is_weighted: bool = False) -> DLRMTrain:
    """A DLRM of TorchRec, which pools tags by mean and other features by sum."""
    torch.manual_seed(0)
    bags = EmbeddingBagCollection(make_tables(), is_weighted=is_weighted, device=CPU)
    model = DLRMTrain(DLRM(bags, 3, [8], [8, 1], dense_device=CPU))
    use_softplus(model)
    return model


class WithLayer(DLRMTrain):
    """A DLRM whose logits are changed by ``layer(logits, batch)``."""

    def __init__(self, model: DLRMTrain, layer: nn.Module) -> None:
        super().__init__(model.model)
        self.layer = layer

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        logits = self.layer(logits, batch)
        loss = self.loss_fn(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach())


def make_sharded(
    model: nn.Module,
    device: torch.device,
    optimizer: str = "SGD",
    sharding: ShardingType = ShardingType.TABLE_WISE,
    fused_params: dict[str, Any] | None = None,
    sharders: list[ModuleSharder] | None = None,
    **options: Any,
) -> DistributedModelParallel:
    if sharders is None:
        sharders = [
            HistoryEmbeddingCollectionSharder(fused_params=fused_params),
            EmbeddingBagCollectionSharder(fused_params=fused_params),
        ]
    return shard_with_weights(model, device, sharding, optimizer, sharders=sharders, **options)


def make_optimizer(model: DistributedModelParallel) -> CombinedOptimizer:
    """Combine the optimizer of the tables with SGD with momentum for the dense layers."""
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )
    return CombinedOptimizer([model.fused_optimizer, dense])


def to_host(x: Any) -> Any:
    """A copy of ``x`` on the CPU, in which a sharded tensor is a list of this rank's shards."""
    if isinstance(x, ShardedTensor):
        return [to_host(shard.tensor) for shard in x.local_shards()]
    if isinstance(x, Tensor):
        return x.detach().to("cpu", copy=True)
    if isinstance(x, dict):
        return {key: to_host(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [to_host(value) for value in x]
    return x


def tensors_in(x: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in dicts and lists, with their names."""
    if isinstance(x, Tensor):
        yield name, x
    elif isinstance(x, (dict, list)):
        for key, value in x.items() if isinstance(x, dict) else enumerate(x):
            yield from tensors_in(value, f"{name}.{key}")


class Run(NamedTuple):
    """The result of training with a pipeline."""

    losses: Tensor  # [steps]
    state: dict[str, Any]  # of the model and of its optimizers
    num_replayed_steps: int
    eager_steps: dict[str, int]
    num_captures: int
    lookups: set[str]  # inside or outside the captured step
    exchanges: set[str]  # fixed or exact


Change = Callable[[int, Any], None]


def make_pipeline(
    device: torch.device,
    model: nn.Module | None = None,
    pipeline_type: type = TrainPipelineCudaGraph,
    optimizer: Callable[[DistributedModelParallel], torch.optim.Optimizer] = make_optimizer,
    sharding: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Make a pipeline; the default model has default attention."""
    sharded = make_sharded(make_model() if model is None else model, device, **(sharding or {}))
    return pipeline_type(sharded, optimizer(sharded), device, **options)


def schedule(step: int, pipeline: Any) -> None:
    """Another learning rate in each step, of tables and dense layers."""
    for i, group in enumerate(pipeline._optimizer.param_groups):
        group["lr"] = 0.02 * (1 + (step + i) % 3)


def train(
    pipeline: Any,
    batches: Iterable[Any],
    *changes: Change,
    context: Callable[[int], Any] = contextlib.nullcontext,
) -> Run:
    """Train on all ``batches``, each in the ``context`` of its step.

    ``changes`` are called with the number of each step and the pipeline before it.
    """
    batches, losses, step = iter(batches), [], 0
    while True:
        for change in (schedule, *changes):
            change(step, pipeline)
        try:
            with context(step):
                output = pipeline.progress(batches)
        except StopIteration:
            break
        losses.append(to_host(output[0]))
        step += 1
    return finish(pipeline, losses)


def train_both(
    device: torch.device,
    model: Callable[[], nn.Module],
    batches: Callable[[], Iterable[Any]],
    *changes: Change,
    make: Callable[..., Any] = make_pipeline,
    context: Callable[[int], Any] = contextlib.nullcontext,
    **options: Any,
) -> tuple[Run, Run]:
    """Train with TorchRec's pipeline and with ``TrainPipelineCudaGraph``."""
    expected, run = (
        train(make(device, model(), x, **options), batches(), *changes, context=context)
        for x in PIPELINES
    )
    return expected, run


def train_alike(
    device: torch.device,
    model: Callable[[], nn.Module],
    batches: Callable[[], Iterable[Any]],
    *changes: Change,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Run:
    """Train with both pipelines, assert equal results and return the run of the captured one."""
    expected, run = train_both(device, model, batches, *changes, **options)
    assert_equal_on_cpu(run, expected, device, dtype)
    return run


def finish(pipeline: Any, losses: list[Tensor]) -> Run:
    optimizer = pipeline._optimizer.state_dict()
    return Run(
        torch.stack(losses) if losses else torch.empty(0),
        to_host({"model": dict(pipeline._model.state_dict()), "optimizer": optimizer}),
        getattr(pipeline, "num_replayed_steps", 0),
        dict(getattr(pipeline, "eager_steps", {})),
        getattr(pipeline, "num_captures", 0),
        set(getattr(pipeline, "lookups", {}).values()),
        set(getattr(pipeline, "exchanges", {}).values()),
    )


def poison(_: int, pipeline: Any) -> None:
    """Overwrite everything that the captured step reads of the last batch.

    Ids behind the rows of a batch are looked up, so that they must be valid.
    """
    captured = getattr(pipeline, "_captured_step", None)
    if captured is not None:
        for x in captured._static._tensors.values():
            x.detach().fill_(torch.nan if x.is_floating_point() else NUM_IDS - 1)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Sums are in one order on a GPU, and memory that is not initialized is NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_equal_runs(actual: Run, expected: Run) -> None:
    """Losses, weights, tables and the states of optimizers are equal in each bit."""
    assert torch.equal(actual.losses, expected.losses)
    tensors, others = dict(tensors_in(actual.state)), dict(tensors_in(expected.state))
    assert tensors.keys() == others.keys()
    assert any("momentum" in name for name in tensors)
    for name, x in others.items():
        assert torch.equal(tensors[name], x), name


def assert_same_runs(actual: Run, expected: Run, dtype: torch.dtype = torch.float32) -> None:
    """Both are the same by the tolerance rule."""
    assert_same_run(actual.losses, expected.losses, num_steps=None, dtype=dtype)
    tensors, others = (dict(tensors_in(x.state)) for x in (actual, expected))
    assert tensors.keys() == others.keys()
    for name, x in others.items():
        if x.is_floating_point():
            num_steps = len(actual.losses)
            assert_same_run(tensors[name], x, num_steps=num_steps, dtype=dtype, name=name)


def assert_equal_on_cpu(
    actual: Run, expected: Run, device: torch.device, dtype: torch.dtype = torch.float32
) -> None:
    """Both are equal on a CPU, and the same by the tolerance rule on a GPU."""
    if device.type == "cpu":
        assert_equal_runs(actual, expected)
    else:
        assert_same_runs(actual, expected, dtype)


def count_reasons(run: Run, pattern: str) -> int:
    """The number of eager steps of ``run`` for reasons that match ``pattern``."""
    return sum(n for reason, n in run.eager_steps.items() if re.fullmatch(pattern, reason))


OVERFLOW = "more rows of .* than the capacity"
OTHER_SIZE = "another value: .*"
