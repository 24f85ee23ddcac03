"""The facade on two gloo ranks: DistributedModelParallel and TrainPipelineSparseDist."""

import datetime
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import (
    DistributedModelParallel,
    get_default_sharders,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingType
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_jagged_attn import (
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
    embedding_parameters,
)

WORLD_SIZE = 2
CPU = torch.device("cpu")
NUM_IDS = 30
BATCH_SIZE = 4
FEATURES = {
    "t_user": ["user"],
    "t_item": ["bought", "hist", "item"],
    "t_tag": ["tags"],
    "t_cat": ["cat", "hist_cat"],
}
# What the histories of each rank are in each step: a rank, or both, may see no row at all.
HISTORY_LENGTHS = [
    ([3, 0, 2, 1], [1, 4, 0, 5]),
    ([2, 5, 0, 1], [0, 0, 0, 0]),
    ([0, 0, 0, 0], [0, 6, 1, 0]),
    ([0, 0, 0, 0], [0, 0, 0, 0]),
]
LEARNING_RATE = 0.3


def run_ranks(function: Callable[..., Any], tmp_path: Path, *args: Any) -> list[Any]:
    """Call ``function(rank, *args)`` in one process per gloo rank and return what each returned."""
    context = mp.start_processes(
        _run_rank, (function, tmp_path, args), nprocs=WORLD_SIZE, join=False, start_method="spawn"
    )
    while not context.join(timeout=60):
        pass
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD_SIZE)]


def _run_rank(rank: int, function: Callable[..., Any], tmp_path: Path, args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{tmp_path / 'store'}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=datetime.timedelta(seconds=60),
    )
    torch.save(function(rank, *args), tmp_path / f"{rank}.pt")
    # Sharded models lie in reference cycles and hold the group. Were its threads to outlive the
    # interpreter, the process could abort at its end.
    gc.collect()
    dist.destroy_process_group()


def make_model(device: torch.device = CPU) -> DLRMTrain:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=8,
            num_embeddings=NUM_IDS,
            feature_names=features,
            pooling=PoolingType.MEAN if name == "t_tag" else PoolingType.SUM,
            init_fn=nn.init.normal_,
        )
        for name, features in FEATURES.items()
    ]
    attention = TargetAttentionConfig(
        ["item", "cat"], ["hist", "hist_cat"], num_heads=2, timestamps="times"
    )
    collection = TargetAttentionEmbeddingBagCollection(tables, [attention], device=device)
    return DLRMTrain(DLRM(collection, 3, [8], [8, 1], dense_device=device))


def make_batch(step: int, *ranks: int) -> Batch:
    """The samples of ``ranks`` in ``step``, one rank after the other."""
    bags: dict[str, list[list[int]]] = {}
    for rank in ranks:
        rng = random.Random(f"{step} {rank}")
        lengths = HISTORY_LENGTHS[step][rank]
        for name in [*(n for names in FEATURES.values() for n in names), "times"]:
            if name in ("item", "cat"):
                counts = [1] * len(lengths)
            elif name in ("hist", "hist_cat", "times"):
                counts = lengths
            else:
                counts = [rng.randint(0, 3) for _ in lengths]
            ids = [[rng.randrange(NUM_IDS) for _ in range(count)] for count in counts]
            bags.setdefault(name, []).extend(ids)
    dense = torch.randn(WORLD_SIZE, BATCH_SIZE, 3, generator=torch.Generator().manual_seed(step))
    return Batch(
        dense_features=dense[list(ranks)].flatten(0, 1),
        sparse_features=KeyedJaggedTensor(
            keys=list(bags),
            values=torch.tensor([i for rows in bags.values() for ids in rows for i in ids]),
            lengths=torch.tensor([len(ids) for rows in bags.values() for ids in rows]),
        ),
        labels=torch.arange(BATCH_SIZE * len(ranks)) % 2,
    )


def optimize_tables(model: nn.Module) -> None:
    apply_optimizer_in_backward(torch.optim.SGD, embedding_parameters(model), {"lr": LEARNING_RATE})


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return torch.optim.SGD(dense.values(), lr=LEARNING_RATE)


def shard(model: nn.Module, sharding: ShardingType) -> DistributedModelParallel:
    """Shard the tables of targets and histories as told, and the others by table.

    TorchRec shards an EmbeddingBagCollection by rows on CUDA only.
    """
    sharders = get_default_sharders()
    attended = ("t_item", "t_cat")
    constraints = {
        name: ParameterConstraints(
            sharding_types=[(sharding if name in attended else ShardingType.TABLE_WISE).value],
            compute_kernels=[EmbeddingComputeKernel.FUSED.value],
            min_partition=4,
        )
        for name in FEATURES
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=WORLD_SIZE, compute_device="cpu"), constraints=constraints
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)


def train(model: nn.Module, *ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Loss and logits of each step."""
    optimizer = dense_optimizer(model)
    steps = []
    for step in range(len(HISTORY_LENGTHS)):
        optimizer.zero_grad()
        loss, (_, logits, _) = model(make_batch(step, *ranks))
        loss.backward()
        optimizer.step()
        steps.append((loss.detach(), logits))
    return steps


def load_tables(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Give the sharded tables the weights of ``state``: sharding draws those of bags anew."""
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            for part in value.local_shards():
                (row, column), (rows, columns) = (
                    part.metadata.shard_offsets,
                    part.metadata.shard_sizes,
                )
                part.tensor.copy_(state[name][row : row + rows, column : column + columns])


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name; those of sharded tables are put together on rank 0."""
    state = {}
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            whole = torch.zeros(value.size())
            value.gather(dst=0, out=whole if dist.get_rank() == 0 else None)
            value = whole
        state[name] = value.clone()
    return state


def make_sharded_model(sharding: ShardingType) -> DistributedModelParallel:
    model = make_model()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    optimize_tables(model)
    model = shard(model, sharding)
    load_tables(model, state)
    return model


def train_sharded(rank: int, sharding: ShardingType) -> dict[str, Any]:
    model = make_sharded_model(sharding)
    sharded = {type(module) for module in model.modules()}
    assert {ShardedEmbeddingCollection, ShardedEmbeddingBagCollection} <= sharded
    with pytest.raises(ValueError, match="must not be sharded yet, got a ShardedEmbedding"):
        list(embedding_parameters(model))
    steps = train(model, rank)
    return {"steps": steps, "state": full_state_dict(model)}


@pytest.mark.parametrize(
    "sharding", [ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE]
)
def test_sharded_training_equals_training_in_one_process(tmp_path: Path, sharding: ShardingType):
    """Also where histories are empty on one rank only: no rank may skip a parameter."""
    ranks = run_ranks(train_sharded, tmp_path, sharding)
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimize_tables(model)
    for step, (loss, logits) in enumerate(train(model, *range(WORLD_SIZE))):
        losses, rank_logits = zip(*(rank["steps"][step] for rank in ranks), strict=True)
        torch.testing.assert_close(torch.stack(losses).mean(), loss)
        torch.testing.assert_close(torch.cat(rank_logits), logits)
    after = model.state_dict()
    assert ranks[0]["state"].keys() == after.keys()
    for name, value in after.items():
        assert not torch.equal(value, before[name]), f"{name} was not trained"
        torch.testing.assert_close(
            ranks[0]["state"][name], value, msg=lambda m, n=name: f"{n}: {m}"
        )


def train_pipelined(rank: int) -> dict[str, Any]:
    losses = []
    for pipelined in (False, True):
        model = make_sharded_model(ShardingType.TABLE_WISE)
        if not pipelined:
            losses.append([loss for loss, _ in train(model, rank)])
            continue
        pipeline = TrainPipelineSparseDist(model, dense_optimizer(model), CPU)
        batches = iter([make_batch(step, rank) for step in range(len(HISTORY_LENGTHS))])
        losses.append([pipeline.progress(batches)[0].detach() for _ in HISTORY_LENGTHS])
        modules = {type(module).__name__ for module in pipeline._pipelined_modules}
    return {"losses": losses, "pipelined": modules}


def test_pipelined_training_equals_training_without(tmp_path: Path):
    for rank in run_ranks(train_pipelined, tmp_path):
        plain, pipelined = rank["losses"]
        assert len(plain) == len(HISTORY_LENGTHS)
        assert torch.equal(torch.stack(plain), torch.stack(pipelined))
        assert rank["pipelined"] == {"ShardedEmbeddingCollection", "ShardedEmbeddingBagCollection"}


def train_from_meta(rank: int) -> dict[str, Any]:
    model = make_model(torch.device("meta"))
    optimize_tables(model)
    model = shard(model, ShardingType.ROW_WISE)
    before = full_state_dict(model)
    return {"before": before, "steps": train(model, rank)}


def test_model_built_on_the_meta_device(tmp_path: Path):
    """Every parameter gets the start of a model that was never on meta."""
    ranks = run_ranks(train_from_meta, tmp_path)
    attention = "embedding_bag_collection.pooling.attentions.0"
    state = ranks[0]["before"]
    assert state.keys() == make_model().state_dict().keys()
    for name, value in make_model().state_dict().items():
        if f"{attention}.recency_bias" in name or f"{attention}.out_proj" in name:
            assert torch.equal(state[name], value), name
        elif "embedding" in name and "attentions" not in name:
            assert abs(state[name].std() - 1) < 0.2, name  # by init_fn
    for rank in ranks:
        for loss, logits in rank["steps"]:
            assert loss.isfinite()
            assert logits.isfinite().all()
