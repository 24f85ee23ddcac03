"""Softmax of columns, forward: all rows of a sample in registers, read at once, one exponential each."""
import torch, triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from torchrec_jagged_attn.kernels.interaction import _columns_kernel, LONG, LONG_TILE

@gluon.jit
def held_columns(x_ptr, out_ptr, length, T: gl.constexpr, VEC: gl.constexpr, CHUNKS: gl.constexpr, HOLD: gl.constexpr):
    W: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = T // VEC
    ROWS: gl.constexpr = 32 // LANES * W
    main: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // LANES, LANES], [W, 1], [1, 0])
    r = gl.arange(0, ROWS, gl.SliceLayout(1, main))
    i = gl.arange(0, T, gl.SliceLayout(0, main))
    at = r[:, None] * T + i[None, :]
    xs = ()
    for c in gl.static_range(CHUNKS):
        xs += (gl.load(x_ptr + (at + c * ROWS * T), mask=(r < length - c * ROWS)[:, None], other=-float("inf")),)
    top = xs[0].to(gl.float32)
    for c in gl.static_range(1, CHUNKS):
        top = gl.maximum(top, xs[c].to(gl.float32))
    shift = gl.max(top, 0)
    shift = gl.where(shift == -float("inf"), 0.0, shift)[None, :]
    total = gl.zeros([ROWS, T], gl.float32, main)
    ws = ()
    for c in gl.static_range(CHUNKS):
        x = xs[c]
        if not HOLD:  # keep packed what is read thrice: Triton would keep it in fp32
            x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x_ptr.dtype.element_ty, is_pure=False, pack=2)
        w = gl.exp2((x.to(gl.float32) - shift) * 1.4426950408889634)
        total += w
        if HOLD:
            ws += (w,)
    sums = gl.sum(total, 0)
    inverse = gl.div_rn(1.0, gl.where(sums == 0, 1.0, sums))[None, :]
    below = gl.log2(inverse)
    for c in gl.static_range(CHUNKS):
        if HOLD:
            out = ws[c] * inverse
        else:
            x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [xs[c]], dtype=x_ptr.dtype.element_ty, is_pure=False, pack=2)
            out = gl.exp2((x.to(gl.float32) - shift) * 1.4426950408889634 + below)  # half precision only
        gl.store(out_ptr + (at + c * ROWS * T), out.to(out_ptr.dtype.element_ty), mask=(r < length - c * ROWS)[:, None])

@gluon.jit
def kernel(x_ptr, out_ptr, offsets_ptr, T: gl.constexpr, VEC: gl.constexpr, STEP: gl.constexpr, CASES: gl.constexpr, HOLD: gl.constexpr):
    ROWS: gl.constexpr = 32 * VEC // T * gl.num_warps() * STEP
    sample = gl.program_id(0)
    begin = gl.load(offsets_ptr + sample).to(gl.int64)
    length = (gl.load(offsets_ptr + sample + 1).to(gl.int64) - begin).to(gl.int32)
    for case in gl.static_range(CASES):
        if (length > case * ROWS) & (length <= (case + 1) * ROWS):
            held_columns(x_ptr + begin * T, out_ptr + begin * T, length, T, VEC, (case + 1) * STEP, HOLD)

HELD = {  # warps, step, hold, maxnreg
    "columns held, 4 warps, 96 regs": (4, 1, True, 96),
    "columns held, 4 warps, 64 regs": (4, 1, True, 64),
    "columns held, 4 warps, twice exp, 64 regs": (4, 1, False, 64),
    "columns held, 2 warps, twice exp, 96 regs": (2, 2, False, 96),
    "columns held, 1 warp, twice exp, 168 regs": (1, 4, False, 168),
}
OLD = {  # BLOCK_R, warps, maxnreg
    "columns reread, 64 rows, 1 warp": (64, 1, 64),
    "columns reread, 32 rows, 1 warp": (32, 1, 48),
    "columns reread, 128 rows, 2 warps": (128, 2, 64),
}
def held(name, x, offsets):
    w, step, hold, regs = HELD[name]
    out = torch.empty_like(x); T = x.shape[1]; vec = 16 // x.element_size()
    rows = 32 * vec // T * w * step
    kernel[(offsets.numel() - 1,)](x, out, offsets, T=T, VEC=vec, STEP=step, CASES=-(-400 // rows), HOLD=hold, num_warps=w, maxnreg=regs)
    return out
def old(name, x, offsets):
    br, w, regs = OLD[name]
    out = torch.empty_like(x); T = x.shape[1]
    _columns_kernel[(offsets.numel() - 1,)](x, None, out, offsets, T=T, BLOCK_I=T, BLOCK_R=br, LONG=LONG, LONG_TILE=LONG_TILE // x.element_size(), num_warps=w, maxnreg=regs)
    return out
if __name__ == "__main__":
    from comp import *
    sig = dict(x_ptr="*bf16", out_ptr="*bf16", offsets_ptr="*i64")
    for name, (w, step, hold, regs) in HELD.items():
        report(name, build(kernel, sig, dict(T=16, VEC=8, STEP=step, CASES=-(-400 // (16 * w * step)), HOLD=hold), gluon=True, num_warps=w, maxnreg=regs), loops=False)
    for name, (br, w, regs) in OLD.items():
        report(name, build(_columns_kernel, sig, dict(T=16, BLOCK_I=16, BLOCK_R=br, LONG=LONG, LONG_TILE=LONG_TILE // 2), num_warps=w, maxnreg=regs), loops=False)
