"""The ways of ``end_to_end.py`` to pool a history: ours, peers, and a sum; and their check."""

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
"""Elements of a padded tensor: FBGEMM and PyTorch count its places in int32."""


def pad(rows: Tensor, history: JaggedTensor, max_length: int) -> tuple[Tensor, Tensor]:
    """``[B, L, C]`` of ``rows`` ``[N, C]``, and which of them are real, ``[B, L]``."""
    offsets = history.offsets()
    padded = torch.ops.fbgemm.jagged_to_padded_dense(rows, [offsets], [max_length], 0.0)
    places = torch.arange(max_length, device=rows.device)
    return padded, places < history.lengths().unsqueeze(1)


def padded_sdpa(q: Tensor, kv: Tensor, history: JaggedTensor, max_length: int) -> Tensor:
    """``F.scaled_dot_product_attention`` of padded histories, masked.

    Samples with more than ``MAX_PADDED`` elements are taken in parts, after a wait for the lengths.
    """
    samples = max(1, MAX_PADDED // (max_length * q[0].numel()))
    if len(q) > samples:
        lengths = history.lengths().split(samples)
        rows = kv.split([int(of_part.sum()) for of_part in lengths])
        return torch.cat(
            [
                padded_sdpa(q_part, kv_part, JaggedTensor(kv_part, lengths=of_part), max_length)
                for q_part, kv_part, of_part in zip(q.split(samples), rows, lengths, strict=True)
            ]
        )
    (k, visible), (v, _) = (pad(x.flatten(1), history, max_length) for x in kv.unbind(1))
    k, v = (x.unflatten(2, q.shape[1:]).transpose(1, 2) for x in (k, v))  # [B, H, L, D]
    out = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, visible[:, None, None])
    return out.squeeze(2)


def varlen(q: Tensor, kv: Tensor, history: JaggedTensor, max_length: int) -> Tensor:
    """FlashAttention-2, as PyTorch has it."""
    from torch.nn.attention.varlen import varlen_attn  # not in builds for a CPU

    each = torch.arange(q.shape[0] + 1, device=q.device, dtype=torch.int32)
    return varlen_attn(q, *kv.unbind(1), each, history.offsets().int(), 1, max_length)


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

    def forward(self, target: Tensor, history: JaggedTensor, *_: None, **__: None) -> Tensor:
        """As :class:`JaggedTargetAttention`, without anything else."""
        of, width, x = self.attention, target.shape[1], history.values()
        heads = (of.num_heads, width // of.num_heads)
        if of.in_proj_weight is None:
            q = F.linear(target, of.q_proj_weight, of.in_proj_bias)
            kv = torch.cat([F.linear(x, of.k_proj_weight), x], 1)
        else:
            weights, biases = (
                y.split([width, 2 * width]) for y in (of.in_proj_weight, of.in_proj_bias)
            )
            q = F.linear(target, weights[0], biases[0])
            kv = F.linear(x, weights[1], biases[1])
        out = self.attend(
            q.unflatten(1, heads), kv.unflatten(1, (2, *heads)), history, self.max_length
        ).flatten(1)
        return out if of.out_proj is None else of.out_proj(out)


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

    def forward(self, target: Tensor, history: JaggedTensor, *_: None, **__: None) -> Tensor:
        """As :class:`JaggedTargetAttention`, without anything else."""
        x, visible = pad(history.values(), history, self.max_length)
        q = target.unsqueeze(1).expand_as(x)
        scores = self.weigh(torch.cat([q, x, q - x, q * x], 2)).squeeze(2)
        weights = scores.masked_fill(~visible, -math.inf).softmax(1)
        return (weights.to(x.dtype).unsqueeze(1) @ x).squeeze(1)


def set_longest(model: nn.Module, length: int) -> None:
    """Tells the peers in ``model`` how long the longest history is."""
    for module in model.modules():
        if isinstance(module, (Explicit, PaddedDIN)):
            module.max_length = length


AS_PEERS = {"value_projection": True, "recency_bias": False, "init": "mha"}


@dataclass(frozen=True)
class Provider:
    """A way to pool histories."""

    does: str  # in a few words
    attends: bool = True  # else histories are pooled by an EmbeddingBagCollection
    graph: bool = False  # whether the pipeline is a TrainPipelineCudaGraph
    # Of the attention, besides target and history.
    options: dict[str, Any] = field(default_factory=dict)
    encoder: EncoderConfig | None = None
    # A peer's attention in the place of ours, behind the same linear layers.
    attend: Callable[..., Tensor] | None = None
    din: bool = False  # the activation unit in its place
    # Whether HistoryEmbeddingCollectionSharder shards the histories' table.
    rows_stay: bool = True
    single_ids: bool = False  # whether ours is told that each feature has exactly one id
    # TorchRec's, of lookups that are not pooled: a row is looked up once a batch.
    index_dedup: bool = False
    by_request: bool = False  # whether requests have several candidates, see make_batches


peer = functools.partial(Provider, options=AS_PEERS, rows_stay=False)
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
    "ours-rows-travel": Provider("by default, sharded as by TorchRec", rows_stay=False),
    "ours-single-ids": Provider("with single_id_features: one lookup of all", single_ids=True),
    "ours-index-dedup": Provider("and with TorchRec's use_index_dedup", rows_stay=False,
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
    """What looks up and pools, on the meta device, with the attentions of ``provider``.

    Args:
        max_length: no history is longer.
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
            attentions[i] = Explicit(attention, provider.attend, max_length)
    return collection


def formula(q: Tensor, kv: Tensor, history: JaggedTensor, bias: Tensor | None) -> Tensor:
    """The package's test formula, with the recency bias ``[P, H]``, if any."""
    each = torch.arange(q.shape[0] + 1, device=q.device)
    offsets = history.offsets()
    return flash_attention_oracle(q, *kv.unbind(1), each, offsets, position_bias=bias)


def check_attentions(
    names: Iterable[str], lengths: Tensor, width: int, max_length: int
) -> dict[str, str]:
    """Output and gradients of the attentions of providers, against the formula in fp64.

    Args:
        names: of ``PROVIDERS``.
        lengths: of the histories that it draws, on the device where it computes.
        width: of targets and rows.
        max_length: no history may be longer.

    Returns:
        Why those of ``names`` that are wrong, or cannot run here, do not pass.
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
            of = attention.recency_bias
            bias = None if of is None else of.position_weight
            attention = Explicit(attention, lambda *args: formula(*args[:3], bias), max_length)
        elif provider.attend is not None:
            attention = Explicit(attention, provider.attend, max_length)
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
        except Exception as error:  # whatever a peer raises that cannot run here
            failed[name] = in_a_line(error)
    return failed


def in_a_line(error: Exception) -> str:
    """What was raised, and the first line of its message."""
    return textwrap.shorten(f"{type(error).__name__}: {error}".partition("\n")[0], 120)
