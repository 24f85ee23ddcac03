"""Peers of attention from the targets of a sample to its jagged history, with one interface.

Each factory takes the inputs and returns ``attend(q, k, v)``. ``q`` is ``[ΣT, H, D]`` rows of all
targets, ``k`` and ``v`` are ``[N, H, D]`` rows of all histories. The result is ``[ΣT, H, D]``, and
the scale is ``1/√D``. Work that a training loop does once per batch for all layers (int32 offsets,
the maximum length on the host) is done in the factory and not timed.
"""

import ctypes
import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from suites import Inputs, UnavailableError
from tests.cases import offsets_of
from torchrec_jagged_attn.ops import JaggedLayout

Attend = Callable[..., Tensor]


class Padding:
    """Pads jagged rows ``[N, …]`` to ``[B, L, …]``, and back; views if all lengths are ``L``.

    Attributes:
        real: ``[B, L]`` bool: whether a padded row is a row of a sample.
    """

    def __init__(self, offsets: Tensor, length: int) -> None:
        steps = torch.arange(length, device=offsets.device)
        self.real = steps < offsets.diff().unsqueeze(1)
        self.places = self.real.flatten().nonzero().squeeze(1)
        self.is_full = len(self.places) == self.real.numel()

    def pad(self, rows: Tensor) -> Tensor:
        if not self.is_full:
            padded = rows.new_zeros(self.real.numel(), *rows.shape[1:])
            rows = padded.index_copy_(0, self.places, rows)
        return rows.unflatten(0, self.real.shape)

    def unpad(self, padded: Tensor) -> Tensor:
        rows = padded.flatten(0, 1)
        return rows if self.is_full else rows.index_select(0, self.places)


def exact(x: Inputs) -> Attend:
    """Attention by its formula on padded tensors, for oracles, with a ``bias`` ``[N, H]``.

    Samples are computed in groups to limit memory.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        num_samples = x.offsets.numel() - 1
        elements = x.max_length * k.shape[1] * max(x.max_targets, k.shape[2])  # of a sample
        cuts = [*range(0, num_samples, max(1, 2**28 // elements)), num_samples]
        targets, rows = x.query_offsets[cuts].tolist(), x.offsets[cuts].tolist()
        outs = []
        for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
            queries, history = slice(*targets[i : i + 2]), slice(*rows[i : i + 2])
            padded = (
                Padding(x.query_offsets[begin : end + 1] - targets[i], x.max_targets),
                Padding(x.offsets[begin : end + 1] - rows[i], x.max_length),
            )
            qkv = q[queries], k[history], v[history]
            added = None if bias is None else bias[history]
            outs.append(checkpoint(_formula, *padded, *qkv, added, use_reentrant=False))
        return torch.cat(outs)

    return attend


def _formula(
    targets: Padding, histories: Padding, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> Tensor:
    """Attention of a group of samples; zero for empty histories."""
    k_BHDL = histories.pad(k).permute(0, 2, 3, 1)
    scores = targets.pad(q).transpose(1, 2) @ k_BHDL * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + histories.pad(bias).transpose(1, 2).unsqueeze(2)
    # Finite, so that an empty history has weights; its padded rows are zero.
    weights = scores.masked_fill(~histories.real[:, None, None], -1e30).softmax(3)
    return targets.unpad((weights @ histories.pad(v).transpose(1, 2)).transpose(1, 2))


def padded_sdpa(x: Inputs) -> Attend:
    """``F.scaled_dot_product_attention`` on padded tensors, including the time of padding."""
    targets = Padding(x.query_offsets, x.max_targets)
    histories = Padding(x.offsets, x.max_length)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_BHLD = histories.pad(k).transpose(1, 2)
        v_BHLD = k_BHLD if v is k else histories.pad(v).transpose(1, 2)
        q_BHTD = targets.pad(q).transpose(1, 2)
        mask = histories.real[:, None, None]
        out = F.scaled_dot_product_attention(q_BHTD, k_BHLD, v_BHLD, mask)
        return targets.unpad(out.transpose(1, 2))

    return attend


def expanded_sdpa(x: Inputs) -> Attend:
    """``F.scaled_dot_product_attention`` with a copy of the padded history for every target."""
    samples = JaggedLayout(x.query_offsets, int(x.query_offsets[-1])).sample_ids()
    histories = Padding(x.offsets, x.max_length)
    mask = histories.real[samples, None, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_RHLD = histories.pad(k)[samples].transpose(1, 2)
        v_RHLD = k_RHLD if v is k else histories.pad(v)[samples].transpose(1, 2)
        return F.scaled_dot_product_attention(q.unsqueeze(2), k_RHLD, v_RHLD, mask).squeeze(2)

    return attend


def expanded_flash_attention_3(x: Inputs) -> Attend:
    """FlashAttention-3 with a copy of the jagged history for every target."""
    num_targets = int(x.query_offsets[-1])
    samples = JaggedLayout(x.query_offsets, num_targets).sample_ids()
    lengths = x.offsets.diff()[samples]
    offsets = offsets_of(lengths, x.offsets.dtype, x.offsets.device)
    starts = (x.offsets[:-1][samples] - offsets[:-1]).repeat_interleave(lengths)
    places = starts + torch.arange(starts.numel(), device=starts.device)
    steps = torch.arange(num_targets + 1, device=offsets.device, dtype=offsets.dtype)
    attend = flash_attention_3(replace(x, offsets=offsets, query_offsets=steps, max_targets=1))
    return lambda q, k, v: attend(q, k.index_select(0, places), v.index_select(0, places))


def _varlen(x: Inputs) -> dict:
    """Return the arguments of FlashAttention after q, k and v, in the order of all versions."""
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
    """FlashAttention-2: ``torch.nn.attention.varlen.varlen_attn``."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = _varlen(x).values()
    return lambda q, k, v: varlen_attn(q, k, v, *lengths, scale=q.shape[-1] ** -0.5)


def flash_attention_3(x: Inputs) -> Attend:
    """FlashAttention-3, from the library in the environment variable ``FLASH_ATTENTION_3``."""
    lengths = _varlen(x)
    _load_flash_attention_3()
    return lambda q, k, v: _FlashAttention3.apply(
        q, k, v, {**lengths, "softmax_scale": q.shape[-1] ** -0.5}
    )


@functools.cache
def _load_flash_attention_3() -> None:
    path = Path(os.environ.get("FLASH_ATTENTION_3", ""))
    if not path.is_file():
        raise UnavailableError("FLASH_ATTENTION_3 names no library")
    cuda_runtime = path.parent / "libcudart.so.12"  # if the library is shipped with its runtime
    if cuda_runtime.exists():
        ctypes.CDLL(str(cuda_runtime), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(path))


class _FlashAttention3(torch.autograd.Function):
    """FlashAttention-3 with the gradient that ``torch.ops.flash_attn_3`` does not register."""

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
    """Return an attention that calls a single-head op per head, for equal numbers of targets.

    ``one_head(q, k, v)`` takes ``[B, T, D]``, ``[N, D]`` and ``[N, D]``.
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

    The op calls the history the query, and the targets dense keys ``[B, D, T]``.
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
