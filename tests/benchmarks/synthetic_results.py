"""Write small CSV files in the formats of the benchmarks of whole models, for tests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from end_to_end_cases import SHARDINGS, step_case
from end_to_end_peers import PROVIDERS
from end_to_end_results import add
from quality_models import POOLINGS, Run

STAMP = {"gpu": "a GPU", "torch": "2.13.0", "triton": "3.7.1", "torchrec": "1.8.0",
         "date": "2026-11-25T01:02:03+00:00"}  # fmt: skip
OUT_OF_MEMORY = "OutOfMemoryError: CUDA out of memory. Tried to allocate 7 GiB"
BATCH = 8192


def step_rows(mean: int, gpus: int, lacking_memory: Iterable[str] = ()) -> Iterator[dict[str, Any]]:
    """Rows of ``end_to_end.py``: provider number ``i`` takes ``10 - i / 2`` ms per step."""
    case = step_case(mean, gpus, SHARDINGS[0])
    for i, name in enumerate(PROVIDERS):
        label = {**STAMP, "suite": "end_to_end", "case": case, "mode": "step", "provider": name,
                 "batch": BATCH, "gpus": gpus}  # fmt: skip
        if name in lacking_memory:
            yield {**label, "metric": "refused", "median": 0, "note": OUT_OF_MEMORY}
            continue
        ms = 10 - i / 2
        figures = {
            ("time", "ms"): ms,
            ("throughput", "samples/s"): BATCH * gpus * 1e3 / ms,
            ("peak_memory", "MiB"): 1024 * (20 - i),
            ("gpu_busy", "ms"): ms * 0.6,
        }
        for (metric, unit), median in figures.items():
            yield {**label, "metric": metric, "unit": unit, "median": median}


def write_steps(folder: Path) -> None:
    """Write files of ``end_to_end.py``; padding with 4,000 events is out of memory."""
    rows = [
        *step_rows(200, 1), *step_rows(1000, 1),
        *step_rows(4000, 1, lacking_memory=("padded", "padded-din")),
    ]  # fmt: skip
    add(folder / "end_to_end.csv", rows)
    for name in ("end_to_end_gpus", "end_to_end_graphs"):
        add(folder / f"{name}.csv", [*step_rows(1000, 1), *step_rows(1000, 2)])


def write_curves(folder: Path) -> None:
    """Write a file of ``end_to_end_quality.py``."""
    label = {**STAMP, "suite": "end_to_end_quality", "mode": "test"}
    add(
        folder / "end_to_end_quality.csv",
        [
            {**label, "case": f"planted-{epoch:.1f}", "provider": name, "metric": metric,
             "unit": metric.upper(), "median": level * epoch + i * 1e-4}
            for i, name in enumerate(("padded", "linear-varlen", "ours"))
            for epoch in (0.5, 1.0)
            for metric, level in (("auc", 0.8), ("ne", 0.9))
        ],
    )  # fmt: skip


def write_trainings(folder: Path) -> None:
    """Write a file of ``quality.py``: the second learning rate is better, and has two seeds in all
    but one case.
    """
    rows = []
    for i, pooling in enumerate(POOLINGS):
        for data in ("data/ml-1m", "synthetic"):
            for lr, seed in ((1e-3, 0), (3e-3, 0), (3e-3, 1)):
                if (pooling, data, seed) == ("mean", "synthetic", 1):
                    continue
                run = Run(data, pooling, seed, dense_lr=lr)
                auc = 0.7 + i / 100 + seed / 1000 * (pooling == "mean")
                rows.append({
                    **asdict(run), "tune_auc": lr, "auc": auc, "ne": 1 - auc, "seconds": 2.0,
                    "device": "a GPU", "torch": "2.13.0", "torchrec": "1.8.0",
                    "date": "2026-11-25T01:02:03+00:00",
                })  # fmt: skip
    pd.DataFrame(rows).to_csv(folder / "quality.csv", index=False)


def write_ways(folder: Path) -> None:
    """Write a file of ``event_selection.py`` with two seeds."""
    stamp = {"device": "a GPU", "torch": "2.13.0", "torchrec": "1.8.0",
             "torchrec_jagged_attn": "0.1.0", "date": "2026-11-25T01:02:03+00:00"}  # fmt: skip
    events = [
        {"data": "synthetic", "users": 9, "events": 90, "noise": 0.75, "max_history": 9, "width": 8,
         "epochs": 1, "batch_size": 2, "lr": 1e-3, "way": way, "budget": budget, "seed": seed,
         "ne": ne, "auc": 0.9, "training, samples/s": 100 / budget,
         "inference, samples/s": math.nan, **stamp}
        for way, budget, ne in (("all", 1.0, 0.6), ("relevance", 0.5, 0.5), ("newest", 0.5, 0.7))
        for seed in (0, 1)
    ]  # fmt: skip
    pd.DataFrame(events).to_csv(folder / "event_selection.csv", index=False)


def write_all(folder: Path) -> None:
    """Write all files."""
    for write in (write_steps, write_curves, write_trainings, write_ways):
        write(folder)
