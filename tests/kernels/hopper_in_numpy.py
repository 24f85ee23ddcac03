"""Runs Gluon kernels for Hopper alone in numpy, as ``gluon_in_numpy.py`` does others.

Every program is a thread, and every trade of its warps where these have trades of their own. Copies
of the tensor memory accelerator arrive some time after they are begun, each row at the address that
its descriptor gives, and leave when they are waited for; products are those of the operands as they
are when they are waited for; fresh shared memory is NaN. A barrier that is waited for in vain fails
the test.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
from triton.experimental.gluon import language as real
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.kernels import gluon_in_numpy
from tests.kernels.gluon_in_numpy import Block, Layout, Pointer, in_numpy, launched_by
from torchrec_jagged_attn import devices
from torchrec_jagged_attn.kernels.common.launch import Launcher

__all__ = ["hopper_in_numpy"]

MULTIPROCESSORS = 3
PATIENCE_S = 20.0
DELAY_S = 1e-3  # the longest of a copy


class AnyLayout(Layout):
    """Any layout, told of in any way."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()


class SharedMemory(gluon_in_numpy.SharedMemory):
    """A piece of shared memory, of which all that is cut remains a view."""

    def index(self, at: object) -> SharedMemory:
        return SharedMemory(super().index(at).values)

    def slice(self, start: int, length: int, dim: int = 0) -> SharedMemory:
        return SharedMemory(super().slice(start, length, dim).values)

    def permute(self, order: tuple[int, ...]) -> SharedMemory:
        return SharedMemory(super().permute(order).values)

    def reshape(self, shape: list[int]) -> SharedMemory:
        view = self.values.view()
        view.shape = shape  # which raises where a copy would be needed
        return SharedMemory(view)


class Barrier:
    """An mbarrier: its phase ends when all have arrived, and all bytes that are expected."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.phase = machine, 0

    def init(self, count: int) -> None:
        self.count = self.missing = count
        self.num_bytes = 0

    def arrive(self, num_arrivals: int, num_bytes: int) -> None:
        """Of threads, which may expect bytes, or, where that is negative, of bytes."""
        with self.machine.changed:
            self.missing -= num_arrivals
            self.num_bytes += num_bytes
            assert self.missing >= 0, "more arrive than the barrier is for"
            if self.missing == 0 and self.num_bytes == 0:
                self.phase, self.missing = self.phase + 1, self.count
                self.machine.changed.notify_all()

    def wait(self, parity: object) -> None:
        self.machine.wait_for(lambda: self.phase % 2 != int(parity))


class Product:
    """A product on its way; its operands are read when it is waited for."""

    def __init__(self, a: Any, b: SharedMemory, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc

    def value(self) -> Block:
        acc = self.acc.value() if isinstance(self.acc, Product) else self.acc
        assert self.a.dtype == self.b.dtype
        product = self.a.values.astype(np.float32) @ self.b.values.astype(np.float32)
        assert list(product.shape) == acc.shape
        return Block(product + acc.values if self.use_acc else product)


class Machine:
    """What the programs of a launch share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.errors: list[BaseException] = []
        self.random = random.Random(0)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            in_time = self.changed.wait_for(lambda: condition() or self.errors, PATIENCE_S)
            assert in_time, "waits for ever"
            assert not self.errors, "another thread failed"

    def run(self, calls: list[Callable[[], object]]) -> None:
        """All ``calls``, side by side."""

        threads = [threading.Thread(target=self.attempt, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def attempt(self, call: Callable[[], object]) -> None:
        """Keep what ``call`` raises, for all threads to see."""
        try:
            call()
        except BaseException as error:
            with self.changed:
                self.errors.append(error)
                self.changed.notify_all()


class Descriptor:
    """The tensor that a descriptor describes, by addresses of 64 bits."""

    def __init__(self, descriptor: TensorDescriptor) -> None:
        base, self.box = descriptor.base.detach(), descriptor.block_shape
        self.bounds, self.strides = descriptor.shape, descriptor.strides
        self.item = base.element_size()
        size = sum((n - 1) * s for n, s in zip(base.shape, base.stride(), strict=True)) + 1
        self.elements = base.as_strided((size,), (1,)).numpy()
        self.dtype, self.layout = self.elements.dtype.type, AnyLayout()
        num_bytes = int(np.prod(self.box)) * self.item
        self.block_type = types.SimpleNamespace(shape=list(self.box), nbytes=num_bytes)

    def locate(self, coordinates: list) -> tuple[np.ndarray, np.ndarray]:
        """Which elements of the box there are, ``[*box]``, and where those lie."""
        inside, address = np.ones(self.box, bool), np.zeros(self.box, np.uint64)
        for axis, first in enumerate(coordinates):
            at = int(first) + np.arange(self.box[axis])
            at = at.reshape([-1 if i == axis else 1 for i in range(len(self.box))])
            inside &= (at >= 0) & (at < self.bounds[axis])
            address += at.astype(np.uint64) * np.uint64(self.strides[axis] * self.item)
        index = (address[inside] // np.uint64(self.item)).astype(np.int64)
        assert ((index >= 0) & (index < self.elements.size)).all(), "out of bounds"
        return inside, index


def _language(
    machine: Machine, program: int, num_programs: int, num_warps: int
) -> types.SimpleNamespace:
    """Gluon's language, as one program sees it."""
    language = gluon_in_numpy._language(program, num_programs, num_warps)

    def allocate(dtype: type, shape: list[int], layout: object) -> object:
        if isinstance(layout, BarrierLayout):
            barriers = [Barrier(machine) for _ in range(shape[0])]
            return types.SimpleNamespace(index=lambda at: barriers[int(at)], shape=shape)
        fresh = np.nan if issubclass(dtype, np.floating) else -(2**30)
        return SharedMemory(np.full(shape, fresh, dtype))

    def atomic_add(ptr: Pointer, value: Any, sem: str = "", scope: str = "") -> Block:
        with machine.changed:
            old = np.array(ptr.elements[ptr.offsets])
            ptr.elements[ptr.offsets] = old + getattr(value, "values", value)
        return Block(old)

    def warp_specialize(trades: list[tuple], num_warps: list[int], num_registers: list[int]):
        assert len(trades) == 1 + len(num_warps) == 1 + len(num_registers)
        machine.run([lambda t=trade: t[0](*t[1]) for trade in trades])

    overridden = {name: AnyLayout for name in dir(real) if name.endswith("Layout")}
    overridden |= {
        "allocate_shared_memory": allocate,
        "atomic_add": atomic_add,
        "warp_specialize": warp_specialize,
        "load": lambda ptr, cache_modifier="": gluon_in_numpy._load(ptr),
        "to_tensor": lambda x: Block(x if isinstance(x, bool) else np.int32(x)),
        "log2": lambda block: Block(np.log2(block.values)),
    }
    return types.SimpleNamespace(**vars(language) | overridden)


class BarrierLayout:
    """Layout of barriers."""


def _tensor_memory_accelerator(machine: Machine) -> types.SimpleNamespace:
    """Copies that arrive when they like, and leave as late as they may."""
    leaving = threading.local()  # of each trade, which alone waits for them

    def load(descriptor: Descriptor, coordinates: list, barrier: Barrier, tile: SharedMemory):
        def arrive() -> None:
            inside, index = descriptor.locate(coordinates)
            tile.values[...] = 0
            tile.values[inside] = descriptor.elements[index]
            barrier.arrive(0, -tile.values.nbytes)

        with machine.changed:
            delay_s = machine.random.uniform(0, DELAY_S)
        threading.Timer(delay_s, machine.attempt, (arrive,)).start()

    def store(descriptor: Descriptor, coordinates: list, tile: SharedMemory) -> None:
        vars(leaving).setdefault("copies", []).append((descriptor, coordinates, tile))

    def store_wait(pendings: int) -> None:
        copies = vars(leaving).setdefault("copies", [])
        while len(copies) > pendings:
            descriptor, coordinates, tile = copies.pop(0)
            inside, index = descriptor.locate(coordinates)
            descriptor.elements[index] = tile.values[inside]

    return types.SimpleNamespace(
        async_copy_global_to_shared=load,
        async_copy_shared_to_global=store,
        store_wait=store_wait,
    )


def _wait(num_outstanding: int, deps: tuple) -> object:
    """Products take longer than any copy that has begun too early."""
    time.sleep(2 * DELAY_S)
    values = [dep.value() if isinstance(dep, Product) else dep for dep in deps]
    return values[0] if len(values) == 1 else tuple(values)


def _shift_columns(tile: Block, count: Block) -> Block:
    """Each row to the right; NaN where anything may be."""
    at = np.arange(tile.shape[1]) - count.values
    values = np.take_along_axis(tile.values, np.maximum(at, 0), 1)
    return Block(np.where(at < 0, tile.values.dtype.type(np.nan), values))


def _launch(
    launcher: Launcher, grid: tuple, arguments: tuple, constants: dict, launched: list[str]
) -> None:
    constants = dict(constants)
    num_warps = constants.pop("num_warps")
    constants.pop("maxnreg", None)
    machine = Machine()
    arguments = tuple(
        Descriptor(x) if isinstance(x, TensorDescriptor) else gluon_in_numpy._argument(x)
        for x in arguments
    )
    barriers = types.SimpleNamespace(
        MBarrierLayout=BarrierLayout,
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, num_bytes: barrier.arrive(1, num_bytes),
        arrive=lambda barrier: barrier.arrive(1, 0),
        wait=lambda barrier, parity: barrier.wait(parity),
    )

    def run(program: int) -> None:
        language = _language(machine, program, grid[0], num_warps)
        replaced = {
            "gl": language,
            "tl": language,
            "mbarrier": barriers,
            "tma": _tensor_memory_accelerator(machine),
            "mma_v2": gluon_in_numpy._multiply,
            "warpgroup_mma": lambda a, b, acc, use_acc=True, is_async=True: Product(
                a, b, acc, use_acc
            ),
            "warpgroup_mma_wait": _wait,
            "fence_async_shared": lambda: None,
            "thread_barrier": lambda: None,
            "range": gluon_in_numpy._range,
            "shift_columns": _shift_columns,
        }
        with np.errstate(all="ignore"):
            in_numpy(launcher.kernel, replaced)(*arguments, **constants)

    machine.run([lambda p=program: run(p) for program in range(grid[0])])


@contextlib.contextmanager
def hopper_in_numpy() -> Iterator[list[str]]:
    """Kernels for Hopper run on CPU as on a GPU of few multiprocessors; yields those that did."""
    with (
        launched_by(_launch) as launched,
        mock.patch.object(devices, "hopper_multiprocessors", return_value=MULTIPROCESSORS),
    ):
        yield launched
