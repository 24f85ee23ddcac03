"""torch.distributed.checkpoint: checkpoints of one sharding are loaded into another."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingType

from tests.torchrec.two_ranks import (
    FEATURES,
    NUM_STEPS,
    assert_same_run,
    full_state_dict,
    make_batch,
    make_sharded_model,
    run_ranks,
    train,
    world_size,
)
from torchrec_jagged_attn import HistoryEmbeddingCollectionSharder

Parts = dict[tuple[int, ...], Tensor]


def everything(model: DistributedModelParallel, device: torch.device, ranks: int) -> dict[str, Any]:
    """Tables and dense layers, optimizer states of the tables, and logits of all batches."""
    model.eval()
    with torch.no_grad():
        logits = {
            (step, rank): model(make_batch(step, rank).to(device))[1][1].cpu()
            for step in range(NUM_STEPS)
            for rank in range(ranks)
        }
    remembered = {
        f"{table} {name}": parts_of(value)
        for table, state in model.fused_optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if not isinstance(value, float)
    }
    return {"model": full_state_dict(model, device), "logits": logits, "optimizer": remembered}


def parts_of(value: Tensor | ShardedTensor) -> Parts:
    """The shards of a tensor on this rank, by offset."""
    if not isinstance(value, ShardedTensor):
        return {(): value.detach().cpu()}
    return {
        tuple(shard.metadata.shard_offsets): shard.tensor.detach().cpu()
        for shard in value.local_shards()
    }


def put_together(ranks: list[dict[str, Parts]]) -> dict[str, Tensor]:
    """Whole tensors, from shards by row or from replicas."""
    parts: dict[str, Parts] = {}
    for rank in ranks:
        for name, some in rank.items():
            parts.setdefault(name, {}).update(some)
    return {
        name: some[()] if () in some else torch.cat([some[begin] for begin in sorted(some)])
        for name, some in parts.items()
    }


def state_of(model: DistributedModelParallel) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


Way = tuple[ShardingType, type[EmbeddingCollectionSharder]]


def make(device: torch.device, way: Way, optimizer: str) -> DistributedModelParallel:
    # Bags by table, whose sums are then added up in one order.
    sharding, sharder = way
    return make_sharded_model(
        device,
        sharding,
        optimizer,
        bags=ShardingType.TABLE_WISE,
        sharders=[sharder(), EmbeddingBagCollectionSharder()],
        encoder={"side_by_side": False},
    )


def train_and_save(
    device: torch.device, checkpoint: Path, way: Way, optimizer: str
) -> dict[str, Any]:
    model = make(device, way, optimizer)
    train(model, device)
    dcp.save(state_of(model), checkpoint_id=checkpoint)
    return everything(model, device, dist.get_world_size())


def load_and_save(
    device: torch.device,
    checkpoint: Path,
    copy: Path,
    way: Way,
    optimizer: str,
    ranks: int,
) -> dict[str, Any]:
    model = make(device, way, optimizer)
    state = state_of(model)
    dcp.load(state, checkpoint_id=checkpoint)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])
    dcp.save(state_of(model), checkpoint_id=copy)
    return everything(model, device, ranks)


ROW_WISE, TABLE_WISE = ShardingType.ROW_WISE, ShardingType.TABLE_WISE
SENT, OWNER_SIDE = EmbeddingCollectionSharder, HistoryEmbeddingCollectionSharder
CHAIN: list[tuple[int, Way]] = [
    (2, (TABLE_WISE, SENT)),
    (1, (ROW_WISE, SENT)),
    (4, (ROW_WISE, OWNER_SIDE)),
    (2, (TABLE_WISE, OWNER_SIDE)),
    (2, (TABLE_WISE, SENT)),
]
"""Ranks and shardings of models, each of which is loaded from the model before."""


@pytest.mark.parametrize("optimizer", ["RowWiseAdagrad", "Adam"])
def test_save_and_load(tmp_path: Path, backend: str, optimizer: str):
    if (backend, optimizer) == ("gloo", "Adam"):
        pytest.skip("FBGEMM has no fused Adam for CPU")
    available = world_size(backend) if backend == "nccl" else 4
    (ranks, way), *others = [(min(ranks, available), way) for ranks, way in CHAIN]
    saved = tmp_path / "saved"
    expected = run_ranks(train_and_save, tmp_path, backend, saved, way, optimizer, ranks=ranks)
    remembered = put_together([rank["optimizer"] for rank in expected])
    assert len(remembered) >= len(FEATURES)
    for at, (num_ranks, other) in enumerate(others):
        copy = tmp_path / str(at)
        arguments = saved, copy, other, optimizer, ranks
        results = run_ranks(load_and_save, tmp_path, backend, *arguments, ranks=num_ranks)
        assert_equal(results[0]["model"], expected[0]["model"])
        assert_equal(put_together([rank["optimizer"] for rank in results]), remembered)
        if other[1] is OWNER_SIDE:  # partial results are added up
            for batch, logits in expected[0]["logits"].items():
                assert_same_run(results[0]["logits"][batch], logits)
        else:
            assert_equal(results[0]["logits"], expected[0]["logits"])
        saved = copy


def assert_equal(actual: dict[Any, Tensor], expected: dict[Any, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype
        assert torch.equal(actual[key], value), key
