"""``TrainPipelineCudaGraph`` on two ranks: same training, and ranks that decide alike."""

import functools
import gc
import traceback
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

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
    Change,
    Run,
    ScaledBatch,
    WithLayer,
    assert_same_runs,
    count_reasons,
    finish,
    make_batch,
    make_dlrm,
    poison,
    short_warm_up,
    train,
    train_both,
)
from tests.torchrec.two_ranks import NUM_IDS, assert_same_run, make_model, run_ranks
from torchrec_jagged_attn import EncoderConfig, HistoryEmbeddingCollectionSharder
from torchrec_jagged_attn.collection.sharding.fixed_exchange import ExchangedIds, FixedExchange
from torchrec_jagged_attn.pipeline import TrainPipelineCudaGraph

ROW_WISE, TABLE_WISE = ShardingType.ROW_WISE, ShardingType.TABLE_WISE
COLUMN_WISE, DATA_PARALLEL = ShardingType.COLUMN_WISE, ShardingType.DATA_PARALLEL
NUM_STEPS = 8


class AnySharding(EmbeddingBagCollectionSharder):
    """On a CPU, TorchRec's planner would not shard bags by row."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [x.value for x in (ROW_WISE, TABLE_WISE, COLUMN_WISE, DATA_PARALLEL)]


MHA = {"side_by_side": False, "init": "mha"}


class Case(NamedTuple):
    """Options of ``make_model`` (None: a DLRM that pools), and how its tables are sharded."""

    model: dict[str, Any] | None
    sharding: dict[str, Any]
    batch: dict[str, Any] = {}  # noqa: RUF012
    pipeline: dict[str, Any] = {}  # noqa: RUF012


BY_ROW = {"sharding": ROW_WISE}
CANDIDATES = {"candidates": CANDIDATE_COUNTS}
EXACT_CASES = ["weighted means by row"]  # modules whose ids are exchanged by TorchRec
GPU_CASES = ["data-parallel histories"]  # FBGEMM has no lookup of their rows on a CPU
CPU_CASES = ["dropout"]  # graphs draw other numbers
CASES = {
    "bags by table": Case(None, {"bags": TABLE_WISE}),
    "bags by row": Case(None, BY_ROW | {"bags": ROW_WISE}),
    "bags by column": Case(
        None, {"sharding": COLUMN_WISE, "bags": COLUMN_WISE, "optimizer": "Adagrad"}
    ),
    "data-parallel bags": Case(
        None, {"others": {"t_tag": DATA_PARALLEL, "t_item": ROW_WISE}, "replicated": ["t_tag"]}
    ),
    "weighted means by row": Case(
        None,
        BY_ROW | {"bags": ROW_WISE, "optimizer": "RowWiseAdagrad"},
        {"is_weighted": True},
    ),
    "by table": Case(MHA | {"value_projection": True}, {"optimizer": "Adagrad"}),
    "by row": Case(
        MHA,
        BY_ROW
        | {"optimizer": "RowWiseAdagrad", "others": {"t_user": ROW_WISE, "t_tag": COLUMN_WISE}},
    ),
    "by row, default attention": Case({}, BY_ROW),
    "data-parallel histories": Case(
        MHA, {"others": {"t_cat": DATA_PARALLEL}, "replicated": ["t_cat"]}
    ),
    "single lookup, several shardings": Case(
        MHA | {"single_lookup": True, "single_id_features": ["user"]},
        BY_ROW
        | {
            "others": {"t_cat": TABLE_WISE, "t_tag": ROW_WISE, "t_user": DATA_PARALLEL},
            "replicated": ["t_user"],
        },
    ),
    "single lookup by row, weights": Case(
        MHA | {"single_lookup": True, "is_weighted": True}, BY_ROW, {"is_weighted": True}
    ),
    "encoder by row": Case({"encoder": EncoderConfig(user_embedding=True)}, BY_ROW),
    "encoder by table": Case(MHA | {"encoder": EncoderConfig()}, {}),
    "silu": Case(MHA | {"score": "silu", "value_projection": True}, BY_ROW),
    "dropout": Case(MHA | {"dropout": 0.4}, BY_ROW),
    "jagged candidates by row": Case(
        MHA | {"candidates": "jagged", "value_projection": True}, BY_ROW, CANDIDATES
    ),
    "jagged candidates by table": Case(MHA | {"candidates": "jagged"}, {}, CANDIDATES),
    "max_history, weights": Case(
        MHA | {"max_history": 4, "is_weighted": True, "tags": PoolingType.SUM},
        BY_ROW | {"optimizer": "RowWiseAdagrad"},
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


def train_batches(
    device: torch.device,
    batches: list[Any],
    *changes: Change,
    model: Callable[[], nn.Module] = functools.partial(make_model, **MHA),  # noqa: B008
    **options: Any,
) -> tuple[Run, Run]:
    """With both pipelines."""
    return train_both(device, model, lambda: batches, *changes, make=make_pipeline, **options)


def make_batches(num_steps: int = NUM_STEPS, **options: Any) -> list[Any]:
    return [make_batch(step, dist.get_rank(), **options) for step in range(num_steps)]


def train_case(device: torch.device, name: str) -> tuple[Run, Run]:
    """Static tensors are NaN before each step."""
    case = CASES[name]
    model = functools.partial(make_dlrm, **case.batch)
    if case.model is not None:
        model = functools.partial(make_model, **case.model)
    sharding = {"sharding": TABLE_WISE} | case.sharding
    options = {"model": model, "sharding": sharding, **case.pipeline}
    return train_batches(device, make_batches(**case.batch), poison, **options)


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


def train_small_table(device: torch.device, num_cats: int) -> tuple[Run, Run]:
    """FBGEMM checks all ids."""

    def make(device: torch.device, model: nn.Module, pipeline_type: type) -> Any:
        fused_params = {"bounds_check_mode": BoundsCheckMode.FATAL}
        sharders = [
            HistoryEmbeddingCollectionSharder(fused_params=dict(fused_params)),
            AnySharding(fused_params=dict(fused_params)),
        ]
        return make_pipeline(device, model, pipeline_type, {"sharders": sharders})

    model = functools.partial(make_model, **MHA, single_lookup=True, rows={"t_cat": num_cats})
    batches = make_batches(num_cats=num_cats)
    return train_both(device, model, lambda: batches, make=make)


def train_misfits(device: torch.device, per_rank: list[list[dict[str, Any]]]) -> tuple[Run, Run]:
    """On batches with the options of each rank and step."""
    batches = []
    for step, options in enumerate(per_rank[dist.get_rank()]):
        scale = options.get("scale", 1.0)
        others = {name: x for name, x in options.items() if name != "scale"}
        batch = make_batch(step, dist.get_rank(), **others)
        batches.append(ScaledBatch(**vars(batch), scale=scale))
    # TorchRec's row-wise tables cannot pool a batch without samples on a GPU.
    return train_batches(device, batches, sharding={"bags": TABLE_WISE})


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
NUMBERS_OF_BATCHES = [(11, 9), (7, 8)]
"""For both ranks, in each epoch."""


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


class InterruptedLoader:
    """Iterates over ``batches``, and raises an error once."""

    def __init__(self, batches: list[Any], at: int) -> None:
        self.batches, self.at, self.calls = iter(batches), at, 0

    def __iter__(self) -> "InterruptedLoader":
        return self

    def __next__(self) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise ConnectionError
        return next(self.batches)


def train_with_interrupted_loader(device: torch.device) -> list[Run]:
    """``progress`` is called again after an error of the loader."""
    runs = []
    for pipeline_type in PIPELINES:
        pipeline = make_pipeline(device, pipeline_type=pipeline_type)
        loader, losses = InterruptedLoader(make_batches(12), at=9), []
        while True:
            try:
                losses.append(pipeline.progress(loader)[0].detach().cpu())
            except ConnectionError:
                continue
            except StopIteration:
                break
        runs.append(finish(pipeline, losses))
    return runs


def evaluate(step: int, pipeline: Any) -> None:
    """Evaluate on three batches of another size. Before the last one, detach and attach."""
    if step in (CHANGED, CHANGED + 3):
        pipeline._model.train(step != CHANGED)
    if step == CHANGED + 2:
        pipeline.attach(pipeline.detach())


def train_and_evaluate(device: torch.device) -> tuple[Run, Run]:
    batches = make_batches(12, bag_length=2)
    for step in range(CHANGED, CHANGED + 3):
        batches[step] = make_batch(step, dist.get_rank(), num_samples=7, bag_length=2)
    return train_batches(device, batches, evaluate)


def is_released(device: torch.device) -> bool:
    """Whether nothing refers to the exchange, and its CUDA graphs, of a deleted pipeline."""
    pipeline = make_pipeline(device)
    model = pipeline._model
    train(pipeline, make_batches(SHORT_WARM_UP + 2))
    exchange = weakref.ref(pipeline._exchange._fixed) if pipeline._exchange else None
    del pipeline
    gc.collect()
    assert model.training
    return exchange is None or exchange() is None


def poison_old_ids(patch: pytest.MonkeyPatch) -> None:
    """Overwrite the result of each exchange before the next but one, as CUDA graphs do."""
    start, results = FixedExchange.start, []

    def start_and_poison(self: FixedExchange, *args: Any) -> ExchangedIds:
        if len(results) == 2:
            old = results.pop(0)
            for x in (old._columns, old._lengths, *old._sent_ids):
                x.fill_(NUM_IDS - 1)
        results.append(start(self, *args))
        return results[-1]

    patch.setattr(FixedExchange, "start", start_and_poison)


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
    return error_of(lambda: train(pipeline, make_batches(5)))


def train_with_hook_on_a_rank(device: torch.device) -> str:
    """The hook is added to a parameter after the capture."""

    def change(step: int, pipeline: Any) -> None:
        if step == CHANGED and dist.get_rank() == 0:
            parameter = next(pipeline._model.module.model.over_arch.parameters())
            parameter.register_hook(lambda x: x)

    pipeline = make_pipeline(device)
    return error_of(lambda: train(pipeline, make_batches(), change))


def train_torchrec_sharder(device: torch.device) -> str:
    sharders = [EmbeddingCollectionSharder(), AnySharding()]
    pipeline = make_pipeline(device, sharding={"sharders": sharders})
    return error_of(lambda: train(pipeline, make_batches(1)))


def on_each_rank(device: torch.device) -> dict[str, Any]:
    """Results by name, or why there are none."""
    functions: dict[str, Callable[[], Any]] = {}
    for case in CASES:
        if case in (GPU_CASES if device.type == "cpu" else CPU_CASES):
            continue
        functions[case] = functools.partial(train_case, device, case)
    for name, per_rank in MISFITS.items():
        functions[name] = functools.partial(train_misfits, device, per_rank)
    for order in ORDERS:
        functions[order] = functools.partial(train_epochs, device, order)
    for name, change in CHANGES.items():
        functions[name] = lambda change=change: train_batches(device, make_batches(), change)
    for name, num_cats in SMALL_TABLES.items():
        functions[name] = functools.partial(train_small_table, device, num_cats)
    functions["interrupted loader"] = lambda: train_with_interrupted_loader(device)
    functions["evaluation"] = lambda: train_and_evaluate(device)
    functions["released"] = lambda: is_released(device)
    functions["hook"] = lambda: train_with_hook_on_a_rank(device)
    functions["counting"] = lambda: train_layer(device, Counting())
    functions["EmbeddingCollectionSharder"] = lambda: train_torchrec_sharder(device)
    results: dict[str, Any] = {}
    # Ids decide how many rows a rank has, so that the first batch may not have the most.
    with short_warm_up(headroom=3), pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            poison_old_ids(patch)
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
    if case in (GPU_CASES if backend == "gloo" else CPU_CASES):
        pytest.skip(f"not with {backend}")
    for expected, run in results_of(ranks, case):
        assert run.eager_steps == {"warm-up": SHORT_WARM_UP}
        assert run.num_replayed_steps == NUM_STEPS - SHORT_WARM_UP
        exchange = "exact" if case in EXACT_CASES else "fixed"
        assert run.exchanges == {exchange}
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
def test_all_ranks_run_eagerly_if_one_must(ranks: OnRanks, name: str):
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


def test_progress_after_an_error_of_the_loader(ranks: OnRanks):
    for expected, run in results_of(ranks, "interrupted loader"):
        assert_same_runs(run, expected)
        assert run.num_replayed_steps == 12 - SHORT_WARM_UP


def test_evaluation_on_batches_of_another_size(ranks: OnRanks):
    for expected, run in results_of(ranks, "evaluation"):
        assert_same_runs(run, expected)
        assert run.eager_steps["evaluation"] == 3
        assert run.num_captures == 2  # attach captures again
        assert run.lookups == {"inside"}  # evaluation does not change whether numbers of ids vary


def test_exchange_of_a_deleted_pipeline_is_released(ranks: OnRanks):
    assert all(results_of(ranks, "released"))


@pytest.mark.parametrize("order", ORDERS)
def test_uneven_numbers_of_batches(ranks: OnRanks, order: str):
    for expected, losses in results_of(ranks, order):
        assert len(losses) == len(expected) >= 5
        assert_same_run(losses, expected, num_steps=None)


def test_changing_python_number_on_one_rank(ranks: OnRanks):
    errors = results_of(ranks, "counting")
    for error in errors:
        assert error.startswith("RuntimeError")
        assert "TrainPipelineSparseDist" in error
    assert all("another rank" in error for error in errors[:-1])


def test_hook_on_one_rank(ranks: OnRanks):
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
