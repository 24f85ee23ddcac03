"""Peers of multi-head self-attention over jagged rows, each in its own layout.

A factory takes the inputs, whose leaves ``q``, ``k`` and ``v`` are ``[N, H, D]``, and returns the
call to time, with output ``[N, H, D]``, or a ``PreparedCall``. The scale is ``1/√D``. Work that a
training loop does once per batch for all layers is not timed: lengths on the host, masks, padding.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from suites import Inputs, PreparedCall, UnavailableError
from suites._attention import Attend, Padding, flash_attention_3, torch_varlen
from torchrec_jagged_attn import ops

Call = Callable[[], Tensor]
ROWS = ("q", "k", "v", "out")


def ours(x: Inputs) -> Call:
    """The op."""
    q, k, v = x.leaves.values()
    return lambda: ops.jagged_flash_attention(q, k, v, x.offsets)


def varlen(make: Callable[[Inputs], Attend], x: Inputs) -> Call:
    """A FlashAttention on jagged rows."""
    attend = make(x)
    return lambda: attend(*x.leaves.values())


def _by_head(
    x: Inputs, call: Callable[[Tensor, Tensor, Tensor], Tensor], **factors: float
) -> PreparedCall:
    """Return a call with operands and output ``[H, N, D]``.

    Operands, and the output ``out``, are multiplied by ``factors`` outside the timed call; their
    gradients are multiplied, too.
    """

    def prepare(name: str, values: Tensor) -> Tensor:
        return (values * factors.get(name, 1)).transpose(0, 1).contiguous()

    def restore(name: str, values: Tensor) -> Tensor:
        return values.transpose(0, 1) * factors.get(name, 1)

    return PreparedCall.from_inputs(x, call, prepare, restore)


def need_cuda(x: Inputs) -> None:
    """Raise UnavailableError on a CPU."""
    if x.offsets.device.type != "cuda":
        raise UnavailableError("needs CUDA")


def fbgemm_sll_multi_head(x: Inputs) -> PreparedCall:
    """FBGEMM's ``sll_multi_head_jagged_flash_attention``.

    The op has no scale and divides its output by ``L``; both are corrected outside the timed call.
    """
    need_cuda(x)
    import fbgemm_gpu.sll  # noqa: F401  (registers the op)

    op = torch.ops.fbgemm.sll_multi_head_jagged_flash_attention
    return _by_head(
        x,
        lambda q, k, v: op(q, k, v, x.offsets, x.max_length, True),
        q=x.case.width**-0.5,
        out=x.max_length,
    )


def _padded(x: Inputs, call: Callable[..., Tensor]) -> PreparedCall:
    """Return a call with padded ``q``, ``k``, ``v`` and output ``[B, H, L, D]``."""
    padding = Padding(x.offsets, x.max_length)

    def prepare(name: str, rows: Tensor) -> Tensor:
        return padding.pad(rows).transpose(1, 2).contiguous() if name in ROWS else rows

    def restore(name: str, values: Tensor) -> Tensor:
        return padding.unpad(values.transpose(1, 2)) if name in ROWS else values

    return PreparedCall.from_inputs(x, call, prepare, restore)


def dense(x: Inputs, bias: Callable[[Tensor], Tensor] | None = None) -> PreparedCall:
    """Unfused attention on padded operands.

    ``bias`` computes the bias of the scores ``[H, L, L]`` from the last leaf.
    """
    hidden = ~Padding(x.offsets, x.max_length).real[:, None, None]
    low = torch.finfo(x.case.dtype).min

    def call(q: Tensor, k: Tensor, v: Tensor, *table: Tensor) -> Tensor:
        scores = q @ k.mT * x.case.width**-0.5
        if bias is not None:
            scores = scores + bias(*table)
        return torch.softmax(scores.masked_fill(hidden, low), -1) @ v

    return _padded(x, call)


def dense_flash(x: Inputs) -> PreparedCall:
    """Flash attention on a full batch of the padded size, without a mask.

    This is a lower bound of the time of dense flash attention with a mask of the padding.
    """
    size, length = x.case.batch_size, x.max_length
    offsets = torch.arange(size + 1, device=x.offsets.device) * length
    generator = torch.Generator(offsets.device).manual_seed(0)
    shape = (size * length, x.case.num_heads, x.case.width)

    def draw() -> Tensor:
        values = torch.randn(shape, generator=generator, device=offsets.device)
        return values.to(x.case.dtype).requires_grad_()

    leaves = {name: draw() for name in x.leaves}
    full = Inputs(x.case, leaves, offsets, offsets, length, length)
    return replace(_padded(full, F.scaled_dot_product_attention), inputs=full)


def jagged_unfused(x: Inputs) -> PreparedCall:
    """Unfused attention by the package's ops of the paper's Table 1, head by head."""
    offsets = x.offsets
    scale = x.case.width**-0.5
    pairs = x.num_pairs()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for q_ND, k_ND, v_ND in zip(q * scale, k, v, strict=True):
            scores = ops.jagged_jagged_bmm_jagged_out(q_ND, k_ND, offsets, total=pairs)
            weights = ops.jagged2_softmax(scores, offsets)
            outs.append(ops.array_jagged_bmm_jagged_out(weights, v_ND, offsets))
        return torch.stack(outs)

    return _by_head(x, call)


PEERS = {
    "flash-attention-3": functools.partial(varlen, flash_attention_3),
    "torch-varlen": functools.partial(varlen, torch_varlen),
    "fbgemm-sll": fbgemm_sll_multi_head,
    "padded": dense,
}
