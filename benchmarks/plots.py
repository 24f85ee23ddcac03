"""Plots of the documents, drawn by ``report.py`` from the figures under ``results/``.

A plot is an SVG with a white background, or a dark background if the reader prefers dark pages. It
contains a digest of its figures and of this file, which ``report.py --check`` compares, so that the
version of matplotlib does not matter. The roofline plot has the kernels whose files exist.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import textwrap
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
from cycler import cycler
from end_to_end_cases import GPUS, SHARDINGS, step_case
from figures import OUT_OF_MEMORY, RESULTS, Figures, parse_query, result_files
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from specs import GRAPH_PROVIDERS, LOGS, MEANS, OPS, POOLINGS, STEP_PROVIDERS

matplotlib.use("Agg")

INK, PAPER = "#1f2328", "#ffffff"
DARK = {INK: "#e6edf3", PAPER: "#0d1117"}
STYLE = "".join(
    f'[style*="{what}: {light}"] {{ {what}: {dark} !important }}\n'
    for light, dark in DARK.items()
    for what in ("fill", "stroke")
)
STYLE = f"<style>\n@media (prefers-color-scheme: dark) {{\n{STYLE}}}\n</style>\n"
# Distinguishable with any color vision, on light and dark backgrounds (Okabe and Ito, 2008).
COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"]
GREY = "#8c959f"  # of the baseline
LOOK: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "axes.facecolor": "none",
    "axes.prop_cycle": cycler(color=COLOURS),
    "axes.titlesize": 10,
    "figure.facecolor": PAPER,
    "font.size": 9,
    "svg.fonttype": "none",  # text remains text
    "svg.hashsalt": "",  # deterministic files
}
MODES = {"forward": "forward", "both": "forward and backward"}


def figure2(figures: Figures, figure: Figure) -> None:
    """Draw times of peers of Jagged Flash Attention by length, as the paper's Figure 2."""
    lengths = [64 * 2**n for n in range(7)]
    peers = {
        "padded": "dense attention, padded",
        "dense-flash": "dense flash attention, padded",
        "flash-attention-3": "FlashAttention-3, jagged",
    }
    for ax, (mode, title) in zip(figure.subplots(1, 2, sharey=True), MODES.items(), strict=True):
        for peer, label in peers.items():
            queries = (parse_query(f"{peer} {mode} ×", f"length-{length}") for length in lengths)
            ax.plot(lengths, [_float(figures.find(x)) for x in queries], marker="o", label=label)
        ax.axhline(1, color=INK, linewidth=1, linestyle="--", label="ours")
        ax.set(title=title, xlabel="greatest length, rows", xscale="log", yscale="log")
        ax.set_xticks(lengths, [str(length) for length in lengths])
        ax.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
        ax.minorticks_off()
    figure.axes[0].set_ylabel("time, × ours")
    figure.axes[0].legend()


def table1(figures: Figures, figure: Figure) -> None:
    """Draw the speedup of each op over its padded form, as the paper's Table 1."""
    ax = figure.subplots()
    bars = {
        label: [figures.find(parse_query(words, f"{op}-paper")) for op in OPS]
        for label, words in (
            ("ours", "padded forward ×"),
            ("the paper", "paper forward time ratio"),
        )
    }
    _bars(ax, [op.replace("_", "_\n", 2) for op in OPS], bars)
    ax.set_ylabel("padded time / jagged time, forward")


TARGETS = "target attention, "
ROOFLINE = {
    **{
        f"{TARGETS}{label}": f"ours-kernel @target_attention_kernel/{case}"
        for case, label in {
            "rank-200": "200 rows",
            "rank-1k": "1,024 rows",
            "rank-2k": "2,048 rows",
            "rank-2k-8-targets": "2,048 rows, 8 targets",
            "rank-8k-16-targets": "8,192 rows, 16 targets",
            "rank-200-fp32": "200 rows, fp32",
            "rank-1k-fp32": "1,024 rows, fp32",
        }.items()
    },
    f"{TARGETS}rows of codes": "ours-codes @semantic_ids/rank-1k",
    f"{TARGETS}codes, 512 rows, one head": "ours-codes @semantic_ids/full-512",
    **{
        f"self-attention, {n} rows": f"ours @self_attention/self-{n}" for n in (64, 256, "1k", "4k")
    },
    **{op: f"ours @table1/{op}-large" for op in OPS},
    "selection, 64 events by score": "ours @select_events/events-200",
    "selection, 64 newest events": "ours @select_events/events-200-newest",
}
"""Queries of kernels: provider, suite and case; up to 1,024 rows by default."""


def roofline(figures: Figures, figure: Figure) -> None:
    """Draw the share of the roofline that kernels reach."""
    reached: dict[str, list[Any]] = {}
    for label, words in ROOFLINE.items():
        queries = [parse_query(f"{words} {mode} floor") for mode in MODES]
        found = [figures.find(query) for query in queries]
        if found != [None, None]:
            gpu = figures.gpu(queries[0].case)
            reached[label + f",\n{gpu}" * bool(gpu)] = [x and 100 * x for x in found]
    figure.set_figheight(1 + 0.36 * len(reached))
    ax = figure.subplots()
    modes = dict(zip(MODES.values(), map(list, zip(*reached.values(), strict=True)), strict=True))
    _bars(ax, list(reached), modes, horizontal=True)
    ax.set(xlabel="% of the roofline, in CUDA graphs", xlim=(0, 100))
    ax.margins(y=0.01)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    ax.invert_yaxis()


SHOWN = {
    "sum": GREY,
    "ours": COLOURS[0],
    "ours-single-ids": COLOURS[4],
    "linear-varlen": COLOURS[1],
    "fbgemm-sll": COLOURS[2],
    "padded": COLOURS[3],
    "padded-din": COLOURS[5],
}
"""Colors of the providers of ``end_to_end.py`` that are compared by mean length."""


def end_to_end(figures: Figures, figure: Figure) -> None:
    """Draw the training speed relative to sum pooling, by mean length."""
    ax = figure.subplots()
    _by_mean(ax, figures, [name for name in SHOWN if name != "sum"], "throughput ×")
    ax.axhline(1, color=INK, linewidth=1, linestyle="--")
    ax.set_ylabel("samples/s, × those of sum pooling")


def end_to_end_memory(figures: Figures, figure: Figure) -> None:
    """Draw the peak memory of training steps, by mean length."""
    ax = figure.subplots()
    _by_mean(ax, figures, [*SHOWN], "peak_memory", 1024)
    ax.set_ylabel("peak memory of a step, tables included, GiB")


def end_to_end_gpus(figures: Figures, figure: Figure) -> None:
    """Draw the training speed by number of GPUs, with the faster sharding of each."""
    means = [mean for mean in MEANS if f"mean-{mean}" in figures.cases]
    for ax, mean in zip(figure.subplots(1, len(means), squeeze=False)[0], means, strict=True):
        for name in ("sum", "linear-varlen", "ours"):
            speeds: dict[int, float] = {}
            for gpus, sharding in itertools.product(GPUS, SHARDINGS):
                case = step_case(mean, gpus, sharding)
                speed = figures.find(parse_query(f"{name} throughput", case, "step"))
                if speed is not None:
                    speeds[gpus] = max(speeds.get(gpus, 0), float(speed) / 1000)
            look = {"color": SHOWN[name], "label": STEP_PROVIDERS[name]}
            ax.plot([*speeds], [*speeds.values()], marker="o", **look)
        batch = figures.batch(f"mean-{mean}")
        ax.set(title=f"{mean:,} events, {batch} samples a GPU", xlabel="GPUs", ylim=0)
        ax.set_xticks([gpus for gpus in GPUS if gpus <= ax.get_xlim()[1]])
    figure.axes[0].set_ylabel("thousand samples/s")
    figure.axes[0].legend()


def end_to_end_graphs(figures: Figures, figure: Figure) -> None:
    """Draw the time of a step by mean length and number of GPUs; dashed with a CUDA graph."""
    cases = {gpus: [step_case(mean, gpus, SHARDINGS[0]) for mean in MEANS] for gpus in GPUS}
    panels = [gpus for gpus in GPUS if {*cases[gpus]} & {*figures.cases}]
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, gpus in zip(axes, panels, strict=True):
        for name in GRAPH_PROVIDERS:
            times = [
                _float(figures.find(parse_query(f"{name} time", x, "step"))) for x in cases[gpus]
            ]
            eager = name.removesuffix("-graph")
            style = "-" if name == eager else "--"
            look = {"color": SHOWN[eager], "linestyle": style, "label": STEP_PROVIDERS[name]}
            ax.plot(MEANS, times, marker="o", **look)
        title = f"{gpus} GPU" + "s" * (gpus > 1)
        ax.set(title=title, xlabel="mean length of a history", xscale="log")
        measured = [n for n, x in zip(MEANS, cases[gpus], strict=True) if x in figures.cases]
        ax.set_xticks(measured, [f"{n:,}" for n in measured])
        ax.minorticks_off()
    axes[0].set(ylabel="time of a step, ms", ylim=0)  # shared by all panels
    axes[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))


def end_to_end_quality(figures: Figures, figure: Figure) -> None:
    """Draw AUC and NE during training of the same attention by peers and ours."""
    epochs: dict[str, list[str]] = {}
    for case in figures.cases:
        data, _, epoch = case.rpartition("-")
        epochs.setdefault(data, []).append(epoch)
    rows = [(data, metric) for data in epochs for metric in ("AUC", "NE")]
    peers = {name: STEP_PROVIDERS[name] for name in ("padded", "linear-varlen", "ours")}
    figure.set_figheight(1 + 2.2 * len(rows))
    for axes, (data, metric) in zip(
        figure.subplots(len(rows), 2, squeeze=False), rows, strict=True
    ):
        x = [float(epoch) for epoch in epochs[data]]
        curves = {
            name: [
                _float(
                    figures.find(parse_query(f"{name} test {metric.lower()}", f"{data}-{epoch}"))
                )
                for epoch in epochs[data]
            ]
            for name in peers
        }
        for (name, label), marker in zip(peers.items(), "so^", strict=True):
            apart = [a - b for a, b in zip(curves[name], curves["padded"], strict=True)]
            axes[0].plot(x, curves[name], marker=marker, fillstyle="none", label=label)
            axes[1].plot(x, apart, marker=marker, fillstyle="none")
        axes[0].set(title=LOGS[data], ylabel=f"test {metric}", xlabel="epochs")
        axes[1].set(title="difference to padded SDPA", ylabel=metric, xlabel="epochs")
        axes[1].ticklabel_format(axis="y", scilimits=(-3, 3))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)


def quality(figures: Figures, figure: Figure) -> None:
    """Draw the difference of the AUC of each pooling to recency pooling, with standard errors."""
    logs = [log for log in LOGS if log in figures.cases]
    labels = [label.replace("`", "") for label in POOLINGS.values()]
    axes = figure.subplots(1, len(logs), sharey=True, squeeze=False)[0]
    for ax, log in zip(axes, logs, strict=True):
        mean, error = (
            [_float(figures.find(parse_query(f"{name} test {metric}", log))) for name in POOLINGS]
            for metric in ("ahead", "ahead_se")
        )
        ax.errorbar(mean, labels, xerr=error, fmt="o", markersize=4, capsize=2)
        ax.axvline(0, color=INK, linewidth=1, linestyle="--")
        ax.set(title=LOGS[log], xlabel="AUC, difference to recency pooling")
        ax.grid(axis="both", color=INK, alpha=0.15)
    figure.axes[0].invert_yaxis()


class Plot(NamedTuple):
    """A plot of the documents.

    Attributes:
        draw: adds axes to a figure.
        results: CSV files without ``.csv``.
        size: size in inches.
        title: title of the file.
        ours: the provider in the denominator of ratios.
        by_suite: whether cases are named with their suite. Then missing files are skipped;
            otherwise a missing file means no plot.
    """

    draw: Callable[[Figures, Figure], None]
    results: tuple[str, ...]
    size: tuple[float, float]
    title: str
    ours: str = "ours"
    by_suite: bool = False

    @property
    def files(self) -> list[Path]:
        """The CSV files of the plot; empty if it cannot be drawn."""
        files = result_files(self.results, RESULTS)
        existing = [path for path in files if path.exists()]
        return existing if self.by_suite or existing == files else []

    @property
    def figures(self) -> Figures:
        """The figures of the plot."""
        return Figures(self.files, self.ours, by_suite=self.by_suite)


SUITES = tuple(dict.fromkeys(parse_query(words).case.split("/")[0] for words in ROOFLINE.values()))
PLOTS = (
    Plot(end_to_end, ("end_to_end",), (10, 4), "Training speed of a whole model", "sum"),
    Plot(end_to_end_gpus, ("end_to_end_gpus",), (10, 3), "Training speed by number of GPUs"),
    Plot(end_to_end_graphs, ("end_to_end_graphs",), (10, 3.5), "Step time with CUDA graphs"),
    Plot(end_to_end_memory, ("end_to_end",), (10, 4), "Memory of a whole model"),
    Plot(
        end_to_end_quality, ("end_to_end_quality",), (9, 6), "One function, computed in three ways"
    ),
    Plot(quality, ("quality",), (10, 3), "AUC by pooling, all tuned alike"),
    Plot(figure2, ("figure2",), (9, 4), "Jagged Flash Attention by length"),
    Plot(table1, ("table1", "paper"), (9, 4), "The six feature-interaction ops"),
    Plot(roofline, SUITES, (9, 7), "Share of the roofline", by_suite=True),
)


def plot_name(plot: Plot) -> str:
    """Return the name of the file of a plot, without ``.svg``."""
    return plot.draw.__name__


def digest(plot: Plot) -> str:
    """Return a digest of the figures and labels of a plot, and of this file."""
    files = (Path(__file__), *plot.files)
    words = repr((GRAPH_PROVIDERS, LOGS, MEANS, OPS, POOLINGS, STEP_PROVIDERS)).encode()
    return hashlib.sha256(b"\0".join([words, *(x.read_bytes() for x in files)])).hexdigest()


def drawn(plot: Plot) -> Figure:
    """Draw a plot, with hardware, versions and dates of its figures below."""
    with plt.rc_context(LOOK):
        figure = plt.figure(figsize=plot.size, layout="constrained")
        plot.draw(plot.figures, figure)
        stamp = "\n".join(textwrap.wrap(plot.figures.stamps(), 130))
        figure.supxlabel(stamp, fontsize=7, x=0.99, ha="right")
        plt.close(figure)
    return figure


def svg(plot: Plot) -> str:
    """Return a plot as SVG text."""
    file = io.StringIO()
    metadata = {"Date": None, "Title": plot.title, "Description": digest(plot)}
    with plt.rc_context(LOOK):
        drawn(plot).savefig(file, format="svg", metadata=metadata)
    return file.getvalue().replace(" <metadata>", f" {STYLE} <metadata>", 1)


def _by_mean(
    ax: Axes, figures: Figures, providers: list[str], words: str, divisor: int = 1
) -> None:
    """Draw bars of a figure of training steps on one GPU, by mean length of histories."""
    cases = [f"mean-{mean}" for mean in MEANS if f"mean-{mean}" in figures.cases]
    labels = [
        f"{int(case.removeprefix('mean-')):,} events,\n{figures.batch(case)} samples"
        + f",\n{figures.gpu(case)}" * bool(figures.gpu(case))
        for case in cases
    ]
    found, reasons = {}, {}
    providers = [name for name in providers if name in figures.providers]
    for name in providers:
        queries = [parse_query(f"{name} {words}", case, "step") for case in cases]
        values, notes = map(figures.find, queries), map(figures.note, queries)
        label = STEP_PROVIDERS[name]
        found[label] = [None if x is None else x / divisor for x in values]
        reasons[label] = [note if note in ("", OUT_OF_MEMORY) else "fails" for note in notes]
    ax.set_prop_cycle(color=[SHOWN[name] for name in providers])
    _bars(ax, labels, found, reasons=reasons)
    ax.set(xlabel="mean length of a history, samples of a step", xlim=(-0.5, len(cases) - 0.5))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _bars(
    ax: Axes,
    labels: list[str],
    groups: dict[str, list],
    *,
    horizontal: bool = False,
    reasons: dict[str, list[str]] | None = None,
) -> None:
    """Draw a bar of each group at each label, with its value at its end.

    Args:
        reasons: text in place of missing bars, if they are vertical.
    """
    width = 0.8 / len(groups)
    for n, (name, values) in enumerate(groups.items()):
        at = [i + (n - (len(groups) - 1) / 2) * width for i in range(len(labels))]
        heights = [_float(x) for x in values]
        bars = (ax.barh if horizontal else ax.bar)(at, heights, width * 0.9, label=name)
        texts = ["" if x is None else f"{x:.2g}" if x < 10 else f"{x:.0f}" for x in values]
        ax.bar_label(bars, texts, fontsize=7, padding=1)
        for place, value, reason in zip(
            at, values, (reasons or {}).get(name, [""] * len(at)), strict=True
        ):
            if value is None:
                ax.text(place, 0, f" {reason}", fontsize=7, rotation=90, ha="center", va="bottom")
    (ax.set_yticks if horizontal else ax.set_xticks)(range(len(labels)), labels)
    ax.legend()


def _float(x: Decimal | None) -> float:
    return math.nan if x is None else float(x)
