"""Sharded training of the facade equals training in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from two_ranks import (
    NUM_STEPS,
    OPTIMIZERS,
    batches,
    full_state_dict,
    make_model,
    make_sharded_model,
    optimize_tables,
    run_ranks,
    shard,
    train,
    train_unsharded,
    world_size,
)

from torchrec_jagged_attn import embedding_parameters

SHARDINGS = {
    "gloo": [ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE],
    "nccl": [
        ShardingType.TABLE_WISE,
        ShardingType.ROW_WISE,
        ShardingType.COLUMN_WISE,
        ShardingType.TABLE_ROW_WISE,
        ShardingType.DATA_PARALLEL,
    ],
}


def combinations(backend: str) -> list[tuple[ShardingType, str]]:
    """Shardings with optimizers that then do the same as on a whole table."""
    return [
        (sharding, optimizer)
        for sharding in SHARDINGS[backend]
        for optimizer in OPTIMIZERS
        # FBGEMM has no fused Adam for CPU.
        if not (optimizer == "Adam" and backend == "gloo")
        # Each shard of columns has a mean of its own.
        if not (optimizer == "RowWiseAdagrad" and sharding == ShardingType.COLUMN_WISE)
        # A replicated table is left to the optimizer of dense layers, here SGD.
        if not (optimizer != "SGD" and sharding == ShardingType.DATA_PARALLEL)
    ]


def train_sharded(device: torch.device, backend: str) -> dict[tuple, dict[str, Any]]:
    results = {}
    for sharding, optimizer in combinations(backend):
        model = make_sharded_model(device, sharding, optimizer)
        sharded = {type(module) for module in model.modules()}
        assert {ShardedEmbeddingCollection, ShardedEmbeddingBagCollection} <= sharded
        with pytest.raises(ValueError, match="must not be sharded yet, got a ShardedEmbedding"):
            list(embedding_parameters(model))
        steps = train(model, device)
        results[sharding, optimizer] = {"steps": steps, "state": full_state_dict(model, device)}
    return results


def test_sharded_training_equals_training_in_one_process(tmp_path: Path, backend: str):
    """Also where histories are empty on one rank only, and samples are more on one than another."""
    ranks = run_ranks(train_sharded, tmp_path, backend, backend)
    device = torch.device("cpu" if backend == "gloo" else "cuda")
    for optimizer in OPTIMIZERS:
        model = make_model().to(device)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        expected = train_unsharded(model, optimizer, world_size(backend), device)
        after = model.state_dict()
        for name, value in after.items():
            assert not torch.equal(value, before[name]), f"{name} was not trained"
        for sharding in SHARDINGS[backend]:
            if (sharding, optimizer) not in combinations(backend):
                continue
            where = f"{sharding.value} {optimizer}"
            for rank, results in enumerate(ranks):
                for step, (loss, logits) in enumerate(results[sharding, optimizer]["steps"]):
                    losses, all_logits = expected[step]
                    assert_near(loss, losses[rank], f"{where}, loss of rank {rank} in {step}")
                    assert_near(logits, all_logits[rank], f"{where}, logits of {rank} in {step}")
            state = ranks[0][sharding, optimizer]["state"]
            assert state.keys() == after.keys()
            for name, value in after.items():
                assert_near(state[name], value, f"{where}, {name}")


def train_on_a_grid(device: torch.device) -> dict[str, Any]:
    model = make_sharded_model(device, ShardingType.GRID_SHARD)
    steps = train(model, device)
    return {"steps": steps, "state": full_state_dict(model, device)}


@pytest.mark.gpu
def test_bags_on_a_grid_of_two_hosts(tmp_path: Path):
    if torch.cuda.device_count() < 4:
        pytest.skip(f"needs 4 GPUs, two of them for each host, got {torch.cuda.device_count()}")
    ranks = run_ranks(train_on_a_grid, tmp_path, "nccl", ranks=4, ranks_of_host=2)
    model = make_model().to("cuda")
    expected = train_unsharded(model, "SGD", 4, torch.device("cuda"))
    for rank, results in enumerate(ranks):
        for step, (loss, logits) in enumerate(results["steps"]):
            losses, all_logits = expected[step]
            assert_near(loss, losses[rank], f"loss of rank {rank} in {step}")
            assert_near(logits, all_logits[rank], f"logits of {rank} in {step}")
    for name, value in model.state_dict().items():
        assert_near(ranks[0]["state"][name], value, name)


def assert_near(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(
        actual.detach().cpu(), expected.detach().cpu(), msg=lambda m: f"{what}: {m}"
    )


def train_with_reordered_keys(device: torch.device) -> list[list[Tensor]]:
    """Logits of a first step by order of the keys."""
    sequences = ["bought", "hist", "item", "cat", "hist_cat"]
    orders = [
        [*sequences, "times", "user", "tags"],  # as the tables are
        ["tags", "user", "times", *sequences],
        [*reversed(sequences), "user", "times", "tags"],
    ]
    logits = []
    for sharding in (ShardingType.TABLE_WISE, ShardingType.ROW_WISE):
        for keys in orders:
            model = make_sharded_model(device, sharding)
            batch = next(batches(device))
            features = batch.sparse_features
            batch.sparse_features = KeyedJaggedTensor.concat(
                [features.permute([features.keys().index(key)]) for key in keys]
            )
            assert batch.sparse_features.keys() == keys
            logits.append(model(batch)[1][1])
    return logits


def test_keys_come_in_any_order(tmp_path: Path, backend: str):
    for first, *others in run_ranks(train_with_reordered_keys, tmp_path, backend):
        for other in others:  # by row, bags are added up in another order
            torch.testing.assert_close(other, first)


def train_from_meta(device: torch.device) -> dict[str, Any]:
    model = make_model(torch.device("meta"))
    optimize_tables(model)
    model = shard(model, device, ShardingType.ROW_WISE)
    before = full_state_dict(model, device)
    return {"before": before, "steps": train(model, device)}


def test_model_built_on_the_meta_device(tmp_path: Path, backend: str):
    """Every parameter gets the start of a model that was never on meta."""
    ranks = run_ranks(train_from_meta, tmp_path, backend)
    attention = "embedding_bag_collection.pooling.attentions.0"
    state = ranks[0]["before"]
    assert state.keys() == make_model().state_dict().keys()
    for name, value in make_model().state_dict().items():
        if f"{attention}.recency_bias" in name or f"{attention}.out_proj" in name:
            torch.testing.assert_close(state[name], value)  # the GPU's exp2 is not the CPU's
        elif "embedding" in name and "attentions" not in name:
            assert abs(state[name].std() - 1) < 0.2, name  # by init_fn
    for rank in ranks:
        assert len(rank["steps"]) == NUM_STEPS
        for loss, logits in rank["steps"]:
            assert loss.isfinite()
            assert logits.isfinite().all()
