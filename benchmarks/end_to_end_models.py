"""The DLRM of ``end_to_end.py``: its sizes and batches, sharded, with its optimizers."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from cuda_graphs import replay_dense_layers
from end_to_end_peers import Provider, make_collection
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embedding import (
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_jagged_attn import TargetAttentionConfig, embedding_parameters

__all__ = [
    "CLIP",
    "Sizes",
    "make_batches",
    "make_lengths",
    "make_model",
    "make_pipeline",
    "process_group",
    "share_tables",
    "table_operators",
]

NUM_DENSE = 13
CLIP = 4
"""The longest history, as a multiple of the mean."""


@dataclass(frozen=True)
class Sizes:
    """What a model and its batches measure.

    Args:
        mean: of the lengths of histories, before they are clipped.
        batch: samples of a step, of each rank.
        histories: which the item attends to; all of items.
        features: pooled ones, of one id in each sample.
        feature_rows: of each of their tables.
        item_rows: of the table of the item and its histories.
        width: columns of all tables.
        heads: of the attention.
        skew: how uneven ids are: one of ``n`` rows is ``n · u ** skew``, ``u`` uniform.
        dense: widths of the layers for dense features; ``width`` follows.
        over: widths of the layers after the interaction.
    """

    mean: int
    batch: int
    histories: int = 1
    features: int = 26
    feature_rows: int = 400_000
    item_rows: int = 5_000_000
    width: int = 128
    heads: int = 4
    skew: float = 3.0
    dense: tuple[int, ...] = (512, 256)
    over: tuple[int, ...] = (1024, 1024, 512, 256, 1)

    @property
    def table_rows(self) -> int:
        """Rows of all tables."""
        return self.features * self.feature_rows + self.item_rows


def make_lengths(sizes: Sizes, generator: torch.Generator) -> Tensor:
    """``[B]`` lengths of a history: log-normal, clipped at ``CLIP`` times the mean."""
    normal = torch.randn(sizes.batch, generator=generator, dtype=torch.float64)
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
        gc.collect()  # sharded models lie in reference cycles
        dist.destroy_process_group()


@functools.lru_cache(maxsize=1)
def make_batches(sizes: Sizes, count: int, device: torch.device, rank: int = 0) -> list[Batch]:
    """Random batches in the host's memory, the same for all providers."""
    generator = torch.Generator().manual_seed(rank)

    def ids(rows: int, number: int) -> Tensor:
        drawn = torch.rand(number, generator=generator, dtype=torch.float64)
        return drawn.pow_(sizes.skew).mul_(rows).long()

    def one() -> Batch:
        ones = torch.ones((sizes.features + 1) * sizes.batch, dtype=torch.int64)
        histories = [make_lengths(sizes, generator) for _ in range(sizes.histories)]
        num_items = sizes.batch + sum(int(lengths.sum()) for lengths in histories)
        batch = Batch(
            dense_features=torch.rand(sizes.batch, NUM_DENSE, generator=generator),
            sparse_features=KeyedJaggedTensor(
                keys=[
                    *(f"feature_{i}" for i in range(sizes.features)),
                    "item",
                    *(f"history_{i}" for i in range(sizes.histories)),
                ],
                values=torch.cat(
                    [
                        ids(sizes.feature_rows, sizes.features * sizes.batch),
                        ids(sizes.item_rows, num_items),
                    ]
                ),
                lengths=torch.cat([ones, *histories]).int(),
            ),
            labels=torch.randint(2, (sizes.batch,), generator=generator).float(),
        )
        return batch.pin_memory() if device.type == "cuda" else batch

    return [one() for _ in range(count)]


def make_model(provider: Provider, sizes: Sizes) -> DLRMTrain:
    """A DLRM on the meta device. No attention has a bias by recency: peers cannot."""
    histories = [f"history_{i}" for i in range(sizes.histories)]
    tables = [
        EmbeddingBagConfig(
            name=f"table_{i}",
            embedding_dim=sizes.width,
            num_embeddings=sizes.feature_rows,
            feature_names=[f"feature_{i}"],
        )
        for i in range(sizes.features)
    ]
    tables.append(
        EmbeddingBagConfig(
            name="table_item",
            embedding_dim=sizes.width,
            num_embeddings=sizes.item_rows,
            feature_names=["item", *histories],
        )
    )
    configs = [
        TargetAttentionConfig(
            target="item",
            history=history,
            num_heads=sizes.heads,
            recency_bias=False,
            init="mha",
        )
        for history in histories
    ]
    return DLRMTrain(
        DLRM(
            embedding_bag_collection=make_collection(provider, tables, configs, CLIP * sizes.mean),  # pyright: ignore[reportArgumentType]
            dense_in_features=NUM_DENSE,
            dense_arch_layer_sizes=[*sizes.dense, sizes.width],
            over_arch_layer_sizes=[*sizes.over],
            dense_device=None,
        )
    )


def make_pipeline(
    provider: Provider,
    model: DLRMTrain,
    batch: int,
    device: torch.device,
    *,
    cuda_graph: bool = False,
    table_lr: float = 0.01,
) -> TrainPipelineSparseDist:
    """A model of ``provider``, sharded, with its optimizers.

    Among several GPUs, the largest table is spread row by row, and others table by table.

    Args:
        batch: samples of a step, of each rank.
        cuda_graph: whether dense layers are replayed, and Adam is one kernel.
        table_lr: learning rate of RowWiseAdagrad.
    """
    if cuda_graph:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            replay_dense_layers(model.model, batch, device, torch.bfloat16)
    apply_optimizer_in_backward(RowWiseAdagrad, embedding_parameters(model), {"lr": table_lr})
    fused = {"output_dtype": SparseType.BF16} if device.type == "cuda" else {}
    sharders: list[ModuleSharder] = [
        EmbeddingBagCollectionSharder(fused_params={**fused}),
        EmbeddingCollectionSharder(
            fused_params={**fused},  # pyright: ignore[reportArgumentType]
            use_index_dedup=provider.index_dedup,
        ),
    ]
    tables = model.model.sparse_arch.embedding_bag_collection.embedding_bag_configs()
    largest = max(tables, key=lambda table: table.num_embeddings)
    ranks = dist.get_world_size()

    def sharding(table: EmbeddingBagConfig) -> ShardingType:
        # TorchRec offers no bags by row on a CPU.
        by_row = table is largest and ranks > 1 and device.type == "cuda"
        return ShardingType.ROW_WISE if by_row else ShardingType.TABLE_WISE

    memory = None  # the planner's own default is 32 GB
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    planner = EmbeddingShardingPlanner(
        topology=Topology(ranks, device.type, hbm_cap=memory),
        batch_size=batch,
        constraints={
            table.name: ParameterConstraints(
                sharding_types=[sharding(table).value],
                compute_kernels=[EmbeddingComputeKernel.FUSED.value],
            )
            for table in tables
        },
        debug=False,
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    adam = KeyedOptimizerWrapper(
        dense, lambda params: torch.optim.Adam(params, lr=1e-3, fused=cuda_graph)
    )
    optimizer = CombinedOptimizer([sharded.fused_optimizer, adam])
    return TrainPipelineSparseDist(sharded, optimizer, device)


def table_operators(model: nn.Module) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """FBGEMM's lookups in a sharded model."""
    sharded = (ShardedEmbeddingCollection, ShardedEmbeddingBagCollection)
    collections = [module for module in model.modules() if isinstance(module, sharded)]
    return [
        module
        for collection in collections
        for lookup in collection._lookups
        for module in lookup.modules()
        if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen)
    ]


def share_tables(model: nn.Module, known: dict[tuple, Tensor]) -> int:
    """Lets a model look up the tables of an earlier one, of the same sizes, and drops its own.

    What the model trains is then no longer its own: for timing alone.

    Args:
        model: sharded, and not trained yet. Nothing may read its state dict any more.
        known: the tables that there are, to which those of this model are added.

    Returns:
        Bytes of the tables that it shares.
    """
    shared = 0
    for number, lookup in enumerate(table_operators(model)):
        for name in ("weights_dev", "weights_host"):
            own = getattr(lookup, name)
            key = (number, name, own.shape, own.dtype)
            other = known.setdefault(key, own.data)
            if other.data_ptr() != own.data_ptr():
                storage = own.untyped_storage()
                shared += storage.nbytes()
                own.data = other
                storage.resize_(0)
    return shared
