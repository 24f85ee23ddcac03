"""Digits into bytes, and out of them: what ``SemanticIds`` calls."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_jagged_attn.cpu import digits as cpu
from torchrec_jagged_attn.devices import implementation_of
from torchrec_jagged_attn.digits import bytes_of_digits
from torchrec_jagged_attn.kernels.semantic_ids import packing as kernels
from torchrec_jagged_attn.ops.registration import register_op_without_grad

__all__ = ["pack_digits", "unpack_digits"]


def _pack(digits: Tensor, num_levels: int) -> Tensor:
    return implementation_of(digits, cpu, kernels).pack(digits, num_levels)


def _fake_pack(digits: Tensor, num_levels: int) -> Tensor:
    num_bytes = bytes_of_digits(digits.shape[1], num_levels)
    return digits.new_empty(digits.shape[0], num_bytes, dtype=torch.uint8)


def _unpack(packed: Tensor, num_digits: int, num_levels: int) -> Tensor:
    return implementation_of(packed, cpu, kernels).unpack(packed, num_digits, num_levels)


def _fake_unpack(packed: Tensor, num_digits: int, num_levels: int) -> Tensor:
    return packed.new_empty(packed.shape[0], num_digits, dtype=torch.int8)


pack_digits = register_op_without_grad("pack_digits", forward=_pack, fake=_fake_pack)
unpack_digits = register_op_without_grad("unpack_digits", forward=_unpack, fake=_fake_unpack)
