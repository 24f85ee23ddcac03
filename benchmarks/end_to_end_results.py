"""Read, extend and print the CSV of ``end_to_end*.py``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from end_to_end_peers import PROVIDERS
from stamps import stamp

SIZES = ("batch", "histories", "width", "table_rows", "skew")
COLUMNS = ("suite", "case", "provider", "mode", "metric", "median", "p20", "p80", "unit", "note",
           "batch", "histories", "width", "heads", "table_rows", "skew", "gpus", "rows_per_sample",
           "gpu", "torch", "triton", "torchrec", "torchrec_jagged_attn", "date")  # fmt: skip


def measured_with() -> dict[str, str]:
    """Return hardware, versions and date of a measurement, see :func:`stamp`."""
    return stamp("triton", "torchrec")


def add(csv: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append rows. Missing quantiles are set to the median."""
    frame = pd.DataFrame(rows, columns=[*COLUMNS])
    for quantile in ("p20", "p80"):
        frame[quantile] = frame[quantile].fillna(frame["median"])
    csv.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(csv, mode="a", header=not csv.exists(), index=False, float_format="%.5g")


def matching(csv: Path, labels: dict[str, Any]) -> pd.DataFrame:
    """Return the rows with ``labels`` that were measured on this kind of GPU."""
    frame = pd.DataFrame(columns=[*COLUMNS])
    if csv.exists():
        frame = pd.read_csv(csv, dtype={"note": str}).fillna({"note": ""})
    for name, value in {**labels, "gpu": measured_with()["gpu"]}.items():
        frame = frame[frame[name] == value]
    return frame


def step_table(frame: pd.DataFrame) -> str:
    """Return figures of a step, its slowest kernels, and refused providers, as text."""
    medians = frame.pivot(index="provider", columns="metric", values="median")
    medians = medians.reindex([name for name in PROVIDERS if name in medians.index])
    figures = ["time", "gpu_busy", "gpu_busy_share", "peak_memory", "peak_reserved"]
    figures += ["sent", "sent_by_length", "sent_rows"]
    shown = medians.reindex(columns=[*figures, "throughput"])
    shown["× sum"] = shown["throughput"] / shown["throughput"].get("sum", math.nan)
    shown = shown.dropna(how="all")
    kernels = frame[frame["metric"].str.startswith("kernel_")]
    lines = [
        f"{row.provider}, {row.metric}: {row.median:.3f} ms, {row.note[:90]}"
        for row in kernels.itertuples()
    ]
    refused = frame[frame["metric"] == "refused"]
    lines += (refused["provider"] + ": " + refused["note"]).tolist()
    return "\n".join([shown.to_string(float_format="{:.4g}".format, na_rep="–"), *lines])
