"""What figures are measured with."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform

import torch

import torchrec_jagged_attn

__all__ = ["stamp"]


def stamp(device: str, *packages: str) -> dict[str, str]:
    """Columns of a CSV: the GPU, or the kind of processor, versions, and now.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        packages: those whose versions matter beside PyTorch's and ours.
    """
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        **{name: importlib.metadata.version(name) for name in packages},
        "torchrec_jagged_attn": torchrec_jagged_attn.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
