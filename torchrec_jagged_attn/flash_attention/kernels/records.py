"""Records of arguments of the kernels of flash attention, with their shapes.

A sample has ``Lq`` query rows and ``Lk`` key rows, all samples ``ΣLq`` and ``ΣLk``; ``H`` heads of
queries, ``Hk`` of keys. Pointers are ``None`` if they are absent, or if a kernel does not use them.
Outputs are ``arguments.FlashOutputs``.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Constants(NamedTuple):
    """Compile-time constants of a kernel; ``None`` if it does not use them."""

    H: int  # heads of queries
    HK: int  # heads of keys and values
    D: int  # width of queries and keys
    DV: int  # width of values
    BLOCK_D: int  # columns of a tile
    CAUSAL: bool
    NEGATIVE: bool  # whether the scale is negative
    EXACT: bool  # whether statistics are kept exactly, see ``tiles.store_softmax_stats``
    PRECISION: str  # of products, see ``matmul.product_precision``
    P: int = 0  # buckets of positions
    A: int = 0  # buckets of ages
    R: int = 0  # buckets of distances
    PRIOR: bool = False  # whether the bias is prior weights
    BIASED: bool = False  # whether there is any bias
    Q_STRIDE: int | None = None  # elements from row to row
    K_STRIDE: int | None = None
    V_STRIDE: int | None = None
    GRAD_K_STRIDE: int | None = None
    GRAD_V_STRIDE: int | None = None
    BLOCK_M: int | None = None  # queries of a tile
    BLOCK_N: int | None = None  # keys of a tile
    BLOCKS_R: int | None = None  # blocks of 16 buckets of distances
    SHORT: int = 0  # samples of up to so many rows are skipped
    IS_SELF: bool = False  # whether samples have as many queries as keys
    OVERLAP: bool = False  # whether launches overlap

    def of_launch(self, **values: Any) -> dict[str, Any]:
        """Arguments of a launch: ``values`` in capitals are constants, the others its options."""
        return _of_launch(self, values)

    def on_hopper(self, **values: Any) -> dict[str, Any]:
        """Arguments of a launch of a Gluon kernel, see :meth:`of_launch`."""
        constants = HopperConstants(self.H, self.HK, self.CAUSAL, self.BLOCK_D, self.R > 0)
        return _of_launch(constants, values)


class HopperConstants(NamedTuple):
    """Compile-time constants of a Gluon kernel; descriptors have the widths and strides of rows."""

    H: int  # heads of queries
    HK: int  # heads of keys and values
    CAUSAL: bool
    BLOCK_D: int  # columns of a tile
    BY_DISTANCE: bool  # whether scores have a bias by distance
    BLOCK_M: int | None = None  # queries of a tile
    BLOCK_N: int | None = None  # keys of a tile
    STAGES: int | None = None  # tiles in shared memory; in backward, of queries
    KV_STAGES: int | None = None  # tiles of keys in shared memory, in backward
    OWN_WG: bool = False  # whether a third warpgroup computes dq
    HALVES: bool = False  # whether samples of up to half a tile use half a tile
    ITEMS: int | None = None  # (sample, head) pairs of a program
    OVERLAP: bool = False  # whether launches overlap


def _of_launch(constants: Any, values: dict[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in values.items() if name.islower()}
    of_kernel = {name: value for name, value in values.items() if name.isupper()}
    return {"C": constants._replace(**of_kernel), **options}


class Inputs(NamedTuple):
    """Queries, keys and values, with the row strides of :class:`Constants`."""

    q: Any  # [ΣLq, H, D]
    k: Any  # [ΣLk, Hk, D]
    v: Any  # [ΣLk, Hk, Dv]


class Samples(NamedTuple):
    """Offsets of samples."""

    q_offsets: Any  # [B + 1]
    kv_offsets: Any  # [B + 1]
    # [1 + capacity, FIELDS] int64, of queries or keys, see ``tile_list.list_tiles``
    tiles: Any = None


class Gradients(NamedTuple):
    """Gradients: that of the output is read, the others are written."""

    out: Any  # [ΣLq, H, Dv], read
    delta: Any  # [ΣLq, H] fp32, Σ_d grad_out · out: written with ``q``, then read
    q: Any  # [ΣLq, H, D]
    k: Any  # [ΣLk, Hk, D], rows GRAD_K_STRIDE apart
    v: Any  # [ΣLk, Hk, Dv], rows GRAD_V_STRIDE apart
    bias: Any = None  # [ΣLk, H]; with prior weights, fp32 gradients of their logarithms
    tables: Any = None  # [tiles of keys, P + A, H] fp32
    relative: Any = None  # [tiles of queries, H, R] fp32


class Prepared(NamedTuple):
    """Inputs of the backward on Hopper for each tile of queries and head: ``hopper_prepare.py``."""

    row_stats: Any  # [tiles of queries · H, 2 · BLOCK_M] fp32: log-sum-exp, Σ_d grad_out · out
    semaphores: Any  # [tiles of queries · H] int32, zeros: see ``hopper_dq_semaphores.py``


class Arguments(NamedTuple):
    """The arguments of a kernel, for the functions that it calls."""

    inputs: Any
    biases: Any
    outputs: Any
    grads: Any
    samples: Any
    num_stats: Any  # elements of each of the two statistics
    reach: Any  # half the length of ``by_distance``
    window: Any  # how many keys each query sees at most; ``None`` for all
    factor: Any  # ``|scale| · log2(e)``, rounded once
    scale: Any
