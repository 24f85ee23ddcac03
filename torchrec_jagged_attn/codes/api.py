"""Codes into bytes, and out of them: what ``PackedCodes`` calls."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_jagged_attn.codes import bytes_of_codes, cpu
from torchrec_jagged_attn.codes.kernels import packing as kernels
from torchrec_jagged_attn.devices import implementation_of
from torchrec_jagged_attn.runtime.registration import register_op_without_grad


def _pack(codes: Tensor, num_levels: int) -> Tensor:
    return implementation_of(codes, cpu, kernels).pack(codes, num_levels)


def _fake_pack(codes: Tensor, num_levels: int) -> Tensor:
    num_bytes = bytes_of_codes(codes.shape[1], num_levels)
    return codes.new_empty(codes.shape[0], num_bytes, dtype=torch.uint8)


def _unpack(packed: Tensor, num_codes: int, num_levels: int) -> Tensor:
    return implementation_of(packed, cpu, kernels).unpack(packed, num_codes, num_levels)


def _fake_unpack(packed: Tensor, num_codes: int, num_levels: int) -> Tensor:
    return packed.new_empty(packed.shape[0], num_codes, dtype=torch.int8)


pack_codes = register_op_without_grad("pack_codes", forward=_pack, fake=_fake_pack)
unpack_codes = register_op_without_grad("unpack_codes", forward=_unpack, fake=_fake_unpack)
