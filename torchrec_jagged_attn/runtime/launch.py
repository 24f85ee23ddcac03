"""Launches of Triton kernels that take little host time."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.knobs import runtime
from triton.language import constexpr
from triton.runtime import driver


class Launcher:
    """Launches ``kernel``, and looks up what was compiled for a call of the same kind.

    ``kernel[grid](…)`` inspects and hashes every argument at every launch, in as much detail as any
    kernel may need, and makes a record for hooks, also where there are none. Here two calls are of
    the same kind if they have the same device, the same compile-time constants, and arguments with
    the same traits that Triton compiles for.

    Args:
        kernel: a function decorated with ``triton.jit``, which specializes all records. Its first
            argument is a tensor, or a record that begins with one; compile-time constants are last.
    """

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
            grid: number of programs along each of up to three axes.
            arguments: all but the compile-time constants, in the kernel's order.
            constants: the compile-time constants, and Triton's options such as ``num_warps``.
        """
        if not self.constants:
            self.kernel[grid](*arguments, **constants)
            return
        first = arguments[0]
        device = (first[0] if isinstance(first, tuple) else first).get_device()
        key = (device, *constants.values(), *_traits(arguments, self.specialized))
        found = self.compiled.get(key)
        if found is None:
            compiled = self.kernel[grid](*arguments, **as_constexprs(constants))
            self.compiled[key] = compiled, [constants[name] for name in self.constants]
            return
        compiled, of_kernel = found
        grid = (*grid, 1, 1)[:3]
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:  # of a profiler
            compiled[grid](*arguments, *of_kernel)
        else:
            stream = driver.active.get_current_stream(device)  # pyright: ignore[reportAttributeAccessIssue]
            handles = compiled.function, compiled.packed_metadata
            compiled.run(*grid, stream, *handles, None, None, None, *arguments, *of_kernel)


def _traits(arguments: tuple[Any, ...], specialized: list[bool]) -> list[Hashable]:
    """What Triton compiles for.

    Of a tensor, its dtype and alignment. Of an integer, whether it needs 64 bits and, if it is
    ``specialized``, whether it is 1 or divisible by 16. Of a descriptor, its dtype and box. Which
    arguments are ``None``. The same of each field of a record. Floats all have one type.
    """
    traits: list[Hashable] = []
    for argument, is_specialized in zip(arguments, specialized, strict=False):
        for x in argument if isinstance(argument, tuple) else (argument,):
            if x is None:
                traits.append(None)
            elif isinstance(x, int):
                wide = x >= 2**31
                traits.append((wide, x == 1, x % 16 == 0) if is_specialized else wide)
            elif isinstance(x, Tensor):  # after the others, as this check is slow for them
                traits.append(x.dtype if x.data_ptr() % 16 == 0 else (x.dtype, "unaligned"))
            elif isinstance(x, TensorDescriptor):
                traits += x.base.dtype, tuple(x.block_shape)
    return traits


def as_constexprs(constants: dict[str, Any]) -> dict[str, Any]:
    """``constants`` as a kernel is compiled for them: each field of a record is a constant, too.

    Otherwise Triton takes the fields for plain numbers, which not all of its functions accept.
    """
    return {
        name: type(value)(*map(constexpr, value)) if hasattr(value, "_fields") else value
        for name, value in constants.items()
    }


def overlap_options(overlap: bool) -> dict[str, bool]:
    """Constants and options of a kernel that, if ``overlap``, begins before the last one has ended.

    OVERLAP tells the kernel, which then waits for the last one itself (``griddepcontrol.wait``).
    """
    return {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}
