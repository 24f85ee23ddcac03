"""The weights that are drawn of one user's history."""

import pytest
import torch

pytest.importorskip("rich")

import attention_weights
import quality


def test_weights_of_the_newest_events_for_two_candidates():
    run = quality.Run("synthetic@30", "attention", max_history=60, width=8)
    trainer = quality.Trainer(run, quality.events_of(run.data, run.max_history, run.seed), "cpu")
    with torch.no_grad():  # untrained queries are zero: weights are those of the recency bias
        weights = attention_weights.weights_of(trainer)
    taken, other = weights["taken"], weights["other"]
    assert taken.shape == (attention_weights.EVENTS, trainer.model.pooling.num_heads)
    torch.testing.assert_close(taken, other)
    torch.testing.assert_close(taken[-2], taken[-1] / 2)  # that of position p is 1 / (1 + p)
    assert (taken.diff(dim=0) >= -1e-6).all()
