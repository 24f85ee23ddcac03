"""What ``JaggedTargetAttention`` does to a pooled row by the length of its history."""

# torch.jit.script reads annotations of records, so they are no strings here.
import math
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from torchrec_jagged_attn.modules.target_attention_arguments import Options
from torchrec_jagged_attn.ops.scale_by_length import call_scale_by_length, scale_by_length

__all__ = ["LengthLayers", "apply_length_layers"]


class LengthLayers(NamedTuple):
    """What is learned of lengths: a factor and a summand of each column, and two linear layers."""

    power: Tensor | None
    bias: Tensor | None
    weight_1: Tensor | None
    bias_1: Tensor | None
    weight_2: Tensor | None
    bias_2: Tensor | None


def apply_length_layers(
    pooled: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    layers: LengthLayers,
    seed: Tensor | None,
    options: Options,
) -> Tensor:
    """``pooled`` times powers and with biases of the length, and noise; then the feed-forward
    network of that row added; then elements dropped. See the op ``scale_by_length``.
    """
    row, noise = pooled, options.output_noise
    power, bias = layers.power, layers.bias
    addend: Tensor | None = None
    weight_1, weight_2 = layers.weight_1, layers.weight_2
    if weight_1 is not None and weight_2 is not None:
        row = _scale(row, offsets, query_offsets, power, bias, None, seed, noise, 0)
        hidden = F.gelu(F.linear(row, weight_1, layers.bias_1))
        addend = F.linear(hidden, weight_2, layers.bias_2).to(row.dtype)  # autocast, if scripted
        power, bias, noise = None, None, 0
    drops = options.output_drops
    return _scale(row, offsets, query_offsets, power, bias, addend, seed, noise, drops)


def _scale(
    x: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    power: Tensor | None,
    bias: Tensor | None,
    addend: Tensor | None,
    seed: Tensor | None,
    noise: int,
    drops: int,
) -> Tensor:
    """By the op, unless there is nothing to do."""
    if drops == 0 and noise == 0:
        seed = None
        if power is None and bias is None and addend is None:
            return x
    odds, deviation = drops / (2**32 - drops), noise / (2**32 * math.sqrt(x.shape[-1]))
    inputs = (x, offsets, query_offsets, power, bias, addend, seed, deviation, odds)
    if not is_scripting():
        return call_scale_by_length(*inputs)
    return _scale_by_length_op(*inputs)


# torch.jit.script takes the packet of an op, not its overloads.
_scale_by_length_op = scale_by_length.overloadpacket
