"""Records of arguments of the kernels of target attention, with their shapes.

``rows`` are the query rows of all samples. A sample has ``count`` of them: targets × heads, in this
order. A partial result has ``partial_rows``. Pointers are ``None`` if a kernel does not use them.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Constants(NamedTuple):
    """Compile-time constants of a kernel; ``None`` if its variant does not use them."""

    LAYOUT: int  # of queries: DENSE, SHARED or JAGGED
    H: int  # heads
    D: int  # width of queries and history rows
    BLOCK_R: int  # query rows of a block
    BLOCK_D: int  # columns of a tile
    CHUNK: int  # fewest history rows of a chunk
    P: int = 0  # buckets of positions
    A: int = 0  # buckets of ages
    SCORE: str = "softmax"  # from scores to weights, see ``arguments.SCORES``
    LEVELS: int = 0  # of packed codes; 0 where history rows are not packed
    PER_BYTE: int = 0  # codes per byte
    STRIDE: int | None = None  # elements from one history row to the next
    BLOCK_N: int | None = None  # history rows of a tile
    NUM_STAGES: int | None = None  # tiles in shared memory
    ROWS_PER_PARTIAL: int | None = None  # history rows per partial result, see ``schedule.py``
    PRECISION: str | None = None  # of products, see ``matmul.product_precision``
    COMPONENTS: int | None = None  # bf16 components of a number, see ``warp_common.decompose``
    OVERLAP: bool = False  # whether launches overlap
    SINGLE_PASS: bool = False  # whether one pass computes all gradients of samples of one block
    ONE_TARGET: bool = False  # whether samples have one target each, and one block of query rows
    BLOCK_H: int | None = None  # heads of a tile of a table's gradients
    BLOCK_P: int | None = None  # positions of such a tile
    BLOCK_A: int | None = None  # ages of such a tile


class SplitSchedule(NamedTuple):
    """How histories are split into chunks, written by ``schedule.split_schedule_kernel``."""

    # [2, partials] int32: the sample of each partial result, or -1; and for the first partial
    # result of each sample, the number of finished chunks, initially zero
    entries: Any
    offsets: Any  # [B + 1], of history rows


class Samples(NamedTuple):
    """Offsets and indices of samples."""

    schedule: Any  # ``entries`` of the :class:`SplitSchedule`
    offsets: Any  # [B + 1], of history rows
    query_offsets: Any  # [B + 1], of targets, if queries are JAGGED
    indices: Any = None  # [N], gather indices of history rows, if there are any


class Outputs(NamedTuple):
    """Outputs of forward, which backward reads; see ``arguments.TargetOutputs``."""

    out: Any  # [rows, D]
    residual: Any  # [rows, D]
    stats: Any  # [2, rows] fp32
    grad_lse: Any = None  # [rows] fp32, the gradient of log-sum-exps; in backward only


class Partials(NamedTuple):
    """Partial results of the chunks of long histories, to be combined."""

    # [partials, partial_rows, D] fp32: outputs, not yet divided by their total, or gradients of
    # queries, not yet scaled
    acc: Any
    # In fp32. Forward [partials, 2, partial_rows]: the largest score and the total of weights.
    # Backward [partials, partial_rows]: the total of the gradients of scores; in ``one_warp``
    # [partials, 1 + P + A, partial_rows]: also the total of the weights of each bucket.
    totals: Any


class Gradients(NamedTuple):
    """Gradients, which backward writes."""

    query: Any  # [rows, D]; if queries are SHARED, in fp32, to be summed over samples
    # [rows] fp32, the mean of weights' gradients minus ``grad_lse``, if a later kernel reads it
    delta: Any = None
    history: Any = None  # [N, D]; or [U, D] with gather indices
    prior_weights: Any = None  # [N] fp32, the gradients of their logarithms
    tables: Any = None  # [programs, P + A, H] fp32; in ``one_warp`` [programs, P + A, count]
    # [N], with gather indices: the index, if it occurs once, else -1. Gradients of rows whose index
    # occurs several times are left to ``row_gradients.py``.
    targets: Any = None
