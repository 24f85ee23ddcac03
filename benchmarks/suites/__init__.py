"""Each file here is a suite: one function, computed by the package and by its peers.

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
    """Raised by a provider that cannot run here; the message says why."""


@dataclass(frozen=True)
class Inputs:
    """Random inputs of a case."""

    case: Case  # what they were made for
    leaves: dict[str, Tensor]  # the floating-point inputs; each gets a gradient
    offsets: Tensor  # [B + 1], of the history rows
    query_offsets: Tensor  # [B + 1], of the targets
    max_length: int  # the longest history, known on the host as padded and varlen attention need it
    max_targets: int  # the most targets of a sample, likewise

    @classmethod
    def even(cls, case: Case, leaves: dict[str, Tensor], offsets: Tensor) -> "Inputs":
        """Of a case whose samples have ``T`` targets each."""
        steps = torch.arange(offsets.numel(), dtype=offsets.dtype, device=offsets.device)
        max_length = int(offsets.diff().max())
        return cls(case, leaves, offsets, steps * case.num_targets, max_length, case.num_targets)

    def double(self) -> "Inputs":
        """The same inputs in fp64."""
        leaves = {k: v.detach().double().requires_grad_() for k, v in self.leaves.items()}
        return replace(self, leaves=leaves)

    def num_pairs(self) -> int:
        """How many pairs of a target and a history row attention looks at: ``N T`` where even."""
        return int((self.offsets.diff() * self.query_offsets.diff()).sum())


@dataclass(frozen=True)
class Cost:
    """The least that an implementation must do: bytes to and from memory, and FLOPs."""

    bytes: float
    flops: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Relaid:
    """A call whose operands and result lie otherwise than the suite's, and are left so."""

    call: Callable[[], Tensor]  # to time
    leaves: dict[str, Tensor]  # the operands, under the names that the suite has for them
    # From a name and an operand, or "out" and its gradient, as the suite has it, to that as this
    # has it.
    lay: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    # From "out" and the output, or a name and its gradient, the other way round.
    restore: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    # What its result is right for, if not for all of the suite's: it is timed beside the suite's
    # function, as a bound of what it takes.
    inputs: Inputs | None = None

    @classmethod
    def of(
        cls,
        x: Inputs,
        call: Callable[..., Tensor],
        lay: Callable[[str, Tensor], Tensor],
        restore: Callable[[str, Tensor], Tensor],
    ) -> "Relaid":
        """``call`` of all leaves of ``x``, laid before the clock runs."""
        leaves = {
            name: lay(name, leaf.detach()).requires_grad_() for name, leaf in x.leaves.items()
        }
        return cls(lambda: call(*leaves.values()), leaves, lay, restore)


@dataclass(frozen=True)
class Suite:
    """What ``run.py`` needs to know."""

    name: str  # of the suite
    measures: str  # what is timed, in one line of up to 49 characters
    cases: dict[str, Case]  # named shapes
    # Makes the random inputs of a case on a device, always the same.
    inputs: Callable[[Case, str], Inputs]
    oracle: Callable[[Inputs], Tensor]  # the function in PyTorch's own words; called on fp64 inputs
    cost: Callable[[Inputs], dict[str, Cost]]  # the floor of forward and of backward
    # From a name to a maker. A maker takes the inputs, does what a model does once (weights,
    # metadata), and returns the call to time, or a Relaid one; or it raises
    # UnavailableError. Names of our own start with ours, all others are peers.
    providers: dict[str, Callable[[Inputs], Callable[[], Tensor] | Relaid]]
    # What is timed. Without a backward, gradients are neither computed nor checked.
    modes: tuple[str, ...] = MODES
