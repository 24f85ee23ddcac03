"""Options of TorchRec for sharded models: training equals the plain model."""

import functools
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.types import ModuleSharder, ShardedModule, ShardingType
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.torchrec.two_ranks import (
    NUM_STEPS,
    assert_same_run,
    collection_of,
    device_of,
    load,
    make_batch,
    make_model,
    make_sharded_model,
    optimize_tables,
    run_ranks,
    shard,
    shard_with_weights,
    train,
    train_on,
    train_unsharded,
)
from torchrec_jagged_attn import (
    EncoderConfig,
    HistoryEmbeddingCollectionSharder,
    embedding_bag_keys,
    rename_keys,
)
from torchrec_jagged_attn.semantic_ids import DiscretePCA

Losses = list[Tensor]


def losses_of(model: nn.Module, device: torch.device) -> Losses:
    return [loss for loss, _ in train(model, device)]


Sharder = type[EmbeddingCollectionSharder]


def fused(
    sharder: Sharder = EmbeddingCollectionSharder, **fused_params: Any
) -> list[ModuleSharder]:
    return [
        sharder(fused_params=fused_params),
        EmbeddingBagCollectionSharder(fused_params=fused_params),
    ]


def codecs(
    precision: CommType, sharder: Sharder = EmbeddingCollectionSharder
) -> list[ModuleSharder]:
    registry = get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=precision, backward_precision=precision)
    )
    return [
        sharder(qcomm_codecs_registry=registry),
        EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry),
    ]


def deduplicated(device: torch.device) -> Losses:
    sharders = [EmbeddingCollectionSharder(use_index_dedup=True), EmbeddingBagCollectionSharder()]
    return losses_of(make_sharded_model(device, sharders=sharders), device)


SEPARATE: dict[str, Any] = {"side_by_side": False, "init": "mha"}
"""Options of a model whose attention is on owner ranks, if its sharder supports it."""


def make_owner_side(
    device: torch.device, sharders: list[ModuleSharder] | None = None, **options: Any
) -> DistributedModelParallel:
    """A model with owner-side attention."""
    sharders = fused(HistoryEmbeddingCollectionSharder) if sharders is None else sharders
    return make_sharded_model(
        device, ShardingType.ROW_WISE, sharders=sharders, encoder=SEPARATE, **options
    )


def autocast(device: torch.device, make: Callable[..., nn.Module] = make_sharded_model) -> Losses:
    with torch.autocast(device.type, torch.bfloat16):
        return losses_of(make(device), device)


def changed(
    change: Callable[[nn.Module], None],
    sharder: Sharder = EmbeddingCollectionSharder,
    **options: Any,
) -> Callable[[torch.device], Losses]:
    """Changes of the collection before it is sharded."""

    def run(device: torch.device) -> Losses:
        model = make_model(**options)
        change(collection_of(model))
        sharders = fused(sharder)
        model = shard_with_weights(model, device, ShardingType.TABLE_WISE, sharders=sharders)
        return losses_of(model, device)

    return run


def looked_up_together(device: torch.device, **options: Any) -> Losses:
    separate, model = make_model(), make_model(single_lookup=True, **options)
    keys = {bag: key for key, bag in embedding_bag_keys(model).items()}
    names = {key: keys[bag] for key, bag in embedding_bag_keys(separate).items()}
    optimize_tables(model)
    model = shard(model, device, ShardingType.TABLE_WISE)
    assert [type(m).__name__ for m in model.modules() if isinstance(m, ShardedModule)] == [
        "ShardedEmbeddingCollection"
    ]
    load(model, rename_keys(separate.state_dict(), names))
    return losses_of(model, device)


def recompute(collection: nn.Module) -> None:
    collection.pooling = checkpoint_wrapper(collection.pooling)


def compile_attention(collection: nn.Module, fullgraph: bool = True) -> None:
    # The captured graph is the same with any backend, and this backend is quick.
    collection.pooling.attentions[0].compile(backend="aot_eager", fullgraph=fullgraph)


def planned_freely(device: torch.device) -> Losses:
    model = make_model()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    sharders = get_default_sharders()
    topology = Topology(world_size=dist.get_world_size(), compute_device=device.type)
    plan = EmbeddingShardingPlanner(topology=topology).collective_plan(
        model, sharders, dist.group.WORLD
    )
    assert sorted(name for tables in plan.plan.values() for name in tables) == [
        "t_cat",
        "t_item",
        "t_tag",
        "t_user",
    ]
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    load(model, state)
    return losses_of(model, device)[:1]  # the plan says which tables learn, and how


def with_equal_samples_once(batch: Batch) -> Batch:
    """The batch with variable batch sizes by key: equal samples are deduplicated."""
    features = batch.sparse_features
    strides, inverse, values, lengths = [], [], [], []
    for key in features.keys():  # noqa: SIM118
        first: dict[tuple[int, ...], int] = {}
        samples = [tuple(ids.tolist()) for ids in features[key].to_dense()]
        inverse.append([first.setdefault(ids, len(first)) for ids in samples])
        strides.append([len(first)])
        values += [i for ids in first for i in ids]
        lengths += [len(ids) for ids in first]
    all_values = torch.tensor(values, dtype=torch.int64)
    batch.sparse_features = KeyedJaggedTensor(
        keys=features.keys(),
        values=all_values,
        weights=None if features.weights_or_none() is None else all_values % 4 / 2,
        lengths=torch.tensor(lengths),
        stride_per_key_per_rank=strides,
        inverse_indices=(features.keys(), torch.tensor(inverse)),
    )
    return batch


def variable_batch_sizes(
    device: torch.device, sharders: list[ModuleSharder] | None = None
) -> Losses:
    model = make_sharded_model(device, ShardingType.ROW_WISE, sharders=sharders)
    batches = (make_batch(step, dist.get_rank()) for step in range(NUM_STEPS))
    once = (with_equal_samples_once(batch).to(device) for batch in batches)
    return [loss for loss, _ in train_on(model, once)]


def evaluated(model: nn.Module, device: torch.device, once: bool = False) -> Losses:
    is_weighted = collection_of(model).is_weighted()
    batches = (make_batch(step, dist.get_rank(), is_weighted) for step in range(NUM_STEPS))
    with torch.no_grad():
        return [
            model((with_equal_samples_once(batch) if once else batch).to(device))[0]
            for batch in batches
        ]


def evaluated_once(
    make: Callable[..., nn.Module] = make_sharded_model,
) -> Callable[[torch.device], Losses]:
    """On batches with variable batch sizes by key, then on batches with one batch size."""
    return lambda device: [
        loss for once in (True, False) for loss in evaluated(make(device), device, once)
    ]


def refused_with_owner_side_attention(device: torch.device) -> Losses:
    features = with_equal_samples_once(make_batch(0, dist.get_rank())).to(device).sparse_features
    collection = collection_of(make_owner_side(device))
    with pytest.raises(NotImplementedError, match="features must have one batch size with History"):
        collection(features)
    features = make_batch(0, dist.get_rank(), is_weighted=True).to(device).sparse_features
    features.weights().requires_grad_()
    model = make_sharded_model(
        device,
        ShardingType.ROW_WISE,
        sharders=fused(HistoryEmbeddingCollectionSharder),
        is_weighted=True,
        tags=PoolingType.SUM,
        encoder=SEPARATE | {"single_lookup": True},
    )
    collection = collection_of(model)
    with pytest.raises(NotImplementedError, match="prior_weights must require no gradient where"):
        collection(features)
    lookup = collection.embedding_collections["8"]
    lookup.register_forward_hook(lambda _lookup, _inputs, sequences: detach(dict(sequences)))
    features = make_batch(0, dist.get_rank(), is_weighted=True).to(device).sparse_features
    with pytest.raises(NotImplementedError, match="got histories that were detached"):
        collection(features)
    tables = make_model(**SEPARATE).model.sparse_arch.embedding_bag_collection.embedding_collections
    with pytest.raises(NotImplementedError, match=r"'t_item' must be sharded in .*use 'row_wise'"):
        shard(tables, device, ShardingType.COLUMN_WISE, sharders=[ColumnWise()])
    for config in tables["8"].embedding_configs():
        config.total_num_buckets = 4
    with pytest.raises(NotImplementedError, match="'t_item' must have as many rows as ids, and no"):
        shard(tables, device, ShardingType.ROW_WISE, sharders=fused(ColumnWise))
    return []


def detach(sequences: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    """Detach the rows, like TrainPipelineSemiSync."""
    for sequence in sequences.values():
        sequence._values = sequence.values().detach().requires_grad_()
    return sequences


class ColumnWise(HistoryEmbeddingCollectionSharder):
    """A sharder whose planner may choose columns, which it refuses."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [*super().sharding_types(compute_device_type), ShardingType.COLUMN_WISE.value]


def without_inverse_indices(device: torch.device) -> Losses:
    model = make_sharded_model(device)
    batch = with_equal_samples_once(make_batch(0, dist.get_rank())).to(device)
    batch.sparse_features._inverse_indices = None
    with pytest.raises(ValueError, match="features of several batch sizes must have inverse"):
        model(batch)
    return []


WEIGHTED = {"tags": PoolingType.SUM, "is_weighted": True, "max_history": 3}


ENCODED = {"encoder": EncoderConfig(num_layers=2, causal=True, window=3, user_embedding=True)}


def over_codes() -> dict[str, Any]:
    """Histories of codes, whose mean and basis are learned."""
    codes = DiscretePCA(8, 5, trainable=True)
    codes.fit(torch.randn(100, 8, generator=torch.Generator().manual_seed(1)))
    return {"history_codes": codes}


def trained_with(
    make: Callable[..., nn.Module] = make_sharded_model, **options: Any
) -> Callable[[torch.device], Losses]:
    return lambda device: losses_of(make(device, **options), device)


def weighted(device: torch.device) -> DistributedModelParallel:
    return make_sharded_model(device, optimizer="RowWiseAdagrad", **WEIGHTED)


def make_with_codes(device: torch.device) -> DistributedModelParallel:
    return make_sharded_model(device, encoder=over_codes())


OWNER_SIDE = HistoryEmbeddingCollectionSharder
OPTIONS: dict[str, Callable[[torch.device], Losses]] = {
    "plain": trained_with(),
    "activation checkpointing": changed(recompute),
    "torch.compile of the attention": changed(compile_attention),
    "index dedup": deduplicated,
    "plan without constraints": planned_freely,
    "single lookup": looked_up_together,
    "single ids": functools.partial(looked_up_together, single_id_features=["user"]),
    "variable batch sizes, evaluated": evaluated_once(),
    "variable batch sizes without inverse indices": without_inverse_indices,
    "autocast": autocast,
    "encoder layers of a window": trained_with(encoder=ENCODED),
    "history_codes": trained_with(make_with_codes),
    "history_codes, variable batch sizes, evaluated": evaluated_once(make_with_codes),
    "variable batch sizes": variable_batch_sizes,
    "variable batch sizes, output_dtype bf16": functools.partial(
        variable_batch_sizes, sharders=fused(output_dtype=SparseType.BF16)
    ),
    "owner-side": trained_with(make_owner_side),
    "owner-side, activation checkpointing": changed(recompute, OWNER_SIDE, **SEPARATE),
    "owner-side, torch.compile of the attention": changed(
        functools.partial(compile_attention, fullgraph=False), OWNER_SIDE, **SEPARATE
    ),
    "owner-side, autocast": lambda device: autocast(device, make_owner_side),
    "owner-side, evaluated": lambda device: evaluated(make_owner_side(device).eval(), device),
    "refused with owner-side attention": refused_with_owner_side_attention,
    "is_weighted, max_history": trained_with(weighted),
    "is_weighted, max_history, variable batch sizes, evaluated": evaluated_once(weighted),
}
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
for half in HALF:
    output_dtype, precision = SparseType[half.upper()], CommType[half.upper()]
    data_type = DataType[half.upper()]
    OPTIONS |= {
        f"output_dtype {half}": trained_with(sharders=fused(output_dtype=output_dtype)),
        f"{half} codecs": trained_with(sharding=ShardingType.ROW_WISE, sharders=codecs(precision)),
        f"{half} tables": trained_with(data_type=data_type),
        f"owner-side, output_dtype {half}": trained_with(
            make_owner_side, sharders=fused(OWNER_SIDE, output_dtype=output_dtype)
        ),
        f"owner-side, {half} codecs": trained_with(
            make_owner_side, sharders=codecs(precision, OWNER_SIDE)
        ),
        f"owner-side, {half} tables": trained_with(make_owner_side, data_type=data_type),
    }


def train_with_options(device: torch.device) -> dict[str, Losses | str]:
    """Losses by option, or why there are none."""
    results: dict[str, Losses | str] = {}
    for name, option in OPTIONS.items():
        try:
            results[name] = option(device)
        except Exception:
            results[name] = traceback.format_exc()
    return results


Trained = tuple[str, list[dict[str, Losses | str]]]
"""A backend, and the results of each rank."""


@pytest.fixture(scope="module", name="trained")
def train_on_ranks(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return backend, run_ranks(train_with_options, tmp_path_factory.mktemp("ranks"), backend)


# Options that TorchRec and FBGEMM do not support, and the error messages.
REFUSED = {
    "gloo": {
        "index dedup": "Could not run 'fbgemm::jagged_unique_indices'",
        "output_dtype bf16": "not implemented for 'BFloat16'",
        "variable batch sizes, output_dtype bf16": "not implemented for 'BFloat16'",
        "bf16 tables": "not implemented for 'BFloat16'",
        "owner-side, output_dtype bf16": "not implemented for 'BFloat16'",
        "owner-side, bf16 tables": "not implemented for 'BFloat16'",
    },
    "nccl": {
        # TorchRec 1.6 cannot make a JaggedTensor without lengths, as PyTorch's pytrees do.
        "activation checkpointing": "Must provide lengths or offsets",
        "owner-side, activation checkpointing": "Must provide lengths or offsets",
        "bf16 tables": "cache_precision bf16 not supported",
        "owner-side, bf16 tables": "cache_precision bf16 not supported",
        # Ours, or FBGEMM's since 1.6.
        "variable batch sizes, output_dtype bf16": "must be pooled in fp32 or fp16 on a GPU|"
        "vbe_output dtype must match TBE output dtype",
    },
}


assert_same_losses = functools.partial(assert_same_run, num_steps=None)


def losses_by_rank(trained: Trained, option: str) -> Tensor:
    """``[ranks, steps]``."""
    backend, ranks = trained
    results = [rank[option] for rank in ranks]
    if option in REFUSED[backend]:
        message = REFUSED[backend][option]
        for result in results:
            assert isinstance(result, str), f"{option} works with {backend} now"
            assert any(part in result for part in message.split("|"))
        pytest.xfail(message)
    for result in results:
        if isinstance(result, str):
            pytest.fail(result)
    return torch.stack([torch.stack(losses).float() for losses in results])


AS_PLAIN = [
    "activation checkpointing",
    "torch.compile of the attention",
    "index dedup",
    "plan without constraints",
    "single lookup",
    "single ids",
    "variable batch sizes",
]


@pytest.mark.parametrize("option", AS_PLAIN)
def test_trains_as_the_plain_model(trained, option: str):
    losses = losses_by_rank(trained, option)
    expected = losses_by_rank(trained, "plain")[:, : losses.shape[1]]
    assert_same_losses(losses, expected)


AS_ONE_PROCESS: dict[str, tuple[dict[str, Any], str]] = {
    "owner-side": (SEPARATE, "SGD"),
    "owner-side, activation checkpointing": (SEPARATE, "SGD"),
    "owner-side, torch.compile of the attention": (SEPARATE, "SGD"),
    "is_weighted, max_history": (WEIGHTED, "RowWiseAdagrad"),
    "encoder layers of a window": (ENCODED, "SGD"),
    "history_codes": (over_codes(), "SGD"),
}


@pytest.mark.parametrize("option", AS_ONE_PROCESS)
def test_trains_as_one_process(trained, option: str):
    options, optimizer = AS_ONE_PROCESS[option]
    expected = unsharded(make_model(**options), trained, optimizer)
    assert_same_losses(losses_by_rank(trained, option), expected)


def test_refused_with_owner_side_attention(trained):
    _, ranks = trained
    for results in ranks:
        assert results["refused with owner-side attention"] == []


def test_evaluated_with_owner_side_attention(trained):
    device = device_of(trained[0])
    model = make_model(**SEPARATE).to(device).eval()
    losses = losses_by_rank(trained, "owner-side, evaluated")
    for rank, rank_losses in enumerate(losses):
        for step, loss in enumerate(rank_losses):
            assert_same_run(loss, model(make_batch(step, rank).to(device))[0])


@pytest.mark.parametrize("model", ["", "is_weighted, max_history, ", "history_codes, "])
def test_keys_may_differ_in_batch_size(trained, model: str):
    losses = losses_by_rank(trained, f"{model}variable batch sizes, evaluated")
    assert torch.equal(*losses.chunk(2, dim=1))


def test_variable_batch_sizes_need_inverse_indices(trained):
    _, ranks = trained
    for results in ranks:
        assert results["variable batch sizes without inverse indices"] == []


ROUNDED = [name for name in OPTIONS if "output_dtype" in name or "codecs" in name]


def dtype_of(option: str) -> torch.dtype:
    return next(dtype for half, dtype in HALF.items() if half in option)


@pytest.mark.parametrize("option", ROUNDED)
def test_lookups_in_half_precision(trained, option: str):
    """Equal to training in one process with rounded lookups and gradients of lookups."""
    losses, dtype = losses_by_rank(trained, option), dtype_of(option)
    is_local = option.startswith("owner-side")
    model = make_model(**(SEPARATE if is_local else {}))
    collection = collection_of(model)
    not_sent = ("hist", "hist_cat") if is_local and "codecs" in option else ()

    def round_sequences(_module: nn.Module, _inputs: tuple, sequences: dict) -> dict:
        return {
            name: sequence
            if name in not_sent
            else JaggedTensor(sequence.values().to(dtype).float(), lengths=sequence.lengths())
            for name, sequence in sequences.items()
        }

    def round_bags(_module: nn.Module, _inputs: tuple, bags: KeyedTensor) -> KeyedTensor:
        return KeyedTensor(bags.keys(), bags.length_per_key(), bags.values().to(dtype).float())

    collection.embedding_collections["8"].register_forward_hook(round_sequences)
    collection.embedding_bag_collection.register_forward_hook(round_bags)
    expected = unsharded(model, trained)
    assert_same_losses(losses, expected, dtype=dtype)
    assert_tables_learn(losses, expected, trained, SEPARATE if is_local else {})


@pytest.mark.parametrize("option", [name for name in OPTIONS if "tables" in name])
def test_tables_in_half_precision(trained, option: str):
    losses, dtype = losses_by_rank(trained, option), dtype_of(option)
    data_type = DataType.FP16 if dtype == torch.float16 else DataType.BF16
    model = make_model(data_type=data_type, **(SEPARATE if option.startswith("owner-side") else {}))
    # FBGEMM rounds updates of tables randomly, so that only the first loss is known.
    assert_same_losses(losses[:, :1], unsharded(model, trained)[:, :1], dtype=dtype)
    assert losses.isfinite().all()


@pytest.mark.parametrize(
    ("option", "options"), [("autocast", {}), ("owner-side, autocast", SEPARATE)]
)
def test_autocast(trained, option: str, options: dict[str, Any]):
    with torch.autocast(device_of(trained[0]).type, torch.bfloat16):
        expected = unsharded(make_model(**options), trained)
        losses = losses_by_rank(trained, option)
        assert_same_losses(losses, expected, dtype=torch.bfloat16)
        assert_tables_learn(losses, expected, trained, options)


def assert_tables_learn(
    losses: Tensor, expected: Tensor, trained: Trained, options: dict[str, Any]
) -> None:
    """The bound of half precision is wider than the updates of these few steps."""
    untrained = unsharded(make_model(**options), trained, tables_learn=False)
    assert (losses - expected).abs().sum() < (losses - untrained).abs().sum() / 2


def unsharded(model: nn.Module, trained: Trained, optimizer: str = "SGD", **options: Any) -> Tensor:
    """Losses ``[ranks, steps]`` of one process."""
    device, ranks = device_of(trained[0]), len(trained[1])
    steps = train_unsharded(model.to(device), optimizer, ranks, device, **options)
    return torch.tensor([[float(loss) for loss in losses] for losses, _ in steps]).T


@pytest.fixture
def single_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_the_planner_knows_the_mean_length_of_histories(single_rank):
    """By ``pooling_factors``, one for each feature of a table."""
    topology = Topology(world_size=2, compute_device="cuda")

    def time_and_storage(mean_length: float) -> tuple[float, int]:
        constraints = {
            "t_item": ParameterConstraints(
                sharding_types=["row_wise"],
                compute_kernels=["fused"],
                pooling_factors=[2.0, mean_length, 1.0],
            )
        }
        options = EmbeddingEnumerator(topology, batch_size=64, constraints=constraints).enumerate(
            make_model(), get_default_sharders()
        )
        (option,) = (option for option in options if option.name == "t_item")
        assert option.input_lengths == [2.0, mean_length, 1.0]
        assert option.module[0].endswith("embedding_collections.8")
        return option.total_perf, option.total_storage.hbm

    short_time, short_storage = time_and_storage(10)
    long_time, long_storage = time_and_storage(1000)
    assert long_time > 10 * short_time
    assert long_storage > 10 * short_storage
