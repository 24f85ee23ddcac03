"""The paper's Figure 2: dense and jagged attention, unfused and flash, over the longest length.

    python benchmarks/run.py figure2 figure2_skewed --graph --csv figure2.csv --plot .

draws it, and prints the paper's ratios in the end. Lengths are spread evenly from one to the
longest, so that padding is half of a batch.

Source:
    Jagged Flash Attention (RecSys '24, https://arxiv.org/abs/2409.15373), Figure 2.
"""

import math
from dataclasses import replace

import pandas as pd
import torch
from rich.console import Group
from rich.table import Table

from suites import self_attention as base
from suites._self_attention import PEERS, dense_flash_full, jagged_unfused, ours
from torchrec_jagged_attn.testing import Case

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
DENSE_FLASH = ["padded-flash", "full-flash"]
COLUMNS = {  # of ratios: how they look, and the paper's best
    "dense/ours": ("{:.2f}", 9),
    "dense flash/ours": ("{:.2f}", 3),
    "dense/ours, MiB": ("{:.2f}", 22),
    "less MiB than dense flash": ("{:.0%}", 0.53),
}


def summary(frame: pd.DataFrame) -> Group:
    """The paper's ratios at every length, a table for each mode.

    Latencies are those of CUDA graphs where these were timed. Memory is that of the operands and
    of what a call takes on top. Dense flash attention is the better of the two.
    """
    metric = "graph_time" if "graph_time" in set(frame["metric"]) else "time"
    columns = pd.MultiIndex.from_product(
        [[metric, "operands", "peak_memory"], ["ours", "padded", *DENSE_FLASH]]
    )
    tables = []
    for mode, rows in frame.groupby("mode", sort=False):
        figures = rows.pivot_table(
            "median", ["case", "L", "fill"], ["metric", "provider"], sort=False
        )
        figures = figures.reindex(columns=columns)
        time, memory = figures[metric], figures["operands"] + figures["peak_memory"]
        ratios = (
            time["padded"] / time["ours"],
            time[DENSE_FLASH].min(axis=1) / time["ours"],
            memory["padded"] / memory["ours"],
            1 - memory["ours"] / memory[DENSE_FLASH].min(axis=1),
        )
        timed_as = "CUDA graphs" if metric == "graph_time" else "eager"
        table = Table(box=None, title=f"{frame['suite'].iloc[0]}, {mode}, {timed_as}")
        for column in ("L", "fill", *COLUMNS):
            table.add_column(column, justify="right")
        for (_, length, fill), *values in zip(figures.index, *ratios, strict=True):
            cells = [
                form.format(value) if math.isfinite(value) else "–"
                for value, (form, _) in zip(values, COLUMNS.values(), strict=True)
            ]
            table.add_row(str(length), str(fill), *cells)
        table.add_row("paper", "", *(form.format(best) for form, best in COLUMNS.values()))
        tables.append(table)
    return Group(*tables)


SUITE = replace(
    base.SUITE,
    name="figure2",
    measures="the paper's Figure 2: dense and jagged attention",
    cases={
        name: Case(name, 256, length, 2, 64, 1, 0.5, torch.bfloat16, large=True)
        for length in LENGTHS
        for name in [f"length-{length}"]
    },
    providers={
        "ours": ours,
        "ours-unfused": jagged_unfused,
        **PEERS,
        "full-flash": dense_flash_full,
    },
    modes=("forward", "both"),
    summary=summary,
)
