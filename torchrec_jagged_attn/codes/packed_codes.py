"""``PackedCodes``: the layout of the integer codes of a row in bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_jagged_attn.base.checks import check_int, check_shape, should_validate
from torchrec_jagged_attn.codes import bytes_of_codes, codes_per_byte
from torchrec_jagged_attn.codes.api import pack_codes, unpack_codes
from torchrec_jagged_attn.codes.checks import check_num_levels, check_packed, check_packed_values

INT64_BYTES = 8
"""Bytes of an int64."""


@dataclass(frozen=True)
class PackedCodes:
    r"""Packs the codes of a row into bytes, as many per byte as fit: five of three levels.

    With :math:`h = (levels - 1) / 2`, a code :math:`c_l` is an integer from :math:`-h` to
    :math:`h`, and a byte of :math:`k` codes is

    .. math:: \sum_{j < k} (c_{j} + h) \cdot levels^j, \qquad levels^k \le 256

    The last byte of a row may hold fewer codes. Packed rows ``[N, num_bytes]`` uint8 can be the
    values of a ``JaggedTensor``. In a ``KeyedJaggedTensor``, a row has one int64 for every eight
    bytes, see :meth:`to_int64`.

    Methods raise TypeError for a wrong dtype, and ValueError for a wrong shape or (on CPU, or under
    ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) for codes or bytes out of range.

    Args:
        num_codes: number of codes per row, ``L``.
        num_levels: number of values of a code, an odd number from 3 to 255.

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
        """The largest code ``h``; the smallest is ``-h``."""
        return self.num_levels // 2

    @property
    def codes_per_byte(self) -> int:
        """Number of codes in a byte."""
        return codes_per_byte(self.num_levels)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of a packed row."""
        return bytes_of_codes(self.num_codes, self.num_levels)

    @property
    def num_int64(self) -> int:
        """Number of int64 values that hold a packed row."""
        return -(-self.num_bytes // INT64_BYTES)

    def pack(self, codes: Tensor) -> Tensor:
        """Pack integer codes ``[N, L]`` from ``-h`` to ``h`` into ``[N, num_bytes]`` uint8."""
        self.check_codes(codes)
        return pack_codes(codes, self.num_levels)

    def unpack(self, packed: Tensor) -> Tensor:
        """Unpack ``[N, num_bytes]`` uint8 from :meth:`pack` into codes ``[N, L]`` int8."""
        check_packed(packed, "packed", self.num_codes, self.num_levels)
        check_packed_values(packed, "packed", self.num_codes, self.num_levels)
        return unpack_codes(packed, self.num_codes, self.num_levels)

    def to_int64(self, packed: Tensor) -> Tensor:
        """Convert packed rows ``[N, num_bytes]`` to int64 ``[N, num_int64]``, padded with zeros.

        Example:
            >>> layout = PackedCodes(num_codes=6)
            >>> layout.to_int64(torch.tensor([[75, 2]], dtype=torch.uint8))
            tensor([[587]])
        """
        check_packed(packed, "packed", self.num_codes, self.num_levels)
        padded = packed.new_zeros(packed.shape[0], self.num_int64 * INT64_BYTES)
        padded[:, : self.num_bytes] = packed
        return padded.view(torch.int64)

    def check_codes(self, codes: Tensor) -> None:
        """Raise an error unless ``codes`` are integers ``[N, L]`` in range."""
        check_shape(codes, "codes", "[N, L]", (None, self.num_codes))
        if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
            raise TypeError(f"codes must be integers, got {codes.dtype}")
        if should_validate(codes) and codes.numel():
            low, high = (int(x) for x in codes.long().aminmax())
            limit = self.largest_code
            if low < -limit or high > limit:
                raise ValueError(f"codes must be {-limit} to {limit}, got {low} to {high}")
