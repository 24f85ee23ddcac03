"""A DLRM with attention on two ranks, for tests of distributed training."""

import datetime
import functools
import gc
import os
import random
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.mlp import Perceptron
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests import runs
from tests.collection.scenarios import table, to_features
from tests.processes import start_method
from torchrec_jagged_attn import (
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
    embedding_parameters,
)

CPU = torch.device("cpu")
NUM_IDS = 30
FEATURES = {
    "t_user": ["user"],
    "t_item": ["bought", "hist", "item"],
    "t_tag": ["tags"],
    "t_cat": ["cat", "hist_cat"],
}
ATTENDED_TABLES = ("t_item", "t_cat")
# The histories of each rank (and of the third and fourth) in each step. A rank, or both, may see no
# row at all, and not all have equally many samples.
HISTORY_LENGTHS = [
    ([3, 0, 2, 1], [1, 4, 0, 5]),
    ([2, 5, 0, 1], [0, 0, 0, 0]),
    ([0, 0, 0, 0], [0, 6, 1, 0]),
    ([4, 1], [2, 0, 0, 7, 3]),
    ([0, 0, 0, 0], [0, 0, 0, 0]),
]
NUM_STEPS = len(HISTORY_LENGTHS)
STEPS_OF_EQUAL_BATCHES = (0, 1, 2, 4)
LEARNING_RATE = 0.3


class LazyAdam(torch.optim.Adam):
    """Adam as fused into the lookups: table rows without a gradient are not changed."""

    @torch.no_grad()
    def step(self) -> None:
        tables = [table for group in self.param_groups for table in group["params"]]
        before = [self._rows_without_gradient(table) for table in tables]
        super().step()
        for weight, (idle, rows) in zip(tables, before, strict=True):
            for tensor, saved in zip(self._by_row(weight), rows, strict=True):
                tensor[idle] = saved

    def _rows_without_gradient(self, table: Tensor) -> tuple[Tensor, list[Tensor]]:
        idle = (table.grad == 0).all(dim=1)
        if not self.state[table]:
            return idle, [table[idle], *(torch.zeros_like(table[idle]) for _ in range(2))]
        return idle, [tensor[idle] for tensor in self._by_row(table)]

    def _by_row(self, table: Tensor) -> list[Tensor]:
        state = self.state[table]
        return [table, state["exp_avg"], state["exp_avg_sq"]]


# Layers have about 90 inputs, histories 7 rows, all ranks 10 samples; gradients have as many.
assert_same_run = functools.partial(runs.assert_same_run, num_terms=200)

# Optimizers that are fused into lookups of sharded tables, and their unsharded equivalents.
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, torch.optim.SGD, {"lr": LEARNING_RATE}),
    "Adagrad": (torch.optim.Adagrad, torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-2}),
    "RowWiseAdagrad": (RowWiseAdagrad, RowWiseAdagrad, {"lr": 0.05, "eps": 1e-2}),
    "Adam": (torch.optim.Adam, LazyAdam, {"lr": 0.05, "eps": 1e-2}),
}


def device_of(backend: str) -> torch.device:
    """Device of the process that starts the ranks."""
    return torch.device("cpu" if backend == "gloo" else "cuda")


def world_size(backend: str) -> int:
    """Two ranks; with NCCL one where there is a single GPU."""
    return 2 if backend == "gloo" else min(2, torch.cuda.device_count())


def run_ranks(
    function: Callable[..., Any],
    tmp_path: Path,
    backend: str,
    *args: Any,
    ranks: int | None = None,
    ranks_of_host: int | None = None,
) -> list[Any]:
    """Call ``function(device, *args)`` in one process per rank and return all results.

    With fewer ``ranks_of_host`` than ranks, they believe to be on several hosts. A test of more
    ``ranks`` than there are GPUs is skipped with NCCL.
    """
    ranks = world_size(backend) if ranks is None else ranks
    if backend == "nccl" and ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs, got {torch.cuda.device_count()}")
    directory = Path(tempfile.mkdtemp(dir=tmp_path))
    context = mp.start_processes(
        _run_rank,
        (function, directory, backend, ranks, ranks_of_host or ranks, args),
        nprocs=ranks,
        join=False,
        start_method=start_method(),
    )
    while not context.join(timeout=60):
        pass
    return [
        torch.load(directory / f"{rank}.pt", map_location=CPU, weights_only=False)
        for rank in range(ranks)
    ]


def _run_rank(
    rank: int,
    function: Callable[..., Any],
    directory: Path,
    backend: str,
    ranks: int,
    ranks_of_host: int,
    args: tuple,
) -> None:
    gc.freeze()  # imported modules
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_of_host)
    device = CPU
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{directory / 'store'}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    torch.save(function(device, *args), directory / f"{rank}.pt")
    # Sharded models lie in reference cycles and hold the group. Were its threads to outlive the
    # interpreter, the process could abort at its end.
    gc.collect()
    dist.destroy_process_group()


def make_tables(
    data_type: DataType = DataType.FP32,
    tags: PoolingType = PoolingType.MEAN,
    rows: Mapping[str, int] | None = None,
) -> list[EmbeddingBagConfig]:
    """``rows`` are the numbers of rows of tables that do not have ``NUM_IDS``."""
    return [
        table(
            name,
            *features,
            num_rows=(rows or {}).get(name, NUM_IDS),
            data_type=data_type,
            pooling=tags.value if name == "t_tag" else "SUM",
        )
        for name, features in FEATURES.items()
    ]


def use_softplus(model: nn.Module) -> None:
    """In place of ReLU, whose gradient rounding can decide."""
    for module in model.modules():
        if isinstance(module, Perceptron):
            module._activation_fn = F.softplus


def make_model(
    device: torch.device = CPU,
    data_type: DataType = DataType.FP32,
    tags: PoolingType = PoolingType.MEAN,
    is_weighted: bool = False,
    *,
    single_lookup: bool = False,
    candidates: str = "one",
    candidate_features: Sequence[str] = (),
    single_id_features: Sequence[str] = (),
    side_by_side: bool = True,
    rows: Mapping[str, int] | None = None,
    **options: Any,
) -> DLRMTrain:
    """With ``options`` of the attention, or of both attentions if not ``side_by_side``.

    With ``history_codes`` the times are the history, too, each the word of a row.
    """
    torch.manual_seed(0)
    tables = make_tables(data_type, tags, rows)
    targets, histories = ["item", "cat"], ["hist", "hist_cat"]
    if "history_codes" in options:
        histories = ["times"]
    options = {"num_heads": 2, "timestamps": "times", "request_time": "now"} | options
    attentions = [
        TargetAttentionConfig(target, history, **options)
        for target, history in (
            [(targets, histories)] if side_by_side else zip(targets, histories, strict=True)
        )
    ]
    collection = TargetAttentionEmbeddingBagCollection(
        tables,
        attentions,
        is_weighted,
        device,
        single_lookup=single_lookup,
        candidates=candidates,
        candidate_features=candidate_features,
        single_id_features=single_id_features,
    )
    model = DLRMTrain(DLRM(collection, 3, [8], [8, 1], dense_device=device))
    use_softplus(model)
    return model


def collection_of(model: nn.Module) -> TargetAttentionEmbeddingBagCollection:
    if isinstance(model, DistributedModelParallel):
        model = model.module
    return model.model.sparse_arch.embedding_bag_collection


def reads_weights(model: nn.Module) -> bool:
    collection = collection_of(model)
    is_ours = isinstance(collection, TargetAttentionEmbeddingBagCollection)
    return is_ours and collection.is_weighted()


def make_batch(step: int, rank: int, is_weighted: bool = False) -> Batch:
    rng = random.Random(f"{step} {rank}")
    lengths = HISTORY_LENGTHS[step][rank % 2]
    bags = {}
    for name in [*(n for names in FEATURES.values() for n in names), "times", "now"]:
        if name in ("item", "cat", "now", "user"):
            counts = [1] * len(lengths)
        elif name in ("hist", "hist_cat", "times"):
            counts = lengths
        else:
            counts = [rng.randint(0, 3) for _ in lengths]
        bags[name] = [[rng.randrange(NUM_IDS) for _ in range(count)] for count in counts]
    bags["times"] = [sorted(times) for times in bags["times"]]
    generator = torch.Generator().manual_seed(2 * step + rank)
    return Batch(
        dense_features=torch.randn(len(lengths), 3, generator=generator),
        sparse_features=to_features(bags, is_weighted=is_weighted),
        labels=torch.arange(len(lengths)) % 2,
    )


def batches(
    device: torch.device, steps: Iterable[int] = range(NUM_STEPS), is_weighted: bool = False
) -> Iterator[Batch]:
    """This rank's batch of each step."""
    for step in steps:
        yield make_batch(step, dist.get_rank(), is_weighted).to(device)


def optimize_tables(
    model: nn.Module, optimizer: str = "SGD", replicated: Collection[str] = ()
) -> None:
    """All but the ``replicated``, which the optimizer of dense layers has."""
    fused, _, arguments = OPTIMIZERS[optimizer]
    ends = tuple(f".{table}.weight" for table in replicated)
    others = [p for name, p in model.named_parameters() if name.endswith(ends)]
    tables = [p for p in embedding_parameters(model) if not any(p is other for other in others)]
    # A copy: sharding writes into it.
    apply_optimizer_in_backward(fused, tables, dict(arguments))


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return torch.optim.SGD(dense.values(), lr=LEARNING_RATE)


def shard(
    model: nn.Module,
    device: torch.device,
    sharding: ShardingType,
    bags: ShardingType | None = None,
    kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
    sharders: list[ModuleSharder] | None = None,
    others: dict[str, ShardingType] | None = None,
) -> DistributedModelParallel:
    """Shard all tables as told, or as near to it as TorchRec can; and ``others`` as these say.

    It shards an EmbeddingCollection not by tables and rows at once nor by a grid, so then by rows,
    and its sharder of an EmbeddingBagCollection on CPU by table only; ``bags`` says how else.
    """
    sharders = get_default_sharders() if sharders is None else sharders
    if sharding == ShardingType.DATA_PARALLEL:
        kernel = EmbeddingComputeKernel.DENSE
    sequences = sharding
    if sharding in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD):
        sequences = ShardingType.ROW_WISE
    if bags is None:
        bags = ShardingType.TABLE_WISE if device.type == "cpu" else sharding
    shardings = {name: sequences if name in ATTENDED_TABLES else bags for name in FEATURES}
    shardings |= others or {}
    kernels = {
        name: EmbeddingComputeKernel.DENSE if kind == ShardingType.DATA_PARALLEL else kernel
        for name, kind in shardings.items()
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=dist.get_world_size(),
            local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
            compute_device=device.type,
        ),
        constraints={
            name: ParameterConstraints(
                sharding_types=[shardings[name].value],
                compute_kernels=[kernels[name].value],
                min_partition=4,
            )
            for name in shardings
        },
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    if device.type == "cuda":  # of ranks that only believe to be on several hosts, too
        for parameters in plan.plan.values():
            for parameter in parameters.values():
                for part in parameter.sharding_spec.shards if parameter.sharding_spec else ():
                    rank = part.placement.rank()
                    part.placement = torch.distributed._remote_device(f"rank:{rank}/cuda:{rank}")
    return DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)


def make_sharded_model(
    device: torch.device,
    sharding: ShardingType = ShardingType.TABLE_WISE,
    optimizer: str = "SGD",
    data_type: DataType = DataType.FP32,
    tags: PoolingType = PoolingType.MEAN,
    is_weighted: bool = False,
    max_history: int | None = None,
    encoder: dict[str, Any] | None = None,
    **options: Any,
) -> DistributedModelParallel:
    """``make_model()``, sharded; replicated tables are left to the optimizer of dense layers."""
    model = make_model(
        data_type=data_type,
        tags=tags,
        is_weighted=is_weighted,
        max_history=max_history,
        **(encoder or {}),
    )
    return shard_with_weights(model, device, sharding, optimizer, **options)


def shard_with_weights(
    model: nn.Module,
    device: torch.device,
    sharding: ShardingType,
    optimizer: str = "SGD",
    replicated: Collection[str] = (),
    **options: Any,
) -> DistributedModelParallel:
    """``model`` sharded, with its parameters and the given optimizer of tables."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if sharding != ShardingType.DATA_PARALLEL:
        optimize_tables(model, optimizer, replicated)
    model = shard(model, device, sharding, **options)
    load(model, state)  # sharding draws the tables of bags anew
    return model


@torch.no_grad()
def load(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Copy whole parameters into the parameters of a sharded model, shard by shard."""
    for name, value in model.state_dict().items():
        parts = value.local_shards() if isinstance(value, ShardedTensor) else []
        for part in parts:
            (row, column), (rows, columns) = part.metadata.shard_offsets, part.metadata.shard_sizes
            part.tensor.copy_(state[name][row : row + rows, column : column + columns])
        if not isinstance(value, ShardedTensor):
            value.copy_(state[name])


def train_on(model: nn.Module, batches: Iterable[Any]) -> Iterator[tuple[Tensor, Any]]:
    """Loss of each step, and what else the model returns."""
    optimizer = dense_optimizer(model)
    for batch in batches:
        optimizer.zero_grad()
        loss, outputs = model(batch)
        loss.backward()
        optimizer.step()
        yield loss.detach(), outputs


def train(
    model: nn.Module, device: torch.device, steps: Iterable[int] = range(NUM_STEPS)
) -> list[tuple[Tensor, Tensor]]:
    """Loss and logits of each step on this rank."""
    rank_batches = batches(device, steps, reads_weights(model))
    return [(loss, logits) for loss, (_, logits, _) in train_on(model, rank_batches)]


def train_unsharded(
    model: nn.Module,
    optimizer: str,
    ranks: int,
    device: torch.device = CPU,
    steps: Iterable[int] = range(NUM_STEPS),
    tables_learn: bool = True,
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Losses and logits of each step by rank, of one process with the batches of all ranks."""
    _, unfused, arguments = OPTIMIZERS[optimizer]
    is_weighted = reads_weights(model)
    tables = list(embedding_parameters(model))
    dense = [p for p in model.parameters() if not any(p is table for table in tables)]
    optimizers = [torch.optim.SGD(dense, lr=LEARNING_RATE)]
    if tables_learn:
        optimizers.append(unfused(tables, **arguments))
    results = []
    for step in steps:
        model.zero_grad()
        outputs = [model(make_batch(step, rank, is_weighted).to(device)) for rank in range(ranks)]
        losses = [loss for loss, _ in outputs]
        torch.stack(losses).mean().backward()
        for each in optimizers:
            each.step()
        results.append(
            ([loss.detach() for loss in losses], [logits for _, (_, logits, _) in outputs])
        )
    return results


def full_state_dict(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Parameters by name; sharded tables are gathered on rank 0."""
    state = {}
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            whole = torch.zeros(value.size(), dtype=value.dtype, device=device)
            value.gather(dst=0, out=whole if dist.get_rank() == 0 else None)
            value = whole
        state[name] = value.detach().cpu().clone()
    return state
