"""Kernels that pack the ids of a batch into messages to owner ranks, and unpack received ones.

``count_owners`` and ``pack_ids`` have one program for the ids of each route and sample. For each
rank that stores rows of the table, it passes over the ids again, which remain in the cache:
``count_owners`` counts the ids of the rank. From cumulative sums of these counts, ``pack_ids`` gets
the positions of its ids in the message, and writes them in their order. So ids need not be sorted.

With N ids of 8 bytes and C numbers that are sent for each, they must read 16·N bytes and write
8·(C + 1)·N, and ``unpack_ids`` must read and write 8·C·N.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.ops.launch import Launcher

if TYPE_CHECKING:
    from torchrec_jagged_attn.collection.sharding.id_router import BatchIds, IdRouter

BLOCK, UNPACK_BLOCK = 256, 1024
NUM_CHUNKS = 32
"""Programs that unpack the ids of one route and source rank."""


@triton.jit
def _load_ids(values_ptr, n, length, id_mask, rows_per_owner, NUM_RANKS: tl.constexpr):
    """Return ids ``n``, and which of the table's shards contains each, or -1 behind ``length``."""
    ids = tl.load(values_ptr + n, mask=n < length, other=0) & id_mask
    # A quotient of negative numbers would be rounded differently in the interpreter.
    shard = tl.where(ids < rows_per_owner, 0, ids // rows_per_owner)
    shard = tl.minimum(shard, NUM_RANKS - 1)
    return ids, tl.where(n < length, shard, -1)


@triton.jit(do_not_specialize=["num_samples"])
def _count_owners_kernel(
    values_ptr,  # [N]
    begins_ptr,  # [routes, B]
    lengths_ptr,  # [routes, B]
    id_mask_ptr,  # [routes]
    rows_per_owner_ptr,  # [routes]
    block_index_ptr,  # [routes, NUM_RANKS], -1 if there is no such shard
    block_lengths_ptr,  # [blocks, B] int32
    num_samples,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the ids of one route and sample in each shard."""
    segment = tl.program_id(0).to(tl.int64)
    route = segment // num_samples
    sample = segment % num_samples
    length = tl.load(lengths_ptr + segment).to(tl.int32)
    values_ptr += tl.load(begins_ptr + segment)
    id_mask = tl.load(id_mask_ptr + route)
    rows_per_owner = tl.load(rows_per_owner_ptr + route)
    i = tl.arange(0, BLOCK)
    for shard in range(NUM_RANKS):
        block = tl.load(block_index_ptr + route * NUM_RANKS + shard)
        if block >= 0:
            counts = tl.zeros([BLOCK], tl.int32)
            for start in range(0, length, BLOCK):
                _, shards = _load_ids(
                    values_ptr, start + i, length, id_mask, rows_per_owner, NUM_RANKS
                )
                counts += (shards == shard).to(tl.int32)
            tl.store(block_lengths_ptr + block * num_samples + sample, tl.sum(counts, 0))


@triton.jit(do_not_specialize=["num_values", "num_samples", "size"])
def _pack_ids_kernel(
    values_ptr,  # [N]
    weights_ptr,  # [N] int32, or None
    begins_ptr,  # [routes, B]
    lengths_ptr,  # [routes, B]
    time_begins_ptr,  # [routes, B], or None
    references_ptr,  # [routes, B], or None
    has_ages_ptr,  # [routes] bool
    id_mask_ptr,  # [routes]
    rows_per_owner_ptr,  # [routes]
    block_index_ptr,  # [routes, NUM_RANKS]
    route_begins_ptr,  # [routes, B], index of the first id in `order`
    row_begins_ptr,  # [blocks, B], see IdRouter.row_begins
    message_begins_ptr,  # [blocks, B], where ids are written in the message
    message_ends_ptr,  # [blocks], where the space for ids ends
    strides_ptr,  # [blocks], from a number of an id to the next one
    message_ptr,
    order_ptr,  # [size]
    num_values,
    num_samples,
    size,
    HAS_POSITIONS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the ids of one route and sample, and the numbers that are sent with them."""
    segment = tl.program_id(0).to(tl.int64)
    route = segment // num_samples
    sample = segment % num_samples
    length = tl.load(lengths_ptr + segment).to(tl.int32)
    begin = tl.load(begins_ptr + segment)
    id_mask = tl.load(id_mask_ptr + route)
    rows_per_owner = tl.load(rows_per_owner_ptr + route)
    route_begin = tl.load(route_begins_ptr + segment)
    i = tl.arange(0, BLOCK)
    for shard in range(NUM_RANKS):
        block = tl.load(block_index_ptr + route * NUM_RANKS + shard)
        if block >= 0:
            row = tl.load(row_begins_ptr + block * num_samples + sample)
            out = tl.load(message_begins_ptr + block * num_samples + sample)
            end = tl.load(message_ends_ptr + block)
            stride = tl.load(strides_ptr + block)
            for start in range(0, length, BLOCK):
                n = start + i
                ids, shards = _load_ids(
                    values_ptr + begin, n, length, id_mask, rows_per_owner, NUM_RANKS
                )
                is_sent = shards == shard
                at = tl.cumsum(is_sent.to(tl.int32), 0) - 1
                index = out + at
                fits = is_sent & (index < end)
                address = message_ptr + index
                tl.store(address, ids - shard * rows_per_owner, mask=fits)
                if HAS_POSITIONS:
                    address += stride
                    tl.store(address, (n - length).to(tl.int64), mask=fits)
                if time_begins_ptr is not None:
                    address += stride
                    time_index = tl.load(time_begins_ptr + segment) + n
                    has_ages = tl.load(has_ages_ptr + route)
                    has_time = fits & has_ages & (time_index < num_values)
                    times = tl.load(values_ptr + time_index, mask=has_time, other=0)
                    reference = tl.load(references_ptr + segment)
                    ages = reference - times
                    ages = tl.where(ages < 0, 0x7FFFFFFFFFFFFFFF, ages)
                    ages = tl.where((times > reference) | (has_ages == 0), 0, ages)
                    tl.store(address, ages, mask=fits)
                if weights_ptr is not None:
                    address += stride
                    weights = tl.load(weights_ptr + begin + n, mask=fits, other=0)
                    tl.store(address, weights.to(tl.int64), mask=fits)
                is_ordered = is_sent & (route_begin + n < size)
                tl.store(order_ptr + route_begin + n, row + at, mask=is_ordered)
                count = tl.sum(is_sent.to(tl.int32), 0)
                out += count
                row += count


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


def count_owners(router: IdRouter, batch: BatchIds) -> Tensor:
    """Return the number of ids of each block and sample, ``[blocks, B]`` int32."""
    num_samples = batch.lengths.shape[1]
    block_lengths = torch.empty(
        len(router.blocks), num_samples, dtype=torch.int32, device=router.device
    )
    arguments = (
        batch.values,
        batch.begins,
        batch.lengths,
        router.id_mask,
        router.rows_per_owner,
        router.block_index,
        block_lengths,
        num_samples,
    )
    constants = {"NUM_RANKS": router.num_ranks, "BLOCK": BLOCK, "num_warps": 1}
    _count_owners((batch.lengths.numel(),), arguments, constants)
    return block_lengths


def pack_ids(
    router: IdRouter,
    batch: BatchIds,
    block_lengths: Tensor,
    message_begins: Tensor,
    message_ends: Tensor,
    strides: Tensor,
    message: Tensor,
    size: int,
) -> Tensor:
    """Write ids into ``message``, and return ``SortedIds.order``, ``[size]``.

    Args:
        block_lengths: of :func:`count_owners`.
        message_begins: where the ids of each block and sample are written, ``[blocks, B]``.
        message_ends: where the space for the ids of each block ends, ``[blocks]``.
        strides: from a number that is sent for an id to the next number, ``[blocks]``.
        message: ids beyond ``message_ends`` are not written.
        size: number of ids, at most.
    """
    num_samples = batch.lengths.shape[1]
    order = batch.values.new_empty(size)
    ends = batch.lengths.flatten().cumsum(0, dtype=torch.int64)
    arguments = (
        batch.values,
        batch.weights,
        batch.begins,
        batch.lengths,
        batch.time_begins,
        batch.references,
        router.has_ages,
        router.id_mask,
        router.rows_per_owner,
        router.block_index,
        ends - batch.lengths.flatten(),
        router.row_begins(block_lengths),
        message_begins,
        message_ends,
        strides,
        message,
        order,
        batch.values.numel(),
        num_samples,
        size,
    )
    constants = {
        "HAS_POSITIONS": "positions" in router.columns,
        "NUM_RANKS": router.num_ranks,
        "BLOCK": BLOCK,
        "num_warps": 1,
    }
    _pack_ids((batch.lengths.numel(),), arguments, constants)
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
