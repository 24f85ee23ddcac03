"""Draw the plots of the docs from the figures under ``results/``.

    python benchmarks/report.py            # into docs/plots/
    python benchmarks/report.py --check    # change nothing; exit with 1 if one is stale

A plot is one SVG for light and dark pages: its ink follows the reader's colour scheme. It holds a
digest of what it was drawn from, so that ``--check`` asks for the same figures, not for the same
matplotlib.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parent))

from table_specs import OPS, Cell
from tables import RESULTS, ROOT, Figures

matplotlib.use("Agg")

PLOTS_OF_DOCS = ROOT / "docs" / "plots"
INK = "#010203"  # of what is drawn as text and axes; the reader's scheme decides instead
STYLE = """<style>
:root { --ink: #1f2328; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; } }
</style>
"""
# Told apart by readers of all colour vision, on light and on dark (Okabe and Ito, 2008).
COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9"]
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


def roofline(figures: Figures, figure: Figure) -> None:
    """What part of the roofline kernels reach: the floor's time over theirs."""
    ax = figure.subplots()
    shapes = {
        "rank-200": "200 rows",
        "rank-1k": "1,024 rows",
        "rank-2k": "2,048 rows",
        "rank-2k-8-targets": "2,048 rows, 8 targets",
        "rank-8k-16-targets": "8,192 rows, 16 targets",
        "rank-200-fp32": "200 rows, fp32",
        "rank-1k-fp32": "1,024 rows, fp32",
    }
    kernels = {
        **{f"target attention, {label}": (case, "ours-kernel") for case, label in shapes.items()},
        **{
            f"self-attention, {case.removeprefix('self-')} rows": (case, "ours")
            for case in ("self-64", "self-256", "self-1k", "self-4k")
        },
        **{op: (f"{op}-large", "ours") for op in OPS},
    }
    reached = {
        title: [
            _times(figures.find(case, Cell(provider, mode, unit="of floor")), 100)
            for case, provider in kernels.values()
        ]
        for mode, title in MODES.items()
    }
    _bars(ax, list(kernels), reached, horizontal=True)
    ax.set(xlabel="% of the roofline, in CUDA graphs", xlim=(0, 100))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    ax.invert_yaxis()


def dlrm_step(figures: Figures, figure: Figure) -> None:
    """A step of training of a whole DLRM, by what pools its history."""
    providers = {
        "sum": "sum pooling",
        "attention": "ours",
        "single-lookup": "ours, one lookup",
        "linear+torch-varlen": "linear +\nFlashAttention-2",
        "linear+padded-sdpa": "padded SDPA",
    }
    for ax, mean in zip(figure.subplots(1, 2), (200, 1000), strict=True):
        times = {
            label: [
                figures.find(f"mean-{mean}", Cell(provider, "step", metric))
                for provider in providers
            ]
            for label, metric in (("step", "time"), ("GPU busy", "gpu_busy"))
        }
        _bars(ax, list(providers.values()), times)
        ax.set(title=f"{mean:,} rows a sample in the mean", ylabel="ms a step")
        ax.tick_params(axis="x", labelrotation=30)


def pooling(figures: Figures, figure: Figure) -> None:
    """AUC of the example's test set, by what pools the history."""
    ax = figure.subplots()
    cases = {"made-up": "made up"} | {
        f"movielens-seed-{n}": f"MovieLens-1M,\nseed {n}" for n in range(3)
    }
    for name, marker in zip(("sum", "mean", "recency", "attention"), "os^D", strict=True):
        found = [figures.find(case, Cell(name, "test", "auc", "AUC")) for case in cases]
        ax.plot(list(cases.values()), [_number(x) for x in found], marker, label=name)
    ax.set(ylabel="AUC")
    ax.grid(axis="y", color=INK, alpha=0.15)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))


class Plot(NamedTuple):
    """A plot of the docs.

    Attributes:
        draw: puts axes into a figure.
        results: files that it is drawn from, without ``.csv``.
        size: in inches.
        title: of the file.
    """

    draw: Callable[[Figures, Figure], None]
    results: tuple[str, ...]
    size: tuple[float, float]
    title: str


PLOTS = (
    Plot(pooling, ("train_dlrm",), (8, 4), "AUC by pooling"),
    Plot(dlrm_step, ("dlrm_step",), (10, 4.5), "A step of a whole model"),
    Plot(figure2, ("figure2",), (9, 4), "Jagged Flash Attention by length"),
    Plot(table1, ("table1", "paper"), (9, 4), "The six feature-interaction ops"),
    Plot(
        roofline,
        ("target_attention_kernel", "self_attention", "table1"),
        (9, 7),
        "How near the roofline",
    ),
)


def name_of(plot: Plot) -> str:
    """Of its file."""
    return plot.draw.__name__


def figures_of(plot: Plot) -> Figures:
    """What a plot is drawn from."""
    ours = "ours-kernel" if "target_attention_kernel" in plot.results else "ours"
    return Figures([RESULTS / f"{name}.csv" for name in plot.results], ours)


def digest(plot: Plot) -> str:
    """Of a plot's figures and of this file, which draws it."""
    files = (Path(__file__), *(RESULTS / f"{name}.csv" for name in plot.results))
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


def main(argv: list[str] | None = None, plots: Path = PLOTS_OF_DOCS) -> int:
    """Draw all, or check; 1 if something that was checked is stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a plot is stale")
    args = parser.parse_args(argv)
    stale = []
    for plot in PLOTS:
        path = plots / f"{name_of(plot)}.svg"
        if not path.exists() or digest(plot) not in path.read_text():
            stale.append(path)
            if not args.check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(svg(plot))
    for path in stale:
        print(f"{path.name}: {'stale; run python benchmarks/report.py' if args.check else 'new'}")
    return int(args.check and bool(stale))


def _bars(
    ax: Axes, labels: list[str], groups: dict[str, list], *, horizontal: bool = False
) -> None:
    """A bar of each group above each label, with its figure at its end."""
    width = 0.8 / len(groups)
    for n, (name, values) in enumerate(groups.items()):
        at = [i + (n - (len(groups) - 1) / 2) * width for i in range(len(labels))]
        heights = [_number(x) for x in values]
        bars = (ax.barh if horizontal else ax.bar)(at, heights, width * 0.9, label=name)
        texts = ["" if x is None else f"{float(x):.3g}" for x in values]
        ax.bar_label(bars, texts, fontsize=7, padding=1)
    (ax.set_yticks if horizontal else ax.set_xticks)(range(len(labels)), labels)
    ax.legend()


def _number(x) -> float:
    return float("nan") if x is None else float(x)


def _times(x, factor: int):
    return None if x is None else x * factor


if __name__ == "__main__":
    raise SystemExit(main())
