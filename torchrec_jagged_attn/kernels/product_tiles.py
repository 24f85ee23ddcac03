"""What kernels of products within a sample share: tiles, exact products of them, chunks of rows.

A sample's part of a tensor lies where its rows begin: ``[B, rows, cols]`` and ``[Σ rows, cols]`` at
``begin · cols``, with ``begin = sample · rows`` in the first. Pairs, ``[Σ rows · cols]``, have
offsets of their own.

Rows that are summed up are cut into chunks, so that a long sample is spread over the GPU. Sums of a
sample's chunks are added in their order, and where it is cut depends on itself alone.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from torchrec_jagged_attn.kernels.common import find_sample, padded_width
from torchrec_jagged_attn.kernels.launch import Launcher, launches_overlap
from torchrec_jagged_attn.kernels.target_schedule import count_chunks

__all__ = ["add_chunks", "find_chunk", "load_tile", "multiply", "tile_of"]


@triton.jit
def tile_of(
    i_begin,
    j_begin,
    num_i,
    num_j,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    INDEX: tl.constexpr,
):
    """A tile of ``[num_i, num_j]``, or of what is its transpose where that is TRANSPOSED.

    Returns where it begins, its elements from there in the integers that INDEX names, and which of
    them there are.
    """
    i = tl.arange(0, BLOCK_I)
    j = tl.arange(0, BLOCK_J)
    mask = (i < num_i - i_begin)[:, None] & (j < num_j - j_begin)[None, :]
    if TRANSPOSED:
        origin = tl.cast(j_begin, tl.int64) * num_i + i_begin
        at = i[:, None] + j.to(INDEX)[None, :] * num_i
    else:
        origin = tl.cast(i_begin, tl.int64) * num_j + j_begin
        at = i.to(INDEX)[:, None] * num_j + j[None, :]
    return origin, at, mask


@triton.jit
def load_tile(
    ptr,
    i_begin,
    j_begin,
    num_i,
    num_j,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    INDEX: tl.constexpr,
):
    """The elements of a :func:`tile_of`; 0 where there are none."""
    origin, at, mask = tile_of(i_begin, j_begin, num_i, num_j, BLOCK_I, BLOCK_J, TRANSPOSED, INDEX)
    return tl.load(ptr + origin + at, mask=mask, other=0.0)


@triton.jit
def _parts(x):
    """``x`` (fp32) as a sum of three bf16 that hold it whole: what it is cut to, what its rest is
    rounded to, and the rest of that.

    By integers: conversions to bf16 that are then taken apart are an eighth as fast. A NaN that has
    its payload in the lower half alone, which no arithmetic makes, is cut to an infinity.
    """
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    rest = x - high
    middle = ((rest.to(tl.int32, bitcast=True) + 32768) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a · b``, in fp32.

    Exact products begin at zero, so that their sums stay as exact as they are. ``"bf16x6"`` takes
    them of three bf16 parts: the small ones first, and where an infinity made NaN of them, without.
    """
    if a.dtype != tl.float32:
        acc = tl.dot(a, b, acc)
    elif PRECISION == "bf16x6":
        a_high, a_middle, a_low = _parts(a)
        b_high, b_middle, b_low = _parts(b)
        out = tl.dot(a_low, b_high)
        out = tl.dot(a_middle, b_middle, out)
        out = tl.dot(a_high, b_low, out)
        out = tl.dot(a_middle, b_high, out)
        out = tl.dot(a_high, b_middle, out)
        out = tl.where(out == out, out, 0.0)
        acc += tl.dot(a_high, b_high, out)
    elif PRECISION == "ieee":
        # Triton makes one sum of two without that number, which says nothing else of fp32.
        acc += tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=a.shape[1])
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def find_chunk(offsets_ptr, num_samples, work, CHUNK: tl.constexpr):
    """The chunk of a sample's rows that is the ``work`` of a program.

    The first ``num_samples`` take the first chunk of every sample, the others (``N // CHUNK``) the
    later chunks, each its slot's. See ``count_chunks`` for slots.

    Returns whether there is anything to do, the sample, begin and end of the chunk, and its slot,
    -1 where the chunk is the whole sample.
    """
    sample = work
    of_slot = work - num_samples
    if of_slot >= 0:
        sample = find_sample(offsets_ptr, num_samples, of_slot, 1, CHUNK, 0)
    begin = tl.load(offsets_ptr + sample).to(tl.int64)
    length = tl.load(offsets_ptr + sample + 1).to(tl.int64) - begin
    chunks = count_chunks(length, 1, CHUNK, CHUNK)
    first_slot = begin // CHUNK
    chunk = tl.where(of_slot >= 0, of_slot - first_slot, 0)
    busy = (chunk < chunks) & ((chunk > 0) | (of_slot < 0))
    slot = tl.where(chunks > 1, first_slot + chunk, -1)
    end = begin + length * (chunk + 1) // chunks
    return busy, sample, begin + length * chunk // chunks, end, slot


@triton.jit(do_not_specialize=["num_samples"])
def _add_chunks_kernel(
    sums_ptr,  # [slots, W] fp32
    out_ptr,  # [B, W]
    offsets_ptr,  # [B + 1]
    num_samples,
    W: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK sums of the sample, if there is one, whose first chunk has this program's slot.

    Where launches OVERLAP, all programs wait for the kernel that made the sums, also those without
    work: so the next kernel finds everything done.
    """
    slot = tl.program_id(0).to(tl.int64)
    sample = find_sample(offsets_ptr, num_samples, slot, 1, CHUNK, 0)
    begin = tl.load(offsets_ptr + sample).to(tl.int64)
    chunks = count_chunks(tl.load(offsets_ptr + sample + 1).to(tl.int64) - begin, 1, CHUNK, CHUNK)
    if OVERLAP:
        cuda.gdc_wait()
    if (chunks == 1) | (slot != begin // CHUNK):
        return
    w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for chunk in tl.range(slot, slot + chunks, num_stages=4):
        acc += tl.load(sums_ptr + chunk * W + w, mask=w < W, other=0.0)
    tl.store(out_ptr + sample * W + w, acc, mask=w < W)


_add_chunks = Launcher(_add_chunks_kernel)


def add_chunks(sums: Tensor, out: Tensor, offsets: Tensor, width: int, chunk: int) -> None:
    """Add ``[slots, …]`` sums of chunks into ``[B, …]``, of ``width`` elements each, for the
    samples that have several.
    """
    num_slots = sums.shape[0]
    if num_slots:
        _add_chunks(
            (num_slots, -(-width // 2048)),
            (sums, out, offsets, offsets.numel() - 1),
            _add_constants(width, chunk, launches_overlap(out.device)),
        )


@functools.cache
def _add_constants(width: int, chunk: int, overlap: bool) -> dict:
    """Compile-time arguments of ``_add_chunks_kernel``."""
    block = min(2048, padded_width(width))
    options = {"launch_pdl": True} if overlap else {}
    return {"W": width, "CHUNK": chunk, "BLOCK": block, "OVERLAP": overlap, **options}
