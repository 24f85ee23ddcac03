"""How many codes a byte holds; ``PackedCodes`` says how they lie in it."""

from __future__ import annotations

__all__ = ["MAX_LEVELS", "bytes_of_codes", "codes_per_byte"]

BYTE = 256
MAX_LEVELS = 255


def codes_per_byte(num_levels: int) -> int:
    """How many codes of ``num_levels`` a byte holds: five of three levels."""
    count = 1
    while num_levels ** (count + 1) <= BYTE:
        count += 1
    return count


def bytes_of_codes(num_codes: int, num_levels: int) -> int:
    """How many bytes hold the codes of a row; the last may hold fewer than the others."""
    return -(-num_codes // codes_per_byte(num_levels))
