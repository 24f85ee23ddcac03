"""Pair products in Gluon: pairs are read and written by 16 bytes, and shifted in registers to where
a row begins. wgmma from shared memory; the dense operand's tiles by cp.async. bf16/fp16, D = 128."""
import torch, triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from soft2g import mod
find_tile = mod.find_tile

# $0-3: out, from element 8 - s of ($4-7, $8-11), s in 0…7
FUNNEL = gl.constexpr("""{
.reg .pred p, q; .reg .b32 t0,t1,t2,t3,t4,t5,d0,d1,d2,d3,d4,h,a;
and.b32 h, $12, 4; setp.ne.u32 p, h, 0;
and.b32 h, $12, 2; setp.ne.u32 q, h, 0;
and.b32 h, $12, 1; shl.b32 h, h, 4; sub.u32 a, 32, h;
selp.b32 t0, $4, $6, p; selp.b32 t1, $5, $7, p; selp.b32 t2, $6, $8, p;
selp.b32 t3, $7, $9, p; selp.b32 t4, $8, $10, p; selp.b32 t5, $9, $11, p;
selp.b32 d0, t0, t1, q; selp.b32 d1, t1, t2, q; selp.b32 d2, t2, t3, q; selp.b32 d3, t3, t4, q; selp.b32 d4, t4, t5, q;
shf.r.clamp.b32 $0, d0, d1, a; shf.r.clamp.b32 $1, d1, d2, a; shf.r.clamp.b32 $2, d2, d3, a; shf.r.clamp.b32 $3, d3, d4, a;
}""")
FUNNEL_ARGS = gl.constexpr("=&r,=&r,=&r,=&r" + ",r" * 16)
# $4-7: this lane's vector; the one before it comes from the lane before it
SHUFFLE = gl.constexpr("""{
.reg .pred p, q; .reg .b32 c0,c1,c2,c3,t0,t1,t2,t3,t4,t5,d0,d1,d2,d3,d4,h,a;
shfl.sync.up.b32 c0, $4, 1, 0, 0xffffffff; shfl.sync.up.b32 c1, $5, 1, 0, 0xffffffff;
shfl.sync.up.b32 c2, $6, 1, 0, 0xffffffff; shfl.sync.up.b32 c3, $7, 1, 0, 0xffffffff;
and.b32 h, $8, 4; setp.ne.u32 p, h, 0;
and.b32 h, $8, 2; setp.ne.u32 q, h, 0;
and.b32 h, $8, 1; shl.b32 h, h, 4; sub.u32 a, 32, h;
selp.b32 t0, c0, c2, p; selp.b32 t1, c1, c3, p; selp.b32 t2, c2, $4, p;
selp.b32 t3, c3, $5, p; selp.b32 t4, $4, $6, p; selp.b32 t5, $5, $7, p;
selp.b32 d0, t0, t1, q; selp.b32 d1, t1, t2, q; selp.b32 d2, t2, t3, q; selp.b32 d3, t3, t4, q; selp.b32 d4, t4, t5, q;
shf.r.clamp.b32 $0, d0, d1, a; shf.r.clamp.b32 $1, d1, d2, a; shf.r.clamp.b32 $2, d2, d3, a; shf.r.clamp.b32 $3, d3, d4, a;
}""")
SHUFFLE_ARGS = gl.constexpr("=&r,=&r,=&r,=&r" + ",r" * 12)

@gluon.jit
def copy_rows(tile, ptr, begin, end, D: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """Begin to copy rows from begin on, as far as there are any from 0 to end; others are zeros."""
    n = begin + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    inside = ((n >= 0) & (n < end))[:, None] & (d < D)[None, :]
    async_copy.async_copy_global_to_shared(tile, ptr + (n[:, None] * D + d[None, :]), mask=inside)
    async_copy.commit_group()

@gluon.jit
def load_pairs(p_ptr, head, s, rows_in, k, num_k, BK: gl.constexpr, layout: gl.constexpr):
    c = gl.arange(0, BK, gl.SliceLayout(0, layout))
    first = (c // 8 * 8)[None, :] + k  # the vector's first column
    ptrs = p_ptr + (head * 8 + k)[:, None] + c[None, :]
    high = gl.load(ptrs, mask=rows_in[:, None] & (first + s[:, None] < num_k), other=0.0)
    low = gl.load(ptrs - 8, mask=(rows_in & (s > 0))[:, None] & (first < num_k), other=0.0)
    return low, high

@gluon.jit(do_not_specialize=["num_samples"])
def array_kernel(p_ptr, y_ptr, out_ptr, x_offsets_ptr, y_offsets_ptr, pair_offsets_ptr, num_samples,
                 D: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr):
    W: gl.constexpr = gl.num_warps()
    sample, m_begin, m_end, start = find_tile(x_offsets_ptr, num_samples, gl.program_id(0).to(gl.int64), 1, BM)
    if start < m_end - m_begin:
        dtype: gl.constexpr = y_ptr.dtype.element_ty
        num_m = (m_end - m_begin).to(gl.int32)
        k_begin = gl.load(y_offsets_ptr + sample).to(gl.int64)
        num_k = (gl.load(y_offsets_ptr + sample + 1).to(gl.int64) - k_begin).to(gl.int32)
        mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, D, 16])
        pairs: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [W, 1], [1, 0])
        rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [W, 1], [1, 0])
        ps = gl.allocate_shared_memory(dtype, [2, BM, BK], gl.NVMMASharedLayout.get_default_for([BM, BK], dtype))
        ys = gl.allocate_shared_memory(dtype, [STAGES, BK, D], gl.NVMMASharedLayout.get_default_for([BK, D], dtype))
        y_ptr += k_begin * D
        for stage in gl.static_range(STAGES - 1):
            copy_rows(ys.index(stage), y_ptr, stage * BK, num_k, D, BK, rows)
        m = start.to(gl.int32) + gl.arange(0, BM, gl.SliceLayout(1, pairs))
        first = gl.load(pair_offsets_ptr + sample)
        base = first // 8 * 8
        p_ptr += base
        begin = (first - base).to(gl.int32) + m * num_k
        head = (begin + 7) // 8
        s = head * 8 - begin
        rows_in = m < num_m
        low, high = load_pairs(p_ptr, head, s, rows_in, 0, num_k, BK, pairs)
        acc = warpgroup_mma_init(gl.zeros([BM, D], gl.float32, mma))
        _, shift = gl.broadcast(gl.zeros([BM, BK], gl.int32, pairs), s[:, None])
        c = gl.arange(0, BK, gl.SliceLayout(0, pairs))
        step = 0
        for k in range(0, num_k, BK):
            p = gl.inline_asm_elementwise(FUNNEL, FUNNEL_ARGS, [low, high, shift], dtype=y_ptr.dtype.element_ty, is_pure=True, pack=8)
            if k + BK > num_k:
                p = gl.where((c < num_k - k)[None, :], p, 0.0)
            ps.index(step % 2).store(p)
            low, high = load_pairs(p_ptr, head, s, rows_in, k + BK, num_k, BK, pairs)
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            done = warpgroup_mma_wait(0, deps=(acc,))
            gl.thread_barrier()
            copy_rows(ys.index((step + STAGES - 1) % STAGES), y_ptr, k + (STAGES - 1) * BK, num_k, D, BK, rows)
            acc = warpgroup_mma(ps.index(step % 2), ys.index(step % STAGES), done, is_async=True)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        async_copy.wait_group(0)
        out = gl.convert_layout(acc.to(dtype), rows)
        m = start.to(gl.int32) + gl.arange(0, BM, gl.SliceLayout(1, rows))
        d = gl.arange(0, D, gl.SliceLayout(0, rows))
        gl.store(out_ptr + m_begin * D + (m[:, None] * D + d[None, :]), out, mask=(m < num_m)[:, None] & (d < D)[None, :])

@gluon.jit(do_not_specialize=["num_samples"])
def pairs_kernel(x_ptr, y_ptr, out_ptr, x_offsets_ptr, y_offsets_ptr, pair_offsets_ptr, num_samples,
                 D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    """Tiles of columns overlap by 8: a vector that is written lies in two that are computed."""
    W: gl.constexpr = gl.num_warps()
    sample, m_begin, m_end, start = find_tile(x_offsets_ptr, num_samples, gl.program_id(0).to(gl.int64), 1, BM)
    if start < m_end - m_begin:
        dtype: gl.constexpr = y_ptr.dtype.element_ty
        num_m = (m_end - m_begin).to(gl.int32)
        n_begin = gl.load(y_offsets_ptr + sample).to(gl.int64)
        num_n = (gl.load(y_offsets_ptr + sample + 1).to(gl.int64) - n_begin).to(gl.int32)
        mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, BN, 16])
        pairs: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], [W, 1], [1, 0])
        rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [W, 1], [1, 0])
        xs = gl.allocate_shared_memory(dtype, [BM, D], gl.NVMMASharedLayout.get_default_for([BM, D], dtype))
        ys = gl.allocate_shared_memory(dtype, [STAGES, BN, D], gl.NVMMASharedLayout.get_default_for([BN, D], dtype))
        copy_rows(xs, x_ptr + m_begin * D, start.to(gl.int32), num_m, D, BM, rows)
        y_ptr += n_begin * D
        for stage in gl.static_range(STAGES - 1):
            copy_rows(ys.index(stage), y_ptr, stage * (BN - 8) - 8, num_n, D, BN, rows)
        m = start.to(gl.int32) + gl.arange(0, BM, gl.SliceLayout(1, pairs))
        first = gl.load(pair_offsets_ptr + sample)
        base = first // 8 * 8
        out_ptr += base
        begin = (first - base).to(gl.int32) + m * num_n
        head = begin // 8
        s = begin - head * 8
        rows_in = m < num_m
        _, shift = gl.broadcast(gl.zeros([BM, BN], gl.int32, pairs), s[:, None])
        c = gl.arange(0, BN, gl.SliceLayout(0, pairs))
        zeros = gl.zeros([BM, BN], gl.float32, mma)
        step = 0
        for n in range(-8, num_n, BN - 8):  # up to 7 columns more than there are, for what is shifted
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            gl.thread_barrier()
            acc = warpgroup_mma(xs, ys.index(step % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
            copy_rows(ys.index((step + STAGES - 1) % STAGES), y_ptr, n + (STAGES - 1) * (BN - 8), num_n, D, BN, rows)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            tile = gl.convert_layout(acc.to(dtype), pairs)
            out = gl.inline_asm_elementwise(SHUFFLE, SHUFFLE_ARGS, [tile, shift], dtype=y_ptr.dtype.element_ty, is_pure=False, pack=8)
            column = (n + (c // 8 * 8))[None, :] - s[:, None]  # of the vector's first element
            there = rows_in[:, None] & (c >= 8)[None, :]
            whole = (column >= 0) & (column <= num_n - 8)
            ptrs = out_ptr + (head * 8 + n)[:, None] + c[None, :]
            gl.store(ptrs, out, mask=there & whole)
            if (n < 0) | (n + BN >= num_n - 8):
                at = (n + c)[None, :] - s[:, None]
                some = (there & (column < 0)) | (there & (column > num_n - 8))
                gl.store(ptrs, out, mask=some & (at.to(gl.uint32) < num_n.to(gl.uint32)))
            step += 1
        async_copy.wait_group(0)

ARRAY = {  # BM, BK, stages, warps, maxnreg
    "gluon array 128x64, 8 warps": (128, 64, 3, 8, 128),
    "gluon array 64x64, 4 warps": (64, 64, 3, 4, 168),
    "gluon array 128x32, 8 warps": (128, 32, 4, 8, 128),
}
PAIRS = {  # BM, BN, stages, warps, maxnreg
    "gluon pairs 64x64, 4 warps": (64, 64, 2, 4, 128),
    "gluon pairs 128x64, 8 warps": (128, 64, 2, 8, 128),
    "gluon pairs 128x128, 8 warps": (128, 128, 2, 8, 128),
    "gluon pairs 64x128, 4 warps": (64, 128, 2, 4, 168),
}
def array(name, p, y, xo, yo, po, num_rows):
    bm, bk, st, w, regs = ARRAY[name]
    out = y.new_empty(num_rows, y.shape[1]); n = xo.numel() - 1
    array_kernel[(num_rows // bm + n,)](p, y, out, xo, yo, po, n, D=y.shape[1], BM=bm, BK=bk, STAGES=st, num_warps=w, maxnreg=regs)
    return out
def pairs(name, x, y, xo, yo, po, total):
    bm, bn, st, w, regs = PAIRS[name]
    out = x.new_empty(total); n = xo.numel() - 1
    pairs_kernel[(x.shape[0] // bm + n,)](x, y, out, xo, yo, po, n, D=x.shape[1], BM=bm, BN=bn, STAGES=st, num_warps=w, maxnreg=regs)
    return out
if __name__ == "__main__":
    from comp import *
    sig = dict(p_ptr="*bf16", x_ptr="*bf16", y_ptr="*bf16", out_ptr="*bf16", x_offsets_ptr="*i64", y_offsets_ptr="*i64", pair_offsets_ptr="*i64", num_samples="i32")
    for name, (bm, bk, st, w, regs) in ARRAY.items():
        report(name, build(array_kernel, sig, dict(D=128, BM=bm, BK=bk, STAGES=st), gluon=True, num_warps=w, maxnreg=regs))
    for name, (bm, bn, st, w, regs) in PAIRS.items():
        report(name, build(pairs_kernel, sig, dict(D=128, BM=bm, BN=bn, STAGES=st), gluon=True, num_warps=w, maxnreg=regs))
