"""The plots of the docs are what the figures under ``benchmarks/results`` say."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import report
import tables


@pytest.mark.parametrize("plot", report.PLOTS, ids=report.name_of)
def test_axes_and_stamp(plot):
    figure = report.drawn(plot)
    for ax in figure.axes:
        left_out = ax.get_yaxis().get_label_text() == "" and ax is not figure.axes[0]
        shared = left_out and ax.get_shared_y_axes().joined(ax, figure.axes[0])
        labels = ax.get_xlabel() + ax.get_ylabel()
        assert labels or shared
        assert any(artist.get_visible() for artist in (*ax.lines, *ax.patches))
    stamp = figure.get_supxlabel().replace("\n", " ")
    assert stamp == report.figures_of(plot).stamps()
    assert "torch 2." in stamp
    assert "2026-" in stamp


def test_a_height_is_the_figure_of_the_csv():
    plot = next(plot for plot in report.PLOTS if plot.draw is report.table1)
    (ax,) = report.drawn(plot).axes
    ours, papers = ax.containers
    of_padded = tables.Figures([tables.RESULTS / "table1.csv"], "ours").find(
        "jagged_softmax-paper", report.Cell("padded", "forward", unit="× ours")
    )
    assert ours[2].get_height() == float(of_padded)
    assert papers[2].get_height() == 1.38  # of the paper's Table 1


def test_a_missing_figure_leaves_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = (tables.RESULTS / "dlrm_step.csv").read_text().splitlines()
    kept = [row for row in rows if not row.startswith("dlrm_step,mean-200,sum,step,time")]
    assert len(kept) == len(rows) - 1
    (tmp_path / "dlrm_step.csv").write_text("\n".join(kept))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    plot = next(plot for plot in report.PLOTS if plot.draw is report.dlrm_step)
    heights = [bar.get_height() for bar in report.drawn(plot).axes[0].containers[0]]
    assert heights[0] != heights[0]
    assert heights[1] > 0


def test_stale_plots_are_named(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert report.main([], tmp_path) == 0
    assert report.main(["--check"], tmp_path) == 0
    for path in sorted(tmp_path.iterdir()):
        svg = path.read_text()
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert report.INK not in svg
        assert "prefers-color-scheme: dark" in svg
    path = tmp_path / "table1.svg"
    digest = next(report.digest(plot) for plot in report.PLOTS if plot.draw is report.table1)
    path.write_text(path.read_text().replace(digest, "of other figures"))
    capsys.readouterr()
    assert report.main(["--check"], tmp_path) == 1
    assert capsys.readouterr().out.startswith("table1.svg: stale")
    assert report.main([], tmp_path) == 0
    assert report.main(["--check"], tmp_path) == 0


def test_every_plot_is_in_the_docs():
    shown = (tables.ROOT / "docs" / "benchmarks.md").read_text()
    for plot in report.PLOTS:
        assert f"![{plot.title}](plots/{report.name_of(plot)}.svg)" in shown
