"""Draw the plots of the docs from the figures under ``results/``.

    python benchmarks/report.py            # into docs/plots/
    python benchmarks/report.py --check    # change nothing; exit with 1 if one is stale

A plot is one SVG for light and dark pages: its ink follows the reader's colour scheme. It holds a
digest of what it was drawn from, so that ``--check`` asks for the same figures, not for the same
matplotlib. A document marks its place by two comments, ``<!-- plot: NAME -->`` and ``<!-- end of
plot -->``. While a file of its figures is not there, it is not drawn, and its place stays empty.
The roofline has the kernels whose files are there.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parent))

import model_specs
from end_to_end_cases import GPUS, SHARDINGS, step_case
from model_specs import LOGS, MEANS, POOLINGS, SEARCH, STEP_PROVIDERS
from table_specs import OPS, Cell
from tables import DOCUMENTS, NO_MEMORY, RESULTS, ROOT, Figures, files_of, refill, say

matplotlib.use("Agg")

PLOTS_OF_DOCS = ROOT / "docs" / "plots"
INK = "#010203"  # of what is drawn as text and axes; the reader's scheme decides instead
STYLE = """<style>
:root { --ink: #1f2328; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; } }
</style>
"""
# Told apart by readers of all colour vision, on light and on dark (Okabe and Ito, 2008).
COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"]
GREY = "#8c959f"  # of what is there for comparison
LOOK: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "axes.prop_cycle": cycler(color=COLOURS),
    "axes.titlesize": 10,
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
            ratios = [
                figures.find(f"length-{length}", Cell(peer, mode, unit="× ours"))
                for length in lengths
            ]
            ax.plot(lengths, [_number(x) for x in ratios], marker="o", label=label)
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
    cases = [f"{op}-paper" for op in OPS]
    ours = [figures.find(case, Cell("padded", "forward", unit="× ours")) for case in cases]
    papers = Cell("paper", "forward", "time", "padded over jagged")
    _bars(
        ax,
        [op.replace("_", "_\n", 2) for op in OPS],
        {"ours": ours, "the paper": [figures.find(case, papers) for case in cases]},
    )
    ax.set_ylabel("padded time / jagged time, forward")


TARGETS = "target attention, "
ROOFLINE = {
    **{
        f"{TARGETS}{label}": ("target_attention_kernel", case, "ours-kernel")
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
    f"{TARGETS}SiLU": ("target_attention_scores", "rank-1k-silu", "ours"),
    f"{TARGETS}sigmoid": ("target_attention_scores", "rank-1k-sigmoid", "ours"),
    f"{TARGETS}rows by index": ("target_attention_rows", "rank-1k-x1", "ours-by-index"),
    f"{TARGETS}4 places a row": ("target_attention_rows", "rank-1k-x4", "ours-by-index"),
    f"{TARGETS}rows of digits": ("semantic_ids", "rank-1k", "ours-codes"),
    f"{TARGETS}digits, 512 rows, one head": ("semantic_ids", "full-512", "ours-codes"),
    **{
        f"self-attention, {case.removeprefix('self-')} rows": ("self_attention", case, "ours")
        for case in ("self-64", "self-256", "self-1k", "self-4k")
    },
    **{op: ("table1", f"{op}-large", "ours") for op in OPS},
    "selection, 64 events by score": ("select_events", "events-200", "ours"),
    "selection, 64 newest events": ("select_events", "events-200-newest", "ours"),
}
"""Kernels beside the roofline: suite, case and provider; of up to 1,024 rows if not said."""


def roofline(figures: Figures, figure: Figure) -> None:
    """What part of the roofline kernels reach: the floor's time over theirs."""
    reached: dict[str, list[Any]] = {}
    for label, (suite, case, provider) in ROOFLINE.items():
        found = [
            _times(figures.find(f"{suite}/{case}", Cell(provider, mode, unit="of floor")), 100)
            for mode in MODES
        ]
        if found != [None, None]:
            gpu = figures.gpu(f"{suite}/{case}")
            reached[label + f",\n{gpu}" * bool(gpu)] = found
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
    "ours-single-lookup": COLOURS[4],
    "linear-varlen": COLOURS[1],
    "fbgemm-sll": COLOURS[2],
    "padded": COLOURS[3],
    "padded-din": COLOURS[5],
}
"""Ways of ``end_to_end.py`` to pool a history that are compared by mean length, and colours."""


def end_to_end(figures: Figures, figure: Figure) -> None:
    """Samples a second of whole steps, over those of sum pooling, by mean length."""
    ax = figure.subplots()
    _by_mean(ax, figures, [name for name in SHOWN if name != "sum"], "throughput", "× ours")
    ax.axhline(1, color=INK, linewidth=1, linestyle="--")
    ax.set_ylabel("samples/s, × those of sum pooling")


def end_to_end_memory(figures: Figures, figure: Figure) -> None:
    """Peak memory of whole steps, by mean length."""
    ax = figure.subplots()
    _by_mean(ax, figures, [*SHOWN], "peak_memory", "MiB", 1024)
    ax.set_ylabel("peak memory of a step, tables included, GiB")


def end_to_end_gpus(figures: Figures, figure: Figure) -> None:
    """Samples a second by the number of GPUs, with the faster sharding of each."""
    means = [mean for mean in MEANS if f"mean-{mean}" in figures.cases]
    for ax, mean in zip(figure.subplots(1, len(means), squeeze=False)[0], means, strict=True):
        for name in ("sum", "linear-varlen", "ours"):
            cell, speeds = Cell(name, "step", "throughput", "samples/s"), {}
            for gpus, sharding in itertools.product(GPUS, SHARDINGS):
                speed = figures.find(step_case(mean, gpus, sharding), cell)
                if speed is not None:
                    speeds[gpus] = max(speeds.get(gpus, 0), float(speed) / 1000)
            ax.plot(
                [*speeds], [*speeds.values()], marker="o", color=SHOWN[name],
                label=STEP_PROVIDERS[name],
            )  # fmt: skip
        batch = figures.batch(f"mean-{mean}")
        ax.set(title=f"{mean:,} events, {batch} samples a GPU", xlabel="GPUs", ylim=0)
        ax.set_xticks([gpus for gpus in GPUS if gpus <= ax.get_xlim()[1]])
    figure.axes[0].set_ylabel("thousand samples/s")
    figure.axes[0].legend()


def end_to_end_largest(figures: Figures, figure: Figure) -> None:
    """The longest histories, and the largest batches, in one GPU's memory."""
    asked = {
        "longest_history": ("rows", "longest history that is trained, events"),
        "largest_batch": ("samples", "largest batch that is trained, samples"),
    }
    providers = [
        name
        for name in STEP_PROVIDERS
        if figures.find(SEARCH, Cell(name, "step", "longest_history", "rows"))
    ]
    for ax, (metric, (unit, label)) in zip(figure.subplots(1, 2), asked.items(), strict=True):
        found = [figures.find(SEARCH, Cell(name, "step", metric, unit)) for name in providers]
        bars = ax.barh([STEP_PROVIDERS[name] for name in providers], [_number(x) for x in found])
        ax.bar_label(bars, ["" if x is None else f"{int(x):,}" for x in found], padding=2)
        ax.invert_yaxis()
        ax.set_xlabel(label)
        ax.margins(x=0.15)
    figure.axes[1].set_yticklabels([])


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
                _number(figures.find(f"{data}-{epoch}", Cell(name, "test", metric.lower(), metric)))
                for epoch in epochs[data]
            ]
            for name in peers
        }
        for (name, label), marker in zip(peers.items(), "so^", strict=True):
            apart = [a - b for a, b in zip(curves[name], curves["padded"], strict=True)]
            axes[0].plot(x, curves[name], marker=marker, fillstyle="none", label=label)
            axes[1].plot(x, apart, marker=marker, fillstyle="none")
        axes[0].set(title=LOGS[data], ylabel=f"{metric} of the test", xlabel="epochs")
        axes[1].set(title="less that of padded SDPA", ylabel=metric, xlabel="epochs")
        axes[1].ticklabel_format(axis="y", scilimits=(-3, 3))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)


def quality(figures: Figures, figure: Figure) -> None:
    """AUC by pooling, less that of recency pooling, with standard errors; all tuned alike."""
    logs = [log for log in LOGS if log in figures.cases]
    labels = [label.replace("`", "") for label in POOLINGS.values()]
    axes = figure.subplots(1, len(logs), sharey=True, squeeze=False)[0]
    for ax, log in zip(axes, logs, strict=True):
        mean, error = (
            [_number(figures.find(log, Cell(name, "test", metric, "AUC"))) for name in POOLINGS]
            for metric in ("ahead", "ahead_se")
        )
        ax.errorbar(mean, labels, xerr=error, fmt="o", markersize=4, capsize=2)
        ax.axvline(0, color=INK, linewidth=1, linestyle="--")
        ax.set(title=LOGS[log], xlabel="AUC less that of recency pooling")
        ax.grid(axis="both", color=INK, alpha=0.15)
    figure.axes[0].invert_yaxis()


class Plot(NamedTuple):
    """A plot of the docs.

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


PLOTS = (
    Plot(end_to_end, ("end_to_end",), (10, 4), "Training speed of a whole model", "sum"),
    Plot(end_to_end_gpus, ("end_to_end_gpus",), (10, 3), "Training speed by number of GPUs"),
    Plot(end_to_end_memory, ("end_to_end",), (10, 4), "Memory of a whole model"),
    Plot(end_to_end_largest, ("end_to_end_memory",), (10, 2.5), "What fits in one GPU's memory"),
    Plot(
        end_to_end_quality, ("end_to_end_quality",), (9, 6), "One function, computed in three ways"
    ),
    Plot(quality, ("quality",), (10, 3), "AUC by pooling, all tuned alike"),
    Plot(figure2, ("figure2",), (9, 4), "Jagged Flash Attention by length"),
    Plot(table1, ("table1", "paper"), (9, 4), "The six feature-interaction ops"),
    Plot(
        roofline,
        tuple(dict.fromkeys(suite for suite, *_ in ROOFLINE.values())),
        (9, 7),
        "How near the roofline",
        by_suite=True,
    ),
)


def name_of(plot: Plot) -> str:
    """Of its file."""
    return plot.draw.__name__


def figures_of(plot: Plot) -> Figures:
    """What a plot is drawn from."""
    return Figures(plot.files, plot.ours, by_suite=plot.by_suite)


def digest(plot: Plot) -> str:
    """Of a plot's figures, of this file, which draws it, and of its words."""
    files = (Path(__file__), Path(model_specs.__file__), *plot.files)
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def drawn(plot: Plot) -> Figure:
    """A plot, with a line below that says on what and when its figures were measured."""
    with plt.rc_context(LOOK):
        figure = plt.figure(figsize=plot.size, layout="constrained")
        figures = figures_of(plot)
        plot.draw(figures, figure)
        stamp = "\n".join(textwrap.wrap(figures.stamps(), 130))
        figure.supxlabel(stamp, fontsize=7, x=0.99, ha="right")
        plt.close(figure)
    return figure


def svg(plot: Plot) -> str:
    """A plot as the text of a file."""
    file = io.StringIO()
    with plt.rc_context(LOOK):
        drawn(plot).savefig(
            file, format="svg", transparent=True,
            metadata={"Date": None, "Title": plot.title, "Description": digest(plot)},
        )  # fmt: skip
    text = file.getvalue().replace(INK, "var(--ink)")
    return text.replace(" <metadata>", f" {STYLE} <metadata>", 1)


def main(
    argv: list[str] | None = None,
    plots: Path = PLOTS_OF_DOCS,
    documents: Sequence[Path] = DOCUMENTS,
) -> int:
    """Draw all, and show them in ``documents``, or check; 1 if something checked is stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a plot is stale")
    check = parser.parse_args(argv).check
    there = {name_of(plot): plot for plot in PLOTS if plot.files}
    stale = []
    for name, plot in there.items():
        path = plots / f"{name}.svg"
        if not path.exists() or digest(plot) not in path.read_text():
            stale.append(path)
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(svg(plot))

    def image(name: str, document: Path) -> str:
        link = os.path.relpath(plots / f"{name}.svg", document.parent)
        return f"![{there[name].title}]({link})" if name in there else ""

    return say([*stale, *refill(documents, "plot", image, check=check)], "report.py", check=check)


def _by_mean(
    ax: Axes,
    figures: Figures,
    providers: list[str],
    metric: str,
    unit: str,
    divisor: int = 1,
) -> None:
    """Bars of a figure of steps, on one GPU, by the mean length of histories."""
    cases = [f"mean-{mean}" for mean in MEANS if f"mean-{mean}" in figures.cases]
    labels = [
        f"{int(case.removeprefix('mean-')):,} events,\n{figures.batch(case)} samples"
        + f",\n{figures.gpu(case)}" * bool(figures.gpu(case))
        for case in cases
    ]
    found, reasons = {}, {}
    for name in providers:
        cell, label = Cell(name, "step", metric, unit), STEP_PROVIDERS[name]
        found[label] = [_parts(figures.find(case, cell), divisor) for case in cases]
        notes = [figures.note(case, cell) for case in cases]
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
        heights = [_number(x) for x in values]
        bars = (ax.barh if horizontal else ax.bar)(at, heights, width * 0.9, label=name)
        texts = ["" if x is None else f"{float(x):.3g}" for x in values]
        ax.bar_label(bars, texts, fontsize=7, padding=1)
        for place, value, reason in zip(
            at, values, (reasons or {}).get(name, [""] * len(at)), strict=True
        ):
            if value is None:
                ax.text(place, 0, f" {reason}", fontsize=7, rotation=90, ha="center", va="bottom")
    (ax.set_yticks if horizontal else ax.set_xticks)(range(len(labels)), labels)
    ax.legend()


def _number(x) -> float:
    return float("nan") if x is None else float(x)


def _times(x, factor: int):
    return None if x is None else x * factor


def _parts(x, divisor: int):
    return None if x is None else x / divisor


if __name__ == "__main__":
    raise SystemExit(main())
