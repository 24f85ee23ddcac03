"""Each file is a suite: one function, computed by the package and by its peers.

A suite file defines ``SUITE``. Files whose names start with ``_`` are shared by suites.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.cases import CASES, Case

MODES = ("forward", "backward", "both")
TRAINING_CASES = {name: case for name, case in CASES.items() if case.large} | {
    case.name: case
    for case in (
        Case("cpu-half-full", 512, 200, 4, 64, lengths="uniform"),
        Case("cpu-skewed", 256, 1024, 4, 128, lengths="log-normal"),
    )
}
"""Named shapes that suites share."""


class UnavailableError(Exception):
    """Raised by a provider that cannot run on this machine; the message says why."""


@dataclass(frozen=True)
class Inputs:
    """Random inputs of a case."""

    case: Case
    leaves: dict[str, Tensor]  # the floating-point inputs; each gets a gradient
    offsets: Tensor  # [B + 1], of the history rows
    query_offsets: Tensor  # [B + 1], of the targets
    max_length: int  # maximum length of a history, on the host
    max_targets: int  # maximum number of targets of a sample, on the host

    @classmethod
    def even(cls, case: Case, leaves: dict[str, Tensor], offsets: Tensor) -> "Inputs":
        """Return inputs with ``T`` targets in each sample."""
        steps = torch.arange(offsets.numel(), dtype=offsets.dtype, device=offsets.device)
        max_length = int(offsets.diff().max())
        return cls(case, leaves, offsets, steps * case.num_targets, max_length, case.num_targets)

    def double(self) -> "Inputs":
        """Return the inputs in fp64."""
        leaves = {k: v.detach().double().requires_grad_() for k, v in self.leaves.items()}
        return replace(self, leaves=leaves)

    def num_pairs(self) -> int:
        """Return the number of pairs of a target and a history row: ``N T`` for equal targets."""
        return int((self.offsets.diff() * self.query_offsets.diff()).sum())


@dataclass(frozen=True)
class Cost:
    """Minimum memory traffic in bytes and minimum FLOPs of a function."""

    bytes: float
    flops: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class PreparedCall:
    """A call to time, whose operands and output may have another layout than the suite's."""

    call: Callable[[], Tensor]  # the timed call
    leaves: dict[str, Tensor]  # operands by the names of the suite
    # Converts an operand, given its name, or the gradient of "out", from the suite's layout.
    prepare: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    # Converts the output "out", or the gradient of a named operand, to the suite's layout.
    restore: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    # Inputs for which the output is checked, if the call computes another function than the suite.
    inputs: Inputs | None = None

    @classmethod
    def from_inputs(
        cls,
        x: Inputs,
        call: Callable[..., Tensor],
        prepare: Callable[[str, Tensor], Tensor],
        restore: Callable[[str, Tensor], Tensor],
    ) -> "PreparedCall":
        """Return a call of all leaves of ``x``, whose layout is converted once, before timing."""
        leaves = {
            name: prepare(name, leaf.detach()).requires_grad_() for name, leaf in x.leaves.items()
        }
        return cls(lambda: call(*leaves.values()), leaves, prepare, restore)


@dataclass(frozen=True)
class Suite:
    """A benchmarked function: its cases, oracle and providers."""

    name: str
    measures: str  # description of up to 49 characters
    cases: dict[str, Case]  # named shapes
    inputs: Callable[[Case, str], Inputs]  # makes the same random inputs of a case on a device
    oracle: Callable[[Inputs], Tensor]  # the function in plain PyTorch, called on fp64 inputs
    cost: Callable[[Inputs], dict[str, Cost]]  # minimum cost of forward and of backward
    # Factories by name. A factory takes the inputs, does the work that a model does once (weights,
    # metadata), and returns the call to time, or a PreparedCall; or it raises UnavailableError.
    # Names that start with "ours" are of this package, all others are peers.
    providers: dict[str, Callable[[Inputs], Callable[[], Tensor] | PreparedCall]]
    # Timed modes. Without a backward, gradients are neither computed nor checked.
    modes: tuple[str, ...] = MODES
