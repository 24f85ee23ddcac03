"""The projections of target attention on the side of targets: two kernels of two products each.

With ``R`` targets in all, their rows ``[R, C]``, and the weights of head ``h``, forward has

    q_h = target · W_Q,hᵀ + b_Q,h                  u_h = q_h · W_K,h
    values_h = pooled_h · W_V,hᵀ + b_V,h           out = Σ_h values_h · W_O,hᵀ + b_O

and backward the same two chains, of the other weights:

    ∂values_h = ∂out · W_O,h                       ∂pooled_h = ∂values_h · W_V,h
    ∂q_h = ∂u_h · W_K,hᵀ                           ∂target = Σ_h ∂q_h · W_Q,h

A chain takes 2·R·E·(C + D) FLOPs. The result of the first product is rounded, as if each product
were a kernel. Rows are read and written once, weights once for every BLOCK_R rows, from cache. A
batch has few targets, so that a chain is launch-bound. Operands are cast to the dtype of products
as they are read.

Without a value projection, ``D = E``, and ``W_V`` and ``W_O`` are the identity: ``out_h`` are the
columns of head ``h`` of ``pooled_h``. One kernel copies them; in backward, one copies ``∂out`` to
these columns of ``∂pooled``, which is zero elsewhere.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.knobs import runtime
from triton.language.extra import cuda

from torchrec_jagged_attn import devices
from torchrec_jagged_attn.runtime.kernels.jagged import clear_rows
from torchrec_jagged_attn.runtime.kernels.matmul import multiply, padded_width
from torchrec_jagged_attn.runtime.launch import Launcher, overlap_options
from torchrec_jagged_attn.target_attention.kernels.records import Listing, SplitList
from torchrec_jagged_attn.target_attention.kernels.schedule import SAMPLES_OF_LIST, list_splits

BLOCK_R = 16  # rows of a program: few, so that there are many programs
MAX_HEAD_DIM = 128  # the result of the first product is held in registers
BLOCK_ELEMENTS = 2048  # of a program that copies
CLEARING_PROGRAMS = 256  # at most
# fp32 products are exact, even if TF32 is allowed, since they are few. bf16x6 on tensor cores is
# accurate to a few units in the last place, as other sums of many terms are. Sums of up to so many
# terms use CUDA cores, which are slower and exact.
FEW_TERMS = 16
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Chain(NamedTuple):
    """Operands and results of the two products of all heads.

    ``x`` is ``[R, C]`` and ``out`` ``[R, H, D]``, or the other way round. :class:`Constants` has
    the strides of weights.
    """

    x: Any
    first: Any  # [H, C, X] or [H, D, X]
    first_bias: Any  # [H · X], or ``None``
    second: Any  # [H, X, D] or [H, X, C]
    second_bias: Any  # [C], or ``None``
    inner: Any  # [R, H, X], the result of the first product
    out: Any  # the result of the second product, or ``None`` if not requested


class Constants(NamedTuple):
    """Compile-time constants of the kernels."""

    C: int  # columns of rows of all heads
    H: int  # heads
    X: int  # columns of a head after the first product
    D: int  # columns of a head's rows
    FIRST_STRIDES: tuple[int, int, int]  # of weights: by head, row and column
    SECOND_STRIDES: tuple[int, int, int]
    DTYPE: Any  # of products
    PRECISION: str  # of products, see ``matmul.multiply``
    BLOCK_R: int  # rows of a program
    BLOCK_C: int
    BLOCK_X: int
    BLOCK_D: int
    NUM_STAGES: int  # heads whose operands are in flight
    OVERLAP: bool  # whether launches overlap


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


@triton.jit(do_not_specialize=["num_rows", "num_samples", "num_splits"])
def _to_heads_kernel(
    chain,  # Chain
    split_list,  # SplitList of the attention that comes next, built, too; of None without
    num_rows,
    num_samples,
    num_splits,
    C: tl.constexpr,  # Constants
    CHUNK: tl.constexpr,  # of the list of splits
    BLOCK_B: tl.constexpr,
):
    """``inner_h = x · first_h + bias_h`` and ``out_h = inner_h · second_h``, for one head.

    The first programs build the list of splits, if there is one.
    """
    if C.OVERLAP:
        cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if split_list.splits is not None:
        num_listing = tl.cdiv(num_samples, BLOCK_B)
        if program < num_listing:
            list_splits(split_list, program, num_samples, num_splits, CHUNK, BLOCK_B)
            return
        program -= num_listing
    h = program % C.H
    r = program // C.H * C.BLOCK_R + tl.arange(0, C.BLOCK_R)
    column = tl.arange(0, C.BLOCK_X)
    inner = tl.zeros([C.BLOCK_R, C.BLOCK_X], tl.float32)
    for begin in range(0, C.C, C.BLOCK_C):
        c = begin + tl.arange(0, C.BLOCK_C)
        x = _load_rows(chain.x, r, num_rows, c, C.C, C.C).to(C.DTYPE)
        weight = _load(chain.first, h, c, column, C.C, C.X, C.FIRST_STRIDES)
        inner = multiply(x, weight.to(C.DTYPE), inner, C.PRECISION)
    if chain.first_bias is not None:
        bias = tl.load(chain.first_bias + h * C.X + column, mask=column < C.X, other=0.0)
        inner += bias.to(C.DTYPE).to(tl.float32)[None, :]
    inner = inner.to(C.DTYPE)
    _store_rows(chain.inner + h * C.X, inner, r, num_rows, column, C.X, C.H * C.X)
    for begin in range(0, C.D, C.BLOCK_D):
        d = begin + tl.arange(0, C.BLOCK_D)
        weight = _load(chain.second, h, column, d, C.X, C.D, C.SECOND_STRIDES)
        out = tl.zeros([C.BLOCK_R, C.BLOCK_D], tl.float32)
        out = multiply(inner, weight.to(C.DTYPE), out, C.PRECISION).to(C.DTYPE)
        _store_rows(chain.out + h * C.D, out, r, num_rows, d, C.D, C.H * C.D)


@triton.jit(do_not_specialize=["num_rows", "num_samples"])
def _from_heads_kernel(
    chain,  # Chain; ``first_bias`` is added where an inverse is not 0
    inverses_ptr,  # [R, H], or None
    filled_ptr,  # [R] whether an inverse is not 0, out; or None
    query_offsets_ptr,  # [B + 1] of jagged targets, which ``second_bias`` is added to; or None
    num_rows,
    num_samples,
    C: tl.constexpr,  # Constants
):
    """``inner_h = x_h · first_h + bias_h`` and some columns of ``out = Σ_h inner_h · second_h``."""
    if C.OVERLAP:
        cuda.gdc_wait()
    r = tl.program_id(0) * C.BLOCK_R + tl.arange(0, C.BLOCK_R)
    c = tl.program_id(1) * C.BLOCK_C + tl.arange(0, C.BLOCK_C)
    column = tl.arange(0, C.BLOCK_X)
    if filled_ptr is not None:
        filled = tl.zeros([C.BLOCK_R], tl.float32)
        for h in range(C.H):
            at = inverses_ptr + r.to(tl.int64) * C.H + h
            filled = tl.where(tl.load(at, mask=r < num_rows, other=0.0) != 0, 1.0, filled)
        if tl.program_id(1) == 0:
            tl.store(filled_ptr + r, filled, mask=r < num_rows)
    out = tl.zeros([C.BLOCK_R, C.BLOCK_C], tl.float32)
    for h in tl.range(0, C.H, num_stages=C.NUM_STAGES):
        inner = tl.zeros([C.BLOCK_R, C.BLOCK_X], tl.float32)
        for begin in tl.static_range(0, C.D, C.BLOCK_D):  # unrolled: the outer loop is pipelined
            d = begin + tl.arange(0, C.BLOCK_D)
            x = _load_rows(chain.x + h * C.D, r, num_rows, d, C.D, C.H * C.D).to(C.DTYPE)
            weight = _load(chain.first, h, d, column, C.D, C.X, C.FIRST_STRIDES)
            inner = multiply(x, weight.to(C.DTYPE), inner, C.PRECISION)
        if chain.first_bias is not None:
            bias = tl.load(chain.first_bias + h * C.X + column, mask=column < C.X, other=0.0)
            inner = inner.to(C.DTYPE).to(tl.float32)
            inner += filled[:, None] * bias.to(C.DTYPE).to(tl.float32)[None, :]
        inner = inner.to(C.DTYPE)
        mask = (r < num_rows) & (tl.program_id(1) == 0)
        at = r.to(tl.int64)[:, None] * (C.H * C.X) + (h * C.X + column)[None, :]
        tl.store(chain.inner + at, inner, mask=mask[:, None] & (column < C.X)[None, :])
        if chain.out is not None:
            weight = _load(chain.second, h, column, c, C.X, C.C, C.SECOND_STRIDES)
            out = multiply(inner, weight.to(C.DTYPE), out, C.PRECISION)
    if chain.out is not None:
        if chain.second_bias is not None:
            bias = tl.load(chain.second_bias + c, mask=c < C.C, other=0.0)
            bias = bias.to(C.DTYPE).to(tl.float32)[None, :]
            if query_offsets_ptr is not None:
                in_sample = r < tl.load(query_offsets_ptr + num_samples)
                bias = tl.where(in_sample[:, None], bias, 0.0)
            out += bias
        _store_rows(chain.out, out.to(C.DTYPE), r, num_rows, c, C.C, C.C)


@triton.jit(do_not_specialize=["num_rows"])
def _own_columns_kernel(
    pooled_ptr,  # [R, H, H · X]
    out_ptr,  # [R, H · X]
    num_rows,
    H: tl.constexpr,
    X: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK_R rows of ``out``: of each head, its columns of ``pooled``."""
    if OVERLAP:
        cuda.gdc_wait()
    E: tl.constexpr = H * X
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    e = tl.arange(0, BLOCK_E)
    x = _load_rows(pooled_ptr, r, num_rows, e // X * E + e, H * E, H * E)
    _store_rows(out_ptr, x, r, num_rows, e, E, E)


@triton.jit(do_not_specialize=["num_rows", "num_samples", "num_splits"])
def _spread_columns_kernel(
    grad_out_ptr,  # [R, H · X]
    grad_pooled_ptr,  # [R, H, H · X]
    split_list,  # see _to_heads_kernel
    num_rows,
    num_samples,
    num_splits,
    H: tl.constexpr,
    X: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OVERLAP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """BLOCK_R rows of one head: its columns of ``grad_out``, and zeros elsewhere."""
    if OVERLAP:
        cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if split_list.splits is not None:
        num_listing = tl.cdiv(num_samples, BLOCK_B)
        if program < num_listing:
            list_splits(split_list, program, num_samples, num_splits, CHUNK, BLOCK_B)
            return
        program -= num_listing
    E: tl.constexpr = H * X
    h = program % H
    r = program // H * BLOCK_R + tl.arange(0, BLOCK_R)
    e = tl.arange(0, BLOCK_E)
    x = _load_rows(grad_out_ptr, r, num_rows, e, E, E)
    x = tl.where((e // X == h)[None, :], x, 0.0)
    _store_rows(grad_pooled_ptr + h * E, x, r, num_rows, e, E, H * E)


@triton.jit(do_not_specialize=["num_samples", "num_rows"])
def _clear_kernel(
    x_ptr,  # [R, D]
    offsets_ptr,  # [B + 1]
    num_samples,
    num_rows,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Set the rows behind the last offset to zero."""
    clear_rows(x_ptr, tl.load(offsets_ptr + num_samples), num_rows, D, D, BLOCK_D)


_NO_LISTING = Listing(SplitList(None, None), 0, 0, 0)
_to_heads = Launcher(_to_heads_kernel)
_from_heads = Launcher(_from_heads_kernel)
_own_columns = Launcher(_own_columns_kernel)
_spread_columns = Launcher(_spread_columns_kernel)
_clear = Launcher(_clear_kernel)


def absorb_queries(
    target: Tensor,
    w_q: Tensor,
    b_q: Tensor | None,
    w_k: Tensor,
    dtype: torch.dtype,
    u: Tensor,
    listing: Listing | None,
) -> Tensor:
    """Queries ``[R, H, E / H]`` of ``target`` ``[R, C]``, in ``dtype``; and writes ``u``
    ``[R, H, D]``, the absorbed queries ``q · W_K``.

    Weights are ``w_q`` ``[E, C]`` and ``w_k`` ``[H, E / H, D]``, here and below contiguous, and of
    any of the kernels' dtypes. The ``listing`` of the attention of ``u`` is built, too.
    """
    num_rows, num_inputs = target.shape
    num_heads, head_dim, _ = w_k.shape
    q = target.new_empty(num_rows, num_heads, head_dim, dtype=dtype)
    chain = Chain(target.contiguous(), w_q, b_q, w_k, None, q, u)
    strides = (head_dim * num_inputs, 1, num_inputs)
    constants = _constants(num_inputs, *w_k.shape, strides, True, dtype, target.device)
    _launch_to_heads(chain, listing, constants)
    return q


def project(
    pooled: Tensor,
    stats: Tensor,
    w_v: Tensor,
    b_v: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    dtype: torch.dtype,
    query_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Values ``[R, E]`` of the ``pooled`` rows ``[R, H, D]``; ``filled`` ``[R]``, see
    :class:`MultiHeadOutputs`; and the output ``[R, E]``: all in ``dtype``.

    Weights are ``w_v`` ``[H, E / H, D]`` and ``w_out`` ``[E, E]``. The second of the attention's
    ``stats`` ``[2, …]`` (fp32) is 0 for targets without visible rows. Outputs of rows behind the
    last of ``query_offsets``, those of jagged targets, are zeros.
    """
    num_rows, num_heads, _ = pooled.shape
    head_dim, embed_dim = w_v.shape[1], w_out.shape[0]
    values = pooled.new_empty(num_rows, embed_dim, dtype=dtype)
    filled = values.new_empty(0 if b_v is None else num_rows)
    out = values.new_empty(num_rows, embed_dim)
    chain = Chain(pooled.contiguous(), w_v, b_v, w_out, b_out, values, out)
    strides = (head_dim, embed_dim, 1)
    constants = _constants(embed_dim, *w_v.shape, strides, False, dtype, pooled.device)
    inverses = None if b_v is None else stats.view(2, num_rows, num_heads)[1]
    filled_or_none = None if b_v is None else filled
    _launch_from_heads(chain, inverses, filled_or_none, constants, query_offsets)
    return values, filled, out


def own_columns(pooled: Tensor, dtype: torch.dtype) -> Tensor:
    """The output ``[R, E]`` without a value projection: of each head, its columns of its row of
    ``pooled`` ``[R, H, E]``.
    """
    num_rows, num_heads, width = pooled.shape
    out = pooled.new_empty(num_rows, width, dtype=dtype)
    constants = _copy_constants(num_heads, width)
    if num_rows:
        overlap = overlap_options(devices.launches_overlap(pooled.device))
        programs = -(-num_rows // constants["BLOCK_R"])
        _own_columns((programs,), (pooled.contiguous(), out, num_rows), constants | overlap)
    return out


def clear_rows_behind(x: Tensor, offsets: Tensor) -> None:
    """Set the rows of ``x`` ``[R, E]`` behind the last offset to zero."""
    num_rows, width = x.shape
    if num_rows:
        _clear(
            (min(num_rows, CLEARING_PROGRAMS),),
            (x, offsets.contiguous(), offsets.shape[0] - 1, num_rows),
            {"D": width, "BLOCK_D": min(1024, padded_width(width))},
        )


def gradient_of_pooled(
    grad_out: Tensor,
    w_out: Tensor,
    w_v: Tensor,
    dtype: torch.dtype,
    grad_pooled: Tensor,
    listing: Listing | None,
) -> Tensor:
    """Return ``grad_values`` ``[R, E]`` and write ``grad_pooled`` ``[R, H, D]``: see
    :func:`project`, and :func:`absorb_queries` for ``listing``.
    """
    num_rows, embed_dim = grad_out.shape
    grad_values = grad_out.new_empty(num_rows, embed_dim, dtype=dtype)
    chain = Chain(grad_out.contiguous(), w_out, None, w_v, None, grad_values, grad_pooled)
    strides = (w_v.shape[1], embed_dim, 1)
    constants = _constants(embed_dim, *w_v.shape, strides, True, dtype, grad_out.device)
    _launch_to_heads(chain, listing, constants)
    return grad_values


def spread_columns(grad_out: Tensor, grad_pooled: Tensor, listing: Listing | None) -> None:
    """Write ``grad_pooled`` ``[R, H, E]``, from ``grad_out`` ``[R, E]``: see :func:`own_columns`,
    and :func:`absorb_queries` for ``listing``.
    """
    num_rows, num_heads, width = grad_pooled.shape
    if num_rows:
        constants = _copy_constants(num_heads, width)
        programs = -(-num_rows // constants["BLOCK_R"]) * num_heads
        split_list, num_samples, num_splits, chunk = listing or _NO_LISTING
        _spread_columns(
            (programs + -(-num_samples // SAMPLES_OF_LIST),),
            (grad_out.contiguous(), grad_pooled, split_list, num_rows, num_samples, num_splits),
            constants
            | {
                "OVERLAP": devices.launches_overlap(grad_out.device),
                "CHUNK": chunk,
                "BLOCK_B": SAMPLES_OF_LIST,
            },
        )


def gradient_of_targets(
    grad_u: Tensor, w_k: Tensor, w_q: Tensor, dtype: torch.dtype, target_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """``grad_q`` ``[R, E]``, and ``grad_target`` ``[R, C]`` in ``target_dtype`` unless that is
    None: see :func:`absorb_queries`.
    """
    num_rows, head_dim = grad_u.shape[0], w_k.shape[1]
    embed_dim, num_inputs = w_q.shape
    grad_q = grad_u.new_empty(num_rows, embed_dim, dtype=dtype)
    grad_target = None
    if target_dtype is not None:
        grad_target = grad_u.new_empty(num_rows, num_inputs, dtype=target_dtype)
    chain = Chain(grad_u.contiguous(), w_k, None, w_q, None, grad_q, grad_target)
    strides = (head_dim * num_inputs, 1, num_inputs)
    constants = _constants(num_inputs, *w_k.shape, strides, False, dtype, grad_u.device)
    _launch_from_heads(chain, None, None, constants)
    return grad_q, grad_target


def _launch_to_heads(chain: Chain, listing: Listing | None, constants: Constants) -> None:
    num_rows = chain.x.shape[0]
    if num_rows:
        programs = -(-num_rows // constants.BLOCK_R) * constants.H
        split_list, num_samples, num_splits, chunk = listing or _NO_LISTING
        _to_heads(
            (programs + -(-num_samples // SAMPLES_OF_LIST),),
            (chain, split_list, num_rows, num_samples, num_splits),
            {"C": constants, "CHUNK": chunk, "BLOCK_B": SAMPLES_OF_LIST},
        )


def _launch_from_heads(
    chain: Chain,
    inverses: Tensor | None,
    filled: Tensor | None,
    constants: Constants,
    query_offsets: Tensor | None = None,
) -> None:
    num_rows, num_samples = chain.x.shape[0], 0
    if num_rows:
        if query_offsets is not None:
            query_offsets, num_samples = query_offsets.contiguous(), query_offsets.shape[0] - 1
        blocks = 1 if chain.out is None else -(-constants.C // constants.BLOCK_C)
        options = {"launch_pdl": True} if constants.OVERLAP else {}
        _from_heads(
            (-(-num_rows // constants.BLOCK_R), blocks),
            (chain, inverses, filled, query_offsets, num_rows, num_samples),
            {"C": constants, **options},
        )


@functools.cache
def _copy_constants(num_heads: int, width: int) -> dict[str, Any]:
    """Constants of the kernels that copy columns."""
    block_e = padded_width(width)
    return {
        "H": num_heads,
        "X": width // num_heads,
        "BLOCK_R": max(1, BLOCK_ELEMENTS // block_e),
        "BLOCK_E": block_e,
    }


@functools.cache
def _constants(
    num_columns: int,
    num_heads: int,
    head_dim: int,
    width: int,
    strides: tuple[int, int, int],
    to_heads: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Constants:
    """Constants of ``_to_heads_kernel`` if ``to_heads``, else of ``_from_heads_kernel``.

    ``strides`` are those of the weights ``[H, C, X]``; the others, ``[H, X, D]``, are contiguous.
    """
    most = 128 if dtype.itemsize == 2 else 64
    block_x, block_c = padded_width(head_dim), min(most, padded_width(num_columns))
    elements_of_head = padded_width(width) * (BLOCK_R + block_x) + block_c * block_x
    bytes_of_head = elements_of_head * dtype.itemsize
    budget = devices.shared_memory(device) * 2 // 3  # for operands in flight
    by_head, by_c, by_x = strides
    of_head = head_dim * width
    few_terms = max(num_columns, head_dim, width) <= FEW_TERMS
    return Constants(
        C=num_columns,
        H=num_heads,
        X=head_dim,
        D=width,
        FIRST_STRIDES=strides if to_heads else (of_head, 1, width),
        SECOND_STRIDES=(of_head, width, 1) if to_heads else (by_head, by_x, by_c),
        DTYPE=_DTYPES[dtype],
        PRECISION="ieee" if few_terms or runtime.interpret else "bf16x6",
        BLOCK_R=BLOCK_R,
        BLOCK_C=block_c,
        BLOCK_X=block_x,
        BLOCK_D=min(most, padded_width(width)),
        NUM_STAGES=1 + min(2, num_heads - 1, budget // bytes_of_head),
        OVERLAP=devices.launches_overlap(device),
    )
