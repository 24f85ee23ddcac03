"""The notebook ``examples/history_weights.ipynb`` runs and draws its picture."""

import json
import logging
from pathlib import Path

from matplotlib import pyplot as plt

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_notebook(monkeypatch):
    notebook = json.loads((EXAMPLES / "history_weights.ipynb").read_text())
    steps = "for _ in range(200):"
    sources = ["".join(x["source"]) for x in notebook["cells"] if x["cell_type"] == "code"]
    (training,) = (source for source in sources if steps in source)
    # Weights need not be well trained.
    sources[sources.index(training)] = training.replace("200", "20")
    plt.close("all")  # what other tests have drawn
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.extend(map(plt.figure, plt.get_fignums())))
    monkeypatch.chdir(EXAMPLES)
    names = {}
    try:
        for source in sources:  # one holds sums by its weights against the output
            assert not shown
            exec(source, names)
        (picture,) = shown
        assert picture.axes
        picture.canvas.draw()
    finally:
        logging.disable(logging.NOTSET)
        plt.close("all")
    assert "plot_weights(" in sources[-1]
