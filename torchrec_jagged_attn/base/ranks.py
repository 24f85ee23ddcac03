"""Reductions over the ranks of a process group, for models fitted to the data of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """The ranks of ``group``, by default of the default process group; without one, a single rank.

    Methods are collectives: every rank must call them with equal shapes. They return the same bits
    on every rank, on the device of ``x``.
    """

    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        if not dist.is_available() or not dist.is_initialized():
            return 1
        return max(dist.get_world_size(self.group), 1)  # -1 on a rank that is not in the group

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over ranks."""
        if self.size == 1:
            return x
        device = x.device
        if x.is_cpu and dist.get_backend(self.group) == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        total = x.to(device, copy=True).contiguous()
        dist.all_reduce(total, group=self.group)
        return total.to(x.device)

    def first(self, x: Tensor) -> Tensor:
        """Return ``x`` of the first rank."""
        if self.size == 1:
            return x
        return self.sum(x if dist.get_rank(self.group) == 0 else torch.zeros_like(x))

    def all(self, x: Tensor) -> Tensor:
        """Return ``x`` of all ranks, ``[ranks, …]``."""
        gathered = x.new_zeros(self.size, *x.shape)
        gathered[dist.get_rank(self.group) if self.size > 1 else 0] = x
        return self.sum(gathered)
