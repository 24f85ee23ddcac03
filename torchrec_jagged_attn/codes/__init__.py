"""How many codes a byte holds; ``PackedCodes`` says how they lie in it."""

from __future__ import annotations

MAX_LEVELS = 255


def codes_per_byte(num_levels: int) -> int:
    """How many codes of ``num_levels`` a byte holds: five of three levels."""
    count = 1
    while num_levels ** (count + 1) <= 256:
        count += 1
    return count


def bytes_of_codes(num_codes: int, num_levels: int) -> int:
    """How many bytes hold the codes of a row; the last may hold fewer than the others."""
    return -(-num_codes // codes_per_byte(num_levels))
