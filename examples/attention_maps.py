"""Plots attention weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_weights(
    weights: Tensor, candidates: Sequence[str], events: Sequence[str], bold: Sequence[bool]
) -> Figure:
    """Plot heat maps of one user's history, one per candidate, with a row per event and a column
    per head.

    Args:
        weights: `[L, T, H]`, the result of `JaggedTargetAttention.attention_weights`.
        candidates: `T` titles.
        events: `L` labels, from the oldest to the newest.
        bold: `L` flags, whether the label is bold.
    """
    import matplotlib.pyplot as plt

    num_events, num_candidates, num_heads = weights.shape
    size = 5.5 * num_candidates, 0.24 * num_events + 1
    figure, panels = plt.subplots(1, num_candidates, figsize=size, sharey=True, squeeze=False)
    highest = float(weights.max())
    for panel, title, by_head in zip(panels[0], candidates, weights.unbind(1), strict=True):
        image = panel.imshow(by_head, aspect="auto", cmap="viridis", vmin=0, vmax=highest)
        panel.set_title(title, fontsize=10)
        panel.set_xticks(range(num_heads), [f"head {head}" for head in range(num_heads)])
    first = panels[0, 0]
    first.set_yticks(range(num_events), events, fontsize=8)
    first.set_ylabel("history, the newest row below")
    for label, is_bold in zip(first.get_yticklabels(), bold, strict=True):
        label.set_fontweight("bold" if is_bold else "normal")
    figure.colorbar(image, ax=panels, label="weight")
    return figure
