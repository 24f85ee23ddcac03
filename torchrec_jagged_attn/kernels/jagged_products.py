"""Matrix products within each sample, of which some of M, N and K are a sample's own length.

    out_b [M, N] = a_b [M, K] · b_b [K, N]                          2·M·N·K FLOPs

Where M is jagged, a program has a tile of rows, found from shapes alone as in ``find_tile``. Where
M and N are not, K is: rows are summed up, in chunks, so that a long sample is spread over the GPU.
Sums of a sample's chunks are added in their order, and where it is cut depends on itself alone.

A sample's part of a tensor lies where its rows begin: ``[B, rows, cols]`` and ``[Σ rows, cols]`` at
``begin · cols``, with ``begin = sample · rows`` in the first. Pairs, ``[Σ rows · cols]``, have
offsets of their own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.kernels.common import (
    dot_precision,
    find_sample,
    find_tile,
    padded_width,
)
from torchrec_jagged_attn.kernels.launch import Launcher
from torchrec_jagged_attn.kernels.target_schedule import count_chunks
from torchrec_jagged_attn.layout import JaggedLayout

__all__ = [
    "add_chunks",
    "array_jagged_bmm",
    "find_chunk",
    "jagged_dense_bmm",
    "jagged_jagged_bmm",
    "pair_bmm",
]


@triton.jit
def _extent(offsets_ptr, sample, SIZE: tl.constexpr):
    """Where a sample begins along an axis, and its size there: SIZE, where there are no offsets."""
    if offsets_ptr is None:
        begin = sample * SIZE
        size = SIZE
    else:
        begin = tl.load(offsets_ptr + sample).to(tl.int64)
        size = (tl.load(offsets_ptr + sample + 1).to(tl.int64) - begin).to(tl.int32)
    return begin, size


@triton.jit
def _load_tile(ptr, first, i, j, num_i, num_j, TRANSPOSED: tl.constexpr):
    """``[i, j]`` of the ``[num_i, num_j]`` at ``first``, or of ``[num_j, num_i]``, TRANSPOSED."""
    if TRANSPOSED:
        at = i[:, None] + j.to(tl.int64)[None, :] * num_i
    else:
        at = i.to(tl.int64)[:, None] * num_j + j[None, :]
    return tl.load(ptr + first + at, mask=(i < num_i)[:, None] & (j < num_j)[None, :], other=0.0)


@triton.jit
def _store_tile(ptr, value, first, i, j, num_i, num_j):
    """Store ``value`` where :func:`_load_tile` would load it."""
    at = i.to(tl.int64)[:, None] * num_j + j[None, :]
    tl.store(ptr + first + at, value, mask=(i < num_i)[:, None] & (j < num_j)[None, :])


@triton.jit
def _multiply(
    a_ptr,
    a_first,
    b_ptr,
    b_first,
    m,
    n,
    num_m,
    num_n,
    num_k,
    TRANS_A: tl.constexpr,
    TRANS_B: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """``[m, n]`` of a sample's product, in fp32."""
    acc = tl.zeros([m.shape[0], n.shape[0]], tl.float32)
    for start in tl.range(0, num_k, BLOCK_K, num_stages=NUM_STAGES):
        k = start + tl.arange(0, BLOCK_K)
        a = _load_tile(a_ptr, a_first, m, k, num_m, num_k, TRANS_A)
        b = _load_tile(b_ptr, b_first, k, n, num_k, num_n, TRANS_B)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["num_samples"])
def _rows_kernel(
    a_ptr,  # [ΣM, K], or pairs of M and K; TRANS_A: of K and M
    b_ptr,  # [B, K, N] or [ΣK, N]; TRANS_B: [B, N, K] or [ΣN, K]
    out_ptr,  # [ΣM, N], or pairs of M and N
    m_offsets_ptr,  # [B + 1]
    n_offsets_ptr,  # [B + 1], where N is jagged
    k_offsets_ptr,  # [B + 1], where K is jagged
    pair_offsets_ptr,  # [B + 1], where N or K is jagged
    num_samples,
    N: tl.constexpr,
    K: tl.constexpr,
    TRANS_A: tl.constexpr,
    TRANS_B: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One tile of M by every TILES_N-th of N, where M is jagged."""
    program = tl.program_id(0).to(tl.int64)
    sample, m_begin, m_end, start = find_tile(
        m_offsets_ptr, num_samples, program // TILES_N, 1, BLOCK_M
    )
    if start >= m_end - m_begin:
        return
    num_m = (m_end - m_begin).to(tl.int32)
    n_begin, num_n = _extent(n_offsets_ptr, sample, N)
    k_begin, num_k = _extent(k_offsets_ptr, sample, K)
    a_first = m_begin * num_k
    out_first = m_begin * num_n
    b_first = n_begin * num_k if TRANS_B else k_begin * num_n
    if k_offsets_ptr is not None:
        a_first = tl.load(pair_offsets_ptr + sample)
    if n_offsets_ptr is not None:
        out_first = tl.load(pair_offsets_ptr + sample)

    m = start.to(tl.int32) + tl.arange(0, BLOCK_M)
    n_tile = (program % TILES_N).to(tl.int32)
    for n_start in range(n_tile * BLOCK_N, num_n, TILES_N * BLOCK_N):
        n = n_start + tl.arange(0, BLOCK_N)
        out = _multiply(
            a_ptr, a_first, b_ptr, b_first, m, n, num_m, num_n, num_k,
            TRANS_A, TRANS_B, PRECISION, BLOCK_K, NUM_STAGES,
        )  # fmt: skip
        _store_tile(out_ptr, out, out_first, m, n, num_m, num_n)


@triton.jit
def find_chunk(offsets_ptr, num_samples, work, num_slots, CHUNK: tl.constexpr):
    """The chunk of a sample's rows that is the ``work`` of a program.

    The first ``num_slots`` (``N // CHUNK``) take later chunks, each its slot's, the others the
    first chunk of every sample. See ``count_chunks`` for slots.

    Returns whether there is anything to do, the sample, begin and end of the chunk, and its slot,
    -1 where the chunk is the whole sample.
    """
    sample = work - num_slots
    if work < num_slots:
        sample = find_sample(offsets_ptr, num_samples, work, 1, CHUNK, 0)
    begin = tl.load(offsets_ptr + sample).to(tl.int64)
    length = tl.load(offsets_ptr + sample + 1).to(tl.int64) - begin
    chunks = count_chunks(length, 1, CHUNK)
    first_slot = begin // CHUNK
    chunk = tl.where(work < num_slots, work - first_slot, 0)
    busy = (chunk < chunks) & ((chunk > 0) | (work >= num_slots))
    slot = tl.where(chunks > 1, first_slot + chunk, -1)
    end = begin + length * (chunk + 1) // chunks
    return busy, sample, begin + length * chunk // chunks, end, slot


@triton.jit(do_not_specialize=["num_samples", "num_slots"])
def _sums_kernel(
    a_ptr,  # [ΣK, M]
    b_ptr,  # [ΣK, N]
    out_ptr,  # [B, M, N]
    sums_ptr,  # [slots, M, N] fp32
    k_offsets_ptr,  # [B + 1]
    num_samples,
    num_slots,
    M: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One tile of M and N over one chunk of a sample's K, which alone is jagged."""
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M * TILES_N
    program = tl.program_id(0).to(tl.int64)
    busy, sample, begin, end, slot = find_chunk(
        k_offsets_ptr, num_samples, program // TILES, num_slots, CHUNK
    )
    if not busy:
        return
    tile = (program % TILES).to(tl.int32)
    m = tile // TILES_N * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile % TILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = _multiply(
        a_ptr, begin * M, b_ptr, begin * N, m, n, M, N, (end - begin).to(tl.int32),
        True, False, PRECISION, BLOCK_K, NUM_STAGES,
    )  # fmt: skip
    if slot >= 0:
        _store_tile(sums_ptr, acc, slot * (M * N), m, n, M, N)
    else:
        _store_tile(out_ptr, acc, sample * (M * N), m, n, M, N)


@triton.jit(do_not_specialize=["num_samples"])
def _add_chunks_kernel(
    sums_ptr,  # [slots, W] fp32
    out_ptr,  # [B, W]
    offsets_ptr,  # [B + 1]
    num_samples,
    W: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK sums of the sample, if there is one, whose first chunk has this program's slot."""
    slot = tl.program_id(0).to(tl.int64)
    sample = find_sample(offsets_ptr, num_samples, slot, 1, CHUNK, 0)
    begin = tl.load(offsets_ptr + sample).to(tl.int64)
    chunks = count_chunks(tl.load(offsets_ptr + sample + 1).to(tl.int64) - begin, 1, CHUNK)
    if (chunks == 1) | (slot != begin // CHUNK):
        return
    w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for chunk in tl.range(slot, slot + chunks, num_stages=4):
        acc += tl.load(sums_ptr + chunk * W + w, mask=w < W, other=0.0)
    tl.store(out_ptr + sample * W + w, acc, mask=w < W)


_rows = Launcher(_rows_kernel)
_sums = Launcher(_sums_kernel)
_add_chunks = Launcher(_add_chunks_kernel)


def jagged_dense_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """``[N, D] × [B, D, T] → [N, T]``; ``y`` is read where it is, also if it is transposed."""
    out = x.new_empty(x.shape[0], y.shape[2])
    transposed = not y.is_contiguous() and y.mT.is_contiguous()
    y = y.mT if transposed else y.contiguous()
    _launch_rows(x, y, out, offsets, width=out.shape[1], depth=x.shape[1], trans_b=transposed)
    return out


def pair_bmm(
    x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, pair_offsets: Tensor, total: int
) -> Tensor:
    """``[Nx, D], [Ny, D] → [total]``: every row of x times every row of y of its sample."""
    out = x.new_empty(total)
    _launch_rows(
        x, y, out, x_offsets, y_offsets, None, pair_offsets, depth=x.shape[1], trans_b=True
    )
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
    m_offsets, k_offsets = (y_offsets, x_offsets) if transposed else (x_offsets, y_offsets)
    _launch_rows(
        p, y, out, m_offsets, None, k_offsets, pair_offsets, width=y.shape[1], trans_a=transposed
    )
    return out


def _launch_rows(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    m_offsets: Tensor,
    n_offsets: Tensor | None = None,
    k_offsets: Tensor | None = None,
    pair_offsets: Tensor | None = None,
    *,
    width: int = 0,
    depth: int = 0,
    trans_a: bool = False,
    trans_b: bool = False,
) -> None:
    """Multiply into ``out``; ``width`` is N and ``depth`` K, where they are not jagged."""
    if out.numel() == 0:
        return
    tiles = _tiles(a.dtype, n=width, k=depth)
    tiles_n = 1 if n_offsets is not None else triton.cdiv(width, tiles["BLOCK_N"])
    num_rows = (a if n_offsets is not None else out).shape[0]
    num_tiles = JaggedLayout(m_offsets, num_rows).num_tiles(tiles["BLOCK_M"])
    offsets = [
        None if x is None else x.contiguous()
        for x in (m_offsets, n_offsets, k_offsets, pair_offsets)
    ]
    _rows(
        (num_tiles * tiles_n,),
        (a.contiguous(), b.contiguous(), out, *offsets, m_offsets.numel() - 1),
        {
            "N": width,
            "K": depth,
            "TRANS_A": trans_a,
            "TRANS_B": trans_b,
            "TILES_N": tiles_n,
            "num_warps": 4 if pair_offsets is None else 8,  # addresses of pairs take registers
        }
        | tiles,
    )


def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """``[N, D] × [N, T] → [B, D, T]``: the sum over each sample's rows of their outer products."""
    num_samples, (num_rows, m), n = offsets.numel() - 1, x.shape, y.shape[1]
    out = x.new_empty(num_samples, m, n)
    if out.numel() == 0:
        return out
    tiles = _tiles(x.dtype, m=m, n=n)
    # So long that sums of chunks take at most a quarter of the memory of 16-bit inputs.
    chunk = max(256, triton.next_power_of_2(8 * m * n // (m + n)))
    num_slots = num_rows // chunk
    sums = out.new_empty(num_slots, m, n, dtype=torch.float32)
    offsets = offsets.contiguous()
    num_tiles = triton.cdiv(m, tiles["BLOCK_M"]) * triton.cdiv(n, tiles["BLOCK_N"])
    _sums(
        ((num_slots + num_samples) * num_tiles,),
        (x.contiguous(), y.contiguous(), out, sums, offsets, num_samples, num_slots),
        {"M": m, "N": n, "CHUNK": chunk} | tiles,
    )
    add_chunks(sums, out, offsets, chunk)
    return out


def add_chunks(sums: Tensor, out: Tensor, offsets: Tensor, chunk: int) -> None:
    """Add ``[slots, …]`` sums of chunks into ``[B, …]``, for the samples that have several."""
    if sums.numel():
        width = sums[0].numel()
        _add_chunks(
            (sums.shape[0], triton.cdiv(width, 512)),
            (sums, out, offsets, offsets.numel() - 1),
            {"W": width, "CHUNK": chunk, "BLOCK": 512},
        )


def _tiles(dtype: torch.dtype, *, m: int = 0, n: int = 0, k: int = 0) -> dict:
    """How the work is cut up, with 0 for what is jagged; by nothing that a batch may change."""
    precision = dot_precision(dtype)
    # Exact fp32 products hold a tile's operands in registers.
    most_k = 16 if precision == "ieee" else 128 // dtype.itemsize
    return {
        "PRECISION": precision,
        "BLOCK_M": min(64, padded_width(m)) if m else 64,
        "BLOCK_N": min(64, padded_width(n)) if n else 64,
        "BLOCK_K": min(most_k, padded_width(k)) if k else most_k,
        "NUM_STAGES": 3,
    }
