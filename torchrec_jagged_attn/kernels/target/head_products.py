"""The products on the targets' side of target attention: two kernels, each a chain of two products.

With ``R`` targets in all, their rows ``[R, C]``, and the weights of head ``h``, forward has

    q_h = target · W_Q,hᵀ + b_Q,h                  u_h = q_h · W_K,h
    values_h = pooled_h · W_V,hᵀ + b_V,h           out = Σ_h values_h · W_O,hᵀ + b_O

and backward the same two chains, of the other weights:

    ∂values_h = ∂out · W_O,h                       ∂pooled_h = ∂values_h · W_V,h
    ∂q_h = ∂u_h · W_K,hᵀ                           ∂target = Σ_h ∂q_h · W_Q,h

A chain takes 2·R·E·(C + D) FLOPs. The result of its first product is rounded before the second one,
as if each product had a kernel. Rows are read and written once, and the weights once for every
BLOCK_R rows, from the cache. A batch has few targets, so that a chain is launch-bound. Operands are
cast as they are read: weights and rows may have other dtypes than the products.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.knobs import runtime
from triton.language.extra import cuda

from torchrec_jagged_attn import devices
from torchrec_jagged_attn.kernels.common.launch import Launcher, overlap_options
from torchrec_jagged_attn.kernels.common.matmul import multiply, padded_width
from torchrec_jagged_attn.kernels.target.records import Listing, SlotList
from torchrec_jagged_attn.kernels.target.schedule import SAMPLES_OF_LIST, list_slots

__all__ = [
    "MAX_HEAD_DIM",
    "absorb_queries",
    "gradient_of_pooled",
    "gradient_of_targets",
    "project",
]

BLOCK_R = 16  # rows of a program; no more, so that there are many
MAX_HEAD_DIM = 128  # what is between the two products is held in registers
# Of fp32, also where TF32 would do: these products are few.
_EXACT = "ieee" if runtime.interpret else "bf16x6"
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _load(ptr, h, i, j, NUM_I: tl.constexpr, NUM_J: tl.constexpr, STRIDES: tl.constexpr):
    """``[i, j]`` of the matrix ``[NUM_I, NUM_J]`` of head ``h``, zeros outside of it."""
    at = h * STRIDES[0] + i[:, None] * STRIDES[1] + j[None, :] * STRIDES[2]
    return tl.load(ptr + at, mask=(i < NUM_I)[:, None] & (j < NUM_J)[None, :], other=0.0)


@triton.jit
def _load_rows(ptr, r, num_rows, c, C: tl.constexpr, STRIDE: tl.constexpr):
    """Columns ``c`` of the rows ``r``, STRIDE apart, zeros outside of ``[num_rows, C]``."""
    at = r.to(tl.int64)[:, None] * STRIDE + c[None, :]
    return tl.load(ptr + at, mask=(r < num_rows)[:, None] & (c < C)[None, :], other=0.0)


@triton.jit
def _store_rows(ptr, x, r, num_rows, c, C: tl.constexpr, STRIDE: tl.constexpr):
    """Store ``x`` where :func:`_load_rows` would load it."""
    at = r.to(tl.int64)[:, None] * STRIDE + c[None, :]
    mask = (r < num_rows)[:, None] & (c < C)[None, :]
    tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_samples", "num_slots"])
def _to_heads_kernel(
    x_ptr,  # [R, C]
    first_ptr,  # [H, C, X]
    bias_ptr,  # [H · X], or None
    second_ptr,  # [H, X, D]
    inner_ptr,  # [R, H, X], out
    out_ptr,  # [R, H, D], out
    slot_list,  # of the attention that comes next, to be made, too; or of None
    num_rows,
    num_samples,
    num_slots,
    C: tl.constexpr,
    H: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
    FIRST_STRIDES: tl.constexpr,
    SECOND_STRIDES: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``inner_h = x · first_h + bias_h`` and ``out_h = inner_h · second_h``: rows of one head.

    The first programs list the slots, if there is a list.
    """
    if OVERLAP:
        cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if slot_list.slots is not None:
        num_listing = tl.cdiv(num_samples, BLOCK_B)
        if program < num_listing:
            list_slots(slot_list, program, num_samples, num_slots, CHUNK, BLOCK_B)
            return
        program -= num_listing
    h = program % H
    r = program // H * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_X)
    inner = tl.zeros([BLOCK_R, BLOCK_X], tl.float32)
    for begin in range(0, C, BLOCK_C):
        c = begin + tl.arange(0, BLOCK_C)
        x = _load_rows(x_ptr, r, num_rows, c, C, C).to(DTYPE)
        weight = _load(first_ptr, h, c, column, C, X, FIRST_STRIDES)
        inner = multiply(x, weight.to(DTYPE), inner, PRECISION)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + h * X + column, mask=column < X, other=0.0)
        inner += bias.to(DTYPE).to(tl.float32)[None, :]
    inner = inner.to(DTYPE)
    _store_rows(inner_ptr + h * X, inner, r, num_rows, column, X, H * X)
    for begin in range(0, D, BLOCK_D):
        d = begin + tl.arange(0, BLOCK_D)
        weight = _load(second_ptr, h, column, d, X, D, SECOND_STRIDES)
        out = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        out = multiply(inner, weight.to(DTYPE), out, PRECISION).to(DTYPE)
        _store_rows(out_ptr + h * D, out, r, num_rows, d, D, H * D)


@triton.jit(do_not_specialize=["num_rows"])
def _from_heads_kernel(
    x_ptr,  # [R, H, D]
    first_ptr,  # [H, D, X]
    first_bias_ptr,  # [H · X], added where an inverse is not 0; or None
    inverses_ptr,  # [R, H], or None
    second_ptr,  # [H, X, E]
    second_bias_ptr,  # [E], or None
    inner_ptr,  # [R, H, X], out
    filled_ptr,  # [R] whether an inverse is not 0, out; or None
    out_ptr,  # [R, E], out; or None
    num_rows,
    E: tl.constexpr,
    H: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
    FIRST_STRIDES: tl.constexpr,
    SECOND_STRIDES: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``inner_h = x_h · first_h + bias_h`` and some columns of ``out = Σ_h inner_h · second_h``."""
    if OVERLAP:
        cuda.gdc_wait()
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    column = tl.arange(0, BLOCK_X)
    if filled_ptr is not None:
        filled = tl.zeros([BLOCK_R], tl.float32)
        for h in range(H):
            at = inverses_ptr + r.to(tl.int64) * H + h
            filled = tl.where(tl.load(at, mask=r < num_rows, other=0.0) != 0, 1.0, filled)
        if tl.program_id(1) == 0:
            tl.store(filled_ptr + r, filled, mask=r < num_rows)
    out = tl.zeros([BLOCK_R, BLOCK_E], tl.float32)
    for h in tl.range(0, H, num_stages=NUM_STAGES):
        inner = tl.zeros([BLOCK_R, BLOCK_X], tl.float32)
        for begin in tl.static_range(0, D, BLOCK_D):  # no loop, so that the other is pipelined
            d = begin + tl.arange(0, BLOCK_D)
            x = _load_rows(x_ptr + h * D, r, num_rows, d, D, H * D).to(DTYPE)
            weight = _load(first_ptr, h, d, column, D, X, FIRST_STRIDES)
            inner = multiply(x, weight.to(DTYPE), inner, PRECISION)
        if first_bias_ptr is not None:
            bias = tl.load(first_bias_ptr + h * X + column, mask=column < X, other=0.0)
            inner = inner.to(DTYPE).to(tl.float32)
            inner += filled[:, None] * bias.to(DTYPE).to(tl.float32)[None, :]
        inner = inner.to(DTYPE)
        mask = (r < num_rows) & (tl.program_id(1) == 0)
        at = r.to(tl.int64)[:, None] * (H * X) + (h * X + column)[None, :]
        tl.store(inner_ptr + at, inner, mask=mask[:, None] & (column < X)[None, :])
        if out_ptr is not None:
            weight = _load(second_ptr, h, column, e, X, E, SECOND_STRIDES)
            out = multiply(inner, weight.to(DTYPE), out, PRECISION)
    if out_ptr is not None:
        if second_bias_ptr is not None:
            bias = tl.load(second_bias_ptr + e, mask=e < E, other=0.0)
            out += bias.to(DTYPE).to(tl.float32)[None, :]
        _store_rows(out_ptr, out.to(DTYPE), r, num_rows, e, E, E)


_NO_LISTING = Listing(SlotList(None, None), 0, 0, 0)
_to_heads = Launcher(_to_heads_kernel)
_from_heads = Launcher(_from_heads_kernel)


def absorb_queries(
    target: Tensor,
    w_q: Tensor,
    b_q: Tensor | None,
    w_k: Tensor,
    dtype: torch.dtype,
    u: Tensor,
    listing: Listing | None,
) -> Tensor:
    """Queries, and what history rows are compared with.

    Args:
        target: ``[R, C]``.
        w_q: ``[E, C]``, contiguous, as are all weights, of any of the kernels' dtypes.
        b_q: ``[E]``.
        w_k: ``[H, E / H, D]``.
        dtype: of the products.
        u: ``[R, H, D]``, written.
        listing: of the slots of the attention of ``u``, which are listed, too.

    Returns:
        ``q`` ``[R, H, E / H]`` in ``dtype``.
    """
    num_rows, num_inputs = target.shape
    num_heads, head_dim, _ = w_k.shape
    q = target.new_empty(num_rows, num_heads, head_dim, dtype=dtype)
    strides = (head_dim * num_inputs, 1, num_inputs)
    constants = _to_heads_constants(num_inputs, *w_k.shape, strides, dtype, target.device)
    _launch_to_heads(target, w_q, b_q, w_k, q, u, listing, constants)
    return q


def project(
    pooled: Tensor,
    stats: Tensor,
    w_v: Tensor,
    b_v: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Values of the pooled rows, and the output.

    Args:
        pooled: ``[R, H, D]``.
        stats: ``[2, …]`` fp32 of the attention, by which a target without any row is known.
        w_v: ``[H, E / H, D]``, contiguous, as are all weights, of any of the kernels' dtypes.
        b_v: ``[E]``.
        w_out: ``[E, E]``.
        b_out: ``[E]``.
        dtype: of the products, and of what is returned.

    Returns:
        ``values`` ``[R, E]``; ``filled`` ``[R]``, see :class:`MultiHeadOutputs`; and ``out``
        ``[R, E]``.
    """
    num_rows, num_heads, width = pooled.shape
    head_dim, embed_dim = w_v.shape[1], w_out.shape[0]
    values = pooled.new_empty(num_rows, embed_dim, dtype=dtype)
    filled = values.new_empty(0 if b_v is None else num_rows)
    out = values.new_empty(num_rows, embed_dim)
    strides = ((head_dim * width, 1, width), (head_dim, 1, embed_dim))
    constants = _from_heads_constants(embed_dim, *w_v.shape, *strides, dtype, pooled.device)
    inverses = None if b_v is None else stats.view(2, num_rows, num_heads)[1]
    _launch_from_heads(
        pooled, w_v, b_v, inverses, w_out, b_out, values, None if b_v is None else filled, out,
        constants,
    )  # fmt: skip
    return values, filled, out


def gradient_of_pooled(
    grad_out: Tensor,
    w_out: Tensor,
    w_v: Tensor,
    dtype: torch.dtype,
    grad_pooled: Tensor,
    listing: Listing | None,
) -> Tensor:
    """``grad_values`` ``[R, E]``; ``grad_pooled`` ``[R, H, D]`` is written: see :func:`project`.

    For ``listing`` see :func:`absorb_queries`.
    """
    num_rows, embed_dim = grad_out.shape
    grad_values = grad_out.new_empty(num_rows, embed_dim, dtype=dtype)
    strides = (w_v.shape[1], embed_dim, 1)
    constants = _to_heads_constants(embed_dim, *w_v.shape, strides, dtype, grad_out.device)
    _launch_to_heads(grad_out, w_out, None, w_v, grad_values, grad_pooled, listing, constants)
    return grad_values


def gradient_of_targets(
    grad_u: Tensor, w_k: Tensor, w_q: Tensor, dtype: torch.dtype, target_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """``grad_q`` ``[R, E]`` and, in ``target_dtype`` if it is asked for, ``grad_target``
    ``[R, C]``, see :func:`absorb_queries`.
    """
    num_rows = grad_u.shape[0]
    _, head_dim, width = w_k.shape
    embed_dim, num_inputs = w_q.shape
    grad_q = grad_u.new_empty(num_rows, embed_dim, dtype=dtype)
    grad_target = None
    if target_dtype is not None:
        grad_target = grad_u.new_empty(num_rows, num_inputs, dtype=target_dtype)
    strides = ((head_dim * width, 1, width), (head_dim * num_inputs, num_inputs, 1))
    constants = _from_heads_constants(num_inputs, *w_k.shape, *strides, dtype, grad_u.device)
    _launch_from_heads(grad_u, w_k, None, None, w_q, None, grad_q, None, grad_target, constants)
    return grad_q, grad_target


def _launch_to_heads(
    x: Tensor,
    first: Tensor,
    bias: Tensor | None,
    second: Tensor,
    inner: Tensor,
    out: Tensor,
    listing: Listing | None,
    constants: dict[str, Any],
) -> None:
    num_rows = x.shape[0]
    if num_rows:
        programs = -(-num_rows // constants["BLOCK_R"]) * constants["H"]
        slot_list, num_samples, num_slots, chunk = listing or _NO_LISTING
        if listing is not None:
            programs += -(-num_samples // SAMPLES_OF_LIST)
        arguments = (
            x.contiguous(), first, bias, second, inner, out, slot_list, num_rows, num_samples,
            num_slots,
        )  # fmt: skip
        _to_heads((programs,), arguments, constants | {"CHUNK": chunk})


def _launch_from_heads(
    x: Tensor,
    first: Tensor,
    first_bias: Tensor | None,
    inverses: Tensor | None,
    second: Tensor,
    second_bias: Tensor | None,
    inner: Tensor,
    filled: Tensor | None,
    out: Tensor | None,
    constants: dict[str, Any],
) -> None:
    num_rows = x.shape[0]
    if num_rows:
        blocks = 1 if out is None else -(-constants["E"] // constants["BLOCK_E"])
        _from_heads(
            (-(-num_rows // constants["BLOCK_R"]), blocks),
            (
                x.contiguous(), first, first_bias, inverses, second, second_bias, inner, filled,
                out, num_rows,
            ),
            constants,
        )  # fmt: skip


@functools.cache
def _to_heads_constants(
    num_inputs: int,
    num_heads: int,
    head_dim: int,
    width: int,
    first_strides: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Compile-time arguments of ``_to_heads_kernel``."""
    most = 128 if dtype.itemsize == 2 else 64
    return {
        "C": num_inputs,
        "H": num_heads,
        "X": head_dim,
        "D": width,
        "FIRST_STRIDES": first_strides,
        "SECOND_STRIDES": (head_dim * width, width, 1),
        "DTYPE": _DTYPES[dtype],
        "PRECISION": _EXACT,
        "BLOCK_R": BLOCK_R,
        "BLOCK_C": min(most, padded_width(num_inputs)),
        "BLOCK_X": padded_width(head_dim),
        "BLOCK_D": min(most, padded_width(width)),
        "BLOCK_B": SAMPLES_OF_LIST,
        "OVERLAP": devices.launches_overlap(device),
    }


@functools.cache
def _from_heads_constants(
    num_outputs: int,
    num_heads: int,
    head_dim: int,
    width: int,
    first_strides: tuple[int, int, int],
    second_strides: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Compile-time arguments of ``_from_heads_kernel``, and how it is launched."""
    most = 128 if dtype.itemsize == 2 else 64
    block_x, block_d = padded_width(head_dim), min(most, padded_width(width))
    block_e = min(most, padded_width(num_outputs))
    elements_of_head = padded_width(width) * (BLOCK_R + block_x) + block_e * block_x
    bytes_of_head = elements_of_head * dtype.itemsize
    budget = devices.shared_memory(device) * 2 // 3  # for operands of heads that are awaited
    return {
        "E": num_outputs,
        "H": num_heads,
        "X": head_dim,
        "D": width,
        "FIRST_STRIDES": first_strides,
        "SECOND_STRIDES": second_strides,
        "DTYPE": _DTYPES[dtype],
        "PRECISION": _EXACT,
        "BLOCK_R": BLOCK_R,
        "BLOCK_E": block_e,
        "BLOCK_X": block_x,
        "BLOCK_D": block_d,
        "NUM_STAGES": 1 + min(2, num_heads - 1, budget // bytes_of_head),
        **overlap_options(devices.launches_overlap(device)),
    }
