"""``jagged_target_attention`` over rows of a byte a number, against the same over wide rows.

Rows are integers of up to 15, times a power of two: int8, uint8, e4m3 and bf16 all hold them
exactly, so that all providers compute one function. ``ours-after-dequantizing`` makes int8 rows
wide at each call, as one must who has no other attention. Forward alone, as in serving.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from suites import Cost, Inputs, Suite, _attention
from suites import target_attention_kernel as base
from suites._cases import TRAINING_CASES
from torchrec_jagged_attn import jagged_target_attention
from torchrec_jagged_attn.testing import Case

NAMES = ("rank-1k", "rank-2k", "rank-200", "rank-2k-8-targets", "cpu-skewed")


@dataclass(frozen=True)
class Narrow(Inputs):
    """Whose history ``[N, D]`` is ``numbers`` times ``scale`` ``[N]``."""

    numbers: Tensor
    scale: Tensor


def make_inputs(case: Case, device: str) -> Narrow:
    """Query ``[B, T, H, D]`` and history ``[N, D]``."""
    x = base.make_inputs(case, device)
    with torch.no_grad():
        numbers = (4 * x.leaves["history"].float()).round().clamp(-15, 15)
        scale = 0.5 ** (torch.arange(len(numbers), device=device) % 3 + 1)
        history = (numbers * scale.unsqueeze(1)).to(case.dtype).requires_grad_()
    leaves = x.leaves | {"history": history}
    return Narrow(**vars(replace(x, leaves=leaves)), numbers=numbers, scale=scale)


def cost(x: Narrow) -> dict[str, Cost]:
    """Read each narrow row and its scale once."""
    size, query = x.case.dtype.itemsize, x.leaves["query"]
    num_bytes = x.numbers.numel() + x.scale.nbytes + 2 * size * query.numel()
    costs = base.cost(x)
    return costs | {"forward": Cost(num_bytes, costs["forward"].flops)}


def over(
    x: Narrow, history: Tensor, scale: Tensor | None = None, bias: Tensor | None = None
) -> Callable[[], Tensor]:
    """The op, over these rows."""
    query = x.leaves["query"]
    return lambda: jagged_target_attention(
        query, history, x.offsets, row_scale=scale, row_bias=bias
    )


def of_uint8(x: Narrow) -> Callable[[], Tensor]:
    """With a bias for each row, as FBGEMM has it."""
    return over(x, (x.numbers + 128).to(torch.uint8), x.scale, -128 * x.scale)


def dequantize(x: Narrow) -> Callable[[], Tensor]:
    """What makes int8 rows wide in memory, ``[N, D]``."""
    numbers, scale = x.numbers.to(torch.int8), x.scale.to(x.case.dtype).unsqueeze(1)
    return lambda: numbers * scale


def after_dequantizing(x: Narrow) -> Callable[[], Tensor]:
    """The op, over rows made wide."""
    query, make_rows = x.leaves["query"], dequantize(x)
    return lambda: jagged_target_attention(query, make_rows(), x.offsets)


def padded_sdpa(x: Narrow) -> Callable[[], Tensor]:
    """Rows are made wide, and then padded for PyTorch's attention."""
    return base.over_rows(_attention.padded_sdpa, x, dequantize(x))


SUITE = Suite(
    name="target_attention_narrow",
    measures="jagged_target_attention over rows of a byte",
    cases={name: TRAINING_CASES[name] for name in NAMES},
    inputs=make_inputs,
    oracle=base.SUITE.oracle,
    plain=base.plain,
    cost=cost,
    providers={
        "ours-wide": lambda x: over(x, x.leaves["history"]),
        "ours-int8": lambda x: over(x, x.numbers.to(torch.int8), x.scale),
        "ours-uint8": of_uint8,
        "ours-e4m3": lambda x: over(x, x.numbers.to(torch.float8_e4m3fn), x.scale),
        "ours-after-dequantizing": after_dequantizing,
        "padded-sdpa": padded_sdpa,
    },
    modes=("forward",),
)
