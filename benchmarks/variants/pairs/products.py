"""Pair products with tiles of more rows; x is kept for all columns of a tile's rows."""
import torch, triton, triton.language as tl
from torchrec_jagged_attn.kernels.common import find_tile
from torchrec_jagged_attn.kernels.product_tiles import load_tile, multiply, tile_of
from torchrec_jagged_attn.kernels.jagged_products import _rows_kernel

@triton.jit(do_not_specialize=["num_samples"])
def held_kernel(x_ptr, y_ptr, out_ptr, x_offsets_ptr, y_offsets_ptr, pair_offsets_ptr, num_samples,
                K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                NUM_STAGES: tl.constexpr, INDEX: tl.constexpr, SPLIT: tl.constexpr):
    """pairs: K <= BLOCK_K. SPLIT programs share a tile's columns."""
    program = tl.program_id(0).to(tl.int64)
    sample, m_begin, m_end, start = find_tile(x_offsets_ptr, num_samples, program // SPLIT, 1, BLOCK_M)
    if start >= m_end - m_begin:
        return
    num_m = (m_end - m_begin).to(tl.int32)
    n_begin = tl.load(y_offsets_ptr + sample).to(tl.int64)
    num_n = (tl.load(y_offsets_ptr + sample + 1).to(tl.int64) - n_begin).to(tl.int32)
    out_first = tl.load(pair_offsets_ptr + sample)
    m = start.to(tl.int32)
    x = load_tile(x_ptr + m_begin * K, m, 0, num_m, K, BLOCK_M, BLOCK_K, False, INDEX)
    for n in tl.range((program % SPLIT).to(tl.int32) * BLOCK_N, num_n, BLOCK_N * SPLIT, num_stages=NUM_STAGES):
        y = load_tile(y_ptr + n_begin * K, 0, n, K, num_n, BLOCK_K, BLOCK_N, True, INDEX)
        out = tl.dot(x, y)
        origin, at, mask = tile_of(m, n, num_m, num_n, BLOCK_M, BLOCK_N, False, INDEX)
        tl.store(out_ptr + out_first + origin + at, out, mask=mask)

# name: (BLOCK_M, BLOCK_N, stages, warps, split, maxnreg)
HELD = {
    "held 64x64": (64, 64, 2, 4, 1, None),
    "held 128x64, 8 warps": (128, 64, 2, 8, 1, 128),
    "held 128x128, 8 warps": (128, 128, 2, 8, 1, 255),
    "held 128x64, 8 warps, 3 stages": (128, 64, 3, 8, 1, 128),
}
def held(name, x, y, xo, yo, po, total):
    bm, bn, st, w, split, regs = HELD[name]
    out = x.new_empty(total)
    n = xo.numel() - 1
    opt = {} if regs is None or x.device.type == "cpu" else {"maxnreg": regs}
    held_kernel[((x.shape[0] // bm + n) * split,)](x, y, out, xo, yo, po, n, K=x.shape[1], BLOCK_M=bm, BLOCK_N=bn,
        BLOCK_K=max(16, triton.next_power_of_2(x.shape[1])), NUM_STAGES=st, INDEX=tl.int32, SPLIT=split, num_warps=w, **opt)
    return out

# The kernel as it is, other tiles. name: (BLOCK_M, BLOCK_N, BLOCK_K, stages, ahead, warps, maxnreg)
ROWS = {
    "rows 128x128x32, 8 warps": (128, 128, 32, 3, True, 8, 128),
    "rows 128x128x64, 8 warps": (128, 128, 64, 3, True, 8, 168),
    "rows 128x128x32, 4 warps": (128, 128, 32, 3, True, 4, 255),
    "rows 256x128x32, 8 warps": (256, 128, 32, 3, True, 8, 255),
}
def rows(name, p, y, xo, yo, po, num_rows):
    bm, bn, bk, st, ahead, w, regs = ROWS[name]
    out = y.new_empty(num_rows, y.shape[1])
    n = xo.numel() - 1
    tiles_n = -(-y.shape[1] // bn)
    opt = {} if regs is None or y.device.type == "cpu" else {"maxnreg": regs}
    _rows_kernel[((num_rows // bm + n) * tiles_n,)](p, y, out, xo, None, yo, po, n, N=y.shape[1], K=0, TRANS_A=False, TRANS_B=False,
        PRECISION="tf32", BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, TILES_N=tiles_n, NUM_STAGES=st, FLATTEN=False, AHEAD=ahead, INDEX=tl.int32, num_warps=w, **opt)
    return out
if __name__ == "__main__":
    import sys
    if sys.argv[1:2] == ["compile"]:
        from comp import *
        sig = dict(x_ptr="*bf16", y_ptr="*bf16", out_ptr="*bf16", x_offsets_ptr="*i64", y_offsets_ptr="*i64", pair_offsets_ptr="*i64", num_samples="i32")
        for name, (bm, bn, st, w, split, regs) in HELD.items():
            report(name, build(held_kernel, sig, dict(K=128, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=128, NUM_STAGES=st, INDEX=tl.int32, SPLIT=split), num_warps=w, **({"maxnreg": regs} if regs else {})))
        sig = dict(a_ptr="*bf16", b_ptr="*bf16", out_ptr="*bf16", m_offsets_ptr="*i64", k_offsets_ptr="*i64", pair_offsets_ptr="*i64", num_samples="i32")
        for name, (bm, bn, bk, st, ahead, w, regs) in ROWS.items():
            report(name, build(_rows_kernel, sig, dict(N=128, K=0, TRANS_A=False, TRANS_B=False, PRECISION="tf32", BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, TILES_N=1, NUM_STAGES=st, FLATTEN=False, AHEAD=ahead, INDEX=tl.int32), num_warps=w, maxnreg=regs))
    else:
        torch.manual_seed(0)
        lx = torch.tensor([0, 5, 1, 40, 0, 130]); ly = torch.tensor([3, 7, 1, 70, 5, 131])
        cum = lambda l: torch.cat([l.new_zeros(1), l.cumsum(0)])
        xo, yo, po = cum(lx), cum(ly), cum(lx * ly)
        x, y = torch.randn(int(xo[-1]), 24), torch.randn(int(yo[-1]), 24)
        ref = torch.cat([(x[xo[b]:xo[b+1]] @ y[yo[b]:yo[b+1]].T).flatten() for b in range(len(lx))])
        print((held("held 64x64", x, y, xo, yo, po, ref.numel()) - ref).abs().max())
        ref2 = torch.cat([ref[po[b]:po[b+1]].view(int(lx[b]), int(ly[b])) @ y[yo[b]:yo[b+1]] for b in range(len(lx))])
        print((rows("rows 128x128x64, 8 warps", ref, y, xo, yo, po, x.shape[0]) - ref2).abs().max())
