"""Learning rates of tables whose lookups, with the update of the tables, are in a CUDA graph.

FBGEMM's kernels get the learning rate by value, so a capture freezes it. ``LearningRates`` captures
a value that occurs nowhere else, finds the kernels that were launched with it, and changes this
argument in the instantiated graph when the learning rate has changed. The CUDA driver is called by
ctypes: cuGraphKernelNodeGetParams, cuFuncGetParamInfo (CUDA 12.4) and
cuGraphExecKernelNodeSetParams.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn

# With these, a row whose gradient is zero does not change, so padding may have any valid ids.
OPTIMIZERS = (
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
)
MARK = 0x3DCCD100  # the bits of a number near 0.1


def capturable_tables(module: nn.Module) -> list[SplitTableBatchedEmbeddingBagsCodegen] | None:
    """Return the tables of a sharded module, or None if a CUDA graph cannot contain its lookups."""
    tables: list[SplitTableBatchedEmbeddingBagsCodegen] = []
    lookups: Any = module._lookups
    for lookup in lookups:
        for kernel in getattr(lookup, "_emb_modules", [None]):
            table = getattr(kernel, "emb_module", None)
            if not isinstance(table, SplitTableBatchedEmbeddingBagsCodegen):
                return None
            tables.append(table)
    return tables if all(map(_is_capturable, tables)) else None


def _is_capturable(table: SplitTableBatchedEmbeddingBagsCodegen) -> bool:
    options = table.optimizer_args
    return (
        table.optimizer in OPTIMIZERS
        and options.weight_decay == 0
        and options.max_norm == 0
        and (options.eps > 0 or table.optimizer == EmbOptimType.EXACT_SGD)
        and not table._used_rowwise_adagrad_with_counter
        and not table._used_rowwise_adagrad_with_global_weight_decay
        and all(
            x[2] in (EmbeddingLocation.DEVICE, EmbeddingLocation.HOST)
            for x in table.embedding_specs
        )
    )


def state_of_tables(table: SplitTableBatchedEmbeddingBagsCodegen) -> list[Any]:
    """Return the addresses and numbers of a table that a capture freezes."""
    names = (f"{name}_{place}" for name in ("weights", "momentum1") for place in ("dev", "host"))
    tensors = (getattr(table, name, None) for name in names)
    addresses = [x.data_ptr() for x in tensors if isinstance(x, Tensor)]
    options = table.optimizer_args
    return [*addresses, options.eps, options.gradient_clipping, options.max_gradient]


class _KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("func", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z")),
        *((name, ctypes.c_uint) for name in ("block_x", "block_y", "block_z")),
        ("shared_memory", ctypes.c_uint),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


class _Launch(NamedTuple):
    """A kernel launch whose argument ``index`` of ``count`` is a learning rate."""

    node: int
    params: _KernelNodeParams
    index: int
    count: int
    table: int


class LearningRateError(RuntimeError):
    """Learning rates in a graph cannot be changed."""


class LearningRates:
    """The learning rates of ``tables`` in a CUDA graph."""

    def __init__(self, tables: list[SplitTableBatchedEmbeddingBagsCodegen]) -> None:
        self._tables = tables
        self._captured: list[float | None] = [None] * len(tables)
        self._launches: list[_Launch] = []
        self._driver: Any = None
        if tables:
            try:
                self._driver = ctypes.CDLL("libcuda.so.1")
            except OSError as error:
                raise LearningRateError(
                    f"the CUDA driver must be installed, got {error}"
                ) from error

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        """Give each table a unique learning rate in this context, for the capture."""
        rates = [table.get_learning_rate() for table in self._tables]
        try:
            for i, table in enumerate(self._tables):
                (mark,) = struct.unpack("f", struct.pack("I", MARK + i))
                table.set_learning_rate(mark)
            yield
        finally:
            for table, rate in zip(self._tables, rates, strict=True):
                table.set_learning_rate(rate)

    def find_in(self, graph: torch.cuda.CUDAGraph) -> None:
        """Find the kernel launches of a captured graph that have a learning rate."""
        if not self._tables:  # of this rank
            return
        if not hasattr(self._driver, "cuFuncGetParamInfo"):
            raise LearningRateError("the CUDA driver must support CUDA 12.4, got an older one")
        handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
        self._call("cuGraphGetNodes", handle, None, ctypes.byref(count))
        nodes = (ctypes.c_void_p * count.value)()
        self._call("cuGraphGetNodes", handle, nodes, ctypes.byref(count))
        for node in nodes:
            kind = ctypes.c_int()
            self._call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
            if kind.value == 0:  # CU_GRAPH_NODE_TYPE_KERNEL
                self._find_in_node(node)
        missing = set(range(len(self._tables))) - {x.table for x in self._launches}
        if missing:
            raise LearningRateError(
                f"a graph must have a launch with the learning rate of each of {len(self._tables)} "
                f"groups of tables, got none for {sorted(missing)}"
            )

    def _find_in_node(self, node: int) -> None:
        params = _KernelNodeParams()
        self._call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(params))
        sizes: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        function = ctypes.c_void_p(params.func)
        while params.arguments and not self._driver.cuFuncGetParamInfo(
            function, ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)
        ):
            sizes.append(size.value)
        for index, num_bytes in enumerate(sizes):
            if num_bytes == 4:
                bits = ctypes.cast(params.arguments[index], ctypes.POINTER(ctypes.c_uint32))[0]
                if 0 <= bits - MARK < len(self._tables):
                    launch = _Launch(node, params, index, len(sizes), bits - MARK)
                    self._launches.append(launch)

    def update(self, graph: torch.cuda.CUDAGraph) -> None:
        """Set the current learning rates of the tables in the instantiated ``graph``."""
        rates = [table.get_learning_rate() for table in self._tables]
        for launch in self._launches:
            if rates[launch.table] != self._captured[launch.table]:
                rate = ctypes.c_float(rates[launch.table])
                arguments = (ctypes.c_void_p * launch.count)(
                    *launch.params.arguments[: launch.count]
                )
                arguments[launch.index] = ctypes.addressof(rate)
                params = _KernelNodeParams.from_buffer_copy(launch.params)
                params.arguments = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
                self._call(
                    "cuGraphExecKernelNodeSetParams_v2",
                    ctypes.c_void_p(graph.raw_cuda_graph_exec()),
                    ctypes.c_void_p(launch.node),
                    ctypes.byref(params),
                )
        self._captured = [*rates]

    def _call(self, function: str, *arguments: Any) -> None:
        if error := getattr(self._driver, function)(*arguments):
            raise LearningRateError(f"{function} of the CUDA driver failed with error {error}")
