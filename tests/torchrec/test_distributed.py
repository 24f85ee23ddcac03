"""Sharded training equals training in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.torchrec.two_ranks import (
    NUM_STEPS,
    STEPS_OF_EQUAL_BATCHES,
    assert_same_run,
    batches,
    device_of,
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

# Shardings with optimizers that then do the same as on a whole table: each shard of columns would
# have a mean of its own, and a replicated table is left to the optimizer of dense layers, here SGD.
TRAINED = {
    "gloo": [
        (ShardingType.TABLE_WISE, "SGD"),
        (ShardingType.ROW_WISE, "RowWiseAdagrad"),
        (ShardingType.COLUMN_WISE, "Adagrad"),
    ],
    "nccl": [
        (ShardingType.TABLE_WISE, "SGD"),
        (ShardingType.ROW_WISE, "RowWiseAdagrad"),
        (ShardingType.COLUMN_WISE, "Adagrad"),
        (ShardingType.COLUMN_WISE, "Adam"),  # FBGEMM has none for CPU
        (ShardingType.TABLE_ROW_WISE, "SGD"),
        (ShardingType.DATA_PARALLEL, "SGD"),
    ],
}


def train_sharded(device: torch.device, backend: str) -> list[dict[str, Any]]:
    results = []
    for sharding, optimizer in TRAINED[backend]:
        model = make_sharded_model(device, sharding, optimizer)
        sharded = {type(module) for module in model.modules()}
        assert {ShardedEmbeddingCollection, ShardedEmbeddingBagCollection} <= sharded
        with pytest.raises(ValueError, match="must not be sharded yet, got a ShardedEmbedding"):
            list(embedding_parameters(model))
        results.append({"steps": train(model, device), "state": full_state_dict(model, device)})
    return results


OnRanks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(backend: str, tmp_path_factory: pytest.TempPathFactory) -> OnRanks:
    return run_ranks(on_each_rank, tmp_path_factory.mktemp("ranks"), backend, backend)


def test_sharded_training_equals_training_in_one_process(ranks: OnRanks, backend: str):
    """Including ranks with empty histories, and ranks with different batch sizes."""
    device = device_of(backend)
    for at, (sharding, optimizer) in enumerate(TRAINED[backend]):
        model = make_model().to(device)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        expected = train_unsharded(model, optimizer, world_size(backend), device)
        for name, value in model.state_dict().items():
            assert not torch.equal(value, before[name]), f"{name} was not trained"
        results_per_rank = [results["trained"][at] for results in ranks]
        assert_equal_training(results_per_rank, expected, model, f"{sharding.value} {optimizer}")


class AnyShardingOfBags(EmbeddingBagCollectionSharder):
    """TorchRec's sharder offers these on GPUs only."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [sharding.value for sharding in BAGS_ACROSS_HOSTS]


BAGS_ACROSS_HOSTS = (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)


def train_across_hosts(device: torch.device) -> dict[ShardingType, dict[str, Any]]:
    results = {}
    for sharding in BAGS_ACROSS_HOSTS:
        sharders = [AnyShardingOfBags(), EmbeddingCollectionSharder()]
        model = make_sharded_model(
            device, sharding, tags=PoolingType.SUM, bags=sharding, sharders=sharders
        )
        steps = train(model, device, STEPS_OF_EQUAL_BATCHES)  # gloo cannot gather others
        results[sharding] = {"steps": steps, "state": full_state_dict(model, device)}
    return results


def test_bags_across_two_hosts(tmp_path: Path, backend: str):
    """By rows within a host; on a grid, also by columns over hosts. Both run on one machine."""
    ranks_of_host = 2
    if backend == "nccl":
        if torch.cuda.device_count() < 2:
            pytest.skip(f"needs a GPU for each host, got {torch.cuda.device_count()}")
        ranks_of_host = min(2, torch.cuda.device_count() // 2)
    ranks = run_ranks(
        train_across_hosts,
        tmp_path,
        backend,
        ranks=2 * ranks_of_host,
        ranks_of_host=ranks_of_host,
    )
    device = device_of(backend)
    model = make_model(tags=PoolingType.SUM).to(device)
    expected = train_unsharded(model, "SGD", len(ranks), device, STEPS_OF_EQUAL_BATCHES)
    for sharding in BAGS_ACROSS_HOSTS:
        assert_equal_training(
            [results[sharding] for results in ranks], expected, model, sharding.value
        )


def assert_equal_training(
    ranks: list[dict[str, Any]],
    expected: list[tuple[list[Tensor], list[Tensor]]],
    model: nn.Module,
    what: str,
) -> None:
    """Losses, logits and parameters of ``ranks`` equal the results of the unsharded ``model``."""
    for rank, results in enumerate(ranks):
        for step, (loss, logits) in enumerate(results["steps"]):
            losses, all_logits = expected[step]
            for name, x, y in (("loss", loss, losses[rank]), ("logits", logits, all_logits[rank])):
                description = f"{what}, {name} of rank {rank} in {step}"
                assert_same_run(x, y, num_steps=step + 1, name=description)
        assert len(results["steps"]) == len(expected)
    state, after = ranks[0]["state"], model.state_dict()
    assert state.keys() == after.keys()
    for name, value in after.items():
        assert_same_run(state[name], value, num_steps=len(expected), name=f"{what}, {name}")


def train_with_reordered_keys(device: torch.device) -> list[Tensor]:
    """Logits of a first step by order of the keys."""
    sequences = ["bought", "hist", "item", "cat", "hist_cat"]
    orders = [
        [*sequences, "times", "user", "tags", "now"],  # as the tables are
        ["tags", "now", "user", "times", *sequences],
        [*reversed(sequences), "user", "times", "now", "tags"],
    ]
    logits = []
    shardings = ShardingType.TABLE_WISE, ShardingType.TABLE_WISE, ShardingType.ROW_WISE
    for sharding, keys in zip(shardings, orders, strict=True):
        model = make_sharded_model(device, sharding)
        batch = next(batches(device))
        features = batch.sparse_features
        batch.sparse_features = KeyedJaggedTensor.concat(
            [features.permute([features.keys().index(key)]) for key in keys]
        )
        assert batch.sparse_features.keys() == keys
        logits.append(model(batch)[1][1])
    return logits


def test_keys_come_in_any_order(ranks: OnRanks):
    for results in ranks:
        first, *others = results["reordered"]
        for other in others:  # by row, bags are added up in another order
            assert_same_run(other, first)


def train_from_meta(device: torch.device) -> dict[str, Any]:
    model = make_model(torch.device("meta"))
    optimize_tables(model)
    model = shard(model, device, ShardingType.ROW_WISE)
    before = full_state_dict(model, device)
    return {"before": before, "steps": train(model, device)}


def on_each_rank(device: torch.device, backend: str) -> dict[str, Any]:
    return {
        "trained": train_sharded(device, backend),
        "reordered": train_with_reordered_keys(device),
        "from meta": train_from_meta(device),
    }


def test_model_built_on_the_meta_device(ranks: OnRanks):
    """Parameters are initialized as on a real device."""
    attention = "embedding_bag_collection.pooling.attentions.0"
    state = ranks[0]["from meta"]["before"]
    assert state.keys() == make_model().state_dict().keys()
    for name, value in make_model().state_dict().items():
        if f"{attention}.recency_bias" in name or f"{attention}.q_proj" in name:
            assert_same_run(state[name], value, num_terms=1)  # the GPU's exp2 is not the CPU's
        elif "embedding" in name and "attentions" not in name:
            assert abs(state[name].std() - 1) < 0.2, name  # by init_fn
    for results in ranks:
        steps = results["from meta"]["steps"]
        assert len(steps) == NUM_STEPS
        for loss, logits in steps:
            assert loss.isfinite()
            assert logits.isfinite().all()
