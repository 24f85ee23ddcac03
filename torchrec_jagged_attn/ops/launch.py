"""Launches of Triton kernels with little host time."""

from __future__ import annotations

import functools
import sys
from collections.abc import Hashable
from time import perf_counter
from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.knobs import cache, runtime
from triton.language import constexpr
from triton.runtime import driver

LONG_COMPILATION = 1.0  # seconds; a kernel from Triton's cache loads in milliseconds


class Launcher:
    """Launches ``kernel``, from a cache of compiled kernels.

    ``kernel[grid](…)`` inspects and hashes every argument at every launch, in as much detail as any
    kernel may need, and builds metadata for hooks even if there are none. This cache is keyed by
    the device, the compile-time constants, and the properties of arguments that Triton specializes
    kernels for.

    Args:
        kernel: a function decorated with ``triton.jit``. Its first argument must be a tensor, or a
            record that begins with one; compile-time constants must be last. Fields of records must
            not be excluded from specialization.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[tuple, tuple[Any, list[Any]]] = {}
        params = getattr(kernel, "params", [])  # missing in the interpreter, which does not compile
        self.constants = [param.name for param in params if param.is_constexpr]
        self.specialized = [not param.do_not_specialize for param in params]

    def __call__(
        self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        """Launch ``grid`` programs on the current stream.

        Args:
            grid: number of programs along each of up to three axes.
            arguments: the kernel's arguments in their order, without compile-time constants.
            constants: the compile-time constants, and launch options such as ``num_warps``.
        """
        if not self.constants:
            self.kernel[grid](*arguments, **constants)
            return
        first = arguments[0]
        device = (first[0] if isinstance(first, tuple) else first).get_device()
        key = (device, *constants.values(), *_specialization(arguments, self.specialized))
        cached = self.compiled.get(key)
        if cached is None:
            start = perf_counter()
            compiled = self.kernel[grid](*arguments, **as_constexprs(constants))
            if perf_counter() - start > LONG_COMPILATION:
                _print_compilation()
            self.compiled[key] = compiled, [constants[name] for name in self.constants]
            return
        compiled, constant_values = cached
        grid = (*grid, 1, 1)[:3]
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:  # a profiler's
            compiled[grid](*arguments, *constant_values)
        else:
            stream = driver.active.get_current_stream(device)  # pyright: ignore[reportAttributeAccessIssue]
            handles = compiled.function, compiled.packed_metadata
            hooks = None, None, None  # metadata, enter and exit
            compiled.run(*grid, stream, *handles, *hooks, *arguments, *constant_values)


@functools.cache  # once per process
def _print_compilation() -> None:
    message = "The first steps are slow while GPU kernels are compiled; Triton caches them in"
    print(message, cache.dir, file=sys.stderr, flush=True)


def _specialization(arguments: tuple[Any, ...], specialized: list[bool]) -> list[Hashable]:
    """Return the properties of arguments, and of fields of records, that Triton specializes for:

    - tensors: dtype, and whether the address is a multiple of 16 bytes;
    - integers: whether they need 64 bits and, if ``specialized``, are 1 or a multiple of 16;
    - descriptors: dtype and block shape;
    - ``None``.

    Floats are not specialized.
    """
    properties: list[Hashable] = []
    for argument, is_specialized in zip(arguments, specialized, strict=False):
        for x in argument if isinstance(argument, tuple) else (argument,):
            if x is None:
                properties.append(None)
            elif isinstance(x, int):
                wide = x >= 2**31
                properties.append((wide, x == 1, x % 16 == 0) if is_specialized else wide)
            elif isinstance(x, Tensor):  # after integers: this check is slow for other types
                properties.append(x.dtype if x.data_ptr() % 16 == 0 else (x.dtype, "unaligned"))
            elif isinstance(x, TensorDescriptor):
                properties += x.base.dtype, tuple(x.block_shape)
    return properties


def as_constexprs(constants: dict[str, Any]) -> dict[str, Any]:
    """Return ``constants`` with each field of a record wrapped in ``constexpr``.

    Otherwise Triton treats the fields as plain numbers, which not all of its functions accept.
    """
    return {
        name: type(value)(*map(constexpr, value)) if hasattr(value, "_fields") else value
        for name, value in constants.items()
    }


def overlap_options(overlap: bool) -> dict[str, bool]:
    """Return the constant OVERLAP and launch options for programmatic dependent launch.

    If ``overlap``, a kernel may start before the previous one has ended. With OVERLAP, it waits for
    that itself (``griddepcontrol.wait``).
    """
    return {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}
