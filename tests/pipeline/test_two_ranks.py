"""``TrainPipelineCudaGraph`` on two ranks: same training, and ranks that decide alike."""

import functools
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import PoolingType

from tests.pipeline import training
from tests.pipeline.training import (
    CANDIDATE_COUNTS,
    OTHER_SIZE,
    OVERFLOW,
    PIPELINES,
    SHORT_WARM_UP,
    Run,
    ScaledBatch,
    WithLayer,
    assert_same_runs,
    count_reasons,
    make_batch,
    make_dlrm,
    poison,
    short_warm_up,
    train,
)
from tests.torchrec.two_ranks import assert_same_run, make_model, run_ranks
from torchrec_jagged_attn import EncoderConfig, HistoryEmbeddingCollectionSharder
from torchrec_jagged_attn.pipeline import TrainPipelineCudaGraph

ROW_WISE, TABLE_WISE = ShardingType.ROW_WISE, ShardingType.TABLE_WISE
COLUMN_WISE, DATA_PARALLEL = ShardingType.COLUMN_WISE, ShardingType.DATA_PARALLEL
NUM_STEPS = 8


class AnySharding(EmbeddingBagCollectionSharder):
    """On a CPU, TorchRec's planner would not shard bags by row."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [x.value for x in (ROW_WISE, TABLE_WISE, COLUMN_WISE, DATA_PARALLEL)]


MHA = {"side_by_side": False, "init": "mha"}
WEIGHTED = {"is_weighted": True, "tags": PoolingType.SUM}
SHARDED_BAGS = {"t_user": ROW_WISE, "t_tag": COLUMN_WISE}
GPU_CASES = ["data-parallel histories"]  # FBGEMM has no lookup of their rows on a CPU
Model = Callable[[], nn.Module]
# The model, how its tables are sharded and learn, and options of batches and of the pipeline.
CASES: dict[str, tuple[Model, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "bags by table": (make_dlrm, {"bags": TABLE_WISE}, {}, {}),
    "bags by row": (make_dlrm, {"sharding": ROW_WISE, "bags": ROW_WISE}, {}, {}),
    "bags by column": (
        make_dlrm,
        {"sharding": COLUMN_WISE, "bags": COLUMN_WISE, "optimizer": "Adagrad"},
        {},
        {},
    ),
    "data-parallel bags": (
        make_dlrm,
        {"others": {"t_tag": DATA_PARALLEL, "t_item": ROW_WISE}, "replicated": ["t_tag"]},
        {},
        {},
    ),
    "by table": (
        functools.partial(make_model, **MHA, value_projection=True),
        {"optimizer": "Adagrad"},
        {},
        {},
    ),
    "by row": (
        functools.partial(make_model, **MHA),
        {"sharding": ROW_WISE, "optimizer": "RowWiseAdagrad", "others": SHARDED_BAGS},
        {},
        {},
    ),
    "by row, default attention": (make_model, {"sharding": ROW_WISE}, {}, {}),
    "data-parallel histories": (
        functools.partial(make_model, **MHA),
        {"others": {"t_cat": DATA_PARALLEL}, "replicated": ["t_cat"]},
        {},
        {},
    ),
    "single lookup by row": (
        functools.partial(make_model, **MHA, single_lookup=True, single_id_features=["user"]),
        {"sharding": ROW_WISE},
        {},
        {},
    ),
    "encoder": (
        functools.partial(make_model, encoder=EncoderConfig(user_embedding=True)),
        {"sharding": ROW_WISE},
        {},
        {},
    ),
    "jagged candidates": (
        functools.partial(make_model, **MHA, candidates="jagged"),
        {"sharding": ROW_WISE},
        {"candidates": CANDIDATE_COUNTS},
        {},
    ),
    "max_history, weights": (
        functools.partial(make_model, **MHA, **WEIGHTED, max_history=4),
        {"sharding": ROW_WISE, "optimizer": "RowWiseAdagrad"},
        {"is_weighted": True},
        {"pipeline_postproc": True},
    ),
}


def make_pipeline(
    device: torch.device,
    model: nn.Module | None = None,
    pipeline_type: type = TrainPipelineCudaGraph,
    sharding: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    model = make_model(**MHA) if model is None else model
    sharders = [HistoryEmbeddingCollectionSharder(), AnySharding()]
    sharding = {"sharding": ROW_WISE, "sharders": sharders} | (sharding or {})
    return training.make_pipeline(device, model, pipeline_type, sharding=sharding, **options)


def train_case(device: torch.device, case: str) -> list[Run]:
    """With both pipelines; static tensors are NaN before each step."""
    model, sharding, batch, options = CASES[case]
    sharding = {"sharding": TABLE_WISE} | sharding
    runs = []
    for pipeline_type in PIPELINES:
        pipeline = make_pipeline(device, model(), pipeline_type, sharding, **options)
        batches = (make_batch(step, dist.get_rank(), **batch) for step in range(NUM_STEPS))
        runs.append(train(pipeline, batches, poison))
    return runs


def train_changed(device: torch.device, change: Callable[[int, Any], None]) -> list[Run]:
    """With both pipelines, and a ``change`` between steps."""
    runs = []
    for pipeline_type in PIPELINES:
        pipeline = make_pipeline(device, pipeline_type=pipeline_type)
        batches = (make_batch(step, dist.get_rank()) for step in range(NUM_STEPS))
        runs.append(train(pipeline, batches, change))
    return runs


def move_weights_of_a_rank(step: int, pipeline: Any) -> None:
    if step == CHANGED and dist.get_rank() == 0:
        for x in pipeline._model.module.model.over_arch.parameters():
            x.data = x.data.clone()


def detach_and_attach(step: int, pipeline: Any) -> None:
    if step == CHANGED:
        pipeline.attach(pipeline.detach())


CHANGED = 5
CHANGES = {
    "other storages of weights on one rank": move_weights_of_a_rank,
    "detach and attach": detach_and_attach,
}
SMALL_TABLES = {"3 and 2 rows": 5, "1 row and none": 1}
"""The number of categories, whose rows are on two ranks."""


def train_small_table(device: torch.device, num_cats: int) -> list[Run]:
    """With both pipelines; FBGEMM checks all ids."""
    fused_params = {"bounds_check_mode": BoundsCheckMode.FATAL}
    runs = []
    for pipeline_type in PIPELINES:
        sharders = [
            HistoryEmbeddingCollectionSharder(fused_params=dict(fused_params)),
            AnySharding(fused_params=dict(fused_params)),
        ]
        model = make_model(**MHA, single_lookup=True, rows={"t_cat": num_cats})
        pipeline = make_pipeline(device, model, pipeline_type, {"sharders": sharders})
        batches = (
            make_batch(step, dist.get_rank(), num_cats=num_cats) for step in range(NUM_STEPS)
        )
        runs.append(train(pipeline, batches))
    return runs


def make_scaled(step: int, scale: float = 1.0, **options: Any) -> ScaledBatch:
    return ScaledBatch(**vars(make_batch(step, dist.get_rank(), **options)), scale=scale)


def train_batches(device: torch.device, per_rank: list[list[dict[str, Any]]]) -> list[Run]:
    """With both pipelines, on batches with the options of each rank and step."""
    options = per_rank[dist.get_rank()]
    runs = []
    for pipeline_type in PIPELINES:
        # TorchRec's row-wise tables cannot pool a batch without samples on a GPU.
        pipeline = make_pipeline(device, None, pipeline_type, {"bags": TABLE_WISE})
        batches = (make_scaled(step, **x) for step, x in enumerate(options))
        runs.append(train(pipeline, batches))
    return runs


def with_misfits(num_steps: int, misfit: dict[str, Any], *steps: int) -> list[dict[str, Any]]:
    return [misfit if step in steps else {} for step in range(num_steps)]


# Options of the batches of the first and the second rank.
MISFITS = {
    "no misfit": [with_misfits(9, {}), with_misfits(9, {})],
    "more rows": [with_misfits(9, {}), with_misfits(9, {"length": 60}, 5)],
    "another batch size": [with_misfits(9, {"num_samples": 3}, 5), with_misfits(9, {})],
    "another Python value": [with_misfits(9, {}), with_misfits(9, {"scale": 2.0}, 5)],
    "no sample": [with_misfits(9, {}), with_misfits(9, {"num_samples": 0}, 5)],
    "more rows from now on": [
        with_misfits(15, {}),
        with_misfits(15, {"length": 60}, *range(5, 15)),
    ],
}
OTHER_RANK = "the batch of another rank does not fit"

ORDERS: dict[str, dict[str, Any]] = {
    "default": {},
    "enqueue_batch_after_forward": {"enqueue_batch_after_forward": True},
    "execute_all_batches=False": {"execute_all_batches": False},
}
NUMBERS_OF_BATCHES = [(7, 5), (4, 6)]
"""Of both ranks in each epoch."""


def train_epochs(device: torch.device, order: str) -> list[Tensor]:
    """Losses of both pipelines; TorchRec's has equally many batches on all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    losses = []
    for pipeline_type in PIPELINES:
        pipeline = make_pipeline(device, pipeline_type=pipeline_type, **ORDERS[order])
        epochs = []
        for epoch, numbers in enumerate(NUMBERS_OF_BATCHES):
            number = numbers[rank] if pipeline_type is TrainPipelineCudaGraph else min(numbers)
            if size == 1:
                number = numbers[0]
            batches = (make_batch(10 * epoch + step, rank) for step in range(number))
            epochs.append(train(pipeline, batches).losses)
        losses.append(torch.cat(epochs))
    return losses


class Counting(nn.Module):
    """Multiplies by a Python number; on the last rank, it changes in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, logits: Tensor, batch: Any) -> Tensor:
        self.step += dist.get_rank() == dist.get_world_size() - 1
        return logits * (1 + self.step)


def error_of(train: Callable[[], Any]) -> str:
    try:
        train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def train_layer(device: torch.device, layer: nn.Module) -> str:
    pipeline = make_pipeline(device, WithLayer(make_model(**MHA), layer))
    batches = [make_batch(step, dist.get_rank()) for step in range(5)]
    return error_of(lambda: train(pipeline, batches))


def train_with_hook_on_a_rank(device: torch.device) -> str:
    """The hook is added to a parameter after the capture."""

    def change(step: int, pipeline: Any) -> None:
        if step == CHANGED and dist.get_rank() == 0:
            parameter = next(pipeline._model.module.model.over_arch.parameters())
            parameter.register_hook(lambda x: x)

    pipeline = make_pipeline(device)
    batches = [make_batch(step, dist.get_rank()) for step in range(NUM_STEPS)]
    return error_of(lambda: train(pipeline, batches, change))


def train_torchrec_sharder(device: torch.device) -> str:
    sharders = [EmbeddingCollectionSharder(), AnySharding()]
    pipeline = make_pipeline(device, sharding={"sharders": sharders})
    return error_of(lambda: train(pipeline, [make_batch(0, dist.get_rank())]))


def on_each_rank(device: torch.device) -> dict[str, Any]:
    """Results by name, or why there are none."""
    functions: dict[str, Callable[[], Any]] = {}
    for case in CASES:
        if case in GPU_CASES and device.type == "cpu":
            continue
        functions[case] = functools.partial(train_case, device, case)
    for name, per_rank in MISFITS.items():
        functions[name] = functools.partial(train_batches, device, per_rank)
    for order in ORDERS:
        functions[order] = functools.partial(train_epochs, device, order)
    for name, change in CHANGES.items():
        functions[name] = functools.partial(train_changed, device, change)
    for name, num_cats in SMALL_TABLES.items():
        functions[name] = functools.partial(train_small_table, device, num_cats)
    functions["hook"] = lambda: train_with_hook_on_a_rank(device)
    functions["counting"] = lambda: train_layer(device, Counting())
    functions["EmbeddingCollectionSharder"] = lambda: train_torchrec_sharder(device)
    results: dict[str, Any] = {}
    # Ids decide how many rows a rank has, so that the first batch may not have the most.
    with short_warm_up(headroom=3):
        for name, function in functions.items():
            try:
                results[name] = function()
            except Exception:  # the other rank may still wait for this one
                return results | dict.fromkeys(functions.keys() - results, traceback.format_exc())
    return results


OnRanks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(backend: str, tmp_path_factory: pytest.TempPathFactory) -> OnRanks:
    return run_ranks(on_each_rank, tmp_path_factory.mktemp("ranks"), backend)


def results_of(ranks: OnRanks, name: str) -> list[Any]:
    results = [rank[name] for rank in ranks]
    errors = [x for x in results if isinstance(x, str) and x.startswith("Traceback")]
    if errors:
        pytest.fail("\n".join(errors))
    return results


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=pytest.mark.gpu if x in GPU_CASES else ()) for x in CASES]
)
def test_trains_alike(ranks: OnRanks, backend: str, case: str):
    if case in GPU_CASES and backend == "gloo":
        pytest.skip("needs a lookup that FBGEMM has on GPUs alone")
    for expected, run in results_of(ranks, case):
        assert run.eager_steps == {"warm-up": SHORT_WARM_UP}
        assert run.num_replayed_steps == NUM_STEPS - SHORT_WARM_UP
        assert_same_runs(run, expected)


@pytest.mark.parametrize("name", CHANGES)
def test_all_ranks_capture_again(ranks: OnRanks, name: str):
    for expected, run in results_of(ranks, name):
        assert_same_runs(run, expected)
        assert run.num_captures == 2
        assert run.num_replayed_steps == NUM_STEPS - SHORT_WARM_UP


@pytest.mark.parametrize("name", SMALL_TABLES)
def test_padding_of_a_small_table(ranks: OnRanks, name: str):
    for expected, run in results_of(ranks, name):
        assert_same_runs(run, expected)
        assert run.lookups == {"inside"}
        assert run.num_replayed_steps == NUM_STEPS - SHORT_WARM_UP


# The number of steps that are eager on both ranks, and the reasons of the rank with these batches
# and of the other one. Rows of one rank's batch are looked up by both.
EAGER_STEPS = {
    "no misfit": (0, "", ""),
    "more rows": (1, OVERFLOW, f"{OVERFLOW}|{OTHER_RANK}"),
    "another batch size": (1, OTHER_SIZE, f"{OTHER_SIZE}|{OTHER_RANK}"),
    "another Python value": (1, "another value: batch.scale", OTHER_RANK),
    "no sample": (1, "no sample", "another rank cannot capture its batch"),
    "more rows from now on": (6, OVERFLOW, f"{OVERFLOW}|{OTHER_RANK}"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_all_ranks_run_a_step_eagerly_if_one_must(ranks: OnRanks, name: str):
    results = results_of(ranks, name)
    number, *reasons = EAGER_STEPS[name]
    is_alone = len(ranks) == 1 and not any(MISFITS[name][0])
    for batches, (expected, run) in zip(MISFITS[name], results, strict=False):
        assert_same_runs(run, expected)
        has_misfit = any(batches)
        eager_steps = 0 if is_alone else number
        assert run.eager_steps.pop("warm-up") == SHORT_WARM_UP
        assert sum(run.eager_steps.values()) == eager_steps
        assert count_reasons(run, reasons[not has_misfit]) == eager_steps
        assert run.num_replayed_steps == len(batches) - SHORT_WARM_UP - eager_steps
        assert run.num_captures == 1 + (name == "more rows from now on" and not is_alone)


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_train_as_many_batches_as_the_shortest(ranks: OnRanks, order: str):
    for expected, losses in results_of(ranks, order):
        assert len(losses) == len(expected) >= 5
        assert_same_run(losses, expected, num_steps=None)


def test_all_ranks_refuse_numbers_that_change_on_one(ranks: OnRanks):
    errors = results_of(ranks, "counting")
    for error in errors:
        assert error.startswith("RuntimeError")
        assert "TrainPipelineSparseDist" in error
    assert all("another rank" in error for error in errors[:-1])


def test_all_ranks_refuse_a_hook_on_one(ranks: OnRanks):
    error, *others = results_of(ranks, "hook")
    assert error.startswith("NotImplementedError: parameters must have no hooks")
    assert others == ["RuntimeError: the capture failed on another rank, see its error"] * len(
        others
    )


def test_the_sharder_of_torchrec_is_refused(ranks: OnRanks):
    for error in results_of(ranks, "EmbeddingCollectionSharder"):
        if len(ranks) == 2:
            assert "must be sharded by a HistoryEmbeddingCollectionSharder" in error
        else:
            assert error == "no error"
