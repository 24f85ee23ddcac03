"""The DLRM of ``end_to_end.py``: its sizes and batches, sharded, with its optimizers."""

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
"""The longest history, as a multiple of the mean."""


@dataclass(frozen=True)
class Sizes:
    """What a model and its batches measure."""

    mean: int  # of the lengths of histories, before they are clipped
    batch: int  # samples of a step, of each rank
    # So many samples after each other are candidates of one request, whose histories and features
    # they have.
    candidates: int = 1
    candidate_features: int = 0  # the last of the features, which each candidate has of its own
    histories: int = 1  # which the item attends to; all of items
    features: int = 26  # pooled ones, of one id in each sample
    feature_rows: int = 400_000  # of each of their tables
    item_rows: int = 5_000_000  # of the table of the item and its histories
    width: int = 128  # columns of all tables
    # How uneven ids are: by popularity, one of n rows is n · u ** skew, u uniform.
    skew: float = 3.0
    # Whether the table is in this order. Else popular rows lie all over it, as where ids are
    # hashed.
    by_popularity: bool = False
    fused: bool = False  # whether the pipeline is a TrainPipelineFusedSparseDist
    dense: tuple[int, ...] = (512, 256)  # widths of the layers for dense features; width follows
    over: tuple[int, ...] = (1024, 1024, 512, 256, 1)  # widths of the layers after the interaction

    @property
    def table_rows(self) -> int:
        """Rows of all tables."""
        return self.features * self.feature_rows + self.item_rows

    @property
    def requests(self) -> int:
        """Of a step, of each rank."""
        return self.batch // self.candidates

    @property
    def keys_of_requests(self) -> list[str]:
        """Features that all candidates of a request have, histories last."""
        features = range(self.features - self.candidate_features)
        return [f"feature_{i}" for i in features] + self.history_keys

    @property
    def keys_of_candidates(self) -> list[str]:
        """Features of each candidate, the item last."""
        features = range(self.features - self.candidate_features, self.features)
        return [*(f"feature_{i}" for i in features), "item"]

    @property
    def history_keys(self) -> list[str]:
        """The histories."""
        return [f"history_{i}" for i in range(self.histories)]


def make_lengths(sizes: Sizes, generator: torch.Generator) -> Tensor:
    """Lengths of a history of each request: log-normal, clipped at ``CLIP`` times the mean."""
    normal = torch.randn(sizes.requests, generator=generator, dtype=torch.float64)
    return (sizes.mean * (normal - 0.5).exp()).round().long().clamp(1, CLIP * sizes.mean)


@contextlib.contextmanager
def process_group() -> Iterator[torch.device]:
    """Of the ranks that torchrun started, or of this process alone: a GPU each, or the CPU."""
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
        gc.collect()  # sharded models lie in reference cycles
        dist.destroy_process_group()


@functools.lru_cache(maxsize=8)
def make_batches(
    sizes: Sizes, count: int, device: torch.device, rank: int = 0, *, by_request: bool = False
) -> list[Batch]:
    """Random batches in the host's memory, the same for all providers.

    Samples have a copy each of what their request has; ``by_request`` there is one, and several
    candidates.
    """
    generator = torch.Generator().manual_seed(rank)
    batches = [_draw(sizes, generator, by_request) for _ in range(count)]
    return [batch.pin_memory() if device.type == "cuda" else batch for batch in batches]


def _draw(sizes: Sizes, generator: torch.Generator, by_request: bool) -> Batch:
    """A batch, see :func:`make_batches`."""

    def ids(key: str, number: int) -> Tensor:
        rows = sizes.feature_rows if key.startswith("feature") else sizes.item_rows
        drawn = torch.rand(number, generator=generator, dtype=torch.float64)
        by_popularity = drawn.pow_(sizes.skew).mul_(rows).long()
        if sizes.by_popularity:
            return by_popularity
        stride = next(n for n in itertools.count(round(0.618 * rows)) if math.gcd(n, rows) == 1)
        return by_popularity * stride % rows

    values, lengths = [], []
    for key in sizes.keys_of_requests:
        is_history = key in sizes.history_keys
        of_each = make_lengths(sizes, generator) if is_history else torch.ones(sizes.requests)
        of_each = of_each.long()
        drawn = ids(key, int(of_each.sum()))
        if not by_request and sizes.candidates > 1:
            of_requests = drawn.split(of_each.tolist())
            drawn = torch.cat([ids.repeat(sizes.candidates) for ids in of_requests])
            of_each = of_each.repeat_interleave(sizes.candidates)
        values.append(drawn)
        lengths.append(of_each)
    for key in sizes.keys_of_candidates:
        values.append(ids(key, sizes.batch))
        of_each = sizes.candidates if by_request else 1
        lengths.append(torch.full((sizes.batch // of_each,), of_each))
    dense = torch.rand(sizes.requests, NUM_DENSE, generator=generator)
    return Batch(
        dense_features=dense.repeat_interleave(sizes.candidates, 0),
        sparse_features=KeyedJaggedTensor(
            keys=[*sizes.keys_of_requests, *sizes.keys_of_candidates],
            values=torch.cat(values),
            lengths=torch.cat(lengths).int(),
        ),
        labels=torch.randint(2, (sizes.batch,), generator=generator).float(),
    )


def newest_events(batch: Batch, sizes: Sizes) -> Batch:
    """The batch with the newest event of each history alone."""
    newest = nn.Sequential(*(EventSelection([key], 1) for key in sizes.history_keys))
    made = Batch(batch.dense_features, newest(batch.sparse_features), batch.labels)
    return made.pin_memory() if batch.labels.is_pinned() else made


def make_model(provider: Provider, sizes: Sizes) -> DLRMTrain:
    """A DLRM on the meta device."""
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
                provider, tables, configs, CLIP * sizes.mean, sizes.keys_of_candidates[:-1]
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
    """A model of ``provider``, sharded, and its optimizers.

    Args:
        batch: samples of a step, of each rank.
        sharding: of the largest table, and of all that one lookup looks up with it; others are
            spread table by table.
        table_lr: learning rate of RowWiseAdagrad.
    """
    apply_optimizer_in_backward(RowWiseAdagrad, embedding_parameters(model), {"lr": table_lr})
    sharders = make_sharders(provider, device)
    tables = model.model.sparse_arch.embedding_bag_collection.embedding_bag_configs()
    largest = max(tables, key=lambda table: table.num_embeddings)
    ranks = dist.get_world_size()
    memory = None  # the planner's own default is 32 GB
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
    plan = planner.plan(model, sharders)  # the same on all ranks, errors too
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
    """The pipeline of ``provider``, a ``TrainPipelineFusedSparseDist`` if it is ``fused``."""
    make = TrainPipelineFusedSparseDist if fused else TrainPipelineSparseDist
    if provider.graph:
        make = TrainPipelineCudaGraph
    return make(model, optimizer, device)


def make_sharders(provider: Provider, device: torch.device) -> list[ModuleSharder]:
    """Of pooled lookups and of sequences; these are in bf16 on a GPU."""
    fused = {"output_dtype": SparseType.BF16} if device.type == "cuda" else {}
    sequences = HistoryEmbeddingCollectionSharder(fused_params={**fused})
    if not provider.rows_stay:
        sequences = EmbeddingCollectionSharder({**fused}, use_index_dedup=provider.index_dedup)
    return [EmbeddingBagCollectionSharder(fused_params={**fused}), sequences]
