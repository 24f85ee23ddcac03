"""``jagged_flash_attention`` of candidates to the keys and values of their user, at IKBO's shapes.

IKBO (in-kernel broadcast optimization) is a Triton kernel of Meta's for it: 2,048 candidates, 64 of
each user, with 64 query rows each, 2 heads of width 128. Where histories are ``jagged``, they have
any length up to the same: IKBO, which takes one length and masks none of it, is timed on full ones.
Candidates of ``one-row`` have one query row each, as target attention has it. Forward alone,
keys and values are there.

The kernel is loaded from the file that ``IKBO_ATTENTION`` names: ``triton_ikbo_fa.py`` of FBGEMM's
``experimental/ikbo``. It has 320 configurations, which would take minutes to compile. Those 18 are
tried, anew for each case, whose block of queries fits a candidate, with 32 to 128 keys, 4 or 8
warps and 2 to 4 stages.
"""

import functools
import importlib.util
import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from suites import Inputs, Relaid, Suite, UnavailableError, self_attention
from suites._attention import (
    Attend,
    expanded_flash_attention_3,
    flash_attention_3,
    torch_varlen,
)
from suites._self_attention import Call, need_cuda, varlen
from tests.cases import Case, jagged_lengths, offsets_of
from tests.oracles import flash_attention_oracle
from torchrec_jagged_attn import jagged_flash_attention


@dataclass(frozen=True)
class CandidateCase(Case):
    """Users, their candidates ``num_targets``, and how many query rows a candidate has."""

    rows: int = 64


LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
CASES = {
    name: CandidateCase(name, 32, length, 2, 128, 64, lengths, torch.float16, large=True, rows=rows)
    for family, rows in (("ikbo", 64), ("one-row", 1))
    for length in LENGTHS
    for suffix, lengths in (("", 1.0), ("-jagged", "uniform"))
    for name in [f"{family}-{length}{suffix}"]
}
CASES["cpu-ikbo"] = CandidateCase("cpu-ikbo", 4, 200, 2, 64, 16, "uniform", rows=8)


def make_inputs(case: CandidateCase, device: str) -> Inputs:
    """``q`` ``[ΣT · rows, H, D]``; ``k`` and ``v`` ``[N, H, D]``, of users."""
    generator = torch.Generator().manual_seed(0)
    lengths = jagged_lengths(case.batch_size, case.max_length, case.lengths, generator)
    offsets = offsets_of(lengths, case.index_dtype, device)
    rows = case.num_targets * case.rows  # of a user
    counts = {"q": case.batch_size * rows, "k": int(lengths.sum()), "v": int(lengths.sum())}
    leaves = {
        name: torch.randn(count, case.num_heads, case.width, generator=generator)
        .to(device, case.dtype)
        .requires_grad_()
        for name, count in counts.items()
    }
    x = Inputs.even(replace(case, num_targets=rows), leaves, offsets)
    return replace(x, case=case)


def oracle(x: Inputs) -> Tensor:
    """PyTorch's SDPA on each user."""
    return flash_attention_oracle(*x.leaves.values(), x.query_offsets, x.offsets)


def ours(x: Inputs) -> Call:
    """The op, with all candidates of a user as one sequence of queries."""
    q, k, v = x.leaves.values()
    return lambda: jagged_flash_attention(q, k, v, x.query_offsets, x.offsets)


def expanded(x: Inputs) -> Attend:
    """A copy of keys and values for every candidate."""
    return expanded_flash_attention_3(x, x.case.rows)


def load(path: str, block: int) -> ModuleType:
    """The module at ``path``, not tuned yet, with the configurations of a ``block`` of queries."""
    if not Path(path).is_file():
        raise UnavailableError("IKBO_ATTENTION names no file")
    spec = importlib.util.spec_from_file_location("triton_ikbo_fa", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = module._attn_fwd_tma
    kernel.configs = [
        config
        for config in kernel.configs
        if config.kwargs["BLOCK_M"] == block
        and config.kwargs["BLOCK_N"] >= 32
        and config.num_warps in (4, 8)
        and config.num_stages in (2, 3, 4)
    ]
    return module


def ikbo(x: Inputs) -> Relaid:
    """IKBO's kernel, on histories that are all as long as the longest may be."""
    need_cuda(x)
    module = load(os.environ.get("IKBO_ATTENTION", ""), block=max(16, x.case.rows))
    is_full = len(x.leaves["k"]) == x.case.batch_size * x.case.max_length
    full = x if is_full else make_inputs(replace(x.case, lengths=1.0), str(x.offsets.device))
    users = torch.arange(x.case.batch_size, dtype=torch.int32, device=x.offsets.device)
    call = functools.partial(
        module.triton_flash_attn_ikbo_tma,
        *full.leaves.values(),
        users.repeat_interleave(x.case.num_targets),
        x.case.rows,
        x.case.max_length,
    )
    return Relaid(call, full.leaves, inputs=None if is_full else full)


SUITE = Suite(
    name="ikbo",
    measures="candidates to keys and values of their user",
    cases=CASES,
    inputs=make_inputs,
    oracle=oracle,
    cost=self_attention.cost,
    providers={
        "ours": ours,
        "ikbo": ikbo,
        **{
            name: functools.partial(varlen, peer)
            for name, peer in (
                ("flash-attention-3", flash_attention_3),
                ("torch-varlen", torch_varlen),
                ("expanded-flash-attention-3", expanded),
            )
        },
    },
    modes=("forward",),
)
