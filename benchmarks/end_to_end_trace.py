"""Kernels of a training step, and bytes that it sends to other ranks."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Trace:
    """Times of kernels and copies on a GPU.

    Args:
        events: trace events in the format of ``torch.profiler``.

    Attributes:
        busy_us: time in microseconds in which at least one of them ran.
        kernels_us: time in microseconds by name of the kernel or copy, in decreasing order.
            Concurrent ones are counted separately.
    """

    def __init__(self, events: list[dict[str, Any]]) -> None:
        ran = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        self.busy_us = end = 0.0
        kernels_us: collections.Counter[str] = collections.Counter()
        for event in sorted(ran, key=lambda event: event["ts"]):
            last = event["ts"] + event["dur"]
            self.busy_us += max(0.0, last - max(event["ts"], end))
            end = max(end, last)
            kernels_us[event["name"]] += event["dur"]
        self.kernels_us = dict(kernels_us.most_common())


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this rank sends to others in its context, forward and backward.

    Collectives of DDP and functional collectives are included. An all-to-all sends the parts of
    other ranks; all others are counted as ring algorithms.

    Attributes:
        total: bytes of all collectives.
        floats: bytes of floating-point tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = self.floats = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            for tensor, share in _sent(func, args):
                self.total += tensor.nbytes * share
                self.floats += tensor.nbytes * share * tensor.is_floating_point()
        return func(*args, **(kwargs or {}))


SILENT = ("barrier", "check_for_nan", "wait_tensor", "wrap_tensor_autograd")
"""Ops of the two namespaces that send a negligible number of bytes."""


def _sent(op: torch._ops.OpOverload, args: Sequence[Any]) -> list[tuple[Tensor, float]]:
    """Return the tensors that a collective sends, with the factor of their size."""
    name = op._schema.name.partition("::")[2].strip("_").replace("all_", "all")
    functional, ranks = op.namespace != "c10d", dist.get_world_size()
    if name in SILENT:
        return []
    if name == "alltoall":
        return [(tensor, 1) for rank, tensor in enumerate(args[1]) if rank != dist.get_rank()]
    if name.startswith("allto"):
        tensor, splits = (args[0], args[2]) if functional else (args[1], args[4])
        local_share = splits[dist.get_rank()] / max(1, len(tensor)) if splits else 1 / ranks
        return [(tensor, 1 - local_share)]
    shares = {
        "allreduce": 2 / ranks, "reduce_scatter": 1 / ranks, "allgather": 1, "broadcast": 1 / ranks
    }  # fmt: skip
    for kind, share in shares.items():
        if name.startswith(kind):
            inputs = args[0 if functional or kind in ("allreduce", "broadcast") else 1]
            return [(tensor, share * (ranks - 1)) for tensor in _tensors(inputs)]
    raise NotImplementedError(f"no rule says what {op} sends")


def _tensors(nested: Any) -> list[Tensor]:
    """Return the tensors of nested lists."""
    return [nested] if isinstance(nested, Tensor) else [y for x in nested for y in _tensors(x)]
