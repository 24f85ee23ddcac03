"""Builds ``cpu_attention.cpp``, once for each version of PyTorch, and loads it."""

from __future__ import annotations

import functools
import re
import warnings
from pathlib import Path
from typing import Any

import torch

__all__ = ["library"]

_SOURCE = Path(__file__).with_suffix(".cpp")


@functools.cache
def library() -> Any | None:
    """The ops of ``cpu_attention.cpp``; none, after a warning that says why, if it does not build.

    The first time on a machine that takes some 15 s, a C++ compiler and Ninja.
    """
    version = re.sub(r"\W", "_", torch.__version__)
    try:
        from torch.utils import cpp_extension

        cpp_extension.load(
            f"torchrec_jagged_attn_cpu_{version}",
            [str(_SOURCE)],
            extra_cflags=["-O2", "-fopenmp"],
            is_python_module=False,
        )
    except Exception as error:  # no compiler, no Ninja, no place to write, …
        warnings.warn(
            f"attention on a CPU works on one sample after the other, since {_SOURCE.name} "
            f"was not built: {type(error).__name__}: {error}",
            stacklevel=2,
        )
        return None
    return torch.ops.torchrec_jagged_attn_cpu
