"""Target attention with a learned bias by position in the history, and its gradient.

Peers have no such bias. Each takes one score per row, ``[N, H]``, gathered from the table of
positions: in a mask, or as one more column of the keys.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suites import Inputs
from suites import target_attention as base
from suites._attention import PEERS, Attend
from tests.cases import Case
from tests.oracles import flash_attention_oracle
from torchrec_jagged_attn.ops import JaggedLayout

NUM_BUCKETS = 64  # of JaggedTargetAttention: four per octave


def make_inputs(case: Case, device: str) -> Inputs:
    """Those of ``target_attention``, and the table of positions ``[64, H]``."""
    x = base.make_inputs(case, device)
    values = torch.randn(NUM_BUCKETS, case.num_heads, generator=torch.Generator().manual_seed(3))
    weight = nn.Parameter(values.to(device, case.dtype))
    return replace(x, leaves=x.leaves | {base.POSITION_WEIGHT: weight})


def buckets_of(distances: Tensor) -> Tensor:
    """``floor(4 · log2(1 + distance))`` of whole numbers."""
    edges = 2 ** (torch.arange(NUM_BUCKETS, dtype=torch.float64) / 4)  # whole numbers are exact
    return torch.bucketize(1 + distances.double(), edges.to(distances.device), right=True) - 1


def biased(x: Inputs, attend: Attend) -> Attend:
    """``attend`` with the bias of each row."""
    layout = JaggedLayout(x.offsets, x.leaves["history"].shape[0])
    buckets = buckets_of(layout.positions_from_end())
    return lambda q, k, v: attend(q, k, v, F.embedding(buckets, x.leaves[base.POSITION_WEIGHT]))


def formula(x: Inputs, attention: Callable[..., Tensor]) -> Tensor:
    """One of the package's test formulas."""
    return base.materialized(x, biased(x, base.formula(x, attention)))


def _over_keys(make: Callable[[Inputs], Attend], x: Inputs) -> Callable[[], Tensor]:
    return base.over_keys(lambda x: biased(x, make(x)), x)


SUITE = replace(
    base.SUITE,
    name="target_attention_recency",
    measures="target_attention with a learned bias by position",
    inputs=make_inputs,
    oracle=functools.partial(formula, attention=flash_attention_oracle),
    providers={
        "ours+recency": base.ours,
        **{
            f"linear+{name}": functools.partial(_over_keys, PEERS[name])
            for name in ("padded-sdpa", "torch-varlen")
        },
    },
)
