"""Train the attention of ``quality.py`` for an epoch, and write the weights of one user's history.

    python benchmarks/attention_weights.py data/ml-1m benchmarks/results/attention_weights.csv

The settings are those that tuning chose for MovieLens-1M. The user is that of the first test event
with 200 earlier events or more. Candidates are its item, and another one that the user did not take
before. The file has the weights of the 50 newest events by head.
"""

from __future__ import annotations

import sys

import pandas as pd
import torch
from quality import Run, Trainer, events_of
from stamps import stamp
from torch import Tensor

EVENTS = 50


def trained(run: Run, device: str) -> Trainer:
    """The model after one epoch of training events."""
    events = events_of(run.data, run.max_history, run.seed)
    trainer = Trainer(run, events, device)
    for batch in trainer.batches(events.training(0)):
        trainer.learn(batch)
    return trainer


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """The weights ``[EVENTS, H]`` of a user's history for each of two candidates."""
    run = trainer.run
    test = events_of(run.data, run.max_history, run.seed).testing()
    lengths = test.history_end - test.history_start
    taken = int(((lengths == run.max_history) & (test.label == 1)).nonzero()[0])
    same_user = (test.user == test.user[taken]) & (test.time == test.time[taken])
    other = int((same_user & (test.label == 0)).nonzero()[0])
    inputs = []
    hook = trainer.model.pooling.register_forward_pre_hook(lambda _, args: inputs.extend(args))
    trainer.score(test[[taken, other]].to(torch.device(trainer.device)))
    hook.remove()
    weights = trainer.model.pooling.attention_weights(*inputs).values().cpu()
    return {name: x[-EVENTS:] for name, x in zip(("taken", "other"), weights.chunk(2), strict=True)}


def main(data: str, csv: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [
        {
            "suite": "attention_weights", "case": case, "provider": f"head {head}", "mode": "test",
            "metric": f"{age} newer events", "median": f"{weight:.4f}", "unit": "weight",
        }
        for case, weights in weights_of(trained(Run(data, "attention"), device)).items()
        for head, of_head in enumerate(weights.T.flip(1).tolist())
        for age, weight in enumerate(of_head)
    ]  # fmt: skip
    pd.DataFrame(rows).assign(**stamp("torchrec", device=device)).to_csv(csv, index=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
