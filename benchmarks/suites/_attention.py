"""Peers of attention from ``T`` targets per sample to a jagged history, behind one interface.

Each maker takes the inputs and returns ``attend(q, k, v)``: ``q`` is ``[B, T, H, D]``, ``k`` and
``v`` are ``[N, H, D]`` rows of all samples, the result is ``[B, T, H, D]``, and the scale is
``1/√D``. What a training loop makes once per batch for all layers (int32 offsets, the longest
length on the host) is made outside the call; what it makes per layer is inside.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from suites import Inputs, UnavailableError
from torchrec_jagged_attn import JaggedLayout

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def padded_sdpa(x: Inputs, num_targets: int) -> Attend:
    """``F.scaled_dot_product_attention`` on padded keys and values; the padding is timed, too."""
    num_samples, length = x.case.batch_size, x.max_length

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layout = JaggedLayout(x.offsets, k.shape[0])
        samples = layout.sample_ids()
        place = torch.arange(k.shape[0], device=k.device) + samples * length - x.offsets[samples]

        def pad(rows: Tensor) -> Tensor:  # [N, H, D] -> [B, H, L, D]
            padded = rows.new_zeros(num_samples * length, *rows.shape[1:])
            padded.index_copy_(0, place, rows)
            return padded.unflatten(0, (num_samples, length)).transpose(1, 2)

        k_BHLD = pad(k)
        v_BHLD = k_BHLD if v is k else pad(v)
        mask = torch.arange(length, device=k.device) < layout.lengths.unsqueeze(1)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k_BHLD, v_BHLD, attn_mask=mask[:, None, None]
        )
        return out.transpose(1, 2)

    return attend


def _varlen(x: Inputs, num_targets: int) -> dict:
    """Arguments that every FlashAttention takes beside q, k and v: (names differ) in this order."""
    if x.offsets.device.type != "cuda":
        raise UnavailableError("needs CUDA")
    if x.case.dtype not in (torch.bfloat16, torch.float16):
        raise UnavailableError("bf16 and fp16 only")
    steps = torch.arange(x.case.batch_size + 1, dtype=torch.int32, device=x.offsets.device)
    return {
        "cu_seqlens_q": steps * num_targets,
        "cu_seqlens_k": x.offsets.int(),
        "max_seqlen_q": num_targets,
        "max_seqlen_k": x.max_length,
    }


def torch_varlen(x: Inputs, num_targets: int) -> Attend:
    """``torch.nn.attention.varlen.varlen_attn``: FlashAttention-2."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = _varlen(x, num_targets).values()
    return lambda q, k, v: varlen_attn(q.flatten(0, 1), k, v, *lengths).view_as(q)


def flash_attention_3(x: Inputs, num_targets: int) -> Attend:
    """FlashAttention-3, loaded from the library that ``FLASH_ATTENTION_3`` names."""
    lengths = _varlen(x, num_targets)
    _load_flash_attention_3()
    return lambda q, k, v: _FlashAttention3.apply(q.flatten(0, 1), k, v, lengths).view_as(q)


@functools.cache
def _load_flash_attention_3() -> None:
    path = Path(os.environ.get("FLASH_ATTENTION_3", ""))
    if not path.is_file():
        raise UnavailableError("FLASH_ATTENTION_3 names no library")
    cuda_runtime = path.parent / "libcudart.so.12"  # the one it was linked to, if it came with one
    if cuda_runtime.exists():
        ctypes.CDLL(str(cuda_runtime), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(path))


class _FlashAttention3(torch.autograd.Function):
    """The gradient that ``torch.ops.flash_attn_3`` does not register."""

    @staticmethod
    def forward(ctx, q, k, v, lengths):
        ctx.kwargs = {**lengths, "softmax_scale": q.shape[-1] ** -0.5}
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, **ctx.kwargs, num_splits=1)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in (q, k, v)]
        torch.ops.flash_attn_3.bwd(grad_out.contiguous(), q, k, v, out, lse, *grads, **ctx.kwargs)
        return *grads, None


def fbgemm_sll(x: Inputs, num_targets: int) -> Attend:
    """FBGEMM's ``sll_jagged_dense_flash_attention``, which has one head: a call per head.

    In its words the history is the query and the targets are dense keys ``[B, D, T]``.
    """
    if x.case.dtype != torch.float32:
        raise UnavailableError("its backward is fp32 only")
    import fbgemm_gpu.sll  # noqa: F401  (registers the op)

    bias = torch.zeros(x.case.batch_size, x.max_length, num_targets, device=x.offsets.device)
    allow_tf32 = torch.get_float32_matmul_precision() != "highest"

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * q.shape[-1] ** -0.5
        heads = [
            torch.ops.fbgemm.sll_jagged_dense_flash_attention(
                k[:, h], q[:, :, h].mT, v[:, h], bias, x.offsets, x.max_length, allow_tf32
            )
            for h in range(q.shape[2])
        ]
        return torch.stack(heads, 2)

    return attend


PEERS = {
    "padded-sdpa": padded_sdpa,
    "torch-varlen": torch_varlen,
    "flash-attention-3": flash_attention_3,
    "fbgemm-sll": fbgemm_sll,
}
