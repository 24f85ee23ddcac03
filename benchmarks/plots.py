"""The plots of the documents, which ``report.py`` draws from the figures under ``results/``.

A plot is one SVG with a background of its own: white, or dark where the reader prefers dark pages.
It holds a digest of what it was drawn from, so that ``report.py --check`` asks for the same
figures, not for the same matplotlib. The roofline has the kernels whose files are there.
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
from figures import NO_MEMORY, RESULTS, Figures, files_of, parsed
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
# Told apart by readers of all colour vision, on light and on dark (Okabe and Ito, 2008).
COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"]
GREY = "#8c959f"  # of what is there for comparison
LOOK: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "axes.facecolor": "none",
    "axes.prop_cycle": cycler(color=COLOURS),
    "axes.titlesize": 10,
    "figure.facecolor": PAPER,
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "",  # the same file each time
}
MODES = {"forward": "forward", "both": "forward and backward"}


def figure2(figures: Figures, figure: Figure) -> None:
    """Peers of Jagged Flash Attention by length, as the paper's Figure 2 draws them."""
    lengths = [64 * 2**n for n in range(7)]
    peers = {
        "padded": "dense attention, padded",
        "dense-flash": "dense flash attention, padded",
        "flash-attention-3": "FlashAttention-3, jagged",
    }
    for ax, (mode, title) in zip(figure.subplots(1, 2, sharey=True), MODES.items(), strict=True):
        for peer, label in peers.items():
            cells = (parsed(f"{peer} {mode} ×", f"length-{length}") for length in lengths)
            ax.plot(lengths, [_float(figures.find(x)) for x in cells], marker="o", label=label)
        ax.axhline(1, color=INK, linewidth=1, linestyle="--", label="ours")
        ax.set(title=title, xlabel="greatest length, rows", xscale="log", yscale="log")
        ax.set_xticks(lengths, [str(length) for length in lengths])
        ax.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
        ax.minorticks_off()
    figure.axes[0].set_ylabel("time, × ours")
    figure.axes[0].legend()


def table1(figures: Figures, figure: Figure) -> None:
    """The paper's Table 1: how much faster than its padded form each op is."""
    ax = figure.subplots()
    bars = {
        label: [figures.find(parsed(words, f"{op}-paper")) for op in OPS]
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
"""Kernels beside the roofline: provider, suite and case; of up to 1,024 rows if not said."""


def roofline(figures: Figures, figure: Figure) -> None:
    """What part of the roofline kernels reach: the floor's time over theirs."""
    reached: dict[str, list[Any]] = {}
    for label, words in ROOFLINE.items():
        cells = [parsed(f"{words} {mode} floor") for mode in MODES]
        found = [figures.find(cell) for cell in cells]
        if found != [None, None]:
            gpu = figures.gpu(cells[0].case)
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
"""Ways of ``end_to_end.py`` to pool a history that are compared by mean length, and colours."""


def end_to_end(figures: Figures, figure: Figure) -> None:
    """Samples a second of whole steps, over those of sum pooling, by mean length."""
    ax = figure.subplots()
    _by_mean(ax, figures, [name for name in SHOWN if name != "sum"], "throughput ×")
    ax.axhline(1, color=INK, linewidth=1, linestyle="--")
    ax.set_ylabel("samples/s, × those of sum pooling")


def end_to_end_memory(figures: Figures, figure: Figure) -> None:
    """Peak memory of whole steps, by mean length."""
    ax = figure.subplots()
    _by_mean(ax, figures, [*SHOWN], "peak_memory", 1024)
    ax.set_ylabel("peak memory of a step, tables included, GiB")


def end_to_end_gpus(figures: Figures, figure: Figure) -> None:
    """Samples a second by the number of GPUs, with the faster sharding of each."""
    means = [mean for mean in MEANS if f"mean-{mean}" in figures.cases]
    for ax, mean in zip(figure.subplots(1, len(means), squeeze=False)[0], means, strict=True):
        for name in ("sum", "linear-varlen", "ours"):
            speeds: dict[int, float] = {}
            for gpus, sharding in itertools.product(GPUS, SHARDINGS):
                case = step_case(mean, gpus, sharding)
                speed = figures.find(parsed(f"{name} throughput", case, "step"))
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
    """Time of a step by mean length, for each number of GPUs; dashed with a CUDA graph."""
    cases = {gpus: [step_case(mean, gpus, SHARDINGS[0]) for mean in MEANS] for gpus in GPUS}
    panels = [gpus for gpus in GPUS if {*cases[gpus]} & {*figures.cases}]
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, gpus in zip(axes, panels, strict=True):
        for name in GRAPH_PROVIDERS:
            times = [_float(figures.find(parsed(f"{name} time", x, "step"))) for x in cases[gpus]]
            eager = name.removesuffix("-graph")
            style = "-" if name == eager else "--"
            look = {"color": SHOWN[eager], "linestyle": style, "label": STEP_PROVIDERS[name]}
            ax.plot(MEANS, times, marker="o", **look)
        title = f"{gpus} GPU" + "s" * (gpus > 1)
        ax.set(title=title, xlabel="mean length of a history", xscale="log")
        measured = [n for n, x in zip(MEANS, cases[gpus], strict=True) if x in figures.cases]
        ax.set_xticks(measured, [f"{n:,}" for n in measured])
        ax.minorticks_off()
    axes[0].set(ylabel="time of a step, ms", ylim=0)  # of all panels
    axes[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))


def end_to_end_quality(figures: Figures, figure: Figure) -> None:
    """AUC and NE while one attention is trained, as peers and ours compute it."""
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
                _float(figures.find(parsed(f"{name} test {metric.lower()}", f"{data}-{epoch}")))
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
    """AUC by pooling, less that of recency pooling, with standard errors; all tuned alike."""
    logs = [log for log in LOGS if log in figures.cases]
    labels = [label.replace("`", "") for label in POOLINGS.values()]
    axes = figure.subplots(1, len(logs), sharey=True, squeeze=False)[0]
    for ax, log in zip(axes, logs, strict=True):
        mean, error = (
            [_float(figures.find(parsed(f"{name} test {metric}", log))) for name in POOLINGS]
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
        draw: puts axes into a figure.
        results: files that it is drawn from, without ``.csv``.
        size: in inches.
        title: of the file.
        ours: the provider that ratios are to.
        by_suite: whether cases are named with their suite, and a file that is not there is left
            out, not the plot.
    """

    draw: Callable[[Figures, Figure], None]
    results: tuple[str, ...]
    size: tuple[float, float]
    title: str
    ours: str = "ours"
    by_suite: bool = False

    @property
    def files(self) -> list[Path]:
        """Those that it is drawn from; none if it cannot be."""
        files = files_of(self.results, RESULTS)
        there = [path for path in files if path.exists()]
        return there if self.by_suite or there == files else []

    @property
    def figures(self) -> Figures:
        """What it is drawn from."""
        return Figures(self.files, self.ours, by_suite=self.by_suite)


SUITES = tuple(dict.fromkeys(parsed(words).case.split("/")[0] for words in ROOFLINE.values()))
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


def name_of(plot: Plot) -> str:
    """Of its file."""
    return plot.draw.__name__


def digest(plot: Plot) -> str:
    """Of a plot's figures, of this file, which draws it, and of its words."""
    files = (Path(__file__), *plot.files)
    words = repr((GRAPH_PROVIDERS, LOGS, MEANS, OPS, POOLINGS, STEP_PROVIDERS)).encode()
    return hashlib.sha256(b"\0".join([words, *(x.read_bytes() for x in files)])).hexdigest()


def drawn(plot: Plot) -> Figure:
    """A plot, with a line below that says on what and when its figures were measured."""
    with plt.rc_context(LOOK):
        figure = plt.figure(figsize=plot.size, layout="constrained")
        plot.draw(plot.figures, figure)
        stamp = "\n".join(textwrap.wrap(plot.figures.stamps(), 130))
        figure.supxlabel(stamp, fontsize=7, x=0.99, ha="right")
        plt.close(figure)
    return figure


def svg(plot: Plot) -> str:
    """A plot as the text of a file."""
    file = io.StringIO()
    of_file = {"Date": None, "Title": plot.title, "Description": digest(plot)}
    with plt.rc_context(LOOK):
        drawn(plot).savefig(file, format="svg", metadata=of_file)
    return file.getvalue().replace(" <metadata>", f" {STYLE} <metadata>", 1)


def _by_mean(
    ax: Axes, figures: Figures, providers: list[str], words: str, divisor: int = 1
) -> None:
    """Bars of a figure of steps, on one GPU, by the mean length of histories."""
    cases = [f"mean-{mean}" for mean in MEANS if f"mean-{mean}" in figures.cases]
    labels = [
        f"{int(case.removeprefix('mean-')):,} events,\n{figures.batch(case)} samples"
        + f",\n{figures.gpu(case)}" * bool(figures.gpu(case))
        for case in cases
    ]
    found, reasons = {}, {}
    providers = [name for name in providers if name in figures.providers]
    for name in providers:
        cells = [parsed(f"{name} {words}", case, "step") for case in cases]
        values, notes = map(figures.find, cells), map(figures.note, cells)
        label = STEP_PROVIDERS[name]
        found[label] = [None if x is None else x / divisor for x in values]
        reasons[label] = [note if note in ("", NO_MEMORY) else "fails" for note in notes]
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
    """A bar of each group above each label, with its figure at its end.

    Args:
        reasons: why there is no bar, where there is none; of upright ones alone.
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
