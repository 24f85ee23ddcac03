"""Providers of ``end_to_end.py`` (ours, peers, sum pooling), and a check of their results."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.oracles import flash_attention_oracle
from tests.rounding import RoundingErrors
from tests.tolerance import assert_close
from torchrec_jagged_attn import (
    EncoderConfig,
    JaggedTargetAttention,
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
)

DIN_LAYERS = (256, 64)
MAX_PADDED = 2**30
"""Maximum number of elements of a padded tensor: FBGEMM and PyTorch index it in int32."""


def pad(rows: Tensor, history: JaggedTensor, max_length: int) -> tuple[Tensor, Tensor]:
    """Pad ``rows`` ``[N, C]`` to ``[B, L, C]``; also return a mask of rows ``[B, L]``."""
    offsets = history.offsets()
    padded = torch.ops.fbgemm.jagged_to_padded_dense(rows, [offsets], [max_length], 0.0)
    positions = torch.arange(max_length, device=rows.device)
    return padded, positions < history.lengths().unsqueeze(1)


def padded_sdpa(q: Tensor, kv: Tensor, history: JaggedTensor, max_length: int) -> Tensor:
    """``F.scaled_dot_product_attention`` of padded histories with a mask.

    Batches with more than ``MAX_PADDED`` elements are split, for which the host waits for the GPU.
    """
    samples = max(1, MAX_PADDED // (max_length * q[0].numel()))
    if len(q) > samples:
        lengths = history.lengths().split(samples)
        rows = kv.split([int(part_lengths.sum()) for part_lengths in lengths])
        return torch.cat(
            [
                padded_sdpa(
                    q_part, kv_part, JaggedTensor(kv_part, lengths=part_lengths), max_length
                )
                for q_part, kv_part, part_lengths in zip(
                    q.split(samples), rows, lengths, strict=True
                )
            ]
        )
    (k, visible), (v, _) = (pad(x.flatten(1), history, max_length) for x in kv.unbind(1))
    k, v = (x.unflatten(2, q.shape[1:]).transpose(1, 2) for x in (k, v))  # [B, H, L, D]
    out = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, visible[:, None, None])
    return out.squeeze(2)


def varlen(q: Tensor, kv: Tensor, history: JaggedTensor, max_length: int) -> Tensor:
    """FlashAttention-2 in PyTorch."""
    from torch.nn.attention.varlen import varlen_attn  # not in builds for a CPU

    each = torch.arange(q.shape[0] + 1, device=q.device, dtype=torch.int32)
    return varlen_attn(q, *kv.unbind(1), each, history.offsets().int(), 1, max_length)


def fbgemm_sll(q: Tensor, kv: Tensor, history: JaggedTensor, max_length: int) -> Tensor:
    """FBGEMM's ``sll_jagged_dense_flash_attention``, head by head, in fp32, since its backward
    supports no other dtype.

    The op calls the history the query, and the target a dense key ``[B, D, 1]``.
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


class MaterializedAttention(nn.Module):
    """A peer's attention on materialized keys and values.

    Args:
        attention: module with the projections.
        attend: takes ``q`` ``[B, H, D]``, ``kv`` ``[N, 2, H, D]``, the history and ``max_length``.
        max_length: maximum length of a history.
    """

    def __init__(
        self, attention: JaggedTargetAttention, attend: Callable[..., Tensor], max_length: int
    ) -> None:
        super().__init__()
        self.attention, self.attend, self.max_length = attention, attend, max_length

    def forward(self, target: Tensor, history: JaggedTensor, *_: None, **__: None) -> Tensor:
        """Return what :class:`JaggedTargetAttention` returns, without its further arguments."""
        module, width, x = self.attention, target.shape[1], history.values()
        heads = (module.num_heads, width // module.num_heads)
        if module.in_proj_weight is None:
            q = F.linear(target, module.q_proj_weight, module.in_proj_bias)
            kv = torch.cat([F.linear(x, module.k_proj_weight), x], 1)
        else:
            weights, biases = (
                y.split([width, 2 * width]) for y in (module.in_proj_weight, module.in_proj_bias)
            )
            q = F.linear(target, weights[0], biases[0])
            kv = F.linear(x, weights[1], biases[1])
        out = self.attend(
            q.unflatten(1, heads), kv.unflatten(1, (2, *heads)), history, self.max_length
        ).flatten(1)
        return out if module.out_proj is None else module.out_proj(out)


class PaddedDIN(nn.Module):
    """DIN as in TorchEasyRec: a softmax of an MLP of ``[q, x, q − x, q · x]`` on padded rows.

    Args:
        width: width of targets and rows.
        max_length: maximum length of a history.
        device: device of the parameters.

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

    def forward(self, target: Tensor, history: JaggedTensor, *_: None, **__: None) -> Tensor:
        """Return what :class:`JaggedTargetAttention` returns, without its further arguments."""
        x, visible = pad(history.values(), history, self.max_length)
        q = target.unsqueeze(1).expand_as(x)
        scores = self.weigh(torch.cat([q, x, q - x, q * x], 2)).squeeze(2)
        weights = scores.masked_fill(~visible, -math.inf).softmax(1)
        return (weights.to(x.dtype).unsqueeze(1) @ x).squeeze(1)


def set_max_length(model: nn.Module, length: int) -> None:
    """Set the maximum length of a history in all peers of ``model``."""
    for module in model.modules():
        if isinstance(module, (MaterializedAttention, PaddedDIN)):
            module.max_length = length


AS_PEERS = {"value_projection": True, "recency_bias": False, "init": "mha"}


@dataclass(frozen=True)
class Provider:
    """A pooling of histories, and its options."""

    description: str
    attends: bool = True  # otherwise, an EmbeddingBagCollection pools histories
    graph: bool = False  # whether the pipeline is a TrainPipelineCudaGraph
    options: dict[str, Any] = field(default_factory=dict)  # options of TargetAttentionConfig
    encoder: EncoderConfig | None = None
    # A peer's attention in place of ours, with the same linear layers.
    attend: Callable[..., Tensor] | None = None
    din: bool = False  # whether DIN's activation unit replaces the attention
    # Whether HistoryEmbeddingCollectionSharder shards the table of histories.
    owner_side: bool = True
    single_ids: bool = False  # whether to set single_id_features
    index_dedup: bool = False  # use_index_dedup of TorchRec's sharder
    by_request: bool = False  # whether samples are requests of several candidates, see make_batches


peer = functools.partial(Provider, options=AS_PEERS, owner_side=False)
PROVIDERS = {
    "sum": Provider("EmbeddingBagCollection, no attention", attends=False),
    "sum-graph": Provider("the same in a TrainPipelineCudaGraph", attends=False, graph=True),
    "padded": peer("linear layers, padding, scaled_dot_product_attention", attend=padded_sdpa),
    "padded-din": peer("padding, an MLP of [q, x, q − x, q · x], a softmax", din=True),
    "fbgemm-sll": peer("linear layers, FBGEMM's sll_jagged_dense_flash_attention",
                       attend=fbgemm_sll),
    "linear-varlen": peer("linear layers, FlashAttention-2 of jagged rows", attend=varlen),
    "ours": Provider("TargetAttentionEmbeddingBagCollection, by default"),
    "ours-graph": Provider("the same in a TrainPipelineCudaGraph", graph=True),
    "encoder-graph": Provider("the same after an encoder layer", graph=True,
                              encoder=EncoderConfig()),
    "ours-value-projection": Provider("with value_projection=True",
                                      options={"value_projection": True}),
    "ours-as-peers": Provider("the function of peers: values projected, no bias",
                              options=AS_PEERS),
    "ours-rows-sent": Provider("by default, with TorchRec's sharder", owner_side=False),
    "ours-single-ids": Provider("with single_id_features: one lookup of all", single_ids=True),
    "ours-index-dedup": Provider("and with TorchRec's use_index_dedup", owner_side=False,
                                 single_ids=True, index_dedup=True),
    "ours-by-request": Provider("with candidates='jagged' and single_id_features",
                                single_ids=True, by_request=True),
}  # fmt: skip


def make_collection(
    provider: Provider,
    tables: list[EmbeddingBagConfig],
    configs: list[TargetAttentionConfig],
    max_length: int,
    candidate_features: Sequence[str] = (),
) -> EmbeddingBagCollection | TargetAttentionEmbeddingBagCollection:
    """Return a collection on the meta device, with the attentions of ``provider``.

    Args:
        max_length: maximum length of a history.
        candidate_features: pooled features of candidates, not of requests.
    """
    meta = torch.device("meta")
    if not provider.attends:
        return EmbeddingBagCollection(tables, device=meta)
    collection = TargetAttentionEmbeddingBagCollection(
        tables,
        configs,
        device=meta,
        single_id_features=[table.feature_names[0] for table in tables[:-1]]
        if provider.single_ids
        else (),
        candidates="jagged" if provider.by_request else "one",
        candidate_features=candidate_features if provider.by_request else (),
    )
    attentions = collection.pooling.attentions
    for i, attention in enumerate(attentions):
        if provider.din:
            attentions[i] = PaddedDIN(attention.embed_dim, max_length, meta)
        elif provider.attend is not None:
            attentions[i] = MaterializedAttention(attention, provider.attend, max_length)
    return collection


def formula(q: Tensor, kv: Tensor, history: JaggedTensor, bias: Tensor | None) -> Tensor:
    """Return the attention of the test oracle, with an optional recency bias ``[P, H]``."""
    each = torch.arange(q.shape[0] + 1, device=q.device)
    offsets = history.offsets()
    return flash_attention_oracle(q, *kv.unbind(1), each, offsets, position_bias=bias)


def check_attentions(
    names: Iterable[str], lengths: Tensor, width: int, max_length: int
) -> dict[str, str]:
    """Compare output and gradients of the attentions of providers with an fp64 oracle.

    Args:
        names: names of ``PROVIDERS``.
        lengths: lengths of the random histories, on the device to use.
        width: width of targets and rows.
        max_length: maximum length of a history.

    Returns:
        The reason by provider that is wrong or cannot run on this machine.
    """
    device = lengths.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(1)
    num_samples, num_rows = lengths.numel(), int(lengths.sum())
    rows, target, out_grad = (
        torch.randn(count, width, generator=generator).to(device, dtype)
        for count in (num_rows, num_samples, num_samples)
    )

    def results(provider: Provider, dtype: torch.dtype) -> dict[str, Tensor]:
        torch.manual_seed(1)
        options = {"value_projection": False, **provider.options, "init": "mha"}
        attention: nn.Module = JaggedTargetAttention(width, device=device, **options)
        attention = attention.to(rows.dtype).to(dtype)
        if dtype == torch.float64:
            recency = attention.recency_bias
            bias = None if recency is None else recency.position_weight
            attention = MaterializedAttention(
                attention, lambda *args: formula(*args[:3], bias), max_length
            )
        elif provider.attend is not None:
            attention = MaterializedAttention(attention, provider.attend, max_length)
        x, t = (leaf.to(dtype).requires_grad_() for leaf in (rows.clone(), target.clone()))
        out = attention(t, JaggedTensor(x, lengths=lengths))
        grads = torch.autograd.grad(out, (t, x), out_grad.to(dtype))
        return {"out": out, "gradient of target": grads[0], "gradient of history": grads[1]}

    failed = {}
    for name in names:
        provider = PROVIDERS[name]
        if provider.din or not provider.attends:
            continue
        with RoundingErrors(dtype) as errors:
            expected = results(provider, torch.float64)
        try:
            actual = results(provider, dtype)
            for what, tensor in actual.items():
                assert_close(tensor, expected[what], errors, name=what)
        except Exception as error:  # peers raise different errors
            failed[name] = summarize_error(error)
    return failed


def summarize_error(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    return textwrap.shorten(f"{type(error).__name__}: {error}".partition("\n")[0], 120)
