"""The plots of the documents agree with the figures under ``benchmarks/results``."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("torchrec")

import plots
import report
import specs
from end_to_end_cases import step_case
from end_to_end_results import add
from figures import RESULTS, Figures, parse_query

from tests.benchmarks import synthetic_results

MODEL_RESULTS = {
    *("end_to_end", "end_to_end_gpus", "end_to_end_graphs"),
    *("end_to_end_quality", "quality"),
}
"""Files that :mod:`synthetic_results` writes."""


def find_plot(draw) -> plots.Plot:
    return next(plot for plot in plots.PLOTS if plot.draw is draw)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of small result files, from which plots are drawn."""
    synthetic_results.write_all(tmp_path)
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("plot", plots.PLOTS, ids=plots.plot_name)
def test_axes_and_stamp(plot, request):
    if MODEL_RESULTS & {*plot.results}:
        request.getfixturevalue("results")
    figure = plots.drawn(plot)
    for ax in figure.axes:
        left_out = ax.get_yaxis().get_label_text() == "" and ax is not figure.axes[0]
        shared = left_out and ax.get_shared_y_axes().joined(ax, figure.axes[0])
        labels = ax.get_xlabel() + ax.get_ylabel()
        assert labels or shared
        assert ax.lines or ax.patches or ax.collections
    stamp = figure.get_supxlabel().replace("\n", " ")
    assert stamp == plot.figures.stamps()
    assert "torch 2." in stamp
    assert "2026-" in stamp


def test_a_height_is_the_figure_of_the_csv():
    (ax,) = plots.drawn(find_plot(plots.table1)).axes
    ours, papers = ax.containers
    speedup = Figures([RESULTS / "table1.csv"]).find(
        parse_query("padded forward ×", "jagged_softmax-paper")
    )
    assert ours[2].get_height() == float(speedup)
    assert papers[2].get_height() == 1.38  # of the paper's Table 1


def test_stale_plots_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plots, "PLOTS", [find_plot(plots.table1)])
    assert report.main([], [], tmp_path) == 0
    assert report.main(["--check"], [], tmp_path) == 0
    (path,) = tmp_path.iterdir()
    svg = path.read_text()
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    dark = re.search(r"@media \(prefers-color-scheme: dark\) \{\n((?:\[.*\n)+)\}\n", svg)
    for light, colour in plots.DARK.items():
        for what in ("fill", "stroke"):
            rule = f'[style*="{what}: {light}"] {{ {what}: {colour} !important }}\n'
            assert rule in dark[1]
    assert f'style="fill: {plots.PAPER}"' in svg
    digest = plots.digest(find_plot(plots.table1))
    path.write_text(path.read_text().replace(digest, "of other figures"))
    capsys.readouterr()
    assert report.main(["--check"], [], tmp_path) == 1
    assert capsys.readouterr().out.startswith("table1.svg: stale")
    assert report.main([], [], tmp_path) == 0
    assert report.main(["--check"], [], tmp_path) == 0


def test_speed_is_relative_to_sum_pooling_and_gaps_have_reasons(results):
    (ax,) = plots.drawn(find_plot(plots.end_to_end)).axes
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in ax.containers}
    assert heights["ours"] == pytest.approx([10 / 7] * 3, rel=1e-3)
    padded = heights["linear + padded SDPA"]
    assert padded[:2] == pytest.approx([10 / 9] * 2, rel=1e-3)
    assert padded[2] != padded[2]
    texts = [text.get_text().strip() for text in ax.texts]
    assert texts.count("out of memory") == 2


def test_speed_by_number_of_gpus_uses_the_faster_sharding(results):
    csv = results / "end_to_end_gpus.csv"
    rows = [*synthetic_results.step_rows(1000, 2)]
    for row in rows:
        row["case"] = step_case(1000, 2, "table_wise")
        row["median"] *= 1 + (row["provider"] == "sum")
    add(csv, rows)
    (ax,) = plots.drawn(find_plot(plots.end_to_end_gpus)).axes
    lines = {line.get_label(): line for line in ax.lines}
    assert [*lines] == ["sum pooling", "linear + FlashAttention-2", "ours"]
    assert lines["ours"].get_xdata().tolist() == [1, 2]
    on_one_gpu = synthetic_results.BATCH / 7
    assert lines["ours"].get_ydata().tolist() == pytest.approx(
        [on_one_gpu, 2 * on_one_gpu], rel=1e-3
    )
    on_one_gpu = synthetic_results.BATCH / 10
    assert lines["sum pooling"].get_ydata() == pytest.approx([on_one_gpu, 4 * on_one_gpu], rel=1e-3)


def test_steps_with_and_without_a_cuda_graph(results):
    axes = plots.drawn(find_plot(plots.end_to_end_graphs)).axes
    assert [ax.get_title() for ax in axes] == ["1 GPU", "2 GPUs"]
    for ax in axes:
        lines = {line.get_label(): line for line in ax.lines}
        assert [*lines] == [specs.STEP_PROVIDERS[name] for name in specs.GRAPH_PROVIDERS]
        ours, graph = lines["ours"], lines["ours, CUDA graph"]
        assert (ours.get_linestyle(), graph.get_linestyle()) == ("-", "--")
        assert ours.get_color() == graph.get_color()
        at = specs.MEANS.index(1000)
        assert (ours.get_ydata()[at], graph.get_ydata()[at]) == (7, 6.5)


def test_curves_and_their_differences(results):
    auc, spread, *_ = plots.drawn(find_plot(plots.end_to_end_quality)).axes
    assert auc.lines[0].get_xdata().tolist() == [0.5, 1]
    assert auc.lines[0].get_ydata().tolist() == [0.4, 0.8]
    assert spread.lines[2].get_ydata() == pytest.approx([2e-4, 2e-4])


def test_difference_of_auc_has_its_standard_error(results):
    ax, _ = plots.drawn(find_plot(plots.quality)).axes
    points, _, (errors,) = ax.containers[0]
    assert points.get_xdata()[:2].tolist() == [-0.0095, 0]
    assert errors.get_segments()[0][:, 0] == pytest.approx([-0.01, -0.009])
    assert len(points.get_xdata()) == len(specs.POOLINGS)


def test_documents_link_existing_plots(results, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plots, "PLOTS", [find_plot(plots.end_to_end)])
    page, folder = tmp_path / "docs" / "page.md", tmp_path / "plots"
    page.parent.mkdir()
    page.write_text("<!-- plot: end_to_end -->\n<!-- end of plot -->\n")
    assert report.main(["--check"], [page], folder) == 1
    assert capsys.readouterr().out.startswith("end_to_end.svg: stale")
    assert report.main([], [page], folder) == 0
    shown = "![Training speed of a whole model](../plots/end_to_end.svg)\n"
    assert page.read_text() == f"<!-- plot: end_to_end -->\n{shown}<!-- end of plot -->\n"
    assert report.main(["--check"], [page], folder) == 0
    (results / "end_to_end.csv").unlink()
    assert report.main(["--check"], [page], folder) == 1
    assert report.main([], [page], folder) == 0
    assert page.read_text() == "<!-- plot: end_to_end -->\n<!-- end of plot -->\n"
