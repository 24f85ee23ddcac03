"""What the Gluon kernels of the paths ``one_warp`` and ``few_warps`` share.

They serve samples of up to 64 query rows whose history rows begin at multiples of 16 bytes, or are
packed in codes. Tiles of rows arrive in shared memory by asynchronous copies while earlier ones
are computed; those of codes are made of bytes that were loaded before. Each warp has products of
its own on tensor cores (``m16n8``), so that warps rarely wait for each other:

    up to 8 query rows     history rows on the M side, query rows on the N side, in one warp
    up to 64               16 query rows to a warp on the M side, history rows on the N side

Triton neither keeps a tile in one place for products along both of its sides nor knows so narrow an
N side.

Tensor cores multiply fp32 as sums of bf16 (PARTS): three hold it whole, two hold 16 of its bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from torchrec_jagged_attn.attention.kernels import biases as in_triton
from torchrec_jagged_attn.attention.kernels import dropout as dropout_in_triton
from torchrec_jagged_attn.attention.kernels.scores import weights_and_slopes as weights_in_triton
from torchrec_jagged_attn.runtime.kernels import softmax as softmax_in_triton
from torchrec_jagged_attn.runtime.kernels.gluon import products_by_warp, wait_for_last_kernel
from torchrec_jagged_attn.runtime.kernels.softmax import LN2, LOG2E, LOG2E_LOW
from torchrec_jagged_attn.target_attention.kernels import schedule
from torchrec_jagged_attn.target_attention.kernels.code_parts import bytes_of_tile, store_codes

__all__ = [
    "BLOCK_R",
    "LEFT",
    "MMA",
    "RIGHT",
    "Chunk",
    "allocate_parts",
    "blocks_of",
    "columns_at_once",
    "copy_next",
    "drop_weights",
    "exp",
    "find_chunk",
    "find_listed_chunk",
    "indices_to_store",
    "load_bias",
    "load_columns",
    "load_parts",
    "load_rows",
    "load_targets",
    "next_indices",
    "open_ring",
    "parts_of_rows",
    "product",
    "program_of_sample",
    "query_draws",
    "ring_layout",
    "row_buckets",
    "row_layout",
    "row_numbers",
    "rows_of_sample",
    "score_gradients",
    "split",
    "store_grad_of_bias",
    "store_grad_of_history",
    "store_parts",
    "store_rows",
    "weights_and_slopes",
    "zeros_by_column",
]


BLOCK_R = gl.constexpr(8)  # query rows of ``one_warp``
MMA = gl.constexpr(products_by_warp.fn(1))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))

PROGRAMS = gl.constexpr(1024)  # of one warp, about as many as a GPU has at a time

age_bucket = gluon.jit(in_triton.age_bucket.fn)
recency_bucket = gluon.jit(in_triton.recency_bucket.fn)
row_numbers = gluon.jit(in_triton.row_numbers.fn)
is_dropped = gluon.jit(dropout_in_triton.is_dropped.fn)
query_draws = gluon.jit(dropout_in_triton.query_draws.fn)
drop_weights = gluon.jit(dropout_in_triton.drop_weights.fn)
score_gradients = gluon.jit(softmax_in_triton.score_gradients.fn)
weights_and_slopes = gluon.jit(weights_in_triton.fn)
rows_of_chunk = gluon.jit(schedule.rows_of_chunk.fn)


@gluon.constexpr_function
def probe_layout(warps):
    """32 numbers over the lanes of a warp, the same in all."""
    lanes = [[1], [2], [4], [8], [16]]
    return gl.DistributedLinearLayout([], lanes, [[0]] * (warps.bit_length() - 1), [], [32])


@gluon.constexpr_function
def row_layout(width, dtype, warps=1):
    """Lanes along rows of ``width`` elements, 16 bytes each."""
    elements = 128 // dtype.primitive_bitwidth
    lanes = min(32, width // elements)
    return gl.BlockedLayout([1, elements], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def ring_layout(width, dtype):
    """Tiles in shared memory, so that reads along either side meet few banks twice."""
    rows = max(1, 1024 // (dtype.primitive_bitwidth * width))  # in 128 bytes, one of each bank
    return gl.SwizzledSharedLayout(8, rows, min(8, width // 8), [1, 0])


@gluon.jit
def split(x, PARTS: gl.constexpr):
    """``x`` as a sum of PARTS in bf16, the largest first; where it is one, ``x`` as it is.

    The second of three is rounded. So the last ones, whose products are left out, are small, and
    have either sign.
    """
    parts = ()
    for part in gl.static_range(PARTS - 1):
        bits = x.to(gl.int32, bitcast=True)
        if part > 0:
            bits += 32768
        upper = (bits & -65536).to(gl.float32, bitcast=True)
        parts += (upper.to(gl.bfloat16),)
        x -= upper
    parts += (x if PARTS == 1 else x.to(gl.bfloat16),)
    return parts


@gluon.constexpr_function
def blocks_of(buckets):
    """How many blocks of 16 hold the ``buckets`` of a table."""
    return (buckets + 15) // 16


@gluon.constexpr_function
def parts_of_rows(C):
    """In how many parts history rows are multiplied: codes are bf16, exactly."""
    return 1 if C.LEVELS > 0 else C.PARTS


@gluon.constexpr_function
def columns_at_once(C):
    """How many columns of a tile registers hold at a time; those of codes have one part."""
    if C.PARTS == 1:
        return C.BLOCK_D
    return min(C.BLOCK_D, (2048 if C.LEVELS > 0 else 1024) // C.BLOCK_N)


@gluon.jit
def zeros_by_column(shape: gl.constexpr, layout: gl.constexpr, C: gl.constexpr):
    """Zeros of ``shape`` for each of the :func:`columns_at_once` of a tile."""
    zeros = ()
    for _ in gl.static_range(0, C.BLOCK_D, columns_at_once(C)):
        zeros += (gl.zeros(shape, gl.float32, layout),)
    return zeros


@gluon.jit
def allocate_parts(
    dtype: gl.constexpr, PARTS: gl.constexpr, rows: gl.constexpr, width: gl.constexpr
):
    """Shared memory for operands in PARTS, ``[PARTS, rows, width]``: see :func:`store_parts`."""
    shape: gl.constexpr = [PARTS, rows, width]
    return gl.allocate_shared_memory(dtype, shape, ring_layout(width, dtype))


@gluon.jit
def store_parts(operands, first: gl.constexpr, parts, TRANSPOSED: gl.constexpr):
    """Store ``parts`` as rows of ``operands`` (``[PARTS, rows, D]`` in shared memory)."""
    PARTS: gl.constexpr = operands.shape[0]
    for part in gl.static_range(PARTS):
        rows = operands.index(part)
        if TRANSPOSED:
            rows.slice(first, parts[part].shape[1]).permute((1, 0)).store(parts[part])
        else:
            rows.slice(first, parts[part].shape[0]).store(parts[part])


@gluon.jit
def load_parts(
    operands,
    rows: gl.constexpr,
    columns: gl.constexpr,
    layout: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """``rows`` and ``columns``, each begin and count, of what :func:`store_parts` has stored."""
    PARTS: gl.constexpr = operands.shape[0]
    parts = ()
    for part in gl.static_range(PARTS):
        piece = operands.index(part).slice(rows[0], rows[1]).slice(columns[0], columns[1], 1)
        if TRANSPOSED:
            piece = piece.permute((1, 0))
        parts += (piece.load(layout),)
    return parts


@gluon.jit
def product(a, b, acc, PARTS: gl.constexpr, APART: gl.constexpr = False):
    """``acc + a · b`` of operands in PARTS, but for what is smaller than their last ones; one of
    them may be whole in one.

    Tensor cores cut sums short where fp32 is rounded: so those of parts begin anew, the smallest
    first. Where there are few of them, APART, they do not wait for each other.
    """
    if PARTS == 1:
        acc = mma_v2(a[0], b[0], acc)
    else:
        shape: gl.constexpr = acc.shape
        layout: gl.constexpr = acc.type.layout
        zeros = gl.zeros(shape, gl.float32, layout)
        total = zeros
        for below in gl.static_range(PARTS):
            for part in gl.static_range(min(len(a), PARTS - below)):
                if PARTS - 1 - below - part < len(b):
                    other = b[PARTS - 1 - below - part]
                    if APART:
                        total += mma_v2(a[part], other, zeros)
                    else:
                        total = mma_v2(a[part], other, total)
        acc += total
    return acc


@gluon.jit
def exp(x, PARTS: gl.constexpr):
    """``e^x``, exact to fp32 where operands are in PARTS."""
    y = x * LOG2E
    power = gl.exp2(y)
    if PARTS > 1:
        low = gl.fma(x, LOG2E, -y) + x * LOG2E_LOW
        power = gl.where(power > 0, power + power * (low * LN2), power)
    return power


class Chunk(NamedTuple):
    """What a program does: all query rows of a sample over one chunk of its history.

    Attributes:
        busy: whether there is anything to do.
        first: first history row of the sample.
        length: history rows of the sample.
        begin: first row of the chunk, within the sample.
        end: where the chunk ends, within the sample.
        slot: of the chunk, -1 where the chunk is the whole sample.
        first_slot: of the sample's chunks.
        chunks: how many the sample has.
    """

    busy: Any
    sample: Any
    first: Any
    length: Any
    begin: Any
    end: Any
    slot: Any
    first_slot: Any
    chunks: Any


@gluon.jit
def find_listed_chunk(
    samples, num_samples, num_slots, C: gl.constexpr, FIRST: gl.constexpr = PROGRAMS
):
    """The :class:`Chunk` of this program, where ``schedule.list_slots`` lists the slots.

    It takes a slot, or a sample of fewer than CHUNK rows. The FIRST samples come first, as many as
    programs begin at once, while slots are listed: unless they WAIT, as the kernel that lists slots
    also makes the queries. Slots come next, so that no program that begins late has many rows.
    """
    program = gl.program_id(0)
    before = gl.minimum(num_samples, FIRST)
    slot = program - before
    of_slot = (slot >= 0) & (slot < num_slots)
    listed = gl.where(slot < 0, program, program - num_slots)
    if C.OVERLAP:
        if C.WAIT or of_slot | (num_slots == 0):
            wait_for_last_kernel()
    if of_slot:
        listed = gl.load(samples.slots + slot)
    sample = gl.maximum(listed, 0)
    first = gl.load(samples.offsets + sample).to(gl.int64)
    length = (gl.load(samples.offsets + sample + 1).to(gl.int64) - first).to(gl.int32)
    chunks = gl.where(of_slot, gl.maximum(gl.cdiv(length, 2 * C.CHUNK), 1), 1)
    first_slot = (first // C.CHUNK).to(gl.int32)
    chunk = gl.where(of_slot, slot - first_slot, 0)
    rows = rows_of_chunk(length, chunks)
    busy = (listed >= 0) & (of_slot == (length >= C.CHUNK))
    end = gl.minimum((chunk + 1) * rows, length)
    slot = gl.where(chunks > 1, slot, -1)
    return Chunk(busy, sample, first, length, chunk * rows, end, slot, first_slot, chunks)


@gluon.jit
def program_of_sample(sample, num_samples, num_slots):
    """The program of ``sample`` if that has fewer than CHUNK rows."""
    return gl.where(sample < gl.minimum(num_samples, PROGRAMS), sample, sample + num_slots)


@gluon.jit
def find_chunk(samples, num_samples, num_slots, C: gl.constexpr):
    """The :class:`Chunk` of this program, as ``schedule.find_work`` cuts samples of one block.

    Programs that take later chunks, most of them idle, lie evenly among those that take first ones:
    every ``period``-th has a slot.
    """
    program = gl.program_id(0)
    period = gl.num_programs(0) // gl.maximum(num_slots, 1)
    slot = program // period
    later = (program == slot * period) & (slot < num_slots)
    sample = program - gl.minimum(slot + 1, num_slots)
    if later:
        lanes = gl.arange(0, 32, probe_layout(gl.num_warps()))
        sample = program * 0
        high = num_samples
        while sample + 1 < high:
            step = gl.cdiv(high - sample, 32)
            at = sample + step * lanes
            offset = gl.load(samples.offsets + at, mask=at < high, other=0)
            begun = (at < high) & (offset // C.CHUNK <= slot)
            sample += step * (gl.sum(begun.to(gl.int32), 0) - 1)
            high = gl.minimum(high, sample + step)
    first = gl.load(samples.offsets + sample).to(gl.int64)
    length = (gl.load(samples.offsets + sample + 1).to(gl.int64) - first).to(gl.int32)
    chunks = gl.maximum(length // C.CHUNK, 1)
    first_slot = (first // C.CHUNK).to(gl.int32)
    chunk = gl.where(later, slot - first_slot, 0)
    busy = (chunk < chunks) & ((chunk > 0) | (not later))
    rows = rows_of_chunk(length, chunks)
    end = gl.minimum((chunk + 1) * rows, length)
    slot = gl.where(chunks > 1, first_slot + chunk, -1)
    return Chunk(busy, sample, first, length, chunk * rows, end, slot, first_slot, chunks)


@gluon.jit
def load_columns(ptr, first, count, C: gl.constexpr):
    """:func:`load_rows`, transposed: ``[BLOCK_D, 8]``, as right operand of a single warp."""
    d = gl.arange(0, C.BLOCK_D, gl.SliceLayout(1, RIGHT))
    r = gl.arange(0, BLOCK_R, gl.SliceLayout(0, RIGHT))
    mask = (d < C.D)[:, None] & (r < count)[None, :]
    return gl.load(ptr + first * C.D + (r[None, :] * C.D + d[:, None]), mask=mask, other=0.0)


@gluon.jit
def load_rows(
    ptr,
    first,
    count,
    column: gl.constexpr,
    shape: gl.constexpr,
    layout: gl.constexpr,
    D: gl.constexpr,
):
    """Rows ``first`` to ``first + count`` of width ``D`` from ``column`` on, with zeros around."""
    r = gl.arange(0, shape[0], gl.SliceLayout(1, layout))
    d = column + gl.arange(0, shape[1], gl.SliceLayout(0, layout))
    mask = (r < count)[:, None] & (d < D)[None, :]
    return gl.load(ptr + first * D + (r[:, None] * D + d[None, :]), mask=mask, other=0.0)


@gluon.jit
def store_rows(ptr, value, first, count, column: gl.constexpr, D: gl.constexpr):
    """Store ``value`` as rows ``first`` to ``first + count`` of width ``D``, from ``column`` on."""
    layout: gl.constexpr = row_layout(value.shape[1], ptr.dtype.element_ty, gl.num_warps())
    r = gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))
    d = column + gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    mask = (r < count)[:, None] & (d < D)[None, :]
    value = gl.convert_layout(value.to(ptr.dtype.element_ty), layout)
    gl.store(ptr + first * D + (r[:, None] * D + d[None, :]), value, mask=mask)


@gluon.jit
def rows_of_sample(history_ptr, samples, chunk, C: gl.constexpr):
    """Where the rows of a chunk's sample begin; all rows do, where they are read by indices."""
    if samples.indices is None:
        history_ptr += chunk.first * C.STRIDE
    return history_ptr


@gluon.jit
def _indices_of_tile(history_ptr, samples, chunk, start, end, C: gl.constexpr, dtype: gl.constexpr):
    """The indices of a tile's rows, from ``start`` on; 0 where rows are not read by indices. Of
    rows of codes, their bytes.
    """
    indices = 0
    if C.LEVELS > 0:
        indices = bytes_of_tile(history_ptr, samples, chunk, start, end, C)
    elif samples.indices is not None:
        layout: gl.constexpr = row_layout(C.BLOCK_D, dtype, gl.num_warps())
        i = gl.arange(0, C.BLOCK_N, gl.SliceLayout(1, layout))
        ptrs = samples.indices + chunk.first + start + i
        indices = gl.load(ptrs, mask=i < end - start, other=0)
    return indices


@gluon.jit
def _copy_tile(tile, history_ptr, samples, indices, start, end, C: gl.constexpr):
    """Begin to copy the rows from ``start`` on to ``tile``: one commit group.

    Copies that are masked, beyond ``end`` and D, write zeros. Rows of codes are made of their
    bytes, which are given in place of ``indices``.
    """
    layout: gl.constexpr = row_layout(C.BLOCK_D, tile.dtype, gl.num_warps())
    if C.LEVELS > 0:
        if start < end:
            store_codes(tile, indices, C)
    elif start < end:
        i = gl.arange(0, C.BLOCK_N, gl.SliceLayout(1, layout))
        d = gl.arange(0, C.BLOCK_D, gl.SliceLayout(0, layout))
        mask = (i < end - start)[:, None]
        if C.D < C.BLOCK_D:
            mask = mask & (d < C.D)[None, :]
        if samples.indices is None:
            begin_ptr = history_ptr + start.to(gl.int64) * C.STRIDE
            ptrs = begin_ptr + (i[:, None] * C.STRIDE + d[None, :])
        else:
            ptrs = history_ptr + (indices.to(gl.int64) * C.STRIDE)[:, None] + d[None, :]
        async_copy.async_copy_global_to_shared(tile, ptrs, mask=mask)
    async_copy.commit_group()


@gluon.jit
def open_ring(history_ptr, samples, chunk, dtype: gl.constexpr, C: gl.constexpr):
    """Shared memory for NUM_STAGES tiles of a chunk's rows; all but the last are on their way to
    it. ``dtype`` is that of queries.
    """
    of_codes: gl.constexpr = gl.bfloat16 if C.PARTS > 1 else dtype
    OF_TILE: gl.constexpr = of_codes if C.LEVELS > 0 else history_ptr.dtype.element_ty
    shape: gl.constexpr = [C.NUM_STAGES, C.BLOCK_N, C.BLOCK_D]
    ring = gl.allocate_shared_memory(OF_TILE, shape, ring_layout(C.BLOCK_D, OF_TILE))
    for stage in gl.static_range(C.NUM_STAGES - 1):
        start = chunk.begin + stage * C.BLOCK_N
        indices = _indices_of_tile(history_ptr, samples, chunk, start, chunk.end, C, OF_TILE)
        _copy_tile(ring.index(stage), history_ptr, samples, indices, start, chunk.end, C)
    return ring


@gluon.jit
def next_indices(history_ptr, samples, chunk, ring, start, C: gl.constexpr):
    """The indices, or bytes of codes, that :func:`copy_next` needs: loaded early, they are there
    when it begins.
    """
    ahead: gl.constexpr = C.NUM_STAGES - 1
    at = start + ahead * C.BLOCK_N
    return _indices_of_tile(history_ptr, samples, chunk, at, chunk.end, C, ring.dtype)


@gluon.jit
def copy_next(ring, stage, history_ptr, samples, indices, start, end, C: gl.constexpr):
    """Begin to copy what comes after the tiles on their way, where the last tile was; the tile of
    ``stage`` begins at row ``start``. Returns the next stage.
    """
    ahead: gl.constexpr = C.NUM_STAGES - 1
    to = gl.where(stage == 0, ahead, stage - 1)
    at = start + ahead * C.BLOCK_N
    _copy_tile(ring.index(to), history_ptr, samples, indices, at, end, C)
    return gl.where(stage == ahead, 0, stage + 1)


@gluon.jit
def row_buckets(n, biases, chunk, C: gl.constexpr):
    """Buckets of position and age of the rows ``n`` of a chunk's sample."""
    distance = chunk.length - 1 - n
    if biases.places is not None:
        end = gl.load(biases.ends + chunk.sample).to(gl.int64)
        distance = end - 1 - row_numbers(biases, chunk.first + n, n < chunk.length)
        distance = distance.to(gl.int32)
    of_position = recency_bucket(distance, C.P)
    of_age = of_position
    if C.A > 0:
        time = gl.load(biases.timestamps + chunk.first + n, mask=n < chunk.length, other=0)
        if biases.request_time is not None:
            reference = gl.load(biases.request_time + chunk.sample)
        else:
            reference = gl.load(biases.timestamps + chunk.first + chunk.length - 1)
        of_age = age_bucket(time, reference, C.A)
    return of_position, of_age


@gluon.jit
def load_bias(biases, buckets, n, r, chunk, count, C: gl.constexpr, ROWS: gl.constexpr):
    """All ``biases`` of the rows ``n`` of a chunk, whose ``buckets`` are of :func:`row_buckets`,
    for the query rows ``r``.

    The rows lie along the axis ROWS, the query rows along the other. PRIOR weights count by their
    logarithm, ``-inf`` of zero and of what is below, for all heads; rows that are dropped have
    ``-inf``. Zero for the query rows from ``count`` on.
    """
    first = chunk.first
    visible = gl.expand_dims(n < chunk.end, 1 - ROWS)
    of_position = gl.expand_dims(buckets[0], 1 - ROWS)
    of_age = gl.expand_dims(buckets[1], 1 - ROWS)
    n = gl.expand_dims(n, 1 - ROWS)
    r = gl.expand_dims(r, ROWS)
    head = r % C.H
    mask = visible & (r < count)
    bias = 0.0
    if C.PRIOR:
        weights = gl.load(biases.bias + first + n, mask=visible, other=1.0).to(gl.float32)
        weights = gl.where(weights < 0, 0.0, weights)  # NaN stays
        bias += gl.where(mask, gl.log(weights), 0.0)
    elif biases.bias is not None:
        ptrs = biases.bias + first * C.H + (n * C.H + head)
        bias += gl.load(ptrs, mask=mask, other=0.0).to(gl.float32)
    if C.P > 0:
        ptrs = biases.position_bias + (of_position * C.H + head)
        bias += gl.load(ptrs, mask=mask, other=0.0).to(gl.float32)
    if C.A > 0:
        ptrs = biases.age_bias + (of_age * C.H + head)
        bias += gl.load(ptrs, mask=mask, other=0.0).to(gl.float32)
    if biases.row_dropout is not None:
        dropped = is_dropped(biases.row_dropout, row_numbers(biases, first + n, visible))
        bias = gl.where(dropped & mask, -float("inf"), bias)
    return bias


@gluon.jit
def indices_to_store(rows: gl.constexpr, width: gl.constexpr, dtype: gl.constexpr):
    """Rows and columns of ``[rows, width]`` as they are stored: made once for all tiles."""
    layout: gl.constexpr = row_layout(width, dtype, gl.num_warps())
    i = gl.arange(0, rows, gl.SliceLayout(1, layout))
    return i, gl.arange(0, width, gl.SliceLayout(0, layout))


@gluon.jit
def load_targets(grads, indices, first, start, end):
    """The ``targets`` of a tile's rows, which :func:`store_grad_of_history` takes; 0 without."""
    targets = 0
    if grads.targets is not None:
        i = indices[0]
        targets = gl.load(grads.targets + first + start + i, mask=i < end - start, other=-1)
    return targets


@gluon.jit
def store_grad_of_history(
    grads, value, indices, targets, first, start, end, column: gl.constexpr, C: gl.constexpr
):
    """Store ``value``, whose ``indices`` are of :func:`indices_to_store`, from ``column`` on.

    Its rows are those from ``start`` to ``end`` of the sample that begins at row ``first``.
    """
    i, d = indices
    value = gl.convert_layout(value.to(grads.history.dtype.element_ty), i.type.layout.parent)
    visible = i < end - start if grads.targets is None else targets >= 0
    mask = visible[:, None]
    if C.D < C.BLOCK_D:
        mask = mask & (column + d < C.D)[None, :]
    if grads.targets is None:
        ptrs = grads.history + first * C.D + start.to(gl.int64) * C.D + column
        gl.store(ptrs + (i[:, None] * C.D + d[None, :]), value, mask=mask)
    else:
        ptrs = grads.history + (targets.to(gl.int64) * C.D + column)[:, None]
        gl.store(ptrs + d[None, :], value, mask=mask)


@gluon.jit
def store_grad_of_bias(grads, ds, first, n, r, end, C: gl.constexpr, ROWS: gl.constexpr):
    """Store gradients of scores of the rows ``n``, up to ``end``, of the sample that begins at row
    ``first``.

    They lie along the axis ROWS, the query rows ``r`` along the other, over which those of prior
    weights are summed.
    """
    if (grads.bias is not None) and C.PRIOR:
        gl.store(grads.bias + first + n, gl.sum(ds, 1 - ROWS), mask=n < end)
    elif grads.bias is not None:
        ptrs = grads.bias + first * C.H
        mask = gl.expand_dims(n < end, 1 - ROWS) & gl.expand_dims(r < C.H, ROWS)
        gl.store(
            ptrs + (gl.expand_dims(n * C.H, 1 - ROWS) + gl.expand_dims(r, ROWS)), ds, mask=mask
        )
