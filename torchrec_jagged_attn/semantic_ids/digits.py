"""``SemanticIds``: digits of rows, packed into bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_jagged_attn.checks import check_shape, check_tensor, should_validate

__all__ = ["SemanticIds"]

BYTE = 256
MAX_LEVELS = 255


@dataclass(frozen=True)
class SemanticIds:
    r"""How the digits of a row lie in bytes: as many to a byte as fit, five of three levels.

    With :math:`h = (levels - 1) / 2`, digits :math:`c_l` are integers of :math:`-h` to :math:`h`,
    and a byte of :math:`k` digits is

    .. math:: \sum_{j < k} (c_{j} + h) \cdot levels^j, \qquad levels^k \le 256

    The last byte of a row may have fewer digits. A packed row is a row of ``uint8``, and travels as
    any other: as the values of a ``JaggedTensor``, with the offsets of the history.

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
        for name in ("num_digits", "num_levels"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
        if self.num_digits < 1:
            raise ValueError(f"num_digits must be at least 1, got {self.num_digits}")
        if not 3 <= self.num_levels <= MAX_LEVELS or self.num_levels % 2 == 0:
            raise ValueError(f"num_levels must be odd and 3 to {MAX_LEVELS}, got {self.num_levels}")

    @property
    def largest_digit(self) -> int:
        """``h``: digits are ``-h`` to ``h``."""
        return self.num_levels // 2

    @property
    def digits_per_byte(self) -> int:
        """How many digits a byte holds."""
        count = 1
        while self.num_levels ** (count + 1) <= BYTE:
            count += 1
        return count

    @property
    def num_bytes(self) -> int:
        """Of a packed row."""
        return -(-self.num_digits // self.digits_per_byte)

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
        raised = digits.int() + self.largest_digit
        filled = F.pad(raised, (0, self.num_bytes * self.digits_per_byte - self.num_digits))
        parts = filled.view(-1, self.num_bytes, self.digits_per_byte)
        return (parts * self._places(digits.device)).sum(2).to(torch.uint8)

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
        check_tensor(packed, "packed")
        if packed.dtype != torch.uint8:
            raise TypeError(f"packed must be uint8, got {packed.dtype}")
        check_shape(packed, "packed", "[N, num_bytes]", (None, self.num_bytes))
        most = self.num_levels**self.digits_per_byte - 1
        if should_validate(packed) and packed.numel() and packed.max() > most:
            raise ValueError(f"packed must be at most {most}, got {packed.max().item()}")
        parts = packed.int().unsqueeze(2) // self._places(packed.device) % self.num_levels
        digits = parts.flatten(1)[:, : self.num_digits] - self.largest_digit
        return digits.to(torch.int8)

    def check_digits(self, digits: Tensor) -> None:
        """They must be ``[N, L]`` integers; values are read only where that would not wait."""
        check_tensor(digits, "digits")
        if digits.is_floating_point() or digits.is_complex() or digits.dtype == torch.bool:
            raise TypeError(f"digits must be integers, got {digits.dtype}")
        check_shape(digits, "digits", "[N, L]", (None, self.num_digits))
        if should_validate(digits) and digits.numel():
            low, high = (int(x) for x in digits.aminmax())
            most = self.largest_digit
            if low < -most or high > most:
                raise ValueError(f"digits must be {-most} to {most}, got {low} to {high}")

    def _places(self, device: torch.device) -> Tensor:
        """What each digit of a byte counts, ``[digits_per_byte]``."""
        exponents = torch.arange(self.digits_per_byte, dtype=torch.int32, device=device)
        return self.num_levels**exponents
