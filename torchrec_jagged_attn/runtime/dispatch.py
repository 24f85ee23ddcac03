"""Kernel dispatch: which variant serves a call, and the conditions that decide.

A variant is a set of kernels, or of functions, that computes an op. Each op has a list of them,
from the fastest to the one that supports any call. The dispatch, the table of ``python -m
torchrec_jagged_attn`` and the log are made from these lists.
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

PACKAGE = __name__.partition(".")[0]
LIBRARIES = (PACKAGE, "torch", "torchrec")  # what a user's line calls
LOG = os.environ.get("TORCHREC_JAGGED_ATTN_LOG") == "1"
_logger = logging.getLogger(PACKAGE)
_logged: set[tuple[str, str, Choice]] = set()


class Condition(NamedTuple):
    """A condition of a kernel variant."""

    text: str  # the condition in words, for the table and the log
    holds: Callable[[Any], bool]  # whether it holds for a call


@dataclass(frozen=True)
class KernelVariant:
    """A kernel variant of an op."""

    name: str  # of the variant, as in the names of its files
    # That a call must meet; none if the variant supports any call
    conditions: tuple[Condition, ...] = ()
    # Whether the variant runs on a device
    runs_on: Callable[[torch.device], bool] = lambda device: True
    device: str = "another device"  # that device, in words
    # The samples of a call that it computes, in words; empty for all. The kernels decide, since the
    # host does not know the lengths.
    samples: str = ""

    @property
    def text(self) -> str:
        """What the variant supports, in words."""
        texts = [self.samples] if self.samples else []
        return "; ".join(texts + [text for text, _ in self.conditions]) or "all else"

    def refusal(self, call: Any) -> str | None:
        """The first condition that does not hold for ``call``, in words."""
        for text, holds in self.conditions:
            if not holds(call):
                return text
        return None

    def supports(self, device: torch.device, call: Any) -> bool:
        """Whether it supports ``call`` on ``device``; faster than :func:`choose` of two."""
        return self.runs_on(device) and self.refusal(call) is None


class Choice(NamedTuple):
    """The variant that serves a call."""

    variant: str  # its name
    # The variants before it, each with the condition that does not hold
    refused: tuple[tuple[str, str], ...]


def choose(variants: Sequence[KernelVariant], device: torch.device, call: Any) -> Choice:
    """The first of ``variants`` that supports ``call`` on ``device``; the last one supports any."""
    refused = ()
    for variant in variants:
        why = variant.refusal(call) if variant.runs_on(device) else variant.device
        if why is None:
            return Choice(variant.name, refused)
        refused += ((variant.name, why),)
    raise NotImplementedError(f"no kernel variant supports this call: {refused}")


def table(variants: Sequence[KernelVariant], device: torch.device) -> dict[str, str]:
    """The variants that run on ``device``, in their order, with what each supports, in words."""
    return {variant.name: variant.text for variant in variants if variant.runs_on(device)}


def log_choice(name: str, choice: Choice) -> None:
    """Log the ``choice`` for the step ``name``, once for each line that calls the package.

    Only where ``TORCHREC_JAGGED_ATTN_LOG`` is ``1``; test :data:`LOG` before the call, which costs
    less. Backward has no separate line.
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
    refused = "".join(f"; not {variant}: needs {why}" for variant, why in choice.refused)
    _logger.info("%s: %s takes %s%s", site, choice.variant, name, refused)


def _call_site() -> str:
    """File and line of the nearest code that is not this package's, PyTorch's or TorchRec's.

    ``"backward"`` without any, since backward on a GPU runs in another thread.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _package_of(frame) in LIBRARIES:
        frame = frame.f_back
    if _package_of(frame) in LIBRARIES:
        return "backward"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _package_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
