"""Costs of local histories as the planner estimates them, and the bytes that are sent."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.torchrec.two_ranks import optimize_tables, run_ranks, shard
from torchrec_jagged_attn import (
    EncoderConfig,
    HistoryEmbeddingCollectionSharder,
    HistoryEmbeddingShardingPlanner,
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
)
from torchrec_jagged_attn.collection.sharding import remote_attention

LENGTH, RANKS = 4000.0, 2
OURS: list[ModuleSharder] = [HistoryEmbeddingCollectionSharder(), EmbeddingBagCollectionSharder()]
THEIRS: list[ModuleSharder] = [EmbeddingCollectionSharder(), EmbeddingBagCollectionSharder()]


def make(**options: object) -> TargetAttentionEmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(
            name=name, embedding_dim=128, num_embeddings=1_000_000, feature_names=features
        )
        for name, features in {"item": ["item", "history"], "user": ["user"]}.items()
    ]
    config = TargetAttentionConfig(target="item", history="history", **options)
    return TargetAttentionEmbeddingBagCollection(tables, config, device=torch.device("meta"))


def make_planner(kind: type[EmbeddingShardingPlanner]) -> EmbeddingShardingPlanner:
    return kind(
        topology=Topology(world_size=RANKS, compute_device="cuda", hbm_cap=80 * 2**30),
        batch_size=512,
        constraints={"item": ParameterConstraints(pooling_factors=[1.0, LENGTH])},
        debug=False,
    )


def options_of(
    kind: type[EmbeddingShardingPlanner], sharders: list[ModuleSharder], **options: object
) -> dict[str, ShardingOption]:
    """The ways to shard the table of histories on GPUs, and their costs."""
    enumerated = make_planner(kind)._enumerator.enumerate(make(**options), sharders)
    return {
        option.sharding_type: option
        for option in enumerated
        if option.name == "item" and option.compute_kernel in ("fused", "dense")
    }


def test_tables_of_long_histories_are_sharded_by_row():
    plan = make_planner(HistoryEmbeddingShardingPlanner).plan(make(), OURS)
    (kind,) = (tables["item"].sharding_type for tables in plan.plan.values() if "item" in tables)
    assert kind == "row_wise"


def test_no_table_of_histories_is_sharded_by_column():
    ours = options_of(HistoryEmbeddingShardingPlanner, OURS)
    assert set(ours) == {"row_wise", "table_wise", "data_parallel"}
    assert "column_wise" in options_of(EmbeddingShardingPlanner, THEIRS)


@pytest.mark.parametrize(
    ("options", "columns"),
    [({}, 2), ({"timestamps": "times", "request_time": "now"}, 3)],
)
def test_queries_and_partial_results_are_sent_in_place_of_rows(options, columns):
    theirs = options_of(EmbeddingShardingPlanner, THEIRS, **options)
    ours = options_of(HistoryEmbeddingShardingPlanner, OURS, **options)
    for kind, owners in (("row_wise", RANKS), ("table_wise", 1)):
        for after, before in zip(ours[kind].shards, theirs[kind].shards, strict=True):
            perf, as_rows = after.perf, before.perf
            assert perf is not None
            assert as_rows is not None
            sent = (1 + 2 * owners) / (1 + LENGTH)  # the row of the target is sent
            assert perf.fwd_comms == pytest.approx(as_rows.fwd_comms * sent)
            assert perf.bwd_comms == pytest.approx(as_rows.bwd_comms * sent)
            ids = (1 + columns * LENGTH) / (1 + LENGTH)
            assert perf.input_dist_comms == pytest.approx(as_rows.input_dist_comms * ids)
            assert perf.fwd_compute == as_rows.fwd_compute
            assert perf.total < as_rows.total
            assert after.storage == before.storage
    assert ours["data_parallel"].shards == theirs["data_parallel"].shards


def test_rows_of_encoder_layers_are_sent():
    theirs = options_of(EmbeddingShardingPlanner, THEIRS, encoder=EncoderConfig())
    ours = options_of(HistoryEmbeddingShardingPlanner, OURS, encoder=EncoderConfig())
    for after, before in zip(ours["row_wise"].shards, theirs["row_wise"].shards, strict=True):
        assert after.perf is not None
        assert before.perf is not None
        assert after.perf.total == before.perf.total


def count_bytes(device: torch.device) -> list[int]:
    """That a rank sends to the other besides ids, of histories of 2 events, and of 50."""
    table = EmbeddingBagConfig(
        name="t_item", embedding_dim=16, num_embeddings=30, feature_names=["item", "history"]
    )
    model = TargetAttentionEmbeddingBagCollection(
        [table], TargetAttentionConfig("item", "history", num_heads=2), device=device
    )
    optimize_tables(model)
    model = shard(model, device, ShardingType.ROW_WISE, sharders=OURS)
    counted: list[int] = []
    start = remote_attention._Transfer.start

    def start_counted(
        transfer: Any, x: Tensor, received: list[int], sent: list[int], is_grad: bool
    ) -> None:
        counted[-1] += x.shape[1:].numel() * x.itemsize * (sum(sent) - sent[dist.get_rank()])
        start(transfer, x, received, sent, is_grad)

    remote_attention._Transfer.start = start_counted
    for length in (2, 50):
        counted.append(0)
        lengths = torch.tensor([1, 1, 1, length, length, length], device=device)
        ids = torch.arange(int(lengths.sum()), device=device) % 30
        features = KeyedJaggedTensor(["item", "history"], ids, lengths=lengths)
        model(features).values().sum().backward()
    return counted


def test_bytes_equal_the_documented_formula(tmp_path: Path, backend: str):
    page = Path(__file__).parents[2] / "docs" / "rows_that_stay.md"
    definition = page.read_text().partition("```python\n")[2].partition("\n\n\n")[0]
    namespace: dict[str, Any] = {}
    exec(definition, namespace)
    ids = 3 * 16 / 2  # half are on the rank itself
    for counted in run_ranks(count_bytes, tmp_path, backend):
        for length, in_fact in zip((2, 50), counted, strict=True):
            _, sent = namespace["sent"](RANKS, 3, length, width=16, heads=2, size=4, headroom=1)
            assert in_fact == sent - ids * (length + 1)
