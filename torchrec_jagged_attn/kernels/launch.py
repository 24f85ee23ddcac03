"""Launching a Triton kernel at little cost to the host."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

__all__ = ["Launcher"]


class Launcher:
    """Launches ``kernel`` by the compiled kernel that served the last call like this one.

    ``kernel[grid](…)`` inspects and hashes every argument at every launch, in as much detail as any
    kernel may need. Here a call is like another where its device, its compile-time constants and
    the traits of its arguments that Triton compiles for are the same.

    Args:
        kernel: a function decorated with ``triton.jit``, whose compile-time constants come last and
            whose first argument is a tensor.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[tuple, Any] = {}
        params = getattr(kernel, "params", [])  # the interpreter knows none, and compiles nothing
        self.constants = [param.name for param in params if param.is_constexpr]
        self.specialized = [not param.do_not_specialize for param in params]

    def __call__(
        self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        """Launch ``grid`` programs on the current stream.

        Args:
            grid: programs along up to three axes.
            arguments: all but the compile-time constants, in their order.
            constants: those, and Triton's options such as ``num_warps``.
        """
        if not self.constants:
            self.kernel[grid](*arguments, **constants)
            return
        key = (
            arguments[0].device.index,
            *constants.values(),
            *map(_trait, arguments, self.specialized),
        )
        compiled = self.compiled.get(key)
        if compiled is None:
            self.compiled[key] = self.kernel[grid](*arguments, **constants)
        else:
            of_kernel = [constants[name] for name in self.constants]
            compiled[(*grid, 1, 1)[:3]](*arguments, *of_kernel)


def _trait(argument: Any, specialized: bool) -> Hashable:
    """What Triton compiles for: dtype and alignment of tensors, width of integers, if they are 1 or
    divisible by 16 where it specialises for that, and what is ``None``.
    """
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        wide = argument >= 2**31
        return (wide, argument == 1, argument % 16 == 0) if specialized else wide
    return argument is None
