"""Target attention as a model runs it, projections included: ``nn.MultiheadAttention``'s function.

Ours chooses by the number of targets. It moves the projections to their side and reads the raw
history rows; or it projects every history row into a key and a value, in one matrix product, and
attends to those. ``ours-materialized`` and peers always do the latter.
"""

import functools
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suites import TRAINING_CASES, Cost, Inputs, Suite
from suites._attention import PEERS, Attend, bias_as_column
from tests.cases import Case, make_target_inputs
from tests.oracles import flash_attention_oracle

POSITION_WEIGHT = "recency_bias.position_weight"


def make_inputs(case: Case, device: str) -> Inputs:
    """Targets ``[B, T, E]``, history ``[N, E]`` and the weights of ``nn.MultiheadAttention``."""
    drawn = make_target_inputs(case, device, bias=False)
    generator = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> nn.Parameter:
        values = torch.randn(shape, generator=generator) / case.width**0.5
        return nn.Parameter(values.to(device, case.dtype))

    leaves = {
        "target": drawn["query"][:, :, 0].contiguous().requires_grad_(),
        "history": drawn["history"].requires_grad_(),
        "in_proj_weight": weight(3 * case.width, case.width),
        "in_proj_bias": weight(3 * case.width),
        "out_proj.weight": weight(case.width, case.width),
        "out_proj.bias": weight(case.width),
    }
    return Inputs.even(case, leaves, drawn["offsets"])


def materialized(x: Inputs, attend: Attend) -> Tensor:
    """Keys and values of all history rows, then ``attend``: one row per target, in its shape."""
    target, width = x.leaves["target"], x.case.width
    heads = (x.case.num_heads, width // x.case.num_heads)
    weights = x.leaves["in_proj_weight"].split([width, 2 * width])
    biases = x.leaves["in_proj_bias"].split([width, 2 * width])
    q = F.linear(target.flatten(0, -2), weights[0], biases[0]).unflatten(-1, heads)
    kv = F.linear(x.leaves["history"], weights[1], biases[1]).unflatten(-1, (2, *heads))
    out = attend(q, *kv.unbind(1)).reshape(target.shape)
    return F.linear(out, x.leaves["out_proj.weight"], x.leaves["out_proj.bias"])


def formula(x: Inputs, attention: Callable[..., Tensor]) -> Attend:
    """One of the package's test formulas, behind the interface of peers."""
    return bias_as_column(
        lambda q, k, v, scale: attention(q, k, v, x.query_offsets, x.offsets, scale=scale)
    )


def cost(x: Inputs) -> dict[str, Cost]:
    """Read history once, and in backward again, and write its gradient; the cheaper arithmetic.

    Of implementations that keep no weight of a pair for backward: that has five products of pairs.
    """
    num_rows, width = x.leaves["history"].shape
    num_targets = x.leaves["target"].numel() // width
    pairs = 2 * x.num_pairs() * width  # of each product of targets, over all heads of keys

    def flops(products_of_pairs: int, times: int) -> float:
        over_rows = (
            8 * times * num_targets * width**2 + products_of_pairs * pairs * x.case.num_heads
        )
        over_keys = 4 * times * (num_targets + num_rows) * width**2 + products_of_pairs * pairs
        return min(over_rows, over_keys)

    size = x.case.dtype.itemsize
    return {
        "forward": Cost(size * width * (num_rows + 2 * num_targets + 4 * width), flops(2, 1)),
        "backward": Cost(size * width * (2 * num_rows + 3 * num_targets + 8 * width), flops(5, 2)),
    }


def ours(
    x: Inputs, keys_and_values: Literal["auto", "absorbed", "materialized"] = "auto"
) -> Callable[[], Tensor]:
    """``JaggedTargetAttention``, which projects values, as its peers do, and has a recency bias
    where the inputs have one."""
    from torchrec.sparse.jagged_tensor import JaggedTensor

    from torchrec_jagged_attn import JaggedTargetAttention

    module = JaggedTargetAttention(
        x.case.width,
        x.case.num_heads,
        recency_bias=POSITION_WEIGHT in x.leaves,
        value_projection=True,
        device="meta",
    )
    module._keys_and_values = keys_and_values
    weights = {name: leaf for name, leaf in x.leaves.items() if isinstance(leaf, nn.Parameter)}
    module.load_state_dict(weights, assign=True)
    target = x.leaves["target"]
    if target.dim() == 2:
        target = JaggedTensor(target, offsets=x.query_offsets)
    history = JaggedTensor(x.leaves["history"], offsets=x.offsets)
    return lambda: module(target, history)


def over_keys(make: Callable[[Inputs], Attend], x: Inputs) -> Callable[[], Tensor]:
    """A provider from the maker of a peer."""
    attend = make(x)
    return lambda: materialized(x, attend)


ours_materialized = functools.partial(ours, keys_and_values="materialized")

SUITE = Suite(
    name="target_attention",
    measures="JaggedTargetAttention, projections included",
    cases=TRAINING_CASES,
    inputs=make_inputs,
    oracle=lambda x: materialized(x, formula(x, flash_attention_oracle)),
    cost=cost,
    providers={
        "ours": ours,
        "ours-materialized": ours_materialized,
        **{f"linear+{name}": functools.partial(over_keys, peer) for name, peer in PEERS.items()},
    },
)
