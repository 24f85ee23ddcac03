"""Rows of histories that stay with their shard: training equals that of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_configs import PoolingType

from tests.torchrec.test_distributed import assert_equal_training
from tests.torchrec.two_ranks import (
    assert_same_run,
    batches,
    dense_optimizer,
    full_state_dict,
    load,
    make_model,
    optimize_tables,
    reads_weights,
    run_ranks,
    shard,
    train,
    train_unsharded,
)
from torchrec_jagged_attn import HistoryEmbeddingCollectionSharder
from torchrec_jagged_attn.modules.history_sharding import (
    ShardedHistoryEmbeddingCollection,
)

CPU = torch.device("cpu")
ROW_WISE, TABLE_WISE = ShardingType.ROW_WISE, ShardingType.TABLE_WISE
DATA_PARALLEL = ShardingType.DATA_PARALLEL
# Of the model, whose two histories each have an attention, but those side by side.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("RowWiseAdagrad", {}),
    "value projection": ("Adagrad", {"value_projection": True, "init": "mha"}),
    "weighted": ("SGD", {"is_weighted": True, "tags": PoolingType.SUM, "init": "mha"}),
    "silu": ("SGD", {"score": "silu", "value_projection": True, "init": "mha"}),
    "sigmoid": ("SGD", {"score": "sigmoid", "init": "mha"}),
    "max_history": ("SGD", {"max_history": 2, "init": "mha"}),
    "encoder layers": ("SGD", {"encoder_layers": 1, "user_column": True}),
    "side by side": ("RowWiseAdagrad", {"side_by_side": True}),
    "single lookup": (
        "SGD",
        {"single_lookup": True, "single_id_features": ["user"], "init": "mha"},
    ),
}
LOOKUPS = {"ShardedHistoryEmbeddingCollection", "ShardedEmbeddingBagCollection"}


def make(case: str, **options: Any) -> nn.Module:
    return make_model(**{"side_by_side": False, **CASES[case][1], **options})


def make_sharded(
    device: torch.device,
    sharding: ShardingType,
    model: nn.Module,
    optimizer: str = "SGD",
    sharder: ModuleSharder | None = None,
    others: dict[str, ShardingType] | None = None,
) -> nn.Module:
    state = {key: value.clone() for key, value in model.state_dict().items()}
    replicated = [name for name, kind in (others or {}).items() if kind == DATA_PARALLEL]
    optimize_tables(model, optimizer, replicated)
    sharder = HistoryEmbeddingCollectionSharder() if sharder is None else sharder
    sharders = [sharder, EmbeddingBagCollectionSharder()]
    model = shard(model, device, sharding, sharders=sharders, others=others)
    load(model, state)
    return model


def train_sharded(device: torch.device, sharding: ShardingType) -> dict[str, dict[str, Any]]:
    """Without a pipeline, and with one."""
    results = {}
    for case, (optimizer, _) in CASES.items():
        model, pipelined = (make_sharded(device, sharding, make(case), optimizer) for _ in range(2))
        assert any(isinstance(x, ShardedHistoryEmbeddingCollection) for x in model.modules())
        steps = train(model, device)
        pipeline = TrainPipelineSparseDist(pipelined, dense_optimizer(pipelined), device)
        from_host = batches(CPU, is_weighted=reads_weights(pipelined))
        for loss, _ in steps:
            assert torch.equal(pipeline.progress(from_host)[0].detach(), loss)
        assert {type(x).__name__ for x in pipeline._pipelined_modules} <= LOOKUPS
        results[case] = {"steps": steps, "state": full_state_dict(model, device)}
        for name, value in full_state_dict(pipelined, device).items():
            assert torch.equal(value, results[case]["state"][name])
    return results


@pytest.mark.parametrize("sharding", [ROW_WISE, TABLE_WISE])
def test_training_equals_that_of_one_process(
    sharding: ShardingType, tmp_path: Path, backend: str
) -> None:
    ranks = run_ranks(train_sharded, tmp_path, backend, sharding)
    device = torch.device("cpu" if backend == "gloo" else "cuda")
    for case, (optimizer, _) in CASES.items():
        model = make(case).to(device)
        expected = train_unsharded(model, optimizer, len(ranks), device)
        assert_equal_training([x[case] for x in ranks], expected, model, case)


PLANS: dict[str, tuple[dict[str, ShardingType], dict[str, Any]]] = {
    "several kinds in one lookup": (
        {"t_cat": TABLE_WISE, "t_tag": ROW_WISE, "t_user": DATA_PARALLEL},
        {"single_lookup": True, "value_projection": True, "init": "mha"},
    ),
    "a replicated history": ({"t_item": DATA_PARALLEL}, {"init": "mha"}),
    "encoder layers": ({"t_cat": TABLE_WISE}, {"encoder_layers": 1}),
}
"""Tables that are not sharded by row, and options of the model."""


def plans_of(device: torch.device) -> list[tuple[str, dict[str, ShardingType], dict[str, Any]]]:
    """On CPU, FBGEMM adds up what it looks up in replicated tables, and TorchRec fails."""
    plans = ((name, *of_name) for name, of_name in PLANS.items())
    return [x for x in plans if device.type == "cuda" or x[0] != "a replicated history"]


def train_by_plans(device: torch.device) -> dict[str, dict[str, Any]]:
    results = {}
    for name, others, options in plans_of(device):
        model = make_sharded(device, ROW_WISE, make("default", **options), others=others)
        steps = train(model, device)
        results[name] = {"steps": steps, "state": full_state_dict(model, device)}
    return results


def test_tables_that_are_sharded_in_several_ways(tmp_path: Path, backend: str):
    ranks = run_ranks(train_by_plans, tmp_path, backend, ranks=4 if backend == "gloo" else None)
    device = torch.device("cpu" if backend == "gloo" else "cuda")
    for name, _, options in plans_of(device):
        model = make("default", **options).to(device)
        expected = train_unsharded(model, "SGD", len(ranks), device)
        assert_equal_training([x[name] for x in ranks], expected, model, name)


def forward_seeded(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Losses where rows stay, and where they travel, of the same seeds."""
    results = []
    for options in ({"row_dropout": 0.4}, {"dropout": 0.4}, {"row_dropout": 0.4, "dropout": 0.4}):
        losses = []
        for sharding, sharder in (
            (ROW_WISE, None),
            (TABLE_WISE, None),
            (ROW_WISE, EmbeddingCollectionSharder()),
        ):
            model = make_sharded(device, sharding, make("default", **options), sharder=sharder)
            torch.manual_seed(7 + dist.get_rank())
            losses.append(torch.stack([loss for loss, _ in train(model, device)]))
        results.append(losses)
    return results


def test_the_same_is_dropped_wherever_rows_are(tmp_path: Path, backend: str):
    for results in run_ranks(forward_seeded, tmp_path, backend):
        for by_row, by_table, travelling in results:
            assert_same_run(by_row, travelling, num_steps=None)
            assert_same_run(by_table, travelling, num_steps=None)
