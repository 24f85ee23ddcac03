"""Arguments of the kernels of flash attention.

A sample has ``Lq`` query rows and ``Lk`` key rows; all samples have ``ΣLq`` and ``ΣLk``. There are
``H`` heads of queries and ``Hk`` heads of keys. Pointers that a kernel does not use are ``None``.
Outputs are ``arguments.FlashOutputs``.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Constants(NamedTuple):
    """Compile-time constants of a Triton kernel; ``None`` if it does not use them."""

    H: int  # heads of queries
    HK: int  # heads of keys and values
    D: int  # width of queries and keys
    DV: int  # width of values
    BLOCK_D: int  # columns of a tile
    CAUSAL: bool
    NEGATIVE: bool  # whether the scale is negative
    EXACT: bool  # whether statistics are exact, see ``tiles.store_softmax_stats``
    PRECISION: str  # precision of products, see ``matmul.product_precision``
    P: int = 0  # rows of ``position_bias``, 0 without it
    A: int = 0  # rows of ``age_bias``, 0 without it
    R: int = 0  # rows of ``relative_bias``, 0 without it
    BIASED: bool = False  # whether there is any bias
    Q_STRIDE: int | None = None  # elements from row to row
    K_STRIDE: int | None = None
    V_STRIDE: int | None = None
    GRAD_K_STRIDE: int | None = None
    GRAD_V_STRIDE: int | None = None
    BLOCK_M: int | None = None  # queries of a tile
    BLOCK_N: int | None = None  # keys of a tile
    BLOCKS_R: int | None = None  # blocks of 16 buckets of distances
    SHORT: int = 0  # samples of at most this many rows on both sides are skipped
    IS_SELF: bool = False  # whether all samples have as many queries as keys
    OVERLAP: bool = False  # whether launches overlap

    @property
    def hopper_width(self) -> int:
        """Columns of a tile of a Gluon kernel: at least 128 bytes, the width of the swizzle."""
        return max(64, self.BLOCK_D)

    def launch_arguments(self, **values: Any) -> dict[str, Any]:
        """Return the constant ``C`` and launch options of a Triton kernel.

        ``values`` with names in capitals are fields of ``C``; the others are launch options.
        """
        return _launch_arguments(self, values)

    def hopper_launch_arguments(self, **values: Any) -> dict[str, Any]:
        """Return the constant ``C`` and launch options of a Gluon kernel."""
        constants = HopperConstants(self.H, self.HK, self.CAUSAL, self.hopper_width, self.R > 0)
        return _launch_arguments(constants, values)


class HopperConstants(NamedTuple):
    """Compile-time constants of a Gluon kernel. Descriptors contain widths and strides of rows."""

    H: int  # heads of queries
    HK: int  # heads of keys and values
    CAUSAL: bool
    BLOCK_D: int  # columns of a tile
    BY_DISTANCE: bool  # whether scores have a bias by distance
    BLOCK_M: int | None = None  # queries of a tile
    BLOCK_N: int | None = None  # keys of a tile
    STAGES: int | None = None  # tiles in shared memory; in backward, tiles of queries
    KV_STAGES: int | None = None  # tiles of keys in shared memory in backward
    DQ_WARPGROUP: bool = False  # whether a third warpgroup computes dq
    HALVES: bool = False  # whether samples of at most half a tile use half a tile
    ITEMS: int | None = None  # (sample, head) pairs per program
    OVERLAP: bool = False  # whether launches overlap


def _launch_arguments(constants: Any, values: dict[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in values.items() if name.islower()}
    fields = {name: value for name, value in values.items() if name.isupper()}
    return {"C": constants._replace(**fields), **options}


class Inputs(NamedTuple):
    """Queries, keys and values, with the row strides of :class:`Constants`."""

    q: Any  # [ΣLq, H, D]
    k: Any  # [ΣLk, Hk, D]
    v: Any  # [ΣLk, Hk, Dv]


class Samples(NamedTuple):
    """Offsets and tiles of samples."""

    q_offsets: Any  # [B + 1]
    kv_offsets: Any  # [B + 1]
    # [1 + capacity, FIELDS] int64, tiles of queries or of keys, see ``tile_list.list_tiles``
    tiles: Any = None


class Gradients(NamedTuple):
    """Gradients. The gradient of the output is read, the others are written."""

    out: Any  # [ΣLq, H, Dv]
    delta: Any  # [ΣLq, H] fp32, Σ_d grad_out · out: written together with ``q``, then read
    q: Any  # [ΣLq, H, D]
    k: Any  # [ΣLk, Hk, D], rows GRAD_K_STRIDE apart
    v: Any  # [ΣLk, Hk, Dv], rows GRAD_V_STRIDE apart
    bias: Any = None  # [ΣLk, H]
    tables: Any = None  # [tiles of keys, P + A, H] fp32
    relative: Any = None  # [tiles of queries, H, R] fp32


class Prepared(NamedTuple):
    """Inputs of backward on Hopper, by tile of queries and head; see ``hopper_prepare.py``."""

    # [tiles of queries · H, 2 · BLOCK_M] fp32: log-sum-exp, Σ_d grad_out · out. With dropout
    # 4 · BLOCK_M: the third are random bits, see ``dropout.query_draws``
    row_stats: Any
    semaphores: Any  # [tiles of queries · H] int32, zeros: see ``hopper_dq_semaphores.py``


class Arguments(NamedTuple):
    """Arguments of a kernel, as one argument of the device functions that it calls."""

    inputs: Any
    biases: Any
    outputs: Any
    grads: Any
    samples: Any
    num_stats: Any  # elements of each of the two statistics: ΣLq · H
    max_distance: Any  # half the number of columns of ``by_distance``
    window: Any  # maximum number of keys that a query attends to; ``None`` for all
    factor: Any  # ``|scale| · log2(e)``, rounded once
    scale: Any
