"""Checkpoints that are whole or absent, and a Ctrl-C that leaves one."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class CheckpointError(Exception):
    """The checkpoint does not fit; the message says where, why, and what to do."""


class Checkpoints:
    """The newest state of one training run, in `directory/step-N`.

    Each rank writes its own shards, and the folder gets its name once all have. Another number of
    ranks may load it.

    Args:
        directory: where to; of this run alone.
        options: what a checkpoint must have been made with to be loaded.
        features: what else one must know of the data to serve the model, as JSON.
    """

    def __init__(
        self, directory: Path, options: dict[str, str], features: dict | None = None
    ) -> None:
        self._directory, self._options, self._features = directory, options, features

    def clear(self) -> None:
        """Deletes what an earlier run left."""
        if dist.get_rank() == 0:
            shutil.rmtree(self._directory, ignore_errors=True)
        dist.barrier()

    def save(self, model: nn.Module, optimizer: KeyedOptimizer, step: int, progress: dict) -> None:
        """Writes the state after `step` steps; `progress` is what else to remember, as JSON."""
        partial = self._directory / "partial"
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        dcp.save(_state(model, optimizer), checkpoint_id=partial)
        if dist.get_rank() == 0:
            description = {
                "options": self._options,
                "progress": progress,
                "features": self._features,
            }
            (partial / "run.json").write_text(json.dumps(description))
            previous = newest_checkpoint(self._directory)
            partial.rename(self._directory / f"step-{step}")
            if previous is not None:
                shutil.rmtree(previous)
        dist.barrier()

    def load(self, model: nn.Module, optimizer: KeyedOptimizer) -> dict | None:
        """Reads the newest state into model and optimizer; gives its progress, None without one.

        Raises:
            CheckpointError: it was made with other options.
        """
        newest = newest_checkpoint(self._directory)
        if newest is None:
            return None
        description = describe_checkpoint(newest)
        for name, value in self._options.items():
            if description["options"].get(name) != value:
                raise CheckpointError(
                    f"{newest} was made with {name} {description['options'].get(name)}, not "
                    f"{value}; give the same options, or start anew without --resume"
                )
        state = _state(model, optimizer)
        dcp.load(state, checkpoint_id=newest)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return description["progress"]


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest `directory/step-N`, None without one."""
    steps = directory.glob("step-*")
    return max(steps, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def describe_checkpoint(checkpoint: Path) -> dict:
    """The options it was made with, the progress so far, and the features of its data."""
    return json.loads((checkpoint / "run.json").read_text())


def _state(model: nn.Module, optimizer: KeyedOptimizer) -> dict:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


class StopSignal:
    """Remembers SIGINT (Ctrl-C) or SIGTERM instead of dying of it; `number` is 0 until then."""

    def __init__(self) -> None:
        self.number = 0
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)

    def _remember(self, number: int, _frame: object) -> None:
        self.number = number


def ignore_stop_signals(_worker: int) -> None:
    """For processes that make batches: the one that trains ends them."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
