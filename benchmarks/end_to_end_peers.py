"""The ways of ``end_to_end.py`` to pool a history: ours, peers, and a sum; and their check."""

from __future__ import annotations

import contextlib
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_jagged_attn import (
    JaggedTargetAttention,
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
)
from torchrec_jagged_attn.replay import calls
from torchrec_jagged_attn.testing import (
    RoundingErrors,
    assert_close,
    flash_attention_oracle,
)

__all__ = [
    "LADDER",
    "PROVIDERS",
    "Provider",
    "check_attentions",
    "in_a_line",
    "make_collection",
    "replays_of",
]

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

    def forward(self, target: Tensor, history: JaggedTensor, *_: None, **__: None) -> Tensor:
        """As :class:`JaggedTargetAttention`, without anything else."""
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
        budget: part of each history that is looked up, its newest events.
        batches: see :func:`make_batches`.
        replays: whether it has ops of ours that C++ launches.
    """

    does: str
    attend: Callable[..., Tensor] | None = None
    din: bool = False
    keys_and_values: Literal["auto", "absorbed", "explicit"] = "auto"
    single_lookup: bool = False
    index_dedup: bool = False
    budget: float = 1.0
    batches: Literal["samples", "requests", "once", "balanced"] = "samples"
    replays: bool = False

    @property
    def is_attention(self) -> bool:
        """Whether it computes the function of ours."""
        return not self.din and self.budget == 1 and self != PROVIDERS["sum"]


PROVIDERS = {
    "sum": Provider("EmbeddingBagCollection, no attention"),
    "padded": Provider("linear layers, padding, scaled_dot_product_attention", padded_sdpa),
    "padded-din": Provider("padding, an MLP of [q, x, q − x, q · x], a softmax", din=True),
    "fbgemm-sll": Provider("linear layers, FBGEMM's sll_jagged_dense_flash_attention", fbgemm_sll),
    "linear-varlen": Provider("linear layers, FlashAttention-2 of jagged rows", varlen),
    "ours-explicit": Provider(
        "ours, of keys and values, launched from Python", keys_and_values="explicit"
    ),
    "ours-absorbed": Provider(
        "ours, of raw rows, launched from Python", keys_and_values="absorbed"
    ),
    "ours": Provider("TargetAttentionEmbeddingBagCollection", replays=True),
    "ours-single-lookup": Provider(
        "the same with single_lookup=True", single_lookup=True, replays=True
    ),
    "ours-index-dedup": Provider(
        "and with TorchRec's use_index_dedup", single_lookup=True, index_dedup=True, replays=True
    ),
    "ours-newer-half": Provider(
        "ours, without the older half of each history: EventSelection", budget=0.5, replays=True
    ),
    "ours-once": Provider(
        "ours, what a request has sent once, by batch sizes that vary", batches="once", replays=True
    ),
    "ours-by-request": Provider(
        "ours with candidates='jagged' and single_lookup=True",
        single_lookup=True,
        batches="requests",
        replays=True,
    ),
    "ours-balanced": Provider(
        "ours, its batches shared out by BalancedBatchSampler", batches="balanced", replays=True
    ),
}
LADDER = {
    "padded": "",
    "linear-varlen": "jagged rows",
    "ours-explicit": "fused projections",
    "ours-absorbed": "absorbed keys and values",
    "ours": "replays, for the host",
    "ours-single-lookup": "a single lookup",
    "ours-index-dedup": "deduplicated lookups",
}
"""What each adds to the one before."""


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
    if provider == PROVIDERS["sum"]:
        return EmbeddingBagCollection(tables, device=meta)
    by_request = provider.batches == "requests"
    collection = TargetAttentionEmbeddingBagCollection(
        tables,
        configs,
        device=meta,
        single_lookup=provider.single_lookup,
        candidates="jagged" if by_request else "one",
        candidate_features=candidate_features if by_request else (),
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


@contextlib.contextmanager
def replays_of(provider: Provider) -> Iterator[None]:
    """While it is open, ours are launched as ``provider`` says; never replayed if the environment
    forbids it."""
    before = calls.ENABLED
    calls.ENABLED = before and provider.replays
    try:
        yield
    finally:
        calls.ENABLED = before


def formula(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One of the package's test formulas, as :class:`Explicit` wants it."""

    def attend(q: Tensor, kv: Tensor, history: JaggedTensor, max_length: int) -> Tensor:
        each = torch.arange(q.shape[0] + 1, device=q.device)
        return attention(q, *kv.unbind(1), each, history.offsets())

    return attend


def check_attentions(
    names: Iterable[str], lengths: Tensor, width: int, num_heads: int, max_length: int
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

    def results(
        attend: Callable[..., Tensor] | None, dtype: torch.dtype, keys_and_values: str = "auto"
    ) -> dict[str, Tensor]:
        torch.manual_seed(1)
        attention: nn.Module = JaggedTargetAttention(
            width,
            num_heads,
            recency_bias=False,
            init="mha",
            keys_and_values=keys_and_values,  # pyright: ignore[reportArgumentType]
            device=device,
        ).to(rows.dtype)
        if attend is not None:
            attention = Explicit(attention, attend, max_length)
        attention = attention.to(dtype)
        x, t = (leaf.to(dtype).requires_grad_() for leaf in (rows.clone(), target.clone()))
        out = attention(t, JaggedTensor(x, lengths=lengths))
        grads = torch.autograd.grad(out, (t, x), out_grad.to(dtype))
        return {"out": out, "gradient of target": grads[0], "gradient of history": grads[1]}

    with RoundingErrors(dtype) as errors:
        expected = results(formula(flash_attention_oracle), torch.float64)
    failed = {}
    for name in names:
        provider = PROVIDERS[name]
        if not provider.is_attention:
            continue
        try:
            with replays_of(provider):
                actual = results(provider.attend, dtype, provider.keys_and_values)
            for what, tensor in actual.items():
                assert_close(tensor, expected[what], errors, name=what)
        except Exception as error:  # whatever a peer raises that cannot run here
            failed[name] = in_a_line(error)
    return failed


def in_a_line(error: Exception) -> str:
    """What was raised, and the first line of its message."""
    return textwrap.shorten(f"{type(error).__name__}: {error}".partition("\n")[0], 120)
