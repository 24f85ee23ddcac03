"""The notebook ``examples/history_weights.ipynb`` runs, and draws what it says."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="of the extra `dev`")
nbclient = pytest.importorskip("nbclient", reason="of the extra `dev`")
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_from_ids_to_a_picture_of_weights():
    notebook = nbformat.read(EXAMPLES / "history_weights.ipynb", as_version=4)
    steps = "for _ in range(200):"
    (training,) = (cell for cell in notebook.cells if steps in cell.source)
    training.source = training.source.replace("200", "20")  # weights need not be well trained
    client = nbclient.NotebookClient(
        notebook, kernel_name="python3", timeout=120, resources={"metadata": {"path": EXAMPLES}}
    )
    client.execute()  # it holds sums by its weights against the output; old outputs are dropped
    drawn = [
        cell.source
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    ]
    assert len(drawn) == 1
    assert "plot_weights(" in drawn[0]
