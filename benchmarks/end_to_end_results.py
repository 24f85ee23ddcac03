"""The CSV of ``end_to_end*.py``: what stands in it, what is added, and its tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from end_to_end_peers import LADDER, PROVIDERS
from end_to_end_trace import PARTS
from stamps import stamp

__all__ = ["SIZES", "add", "by_provider", "ladder_table", "matching", "measured_with", "step_table"]

SIZES = ("batch", "histories", "width", "heads", "table_rows", "skew")
COLUMNS = ("suite", "case", "provider", "mode", "metric", "median", "p20", "p80", "unit", "note",
           *SIZES, "gpus", "dense_layers", "rows_per_sample", "replays",
           "gpu", "torch", "triton", "torchrec", "torchrec_jagged_attn", "date")  # fmt: skip


def measured_with() -> dict[str, str]:
    """See :func:`stamp`."""
    return stamp("triton", "torchrec")


def add(csv: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes rows at the end. One figure may stand for its quantiles, too."""
    frame = pd.DataFrame(rows, columns=[*COLUMNS])
    for quantile in ("p20", "p80"):
        frame[quantile] = frame[quantile].fillna(frame["median"])
    csv.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(csv, mode="a", header=not csv.exists(), index=False, float_format="%.5g")


def matching(csv: Path, labels: dict[str, Any]) -> pd.DataFrame:
    """The rows that have ``labels``, and were measured on this kind of GPU."""
    frame = pd.DataFrame(columns=[*COLUMNS])
    if csv.exists():
        frame = pd.read_csv(csv, dtype={"note": str}).fillna({"note": ""})
    for name, value in {**labels, "gpu": measured_with()["gpu"]}.items():
        frame = frame[frame[name] == value]
    return frame


def by_provider(frame: pd.DataFrame) -> pd.DataFrame:
    """Medians: a row for each provider, a column for each metric."""
    of = frame.pivot(index="provider", columns="metric", values="median")
    return of.reindex([name for name in PROVIDERS if name in of.index])


def step_table(frame: pd.DataFrame) -> str:
    """Figures of a step, where the GPU's time goes, and what was refused."""
    parts = [f"gpu_{part}" for part in PARTS]
    of = by_provider(frame).reindex(
        columns=["time", "gpu_busy", "host", *parts, "peak_memory", "history_traffic", "throughput"]
    )
    of["× padded"] = of["throughput"] / of["throughput"].get("padded", math.nan)
    of = of.dropna(how="all").rename(columns=lambda name: name.removeprefix("gpu_"))
    refused = frame[frame["metric"] == "refused"]
    lines = (refused["provider"] + ": " + refused["note"]).tolist()
    return "\n".join([of.to_string(float_format="{:.4g}".format, na_rep="–"), *lines])


def ladder_table(frame: pd.DataFrame) -> str:
    """Milliseconds of a step; each rung has one optimization more than the one before."""
    ms = by_provider(frame).reindex(index=[*LADDER], columns=["time"])["time"]
    rungs = pd.DataFrame({"time": ms, "× before": ms.shift() / ms, "× first": ms.iloc[0] / ms})
    rungs.insert(0, "adds", [LADDER[name] for name in rungs.index])
    rungs = rungs.dropna(subset="time")
    if rungs.empty:
        return ""
    return rungs.to_string(float_format="{:.3g}".format, na_rep="–")
