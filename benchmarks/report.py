"""The table and the pictures of ``run.py``, from its rows of figures."""

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.patches import Patch
from rich.table import Table

matplotlib.use("Agg")


def make_table(rows: list[dict]) -> Table:
    """One line per mode and provider of a case: figures, ratio to the best peer, part of the floor.

    A ratio over 1 is faster than the best peer; the best peer's own is 1.
    """
    figures = {(r["mode"], r["provider"], r["metric"]): r["median"] for r in rows}
    heads = {"time": "eager ms", "graph_time": "graph ms"}
    metrics = [m for m in heads if any(metric == m for _, _, metric in figures)]
    table = Table("mode", "provider", box=None, pad_edge=False)
    for column in [c for m in metrics for c in (heads[m], "× peer", "of floor")] + ["MiB"]:
        table.add_column(column, justify="right")
    modes = list(dict.fromkeys(r["mode"] for r in rows))
    lines = dict.fromkeys((r["mode"], r["provider"]) for r in rows)
    for mode, provider in sorted(lines, key=lambda line: modes.index(line[0])):
        cells = []
        for metric in metrics:
            peers = [
                ms
                for (its_mode, name, its_metric), ms in figures.items()
                if (its_mode, its_metric) == (mode, metric)
                and not name.startswith(("ours", "floor"))
            ]
            ms = figures.get((mode, provider, metric))
            if ms is None:
                cells += ["–", "–", "–"]
            else:
                ratio = f"{min(peers) / ms:.2f}" if peers and provider != "floor" else "–"
                cells += [f"{ms:.4g}", ratio, f"{figures[mode, 'floor', 'time'] / ms:.0%}"]
        memory = figures.get((mode, provider, "peak_memory"))
        table.add_row(mode, provider, *cells, "–" if memory is None else f"{memory:.0f}")
    return table


def plot(frame: pd.DataFrame, directory: Path) -> None:
    """Draw ``directory/<suite>.png``: milliseconds by case and provider, a row of axes per mode."""
    directory.mkdir(parents=True, exist_ok=True)
    for suite, data in frame[frame["unit"] == "ms"].groupby("suite"):
        modes, metrics = data["mode"].unique(), data["metric"].unique()
        size = (len(metrics) * (3 + 2 * data["case"].nunique()), 3.2 * len(modes))
        figure, axes = plt.subplots(
            len(modes), len(metrics), figsize=size, squeeze=False, layout="constrained"
        )
        colors = {provider: f"C{i}" for i, provider in enumerate(data["provider"].unique())}
        for i, mode in enumerate(modes):
            for j, metric in enumerate(metrics):
                chosen = data[(data["mode"] == mode) & (data["metric"] == metric)]
                if chosen.empty:
                    continue
                bars = chosen.pivot_table(
                    index="case", columns="provider", values=["median", "p20", "p80"], sort=False
                )
                errors = [bars["median"] - bars["p20"], bars["p80"] - bars["median"]]
                bars["median"].plot.bar(
                    ax=axes[i, j],
                    yerr=np.stack([e.clip(lower=0).T for e in errors], axis=1),
                    title=f"{mode}, {metric.replace('_', ' ')}",
                    xlabel="",
                    ylabel="ms",
                    logy=True,
                    rot=0,
                    width=0.8,
                    color=colors,
                    legend=False,
                )
        handles = [Patch(color=color, label=provider) for provider, color in colors.items()]
        figure.legend(handles=handles, loc="outside right upper")
        figure.suptitle(f"{suite} on {data['gpu'].iloc[0]}")
        figure.savefig(directory / f"{suite}.png", dpi=120)
        plt.close(figure)
