"""The DLRM of ``end_to_end.py``: sizes, batches, sharding and optimizers."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from end_to_end_peers import Provider, make_collection
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineFusedSparseDist
from torchrec.distributed.types import ModuleSharder
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_jagged_attn import (
    HistoryEmbeddingCollectionSharder,
    TargetAttentionConfig,
    TrainPipelineCudaGraph,
    embedding_parameters,
)
from torchrec_jagged_attn.events import EventSelection

NUM_DENSE = 13
CLIP = 4
"""Maximum length of a history, as a multiple of the mean."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model and its batches."""

    mean: int  # mean length of histories before clipping
    batch: int  # samples per step and rank
    # Number of consecutive samples that are candidates of one request, with the same histories and
    # features.
    candidates: int = 1
    candidate_features: int = 0  # number of features that differ between candidates, the last ones
    histories: int = 1  # histories of items that the item attends to
    features: int = 26  # pooled features of one id per sample
    feature_rows: int = 400_000  # rows of each of their tables
    item_rows: int = 5_000_000  # rows of the table of the item and its histories
    width: int = 128  # width of all tables
    skew: float = 3.0  # ids of a table of n rows are n · u ** skew, with uniform u
    # Whether ids are ordered by popularity. Otherwise popular ids are spread, as if hashed.
    by_popularity: bool = False
    fused: bool = False  # whether the pipeline is a TrainPipelineFusedSparseDist
    dense: tuple[int, ...] = (512, 256)  # widths of the dense arch, before ``width``
    over: tuple[int, ...] = (1024, 1024, 512, 256, 1)  # widths of the over arch

    @property
    def table_rows(self) -> int:
        """Total number of rows of all tables."""
        return self.features * self.feature_rows + self.item_rows

    @property
    def requests(self) -> int:
        """Requests per step and rank."""
        return self.batch // self.candidates

    @property
    def request_keys(self) -> list[str]:
        """Features of requests, histories last."""
        features = range(self.features - self.candidate_features)
        return [f"feature_{i}" for i in features] + self.history_keys

    @property
    def candidate_keys(self) -> list[str]:
        """Features of candidates, the item last."""
        features = range(self.features - self.candidate_features, self.features)
        return [*(f"feature_{i}" for i in features), "item"]

    @property
    def history_keys(self) -> list[str]:
        """Features that are histories."""
        return [f"history_{i}" for i in range(self.histories)]


def make_lengths(sizes: Sizes, generator: torch.Generator) -> Tensor:
    """Return a log-normal length per request, clipped at ``CLIP`` times the mean."""
    normal = torch.randn(sizes.requests, generator=generator, dtype=torch.float64)
    return (sizes.mean * (normal - 0.5).exp()).round().long().clamp(1, CLIP * sizes.mean)


@contextlib.contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the process group of torchrun, or a group of one rank; yield the rank's device."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    alone = {}
    if "WORLD_SIZE" not in os.environ:  # torchrun sets it
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # as torchrun does
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout, **alone)
    try:
        yield device
    finally:
        if on_gpu:
            gc.unfreeze()
        gc.collect()  # sharded models are in reference cycles
        dist.destroy_process_group()


@functools.lru_cache(maxsize=8)
def make_batches(
    sizes: Sizes, count: int, device: torch.device, rank: int = 0, *, by_request: bool = False
) -> list[Batch]:
    """Return random batches in host memory, the same for all providers.

    Each sample has a copy of the features of its request; with ``by_request``, a sample is a
    request with several candidates.
    """
    generator = torch.Generator().manual_seed(rank)
    batches = [_draw(sizes, generator, by_request) for _ in range(count)]
    return [batch.pin_memory() if device.type == "cuda" else batch for batch in batches]


def _draw(sizes: Sizes, generator: torch.Generator, by_request: bool) -> Batch:
    """Return a batch, see :func:`make_batches`."""

    def ids(key: str, number: int) -> Tensor:
        rows = sizes.feature_rows if key.startswith("feature") else sizes.item_rows
        drawn = torch.rand(number, generator=generator, dtype=torch.float64)
        by_popularity = drawn.pow_(sizes.skew).mul_(rows).long()
        if sizes.by_popularity:
            return by_popularity
        stride = next(n for n in itertools.count(round(0.618 * rows)) if math.gcd(n, rows) == 1)
        return by_popularity * stride % rows

    values, lengths = [], []
    for key in sizes.request_keys:
        is_history = key in sizes.history_keys
        counts = make_lengths(sizes, generator) if is_history else torch.ones(sizes.requests)
        counts = counts.long()
        drawn = ids(key, int(counts.sum()))
        if not by_request and sizes.candidates > 1:
            by_request_ids = drawn.split(counts.tolist())
            drawn = torch.cat([ids.repeat(sizes.candidates) for ids in by_request_ids])
            counts = counts.repeat_interleave(sizes.candidates)
        values.append(drawn)
        lengths.append(counts)
    for key in sizes.candidate_keys:
        values.append(ids(key, sizes.batch))
        counts = sizes.candidates if by_request else 1
        lengths.append(torch.full((sizes.batch // counts,), counts))
    dense = torch.rand(sizes.requests, NUM_DENSE, generator=generator)
    return Batch(
        dense_features=dense.repeat_interleave(sizes.candidates, 0),
        sparse_features=KeyedJaggedTensor(
            keys=[*sizes.request_keys, *sizes.candidate_keys],
            values=torch.cat(values),
            lengths=torch.cat(lengths).int(),
        ),
        labels=torch.randint(2, (sizes.batch,), generator=generator).float(),
    )


def newest_events(batch: Batch, sizes: Sizes) -> Batch:
    """Return a batch with only the newest event of each history."""
    newest = nn.Sequential(*(EventSelection([key], 1) for key in sizes.history_keys))
    short = Batch(batch.dense_features, newest(batch.sparse_features), batch.labels)
    return short.pin_memory() if batch.labels.is_pinned() else short


def make_model(provider: Provider, sizes: Sizes) -> DLRMTrain:
    """Return a DLRM on the meta device."""
    histories = sizes.history_keys
    features = {str(i): ([f"feature_{i}"], sizes.feature_rows) for i in range(sizes.features)}
    features["item"] = ["item", *histories], sizes.item_rows
    tables = [
        EmbeddingBagConfig(
            name=f"table_{name}",
            embedding_dim=sizes.width,
            num_embeddings=rows,
            feature_names=names,
        )
        for name, (names, rows) in features.items()
    ]
    configs = [
        TargetAttentionConfig(
            target="item", history=history, encoder=provider.encoder, **provider.options
        )
        for history in histories
    ]
    return DLRMTrain(
        DLRM(
            embedding_bag_collection=make_collection(  # pyright: ignore[reportArgumentType]
                provider, tables, configs, CLIP * sizes.mean, sizes.candidate_keys[:-1]
            ),
            dense_in_features=NUM_DENSE,
            dense_arch_layer_sizes=[*sizes.dense, sizes.width],
            over_arch_layer_sizes=[*sizes.over],
            dense_device=None,
        )
    )


def shard(
    provider: Provider,
    model: DLRMTrain,
    batch: int,
    device: torch.device,
    *,
    sharding: str = "row_wise",
    table_lr: float = 0.01,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Return a sharded model of ``provider`` and its optimizers.

    Args:
        batch: samples per step and rank.
        sharding: sharding of the largest table and of tables in the same lookup; all others are
            table-wise.
        table_lr: learning rate of RowWiseAdagrad.
    """
    apply_optimizer_in_backward(RowWiseAdagrad, embedding_parameters(model), {"lr": table_lr})
    sharders = make_sharders(provider, device)
    tables = model.model.sparse_arch.embedding_bag_collection.embedding_bag_configs()
    largest = max(tables, key=lambda table: table.num_embeddings)
    ranks = dist.get_world_size()
    memory = None  # the default of the planner is 32 GB
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    planner = EmbeddingShardingPlanner(
        topology=Topology(ranks, device.type, hbm_cap=memory),
        batch_size=batch,
        constraints={
            table.name: ParameterConstraints(
                sharding_types=[
                    sharding
                    if ranks > 1 and (table is largest or provider.single_ids)
                    else "table_wise"
                ],
                compute_kernels=[EmbeddingComputeKernel.FUSED.value],
            )
            for table in tables
        },
        debug=False,
    )
    plan = planner.plan(model, sharders)  # deterministic, so that all ranks have the same plan
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    adam = KeyedOptimizerWrapper(
        dense, lambda params: torch.optim.Adam(params, lr=1e-3, fused=device.type == "cuda")
    )
    return sharded, CombinedOptimizer([sharded.fused_optimizer, adam])


def make_pipeline(
    provider: Provider,
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    device: torch.device,
    *,
    fused: bool = False,
) -> TrainPipelineSparseDist:
    """Return the pipeline of ``provider``, a ``TrainPipelineFusedSparseDist`` if ``fused``."""
    make = TrainPipelineFusedSparseDist if fused else TrainPipelineSparseDist
    if provider.graph:
        make = TrainPipelineCudaGraph
    return make(model, optimizer, device)


def make_sharders(provider: Provider, device: torch.device) -> list[ModuleSharder]:
    """Return sharders of pooled features and of sequences, with outputs in bf16 on a GPU."""
    fused = {"output_dtype": SparseType.BF16} if device.type == "cuda" else {}
    sequences = HistoryEmbeddingCollectionSharder(fused_params={**fused})
    if not provider.owner_side:
        sequences = EmbeddingCollectionSharder({**fused}, use_index_dedup=provider.index_dedup)
    return [EmbeddingBagCollectionSharder(fused_params={**fused}), sequences]
