"""Helpers of the Gluon kernels ``one_warp``, some of which ``warpgroup`` uses, too.

``one_warp`` supports up to 8 query rows per sample, and history rows at multiples of 16 bytes or
packed codes. Tiles of rows are copied to shared memory asynchronously, a few stages ahead. Packed
codes are loaded ahead and unpacked to a tile. Products are ``mma`` (``m16n8``) of one warp, with
history rows on the M side and query rows on the N side. Triton supports neither such a narrow N
side nor products along both sides of a tile without a copy.

fp32 is multiplied as a sum of bf16 COMPONENTS: three are exact, two keep 16 bits of the mantissa.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from torchrec_jagged_attn.ops.device import biases as triton_biases
from torchrec_jagged_attn.ops.device import dropout as triton_dropout
from torchrec_jagged_attn.ops.device import softmax as triton_softmax
from torchrec_jagged_attn.ops.device.gluon import products_by_warp, wait_for_last_kernel
from torchrec_jagged_attn.ops.device.scores import (
    weights_and_slopes as triton_weights_and_slopes,
)
from torchrec_jagged_attn.ops.device.softmax import LN2, LOG2E, LOG2E_LOW
from torchrec_jagged_attn.ops.target_attention.kernels import schedule
from torchrec_jagged_attn.ops.target_attention.kernels.warp_codes import bytes_of_tile, store_codes

BLOCK_R = gl.constexpr(8)  # query rows of ``one_warp``
MMA = gl.constexpr(products_by_warp.fn(1))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))

PROGRAMS = gl.constexpr(1024)  # programs of one warp that a GPU runs at a time, about

age_bucket = gluon.jit(triton_biases.age_bucket.fn)
recency_bucket = gluon.jit(triton_biases.recency_bucket.fn)
load_row_numbers = gluon.jit(triton_biases.load_row_numbers.fn)
query_draws = gluon.jit(triton_dropout.query_draws.fn)
drop_weights = gluon.jit(triton_dropout.drop_weights.fn)
score_gradients = gluon.jit(triton_softmax.score_gradients.fn)
weights_and_slopes = gluon.jit(triton_weights_and_slopes.fn)
rows_of_chunk = gluon.jit(schedule.rows_of_chunk.fn)


@gluon.constexpr_function
def row_layout(width, dtype, warps=1):
    """Rows of ``width`` elements, 16 bytes per lane."""
    elements = 128 // dtype.primitive_bitwidth
    lanes = min(32, width // elements)
    return gl.BlockedLayout([1, elements], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def ring_layout(width, dtype):
    """Swizzled tiles in shared memory, with few bank conflicts along either side."""
    rows = max(1, 1024 // (dtype.primitive_bitwidth * width))  # in 128 bytes: all banks
    return gl.SwizzledSharedLayout(8, rows, min(8, width // 8), [1, 0])


@gluon.jit
def decompose(x, COMPONENTS: gl.constexpr):
    """``x`` as a sum of bf16 COMPONENTS, the largest first; ``x`` itself if that is 1.

    The first is truncated, the second of three rounded. So the last component, whose smallest
    products are omitted, is small and of either sign.
    """
    components = ()
    for i in gl.static_range(COMPONENTS - 1):
        bits = x.to(gl.int32, bitcast=True)
        if i > 0:
            bits += 32768
        upper = (bits & -65536).to(gl.float32, bitcast=True)
        components += (upper.to(gl.bfloat16),)
        x -= upper
    components += (x if COMPONENTS == 1 else x.to(gl.bfloat16),)
    return components


@gluon.constexpr_function
def blocks_of(buckets):
    """Number of blocks of 16 buckets in a table of ``buckets``."""
    return (buckets + 15) // 16


@gluon.constexpr_function
def row_components(C):
    """Components of history rows: codes are exact in bf16."""
    return 1 if C.LEVELS > 0 else C.COMPONENTS


@gluon.constexpr_function
def columns_at_once(C):
    """Columns of a tile that fit in registers at a time; codes have one component."""
    if C.COMPONENTS == 1:
        return C.BLOCK_D
    return min(C.BLOCK_D, (2048 if C.LEVELS > 0 else 1024) // C.BLOCK_N)


@gluon.jit
def zeros_by_column(C: gl.constexpr):
    """A tuple of zeros ``[columns, 8]``, one for each block of :func:`columns_at_once`."""
    zeros = ()
    for _ in gl.static_range(0, C.BLOCK_D, columns_at_once(C)):
        zeros += (gl.zeros([columns_at_once(C), BLOCK_R], gl.float32, MMA),)
    return zeros


@gluon.jit
def allocate_components(
    dtype: gl.constexpr, COMPONENTS: gl.constexpr, rows: gl.constexpr, width: gl.constexpr
):
    """Shared memory ``[COMPONENTS, rows, width]`` for :func:`store_components`."""
    shape: gl.constexpr = [COMPONENTS, rows, width]
    return gl.allocate_shared_memory(dtype, shape, ring_layout(width, dtype))


@gluon.jit
def store_components(operands, first: gl.constexpr, components):
    """Store the columns of ``components`` as rows of ``operands`` (``[COMPONENTS, rows, D]`` in
    shared memory), from ``first`` on.
    """
    COMPONENTS: gl.constexpr = operands.shape[0]
    for i in gl.static_range(COMPONENTS):
        rows = operands.index(i).slice(first, components[i].shape[1])
        rows.permute((1, 0)).store(components[i])


@gluon.jit
def load_components(
    operands,
    rows: gl.constexpr,
    columns: gl.constexpr,
    layout: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """Load ``rows`` and ``columns``, ``(begin, count)`` each, of all components of ``operands``."""
    COMPONENTS: gl.constexpr = operands.shape[0]
    components = ()
    for i in gl.static_range(COMPONENTS):
        piece = operands.index(i).slice(rows[0], rows[1]).slice(columns[0], columns[1], 1)
        if TRANSPOSED:
            piece = piece.permute((1, 0))
        components += (piece.load(layout),)
    return components


@gluon.jit
def product(a, b, acc, COMPONENTS: gl.constexpr, SEPARATE: gl.constexpr = False):
    """``acc + a · b`` of operands in COMPONENTS, without the smallest products. One operand may
    have a single component.

    Tensor cores truncate sums, so that products are summed from zero, the smallest first, and then
    added to ``acc``. If SEPARATE, they do not depend on each other, for lower latency.
    """
    if COMPONENTS == 1:
        acc = mma_v2(a[0], b[0], acc)
    else:
        shape: gl.constexpr = acc.shape
        layout: gl.constexpr = acc.type.layout
        zeros = gl.zeros(shape, gl.float32, layout)
        total = zeros
        for below in gl.static_range(COMPONENTS):
            for i in gl.static_range(min(len(a), COMPONENTS - below)):
                if COMPONENTS - 1 - below - i < len(b):
                    other = b[COMPONENTS - 1 - below - i]
                    if SEPARATE:
                        total += mma_v2(a[i], other, zeros)
                    else:
                        total = mma_v2(a[i], other, total)
        acc += total
    return acc


@gluon.jit
def exp(x, COMPONENTS: gl.constexpr):
    """``e^x``; to fp32 accuracy if there are several COMPONENTS."""
    y = x * LOG2E
    power = gl.exp2(y)
    if COMPONENTS > 1:
        low = gl.fma(x, LOG2E, -y) + x * LOG2E_LOW
        power = gl.where(power > 0, power + power * (low * LN2), power)
    return power


class Chunk(NamedTuple):
    """The work of a program: all query rows of a sample over one chunk of its history."""

    busy: Any  # whether there is such a chunk
    sample: Any
    first: Any  # first history row of the sample
    length: Any  # number of history rows of the sample
    begin: Any  # first row of the chunk, within the sample
    end: Any  # end of the chunk, within the sample
    partial: Any  # index of the partial result; -1 if the chunk is the whole sample
    first_partial: Any  # the partial result of the sample's first chunk
    chunks: Any  # number of chunks of the sample


@gluon.jit
def find_scheduled_chunk(
    samples, num_samples, num_partials, C: gl.constexpr, FIRST: gl.constexpr = PROGRAMS
):
    """The :class:`Chunk` of this program: an entry of the ``records.SplitSchedule``, or a sample of
    fewer than CHUNK rows.

    The order of programs: the first FIRST samples, which the GPU runs while the previous kernel
    writes the schedule; then its entries, so that no long chunk starts late; then the other
    samples.
    """
    program = gl.program_id(0)
    before = gl.minimum(num_samples, FIRST)
    partial = program - before
    is_partial = (partial >= 0) & (partial < num_partials)
    scheduled = gl.where(partial < 0, program, program - num_partials)
    if C.OVERLAP:
        if is_partial | (num_partials == 0):
            wait_for_last_kernel()
    if is_partial:
        scheduled = gl.load(samples.schedule + partial)
    sample = gl.maximum(scheduled, 0)
    first = gl.load(samples.offsets + sample).to(gl.int64)
    length = (gl.load(samples.offsets + sample + 1).to(gl.int64) - first).to(gl.int32)
    chunks = gl.where(is_partial, gl.maximum(gl.cdiv(length, 2 * C.CHUNK), 1), 1)
    first_partial = (first // C.CHUNK).to(gl.int32)
    chunk = gl.where(is_partial, partial - first_partial, 0)
    rows = rows_of_chunk(length, chunks)
    busy = (scheduled >= 0) & (is_partial == (length >= C.CHUNK))
    end = gl.minimum((chunk + 1) * rows, length)
    partial = gl.where(chunks > 1, partial, -1)
    return Chunk(busy, sample, first, length, chunk * rows, end, partial, first_partial, chunks)


@gluon.jit
def program_of_sample(sample, num_samples, num_partials):
    """The program of a ``sample`` of fewer than CHUNK rows in :func:`find_scheduled_chunk`."""
    return gl.where(sample < gl.minimum(num_samples, PROGRAMS), sample, sample + num_partials)


@gluon.jit
def load_columns(ptr, first, count, C: gl.constexpr):
    """Rows ``first`` to ``first + count``, transposed, ``[BLOCK_D, 8]``: a right operand."""
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
    """Rows ``first`` to ``first + count`` of width ``D`` from ``column`` on, padded with zeros."""
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
    """Pointer to the rows of a chunk's sample; with gather indices, to all rows."""
    if samples.indices is None:
        history_ptr += chunk.first * C.STRIDE
    return history_ptr


@gluon.jit
def _indices_of_tile(history_ptr, samples, chunk, start, end, C: gl.constexpr, dtype: gl.constexpr):
    """Gather indices of a tile's rows, from ``start`` on, or 0 without indices. For packed codes,
    the bytes of the rows.
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
    """Start to copy the rows from ``start`` on to ``tile``, as one commit group.

    Elements beyond ``end`` and D are zeros. Of packed codes, ``indices`` are the bytes of the rows.
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
    """A ring buffer of NUM_STAGES tiles of a chunk's rows; copies of all but the last are started.
    ``dtype`` is the dtype of queries.
    """
    CODE_DTYPE: gl.constexpr = gl.bfloat16 if C.COMPONENTS > 1 else dtype
    TILE_DTYPE: gl.constexpr = CODE_DTYPE if C.LEVELS > 0 else history_ptr.dtype.element_ty
    shape: gl.constexpr = [C.NUM_STAGES, C.BLOCK_N, C.BLOCK_D]
    ring = gl.allocate_shared_memory(TILE_DTYPE, shape, ring_layout(C.BLOCK_D, TILE_DTYPE))
    for stage in gl.static_range(C.NUM_STAGES - 1):
        start = chunk.begin + stage * C.BLOCK_N
        indices = _indices_of_tile(history_ptr, samples, chunk, start, chunk.end, C, TILE_DTYPE)
        _copy_tile(ring.index(stage), history_ptr, samples, indices, start, chunk.end, C)
    return ring


@gluon.jit
def next_indices(history_ptr, samples, chunk, ring, start, C: gl.constexpr):
    """Load the indices, or bytes of codes, for :func:`copy_next` ahead of it."""
    ahead: gl.constexpr = C.NUM_STAGES - 1
    at = start + ahead * C.BLOCK_N
    return _indices_of_tile(history_ptr, samples, chunk, at, chunk.end, C, ring.dtype)


@gluon.jit
def copy_next(ring, stage, history_ptr, samples, indices, start, end, C: gl.constexpr):
    """Start to copy the next tile to the stage of the previous one, and return the next stage. The
    tile of ``stage`` begins at row ``start``.
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
    if biases.row_numbers is not None:
        end = gl.load(biases.row_number_ends + chunk.sample).to(gl.int64)
        distance = end - 1 - load_row_numbers(biases, chunk.first + n, n < chunk.length)
        distance = distance.to(gl.int32)
    position_buckets = recency_bucket(distance, C.P)
    age_buckets = position_buckets
    if C.A > 0:
        time = gl.load(biases.timestamps + chunk.first + n, mask=n < chunk.length, other=0)
        if biases.request_time is not None:
            reference = gl.load(biases.request_time + chunk.sample)
        else:
            reference = gl.load(biases.timestamps + chunk.first + chunk.length - 1)
        age_buckets = age_bucket(time, reference, C.A)
    return position_buckets, age_buckets


@gluon.jit
def load_bias(biases, buckets, n, r, chunk, count, C: gl.constexpr):
    """``[rows, queries]``: the sum of all ``biases`` of the rows ``n`` of a chunk, with ``buckets``
    of :func:`row_buckets`, for the query rows ``r``.

    The logarithms of prior weights are ``-inf`` if these are zero or negative. Query rows from
    ``count`` on have a bias of zero.
    """
    visible = (n < chunk.end)[:, None]
    n = n[:, None]
    r = r[None, :]
    head = r % C.H
    mask = visible & (r < count)
    bias = 0.0
    if biases.prior_weights is not None:
        weights = gl.load(biases.prior_weights + chunk.first + n, mask=visible, other=1.0).to(
            gl.float32
        )
        weights = gl.where(weights < 0, 0.0, weights)  # NaN stays
        bias += gl.where(mask, gl.log(weights), 0.0)
    if C.P > 0:
        ptrs = biases.position_bias + (buckets[0][:, None] * C.H + head)
        bias += gl.load(ptrs, mask=mask, other=0.0).to(gl.float32)
    if C.A > 0:
        ptrs = biases.age_bias + (buckets[1][:, None] * C.H + head)
        bias += gl.load(ptrs, mask=mask, other=0.0).to(gl.float32)
    return bias


@gluon.jit
def weights_and_gradients(
    dots, dp, stats, draws, alone, biases, chunk, n, r, count, scale, C: gl.constexpr
):  # fmt: skip
    """``(p, kept, ds, buckets)`` of the rows ``n`` of a chunk, for the query rows ``r``: weights,
    weights after dropout, gradients of scores, and :func:`row_buckets`.

    ``dots`` and ``dp`` are products with queries and with gradients of outputs, ``stats`` are
    ``warp_combine.QueryStats``, and ``draws`` broadcast.
    """
    visible = (n < chunk.end)[:, None]
    buckets = row_buckets(n, biases, chunk, C)
    bias = load_bias(biases, buckets, n, r, chunk, count, C)
    numbers = load_row_numbers(biases, chunk.first + n, n < chunk.end)[:, None]
    dp = drop_weights(dp, biases.dropout, draws, numbers)
    scores = dots * scale + bias
    if C.SCORE == "softmax":
        p = exp(scores - stats.maximum[None, :], C.COMPONENTS) * stats.inverse[None, :]
        p = gl.where(visible, p, 0.0)  # rounded as forward
        ds = score_gradients(p, dp, stats.delta, stats.grad_lse, alone)
    else:
        p, slope = weights_and_slopes(scores, C.SCORE, C.COMPONENTS > 1)
        p = gl.where(visible, p, 0.0)
        ds = gl.where(visible, slope * dp, 0.0)
    return p, drop_weights(p, biases.dropout, draws, numbers), ds, buckets


@gluon.jit
def indices_to_store(rows: gl.constexpr, width: gl.constexpr, dtype: gl.constexpr):
    """Row and column indices of ``[rows, width]`` for stores, the same for all tiles."""
    layout: gl.constexpr = row_layout(width, dtype, gl.num_warps())
    i = gl.arange(0, rows, gl.SliceLayout(1, layout))
    return i, gl.arange(0, width, gl.SliceLayout(0, layout))


@gluon.jit
def load_targets(grads, indices, first, start, end):
    """``Gradients.targets`` of a tile's rows, for :func:`store_grad_of_history`, or 0."""
    targets = 0
    if grads.targets is not None:
        i = indices[0]
        targets = gl.load(grads.targets + first + start + i, mask=i < end - start, other=-1)
    return targets


@gluon.jit
def store_grad_of_history(
    grads, value, indices, targets, first, start, end, column: gl.constexpr, C: gl.constexpr
):
    """Store ``value``, from ``column`` on, with ``indices`` of :func:`indices_to_store`.

    Its rows are ``start`` to ``end`` of the sample that begins at row ``first``.
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
def clear_gradients(grads, samples, num_samples, num_history_rows, C: gl.constexpr):
    """Set gradients of history rows and of prior weights to zero behind the last offset: see
    ``schedule.clear_gradients``. All programs share these rows.
    """
    end = gl.load(samples.offsets + num_samples).to(gl.int64)
    if (grads.history is not None) and (samples.indices is None):
        dtype: gl.constexpr = grads.history.dtype.element_ty
        ROWS: gl.constexpr = 1024 * gl.num_warps() // C.BLOCK_D
        layout: gl.constexpr = row_layout(C.BLOCK_D, dtype, gl.num_warps())
        zeros = gl.zeros([ROWS, C.BLOCK_D], dtype, layout)
        step = gl.num_programs(0) * ROWS
        for row in range(end + gl.program_id(0) * ROWS, num_history_rows, step):
            store_rows(grads.history, zeros, row, num_history_rows - row, 0, C.D)
    if grads.prior_weights is not None:
        BLOCK: gl.constexpr = 128 * gl.num_warps()
        i = gl.arange(0, BLOCK, gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
        step = gl.num_programs(0) * BLOCK
        for at in range(end + gl.program_id(0) * BLOCK, num_history_rows, step):
            gl.store(grads.prior_weights + at + i, 0.0, mask=i < num_history_rows - at)
