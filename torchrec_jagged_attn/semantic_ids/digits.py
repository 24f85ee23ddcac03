"""``SemanticIds``: digits of rows, packed into bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_jagged_attn.checks import (
    check_int,
    check_num_levels,
    check_packed,
    check_packed_values,
    check_shape,
    check_tensor,
    should_validate,
)
from torchrec_jagged_attn.digits import bytes_of_digits, digits_per_byte
from torchrec_jagged_attn.ops.digits import pack_digits, unpack_digits

__all__ = ["SemanticIds"]

WORD = 8
"""Bytes of an int64."""


@dataclass(frozen=True)
class SemanticIds:
    r"""How the digits of a row lie in bytes: as many to a byte as fit, five of three levels.

    With :math:`h = (levels - 1) / 2`, digits :math:`c_l` are integers of :math:`-h` to :math:`h`,
    and a byte of :math:`k` digits is

    .. math:: \sum_{j < k} (c_{j} + h) \cdot levels^j, \qquad levels^k \le 256

    The last byte of a row may have fewer digits. A packed row is a row of ``uint8``, like
    any other: as the values of a ``JaggedTensor``, with the offsets of the history. In a
    ``KeyedJaggedTensor``, whose values are numbers, it is an int64 for each eight bytes.

    Args:
        num_digits: ``L``, of a row.
        num_levels: an odd number of 3 to 255.

    Raises:
        TypeError: an argument is no int.
        ValueError: an argument is out of range.

    Example:
        >>> ids = SemanticIds(num_digits=6)
        >>> ids.pack(torch.tensor([[-1, 0, 1, 1, -1, 1], [0, 0, 0, 0, 0, 0]]))
        tensor([[ 75,   2],
                [121,   1]], dtype=torch.uint8)
        >>> ids.unpack(torch.tensor([[75, 2]], dtype=torch.uint8))
        tensor([[-1,  0,  1,  1, -1,  1]], dtype=torch.int8)
    """

    num_digits: int
    num_levels: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_digits", check_int(self.num_digits, "num_digits", 1))
        object.__setattr__(self, "num_levels", check_num_levels(self.num_levels))

    @property
    def largest_digit(self) -> int:
        """``h``: digits are ``-h`` to ``h``."""
        return self.num_levels // 2

    @property
    def digits_per_byte(self) -> int:
        """How many digits a byte holds."""
        return digits_per_byte(self.num_levels)

    @property
    def num_bytes(self) -> int:
        """Of a packed row."""
        return bytes_of_digits(self.num_digits, self.num_levels)

    @property
    def num_words(self) -> int:
        """Of int64, that hold the bytes of a packed row."""
        return -(-self.num_bytes // WORD)

    def pack(self, digits: Tensor) -> Tensor:
        """Digits as bytes.

        Args:
            digits: ``[N, L]`` of an integer dtype, each in ``-h`` to ``h``.

        Returns:
            ``[N, num_bytes]`` uint8.

        Raises:
            TypeError: ``digits`` are no integers.
            ValueError: their shape does not fit; or (on CPU, or under
                ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) one is out of range.
        """
        self.check_digits(digits)
        return pack_digits(digits, self.num_levels)

    def unpack(self, packed: Tensor) -> Tensor:
        """What :meth:`pack` was given.

        Args:
            packed: ``[N, num_bytes]`` uint8.

        Returns:
            ``[N, L]`` int8.

        Raises:
            TypeError: ``packed`` is not uint8.
            ValueError: its shape does not fit; or (on CPU, or under
                ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) no digits have such a byte.
        """
        check_packed(packed, "packed", self.num_digits, self.num_levels)
        check_packed_values(packed, "packed", self.num_digits, self.num_levels)
        return unpack_digits(packed, self.num_digits, self.num_levels)

    def to_words(self, packed: Tensor) -> Tensor:
        """Packed rows ``[N, num_bytes]`` as int64 ``[N, num_words]``: zeros fill the last one.

        Raises:
            TypeError: ``packed`` is not uint8.
            ValueError: its shape does not fit.

        Example:
            >>> ids = SemanticIds(num_digits=6)
            >>> ids.to_words(torch.tensor([[75, 2]], dtype=torch.uint8))
            tensor([[587]])
            >>> ids.from_words(torch.tensor([[587]]))
            tensor([[75,  2]], dtype=torch.uint8)
        """
        check_packed(packed, "packed", self.num_digits, self.num_levels)
        filled = packed.new_zeros(packed.shape[0], self.num_words * WORD)
        filled[:, : self.num_bytes] = packed
        return filled.view(torch.int64)

    def from_words(self, words: Tensor) -> Tensor:
        """What :meth:`to_words` was given: a view of ``words``, if their last stride is 1.

        Raises:
            TypeError: ``words`` are not int64.
            ValueError: their shape does not fit.
        """
        check_tensor(words, "words")
        if words.dtype != torch.int64:
            raise TypeError(f"words must be int64, got {words.dtype}")
        check_shape(words, "words", "[N, num_words]", (None, self.num_words))
        if words.stride(1) != 1:  # which contiguous() may leave, of one column
            words = words.clone(memory_format=torch.contiguous_format)
        return words.view(torch.uint8)[:, : self.num_bytes]

    def check_digits(self, digits: Tensor) -> None:
        """They must be ``[N, L]`` integers; values are read only where that would not wait."""
        check_tensor(digits, "digits")
        if digits.is_floating_point() or digits.is_complex() or digits.dtype == torch.bool:
            raise TypeError(f"digits must be integers, got {digits.dtype}")
        check_shape(digits, "digits", "[N, L]", (None, self.num_digits))
        if should_validate(digits) and digits.numel():
            low, high = (int(x) for x in digits.long().aminmax())
            most = self.largest_digit
            if low < -most or high > most:
                raise ValueError(f"digits must be {-most} to {most}, got {low} to {high}")
