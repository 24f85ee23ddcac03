"""Records that the kernels of target attention take, each thing with its shape once.

``rows`` are the query rows of all samples; a sample has ``count`` of them: targets × heads, in this
order. ``slot_rows`` is how many of them a slot has room for. Pointers are ``None`` where a kernel
does not use them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Constants", "Gradients", "Listing", "Outputs", "Samples", "SlotList", "Sums"]


class Constants(NamedTuple):
    """What a kernel is compiled for; ``None`` where its variant does not use it."""

    LAYOUT: int  # of queries: DENSE, SHARED or JAGGED
    H: int  # heads
    D: int  # width of queries and history rows
    BLOCK_R: int  # query rows of a block
    BLOCK_D: int  # columns of a tile
    CHUNK: int  # history rows of a chunk, at least
    P: int = 0  # buckets of positions
    A: int = 0  # buckets of ages
    PRIOR: bool = False  # whether the bias is prior weights
    SCORE: str = "softmax"  # what makes weights of scores, see ``arguments.SCORES``
    LEVELS: int = 0  # of packed codes; 0 where history rows are not packed
    PER_BYTE: int = 0  # codes that a byte holds
    STRIDE: int | None = None  # elements from one history row to the next
    BLOCK_N: int | None = None  # history rows of a tile
    NUM_STAGES: int | None = None  # tiles in shared memory
    SLOT: int | None = None  # history rows for each slot
    PRECISION: str | None = None  # of products, see ``matmul.product_precision``
    PARTS: int | None = None  # of bf16 that a number is multiplied in, see ``warp_parts.split``
    OVERLAP: bool = False  # whether launches overlap
    WAIT: bool = False  # whether all programs wait for the last kernel, not those of slots alone
    SINGLE_PASS: bool = False  # whether samples of one block have all gradients in one pass
    ONE_TARGET: bool = False  # whether each sample has one target, and its query rows one block
    BLOCK_H: int | None = None  # heads of a tile of a table's gradients
    BLOCK_P: int | None = None  # positions of one
    BLOCK_A: int | None = None  # ages of one


class SlotList(NamedTuple):
    """What ``schedule.list_slots`` reads and writes.

    Attributes:
        slots: ``[2, slots]`` int32: a slot's sample, -1 where it has none; zeros.
        offsets: ``[B + 1]``, of history rows.
    """

    slots: Any
    offsets: Any


class Listing(NamedTuple):
    """Arguments of ``schedule.list_slots``, for a kernel that calls it beside other work."""

    slot_list: SlotList
    num_samples: int
    num_slots: int
    chunk: int


class Samples(NamedTuple):
    """Where the rows of samples lie.

    Attributes:
        slots: of the :class:`SlotList`.
        offsets: ``[B + 1]``, of history rows.
        query_offsets: ``[B + 1]``, of targets, where queries are JAGGED.
        indices: ``[N]``, of the rows of the history, where it is read by them.
    """

    slots: Any
    offsets: Any
    query_offsets: Any
    indices: Any = None


class Outputs(NamedTuple):
    """What forward writes and backward reads; see ``arguments.TargetOutputs``.

    Attributes:
        out: ``[rows, D]``.
        residual: ``[rows, D]``.
        stats: ``[2, rows]`` fp32.
        grad_lse: ``[rows]`` fp32, the gradient of log-sum-exps; of backward alone.
    """

    out: Any
    residual: Any
    stats: Any
    grad_lse: Any = None


class Sums(NamedTuple):
    """What a chunk leaves in its slot, to be combined with the other chunks of its sample.

    Attributes:
        acc: ``[slots, slot_rows, D]`` fp32, of outputs that are not divided by their total yet, or
            of gradients of queries that are not scaled yet.
        weights: fp32. Forward ``[slots, 2, slot_rows]``, the largest score and the total of
            weights. Backward ``[slots, slot_rows]``, the total of the gradients of scores; of
            ``one_warp`` ``[slots, 1 + P + A, slot_rows]``, that and the weights of each bucket.
    """

    acc: Any
    weights: Any


class Gradients(NamedTuple):
    """What backward writes.

    Attributes:
        query: ``[rows, D]``; fp32 where queries are SHARED: a row for each sample.
        delta: ``[rows]`` fp32, the mean of the gradients of weights minus ``grad_lse``, where a
            kernel leaves it to the next one.
        history: ``[N, D]``; or ``[U, D]`` where rows are read by indices.
        bias: ``[N, H]``; or, of logarithms of prior weights, ``[N]`` fp32.
        tables: ``[programs, P + A, H]`` fp32; of ``one_warp`` ``[programs, P + A, count]``.
        targets: ``[N]``, where rows are read by indices: the row that a place names, if no other
            place names it, else -1. Gradients of the other rows are left to the next kernel.
    """

    query: Any
    delta: Any = None
    history: Any = None
    bias: Any = None
    tables: Any = None
    targets: Any = None
