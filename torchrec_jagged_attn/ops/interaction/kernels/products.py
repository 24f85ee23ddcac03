"""Matrix products within each sample, where some of M, N and K are the length of the sample.

    out_b [M, N] = a_b [M, K] · b_b [K, N]                          2·M·N·K FLOPs

If M is jagged, a program computes a tile of rows, see ``find_tile``. If only K is jagged, long sums
are split into chunks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from torchrec_jagged_attn.base import devices
from torchrec_jagged_attn.ops.device.jagged import add_chunks, find_chunk, find_tile
from torchrec_jagged_attn.ops.device.matmul import (
    load_tile,
    multiply,
    padded_width,
    product_precision,
    tile_of,
)
from torchrec_jagged_attn.ops.launch import Launcher


class Constants(NamedTuple):
    """Compile-time constants of a kernel. M, N and K are 0 if they are jagged."""

    N: int
    K: int
    PRECISION: str  # of products, see ``matmul.product_precision``
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    TILES_N: int  # tiles of N; 1 if that is jagged
    M: int = 0
    TRANS_A: bool = False
    TRANS_B: bool = False
    NUM_STAGES: int = 3
    AHEAD: bool = False  # whether a's next tile is loaded before the product of the current one
    FLATTEN: bool = False  # whether the loops over N and K are flattened
    INDEX: tl.dtype = tl.int32  # dtype of offsets within a tile
    CHUNK: int = 0  # fewest rows of K of a chunk
    OVERLAP: bool = False  # whether launches overlap


class Offsets(NamedTuple):
    """``[B + 1]`` offsets of samples along each jagged axis, else ``None``."""

    m: Any
    n: Any = None
    k: Any = None
    pairs: Any = None  # of pairs of M and N, or of M and K, if both are jagged


@triton.jit
def _extent(offsets_ptr, sample, SIZE: tl.constexpr):
    """Return begin and size of a sample along an axis: SIZE if there are no offsets."""
    if offsets_ptr is None:
        begin = sample * SIZE
        size = SIZE
    else:
        begin = tl.load(offsets_ptr + sample).to(tl.int64)
        size = (tl.load(offsets_ptr + sample + 1).to(tl.int64) - begin).to(tl.int32)
    return begin, size


@triton.jit
def _multiply(a_ptr, b_ptr, m_begin, n_begin, num_m, num_n, num_k, C: tl.constexpr):
    """Return a tile of a sample's product, in fp32."""
    acc = tl.zeros([C.BLOCK_M, C.BLOCK_N], tl.float32)
    if C.AHEAD:
        ahead = load_tile(a_ptr, m_begin, 0, num_m, num_k, C.BLOCK_M, C.BLOCK_K, C.TRANS_A, C.INDEX)
    for k in tl.range(0, num_k, C.BLOCK_K, num_stages=C.NUM_STAGES):
        next_k = k + C.BLOCK_K if C.AHEAD else k
        a = load_tile(
            a_ptr, m_begin, next_k, num_m, num_k, C.BLOCK_M, C.BLOCK_K, C.TRANS_A, C.INDEX
        )
        if C.AHEAD:
            a, ahead = ahead, a
        b = load_tile(b_ptr, k, n_begin, num_k, num_n, C.BLOCK_K, C.BLOCK_N, C.TRANS_B, C.INDEX)
        acc = multiply(a, b, acc, C.PRECISION)
    return acc


@triton.jit(do_not_specialize=["num_samples"])
def _rows_kernel(
    a_ptr,  # [ΣM, K], or pairs of M and K; TRANS_A: of K and M
    b_ptr,  # [B, K, N] or [ΣK, N]; TRANS_B: [B, N, K] or [ΣN, K]
    out_ptr,  # [ΣM, N], or pairs of M and N
    offsets,  # Offsets
    num_samples,
    C: tl.constexpr,  # Constants
):
    """Compute one tile of the jagged axis M, and every TILES_N-th tile of N."""
    program = tl.program_id(0).to(tl.int64)
    sample, m_begin, m_end, start = find_tile(
        offsets.m, num_samples, program // C.TILES_N, 1, C.BLOCK_M
    )
    if start >= m_end - m_begin:
        return
    num_m = (m_end - m_begin).to(tl.int32)
    n_begin, num_n = _extent(offsets.n, sample, C.N)
    k_begin, num_k = _extent(offsets.k, sample, C.K)
    a_first = m_begin * num_k
    out_first = m_begin * num_n
    b_first = n_begin * num_k if C.TRANS_B else k_begin * num_n
    if offsets.k is not None:
        a_first = tl.load(offsets.pairs + sample)
    if offsets.n is not None:
        out_first = tl.load(offsets.pairs + sample)

    m_tile = start.to(tl.int32)
    n_tile = (program % C.TILES_N).to(tl.int32)
    for n_start in tl.range(n_tile * C.BLOCK_N, num_n, C.TILES_N * C.BLOCK_N, flatten=C.FLATTEN):
        out = _multiply(a_ptr + a_first, b_ptr + b_first, m_tile, n_start, num_m, num_n, num_k, C)
        origin, at, mask = tile_of(
            m_tile, n_start, num_m, num_n, C.BLOCK_M, C.BLOCK_N, False, C.INDEX
        )
        tl.store(out_ptr + out_first + origin + at, out, mask=mask)


@triton.jit(do_not_specialize=["num_samples"])
def _sums_kernel(
    a_ptr,  # [ΣK, M]
    b_ptr,  # [ΣK, N]
    out_ptr,  # [B, M, N]
    sums_ptr,  # [partials, M, N] fp32
    k_offsets_ptr,  # [B + 1]
    num_samples,
    C: tl.constexpr,  # Constants
):
    """Compute one tile of M and N over one chunk of a sample's K, the only jagged axis."""
    if C.OVERLAP:
        cuda.gdc_launch_dependents()
    TILES: tl.constexpr = (C.M + C.BLOCK_M - 1) // C.BLOCK_M * C.TILES_N
    program = tl.program_id(0).to(tl.int64)
    busy, sample, begin, end, partial = find_chunk(
        k_offsets_ptr, num_samples, program // TILES, C.CHUNK
    )
    if not busy:
        return
    tile = (program % TILES).to(tl.int32)
    m_begin = tile // C.TILES_N * C.BLOCK_M
    n_begin = tile % C.TILES_N * C.BLOCK_N
    num_k = (end - begin).to(tl.int32)
    acc = _multiply(a_ptr + begin * C.M, b_ptr + begin * C.N, m_begin, n_begin, C.M, C.N, num_k, C)
    origin, at, mask = tile_of(m_begin, n_begin, C.M, C.N, C.BLOCK_M, C.BLOCK_N)
    if partial >= 0:
        tl.store(sums_ptr + partial * (C.M * C.N) + origin + at, acc, mask=mask)
    else:
        tl.store(out_ptr + sample * (C.M * C.N) + origin + at, acc, mask=mask)


@triton.jit(do_not_specialize=["num_samples"])
def _pair_offsets_kernel(
    x_offsets_ptr,  # [B + 1]
    y_offsets_ptr,  # [B + 1]
    out_ptr,  # [B + 1] int64
    num_samples,
    BLOCK: tl.constexpr,
):
    """Compute prefix sums of the number of pairs of each sample, in one program."""
    tl.store(out_ptr, tl.zeros([], tl.int64))
    total = tl.zeros([], tl.int64)
    for start in range(0, num_samples, BLOCK):
        b = start + tl.arange(0, BLOCK)
        mask = b < num_samples
        x_begin = tl.load(x_offsets_ptr + b, mask=mask, other=0).to(tl.int64)
        x_end = tl.load(x_offsets_ptr + b + 1, mask=mask, other=0).to(tl.int64)
        y_begin = tl.load(y_offsets_ptr + b, mask=mask, other=0).to(tl.int64)
        y_end = tl.load(y_offsets_ptr + b + 1, mask=mask, other=0).to(tl.int64)
        pairs = (x_end - x_begin) * (y_end - y_begin)
        tl.store(out_ptr + b + 1, total + tl.cumsum(pairs, 0), mask=mask)
        total += tl.sum(pairs, 0)


_pair_offsets = Launcher(_pair_offsets_kernel)
_rows = Launcher(_rows_kernel)
_sums = Launcher(_sums_kernel)


def jagged_dense_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """``[N, D] × [B, D, T] → [N, T]``; a transposed ``y`` is not copied."""
    out = x.new_empty(x.shape[0], y.shape[2])
    transposed = not y.is_contiguous() and y.mT.is_contiguous()
    y = y.mT if transposed else y
    _launch_rows(x, y, out, Offsets(offsets), trans_b=transposed)
    return out


def pair_offsets(x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    """``[B + 1]`` int64 offsets of the pairs of each sample."""
    out = x_offsets.new_empty(x_offsets.shape, dtype=torch.int64)
    num_samples = out.numel() - 1
    _pair_offsets(
        (1,),
        (x_offsets.contiguous(), y_offsets.contiguous(), out, num_samples),
        {"BLOCK": min(4096, padded_width(num_samples)), "num_warps": 8},
    )
    return out


def pair_bmm(
    x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, pair_offsets: Tensor, total: int
) -> Tensor:
    """``[Nx, D], [Ny, D] → [total]``: products of all pairs of rows of each sample."""
    out = x.new_empty(total)
    _launch_rows(x, y, out, Offsets(x_offsets, n=y_offsets, pairs=pair_offsets), trans_b=True)
    return out


def array_jagged_bmm(
    p: Tensor,
    y: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor,
    pair_offsets: Tensor,
    num_rows: int,
    transposed: bool,
) -> Tensor:
    """``[Σ Lx·Ly], [Ny, D] → [Nx, D]``; if ``transposed``, ``[Nx, D] → [Ny, D]``."""
    out = y.new_empty(num_rows, y.shape[1])
    m, k = (y_offsets, x_offsets) if transposed else (x_offsets, y_offsets)
    _launch_rows(p, y, out, Offsets(m, k=k, pairs=pair_offsets), trans_a=transposed)
    return out


def _launch_rows(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    offsets: Offsets,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
) -> None:
    """Write ``a · b`` to ``out``. If ``a`` or ``out`` has pairs, it is one-dimensional."""
    if out.numel() == 0:
        return
    num_samples = offsets.m.numel() - 1
    num_rows = (a if out.dim() == 1 else out).shape[0]
    # No tile spans more than 64 rows of a sample.
    narrow = all(64 * n < 2**31 for n in (a.shape[0], b.shape[0], num_rows))
    constants = _rows_constants(
        a.dtype,
        product_precision(a.dtype),
        out.shape[1] if out.dim() == 2 else 0,
        a.shape[1] if a.dim() == 2 else 0,
        trans_a,
        trans_b,
        tl.int32 if narrow else tl.int64,
    )
    num_tiles = num_rows // constants["C"].BLOCK_M + num_samples
    _rows(
        (num_tiles * constants["C"].TILES_N,),
        (
            a.contiguous(),
            b.contiguous(),
            out,
            Offsets(*(None if x is None else x.contiguous() for x in offsets)),
            num_samples,
        ),
        constants,
    )


def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """``[N, D] × [N, T] → [B, D, T]``: the sum over each sample's rows of their outer products."""
    num_samples, (num_rows, m), n = offsets.numel() - 1, x.shape, y.shape[1]
    out = x.new_empty(num_samples, m, n)
    if out.numel() == 0:
        return out
    constants = _sums_constants(
        product_precision(x.dtype), m, n, devices.launches_overlap(x.device)
    )
    tiles = constants["C"]
    num_partials = num_rows // tiles.CHUNK
    sums = out.new_empty(num_partials, m, n, dtype=torch.float32)
    offsets = offsets.contiguous()
    num_tiles = -(-m // tiles.BLOCK_M) * tiles.TILES_N
    _sums(
        ((num_partials + num_samples) * num_tiles,),
        (x.contiguous(), y.contiguous(), out, sums, offsets, num_samples),
        constants,
    )
    add_chunks(sums, out, offsets, m * n, tiles.CHUNK)
    return out


@functools.cache
def _rows_constants(
    dtype: torch.dtype,
    precision: str,
    n: int,
    k: int,
    trans_a: bool,
    trans_b: bool,
    index: tl.dtype,
) -> dict[str, Any]:
    """Constants and launch options of ``_rows_kernel``; ``n`` or ``k`` is 0 if it is jagged.

    They must not depend on the batch.
    """
    size = dtype.itemsize
    tiles = {"BLOCK_M": 64, "BLOCK_N": min(128, padded_width(n)), "BLOCK_K": 128 // size}
    options = {"num_warps": 4}
    if n == 0:  # pairs are written: the next tile is loaded before the last is stored
        tiles |= {"BLOCK_N": 64, "FLATTEN": True}
        options["maxnreg"] = 168
    elif k == 0 and size == 2:  # pairs of two bytes are read, without asynchronous copies
        tiles |= {"BLOCK_K": 32, "AHEAD": True}
        options["maxnreg"] = 128
    elif k == 0:
        tiles["BLOCK_K"] = 32
        if precision == "tf32":  # four warps would use wgmma, which needs a transposed copy
            tiles["BLOCK_M"], options["num_warps"] = 32, 2
    elif k <= tiles["BLOCK_K"]:  # one step
        tiles |= {"BLOCK_M": 32, "BLOCK_K": padded_width(k), "NUM_STAGES": 1}
    elif n <= 8 and precision == "bf16x6":
        tiles |= {"BLOCK_M": 32, "BLOCK_N": 8}
        options["num_warps"] = 1
    elif tiles["BLOCK_N"] <= 32 and precision == "tf32":
        options["num_warps"] = 2
    constants = Constants(
        N=n,
        K=k,
        TRANS_A=trans_a,
        TRANS_B=trans_b,
        PRECISION=precision,
        TILES_N=-(-n // tiles["BLOCK_N"]) or 1,
        INDEX=index,
        **tiles,
    )
    return {"C": constants, **options}


@functools.cache
def _sums_constants(precision: str, m: int, n: int, overlap: bool) -> dict[str, Any]:
    """Constants and launch options of ``_sums_kernel``."""
    block_m, block_n = min(64, padded_width(m)), min(64, padded_width(n))
    num_warps = 2 if precision == "tf32" else 4
    if n <= 8 and precision == "bf16x6":  # fewer instructions than the decomposition takes
        precision, num_warps = "ieee", 2
        block_m, block_n = min(128, padded_width(m)), 8
    constants = Constants(
        M=m,
        N=n,
        K=0,
        TRANS_A=True,
        PRECISION=precision,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=32,
        TILES_N=-(-n // block_n),
        # Partial sums take at most a quarter of the memory of 16-bit inputs, and most samples have
        # a single chunk.
        CHUNK=max(1024, triton.next_power_of_2(8 * m * n // (m + n))),
        OVERLAP=overlap,
    )
    return {"C": constants, "num_warps": num_warps}
