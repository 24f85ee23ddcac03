"""``PackedCodes``: codes of rows, packed into bytes."""

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
from torchrec_jagged_attn.codes import bytes_of_codes, codes_per_byte
from torchrec_jagged_attn.codes.api import pack_codes, unpack_codes

INT64_BYTES = 8
"""Bytes of an int64."""


@dataclass(frozen=True)
class PackedCodes:
    r"""Packs the codes of a row into bytes, as many per byte as fit: five of three levels.

    With :math:`h = (levels - 1) / 2`, codes :math:`c_l` are integers of :math:`-h` to :math:`h`,
    and a byte of :math:`k` codes is

    .. math:: \sum_{j < k} (c_{j} + h) \cdot levels^j, \qquad levels^k \le 256

    The last byte of a row may have fewer codes. Packed rows are the values of a ``JaggedTensor``,
    ``[N, num_bytes]`` uint8. In a ``KeyedJaggedTensor``, whose values are numbers, a row is an
    int64 for each eight bytes, see :meth:`to_int64`.

    Args:
        num_codes: ``L``, of a row.
        num_levels: an odd number of 3 to 255.

    Raises:
        TypeError: an argument is not an int.
        ValueError: an argument is out of range.

    Example:
        >>> layout = PackedCodes(num_codes=6)
        >>> layout.pack(torch.tensor([[-1, 0, 1, 1, -1, 1], [0, 0, 0, 0, 0, 0]]))
        tensor([[ 75,   2],
                [121,   1]], dtype=torch.uint8)
        >>> layout.unpack(torch.tensor([[75, 2]], dtype=torch.uint8))
        tensor([[-1,  0,  1,  1, -1,  1]], dtype=torch.int8)
    """

    num_codes: int
    num_levels: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_codes", check_int(self.num_codes, "num_codes", 1))
        object.__setattr__(self, "num_levels", check_num_levels(self.num_levels))

    @property
    def largest_code(self) -> int:
        """``h``: codes are ``-h`` to ``h``."""
        return self.num_levels // 2

    @property
    def codes_per_byte(self) -> int:
        """How many codes a byte holds."""
        return codes_per_byte(self.num_levels)

    @property
    def num_bytes(self) -> int:
        """Of a packed row."""
        return bytes_of_codes(self.num_codes, self.num_levels)

    @property
    def num_int64(self) -> int:
        """Of int64, that hold the bytes of a packed row."""
        return -(-self.num_bytes // INT64_BYTES)

    def pack(self, codes: Tensor) -> Tensor:
        """Integer codes ``[N, L]``, each in ``-h`` to ``h``, as bytes ``[N, num_bytes]`` uint8.

        Raises:
            TypeError: ``codes`` are no integers.
            ValueError: their shape does not fit; or (on CPU, or under
                ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) one is out of range.
        """
        self.check_codes(codes)
        return pack_codes(codes, self.num_levels)

    def unpack(self, packed: Tensor) -> Tensor:
        """Codes ``[N, L]`` int8 of bytes ``[N, num_bytes]`` uint8, as :meth:`pack` makes them.

        Raises:
            TypeError: ``packed`` is not uint8.
            ValueError: its shape does not fit; or (on CPU, or under
                ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) no codes have such a byte.
        """
        check_packed(packed, "packed", self.num_codes, self.num_levels)
        check_packed_values(packed, "packed", self.num_codes, self.num_levels)
        return unpack_codes(packed, self.num_codes, self.num_levels)

    def to_int64(self, packed: Tensor) -> Tensor:
        """Packed rows ``[N, num_bytes]`` as int64 ``[N, num_int64]``: zeros fill the last one.

        Raises:
            TypeError: ``packed`` is not uint8.
            ValueError: its shape does not fit.

        Example:
            >>> layout = PackedCodes(num_codes=6)
            >>> layout.to_int64(torch.tensor([[75, 2]], dtype=torch.uint8))
            tensor([[587]])
            >>> layout.from_int64(torch.tensor([[587]]))
            tensor([[75,  2]], dtype=torch.uint8)
        """
        check_packed(packed, "packed", self.num_codes, self.num_levels)
        filled = packed.new_zeros(packed.shape[0], self.num_int64 * INT64_BYTES)
        filled[:, : self.num_bytes] = packed
        return filled.view(torch.int64)

    def from_int64(self, values: Tensor) -> Tensor:
        """What :meth:`to_int64` was given: a view of ``values``, if their last stride is 1.

        Raises:
            TypeError: ``values`` are not int64.
            ValueError: their shape does not fit.
        """
        check_tensor(values, "values")
        if values.dtype != torch.int64:
            raise TypeError(f"values must be int64, got {values.dtype}")
        check_shape(values, "values", "[N, num_int64]", (None, self.num_int64))
        if values.stride(1) != 1:  # which contiguous() may leave, of one column
            values = values.clone(memory_format=torch.contiguous_format)
        return values.view(torch.uint8)[:, : self.num_bytes]

    def check_codes(self, codes: Tensor) -> None:
        """They must be ``[N, L]`` integers; values are read only where that would not wait."""
        check_tensor(codes, "codes")
        if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
            raise TypeError(f"codes must be integers, got {codes.dtype}")
        check_shape(codes, "codes", "[N, L]", (None, self.num_codes))
        if should_validate(codes) and codes.numel():
            low, high = (int(x) for x in codes.long().aminmax())
            most = self.largest_code
            if low < -most or high > most:
                raise ValueError(f"codes must be {-most} to {most}, got {low} to {high}")
