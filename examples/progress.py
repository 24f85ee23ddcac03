"""Records of trainings, and a table and plots that compare them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median


@dataclass
class Progress:
    """The progress of a training."""

    pooling: str  # how its model pools the history, and the part of it that is kept, if not all
    epoch: int = 0  # epochs done
    batch: int = 0  # batches done of the epoch after those
    # Training loss of each step, mean of the ranks.
    losses: list[float] = field(default_factory=list)
    # Samples per second of all ranks together, every few steps.
    speeds: list[float] = field(default_factory=list)
    auc: float = 0.0  # area under the ROC curve on the test examples, after the last epoch
    # Normalised entropy there: log loss over the log loss of predicting the share of ones.
    ne: float = 0.0
    # Samples per second of all ranks together in the test, without its first batch; 0 where it has
    # no other.
    test_speed: float = 0.0
    way: str = "all"  # by what events are selected; "all" for no selection
    budget: float = 1.0  # the part of a history that is left

    @property
    def samples_per_second(self) -> float:
        """The median, which start-up and compilation do not affect."""
        return median(self.speeds)

    def summary(self) -> str:
        """One line for a log."""
        return (
            f"{self.pooling}, epoch {self.epoch}: AUC {self.auc:.4f}, normalised entropy "
            f"{self.ne:.4f}, {self.samples_per_second:,.0f} samples/s"
        )


def print_table(runs: list[Progress]) -> None:
    """A row for each pooling, the best AUC in bold."""
    from rich.console import Console
    from rich.table import Table

    table = Table("pooling", title=f"Test set after {runs[0].epoch} epochs")
    for heading in ("AUC", "normalised entropy", "samples/s", "test samples/s"):
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
    """AUC and throughput by pooling, side by side, as a PNG."""
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
    """Normalised entropy over throughput, in training and in the test, with a line for each way."""
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
    panels[0].set(ylabel="normalised entropy")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=150)


def write_json(runs: list[Progress], path: Path) -> None:
    """All records, losses included."""
    path.write_text(json.dumps([asdict(run) for run in runs], indent=1))
