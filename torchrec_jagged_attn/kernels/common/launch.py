"""Launching a Triton kernel at little cost to the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import repeat
from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.knobs import runtime
from triton.runtime import driver

__all__ = ["Launcher", "overlap_options"]


class Launcher:
    """Launches ``kernel`` by the compiled kernel that served the last call like this one.

    ``kernel[grid](…)`` inspects and hashes every argument at every launch, in as much detail as any
    kernel may need, and has a record for hooks, also where there are none. Here a call is like
    another where its device, its compile-time constants and the traits of its arguments that Triton
    compiles for are the same.

    Args:
        kernel: a function decorated with ``triton.jit``, whose compile-time constants come last and
            whose first argument is a tensor.
    """

    # What launches in place of all launchers: it is given the launcher, and what that was.
    observer: Callable[..., None] | None = None

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[tuple, tuple[Any, list[Any]]] = {}
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
        if Launcher.observer is not None:
            Launcher.observer(self, grid, arguments, constants)
        else:
            self.launch(grid, arguments, constants)

    def launch(
        self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> Any | None:
        """Launch, and return the compiled kernel, if there is one."""
        if not self.constants:
            self.kernel[grid](*arguments, **constants)
            return None
        device = arguments[0].get_device()
        key = (device, *constants.values(), *self.traits(arguments))
        found = self.compiled.get(key)
        if found is None:
            compiled = self.kernel[grid](*arguments, **constants)
            self.compiled[key] = compiled, [constants[name] for name in self.constants]
            return compiled
        compiled, of_kernel = found
        grid = (*grid, 1, 1)[:3]
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:  # of a profiler
            compiled[grid](*arguments, *of_kernel)
        else:
            stream = driver.active.get_current_stream(device)
            handles = compiled.function, compiled.packed_metadata
            compiled.run(*grid, stream, *handles, None, None, None, *arguments, *of_kernel)
        return compiled

    def traits(self, arguments: tuple[Any, ...]) -> list[Hashable]:
        """What Triton compiles for, of ``arguments``."""
        return _traits(arguments, self.specialized)


def _traits(arguments: tuple[Any, ...], specialized: Iterable[bool]) -> list[Hashable]:
    """What Triton compiles for: dtype and alignment of tensors, width of integers, if they are 1 or
    divisible by 16 where they are ``specialized``, and what is ``None``. The same of the fields
    of records, whose integers Triton always specializes; of descriptors, dtype and box. Floats are
    always of one kind where they stand.
    """
    traits: list[Hashable] = []
    for argument, is_specialized in zip(arguments, specialized, strict=False):
        if argument is None:
            traits.append(None)
        elif isinstance(argument, int):
            wide = argument >= 2**31
            traits.append((wide, argument == 1, argument % 16 == 0) if is_specialized else wide)
        elif isinstance(argument, tuple):
            traits += _traits(argument, repeat(True))
        elif isinstance(argument, Tensor):  # late: that takes long of what is none
            aligned = argument.data_ptr() % 16 == 0
            traits.append(argument.dtype if aligned else (argument.dtype, "unaligned"))
        elif isinstance(argument, TensorDescriptor):
            traits += argument.base.dtype, tuple(argument.block_shape)
    return traits


def overlap_options(overlap: bool) -> dict[str, bool]:
    """What a kernel is launched with that may begin before the last one ends, if that is so.

    It waits for that one itself (``griddepcontrol.wait``), and is given OVERLAP to know.
    """
    return {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}
