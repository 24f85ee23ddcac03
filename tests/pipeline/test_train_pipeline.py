"""``TrainPipelineCudaGraph`` in one process trains as TorchRec's ``TrainPipelineSparseDist``.

On a CPU, the padded step runs without a graph.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import PoolingType

from tests.modules.target_attention_inputs import MaterializedAttention
from tests.pipeline.training import (
    CANDIDATE_COUNTS,
    OTHER_SIZE,
    OVERFLOW,
    PIPELINES,
    SHORT_WARM_UP,
    Run,
    assert_equal_on_cpu,
    assert_equal_runs,
    assert_same_runs,
    count_reasons,
    deterministic,
    make_batch,
    make_dlrm,
    make_optimizer,
    make_pipeline,
    make_sharded,
    poison,
    short_warm_up,
    train,
    train_alike,
    train_both,
)
from tests.torchrec.two_ranks import collection_of, make_model
from torchrec_jagged_attn import EncoderConfig
from torchrec_jagged_attn.pipeline import TrainPipelineCudaGraph, train_pipeline
from torchrec_jagged_attn.semantic_ids import DiscretePCA

# The same training

NUM_STEPS = 20
MODELS: dict[str, Callable[[], nn.Module]] = {"dlrm": make_dlrm, "attention": make_model}
OPTIMIZERS = ["SGD", "Adagrad", "RowWiseAdagrad", pytest.param("Adam", marks=pytest.mark.gpu)]


def varied_batches(**options: Any) -> Iterator[Batch]:
    """Batches; one has more ids than the captured step, and one another number of samples."""
    misfits = {14: {"max_length": 40}, 17: {"num_samples": 3}}
    for step in range(NUM_STEPS):
        yield make_batch(step, **misfits.get(step, {}), **options)


def train_varied(
    model: str, optimizer: str, device: torch.device, batches: Callable[[], Iterator[Batch]]
) -> tuple[Run, Run]:
    runs = train_both(device, MODELS[model], batches, sharding={"optimizer": optimizer})
    run = runs[1]
    assert len(run.losses) == NUM_STEPS
    overflows = int(model == "attention")  # the rows of bags are pooled
    assert run.num_replayed_steps == NUM_STEPS - train_pipeline.WARM_UP_STEPS - 1 - overflows
    assert run.num_captures == 1
    assert run.exchanges == {"fixed"}
    return runs


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_training_is_bit_equal(model: str, optimizer: str, device: torch.device):
    """Including the states of optimizers, whose learning rates change in each step."""
    if optimizer == "Adam" and device.type == "cpu":
        pytest.skip("FBGEMM has no fused Adam on a CPU")
    with deterministic():
        expected, run = train_varied(model, optimizer, device, varied_batches)
    assert run.lookups == {"outside"}
    assert_equal_runs(run, expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_lookups_inside_the_graph(model: str, optimizer: str, device: torch.device):
    """Features have fixed numbers of ids, or attention; not with Adam, which changes all rows."""
    if optimizer == "Adam" and device.type == "cpu":
        pytest.skip("FBGEMM has no fused Adam on a CPU")
    lengths = {"bag_length": 2} | ({"length": 4} if model == "dlrm" else {})
    batches = functools.partial(varied_batches, **lengths)
    expected, run = train_varied(model, optimizer, device, batches)
    assert run.lookups == {"outside" if optimizer == "Adam" else "inside"}
    assert_equal_on_cpu(run, expected, device)


@dataclasses.dataclass
class Case:
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: str = "SGD"
    batch: dict[str, Any] = dataclasses.field(default_factory=dict)
    fused_params: dict[str, Any] = dataclasses.field(default_factory=dict)
    pipeline: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    materialized: bool = False
    autocast: bool = False


class AnySharding(EmbeddingCollectionSharder):
    """On a CPU, TorchRec's planner would not shard by row."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [ShardingType.ROW_WISE.value, ShardingType.COLUMN_WISE.value]


@pytest.mark.parametrize("item", [ShardingType.ROW_WISE, ShardingType.COLUMN_WISE])
def test_shardings_of_histories(item: ShardingType, device: torch.device):
    """The other table by row."""
    sharding = {
        "sharding": ShardingType.ROW_WISE,
        "bags": ShardingType.TABLE_WISE,
        "others": {"t_item": item},
        "sharders": [AnySharding(), EmbeddingBagCollectionSharder()],
    }
    batches = [make_batch(step) for step in range(NUM_STEPS)]
    with short_warm_up():
        run = train_alike(device, make_model, lambda: batches, sharding=sharding)
    assert run.exchanges == {"fixed"}
    assert run.eager_steps == {"warm-up": SHORT_WARM_UP}


def make_codes() -> DiscretePCA:
    codes = DiscretePCA(8, 5, trainable=True)
    codes.fit(torch.randn(100, 8, generator=torch.Generator().manual_seed(1)))
    return codes


ENCODER = EncoderConfig(num_layers=2, causal=True, window=3)
JAGGED = {"candidates": CANDIDATE_COUNTS}
POSTPROC = {"pipeline_postproc": True}
CASES = {
    "no times": Case({"timestamps": None, "request_time": None}),
    "weights": Case(
        {"is_weighted": True, "tags": PoolingType.SUM}, "RowWiseAdagrad", {"is_weighted": True}
    ),
    "jagged candidates": Case({"candidates": "jagged"}, batch=JAGGED),
    "jagged candidates, encoder": Case({"candidates": "jagged", "encoder": ENCODER}, batch=JAGGED),
    "several attentions": Case({"side_by_side": False, "init": "mha", "value_projection": True}),
    "silu": Case({"score": "silu"}),
    "encoder": Case({"encoder": ENCODER}),
    "user embedding": Case({"encoder": EncoderConfig(user_embedding=True)}),
    "max_history": Case({"max_history": 2}, pipeline=POSTPROC),
    "max_history, weights, jagged candidates": Case(
        {"max_history": 2, "is_weighted": True, "candidates": "jagged", "tags": PoolingType.SUM},
        "RowWiseAdagrad",
        {"is_weighted": True, **JAGGED},
        pipeline=POSTPROC,
    ),
    "single_id_features": Case({"single_lookup": True, "single_id_features": ["user"]}),
    "single_lookup": Case({"single_lookup": True}),
    "packed codes": Case({"history_codes": make_codes()}),
    "half-precision lookups": Case(
        fused_params={"output_dtype": SparseType.FP16}, dtype=torch.float16
    ),
    "autocast": Case(autocast=True, dtype=torch.bfloat16),
    "materialized keys": Case({"init": "mha", "value_projection": True}, materialized=True),
}


def train_case(case: Case, pipeline_type: type, device: torch.device, num_steps: int = 8) -> Run:
    model = make_model(**case.options)
    if case.materialized:
        for attention in collection_of(model).pooling.attentions:
            attention.__class__ = MaterializedAttention
    sharded = make_sharded(model, device, case.optimizer, fused_params=case.fused_params)
    pipeline = pipeline_type(sharded, make_optimizer(sharded), device, **case.pipeline)
    batches = (make_batch(step, **case.batch) for step in range(num_steps))

    def context(_: int) -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=case.autocast)

    torch.manual_seed(0)
    with short_warm_up():
        return train(pipeline, batches, context=context)


@pytest.mark.parametrize("name", CASES)
def test_options_train_alike(name: str, device: torch.device):
    case = CASES[name]
    expected, run = (train_case(case, pipeline_type, device) for pipeline_type in PIPELINES)
    assert run.num_replayed_steps == len(run.losses) - SHORT_WARM_UP
    assert run.num_captures == 1
    assert_same_runs(run, expected, case.dtype)


def test_dropout(device: torch.device):
    """On a CPU, it has the seeds of eager steps, and losses are equal."""
    case = Case({"dropout": 0.4})
    expected, run = (train_case(case, pipeline_type, device) for pipeline_type in PIPELINES)
    assert run.losses.isfinite().all()
    if device.type == "cpu":
        assert torch.equal(run.losses, expected.losses)


def test_replays_draw_different_dropout(device: torch.device):
    model = make_sharded(make_model(dropout=0.4), device)
    pipeline = TrainPipelineCudaGraph(model, make_optimizer(model), device)
    batches = (make_batch(0) for _ in range(8))
    with short_warm_up():
        run = train(pipeline, batches, learn_nothing)
    losses = run.losses[SHORT_WARM_UP:]
    assert len(losses.unique()) > len(losses) // 2


def learn_nothing(_: int, pipeline: Any) -> None:
    for group in pipeline._optimizer.param_groups:
        group["lr"] = 0.0


# Capacities


def train_batches(device: torch.device, batches: list[Batch], **options: Any) -> Run:
    """By both pipelines, whose losses and weights must be equal."""
    with short_warm_up():
        return train_alike(device, lambda: make_model(**options), lambda: batches)


def batches_of_lengths(*lengths: int) -> list[Batch]:
    """Batches whose histories all have the same length."""
    return [make_batch(step, length=length) for step, length in enumerate(lengths)]


def test_counts_of_steps(device: torch.device):
    """10 eager steps, then a capacity of 1.2 times the largest batch."""
    lengths = [10] * 5 + [5] * 5 + [4, 12, 13, 0, 4]
    pipeline = make_pipeline(device)
    run = train(pipeline, batches_of_lengths(*lengths))
    assert run.num_captures == 1
    assert run.num_replayed_steps == 4
    assert run.eager_steps.pop("warm-up") == 10
    assert count_reasons(run, OVERFLOW) == sum(run.eager_steps.values()) == 1


def test_recapture_after_six_overflows(device: torch.device):
    lengths = [4] * 4 + [9] * 10
    run = train_batches(device, batches_of_lengths(*lengths))
    assert run.num_captures == 2
    assert count_reasons(run, OVERFLOW) == 6
    assert run.num_replayed_steps == len(lengths) - SHORT_WARM_UP - 6


def test_no_recapture_after_five_overflows(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train_pipeline, "LAST_STEPS", 10)
    lengths = [4] * 4 + [9, 4] * 8
    run = train_batches(device, batches_of_lengths(*lengths))
    assert run.num_captures == 1
    assert count_reasons(run, OVERFLOW) == 8


@pytest.mark.parametrize("num_short", [3, 4])  # the last is exchanged before the capture, or not
def test_recapture_after_six_overflows_of_the_exchange(device: torch.device, num_short: int):
    """Pooled rows have one size, so that steps are replayed after the exchange of true numbers."""
    batches = batches_of_lengths(*[4] * num_short, *[9] * 10)
    with short_warm_up(), deterministic():
        run = train_alike(device, make_dlrm, lambda: batches)
    assert run.eager_steps == {"warm-up": SHORT_WARM_UP}
    assert run.num_captures == 2


def test_another_batch_size_once(device: torch.device):
    sizes = [4] * 6 + [3] + [4] * 3
    batches = [make_batch(step, num_samples=size) for step, size in enumerate(sizes)]
    run = train_batches(device, batches)
    assert run.num_captures == 1
    assert count_reasons(run, OTHER_SIZE) == 1


def test_permanent_batch_size(device: torch.device):
    sizes = [4] * 4 + [3] * 10
    batches = [make_batch(step, num_samples=size) for step, size in enumerate(sizes)]
    run = train_batches(device, batches)
    assert run.num_captures == 2
    assert count_reasons(run, OTHER_SIZE) == 5


def test_lookups_remain_inside_with_another_batch_size(device: torch.device):
    """Numbers of ids are compared between batches of one size."""
    sizes = [4] * 4 + [3] * 10
    batches = [make_batch(step, num_samples=size, bag_length=2) for step, size in enumerate(sizes)]
    run = train_batches(device, batches)
    assert run.num_captures == 2
    assert run.lookups == {"inside"}


def test_lookups_leave_the_graph_if_numbers_of_ids_alternate(device: torch.device):
    lengths = [2] * 4 + [3, 2] * 8
    batches = [make_batch(step, length=4, bag_length=n) for step, n in enumerate(lengths)]
    run = train_batches(device, batches)
    assert run.num_captures == 2
    assert run.lookups == {"inside", "outside"}  # of histories, and of bags


@pytest.mark.parametrize("sizes", [(4, 3), (4, 3, 2), (3, 3, 3, 4)])
def test_alternating_batch_sizes_are_captured_once(sizes: tuple[int, ...], device: torch.device):
    sizes = (4,) * 4 + 8 * sizes
    batches = [make_batch(step, num_samples=size) for step, size in enumerate(sizes)]
    run = train_batches(device, batches)
    assert run.num_captures == 1
    assert count_reasons(run, OTHER_SIZE) == sum(size != 4 for size in sizes)


def test_varying_bag_lengths(device: torch.device):
    """Lookups inside the graph are captured again, outside."""
    bag_lengths = [2] * 5 + [3, 2, 1] * 6
    batches = [make_batch(step, bag_length=length) for step, length in enumerate(bag_lengths)]
    run = train_batches(device, batches)
    assert run.num_captures == 2
    assert run.lookups == {"inside", "outside"}
    assert count_reasons(run, "another number of ids .*") == 6
    assert run.num_replayed_steps == len(batches) - SHORT_WARM_UP - 6


def test_another_number_of_jagged_candidates(device: torch.device):
    candidates = [CANDIDATE_COUNTS] * 6 + [[2, 0, 1, 2]] + [CANDIDATE_COUNTS] * 2
    batches = [make_batch(step, candidates=counts) for step, counts in enumerate(candidates)]
    run = train_batches(device, batches, candidates="jagged")
    assert run.num_captures == 1
    assert count_reasons(run, OTHER_SIZE) == 1
    assert run.num_replayed_steps == len(batches) - SHORT_WARM_UP - 1


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ({}, {}),
        ({"single_lookup": True}, {}),
        ({"side_by_side": False, "encoder": ENCODER}, {}),
        ({"candidates": "jagged"}, JAGGED),
    ],
)
def test_replay_reads_only_the_current_batch(
    options: dict[str, Any], batch: dict[str, Any], device: torch.device
):
    batches = [make_batch(step, **batch) for step in range(8)]
    with short_warm_up():
        expected, run = (
            train(make_pipeline(device, make_model(**options)), batches, *changes)
            for changes in ((), (poison,))
        )
    assert run.num_replayed_steps == len(batches) - SHORT_WARM_UP
    assert_equal_runs(run, expected)
