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
    """

    def __init__(self, directory: Path, options: dict[str, str]) -> None:
        self._directory, self._options = directory, options

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
            description = {"options": self._options, "progress": progress}
            (partial / "run.json").write_text(json.dumps(description))
            previous = self._newest()
            partial.rename(self._directory / f"step-{step}")
            if previous is not None:
                shutil.rmtree(previous)
        dist.barrier()

    def load(self, model: nn.Module, optimizer: KeyedOptimizer) -> dict | None:
        """Reads the newest state into model and optimizer; gives its progress, None without one.

        Raises:
            CheckpointError: it was made with other options.
        """
        newest = self._newest()
        if newest is None:
            return None
        description = json.loads((newest / "run.json").read_text())
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

    def _newest(self) -> Path | None:
        steps = self._directory.glob("step-*")
        return max(steps, key=lambda path: int(path.name.removeprefix("step-")), default=None)


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
