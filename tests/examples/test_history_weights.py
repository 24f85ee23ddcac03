"""The notebook ``examples/history_weights.ipynb`` runs, and draws what it says."""

import json
import logging
from pathlib import Path

from matplotlib import pyplot as plt

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_from_ids_to_a_picture_of_weights(monkeypatch):
    notebook = json.loads((EXAMPLES / "history_weights.ipynb").read_text())
    steps = "for _ in range(200):"
    cells = ["".join(x["source"]) for x in notebook["cells"] if x["cell_type"] == "code"]
    (training,) = (source for source in cells if steps in source)
    # Weights need not be well trained.
    cells[cells.index(training)] = training.replace("200", "20")
    plt.close("all")  # what other tests have drawn
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.extend(map(plt.figure, plt.get_fignums())))
    monkeypatch.chdir(EXAMPLES)
    names = {}
    try:
        for source in cells:  # one holds sums by its weights against the output
            assert not shown
            exec(source, names)
        (picture,) = shown
        assert picture.axes
        picture.canvas.draw()
    finally:
        logging.disable(logging.NOTSET)
        plt.close("all")
    assert "plot_weights(" in cells[-1]
