"""``jagged_activation_unit`` beside the network on padded rows, as people write it.

Hidden layers of 80 and 40, sigmoids between them.
"""

import functools
import itertools
from collections.abc import Callable

import torch
import torch._functorch.config
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from suites import Cost, Inputs, Suite
from suites._attention import Padding
from torchrec_jagged_attn import jagged_activation_unit
from torchrec_jagged_attn.testing import Case, activation_unit, make_target_inputs

HIDDEN = (80, 40)
BF16 = torch.bfloat16
# Log-normal lengths have a mean of about an eighth of the longest.
CASES = {
    case.name: case
    for case in (
        Case("mean-200-64", 4096, 1600, 1, 64, 1, "log-normal", BF16, large=True),
        Case("mean-200-128", 4096, 1600, 1, 128, 1, "log-normal", BF16, large=True),
        Case("mean-50-64", 4096, 400, 1, 64, 1, "log-normal", BF16, large=True),
        Case("one-user-64", 1, 10000, 1, 64, 1, "giant", BF16, large=True),
        Case("cpu-unit-64", 64, 200, 1, 64, lengths="log-normal"),
    )
}


def make_inputs(case: Case, device: str) -> Inputs:
    """Query ``[B, D]``, history ``[N, D]`` and the layers, of the same dtype."""
    drawn = make_target_inputs(case, device, bias=False)
    offsets = drawn.pop("offsets")
    drawn["query"] = drawn["query"][:, 0, 0].contiguous()
    generator = torch.Generator().manual_seed(1)
    sizes = 4 * case.width, *HIDDEN, 1
    for at, (inner, outer) in enumerate(itertools.pairwise(sizes), 1):
        weight = torch.randn(outer, inner, generator=generator) * inner**-0.5
        drawn[f"weight_{at}"] = weight.to(device, case.dtype)
        drawn[f"bias_{at}"] = torch.randn(outer, generator=generator).to(device, case.dtype)
    leaves = {name: tensor.requires_grad_() for name, tensor in drawn.items()}
    return Inputs.even(case, leaves, offsets)


def in_parts(x: Inputs) -> Tensor:
    """The padded formula on 64 samples at a time: one long history does not pad them all.

    Features are made again in backward: all of them together would not fit.
    """
    leaves = dict(x.leaves)
    query, history = leaves.pop("query"), leaves.pop("history")
    num_samples = x.offsets.numel() - 1
    outs = []
    for begin in range(0, num_samples, 64):
        own = x.offsets[begin : begin + 65]
        rows = history[int(own[0]) : int(own[-1])]
        part = query[begin : begin + 64], rows, own - own[0]
        outs.append(checkpoint(activation_unit, *part, **leaves, use_reentrant=False))
    return torch.cat(outs)


def cost(x: Inputs) -> dict[str, Cost]:
    """Read the history once, and in backward again, and write its gradient."""
    num_rows, width = x.leaves["history"].shape
    flops = 2 * num_rows * HIDDEN[0] * (width + HIDDEN[1])
    size = x.case.dtype.itemsize
    num_samples = x.offsets.numel() - 1
    return {
        "forward": Cost(size * width * (num_rows + 2 * num_samples), flops),
        "backward": Cost(size * width * (2 * num_rows + 3 * num_samples), 3 * flops),
    }


def ours(x: Inputs) -> Callable[[], Tensor]:
    """The op."""
    return lambda: jagged_activation_unit(**x.leaves, offsets=x.offsets)


def padded_formula(x: Inputs, padding: Padding) -> Tensor:
    """All samples padded to the longest; padding is of zeros, which add nothing."""
    leaves = x.leaves
    u = padding.pad(leaves["history"])
    q = leaves["query"].unsqueeze(1).expand_as(u)
    y = torch.cat([q, u, q - u, q * u], -1)
    for at in (1, 2):
        y = torch.nn.functional.linear(y, leaves[f"weight_{at}"], leaves[f"bias_{at}"]).sigmoid()
    weights = torch.nn.functional.linear(y, leaves["weight_3"], leaves["bias_3"])
    return (weights * u).sum(1)


def padded(x: Inputs, compiled: bool = False) -> Callable[[], Tensor]:
    """On ``[B, L, 4 D]`` features; where rows lie is known before, as the longest length is."""
    padding = Padding(x.offsets, x.leaves["history"].shape[0], x.max_length)
    if compiled:
        torch.compiler.reset()  # a function is compiled for so many shapes only
        torch._functorch.config.donated_buffer = False  # backward runs several times
    call = torch.compile(padded_formula, dynamic=False) if compiled else padded_formula
    return lambda: call(x, padding)


SUITE = Suite(
    name="activation_unit",
    measures="jagged_activation_unit, hidden 80 and 40",
    cases=CASES,
    inputs=make_inputs,
    oracle=in_parts,
    cost=cost,
    providers={
        "ours-unit": ours,
        "padded": padded,
        "padded-compiled": functools.partial(padded, compiled=True),
    },
)
