"""Peers of multi-head self-attention over jagged rows, each as it likes its operands to lie.

A maker takes the inputs, whose leaves ``q``, ``k`` and ``v`` are ``[N, H, D]``, and returns the
call to time, to ``[N, H, D]``, or a ``Relaid`` one. The scale is ``1/√D``. What a training loop
makes once per batch for all layers is made outside the call: lengths on the host, masks, padding.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from suites import Inputs, Relaid, UnavailableError
from suites._attention import Attend, Padding, flash_attention_3, torch_varlen
from torchrec_jagged_attn import ops

Call = Callable[[], Tensor]
ROWS = ("q", "k", "v", "out")


def ours(x: Inputs) -> Call:
    """The op."""
    q, k, v = x.leaves.values()
    return lambda: ops.jagged_flash_attention(q, k, v, x.offsets)


def varlen(make: Callable[[Inputs], Attend], x: Inputs) -> Call:
    """A FlashAttention that takes jagged rows as they are."""
    attend = make(x)
    return lambda: attend(*x.leaves.values())


def _by_head(
    x: Inputs, call: Callable[[Tensor, Tensor, Tensor], Tensor], **factors: float
) -> Relaid:
    """Operands and result lie ``[H, N, D]``.

    ``factors`` are those that ``call`` wants of its operands, or lacks in its result (``out``).
    Gradients go the other way through the same ones.
    """

    def lay(name: str, values: Tensor) -> Tensor:
        return (values * factors.get(name, 1)).transpose(0, 1).contiguous()

    def restore(name: str, values: Tensor) -> Tensor:
        return values.transpose(0, 1) * factors.get(name, 1)

    return Relaid.of(x, call, lay, restore)


def need_cuda(x: Inputs) -> None:
    """Raise UnavailableError on a CPU."""
    if x.offsets.device.type != "cuda":
        raise UnavailableError("needs CUDA")


def fbgemm_sll_multi_head(x: Inputs) -> Relaid:
    """FBGEMM's ``sll_multi_head_jagged_flash_attention``.

    It has no scale, and its result is divided by ``L``: neither is put right in the timed call.
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


def _padded(x: Inputs, call: Callable[..., Tensor]) -> Relaid:
    """Operands are padded before, and results stay so: ``[B, H, L, D]``. Other leaves stay."""
    padding = Padding(x.offsets, x.max_length)

    def lay(name: str, rows: Tensor) -> Tensor:
        return padding.pad(rows).transpose(1, 2).contiguous() if name in ROWS else rows

    def restore(name: str, values: Tensor) -> Tensor:
        return padding.unpad(values.transpose(1, 2)) if name in ROWS else values

    return Relaid.of(x, call, lay, restore)


def dense(x: Inputs, bias: Callable[[Tensor], Tensor] | None = None) -> Relaid:
    """The textbook formula on padded operands: every product and the softmax by itself.

    ``bias`` makes what is added to the scores, ``[H, L, L]``, from the leaf behind the rows.
    """
    hidden = ~Padding(x.offsets, x.max_length).real[:, None, None]
    low = torch.finfo(x.case.dtype).min

    def call(q: Tensor, k: Tensor, v: Tensor, *table: Tensor) -> Tensor:
        scores = q @ k.mT * x.case.width**-0.5
        if bias is not None:
            scores = scores + bias(*table)
        return torch.softmax(scores.masked_fill(hidden, low), -1) @ v

    return _padded(x, call)


def dense_flash(x: Inputs) -> Relaid:
    """Flash attention on a batch as large as the padded one, and full: nothing is hidden.

    No dense flash attention of the samples takes less, since what hides the padding costs time.
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


def jagged_unfused(x: Inputs) -> Relaid:
    """The package's ops of the paper's Table 1, one after the other, a head at a time."""
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
