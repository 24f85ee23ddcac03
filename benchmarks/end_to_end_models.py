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
from selecting import SelectingTrain, ShareOfHistory
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

from torchrec_jagged_attn import (
    BalancedBatchSampler,
    EventSelection,
    TargetAttentionConfig,
    embedding_parameters,
)

__all__ = [
    "CLIP",
    "Sizes",
    "make_batches",
    "make_lengths",
    "make_model",
    "make_pipeline",
    "make_selection",
    "make_sharders",
    "process_group",
    "share_tables",
    "table_operators",
]

NUM_DENSE = 13
CLIP = 4
"""The longest history, as a multiple of the mean."""
Drawn = tuple[Tensor, Tensor, list[Tensor], list[Tensor]]
"""Of a batch: dense features of requests, labels, and ids and lengths of all keys."""


@dataclass(frozen=True)
class Sizes:
    """What a model and its batches measure.

    Args:
        mean: of the lengths of histories, before they are clipped.
        batch: samples of a step, of each rank.
        candidates: so many samples after each other are candidates of one request, whose histories
            and features they have.
        candidate_features: the last of the features, which each candidate has of its own.
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
    candidates: int = 1
    candidate_features: int = 0
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


def make_batches(
    sizes: Sizes, count: int, device: torch.device, rank: int = 0, form: str = "samples"
) -> list[Batch]:
    """Random batches in the host's memory, the same for all providers, in one of four forms.

    ``"samples"`` have a copy each of what their request has. ``"once"`` is the same with batch
    sizes that vary by feature, and ``inverse_indices``. ``"requests"`` have several candidates.
    ``"balanced"`` are samples of requests that :class:`BalancedBatchSampler` shares out anew among
    ranks, from those that all of them have in this step.
    """
    made = _made(sizes, count, device, rank)
    if form not in made:
        ranks = range(dist.get_world_size()) if form == "balanced" else [rank]
        generators = [torch.Generator().manual_seed(r) for r in ranks]
        batches = []
        for _ in range(count):
            drawn = [_draw(sizes, generator) for generator in generators]
            share = _share(sizes, drawn, rank) if form == "balanced" else drawn[0]
            batches.append(_in_form(sizes, form, *share))
        made[form] = [batch.pin_memory() if device.type == "cuda" else batch for batch in batches]
    return made[form]


@functools.lru_cache(maxsize=1)
def _made(sizes: Sizes, count: int, device: torch.device, rank: int) -> dict[str, list[Batch]]:
    """Those of the last sizes, by form."""
    return {}


def _draw(sizes: Sizes, generator: torch.Generator) -> Drawn:
    """A batch."""

    def ids(key: str, number: int) -> Tensor:
        rows = sizes.feature_rows if key.startswith("feature") else sizes.item_rows
        drawn = torch.rand(number, generator=generator, dtype=torch.float64)
        return drawn.pow_(sizes.skew).mul_(rows).long()

    lengths = [
        make_lengths(sizes, generator)
        if key in sizes.history_keys
        else torch.ones(sizes.requests).long()
        for key in sizes.keys_of_requests
    ]
    lengths += [torch.ones(sizes.batch).long() for _ in sizes.keys_of_candidates]
    keys = [*sizes.keys_of_requests, *sizes.keys_of_candidates]
    values = [ids(key, int(x.sum())) for key, x in zip(keys, lengths, strict=True)]
    dense = torch.rand(sizes.requests, NUM_DENSE, generator=generator)
    labels = torch.randint(2, (sizes.batch,), generator=generator).float()
    return dense, labels, values, lengths


def _share(sizes: Sizes, drawn: list[Drawn], rank: int) -> Drawn:
    """The batch of ``rank`` from those of all, such that all have as many history rows."""
    dense, labels, values, lengths = zip(*drawn, strict=True)
    first, last = len(sizes.keys_of_requests) - sizes.histories, len(sizes.keys_of_requests)
    rows = torch.cat([torch.stack(of_batch[first:last]).sum(0) for of_batch in lengths])
    sampler = BalancedBatchSampler(rows, sizes.requests, len(drawn), rank)
    requests = torch.tensor(next(iter(sampler)))
    samples = (requests.unsqueeze(1) * sizes.candidates + torch.arange(sizes.candidates)).flatten()
    own_values, own_lengths = [], []
    for key, (of_values, of_lengths) in enumerate(
        zip(zip(*values, strict=True), zip(*lengths, strict=True), strict=True)
    ):
        own = requests if key < last else samples
        all_lengths = torch.cat(of_lengths)
        parts = torch.cat(of_values).split(all_lengths.tolist())
        own_values.append(torch.cat([parts[i] for i in own.tolist()]))
        own_lengths.append(all_lengths[own])
    return torch.cat(dense)[requests], torch.cat(labels)[samples], own_values, own_lengths


def _in_form(
    sizes: Sizes,
    form: str,
    dense: Tensor,
    labels: Tensor,
    values: list[Tensor],
    lengths: list[Tensor],
) -> Batch:
    """A batch of what was drawn, see :func:`make_batches`."""
    num_keys, candidates = len(sizes.keys_of_requests), sizes.candidates
    options = {}
    if form in ("samples", "balanced"):
        of_requests = [
            _repeat(x, n, candidates)
            for x, n in zip(values[:num_keys], lengths[:num_keys], strict=True)
        ]
        values = [*of_requests, *values[num_keys:]]
        of_requests = [n.repeat_interleave(candidates) for n in lengths[:num_keys]]
        lengths = [*of_requests, *lengths[num_keys:]]
    keys = [*sizes.keys_of_requests, *sizes.keys_of_candidates]
    if form == "requests":
        of_each = torch.full((sizes.requests,), candidates)
        lengths = [*lengths[:num_keys], *(of_each for _ in sizes.keys_of_candidates)]
    if form == "once":
        samples = torch.arange(sizes.batch)
        inverse = [samples // candidates if i < num_keys else samples for i in range(len(keys))]
        options = {
            "stride_per_key_per_rank": [[n.numel()] for n in lengths],
            "inverse_indices": (keys, torch.stack(inverse)),
        }
    return Batch(
        dense_features=dense.repeat_interleave(candidates, 0),
        sparse_features=KeyedJaggedTensor(
            keys=keys, values=torch.cat(values), lengths=torch.cat(lengths).int(), **options
        ),
        labels=labels,
    )


def _repeat(values: Tensor, lengths: Tensor, times: int) -> Tensor:
    """The values of each request, so many times."""
    if times == 1:
        return values
    return torch.cat([x.repeat(times) for x in values.split(lengths.tolist())])


def make_model(provider: Provider, sizes: Sizes) -> DLRMTrain:
    """A DLRM on the meta device. No attention has a bias by recency: peers cannot."""
    histories = sizes.history_keys
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
    model = DLRMTrain(
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
    return model if provider.budget == 1 else SelectingTrain(model, make_selection(provider, sizes))


def make_selection(provider: Provider, sizes: Sizes) -> nn.Module:
    """What leaves a part of the features of a batch, before they are looked up."""
    if provider.budget == 1:
        return nn.Identity()
    return nn.Sequential(
        *(EventSelection([key], ShareOfHistory(key, provider.budget)) for key in sizes.history_keys)
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

    Each of several GPUs has some columns of the largest table; others are spread table by table.

    Args:
        batch: samples of a step, of each rank.
        cuda_graph: whether dense layers are replayed, and Adam is one kernel.
        table_lr: learning rate of RowWiseAdagrad.
    """
    if cuda_graph:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            replay_dense_layers(model.model, batch, device, torch.bfloat16)
    apply_optimizer_in_backward(RowWiseAdagrad, embedding_parameters(model), {"lr": table_lr})
    sharders = make_sharders(provider, device)
    tables = model.model.sparse_arch.embedding_bag_collection.embedding_bag_configs()
    largest = max(tables, key=lambda table: table.num_embeddings)
    ranks = dist.get_world_size()

    def sharding(table: EmbeddingBagConfig) -> ShardingType:
        by_column = table is largest and ranks > 1
        return ShardingType.COLUMN_WISE if by_column else ShardingType.TABLE_WISE

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
                min_partition=table.embedding_dim // ranks,
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
    # Modules before the lookups are pipelined if it is told so.
    return TrainPipelineSparseDist(
        sharded, optimizer, device, pipeline_postproc=provider.budget < 1
    )


def make_sharders(provider: Provider, device: torch.device) -> list[ModuleSharder]:
    """Of pooled lookups and of sequences: in bf16 on a GPU, but for bags of varying batch sizes.

    FBGEMM copies the rows of such bags to their samples in fp32 and fp16 alone.
    """
    fused = {"output_dtype": SparseType.BF16} if device.type == "cuda" else {}
    return [
        EmbeddingBagCollectionSharder(fused_params={} if provider.batches == "once" else {**fused}),
        EmbeddingCollectionSharder(
            fused_params={**fused},  # pyright: ignore[reportArgumentType]
            use_index_dedup=provider.index_dedup,
        ),
    ]


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
