"""The DLRM of ``end_to_end.py``: its sizes, batches, and ways to pool its histories."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cuda_graphs import replay_dense_layers
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
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_jagged_attn import (
    JaggedTargetAttention,
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
    embedding_parameters,
)
from torchrec_jagged_attn.testing import (
    assert_close,
    flash_attention_oracle,
    flash_attention_plain,
)

__all__ = [
    "CLIP",
    "LADDER",
    "PROVIDERS",
    "Provider",
    "Sizes",
    "check_attentions",
    "in_a_line",
    "make_batches",
    "make_collection",
    "make_lengths",
    "make_model",
    "make_pipeline",
    "share_tables",
    "table_operators",
]

NUM_DENSE = 13
CLIP = 4
"""The longest history, as a multiple of the mean."""
DIN_LAYERS = (256, 64)
MAX_PADDED = 2**31 - 1
"""Elements that FBGEMM's jagged_to_padded_dense can make. Of more, columns are padded in parts."""


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


def pad(rows: Tensor, history: JaggedTensor, max_length: int) -> tuple[Tensor, Tensor]:
    """``[B, L, C]`` of ``rows`` ``[N, C]``, and which of them are real, ``[B, L]``."""
    offsets = history.offsets()
    columns = max(8, MAX_PADDED // ((offsets.numel() - 1) * max_length) // 8 * 8)
    parts = [
        torch.ops.fbgemm.jagged_to_padded_dense(part.contiguous(), [offsets], [max_length], 0.0)
        for part in rows.split(columns, dim=1)
    ]
    places = torch.arange(max_length, device=rows.device)
    visible = places < history.lengths().unsqueeze(1)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2), visible


def padded_sdpa(q: Tensor, kv: Tensor, history: JaggedTensor, max_length: int) -> Tensor:
    """``F.scaled_dot_product_attention`` of padded histories, masked."""
    (k, visible), (v, _) = (pad(x.flatten(1), history, max_length) for x in kv.unbind(1))
    k, v = (x.unflatten(2, q.shape[1:]).transpose(1, 2) for x in (k, v))  # [B, H, L, D]
    out = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, visible[:, None, None])
    return out.squeeze(2)


def varlen(q: Tensor, kv: Tensor, history: JaggedTensor, max_length: int) -> Tensor:
    """FlashAttention-2: PyTorch's own, or else of the package ``flash_attn``."""
    each = torch.arange(q.shape[0] + 1, device=q.device, dtype=torch.int32)
    sizes = (each, history.offsets().int(), 1, max_length)
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(q, *kv.unbind(1), *sizes)
    return varlen_attn(q, *kv.unbind(1), *sizes)


def fbgemm_sll(q: Tensor, kv: Tensor, history: JaggedTensor, max_length: int) -> Tensor:
    """FBGEMM's ``sll_jagged_dense_flash_attention``, head by head, in fp32: its backward has no
    other dtype.

    In its words the history is the query and the target a dense key, ``[B, D, 1]``.
    """
    import fbgemm_gpu.sll  # noqa: F401  (registers the op)

    width = q.shape[2]
    queries = q.float() * width**-0.5
    no_bias = queries.new_zeros(q.shape[0], max_length, 1)
    k, v = kv.float().unbind(1)
    offsets = history.offsets()
    heads = [
        torch.ops.fbgemm.sll_jagged_dense_flash_attention(
            k[:, h].contiguous(),
            queries[:, h].unsqueeze(2).contiguous(),
            v[:, h].contiguous(),
            no_bias,
            offsets,
            max_length,
            kv.dtype != torch.float32,
        )
        for h in range(q.shape[1])
    ]
    return torch.stack(heads, 2).squeeze(1).to(q.dtype)


class Explicit(nn.Module):
    """Keys and values of all history rows, and then a peer's attention.

    Args:
        attention: whose weights it has.
        attend: takes ``q`` ``[B, H, D]``, ``kv`` ``[N, 2, H, D]``, the history and its longest
            length.
        max_length: no history is longer.
    """

    def __init__(
        self, attention: JaggedTargetAttention, attend: Callable[..., Tensor], max_length: int
    ) -> None:
        super().__init__()
        self.attention, self.attend, self.max_length = attention, attend, max_length

    def forward(
        self, target: Tensor, history: JaggedTensor, timestamps: None = None, prior: None = None
    ) -> Tensor:
        """As :class:`JaggedTargetAttention`."""
        width = target.shape[1]
        weights = self.attention.in_proj_weight.split([width, 2 * width])
        biases = self.attention.in_proj_bias.split([width, 2 * width])
        heads = (self.attention.num_heads, width // self.attention.num_heads)
        q = F.linear(target, weights[0], biases[0]).unflatten(1, heads)
        kv = F.linear(history.values(), weights[1], biases[1]).unflatten(1, (2, *heads))
        out = self.attend(q, kv, history, self.max_length)
        return self.attention.out_proj(out.flatten(1))


class PaddedDIN(nn.Module):
    """DIN as in TorchEasyRec: a softmax of an MLP of ``[q, x, q − x, q · x]`` on padded rows.

    Args:
        width: of targets and rows.
        max_length: no history is longer.
        device: of the parameters.

    Source:
        ``DINEncoder`` of https://github.com/alibaba/TorchEasyRec, with the MLP of its example
        ``multi_tower_din_taobao.config``.
    """

    def __init__(self, width: int, max_length: int, device: torch.device) -> None:
        super().__init__()
        self.max_length = max_length
        layers: list[nn.Module] = []
        for before, after in zip((4 * width, *DIN_LAYERS), (*DIN_LAYERS, 1), strict=True):
            layers += [nn.Linear(before, after, device=device), nn.ReLU()]
        self.weigh = nn.Sequential(*layers[:-1])

    def forward(
        self, target: Tensor, history: JaggedTensor, timestamps: None = None, prior: None = None
    ) -> Tensor:
        """As :class:`JaggedTargetAttention`."""
        x, visible = pad(history.values(), history, self.max_length)
        q = target.unsqueeze(1).expand_as(x)
        scores = self.weigh(torch.cat([q, x, q - x, q * x], 2)).squeeze(2)
        weights = scores.masked_fill(~visible, -math.inf).softmax(1)
        return (weights.to(x.dtype).unsqueeze(1) @ x).squeeze(1)


@dataclass(frozen=True)
class Provider:
    """A way to pool histories.

    Attributes:
        does: in a few words.
        attend: a peer's attention in the place of ours, behind the same linear layers.
        din: the activation unit in its place.
        keys_and_values, single_lookup: of ours.
        index_dedup: TorchRec's, of lookups that are not pooled: a row is looked up once a batch.
        replays: whether ours are launched by C++.
    """

    does: str
    attend: Callable[..., Tensor] | None = None
    din: bool = False
    keys_and_values: Literal["auto", "absorbed", "explicit"] = "auto"
    single_lookup: bool = False
    index_dedup: bool = False
    replays: bool = True

    @property
    def is_attention(self) -> bool:
        """Whether it computes the function of ours."""
        return not self.din and self != PROVIDERS["sum"]


PROVIDERS = {
    "sum": Provider("EmbeddingBagCollection, no attention"),
    "padded": Provider("linear layers, padding, scaled_dot_product_attention", padded_sdpa),
    "padded-din": Provider("padding, an MLP of [q, x, q − x, q · x], a softmax", din=True),
    "fbgemm-sll": Provider("linear layers, FBGEMM's sll_jagged_dense_flash_attention", fbgemm_sll),
    "linear-varlen": Provider("linear layers, FlashAttention-2 of jagged rows", varlen),
    "ours-explicit": Provider(
        "ours, of keys and values, launched from Python", keys_and_values="explicit", replays=False
    ),
    "ours-absorbed": Provider(
        "ours, of raw rows, launched from Python", keys_and_values="absorbed", replays=False
    ),
    "ours": Provider("TargetAttentionEmbeddingBagCollection as it comes"),
    "ours-single-lookup": Provider("the same with single_lookup=True", single_lookup=True),
    "ours-index-dedup": Provider(
        "and with TorchRec's use_index_dedup", single_lookup=True, index_dedup=True
    ),
}
LADDER = ("padded", "linear-varlen", "ours-explicit", "ours-absorbed", "ours",
          "ours-single-lookup", "ours-index-dedup")  # fmt: skip
"""Each has one optimization more than the one before."""


def make_model(provider: Provider, sizes: Sizes, recency_bias: bool = False) -> DLRMTrain:
    """A DLRM on the meta device; with ``recency_bias``, attentions of ours have it."""
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
    is_peer = provider.din or provider.attend is not None
    configs = [
        TargetAttentionConfig(
            target="item",
            history=history,
            num_heads=sizes.heads,
            recency_bias=recency_bias and not is_peer,
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


def make_collection(
    provider: Provider,
    tables: list[EmbeddingBagConfig],
    configs: list[TargetAttentionConfig],
    max_length: int,
) -> EmbeddingBagCollection | TargetAttentionEmbeddingBagCollection:
    """What looks up and pools, on the meta device, with the attentions of ``provider``.

    Args:
        max_length: no history is longer.
    """
    meta = torch.device("meta")
    if provider == PROVIDERS["sum"]:
        return EmbeddingBagCollection(tables, device=meta)
    collection = TargetAttentionEmbeddingBagCollection(
        tables, configs, device=meta, single_lookup=provider.single_lookup
    )
    attentions = collection.pooling.attentions
    for i, attention in enumerate(attentions):
        if provider.din:
            attentions[i] = PaddedDIN(attention.embed_dim, max_length, meta)
        elif provider.attend is not None:
            attentions[i] = Explicit(attention, provider.attend, max_length)
        else:
            attention.keys_and_values = provider.keys_and_values
    return collection


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

    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=ranks, compute_device=device.type),
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


def formula(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One of the package's test formulas, as :class:`Explicit` wants it."""

    def attend(q: Tensor, kv: Tensor, history: JaggedTensor, max_length: int) -> Tensor:
        each = torch.arange(q.shape[0] + 1, device=q.device)
        return attention(q, *kv.unbind(1), each, history.offsets())

    return attend


def check_attentions(
    sizes: Sizes, device: torch.device, names: Iterable[str], providers: dict[str, Provider]
) -> dict[str, str]:
    """Output and gradients of the attentions, without a bias, against the formula in fp64.

    Returns:
        Why those of ``names`` that failed, or cannot run here, did.
    """
    generator = torch.Generator().manual_seed(1)
    lengths = make_lengths(sizes, generator)[:64].to(device)
    width, dtype = sizes.width, torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = torch.randn(int(lengths.sum()), width, generator=generator).to(device, dtype)
    target = torch.randn(lengths.numel(), width, generator=generator).to(device, dtype)
    out_grad = torch.randn(lengths.numel(), width, generator=generator).to(device, dtype)

    def results(
        attend: Callable[..., Tensor] | None, dtype: torch.dtype, keys_and_values: str = "auto"
    ) -> dict[str, Tensor]:
        torch.manual_seed(1)
        attention: nn.Module = JaggedTargetAttention(
            width,
            sizes.heads,
            recency_bias=False,
            init="mha",
            keys_and_values=keys_and_values,  # pyright: ignore[reportArgumentType]
            device=device,
        ).to(rows.dtype)
        if attend is not None:
            attention = Explicit(attention, attend, CLIP * sizes.mean)
        attention = attention.to(dtype)
        x, t = (leaf.to(dtype).requires_grad_() for leaf in (rows.clone(), target.clone()))
        out = attention(t, JaggedTensor(x, lengths=lengths))
        grads = torch.autograd.grad(out, (t, x), out_grad.to(dtype))
        return {"out": out, "gradient of target": grads[0], "gradient of history": grads[1]}

    expected = results(formula(flash_attention_oracle), torch.float64)
    plain = results(formula(flash_attention_plain), dtype)
    failed = {}
    for name in names:
        provider = providers[name]
        if not provider.is_attention:
            continue
        try:
            actual = results(provider.attend, dtype, provider.keys_and_values)
            for what, tensor in actual.items():
                is_gradient = what != "out"
                assert_close(tensor, expected[what], plain[what], gradient=is_gradient, name=what)
        except Exception as error:  # whatever a peer raises that cannot run here
            failed[name] = in_a_line(error)
    return failed


def in_a_line(error: Exception) -> str:
    """What was raised, and the first line of its message."""
    return textwrap.shorten(f"{type(error).__name__}: {error}".partition("\n")[0], 120)
