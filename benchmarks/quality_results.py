"""Means and standard errors of trainings by ``quality.py`` and ``event_selection.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

TUNED = ["dense_lr", "table_lr", "half_life", "dropout", "weight_decay", "table_decay"]
SETTINGS = [
    *("users", "events", "noise", "max_history", "width", "epochs", "batch_size", "lr"),
]
"""Settings of ``event_selection.py`` that must be equal for all trainings of a log."""
SCORES = {"auc": "AUC", "ne": "NE"}
STAMP = ["device", "torch", "torchrec", "date"]


def comparison(trainings: pd.DataFrame) -> pd.DataFrame:
    """Return the best settings of each pooling by ``tune_auc`` of seed 0, and its test AUC.

    Args:
        trainings: lines of ``quality.py``.

    Returns:
        A line for each data set and pooling: the settings, the mean of ``auc`` and its standard
        error ``auc_se``, the mean difference ``ahead`` to recency pooling of the same seeds, and
        its standard error ``ahead_se``.

    Raises:
        ValueError: trainings differ in a setting that is neither tuned nor compared.
    """
    for name in ("max_history", "width", "batch_size"):
        if (found := trainings[name].unique()).size > 1:
            raise ValueError(f"{name} must be the same in all trainings, got {found.tolist()}")
    rows, by_seed = [], {}
    for case, case_trainings in trainings.groupby(["data", "pooling"], sort=False):
        first = case_trainings[case_trainings["seed"] == 0]
        best = first.loc[first["tune_auc"].idxmax(), TUNED]
        chosen = case_trainings[(case_trainings[TUNED] == best).all(axis=1)]
        by_seed[case] = auc = chosen.set_index("seed")["auc"]
        rows.append({"data": case[0], "pooling": case[1], **best, "seeds": len(auc)})
    for row in rows:
        auc = by_seed[row["data"], row["pooling"]]
        recency = by_seed.get((row["data"], "recency"), pd.Series(dtype=float))
        for name, figure in (("auc", auc), ("ahead", (auc - recency).dropna())):
            row[name], row[f"{name}_se"] = figure.mean(), figure.sem()
    return pd.DataFrame(rows)


def figure_rows(trainings: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a comparison in the format of ``run.py``: cases are data, providers poolings.

    Standard errors are the metrics ``<score>_se``, for more than one seed.
    """
    stamps = trainings.groupby(["data", "pooling"])[STAMP].max()
    rows = []
    for row in comparison(trainings).to_dict("records"):
        stamp = stamps.loc[(row["data"], row["pooling"])]
        labels = _labels("quality", Path(row["data"]).name, row["pooling"], stamp)
        for metric in ("auc", "auc_se", "ahead", "ahead_se"):
            if row[metric] == row[metric]:
                figure = {"metric": metric, "median": f"{row[metric]:.4f}", "unit": "AUC"}
                rows.append(labels | figure)
    return rows


def _labels(suite: str, case: str, provider: str, stamp: pd.Series) -> dict[str, Any]:
    labels = {"suite": suite, "case": case, "provider": provider, "mode": "test"}
    return labels | stamp.rename({"device": "gpu"}).to_dict()


def ways_rows(trainings: pd.DataFrame) -> list[dict[str, Any]]:
    """Return trainings with a ``way`` and a ``budget`` in the format of ``run.py``.

    Cases are data, providers a way and its budget, as ``newest-0.5``. Figures are means over seeds;
    standard errors as in :func:`figure_rows`.

    Args:
        trainings: lines with a column for each figure, as ``training, samples/s`` or a score.

    Raises:
        ValueError: trainings of a log differ in another setting.
    """
    others = {"data", "way", "budget", "seed", *SETTINGS, *STAMP, "torchrec_jagged_attn"}
    figures = [name for name in trainings.columns if name not in others]
    rows = []
    for data, data_trainings in trainings.groupby("data", sort=False):
        for name in data_trainings.columns.intersection(SETTINGS):
            if (found := data_trainings[name].unique()).size > 1:
                raise ValueError(f"{name} must be the same for all of {data}, got {found.tolist()}")
        for (way, budget), part in data_trainings.groupby(["way", "budget"], sort=False):
            labels = _labels("ways", data, f"{way}-{budget:g}", part[STAMP].max())
            for name in figures:
                metric, _, unit = name.partition(", ")
                for kind, value in (("", part[name].mean()), ("_se", part[name].sem())):
                    if value == value:
                        figure = {"metric": f"{metric}{kind}", "median": f"{value:.5g}"}
                        rows.append(labels | figure | {"unit": unit or SCORES.get(name, name)})
    return rows
