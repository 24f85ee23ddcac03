"""``jagged_target_attention_weights``: weights of rows, to be looked at. Forward alone."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from suites import Cost, Inputs, Suite
from suites import target_attention_kernel as base
from suites._attention import Padding, visible_rows
from suites._cases import TRAINING_CASES
from torchrec_jagged_attn import jagged_target_attention_weights
from torchrec_jagged_attn.testing import target_attention_weights

NAMES = ("rank-1k", "rank-2k", "rank-200", "rank-2k-8-targets", "cpu-skewed")


def formula(x: Inputs, weights: Callable[..., Tensor]) -> Tensor:
    """A test formula of the package, or the op itself."""
    return weights(x.leaves["query"], x.leaves["history"], x.offsets)


def cost(x: Inputs) -> dict[str, Cost]:
    """Read queries and rows once, and write a weight of each pair."""
    history, query = x.leaves["history"], x.leaves["query"]
    num_weights = x.num_pairs() * x.case.num_heads
    num_bytes = x.case.dtype.itemsize * (history.numel() + query.numel() + num_weights)
    costs = base.cost(x)
    return costs | {"forward": Cost(num_bytes, 2 * num_weights * x.case.width)}


def ours(x: Inputs) -> Callable[[], Tensor]:
    """The op."""
    return lambda: formula(x, jagged_target_attention_weights)


def padded(x: Inputs) -> Callable[[], Tensor]:
    """``[B, T, H, L]`` weights of padded histories; those of real rows are taken out."""
    query = x.leaves["query"].flatten(1, 2)
    visible = visible_rows(x).squeeze(1)

    def call() -> Tensor:
        histories = Padding(x.offsets, x.leaves["history"].shape[0], x.max_length)
        scores = query @ histories.pad(x.leaves["history"]).mT * query.shape[-1] ** -0.5
        weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
        return histories.unpad(weights.mT).unflatten(1, x.leaves["query"].shape[1:3])

    return call


SUITE = Suite(
    name="target_attention_weights",
    measures="jagged_target_attention_weights",
    cases={name: TRAINING_CASES[name] for name in NAMES},
    inputs=base.make_inputs,
    oracle=functools.partial(formula, weights=target_attention_weights),
    plain=functools.partial(formula, weights=target_attention_weights),
    cost=cost,
    providers={"ours": ours, "padded": padded},
    modes=("forward",),
)
