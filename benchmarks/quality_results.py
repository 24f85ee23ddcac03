"""What ``quality.py`` found, from its trainings: the best of each pooling, with standard errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

__all__ = ["SCORES", "comparison", "figure_rows"]

CASE = ["data", "max_history", "pooling"]
TUNED = ["lr", "weight_decay", "half_life"]
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
        for name in (*SCORES, "seconds"):
            row[name], row[f"{name}_se"] = chosen[name].mean(), chosen[name].sem()
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
