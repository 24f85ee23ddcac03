"""What the length of a history does to the row that is pooled of it: one op with one gradient.

Of ``n`` rows, with a power ``p`` and a bias ``c`` of each column ``e``, noise of deviation ``s``,
and odds ``o``:

    y_re   = x_re · n^p_e + c_e · log n + ε_re · s / √n
    out_re = y_re · keep_re · (1 + o / √n)

An empty history counts as one of one row, but has no noise. ``ε`` is uniform, of deviation one. An
element is kept, ``keep_re = 1``, with a probability of ``1 / (1 + o / √n)``, else it is zero: the
odds of being dropped fall with the root of the length. All draws of an element follow from a seed,
its row and its column. Those of what is dropped are made again in backward.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from torchrec_jagged_attn.arguments import LengthArguments, LengthGradients, LengthOutputs
from torchrec_jagged_attn.cpu import scale_by_length as cpu
from torchrec_jagged_attn.devices import has_kernels
from torchrec_jagged_attn.kernels.target import scale_by_length as kernels
from torchrec_jagged_attn.ops.registration import register_op

__all__ = ["call_scale_by_length", "scale_by_length"]


def _forward(args: LengthArguments) -> LengthOutputs:
    return LengthOutputs(_implementation(args.x).forward(args))


def _fake(args: LengthArguments) -> LengthOutputs:
    return LengthOutputs(args.x.new_empty(args.x.shape))


def _backward(
    grad_out: Tensor, args: LengthArguments, outputs: LengthOutputs, needs: LengthArguments
) -> LengthGradients:
    return _implementation(args.x).backward(grad_out, args, needs)


def _implementation(x: Tensor) -> ModuleType:
    """Kernels, where they compute in the dtype of ``x``: not in fp64."""
    return kernels if has_kernels(x.device, x.dtype) else cpu


scale_by_length, call_scale_by_length = register_op(
    "scale_by_length",
    arguments=LengthArguments,
    outputs=LengthOutputs,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    non_differentiable=("seed",),
    axes=dict.fromkeys(("x", "offsets", "query_offsets", "out"), 0),
    unsaved=LengthOutputs._fields,
)
