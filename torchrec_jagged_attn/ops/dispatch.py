"""Kernel dispatch: the kernel variants of an op, and the conditions for each of them.

A variant is a set of kernels that computes an op. Each op has a list of variants, the fastest
first; the last variant supports any call. Dispatch, the table of
``python -m torchrec_jagged_attn`` and the log all use these lists.
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
LIBRARIES = (PACKAGE, "torch", "torchrec")  # not user code, see _call_site
LOG = os.environ.get("TORCHREC_JAGGED_ATTN_LOG") == "1"
_logger = logging.getLogger(PACKAGE)
_logged: set[tuple[str, str, Choice]] = set()


class Condition(NamedTuple):
    """A condition of a kernel variant."""

    text: str  # description, for the table and the log
    holds: Callable[[Any], bool]  # whether a call meets the condition


@dataclass(frozen=True)
class KernelVariant:
    """A kernel variant of an op."""

    name: str  # also the prefix of the names of its files
    conditions: tuple[Condition, ...] = ()  # all must hold; empty if any call is supported
    runs_on: Callable[[torch.device], bool] = lambda device: True  # whether a device is supported
    device: str = "another device"  # description of supported devices
    # Description of the samples that this variant computes, if not all of a call. The kernels
    # select them, since the host does not know the lengths.
    samples: str = ""

    @property
    def text(self) -> str:
        """Description of the calls that are supported."""
        texts = [self.samples] if self.samples else []
        return "; ".join(texts + [text for text, _ in self.conditions]) or "all else"

    def refusal(self, call: Any) -> str | None:
        """Return the description of the first condition that ``call`` does not meet, if any."""
        for text, holds in self.conditions:
            if not holds(call):
                return text
        return None


class Choice(NamedTuple):
    """The variant that was chosen for a call."""

    variant: str  # name of the variant
    # Variants earlier in the list, and a condition of each that the call does not meet
    refused: tuple[tuple[str, str], ...]


def choose(variants: Sequence[KernelVariant], device: torch.device, call: Any) -> Choice:
    """Choose the first of ``variants`` that supports ``call`` on ``device``.

    Raises:
        NotImplementedError: no variant supports the call.
    """
    refused = ()
    for variant in variants:
        missing = variant.refusal(call) if variant.runs_on(device) else variant.device
        if missing is None:
            return Choice(variant.name, refused)
        refused += ((variant.name, missing),)
    raise NotImplementedError(f"no kernel variant supports this call: {refused}")


def table(variants: Sequence[KernelVariant], device: torch.device) -> dict[str, str]:
    """Return the names of the variants that run on ``device``, and descriptions of their calls."""
    return {variant.name: variant.text for variant in variants if variant.runs_on(device)}


def log_choice(name: str, choice: Choice) -> None:
    """Log the ``choice`` for the op or direction ``name``, once per line of user code.

    Logs only if ``TORCHREC_JAGGED_ATTN_LOG`` is ``1``. Callers test :data:`LOG` first, which takes
    less time.
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
    refused = "".join(f"; not {variant}: needs {missing}" for variant, missing in choice.refused)
    _logger.info("%s: %s uses %s%s", site, name, choice.variant, refused)


def _call_site() -> str:
    """Return file and line of the innermost frame outside this package, PyTorch and TorchRec.

    Returns ``"backward"`` if no such frame exists: backward on a GPU runs in a thread of autograd.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _package_of(frame) in LIBRARIES:
        frame = frame.f_back
    if _package_of(frame) in LIBRARIES:
        return "backward"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _package_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
