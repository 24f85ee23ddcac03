"""Softmax of rows of pairs by aligned 16-byte vectors: a row is up to VEC - 1 elements, whole
vectors, and again up to VEC - 1 elements."""
import torch, triton, triton.language as tl
from torchrec_jagged_attn.kernels.common import LOG2E, find_tile
from torchrec_jagged_attn.kernels.interaction import _long_lines

@triton.jit
def _parts_of(first, i, last_line, length, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, VEC: tl.constexpr):
    """Where lines lie: whole vectors ``[BLOCK_I, BLOCK_R]`` and their ends ``[BLOCK_I, 2 VEC]``."""
    line = i + tl.arange(0, BLOCK_I)
    begin = first + line.to(tl.int64) * length
    end = tl.where(line < last_line, begin + length, begin)
    head = (begin + VEC - 1) // VEC
    tail = tl.maximum(end // VEC, head)
    r = tl.arange(0, BLOCK_R)
    at = (head * VEC)[:, None] + r[None, :]
    mask = (r // VEC)[None, :] < (tail - head).to(tl.int32)[:, None]
    e = (tl.arange(0, 2 * VEC) ^ 1)[None, :]  # swapped: not to be taken for vectors
    ends = tl.where(e < VEC, begin[:, None] + e, (tail * VEC - VEC)[:, None] + e)
    stop = tl.where(e < VEC, tl.minimum(head * VEC, end)[:, None], end[:, None])
    return at, mask, ends, ends < stop

@triton.jit
def _load_parts(x_ptr, p_ptr, first, i, last_line, length, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, VEC: tl.constexpr):
    at, mask, ends, edge = _parts_of(first, i, last_line, length, BLOCK_I, BLOCK_R, VEC)
    lowest: tl.constexpr = -float("inf") if p_ptr is None else 0.0
    x = tl.load(x_ptr + at, mask=mask, other=lowest)
    xe = tl.load(x_ptr + ends, mask=edge, other=lowest)
    if p_ptr is None:
        return x, xe, x, xe
    else:
        return x, xe, tl.load(p_ptr + at, mask=mask, other=0.0), tl.load(p_ptr + ends, mask=edge, other=0.0)

@triton.jit
def _rest_of(first, i, last_line, length, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, REST: tl.constexpr, VEC: tl.constexpr):
    """Whole vectors beyond BLOCK_R."""
    line = i + tl.arange(0, BLOCK_I)
    begin = first + line.to(tl.int64) * length
    end = tl.where(line < last_line, begin + length, begin)
    head = (begin + VEC - 1) // VEC + BLOCK_R // VEC
    r = tl.arange(0, REST)
    at = (head * VEC)[:, None] + r[None, :]
    return at, (r // VEC)[None, :] < (end // VEC - head).to(tl.int32)[:, None]

@triton.jit
def _rest_lines(x_ptr, out_ptr, first, line, last_line, length,
                BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, REST: tl.constexpr, VEC: tl.constexpr):
    """Forward of lines longer than BLOCK_R, by at most REST."""
    for i in range(line, last_line, BLOCK_I):
        x, xe, _, _ = _load_parts(x_ptr, None, first, i, last_line, length, BLOCK_I, BLOCK_R, VEC)
        more, more_mask = _rest_of(first, i, last_line, length, BLOCK_I, BLOCK_R, REST, VEC)
        xr = tl.load(x_ptr + more, mask=more_mask, other=-float("inf")).to(tl.float32)
        x = x.to(tl.float32)
        xe = xe.to(tl.float32)
        maximum = tl.maximum(tl.maximum(tl.max(x, 1), tl.max(xe, 1)), tl.max(xr, 1))
        maximum = tl.where(maximum == -float("inf"), 0.0, maximum)[:, None]
        w = tl.exp2((x - maximum) * LOG2E)
        we = tl.exp2((xe - maximum) * LOG2E)
        wr = tl.exp2((xr - maximum) * LOG2E)
        total = tl.sum(w, 1) + tl.sum(we, 1) + tl.sum(wr, 1)
        inverse = tl.div_rn(1.0, tl.where(total == 0, 1.0, total))[:, None]
        at, mask, ends, edge = _parts_of(first, i, last_line, length, BLOCK_I, BLOCK_R, VEC)
        tl.store(out_ptr + at, w * inverse, mask=mask)
        tl.store(out_ptr + more, wr * inverse, mask=more_mask)
        tl.store(out_ptr + ends, we * inverse, mask=edge)

@triton.jit
def _vector_lines(x_ptr, p_ptr, out_ptr, first, line, last_line, length,
                  BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, VEC: tl.constexpr, AHEAD: tl.constexpr):
    if AHEAD:
        nx, nxe, np, npe = _load_parts(x_ptr, p_ptr, first, line, last_line, length, BLOCK_I, BLOCK_R, VEC)
    for i in range(line, last_line, BLOCK_I):
        if AHEAD:
            x, xe, p, pe = nx, nxe, np, npe
            nx, nxe, np, npe = _load_parts(x_ptr, p_ptr, first, i + BLOCK_I, last_line, length, BLOCK_I, BLOCK_R, VEC)
        else:
            x, xe, p, pe = _load_parts(x_ptr, p_ptr, first, i, last_line, length, BLOCK_I, BLOCK_R, VEC)
        x = x.to(tl.float32)
        xe = xe.to(tl.float32)
        if p_ptr is None:
            maximum = tl.maximum(tl.max(x, 1), tl.max(xe, 1))
            maximum = tl.where(maximum == -float("inf"), 0.0, maximum)[:, None]
            w = tl.exp2((x - maximum) * LOG2E)
            we = tl.exp2((xe - maximum) * LOG2E)
            total = tl.sum(w, 1) + tl.sum(we, 1)
            inverse = tl.div_rn(1.0, tl.where(total == 0, 1.0, total))[:, None]
            out = w * inverse
            oute = we * inverse
        else:
            p = p.to(tl.float32)
            pe = pe.to(tl.float32)
            mean = (tl.sum(p * x, 1) + tl.sum(pe * xe, 1))[:, None]
            out = p * (x - mean)
            oute = pe * (xe - mean)
        at, mask, ends, edge = _parts_of(first, i, last_line, length, BLOCK_I, BLOCK_R, VEC)
        tl.store(out_ptr + at, out, mask=mask)
        tl.store(out_ptr + ends, oute, mask=edge)

@triton.jit(do_not_specialize=["num_samples"])
def vector_kernel(x_ptr, p_ptr, out_ptr, offsets_ptr, y_offsets_ptr, num_samples,
                  SPAN: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, SHAPES: tl.constexpr,
                  VEC: tl.constexpr, AHEAD: tl.constexpr, RESTS: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    sample, first, end, start = find_tile(offsets_ptr, num_samples, tile, 1, SPAN)
    length = tl.load(y_offsets_ptr + sample + 1) - tl.load(y_offsets_ptr + sample)
    stop = tl.minimum(start + SPAN, tl.maximum(end - first, start))
    line = tl.cdiv(start, tl.maximum(length, 1).to(tl.int64)).to(tl.int32)
    last_line = tl.cdiv(stop, tl.maximum(length, 1).to(tl.int64)).to(tl.int32)
    length = length.to(tl.int32)
    if length > BLOCK_R:
        _long_lines(x_ptr, p_ptr, out_ptr, first, line, last_line, length, 0, True, 1, BLOCK_I * BLOCK_R, 1)
    for shape in tl.static_range(SHAPES):
        fits = length <= BLOCK_R >> shape
        if shape + 1 < SHAPES:
            if shape < RESTS:  # three quarters of a tile: a half of it and a quarter
                fits &= length > 3 * (BLOCK_R >> (shape + 2))
                if (length > BLOCK_R >> (shape + 1)) & (length <= 3 * (BLOCK_R >> (shape + 2))):
                    _rest_lines(x_ptr, out_ptr, first, line, last_line, length, BLOCK_I << shape,
                                BLOCK_R >> (shape + 1), BLOCK_R >> (shape + 2), VEC)
            else:
                fits &= length > BLOCK_R >> (shape + 1)
        if fits:
            _vector_lines(x_ptr, p_ptr, out_ptr, first, line, last_line, length,
                          BLOCK_I << shape, BLOCK_R >> shape, VEC, AHEAD)

# name: (SPAN, BLOCK_I, BLOCK_R, SHAPES, AHEAD, warps, maxnreg)
VARIANTS = {
    "vectors span1024": (1024, 1, 512, 4, False, 1, 64, 0),
    "vectors span4096": (4096, 1, 512, 4, False, 1, 64, 0),
    "vectors span4096 ahead": (4096, 1, 512, 4, True, 1, 64, 0),
    "vectors span4096 rests": (4096, 1, 512, 4, False, 1, 64, 2),
    "vectors span8192 two rows": (8192, 2, 512, 4, False, 1, 96, 0),
    "vectors span8192 two rows rests": (8192, 2, 512, 4, False, 1, 96, 2),
    "vectors span2048 rests, 48 registers": (2048, 1, 512, 4, False, 1, 48, 2),
}
def run(name, x, p, offsets, y_offsets):
    span, bi, br, shapes, ahead, warps, regs, rests = VARIANTS[name]
    out = torch.empty_like(x)
    n = offsets.numel() - 1
    opt = {} if x.device.type == "cpu" else {"maxnreg": regs}
    vector_kernel[(x.numel() // span + n,)](x, p, out, offsets, y_offsets, n, SPAN=span, BLOCK_I=bi, BLOCK_R=br,
        SHAPES=shapes, VEC=16 // x.element_size(), AHEAD=ahead, RESTS=rests if p is None else 0, num_warps=warps, **opt)
    return out
if __name__ == "__main__":
    import sys
    if sys.argv[1:2] == ["compile"]:
        from comp import *
        sig = dict(x_ptr="*bf16", out_ptr="*bf16", offsets_ptr="*i64", y_offsets_ptr="*i64", num_samples="i32")
        for name, (span, bi, br, shapes, ahead, warps, regs, rests) in VARIANTS.items():
            if name not in sys.argv[2:] and sys.argv[2:]: continue
            report(name, build(vector_kernel, sig, dict(SPAN=span, BLOCK_I=bi, BLOCK_R=br, SHAPES=shapes, VEC=8, AHEAD=ahead, RESTS=rests), num_warps=warps, maxnreg=regs))
    else:
        torch.manual_seed(0)
        lx = torch.tensor([0, 5, 1, 40, 0, 17, 3, 1, 2, 2, 7, 3, 3, 2]); ly = torch.tensor([3, 7, 1, 70, 5, 130, 513, 300, 0, 500, 140, 200, 384, 256])
        cum = lambda l: torch.cat([l.new_zeros(1), l.cumsum(0)])
        po, yo = cum(lx * ly), cum(ly)
        for dt in (torch.bfloat16, torch.float32):
            x = torch.randn(int(po[-1]), dtype=dt)
            ref = torch.cat([torch.softmax(x[po[b]:po[b+1]].view(int(lx[b]), int(ly[b])).float(), 1).flatten() for b in range(len(lx))])
            g = torch.randn_like(x)
            pr = ref.to(dt).float()
            rg = torch.cat([(lambda P, G: (P * (G - (P * G).sum(1, keepdim=True))).flatten())(pr[po[b]:po[b+1]].view(int(lx[b]), int(ly[b])), g[po[b]:po[b+1]].view(int(lx[b]), int(ly[b])).float()) for b in range(len(lx))])
            for name in ("vectors span4096 ahead", "vectors span8192 two rows rests"):
                o = run(name, x, None, po, yo); d = run(name, g, ref.to(dt), po, yo)
                print(dt, name, (o.float() - ref).abs().max().item(), (d.float() - rg).abs().max().item())
