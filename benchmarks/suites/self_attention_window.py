"""``jagged_flash_attention`` within a window, by the pairs that are seen.

Each shape is a case without a window, causal, and one for each window.
"""

import functools
from dataclasses import dataclass, replace

from torch import Tensor

from suites import Inputs
from suites import self_attention as base
from suites._self_attention import Call
from tests.cases import Case
from tests.oracles import flash_attention_oracle
from torchrec_jagged_attn import jagged_flash_attention


@dataclass(frozen=True)
class WindowCase(Case):
    """A shape, and the window; ``None`` for causal attention to all older rows."""

    window: int | None = None


SHAPES = (
    Case("1k", 512, 1024, 4, 64, 1, "uniform", base.BF16, large=True),
    Case("cpu-1k", 16, 1024, 4, 64, lengths="uniform"),
)
CASES = {
    case.name: case
    for shape in SHAPES
    for window in (None, 256, 64)
    for case in (
        WindowCase(
            **vars(shape) | {"name": f"{shape.name}-window-{window or 'all'}"}, window=window
        ),
    )
}


def visible_pairs(x: Inputs) -> int:
    """How many pairs of rows are seen."""
    lengths = x.offsets.diff()
    window = lengths if x.case.window is None else lengths.clamp(max=x.case.window)
    return int((window * (window + 1) // 2 + (lengths - window) * window).sum())


def ours(x: Inputs) -> Call:
    """The op."""
    q, k, v = x.leaves.values()
    return lambda: jagged_flash_attention(q, k, v, x.offsets, causal=True, window=x.case.window)


def oracle(x: Inputs) -> Tensor:
    """PyTorch's SDPA on each sample, of 4 samples at a time."""
    attend = functools.partial(flash_attention_oracle, causal=True, window=x.case.window)
    return base.by_samples(x, attend, group=4)


SUITE = replace(
    base.SUITE,
    name="self_attention_window",
    measures="causal self_attention in windows, by visible pair",
    cases=CASES,
    oracle=oracle,
    cost=lambda x: base.cost(x, visible_pairs(x)),
    providers={"ours": ours},
)
