"""``jagged_flash_attention`` with a learned bias by the distance of two rows, and its gradient.

``JaggedSelfAttention`` calls it by default. FlashAttention does not support the bias: providers
``*-unbiased``, among them ours, are timed without it.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from suites import Inputs, PreparedCall
from suites import self_attention as base
from suites._self_attention import PEERS, Call, dense, ours
from suites.target_attention import NUM_BUCKETS, distance_buckets
from tests.cases import Case
from torchrec_jagged_attn import jagged_flash_attention

TABLE = "relative_bias"


def make_inputs(case: Case, device: str) -> Inputs:
    """Return inputs of ``self_attention`` and the fp32 table of biases by distance ``[64, H]``."""
    x = base.make_inputs(case, device)
    table = torch.randn(NUM_BUCKETS, case.num_heads, generator=torch.Generator().manual_seed(3))
    return replace(x, leaves=x.leaves | {TABLE: table.to(device).requires_grad_()})


def make_bias(x: Inputs) -> Callable[[Tensor], Tensor]:
    """Return a function from the table to the biases of all pairs of rows ``[H, L, L]``."""
    steps = torch.arange(x.max_length, device=x.offsets.device)
    buckets = distance_buckets((steps.unsqueeze(1) - steps).abs())
    dtype = x.leaves["q"].dtype
    return lambda table: F.embedding(buckets, table).permute(2, 0, 1).to(dtype)


def attend_each(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, bias_HLL: Tensor) -> Tensor:
    """PyTorch's SDPA on each sample."""
    lengths = offsets.diff().tolist()
    qkv = (rows.transpose(0, 1).split(lengths, 1) for rows in (q, k, v))
    outs = [
        F.scaled_dot_product_attention(*operands, bias_HLL[:, :length, :length]).transpose(0, 1)
        for length, *operands in zip(lengths, *qkv, strict=True)
    ]
    return torch.cat(outs)


def oracle(x: Inputs) -> Tensor:
    """PyTorch's SDPA on each sample, with the bias if ``x`` has its table."""
    if TABLE not in x.leaves:
        return base.oracle(x)
    return base.by_sample_groups(x, attend_each, 64, make_bias(x)(x.leaves[TABLE]))


def ours_biased(x: Inputs) -> Call:
    """The op with the bias."""
    q, k, v, table = x.leaves.values()
    return lambda: jagged_flash_attention(q, k, v, x.offsets, relative_bias=table)


def unbiased(make: Callable[[Inputs], Call], x: Inputs) -> PreparedCall:
    """A provider on jagged rows without the bias."""
    inputs = replace(x, leaves={name: leaf for name, leaf in x.leaves.items() if name != TABLE})
    return PreparedCall(make(inputs), inputs.leaves, inputs=inputs)


SUITE = replace(
    base.SUITE,
    name="self_attention_recency",
    measures="self_attention with a learned bias by distance",
    inputs=make_inputs,
    oracle=oracle,
    providers={
        "ours+recency": ours_biased,
        "ours-unbiased": functools.partial(unbiased, ours),
        **{
            f"{name}-unbiased": functools.partial(unbiased, PEERS[name])
            for name in ("flash-attention-3", "torch-varlen")
        },
        "padded": lambda x: dense(x, make_bias(x)),
    },
)
