"""Atomic checkpoints, and one on Ctrl-C."""

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
"""What run.json holds."""


class CheckpointError(Exception):
    """The checkpoint does not fit; the message says where, why, and what to do."""


class Checkpoints:
    """The newest state of one training run, in `directory/step-N`.

    Each rank writes its own shards, and the folder is renamed once all are written. Another number
    of ranks may load it.

    Args:
        directory: where to; of this run alone.
        options: which must be equal when a checkpoint is loaded.
        features: of the data, to serve the model, as JSON.
    """

    def __init__(
        self, directory: Path, options: dict[str, str], features: dict | None = None
    ) -> None:
        self._directory, self._options, self._features = directory, options, features

    def save(self, model: nn.Module, optimizer: KeyedOptimizer, step: int, progress: dict) -> None:
        """Writes the state after `step` steps; `progress` is saved with it, as JSON.

        Raises:
            CheckpointError: it cannot be written; the one before is still there.
        """
        partial = self._directory / "partial"
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        with _failures_named(f"cannot write {partial}"):
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
        """Reads the newest state into model and optimizer; gives its progress, None without one.

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
    """Each `directory/step-N`, the newest last."""
    steps = [path for path in directory.glob("step-*") if re.fullmatch(r"step-[0-9]+", path.name)]
    return sorted(steps, key=lambda path: int(path.name.removeprefix("step-")))


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest `directory/step-N`, None without one."""
    return next(reversed(checkpoints_in(directory)), None)


def describe_checkpoint(checkpoint: Path) -> dict:
    """The options it was made with, the progress so far, and the features of its data.

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
    """Reads what `state` names into its tensors.

    Raises:
        CheckpointError: it cannot be read.
    """
    with _failures_named(f"cannot read {checkpoint}"):
        dcp.load(state, checkpoint_id=checkpoint, no_dist=no_dist)


@contextmanager
def _failures_named(what: str) -> Iterator[None]:
    """Shortens the tracebacks of ranks to one line."""
    try:
        yield
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{what}: {reason}") from None


def _sync(path: Path) -> None:
    """Waits until the disk has a file, or a folder's list of files."""
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
    """For processes that make batches: the one that trains ends them."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
