"""Peers of attention from the targets of a sample to its jagged history, behind one interface.

Each maker takes the inputs and returns ``attend(q, k, v)``. ``q`` is ``[ΣT, H, D]`` rows of all
targets, ``k`` and ``v`` are ``[N, H, D]`` rows of all histories. The result is ``[ΣT, H, D]``, and
the scale is ``1/√D``. ``padded_sdpa`` and ``torch_varlen`` also take a ``bias`` ``[N, H]``, which
is added to the scores of its row. What a training loop makes once per batch for all layers (int32
offsets, the longest length on the host) is made outside the call; what it makes per layer is
inside.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from suites import Inputs, UnavailableError
from tests.cases import offsets_of
from torchrec_jagged_attn.ops import JaggedLayout

Attend = Callable[..., Tensor]


class Padding:
    """From jagged rows ``[N, …]`` to a padded batch ``[B, L, …]`` and back: views if it is full."""

    def __init__(self, offsets: Tensor, num_rows: int, length: int) -> None:
        self.shape = (offsets.numel() - 1, length)
        self.place = None
        if num_rows != self.shape[0] * length:
            samples = JaggedLayout(offsets, num_rows).sample_ids()
            rows = torch.arange(num_rows, device=offsets.device)
            self.place = rows + samples * length - offsets[samples]

    def pad(self, rows: Tensor) -> Tensor:
        if self.place is not None:
            padded = rows.new_zeros(self.shape[0] * self.shape[1], *rows.shape[1:])
            rows = padded.index_copy_(0, self.place, rows)
        return rows.unflatten(0, self.shape)

    def unpad(self, padded: Tensor) -> Tensor:
        rows = padded.flatten(0, 1)
        return rows if self.place is None else rows.index_select(0, self.place)


def visible_rows(x: Inputs) -> Tensor:
    """``[B, 1, 1, L]``: which rows of padded histories are real."""
    places = torch.arange(x.max_length, device=x.offsets.device)
    return (places < x.offsets.diff().unsqueeze(1))[:, None, None]


def padded_sdpa(x: Inputs) -> Attend:
    """``F.scaled_dot_product_attention`` on padded tensors; the padding is timed, too."""

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        targets = Padding(x.query_offsets, q.shape[0], x.max_targets)
        histories = Padding(x.offsets, k.shape[0], x.max_length)
        k_BHLD = histories.pad(k).transpose(1, 2)
        v_BHLD = k_BHLD if v is k else histories.pad(v).transpose(1, 2)
        mask = visible_rows(x)
        if bias is not None:
            bias_BH1L = histories.pad(bias).transpose(1, 2).unsqueeze(2)
            mask = bias_BH1L.contiguous().masked_fill(~mask, -torch.inf)
        out = F.scaled_dot_product_attention(targets.pad(q).transpose(1, 2), k_BHLD, v_BHLD, mask)
        return targets.unpad(out.transpose(1, 2))

    return attend


def expanded_sdpa(x: Inputs, group: int = 1) -> Attend:
    """A padded history for every target of its sample, or for every ``group`` rows of ``q``."""
    num_groups = int(x.query_offsets[-1]) // group
    samples = JaggedLayout(x.query_offsets // group, num_groups).sample_ids()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        histories = Padding(x.offsets, k.shape[0], x.max_length)
        k_RHLD = histories.pad(k)[samples].transpose(1, 2)
        v_RHLD = k_RHLD if v is k else histories.pad(v)[samples].transpose(1, 2)
        q_RHGD = q.unflatten(0, (num_groups, group)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q_RHGD, k_RHLD, v_RHLD, visible_rows(x)[samples])
        return out.transpose(1, 2).flatten(0, 1)

    return attend


def expanded(make: Callable[[Inputs], Attend], x: Inputs, group: int = 1) -> Attend:
    """That of ``make``, with a copy of the jagged history for every ``group`` rows of ``q``."""
    num_groups = int(x.query_offsets[-1]) // group
    samples = JaggedLayout(x.query_offsets // group, num_groups).sample_ids()
    lengths = x.offsets.diff()[samples]
    offsets = offsets_of(lengths, x.offsets.dtype, x.offsets.device)
    starts = (x.offsets[:-1][samples] - offsets[:-1]).repeat_interleave(lengths)
    places = starts + torch.arange(starts.numel(), device=starts.device)
    steps = torch.arange(num_groups + 1, device=offsets.device, dtype=offsets.dtype)
    attend = make(replace(x, offsets=offsets, query_offsets=steps * group, max_targets=group))

    def attend_copies(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_copies = k.index_select(0, places)
        return attend(q, k_copies, k_copies if v is k else v.index_select(0, places))

    return attend_copies


def bias_as_column(attention: Callable[[Tensor, Tensor, Tensor, float], Tensor]) -> Attend:
    """Of an ``attention(q, k, v, scale)`` that takes no bias: a key column that each query reads.

    Its score, one times the bias, is exact. Widths stay multiples of 8.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        width = q.shape[-1]
        if bias is None:
            return attention(q, k, v, width**-0.5)
        q = F.pad(F.pad(q * width**-0.5, (0, 1), value=1.0), (0, 7))
        k = F.pad(torch.cat([k, bias.unsqueeze(-1)], -1), (0, 7))
        return attention(q, k, F.pad(v, (0, 8)), 1.0)[..., :width]

    return attend


def _varlen(x: Inputs) -> dict:
    """Arguments that every FlashAttention takes beside q, k and v: (names differ) in this order."""
    if x.offsets.device.type != "cuda":
        raise UnavailableError("needs CUDA")
    if x.case.dtype not in (torch.bfloat16, torch.float16):
        raise UnavailableError("bf16 and fp16 only")
    return {
        "cu_seqlens_q": x.query_offsets.int(),
        "cu_seqlens_k": x.offsets.int(),
        "max_seqlen_q": x.max_targets,
        "max_seqlen_k": x.max_length,
    }


def torch_varlen(x: Inputs) -> Attend:
    """``torch.nn.attention.varlen.varlen_attn``: FlashAttention-2."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = _varlen(x).values()
    return bias_as_column(lambda q, k, v, scale: varlen_attn(q, k, v, *lengths, scale=scale))


def flash_attention_3(x: Inputs) -> Attend:
    """FlashAttention-3, loaded from the library that ``FLASH_ATTENTION_3`` names."""
    lengths = _varlen(x)
    _load_flash_attention_3()
    return lambda q, k, v: _FlashAttention3.apply(
        q, k, v, {**lengths, "softmax_scale": q.shape[-1] ** -0.5}
    )


def expanded_flash_attention_3(x: Inputs, group: int = 1) -> Attend:
    """FlashAttention-3 on a copy of the history for every ``group`` rows of ``q``."""
    return expanded(flash_attention_3, x, group)


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
    def forward(ctx, q, k, v, kwargs):
        ctx.kwargs = kwargs
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, **kwargs, num_splits=1)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in (q, k, v)]
        torch.ops.flash_attn_3.bwd(grad_out.contiguous(), q, k, v, out, lse, *grads, **ctx.kwargs)
        return *grads, None


def _each_head(x: Inputs, one_head: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Attend:
    """By a call per head, for ops that have one and take as many targets from every sample.

    ``one_head(q, k, v)`` has ``[B, T, D]``, ``[N, D]`` and ``[N, D]``.
    """
    num_samples = x.offsets.numel() - 1
    if x.query_offsets[-1] != num_samples * x.max_targets:
        raise UnavailableError("takes as many targets from every sample")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q_BTHD = (q * q.shape[-1] ** -0.5).unflatten(0, (num_samples, x.max_targets))
        heads = [one_head(q_BTHD[:, :, h], k[:, h], v[:, h]) for h in range(q.shape[1])]
        return torch.stack(heads, 2).flatten(0, 1)

    return attend


def fbgemm_sll(x: Inputs) -> Attend:
    """FBGEMM's ``sll_jagged_dense_flash_attention``.

    In its words the history is the query and the targets are dense keys ``[B, D, T]``.
    """
    if x.case.dtype != torch.float32:
        raise UnavailableError("its backward is fp32 only")
    import fbgemm_gpu.sll  # noqa: F401  (registers the op)

    shape = (x.offsets.numel() - 1, x.max_length, x.max_targets)
    no_bias = torch.zeros(shape, device=x.offsets.device)
    allow_tf32 = torch.get_float32_matmul_precision() != "highest"

    def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.fbgemm.sll_jagged_dense_flash_attention(
            k, q.mT, v, no_bias, x.offsets, x.max_length, allow_tf32
        )

    return _each_head(x, one_head)


def fbgemm_chain(x: Inputs) -> Attend:
    """FBGEMM's ``jagged_dense_bmm``, ``jagged_softmax`` and ``jagged_jagged_bmm``, unfused."""
    import fbgemm_gpu  # noqa: F401  (registers the ops)

    ops = torch.ops.fbgemm

    def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores, _ = ops.jagged_dense_bmm(k, x.offsets, q.mT, x.max_length)  # [N, T]
        weights, _ = ops.jagged_softmax(scores, x.offsets, x.max_length)
        return ops.jagged_jagged_bmm(weights, v, x.offsets, x.max_length)

    return _each_head(x, one_head)


PEERS = {
    "padded-sdpa": padded_sdpa,
    "torch-varlen": torch_varlen,
    "flash-attention-3": flash_attention_3,
    "fbgemm-sll": fbgemm_sll,
    "fbgemm-chain": fbgemm_chain,
}
UNEVEN_PEERS = {
    "expanded-sdpa": expanded_sdpa,
    "expanded-flash-attention-3": expanded_flash_attention_3,
    "padded-sdpa": padded_sdpa,
    "torch-varlen": torch_varlen,
    "flash-attention-3": flash_attention_3,
}
