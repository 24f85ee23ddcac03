"""Hardware, versions and date of measurements."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform

import torch

import torchrec_jagged_attn


def stamp(*packages: str, device: str | None = None) -> dict[str, str]:
    """Return columns of a CSV: the GPU or the kind of processor, versions and the current time.

    Args:
        packages: further packages whose versions are recorded.
        device: ``"cuda"`` or ``"cpu"``; by default a GPU if there is one.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        **{name: importlib.metadata.version(name) for name in packages},
        "torchrec_jagged_attn": torchrec_jagged_attn.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
