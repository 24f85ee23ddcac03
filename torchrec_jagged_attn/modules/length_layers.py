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
    weight_1, weight_2 = layers.weight_1, layers.weight_2
    drops, noise = options.output_drops, options.output_noise
    if weight_1 is None or weight_2 is None:
        if layers.power is None and layers.bias is None and drops == 0 and noise == 0:
            return pooled
        return _scale(
            pooled, offsets, query_offsets, layers.power, layers.bias, None, seed, noise, drops
        )
    row = _scale(pooled, offsets, query_offsets, layers.power, layers.bias, None, seed, noise, 0)
    hidden = F.gelu(F.linear(row, weight_1, layers.bias_1))
    addend = F.linear(hidden, weight_2, layers.bias_2).to(row.dtype)  # autocast, if scripted
    return _scale(row, offsets, query_offsets, None, None, addend, seed, 0, drops)


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
    if drops == 0 and noise == 0:
        seed = None
    odds, deviation = drops / (2**32 - drops), noise / (2**32 * math.sqrt(x.shape[-1]))
    inputs = (x, offsets, query_offsets, power, bias, addend, seed, deviation, odds)
    if not is_scripting():
        return call_scale_by_length(*inputs)
    return _scale_by_length_op(*inputs)


# torch.jit.script takes the packet of an op, not its overloads.
_scale_by_length_op = scale_by_length.overloadpacket
