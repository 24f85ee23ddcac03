"""Rows of integer codes: their layout in bytes (``PackedCodes``), ops, kernels and decoding."""

from __future__ import annotations

MAX_LEVELS = 255


def codes_per_byte(num_levels: int) -> int:
    """Number of codes of ``num_levels`` in a byte: five of three levels."""
    count = 1
    while num_levels ** (count + 1) <= 256:
        count += 1
    return count


def bytes_of_codes(num_codes: int, num_levels: int) -> int:
    """Number of bytes of a packed row; the last byte may hold fewer codes."""
    return -(-num_codes // codes_per_byte(num_levels))
