"""TorchRec's training pipelines: the same losses as without, and both lookups pipelined."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    SparseDataDistUtil,
    StagedTrainPipeline,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.torchrec.two_ranks import (
    HISTORY_LENGTHS,
    NUM_STEPS,
    assert_same_run,
    batches,
    collection_of,
    dense_optimizer,
    make_sharded_model,
    run_ranks,
    train,
    train_on,
    world_size,
)
from torchrec_jagged_attn import HistoryEmbeddingCollectionSharder

CPU = torch.device("cpu")
LOOKUPS = {"ShardedEmbeddingCollection", "ShardedEmbeddingBagCollection"}
SHARDERS = [EmbeddingCollectionSharder, HistoryEmbeddingCollectionSharder]
Losses = list[Tensor]


def with_pipeline(
    pipeline_type: type, **options: Any
) -> Callable[[DistributedModelParallel, torch.device], Losses]:
    """Train on batches from the host, and check which modules are pipelined."""

    def run(model: DistributedModelParallel, device: torch.device) -> Losses:
        pipeline = pipeline_type(model, dense_optimizer(model), device, **options)
        from_host = batches(CPU)
        losses = [pipeline.progress(from_host)[0].detach() for _ in range(NUM_STEPS)]
        if pipeline_type is not TrainPipelineBase:
            assert names_of(pipeline._pipelined_modules) == LOOKUPS
        with pytest.raises(StopIteration):
            pipeline.progress(from_host)
        return losses

    return run


def names_of(lookups: Iterable[nn.Module]) -> set[str]:
    """Their classes, alike for both sharders."""
    return {type(lookup).__name__.replace("History", "") for lookup in lookups}


def with_stages(model: DistributedModelParallel, device: torch.device) -> Losses:
    def copy(batch: Batch) -> Batch:
        return batch.to(device, non_blocking=True)

    lookups = SparseDataDistUtil(model, torch.cuda.Stream())
    pipeline = StagedTrainPipeline(
        [
            PipelineStage("copy", copy, torch.cuda.Stream()),
            PipelineStage(
                "exchange",
                lookups.start_sparse_data_dist,
                lookups.data_dist_stream,
                fill_callback=lookups.wait_sdd_fill_callback,
            ),
        ]
    )
    from_host = batches(CPU)
    copied = iter(lambda: pipeline.progress(from_host), None)
    losses = [loss for loss, _ in train_on(model, copied)]
    assert names_of(lookups._pipelined_modules) == LOOKUPS
    return losses


# On any device; on GPUs alone, which have the streams.
PIPELINES = {
    "base": with_pipeline(TrainPipelineBase),
    "sparse-dist": with_pipeline(TrainPipelineSparseDist),
}
GPU_PIPELINES = {
    # From its first batch on, this one reads rows before the last step has changed them.
    "semi-sync, in sync": with_pipeline(TrainPipelineSemiSync, start_batch=NUM_STEPS + 1),
    "staged": with_stages,
}


Runs = dict[str, tuple[Losses, Losses]]
"""Losses with a pipeline, and without."""


def train_pipelined(device: torch.device, sharder: type[ModuleSharder]) -> Runs:
    def make() -> DistributedModelParallel:
        sharders = [sharder(), EmbeddingBagCollectionSharder()]
        return make_sharded_model(device, sharders=sharders, encoder={"side_by_side": False})

    plain = make()
    trained = [loss for loss, _ in train(plain, device)]
    pipelines = PIPELINES | (GPU_PIPELINES if device.type == "cuda" else {})
    if sharder is HistoryEmbeddingCollectionSharder:  # refused, see test_options.py
        pipelines.pop("semi-sync, in sync", None)
    runs = {name: (pipeline(make(), device), trained) for name, pipeline in pipelines.items()}

    # The trained model predicts the same with and without a pipeline.
    plain.eval()
    with torch.no_grad():
        expected = [plain(batch)[0] for batch in batches(device)]
        evaluation = EvalPipelineSparseDist(plain, dense_optimizer(plain), device)
        from_host = batches(CPU)
        evaluated = [evaluation.progress(from_host)[0] for _ in range(NUM_STEPS)]
    return runs | {"evaluation": (evaluated, expected)}


def train_on_newest_rows(device: torch.device) -> Runs:
    """In a pipeline that cuts histories before it looks them up."""
    plain = make_sharded_model(device, max_history=2)
    model = make_sharded_model(device, max_history=2)
    pipeline = TrainPipelineSparseDist(
        model, dense_optimizer(model), device, pipeline_postproc=True
    )
    seen = []
    lookup = collection_of(model).embedding_collections["8"]
    input_dist = lookup.input_dist
    lookup.input_dist = lambda context, features: (
        seen.append(features.to_dict()) or input_dist(context, features)
    )
    from_host = batches(CPU)
    losses = [pipeline.progress(from_host)[0].detach() for _ in range(NUM_STEPS)]
    assert names_of(pipeline._pipelined_modules) == LOOKUPS
    (cut,) = pipeline._pipelined_postprocs
    assert type(cut.postproc_module).__name__ == "HistoryTruncation"
    assert len(seen) == NUM_STEPS
    for step, features in enumerate(seen):
        lengths = HISTORY_LENGTHS[step][torch.distributed.get_rank()]
        for key in ("hist", "hist_cat", "times"):
            assert features[key].lengths().tolist() == [min(length, 2) for length in lengths]
    return {"newest rows": (losses, [loss for loss, _ in train(plain, device)])}


def train_all(device: torch.device) -> dict[str, Runs]:
    return {
        "rows sent": train_pipelined(device, EmbeddingCollectionSharder),
        "owner-side": train_pipelined(device, HistoryEmbeddingCollectionSharder),
        "cut": train_on_newest_rows(device),
    }


@pytest.fixture(scope="module")
def ranks(backend: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Runs]]:
    return run_ranks(train_all, tmp_path_factory.mktemp("ranks"), backend)


def assert_equal(runs: Runs) -> None:
    for name, (pipelined, expected) in runs.items():
        assert len(pipelined) == NUM_STEPS
        assert torch.equal(torch.stack(pipelined), torch.stack(expected)), name


@pytest.mark.parametrize("rows", ["rows sent", "owner-side"])
def test_pipelined_training_equals_plain_training(ranks: list[dict[str, Runs]], rows: str):
    for results in ranks:
        assert_equal(results[rows])


def test_histories_are_truncated_before_the_exchange(ranks: list[dict[str, Runs]]):
    for results in ranks:
        assert_equal(results["cut"])


def train_with_prefetched_cache(
    device: torch.device, sharder: type[ModuleSharder]
) -> dict[str, Losses]:
    fused_params = {"prefetch_pipeline": True}
    model = make_sharded_model(
        device,
        ShardingType.ROW_WISE,
        kernel=EmbeddingComputeKernel.FUSED_UVM_CACHING,
        sharders=[
            sharder(fused_params=fused_params),
            EmbeddingBagCollectionSharder(fused_params=fused_params),
        ],
        encoder={"side_by_side": False},
    )
    prefetch = with_pipeline(PrefetchTrainPipelineSparseDist)
    plain = make_sharded_model(device, ShardingType.ROW_WISE, encoder={"side_by_side": False})
    return {
        "prefetch": prefetch(model, device),
        "none": [loss for loss, _ in train(plain, device)],
    }


@pytest.mark.gpu
@pytest.mark.parametrize("sharder", SHARDERS)
def test_rows_prefetched_into_a_cache(sharder: type[ModuleSharder], tmp_path: Path):
    """Tables in host memory, with a cache of rows on the GPU."""
    for losses in run_ranks(train_with_prefetched_cache, tmp_path, "nccl", sharder):
        prefetched, plain = (torch.stack(losses[name]) for name in ("prefetch", "none"))
        assert_same_run(prefetched, plain, num_steps=None)


def without_key(batch: Batch, missing: str) -> Batch:
    features = batch.sparse_features.to_dict()
    del features[missing]
    return dataclasses.replace(batch, sparse_features=KeyedJaggedTensor.from_jt_dict(features))


def refuse_missing_keys(device: torch.device) -> None:
    """Keys are missing in the first or a later batch. Input dists run before the collection."""
    cases = [(sharder, key) for sharder in SHARDERS for key in ("item", "hist")]
    for sharder, key in [*cases, (HistoryEmbeddingCollectionSharder, "times")]:
        for step in (0, 2):
            sharders = [sharder(), EmbeddingBagCollectionSharder()]
            encoder = {"side_by_side": False}  # attention on owner ranks also sends times
            model = make_sharded_model(device, sharders=sharders, encoder=encoder)
            pipeline = TrainPipelineSparseDist(model, dense_optimizer(model), device)
            from_host = [
                without_key(x, key) if i == step else x for i, x in enumerate(batches(CPU))
            ]
            match = rf"^features must have the keys \['{key}'\], got \['"
            with pytest.raises(ValueError, match=match):
                [*iter(functools.partial(pipeline.progress, iter(from_host)), None)]


def test_missing_keys_are_named(tmp_path: Path):
    """On all ranks."""
    run_ranks(refuse_missing_keys, tmp_path, "gloo")


def train_semi_sync(device: torch.device) -> Losses:
    pipeline = with_pipeline(TrainPipelineSemiSync, start_batch=0)
    return pipeline(make_sharded_model(device), device)


@pytest.mark.gpu
def test_semi_sync_pipeline(tmp_path: Path):
    ranks = run_ranks(train_semi_sync, tmp_path, "nccl")
    assert len(ranks) == world_size("nccl")
    for losses in ranks:
        assert torch.stack(losses).isfinite().all()
