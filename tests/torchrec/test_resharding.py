"""torch.distributed.checkpoint: what was saved of one sharding is loaded into another."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingType

from tests.torchrec.two_ranks import (
    FEATURES,
    NUM_STEPS,
    full_state_dict,
    make_batch,
    make_sharded_model,
    run_ranks,
    train,
    world_size,
)

Parts = dict[tuple[int, ...], Tensor]


def everything(model: DistributedModelParallel, device: torch.device, ranks: int) -> dict[str, Any]:
    """Tables and dense layers, what the tables' optimizer remembers, and logits of all batches."""
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
    """The parts of a tensor that lie on this rank, by where they begin."""
    if not isinstance(value, ShardedTensor):
        return {(): value.detach().cpu()}
    return {
        tuple(shard.metadata.shard_offsets): shard.tensor.detach().cpu()
        for shard in value.local_shards()
    }


def put_together(ranks: list[dict[str, Parts]]) -> dict[str, Tensor]:
    """Whole tensors; those sharded are so by rows, or not at all."""
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


def train_and_save(device: torch.device, checkpoint: Path, optimizer: str) -> dict[str, Any]:
    model = make_sharded_model(device, ShardingType.TABLE_WISE, optimizer)
    train(model, device)
    dcp.save(state_of(model), checkpoint_id=checkpoint)
    return everything(model, device, dist.get_world_size())


def load_and_save(
    device: torch.device,
    checkpoint: Path,
    copy: Path,
    sharding: ShardingType,
    optimizer: str,
    ranks: int,
) -> dict[str, Any]:
    # Bags by table, whose sums are then added up in one order.
    model = make_sharded_model(device, sharding, optimizer, bags=ShardingType.TABLE_WISE)
    state = state_of(model)
    dcp.load(state, checkpoint_id=checkpoint)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])
    dcp.save(state_of(model), checkpoint_id=copy)
    return everything(model, device, ranks)


@pytest.mark.parametrize("optimizer", ["RowWiseAdagrad", "Adam"])
def test_from_two_ranks_by_table_to_one_by_row_and_back(
    tmp_path: Path, backend: str, optimizer: str
):
    if (backend, optimizer) == ("gloo", "Adam"):
        pytest.skip("FBGEMM has no fused Adam for CPU")
    saved, first, second = (tmp_path / name for name in ("saved", "first", "second"))
    ranks = world_size(backend)
    expected = run_ranks(train_and_save, tmp_path, backend, saved, optimizer)
    by_row = run_ranks(
        load_and_save,
        tmp_path,
        backend,
        *(saved, first, ShardingType.ROW_WISE, optimizer, ranks),
        ranks=1,
    )
    by_table = run_ranks(
        load_and_save,
        tmp_path,
        backend,
        *(first, second, ShardingType.TABLE_WISE, optimizer, ranks),
    )
    for kind in ("model", "logits"):
        for result in (by_row, by_table):
            assert_equal(result[0][kind], expected[0][kind])
    remembered = put_together([rank["optimizer"] for rank in expected])
    assert len(remembered) >= len(FEATURES)
    for result in (by_row, by_table):
        assert_equal(put_together([rank["optimizer"] for rank in result]), remembered)


def assert_equal(actual: dict[Any, Tensor], expected: dict[Any, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype
        assert torch.equal(actual[key], value), key
