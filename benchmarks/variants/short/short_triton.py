"""Plain Triton: as flash_short.py, but samples of at most BLOCK // 2 rows go by smaller products,
a program takes HEADS heads one after the other (loads of the next ones ahead, STAGES), log-sum-exps
are taken once per row, and exponentials are flushed. Exact in the interpreter (FAST false)."""
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from torchrec_jagged_attn.kernels.flash_tiles import load_rows, store_rows, store_softmax_stats
from torchrec_jagged_attn.kernels.launch import Launcher, launches_overlap, overlap_options


@triton.jit
def _exp2(x, FAST: tl.constexpr):
    if FAST:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def _inverse(x, FAST: tl.constexpr):
    if FAST:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 1.0 / x
    return y


@triton.jit
def _softmax(products, factor, visible, FAST: tl.constexpr):
    tops = tl.where(visible, products, -float("inf"))
    top = tl.max(tops, 1)
    seen = top > -float("inf")
    maximum = tl.where(seen, top * factor, top)
    p = _exp2(tops * factor - tl.where(seen, maximum, 0.0)[:, None], FAST)
    return p, maximum, tl.sum(p, 1)


@triton.jit
def _visible(num_rows, num_keys, CAUSAL: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr):
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    visible = (j < num_keys) & (i < ROWS)
    if QUERIES:
        visible = visible & (i < num_rows)
    if CAUSAL:
        visible = visible & (j <= i + num_keys - num_rows)
    return visible


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, out_ptr, stats_ptr, q_row, num_rows, kv_row, num_keys, first_head,
    num_stats, factor,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):
    for n in tl.range(HEADS, num_stages=STAGES):
        head = first_head + n
        kv_head = head // (H // HK)
        q = load_rows(q_ptr, q_row, num_rows, Q_STRIDE, head * D, D, ROWS, BLOCK_D, True)
        k = load_rows(k_ptr, kv_row, num_keys, K_STRIDE, kv_head * D, D, ROWS, BLOCK_D, True)
        v = load_rows(v_ptr, kv_row, num_keys, V_STRIDE, kv_head * DV, DV, ROWS, BLOCK_D, True)
        products = tl.dot(q, tl.trans(k))
        visible = _visible(num_rows, num_keys, CAUSAL, False, ROWS)
        p, maximum, total = _softmax(products, factor, visible, FAST)
        out = tl.dot(p.to(v.dtype), v) * _inverse(tl.where(total > 0, total, 1.0), FAST)[:, None]
        store_rows(out_ptr, out, q_row, num_rows, H * DV, head * DV, DV, ROWS, BLOCK_D)
        i = tl.arange(0, ROWS)
        stat = (q_row + i) * H + head
        store_softmax_stats(stats_ptr, num_stats, stat, i < num_rows, maximum, total, False)


@triton.jit(do_not_specialize=["num_stats"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, stats_ptr, q_offsets_ptr, kv_offsets_ptr, num_stats, factor,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_D: tl.constexpr,
    LOW: tl.constexpr, BLOCK: tl.constexpr, SMALL: tl.constexpr, HEADS: tl.constexpr,
    STAGES: tl.constexpr, FAST: tl.constexpr, OVERLAP: tl.constexpr,
):
    if OVERLAP:
        cuda.gdc_launch_dependents()
    sample = tl.program_id(0) // (H // HEADS)
    first_head = tl.program_id(0) % (H // HEADS) * HEADS
    factor = tl.maximum(factor, 1e-30)
    q_row = tl.load(q_offsets_ptr + sample).to(tl.int64)
    kv_row = tl.load(kv_offsets_ptr + sample).to(tl.int64)
    num_rows = (tl.load(q_offsets_ptr + sample + 1).to(tl.int64) - q_row).to(tl.int32)
    num_keys = (tl.load(kv_offsets_ptr + sample + 1).to(tl.int64) - kv_row).to(tl.int32)
    largest = tl.maximum(num_rows, num_keys)
    if (largest <= BLOCK) & (largest > LOW) & (num_rows > 0):
        if SMALL and largest <= BLOCK // 2:
            _attend(
                q_ptr, k_ptr, v_ptr, out_ptr, stats_ptr, q_row, num_rows, kv_row, num_keys,
                first_head, num_stats, factor, H, HK, D, DV, Q_STRIDE, K_STRIDE, V_STRIDE, CAUSAL,
                BLOCK_D, BLOCK // 2, HEADS, STAGES, FAST,
            )
        else:
            _attend(
                q_ptr, k_ptr, v_ptr, out_ptr, stats_ptr, q_row, num_rows, kv_row, num_keys,
                first_head, num_stats, factor, H, HK, D, DV, Q_STRIDE, K_STRIDE, V_STRIDE, CAUSAL,
                BLOCK_D, BLOCK, HEADS, STAGES, FAST,
            )
    if OVERLAP:
        cuda.gdc_wait()


@triton.jit
def _differentiate(
    grad_out_ptr, q_ptr, k_ptr, v_ptr, grad_q_ptr, grad_k_ptr, grad_v_ptr, q_row, num_rows,
    kv_row, num_keys, first_head, factor, scale,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, GRAD_K_STRIDE: tl.constexpr,
    GRAD_V_STRIDE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):
    for n in tl.range(HEADS, num_stages=STAGES):
        head = first_head + n
        q = load_rows(q_ptr, q_row, num_rows, Q_STRIDE, head * D, D, ROWS, BLOCK_D, True)
        k = load_rows(k_ptr, kv_row, num_keys, K_STRIDE, head * D, D, ROWS, BLOCK_D, True)
        v = load_rows(v_ptr, kv_row, num_keys, V_STRIDE, head * DV, DV, ROWS, BLOCK_D, True)
        grad_out = load_rows(
            grad_out_ptr, q_row, num_rows, H * DV, head * DV, DV, ROWS, BLOCK_D, True
        )
        products = tl.dot(q, tl.trans(k))
        dp = tl.dot(grad_out, tl.trans(v))
        visible = _visible(num_rows, num_keys, CAUSAL, True, ROWS)
        p, _, total = _softmax(products, factor, visible, FAST)
        inverse = _inverse(tl.where(total > 0, total, 1.0), FAST)
        largest = tl.max(tl.where(visible, dp, -float("inf")), 1)
        largest = tl.where(largest == -float("inf"), 0.0, largest)
        delta = largest + tl.sum(p * (dp - largest[:, None]), 1) * inverse
        p *= inverse[:, None]
        grad_v = tl.dot(tl.trans(p.to(grad_out.dtype)), grad_out)
        store_rows(
            grad_v_ptr, grad_v, kv_row, num_keys, GRAD_V_STRIDE, head * DV, DV, ROWS, BLOCK_D
        )
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        grad_q = tl.dot(ds, k) * scale
        store_rows(grad_q_ptr, grad_q, q_row, num_rows, H * D, head * D, D, ROWS, BLOCK_D)
        grad_k = tl.dot(tl.trans(ds), q) * scale
        store_rows(grad_k_ptr, grad_k, kv_row, num_keys, GRAD_K_STRIDE, head * D, D, ROWS, BLOCK_D)


@triton.jit
def backward_kernel(
    grad_out_ptr, q_ptr, k_ptr, v_ptr, grad_q_ptr, grad_k_ptr, grad_v_ptr, q_offsets_ptr,
    kv_offsets_ptr, factor, scale,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, GRAD_K_STRIDE: tl.constexpr,
    GRAD_V_STRIDE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_D: tl.constexpr, LOW: tl.constexpr,
    BLOCK: tl.constexpr, SMALL: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
    FAST: tl.constexpr, OVERLAP: tl.constexpr,
):
    if OVERLAP:
        cuda.gdc_launch_dependents()
    sample = tl.program_id(0) // (H // HEADS)
    first_head = tl.program_id(0) % (H // HEADS) * HEADS
    factor = tl.maximum(factor, 1e-30)
    q_row = tl.load(q_offsets_ptr + sample).to(tl.int64)
    kv_row = tl.load(kv_offsets_ptr + sample).to(tl.int64)
    num_rows = (tl.load(q_offsets_ptr + sample + 1).to(tl.int64) - q_row).to(tl.int32)
    num_keys = (tl.load(kv_offsets_ptr + sample + 1).to(tl.int64) - kv_row).to(tl.int32)
    largest = tl.maximum(num_rows, num_keys)
    if (largest <= BLOCK) & (largest > LOW) & (largest > 0):
        if SMALL and largest <= BLOCK // 2:
            _differentiate(
                grad_out_ptr, q_ptr, k_ptr, v_ptr, grad_q_ptr, grad_k_ptr, grad_v_ptr, q_row,
                num_rows, kv_row, num_keys, first_head, factor, scale, H, D, DV, Q_STRIDE,
                K_STRIDE, V_STRIDE, GRAD_K_STRIDE, GRAD_V_STRIDE, CAUSAL, BLOCK_D, BLOCK // 2,
                HEADS, STAGES, FAST,
            )
        else:
            _differentiate(
                grad_out_ptr, q_ptr, k_ptr, v_ptr, grad_q_ptr, grad_k_ptr, grad_v_ptr, q_row,
                num_rows, kv_row, num_keys, first_head, factor, scale, H, D, DV, Q_STRIDE,
                K_STRIDE, V_STRIDE, GRAD_K_STRIDE, GRAD_V_STRIDE, CAUSAL, BLOCK_D, BLOCK,
                HEADS, STAGES, FAST,
            )
    if OVERLAP:
        cuda.gdc_wait()


_forward = Launcher(forward_kernel)
_backward = Launcher(backward_kernel)


def _constants(q, v, causal, width, low, block, small, heads, stages, warps, maxnreg):
    fast = False  # 30 instructions of 900
    constants = {
        "H": q.shape[1], "D": q.shape[2], "DV": v.shape[2], "CAUSAL": causal, "BLOCK_D": width,
        "LOW": low, "BLOCK": block, "SMALL": small, "HEADS": min(heads, q.shape[1]),
        "STAGES": stages, "FAST": fast, "num_warps": warps or (1 if block <= 32 else 4),
        **overlap_options(launches_overlap(q.device)),
    }
    if maxnreg:
        constants["maxnreg"] = maxnreg
    return constants


def _in_order(kernel, constants):
    names = [n for n in kernel.arg_names if n in constants]
    return {n: constants[n] for n in names} | {n: x for n, x in constants.items() if n not in names}


def forward(q, k, v, out, stats, q_offsets, kv_offsets, factor, causal, width, low=0, block=32,
            small=True, heads=1, stages=1, warps=0, maxnreg=None):
    c = _constants(q, v, causal, width, low, block, small, heads, stages, warps, maxnreg)
    c |= {"HK": k.shape[1], "Q_STRIDE": q.stride(0), "K_STRIDE": k.stride(0), "V_STRIDE": v.stride(0)}
    grid = (q_offsets.numel() - 1) * q.shape[1] // c["HEADS"]
    _forward((grid,), (q, k, v, out, stats, q_offsets, kv_offsets, stats[0].numel(), factor),
             _in_order(forward_kernel, c))


def backward(grad_out, q, k, v, grad_q, grad_k, grad_v, q_offsets, kv_offsets, factor, scale,
             causal, width, low=0, block=32, small=True, heads=1, stages=1, warps=0, maxnreg=None):
    assert q.shape[1] == k.shape[1]
    c = _constants(q, v, causal, width, low, block, small, heads, stages, warps, maxnreg)
    c |= {"Q_STRIDE": q.stride(0), "K_STRIDE": k.stride(0), "V_STRIDE": v.stride(0),
          "GRAD_K_STRIDE": grad_k.stride(0), "GRAD_V_STRIDE": grad_v.stride(0)}
    grid = (q_offsets.numel() - 1) * q.shape[1] // c["HEADS"]
    _backward((grid,), (grad_out, q, k, v, grad_q, grad_k, grad_v, q_offsets, kv_offsets, factor,
                        scale), _in_order(backward_kernel, c))
