"""Records of training runs, and a table and plots that compare them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median


@dataclass
class Progress:
    """The progress of a training run."""

    pooling: str  # pooling of the history, and the selection of events, if any
    epoch: int = 0  # number of completed epochs
    batch: int = 0  # number of completed batches of the current epoch
    losses: list[float] = field(default_factory=list)  # training loss per step, mean of the ranks
    speeds: list[float] = field(default_factory=list)  # samples per second of all ranks
    auc: float = 0.0  # area under the ROC curve of the test examples, after the last epoch
    # Normalized entropy of the test examples: log loss divided by the log loss of a prediction of
    # the share of ones.
    ne: float = 0.0
    # Samples per second of all ranks in the test, without its first batch; 0 for a single batch.
    test_speed: float = 0.0
    way: str = "all"  # selection of events; "all" for no selection
    budget: float = 1.0  # share of a history that is kept

    @property
    def samples_per_second(self) -> float:
        """Median speed, which start-up and compilation do not affect."""
        return median(self.speeds)

    def summary(self) -> str:
        """Return one line for a log."""
        return (
            f"{self.pooling}, epoch {self.epoch}: AUC {self.auc:.4f}, normalized entropy "
            f"{self.ne:.4f}, {self.samples_per_second:,.0f} samples/s"
        )


def print_table(runs: list[Progress]) -> None:
    """Print a row for each run, the best AUC in bold."""
    from rich.console import Console
    from rich.table import Table

    table = Table("pooling", title=f"Test set after {runs[0].epoch} epochs")
    for heading in ("AUC", "normalized entropy", "samples/s", "test samples/s"):
        table.add_column(heading, justify="right")
    best = max(run.auc for run in runs)
    for run in runs:
        table.add_row(
            run.pooling,
            f"{run.auc:.4f}",
            f"{run.ne:.4f}",
            f"{run.samples_per_second:,.0f}",
            f"{run.test_speed:,.0f}" if run.test_speed else "–",
            style="bold" if run.auc == best else None,
        )
    Console().print(table)


def plot(runs: list[Progress], path: Path) -> None:
    """Plot AUC and throughput by pooling, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    auc, speed = figure.subplots(1, 2)
    names = [run.pooling for run in runs]
    auc.bar_label(auc.bar(names, [run.auc for run in runs], color="tab:blue"), fmt="%.3f")
    auc.set(title=f"test AUC after {runs[0].epoch} epochs", ylim=(0.5, 1))
    bars = speed.bar(names, [run.samples_per_second for run in runs], color="tab:gray")
    speed.bar_label(bars, fmt="{:,.0f}")
    speed.set(title="training samples/s")
    speed.margins(y=0.1)
    figure.savefig(path, dpi=150)


def plot_selections(runs: list[Progress], path: Path) -> None:
    """Plot normalized entropy over throughput, in training and test, with a line per selection."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    speeds = ("training", "samples_per_second"), ("test", "test_speed")
    lines = dict.fromkeys((run.pooling.partition(",")[0], run.way) for run in runs)
    for axes, (name, speed) in zip(panels, speeds, strict=True):
        for pooling, way in lines:
            line = [r for r in runs if (r.pooling.partition(",")[0], r.way) == (pooling, way)]
            points = [(getattr(run, speed), run.ne) for run in line]
            axes.plot(*zip(*points, strict=True), ".-", label=f"{pooling}, {way}")
            for run, point in zip(line, points, strict=True):
                axes.annotate(f"{run.budget:g}", point)
        axes.set(xlabel=f"{name} samples/s")
    panels[0].set(ylabel="normalized entropy")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=150)


def write_json(runs: list[Progress], path: Path) -> None:
    """Write all records, including losses."""
    path.write_text(json.dumps([asdict(run) for run in runs], indent=1))
