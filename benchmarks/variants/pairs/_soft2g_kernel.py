
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from torchrec_jagged_attn.kernels import common

@gluon.jit
def find_tile(offsets_ptr, num_samples, tile, SCALE: gl.constexpr, BLOCK: gl.constexpr):
    """As in common.py."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    low = tile * 0
    high = low + num_samples
    while low + 1 < high:
        step = gl.cdiv(high - low, 32)
        at = low + step * gl.arange(0, 32, lanes)
        offset = gl.load(offsets_ptr + at, mask=at < high, other=0).to(gl.int64)
        begun = (at < high) & (offset // BLOCK + at <= tile)
        low += step * (gl.sum(begun.to(gl.int32), 0) - 1)
        high = gl.minimum(high, low + step)
    begin = gl.load(offsets_ptr + low).to(gl.int64)
    end = gl.load(offsets_ptr + low + 1).to(gl.int64)
    return low, begin, end, (tile - begin // BLOCK - low) * BLOCK
LOG2E = gl.constexpr(1.4426950408889634)

@gluon.jit
def places(begin, i, last_line, length, BI: gl.constexpr, VEC: gl.constexpr, main: gl.constexpr, edge: gl.constexpr):
    """Of lines from i on, the first of which is at begin: their whole vectors and ends."""
    row = gl.arange(0, BI, gl.SliceLayout(1, main))
    b = begin + row * length
    e = gl.where(i + row < last_line, b + length, b)
    head = (b + (VEC - 1)) // VEC
    count = e // VEC - head
    row2 = gl.arange(0, BI, gl.SliceLayout(1, edge))
    b2 = begin + row2 * length
    e2 = gl.where(i + row2 < last_line, b2 + length, b2)
    head2 = (b2 + (VEC - 1)) // VEC
    tail2 = gl.maximum(e2 // VEC, head2)
    j = gl.arange(0, 2 * VEC, gl.SliceLayout(0, edge))[None, :]
    j = j ^ 1  # swapped: not to be taken for vectors
    ends = gl.where(j < VEC, b2[:, None], (tail2 * VEC - VEC)[:, None]) + j
    stop = gl.where(j < VEC, gl.minimum(head2 * VEC, e2)[:, None], e2[:, None])
    return head, count, ends, ends < stop

@gluon.jit
def read(x_ptr, begin, i, last_line, length, BI: gl.constexpr, CHUNKS: gl.constexpr, VEC: gl.constexpr, main: gl.constexpr, edge: gl.constexpr):
    head, count, ends, inside = places(begin, i, last_line, length, BI, VEC, main, edge)
    r = gl.arange(0, 64, gl.SliceLayout(0, main))
    ptrs = x_ptr + ((head * VEC)[:, None] + r[None, :])
    v = (r // VEC)[None, :]
    xs = ()
    for c in gl.static_range(CHUNKS):
        xs += (gl.load(ptrs + c * 64, mask=v + c * (64 // VEC) < count[:, None], other=-float("inf")),)
    return xs, gl.load(x_ptr + ends, mask=inside, other=-float("inf"))

@gluon.jit
def lines(x_ptr, out_ptr, first, line, last_line, length, BI: gl.constexpr, CHUNKS: gl.constexpr, VEC: gl.constexpr, AHEAD: gl.constexpr):
    main: gl.constexpr = gl.BlockedLayout([1, VEC], [BI, 32 // BI], [1, 1], [1, 0])
    edge: gl.constexpr = gl.BlockedLayout([1, 1], [BI, 32 // BI], [1, 1], [1, 0])
    origin = first + gl.cast(line, gl.int64) * length
    base = origin // VEC * VEC
    x_ptr += base
    out_ptr += base
    begin = (origin - base).to(gl.int32)
    if AHEAD:
        nxs, nxe = read(x_ptr, begin, line, last_line, length, BI, CHUNKS, VEC, main, edge)
    for i in range(line, last_line, BI):
        if AHEAD:
            xs, xe = nxs, nxe
            nxs, nxe = read(x_ptr, begin + BI * length, i + BI, last_line, length, BI, CHUNKS, VEC, main, edge)
        else:
            xs, xe = read(x_ptr, begin, i, last_line, length, BI, CHUNKS, VEC, main, edge)
        xe = xe.to(gl.float32)
        top = xs[0].to(gl.float32)
        for c in gl.static_range(1, CHUNKS):
            top = gl.maximum(top, xs[c].to(gl.float32))
        maximum = gl.maximum(gl.max(top, 1), gl.convert_layout(gl.max(xe, 1), gl.SliceLayout(1, main)))
        maximum = gl.where(maximum == -float("inf"), 0.0, maximum)
        maximum_e = gl.convert_layout(maximum, gl.SliceLayout(1, edge))
        we = gl.exp2((xe - maximum_e[:, None]) * LOG2E)
        ws = ()
        for c in gl.static_range(CHUNKS):
            ws += (gl.exp2((xs[c].to(gl.float32) - maximum[:, None]) * LOG2E),)
        sums = ws[0]
        for c in gl.static_range(1, CHUNKS):
            sums += ws[c]
        total = gl.sum(sums, 1) + gl.convert_layout(gl.sum(we, 1), gl.SliceLayout(1, main))
        inverse = gl.div_rn(1.0, gl.where(total == 0, 1.0, total))
        inverse_e = gl.convert_layout(inverse, gl.SliceLayout(1, edge))
        head, count, ends, inside = places(begin, i, last_line, length, BI, VEC, main, edge)
        r = gl.arange(0, 64, gl.SliceLayout(0, main))
        ptrs = out_ptr + ((head * VEC)[:, None] + r[None, :])
        v = (r // VEC)[None, :]
        for c in gl.static_range(CHUNKS):
            gl.store(ptrs + c * 64, (ws[c] * inverse[:, None]).to(out_ptr.dtype.element_ty), mask=v + c * (64 // VEC) < count[:, None])
        gl.store(out_ptr + ends, (we * inverse_e[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
        begin += BI * length

@gluon.jit(do_not_specialize=["num_samples"])
def kernel(x_ptr, out_ptr, offsets_ptr, y_offsets_ptr, num_samples, SPAN: gl.constexpr, BI: gl.constexpr, VEC: gl.constexpr, AHEAD: gl.constexpr):
    tile = gl.program_id(0).to(gl.int64)
    sample, first, end, start = find_tile(offsets_ptr, num_samples, tile, 1, SPAN)
    length = gl.load(y_offsets_ptr + sample + 1) - gl.load(y_offsets_ptr + sample)
    stop = gl.minimum(start + SPAN, gl.maximum(end - first, start))
    line = gl.cdiv(start, gl.maximum(length, 1).to(gl.int64)).to(gl.int32)
    last_line = gl.cdiv(stop, gl.maximum(length, 1).to(gl.int64)).to(gl.int32)
    length = length.to(gl.int32)
    if length <= 64:
        lines(x_ptr, out_ptr, first, line, last_line, length, BI, 1, VEC, AHEAD)
    elif length <= 128:
        lines(x_ptr, out_ptr, first, line, last_line, length, BI, 2, VEC, AHEAD)
    elif length <= 192:
        lines(x_ptr, out_ptr, first, line, last_line, length, BI, 3, VEC, AHEAD)
    elif length <= 256:
        lines(x_ptr, out_ptr, first, line, last_line, length, BI, 4, VEC, AHEAD)
    elif length <= 320:
        lines(x_ptr, out_ptr, first, line, last_line, length, BI, 5, VEC, AHEAD)
    elif length <= 384:
        lines(x_ptr, out_ptr, first, line, last_line, length, BI, 6, VEC, AHEAD)
    else:  # of up to 512: for measuring only
        lines(x_ptr, out_ptr, first, line, last_line, length, BI, 8, VEC, AHEAD)
