"""Which path takes a call, and why: rules with their reasons.

A path is a set of kernels, or of functions, that computes an op. Each op has a list of them, from
the fastest to the one that takes any call. From these lists come the choice for a call, the table
of ``python -m torchrec_jagged_attn``, and the log.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch

__all__ = ["Choice", "Condition", "Path", "choose", "log_choice", "table"]

PACKAGE = __name__.partition(".")[0]
LIBRARIES = (PACKAGE, "torch", "torchrec")  # what a user's line calls
LOG = os.environ.get("TORCHREC_JAGGED_ATTN_LOG") == "1"
_logger = logging.getLogger(PACKAGE)
_logged: set[tuple[str, str, Choice]] = set()


class Condition(NamedTuple):
    """What a path asks of a call.

    Attributes:
        text: the condition in words, as the table and the log say it.
        holds: whether it holds for a call.
    """

    text: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Path:
    """One way to compute an op.

    Attributes:
        name: of the path, as in the names of its files.
        conditions: what it asks of a call; nothing where it takes any.
        runs_on: whether a device has what the path needs.
        device: that device, in words.
        samples: of a call that it takes, the samples that it computes, in words; empty where that
            is all of them. The kernels decide it, since the host does not know the lengths.
    """

    name: str
    conditions: tuple[Condition, ...] = ()
    runs_on: Callable[[torch.device], bool] = lambda device: True
    device: str = "another device"
    samples: str = ""

    @property
    def text(self) -> str:
        """What the path takes, in words."""
        texts = [self.samples] if self.samples else []
        return "; ".join(texts + [text for text, _ in self.conditions]) or "all else"

    def refusal(self, call: Any) -> str | None:
        """The first condition that does not hold for ``call``, in words."""
        for text, holds in self.conditions:
            if not holds(call):
                return text
        return None

    def takes(self, device: torch.device, call: Any) -> bool:
        """Whether it takes ``call`` on ``device``: :func:`choose` of two paths in less time."""
        return self.runs_on(device) and self.refusal(call) is None


class Choice(NamedTuple):
    """The path that takes a call.

    Attributes:
        path: its name.
        refused: the paths before it, each with what it needs and does not find.
    """

    path: str
    refused: tuple[tuple[str, str], ...]


def choose(paths: Sequence[Path], device: torch.device, call: Any) -> Choice:
    """The first of ``paths`` that takes ``call`` on ``device``; the last one takes any."""
    refused = ()
    for path in paths:
        why = path.refusal(call) if path.runs_on(device) else path.device
        if why is None:
            return Choice(path.name, refused)
        refused += ((path.name, why),)
    raise NotImplementedError(f"no path takes this call: {refused}")


def table(paths: Sequence[Path], device: torch.device) -> dict[str, str]:
    """The paths that run on ``device``, in their order, with what each takes, in words."""
    return {path.name: path.text for path in paths if path.runs_on(device)}


def log_choice(name: str, choice: Choice) -> None:
    """Log the ``choice`` for the step ``name``, once for each line that calls the package.

    Only where ``TORCHREC_JAGGED_ATTN_LOG`` is ``1``; test :data:`LOG` before the call, which costs
    less. Backward has no line of its own.
    """
    if not LOG:
        return
    site = _call_site()
    if (name, site, choice) in _logged:
        return
    _logged.add((name, site, choice))
    if not _logger.hasHandlers():
        _logger.addHandler(logging.StreamHandler())
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)
    refused = "".join(f"; not {path}: needs {why}" for path, why in choice.refused)
    _logger.info("%s: %s takes %s%s", site, choice.path, name, refused)


def _call_site() -> str:
    """File and line of the nearest code that is not this package's, PyTorch's or TorchRec's.

    ``"backward"`` where there is none: backward on a GPU has a thread of its own.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _package_of(frame) in LIBRARIES:
        frame = frame.f_back
    if _package_of(frame) in LIBRARIES:
        return "backward"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _package_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
