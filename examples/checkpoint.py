"""Atomic checkpoints, also on Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import reprlib
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torchrec.optim.keyed import KeyedOptimizer

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
DESCRIPTION = {"options", "progress", "features"}
"""Keys of run.json."""


class CheckpointError(Exception):
    """A checkpoint cannot be used; the message says which, why, and what to do."""


class Checkpoints:
    """Saves and loads the newest state of one training run, in `directory/step-N`.

    Each rank writes its own shards, and the folder is renamed after the last write. The number of
    ranks that load it may differ.

    Args:
        directory: folder of this run.
        options: options that must be equal when a checkpoint is loaded.
        features: statistics of the data for serving, as JSON.
    """

    def __init__(
        self, directory: Path, options: dict[str, str], features: dict | None = None
    ) -> None:
        self._directory, self._options, self._features = directory, options, features

    def save(self, model: nn.Module, optimizer: KeyedOptimizer, step: int, progress: dict) -> None:
        """Write the state after `step` steps, and `progress` as JSON.

        Raises:
            CheckpointError: it cannot be written; the previous checkpoint is kept.
        """
        partial = self._directory / "partial"
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        with _checkpoint_errors(f"cannot write {partial}"):
            dcp.save(_state(model, optimizer), checkpoint_id=partial)
        if dist.get_rank() == 0:
            description = {
                "options": self._options,
                "progress": progress,
                "features": self._features,
            }
            (partial / "run.json").write_text(json.dumps(description))
            # Sync all to disk before the rename; dcp.save has synced the files of the ranks.
            _sync(partial / "run.json")
            _sync(partial)
            previous = checkpoints_in(self._directory)
            partial.rename(self._directory / f"step-{step}")
            _sync(self._directory)
            for checkpoint in previous:
                shutil.rmtree(checkpoint)
        dist.barrier()

    def load(self, model: nn.Module, optimizer: KeyedOptimizer) -> dict | None:
        """Load the newest state into model and optimizer. Return its progress, or None without one.

        Raises:
            CheckpointError: it was made with other options, or cannot be read.
        """
        newest = newest_checkpoint(self._directory)
        if newest is None:
            return None
        description = describe_checkpoint(newest)
        for name, value in self._options.items():
            if description["options"].get(name) != value:
                raise CheckpointError(
                    f"{newest} was made with {name} {description['options'].get(name)}, not "
                    f"{value}; give the same options, or start anew with --overwrite"
                )
        state = _state(model, optimizer)
        load_state(state, newest)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return description["progress"]


def checkpoints_in(directory: Path) -> list[Path]:
    """Return each `directory/step-N`, the newest last."""
    steps = [path for path in directory.glob("step-*") if re.fullmatch(r"step-[0-9]+", path.name)]
    return sorted(steps, key=lambda path: int(path.name.removeprefix("step-")))


def newest_checkpoint(directory: Path) -> Path | None:
    """Return the newest `directory/step-N`, or None."""
    return next(reversed(checkpoints_in(directory)), None)


def describe_checkpoint(checkpoint: Path) -> dict:
    """Return the options of a checkpoint, its progress, and the features of its data.

    Raises:
        CheckpointError: they cannot be read.
    """
    path = checkpoint / "run.json"
    try:
        description = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if not isinstance(description, dict) or not description.keys() >= DESCRIPTION:
        raise CheckpointError(
            f"{path} must be an object with {', '.join(sorted(DESCRIPTION))}, got "
            f"{reprlib.repr(description)}"
        )
    return description


def load_state(state: dict, checkpoint: Path, *, no_dist: bool = False) -> None:
    """Load the tensors of `state` in place.

    Raises:
        CheckpointError: it cannot be read.
    """
    with _checkpoint_errors(f"cannot read {checkpoint}"):
        dcp.load(state, checkpoint_id=checkpoint, no_dist=no_dist)


@contextmanager
def _checkpoint_errors(message: str) -> Iterator[None]:
    """Shorten the tracebacks of ranks to one line."""
    try:
        yield
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{message}: {reason}") from None


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _state(model: nn.Module, optimizer: KeyedOptimizer) -> dict:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


class StopSignal:
    """Records SIGINT (Ctrl-C) or SIGTERM instead of exiting; `number` is 0 until then."""

    def __init__(self) -> None:
        self.number = 0
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)

    def _remember(self, number: int, _frame: object) -> None:
        self.number = number


def ignore_stop_signals(_worker: int) -> None:
    """Ignore stop signals in a worker of a data loader, which the training process ends."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
