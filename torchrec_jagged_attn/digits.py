"""How many digits a byte holds; ``SemanticIds`` says how they lie in it."""

from __future__ import annotations

__all__ = ["MAX_LEVELS", "bytes_of_digits", "digits_per_byte"]

BYTE = 256
MAX_LEVELS = 255


def digits_per_byte(num_levels: int) -> int:
    """How many digits of ``num_levels`` a byte holds: five of three levels."""
    count = 1
    while num_levels ** (count + 1) <= BYTE:
        count += 1
    return count


def bytes_of_digits(num_digits: int, num_levels: int) -> int:
    """How many bytes hold the digits of a row; the last may hold fewer than the others."""
    return -(-num_digits // digits_per_byte(num_levels))
