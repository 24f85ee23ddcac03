"""Kernels that pack the ids of a batch into messages to owner ranks, and unpack received ones.

``count_owners`` and ``pack_ids`` have one program for some samples of a route, whose ids are
contiguous. For each rank that stores rows of the table, it passes over the ids again, which remain
in the cache: ``count_owners`` counts the ids of the rank. From cumulative sums of these counts,
``pack_ids`` gets the positions of its ids in the message, and writes them in their order. So ids
need not be sorted. Ids of a table on one rank are not counted.

With N ids of 8 bytes and C numbers that are sent for each, they must read 16·N bytes (8·N of tables
on one rank) and write 8·(C + 1)·N, and ``unpack_ids`` must read and write 8·C·N.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.ops.launch import Launcher

if TYPE_CHECKING:
    from torchrec_jagged_attn.collection.sharding.id_router import BatchIds, IdRouter

COUNT_BLOCK, PACK_BLOCK, UNPACK_BLOCK = 256, 256, 1024
NUM_PROGRAMS, MAX_SAMPLES = 512, 64
"""Programs for the ids of one route, or more where each would have over 64 samples, the most that
``_find_sample`` supports."""
NUM_CHUNKS = 128
"""Programs that unpack the ids of one route and source rank."""


class Blocks(NamedTuple):
    """Where the ids of blocks are written. A block is a route to one owner rank."""

    in_block: Tensor  # [blocks, B] int64, number of ids of the block before each sample
    rows: Tensor  # [blocks] int64, see IdRouter.row_begins
    begins: Tensor  # [blocks] int64, where the ids begin in the message
    ends: Tensor  # [blocks] int64, where the space for ids ends; further ids are not written
    strides: Tensor  # [blocks] int64, from a number of an id to the next one


@triton.jit
def _is_in_shard(ids, shard, num_shards, rows_per_owner):
    """Return which ids are in a shard. The first and the last have all ids that are too small or
    too large, too.
    """
    first = tl.where(shard == 0, -0x8000000000000000, shard * rows_per_owner)
    last = tl.where(shard == num_shards - 1, 0x7FFFFFFFFFFFFFFF, (shard + 1) * rows_per_owner - 1)
    return (ids >= first) & (ids <= last)


@triton.jit
def _find_sample(begins_ptr, index, first, num_samples, NUM_SAMPLES: tl.constexpr):
    """Return which of ``NUM_SAMPLES`` samples, a power of two up to 64, contains each id."""
    sample = first + tl.zeros_like(index)
    for i in tl.static_range(6):
        if 2 << i <= NUM_SAMPLES:
            step = NUM_SAMPLES >> (i + 1)
            is_sample = sample + step < num_samples
            begin = tl.load(begins_ptr + sample + step, mask=is_sample, other=0)
            sample += tl.where(is_sample & (begin <= index), step, 0)
    return sample


@triton.jit(do_not_specialize=["num_samples"])
def _count_owners_kernel(
    batch,  # BatchIds
    routes,  # RouteTensors
    block_lengths_ptr,  # [blocks, B] int32
    num_samples,
    NUM_RANKS: tl.constexpr,
    NUM_SAMPLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the ids of some samples of one route in each shard."""
    route = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * NUM_SAMPLES
    begins_ptr = batch.begins + route * num_samples
    lengths_ptr = batch.lengths + route * num_samples
    blocks_ptr = routes.block_index + route * NUM_RANKS
    num_shards = tl.load(routes.num_owners + route)
    if num_shards == 1:
        samples = first + tl.arange(0, NUM_SAMPLES)
        lengths = tl.load(lengths_ptr + samples, mask=samples < num_samples).to(tl.int32)
        address = block_lengths_ptr + tl.load(blocks_ptr) * num_samples + samples
        tl.store(address, lengths, mask=samples < num_samples)
    else:
        id_mask = tl.load(routes.id_mask + route)
        rows_per_owner = tl.load(routes.rows_per_owner + route)
        i = tl.arange(0, BLOCK)
        for sample in range(first, tl.minimum(first + NUM_SAMPLES, num_samples)):
            length = tl.load(lengths_ptr + sample).to(tl.int32)
            ids_ptr = batch.ids + tl.load(begins_ptr + sample)
            for shard in range(num_shards):
                counts = tl.zeros([BLOCK], tl.int32)
                for start in range(0, length, BLOCK):
                    n = start + i
                    ids = tl.load(ids_ptr + n, mask=n < length, other=0) & id_mask
                    is_sent = _is_in_shard(ids, shard, num_shards, rows_per_owner) & (n < length)
                    counts += is_sent.to(tl.int32)
                address = block_lengths_ptr + tl.load(blocks_ptr + shard) * num_samples + sample
                tl.store(address, tl.sum(counts, 0))


@triton.jit(do_not_specialize=["num_values", "num_samples", "size"])
def _pack_ids_kernel(
    batch,  # BatchIds
    routes,  # RouteTensors
    blocks,  # Blocks
    message_ptr,
    order_ptr,  # [size]
    order_begins_ptr,  # [routes], from the index of an id in the batch to its index in `order`
    num_values,
    num_samples,
    size,
    HAS_POSITIONS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    NUM_SAMPLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the ids of some samples of one route, and the numbers that are sent with them."""
    route = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * NUM_SAMPLES
    last = tl.minimum(first + NUM_SAMPLES, num_samples) - 1
    begins_ptr = batch.begins + route * num_samples
    lengths_ptr = batch.lengths + route * num_samples
    begin = tl.load(begins_ptr + first)
    length = tl.load(begins_ptr + last) + tl.load(lengths_ptr + last) - begin
    id_mask = tl.load(routes.id_mask + route)
    rows_per_owner = tl.load(routes.rows_per_owner + route)
    order_begin = tl.load(order_begins_ptr + route) + begin
    num_shards = tl.load(routes.num_owners + route)
    i = tl.arange(0, BLOCK)
    for shard in range(num_shards):
        block = tl.load(routes.block_index + route * NUM_RANKS + shard)
        out = tl.load(blocks.begins + block)
        end = tl.load(blocks.ends + block)
        stride = tl.load(blocks.strides + block)
        row = tl.load(blocks.rows + block)
        num_sent = tl.load(blocks.in_block + block * num_samples + first)
        for start in range(0, length, BLOCK):
            n = start + i
            ids = tl.load(batch.ids + begin + n, mask=n < length, other=0) & id_mask
            is_sent = _is_in_shard(ids, shard, num_shards, rows_per_owner) & (n < length)
            at = num_sent + tl.cumsum(is_sent.to(tl.int32), 0) - 1
            num_sent += tl.sum(is_sent.to(tl.int32), 0)
            is_ordered = is_sent & (order_begin + n < size)
            tl.store(order_ptr + order_begin + n, row + at, mask=is_ordered)
            fits = is_sent & (out + at < end)
            address = message_ptr + out + at
            tl.store(address, ids - shard * rows_per_owner, mask=fits)
            sample = _find_sample(begins_ptr, begin + n, first, num_samples, NUM_SAMPLES)
            in_sample = begin + n - tl.load(begins_ptr + sample, mask=fits, other=0)
            if HAS_POSITIONS:
                address += stride
                sample_length = tl.load(lengths_ptr + sample, mask=fits, other=0)
                tl.store(address, in_sample - sample_length, mask=fits)
            if batch.time_begins is not None:
                address += stride
                has_ages = tl.load(routes.has_ages + route)
                segment = route * num_samples + sample
                time_index = tl.load(batch.time_begins + segment, mask=fits, other=0) + in_sample
                has_time = fits & has_ages & (time_index < num_values)
                times = tl.load(batch.ids + time_index, mask=has_time, other=0)
                reference = tl.load(batch.references + segment, mask=fits, other=0)
                ages = reference - times
                ages = tl.where(ages < 0, 0x7FFFFFFFFFFFFFFF, ages)
                ages = tl.where((times > reference) | (has_ages == 0), 0, ages)
                tl.store(address, ages, mask=fits)
            if batch.weights is not None:
                address += stride
                weights = tl.load(batch.weights + begin + n, mask=fits, other=0)
                tl.store(address, weights.to(tl.int64), mask=fits)


@triton.jit(do_not_specialize=["received_size", "size"])
def _unpack_ids_kernel(
    received_ptr,
    begins_ptr,  # [S], where the ids of a segment begin in the messages received
    strides_ptr,  # [S], from a number of an id to the next one
    ends_ptr,  # [S], where ids of a segment end in the output
    out_ptr,  # [NUM_COLUMNS, size]
    received_size,
    size,
    NUM_COLUMNS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy some of the ids of one segment."""
    segment = tl.program_id(0).to(tl.int64)
    first = tl.load(ends_ptr + segment - 1, mask=segment > 0, other=0)
    end = tl.minimum(tl.load(ends_ptr + segment), size)
    begin = tl.load(begins_ptr + segment)
    stride = tl.load(strides_ptr + segment)
    i = tl.arange(0, BLOCK)
    for start in range(first + tl.program_id(1) * BLOCK, end, NUM_CHUNKS * BLOCK):
        n = start + i
        for column in tl.static_range(NUM_COLUMNS):
            index = begin + (n - first) + column * stride
            mask = (n < end) & (index < received_size)
            x = tl.load(received_ptr + index, mask=mask, other=0)
            tl.store(out_ptr + column * size + n, x, mask=mask)


_count_owners = Launcher(_count_owners_kernel)
_pack_ids = Launcher(_pack_ids_kernel)
_unpack_ids = Launcher(_unpack_ids_kernel)


def _launch(
    kernel: Launcher, router: IdRouter, batch: BatchIds, *arguments: Any, **constants: Any
) -> None:
    """Launch a kernel whose programs have some samples of a route each."""
    num_routes, num_samples = batch.lengths.shape
    per_program = triton.next_power_of_2(triton.cdiv(num_samples, NUM_PROGRAMS))
    per_program = min(per_program, MAX_SAMPLES)
    constants |= {"NUM_RANKS": router.num_ranks, "NUM_SAMPLES": per_program}
    grid = triton.cdiv(num_samples, per_program), num_routes
    kernel(grid, (batch, router.tensors, *arguments), constants)


def count_owners(router: IdRouter, batch: BatchIds) -> Tensor:
    """Return the number of ids of each block and sample, ``[blocks, B]`` int32."""
    num_samples = batch.lengths.shape[1]
    shape = len(router.blocks), num_samples
    block_lengths = torch.empty(shape, dtype=torch.int32, device=router.device)
    constants = {"BLOCK": COUNT_BLOCK, "num_warps": 1}
    _launch(_count_owners, router, batch, block_lengths, num_samples, **constants)
    return block_lengths


def pack_ids(
    router: IdRouter, batch: BatchIds, blocks: Blocks, message: Tensor, size: int
) -> Tensor:
    """Write ids into ``message``, and return ``SortedIds.order``, ``[size]``.

    Args:
        router, batch: the routes, and the ids of a batch.
        blocks: where the ids are written.
        message: the message.
        size: number of ids, at most.
    """
    order = batch.ids.new_empty(size)
    counts = batch.lengths.sum(1)
    order_begins = (counts.cumsum(0) - counts)[:, None] - batch.begins[:, :1]
    tensors = blocks, message, order, order_begins
    numbers = batch.ids.numel(), batch.lengths.shape[1], size
    constants = {"HAS_POSITIONS": "positions" in router.columns, "BLOCK": PACK_BLOCK}
    _launch(_pack_ids, router, batch, *tensors, *numbers, **constants, num_warps=4)
    return order


def unpack_ids(
    received: Tensor, begins: Tensor, strides: Tensor, ends: Tensor, size: int, num_columns: int
) -> Tensor:
    """Return the numbers of received ids, ``[num_columns, size]``, segment by segment.

    Args:
        begins: where the ids of each segment begin in ``received``.
        strides: from a number of an id to the next number.
        ends: sums of the numbers of ids of segments.
    """
    out = received.new_empty(num_columns, size)
    if begins.numel() > 0 and size > 0:
        arguments = received, begins, strides, ends, out, received.numel(), size
        constants = {"NUM_COLUMNS": num_columns, "NUM_CHUNKS": NUM_CHUNKS, "BLOCK": UNPACK_BLOCK}
        grid = begins.numel(), NUM_CHUNKS
        _unpack_ids(grid, arguments, constants | {"num_warps": 4})
    return out
