"""The table and the pictures of ``run.py``, from its rows of figures."""

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.table import Table

matplotlib.use("Agg")


def make_table(rows: list[dict]) -> Table:
    """One line per mode and provider of a case: figures, ratio to the best peer, part of the floor.

    A ratio over 1 is faster than the best peer; the best peer's own is 1.
    """
    figures = {(r["mode"], r["provider"], r["metric"]): r["median"] for r in rows}
    heads = {
        "time": ("eager ms", "× peer", "of floor"),
        "graph_time": ("graph ms", "× peer", "of floor"),
        "kernel_time": ("kernels ms", "× peer", "of floor"),
        "host_time": ("host ms", "× peer"),  # the floor is the GPU's
        "host_time_one_thread": ("one thread ms", "× peer"),
    }
    metrics = [m for m in heads if any(metric == m for _, _, metric in figures)]
    table = Table("mode", "provider", box=None, pad_edge=False)
    for column in [head for m in metrics for head in heads[m]] + ["MiB"]:
        table.add_column(column, justify="right")
    modes = list(dict.fromkeys(r["mode"] for r in rows))
    lines = dict.fromkeys((r["mode"], r["provider"]) for r in rows)
    for mode, provider in sorted(lines, key=lambda line: modes.index(line[0])):
        cells = []
        for metric in metrics:
            peers = [
                its
                for (its_mode, name, its_metric), its in figures.items()
                if (its_mode, its_metric) == (mode, metric)
                and not name.startswith(("ours", "floor"))
            ]
            figure = figures.get((mode, provider, metric))
            own = ["–"] * len(heads[metric])
            if figure is not None:
                ratio = f"{min(peers) / figure:.2f}" if peers and provider != "floor" else "–"
                of_floor = f"{figures[mode, 'floor', 'time'] / figure:.0%}"
                own = [f"{figure:.4g}", ratio, of_floor][: len(own)]
            cells += own
        memory = figures.get((mode, provider, "peak_memory"))
        table.add_row(mode, provider, *cells, "–" if memory is None else f"{memory:.0f}")
    return table


def with_memory(frame: pd.DataFrame) -> pd.DataFrame:
    """Times, and as ``memory`` the MiB of the operands and of what a call takes on top of them.

    One without the other would favour those whose operands are padded before the call.
    """
    quantiles = ["median", "p20", "p80"]
    parts = frame[frame["unit"] == "MiB"].assign(metric="memory")
    labels = [column for column in frame.columns if column not in quantiles]
    memory = parts.groupby(labels, as_index=False, sort=False, dropna=False)[quantiles].sum()
    return pd.concat([frame[frame["unit"] == "ms"], memory])


def plot(frame: pd.DataFrame, directory: Path, sweeps: dict[str, str | None]) -> None:
    """Draw ``directory/<suite>.png``: time and memory by case and provider, a row per mode.

    A suite that ``sweeps`` a column gets lines over it, the others bars. Cases whose names differ
    by more than numbers are sweeps of their own, in rows of their own.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for suite, data in with_memory(frame).groupby("suite"):
        sweep = sweeps[suite]
        names = data["case"].str.replace(r"-[\d.]+(?=-|$)", "", regex=True)
        if sweep and names.nunique() > 1:
            data = data.assign(mode=names + ", " + data["mode"])
        modes, metrics = data["mode"].unique(), data["metric"].unique()
        width = 6 if sweep else 3 + 2 * data["case"].nunique()
        figure, axes = plt.subplots(
            len(modes),
            len(metrics),
            figsize=(len(metrics) * width, 3.2 * len(modes)),
            squeeze=False,
            layout="constrained",
        )
        colors = _colors(data)
        style = {"kind": "bar", "width": 0.8, "rot": 0}
        if sweep:
            style = {"kind": "line", "marker": ".", "logx": True}
        for i, mode in enumerate(modes):
            for j, metric in enumerate(metrics):
                chosen = data[(data["mode"] == mode) & (data["metric"] == metric)]
                if chosen.empty:
                    continue
                table = chosen.pivot_table(
                    index=sweep or "case",
                    columns="provider",
                    values=["median", "p20", "p80"],
                    sort=bool(sweep),
                )
                errors = [table["median"] - table["p20"], table["p80"] - table["median"]]
                table["median"].plot(
                    ax=axes[i, j],
                    yerr=np.stack([e.clip(lower=0).T for e in errors], axis=1),
                    title=f"{mode}, {metric.replace('_', ' ')}",
                    xlabel=sweep or "",
                    ylabel=chosen["unit"].iloc[0],
                    logy=True,
                    color=colors,
                    legend=False,
                    **style,
                )
                if sweep:
                    axes[i, j].minorticks_off()
                    axes[i, j].set_xticks(table.index, [f"{value:.4g}" for value in table.index])
        _finish(figure, colors, f"{suite} on {data['gpu'].iloc[0]}", directory / f"{suite}.png")


def plot_roofline(
    frame: pd.DataFrame, directory: Path, bandwidth: float, peak_flops: float
) -> None:
    """Draw ``directory/roofline.png``: FLOP/s over FLOPs per byte, a row of axes per suite.

    Both count what must be done at least, so that a provider that does more lies lower. The roof is
    that of the floor: ``bandwidth`` in bytes per second, and ``peak_flops``.
    """
    timed = frame[(frame["unit"] == "ms") & (frame["provider"] != "floor")]
    if timed.empty:
        return
    directory.mkdir(parents=True, exist_ok=True)
    suites, modes = timed["suite"].unique(), timed["mode"].unique()
    figure, axes = plt.subplots(
        len(suites),
        len(modes),
        figsize=(4.5 * len(modes), 3.2 * len(suites)),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    intensity = timed["flops"] / timed["bytes"]
    x = np.geomspace(intensity.min() / 2, intensity.max() * 2, 100)
    colors = _colors(timed)
    for i, suite in enumerate(suites):
        for j, mode in enumerate(modes):
            axes[i, j].loglog(x, np.minimum(x * bandwidth, peak_flops) / 1e12, color="black")
            axes[i, j].set(title=f"{suite}, {mode}", xlabel="FLOPs per byte", ylabel="TFLOP/s")
            chosen = timed[(timed["suite"] == suite) & (timed["mode"] == mode)]
            best = chosen.groupby(["provider", "case"], sort=False).min(numeric_only=True)
            for provider, points in best.groupby("provider"):
                flops_per_s = points["flops"] / (points["median"] / 1e3)
                axes[i, j].scatter(
                    points["flops"] / points["bytes"],
                    flops_per_s / 1e12,
                    color=colors[provider],
                    s=12,
                )
    _finish(figure, colors, f"roofline of {timed['gpu'].iloc[0]}", directory / "roofline.png")


def _colors(data: pd.DataFrame) -> dict[str, tuple]:
    providers = data["provider"].unique()
    colors = plt.get_cmap("tab10").colors + plt.get_cmap("Dark2").colors
    if len(providers) > len(colors):
        colors = plt.get_cmap("turbo")(np.linspace(0, 1, len(providers)))
    return dict(zip(providers, colors, strict=False))


def _finish(figure: Figure, colors: dict[str, str], title: str, path: Path) -> None:
    handles = [Patch(color=color, label=provider) for provider, color in colors.items()]
    figure.legend(handles=handles, loc="outside right upper")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
