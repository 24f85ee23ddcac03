"""Records that the kernels of flash attention take, each thing with its shape once.

Query rows are ``Lq`` of a sample and ``ΣLq`` of all, key rows ``Lk`` and ``ΣLk``; ``H`` heads of
queries, ``Hk`` of keys. Pointers are ``None`` where there is nothing, or a kernel does not use
it. What the op returns is ``arguments.FlashOutputs``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = [
    "Arguments",
    "Biases",
    "Constants",
    "Gradients",
    "HopperConstants",
    "Inputs",
    "Prepared",
    "Samples",
]


class Constants(NamedTuple):
    """What a kernel is compiled for; ``None`` where it does not use it."""

    H: int  # heads of queries
    HK: int  # heads of keys and values
    D: int  # width of queries and keys
    DV: int  # width of values
    BLOCK_D: int  # columns of a tile
    CAUSAL: bool
    NEGATIVE: bool  # whether the scale is
    EXACT: bool  # whether statistics are those of fp32, see ``tiles.store_softmax_stats``
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
    BLOCKS_R: int | None = None  # of 16 buckets of distances
    SHORT: int = 0  # most rows of samples that others take
    IS_SELF: bool = False  # whether samples have as many queries as keys
    OVERLAP: bool = False  # whether launches overlap

    def of_launch(self, **values: Any) -> dict[str, Any]:
        """As a launch takes them: ``values`` in capitals are constants, others its options."""
        return _of_launch(self, values)

    def on_hopper(self, **values: Any) -> dict[str, Any]:
        """As a launch of a kernel in Gluon takes them, see :meth:`of_launch`."""
        constants = HopperConstants(self.H, self.HK, self.CAUSAL, self.BLOCK_D, self.R > 0)
        return _of_launch(constants, values)


class HopperConstants(NamedTuple):
    """What a kernel in Gluon is compiled for; descriptors have the widths and strides of rows."""

    H: int  # heads of queries
    HK: int  # heads of keys and values
    CAUSAL: bool
    BLOCK_D: int  # columns of a tile
    BY_DISTANCE: bool  # whether scores have a bias by distance
    BLOCK_M: int | None = None  # queries of a tile
    BLOCK_N: int | None = None  # keys of a tile
    STAGES: int | None = None  # tiles in shared memory; in backward, of queries
    KV_STAGES: int | None = None  # of keys, in backward
    OWN_WG: bool = False  # whether the gradient of queries has a warpgroup of its own
    HALVES: bool = False  # whether samples of up to half a tile are computed as such
    ITEMS: int | None = None  # heads of samples that a program computes
    OVERLAP: bool = False  # whether launches overlap


def _of_launch(constants: Any, values: dict[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in values.items() if name.islower()}
    of_kernel = {name: value for name, value in values.items() if name.isupper()}
    return {"C": constants._replace(**of_kernel), **options}


class Inputs(NamedTuple):
    """Rows that attend and are attended to, as far apart as strides of :class:`Constants` say.

    Attributes:
        q: ``[ΣLq, H, D]``.
        k: ``[ΣLk, Hk, D]``.
        v: ``[ΣLk, Hk, Dv]``.
    """

    q: Any
    k: Any
    v: Any


class Biases(NamedTuple):
    """What is added to scores, and what is dropped; the first nine as in ``arguments.Biases``.

    Attributes:
        by_distance: ``[H, 2 · reach]`` fp32, see ``distance_bias.py``.
    """

    bias: Any
    position_bias: Any
    age_bias: Any
    timestamps: Any
    request_time: Any
    row_dropout: Any
    dropout: Any
    places: Any
    ends: Any
    by_distance: Any


class Samples(NamedTuple):
    """Where the rows of samples lie.

    Attributes:
        q_offsets: ``[B + 1]``.
        kv_offsets: ``[B + 1]``.
        tiles: ``[1 + capacity, FIELDS]`` int64, of queries or keys, see ``tile_list.list_tiles``.
    """

    q_offsets: Any
    kv_offsets: Any
    tiles: Any = None


class Gradients(NamedTuple):
    """What backward reads and writes.

    Attributes:
        out: ``[ΣLq, H, Dv]``, read.
        delta: ``[ΣLq, H]`` fp32, Σ_d grad_out · out: written beside ``q``, then read.
        q: ``[ΣLq, H, D]``.
        k: ``[ΣLk, Hk, D]``, rows GRAD_K_STRIDE apart.
        v: ``[ΣLk, Hk, Dv]``, rows GRAD_V_STRIDE apart.
        bias: ``[ΣLk, H]``; of prior weights those of their logarithms, fp32.
        tables: ``[tiles of keys, P + A, H]`` fp32.
        relative: ``[tiles of queries, H, R]`` fp32.
    """

    out: Any
    delta: Any
    q: Any
    k: Any
    v: Any
    bias: Any = None
    tables: Any = None
    relative: Any = None


class Prepared(NamedTuple):
    """What backward on Hopper needs of each tile of queries and head, see ``hopper_prepare.py``.

    Attributes:
        row_stats: ``[tiles of queries · H, 2 · BLOCK_M]`` fp32: log-sum-exp, Σ_d grad_out · out.
        turns: ``[tiles of queries · H]`` int32, zeros.
    """

    row_stats: Any
    turns: Any


class Arguments(NamedTuple):
    """What a kernel was given, for the functions that it calls.

    Attributes:
        num_stats: numbers of each of the two statistics.
        reach: half the length of the list by distance.
        window: how many keys each query sees at most; ``None`` for all.
        factor: ``|scale| · log2(e)``, rounded once.
    """

    inputs: Any
    biases: Any
    outputs: Any
    grads: Any
    samples: Any
    num_stats: Any
    reach: Any
    window: Any
    factor: Any
    scale: Any
