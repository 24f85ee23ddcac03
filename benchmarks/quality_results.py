"""What ``quality.py`` and scripts like it found, from their trainings, with standard errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

__all__ = ["SCORES", "comparison", "figure_rows", "ways_rows"]

CASE = ["data", "max_history", "pooling"]
TUNED = ["lr", "weight_decay", "half_life"]
SETTINGS = [
    *("users", "events", "noise", "max_history", "width", "epochs", "batch_size", "lr"),
]
"""Of trainings that compare ways, each with budgets: what must be the same for all of a log."""
SCORES = {"auc": "AUC", "hit_rate_10": "HR@10", "ne": "NE"}


def comparison(trainings: pd.DataFrame) -> pd.DataFrame:
    """For each data set, history length and pooling: what is best for tuning, and its test's
    figures, in the mean of the seeds.

    Args:
        trainings: with a column for each figure. The best is that of seed 0.

    Raises:
        ValueError: trainings differ in what is neither tuned nor compared.
    """
    for name in ("epochs", "width"):
        if (found := trainings[name].unique()).size > 1:
            raise ValueError(f"{name} must be the same in all trainings, got {found.tolist()}")
    rows = []
    for case, of_case in trainings.groupby(CASE, sort=False):
        first = of_case[of_case["seed"] == 0]
        best = first.loc[first["tune_auc"].idxmax(), TUNED]
        chosen = of_case[(of_case[TUNED] == best).all(axis=1)]
        row = dict(zip(CASE, case, strict=True)) | best.to_dict()
        for name in SCORES:
            row[name], row[f"{name}_se"] = chosen[name].mean(), chosen[name].sem()
        row["samples_per_s"] = chosen.get("samples_per_s", pd.Series(dtype=float)).median()
        rows.append(row)
    return pd.DataFrame(rows)


def figure_rows(trainings: pd.DataFrame) -> list[dict[str, Any]]:
    """The same as rows like those of ``run.py``: a case is ``DATA-LENGTH``, a provider a pooling.

    A standard error is the metric ``<score>_se``, and left out where there is one seed.
    """
    stamps = trainings.groupby(CASE)[["device", "torch", "torchrec", "date"]].max()
    rows = []
    for row in comparison(trainings).to_dict("records"):
        data, max_history, pooling = (row[name] for name in CASE)
        measured = stamps.loc[(data, max_history, pooling)].to_dict()
        labels = {
            "suite": "quality", "case": f"{Path(data).name}-{max_history}", "provider": pooling,
            "mode": "test", "gpu": measured.pop("device"), **measured,
        }  # fmt: skip
        for score, unit in SCORES.items():
            for metric in (score, f"{score}_se"):
                if row[metric] == row[metric]:
                    figure = {"metric": metric, "median": f"{row[metric]:.5g}", "unit": unit}
                    rows.append(labels | figure)
    return rows


def ways_rows(trainings: pd.DataFrame) -> list[dict[str, Any]]:
    """Trainings with a ``way`` and a ``budget`` as rows like those of ``run.py``.

    A case is the data, a provider a way and its budget, as ``newest-0.5``. Figures are means over
    seeds; standard errors as in :func:`figure_rows`.

    Args:
        trainings: with a column for each figure, as ``training, samples/s``, or a score.

    Raises:
        ValueError: trainings of a log differ in another setting.
    """
    stamp = ["device", "torch", "torchrec", "torchrec_jagged_attn", "date"]
    labels = {"data", "way", "budget", "seed", *SETTINGS, *stamp}
    figures = [name for name in trainings.columns if name not in labels]
    rows = []
    for data, of_data in trainings.groupby("data", sort=False):
        for name in of_data.columns.intersection(SETTINGS):
            if (found := of_data[name].unique()).size > 1:
                raise ValueError(f"{name} must be the same for all of {data}, got {found.tolist()}")
        for (way, budget), part in of_data.groupby(["way", "budget"], sort=False):
            measured = part[["device", "torch", "torchrec", "date"]].max().to_dict()
            label = {
                "suite": "ways", "case": data, "provider": f"{way}-{budget:g}", "mode": "test",
                "gpu": measured.pop("device"), **measured,
            }  # fmt: skip
            for name in figures:
                metric, _, unit = name.partition(", ")
                for kind, value in (("", part[name].mean()), ("_se", part[name].sem())):
                    if value == value:
                        figure = {"metric": f"{metric}{kind}", "median": f"{value:.5g}"}
                        rows.append(label | figure | {"unit": unit or SCORES.get(name, name)})
    return rows
