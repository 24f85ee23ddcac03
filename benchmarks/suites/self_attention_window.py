"""``jagged_flash_attention`` within a window, by the pairs that are seen.

Each shape is a case without a window, causal, and one for each window. What is printed in the end
is the time of a visible pair and head beside that of the same shape without a window: equal, if the
time goes with the pairs.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pandas as pd
import torch
from rich.table import Table
from torch import Tensor

from suites import Cost, Inputs, Relaid
from suites import self_attention as base
from suites._self_attention import Call, dense
from torchrec_jagged_attn import jagged_flash_attention
from torchrec_jagged_attn.testing import Case, flash_attention_oracle


@dataclass(frozen=True)
class WindowCase(Case):
    """A shape, and the window; ``None`` for causal attention to all older rows."""

    window: int | None = None


SHAPES = (
    Case("1k", 512, 1024, 4, 64, 1, "uniform", base.BF16, large=True),
    Case("4k", 128, 4096, 4, 64, 1, "uniform", base.BF16, large=True),
    Case("4k-log-normal", 256, 4096, 2, 128, 1, "log-normal", base.BF16, large=True),
    Case("cpu-1k", 16, 1024, 4, 64, lengths="uniform"),
)
CASES = {
    case.name: case
    for shape in SHAPES
    for window in (None, 1024, 256, 64)
    if window is None or window < shape.max_length
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


def padded(x: Inputs) -> Relaid:
    """The textbook formula on padded operands."""
    steps = torch.arange(x.max_length, device=x.offsets.device)
    distance = steps.unsqueeze(1) - steps
    hidden = (distance < 0) | (distance >= (x.case.window or x.max_length))
    mask = torch.zeros(hidden.shape, device=hidden.device, dtype=x.case.dtype)
    mask.masked_fill_(hidden, -torch.inf)
    return dense(x, lambda: mask)


def within_window(attention: Callable[..., Tensor], x: Inputs) -> Tensor:
    """``attention`` of 4 samples at a time."""
    attend = functools.partial(attention, causal=True, window=x.case.window)
    return base.by_samples(x, attend, group=4)


def cost(x: Inputs) -> dict[str, Cost]:
    """That of ``self_attention``, of the pairs that are seen."""
    moved = x.leaves["q"].nbytes
    product = 2 * visible_pairs(x) * x.case.num_heads * x.case.width
    return {"forward": Cost(4 * moved, 2 * product), "backward": Cost(8 * moved, 5 * product)}


def summary(frame: pd.DataFrame) -> Table:
    """Time of a visible pair and head, in picoseconds, and beside that without a window."""
    metric = "graph_time" if "graph_time" in set(frame["metric"]) else "time"
    figures = frame[(frame["metric"] == metric) & (frame["provider"] == "ours")]
    products = figures["mode"].map({"forward": 2, "backward": 5, "both": 7})
    pairs = figures["flops"] / (2 * figures["D"] * products)
    figures = figures.assign(each=figures["median"] * 1e9 / pairs)
    figures = figures.assign(case=figures["case"].str.removesuffix("-quick"))
    figures = figures.pivot_table("each", "case", "mode", sort=False)
    table = Table(box=None, title=f"ps of a visible pair and head, by {metric}; to no window")
    table.add_column("case", no_wrap=True)
    for mode in figures:
        table.add_column(str(mode), justify="right")
    for case, each in figures.iterrows():
        whole = f"{str(case).rsplit('-', 1)[0]}-all"
        ratios = each / figures.loc[whole] if whole in figures.index else each * math.nan
        cells = (f"{ps:.3g} / {ratio:.2f}" for ps, ratio in zip(each, ratios, strict=True))
        table.add_row(str(case), *cells)
    return table


SUITE = replace(
    base.SUITE,
    name="self_attention_window",
    measures="causal self_attention in windows, by visible pair",
    cases=CASES,
    oracle=functools.partial(within_window, flash_attention_oracle),
    cost=cost,
    providers={"ours": ours, "padded": padded},
    summary=summary,
)
