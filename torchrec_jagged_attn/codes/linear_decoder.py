"""``LinearDecoder``: rows as a mean plus a sum of directions, each times an integer code."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrec_jagged_attn.base.autocast import autocast_off
from torchrec_jagged_attn.base.checks import (
    check_bool,
    check_device,
    check_int,
    check_same,
    has_values,
    should_validate,
)
from torchrec_jagged_attn.codes.packed_codes import PackedCodes


class LinearDecoder(nn.Module):
    """Decodes codes as rows of the width ``embed_dim``; ``DiscretePCA`` describes its arguments."""

    mean: Tensor
    basis: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_codes: int,
        num_levels: int = 3,
        *,
        trainable: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = check_int(embed_dim, "embed_dim", 1)
        check_bool(trainable, "trainable")
        check_device(device)
        if dtype not in (None, torch.float32, torch.float64):
            raise TypeError(f"dtype must be float32 or float64, got {dtype}")
        self.packed_codes = PackedCodes(num_codes, num_levels)
        self._is_fitted = False
        for name, shape in (
            ("mean", [self.embed_dim]),
            ("basis", [self.packed_codes.num_codes, self.embed_dim]),
        ):
            value = torch.zeros(shape, device=device, dtype=dtype)
            if trainable:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    def check_fitted(self) -> None:
        """Raise ValueError if ``mean`` and ``basis`` still have their initial zeros."""
        if self._is_fitted or not has_values(self.mean):
            return
        if not self.mean.any() and not self.basis.any():
            name = type(self).__name__
            raise ValueError(
                f"{name} must be fitted, or load the state of a fitted {name}, before it is used, "
                "got a mean and a basis of zeros: call fit()"
            )
        self._is_fitted = True

    def decode(self, codes: Tensor) -> Tensor:
        """Decode integer codes ``[N, L]`` as rows ``[N, D]`` in the dtype of ``basis``."""
        self.packed_codes.check_codes(codes)
        check_same(self.mean, "mean", dtype=False, codes=codes)
        if should_validate(codes):
            self.check_fitted()
        with autocast_off(codes):
            return self.mean + codes.to(self.basis.dtype) @ self.basis

    def forward(self, packed: Tensor) -> Tensor:
        """Decode packed codes ``[N, num_bytes]`` as rows ``[N, D]``, see :meth:`decode`."""
        return self.decode(self.packed_codes.unpack(packed))

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_codes={self.packed_codes.num_codes}, "
            f"num_levels={self.packed_codes.num_levels}"
        )
