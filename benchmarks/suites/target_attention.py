"""Target attention as a model runs it, projections included: ``nn.MultiheadAttention``'s function.

Ours moves the projections to the targets' side and reads the raw history rows; peers project every
history row into a key and a value, in one matrix product, and attend to those.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suites import Cost, Inputs, Suite, UnavailableError
from suites._attention import PEERS, Attend
from torchrec_jagged_attn.testing import (
    CASES,
    Case,
    flash_attention_oracle,
    flash_attention_plain,
    make_target_inputs,
)


def make_inputs(case: Case, device: str) -> Inputs:
    """Targets ``[B, T, E]``, history ``[N, E]`` and the weights of ``nn.MultiheadAttention``."""
    drawn = make_target_inputs(case, device, bias=False)
    offsets = drawn["offsets"]
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
    return Inputs(case, leaves, offsets, int(offsets.diff().max()))


def explicit(x: Inputs, attend: Attend) -> Tensor:
    """``[B, T, E]``: keys and values of all history rows, then ``attend``."""
    heads = (x.case.num_heads, x.case.width // x.case.num_heads)
    weights = x.leaves["in_proj_weight"].split([x.case.width, 2 * x.case.width])
    biases = x.leaves["in_proj_bias"].split([x.case.width, 2 * x.case.width])
    q = F.linear(x.leaves["target"], weights[0], biases[0]).unflatten(-1, heads)
    kv = F.linear(x.leaves["history"], weights[1], biases[1]).unflatten(-1, (2, *heads))
    out = attend(q, *kv.unbind(1)).flatten(-2)
    return F.linear(out, x.leaves["out_proj.weight"], x.leaves["out_proj.bias"])


def formula(x: Inputs, attention: Callable[..., Tensor]) -> Tensor:
    """:func:`explicit` with one of the package's test formulas."""
    steps = torch.arange(x.case.batch_size + 1, device=x.offsets.device) * x.case.num_targets
    return explicit(
        x, lambda q, k, v: attention(q.flatten(0, 1), k, v, steps, x.offsets).view_as(q)
    )


def cost(x: Inputs) -> dict[str, Cost]:
    """Read history once, and in backward again, and write its gradient; the cheaper arithmetic."""
    num_rows, width = x.leaves["history"].shape
    num_targets = x.leaves["target"].shape[0] * x.case.num_targets
    projections = 8 * num_targets * width**2
    scores = 4 * num_rows * x.case.num_targets * width  # both products
    flops = min(
        projections + scores * x.case.num_heads,  # over raw rows, as ours
        projections / 2 + 4 * num_rows * width**2 + scores,  # over keys and values
    )
    size = x.case.dtype.itemsize
    return {
        "forward": Cost(size * width * (num_rows + 2 * num_targets + 4 * width), flops),
        "backward": Cost(size * width * (2 * num_rows + 3 * num_targets + 8 * width), 2 * flops),
    }


def ours(x: Inputs) -> Callable[[], Tensor]:
    """``JaggedTargetAttention`` without its recency bias, which no peer has."""
    try:
        from torchrec.sparse.jagged_tensor import JaggedTensor
    except ImportError as error:
        raise UnavailableError("torchrec is not installed") from error
    from torchrec_jagged_attn import JaggedTargetAttention

    module = JaggedTargetAttention(
        x.case.width, x.case.num_heads, recency_bias=False, device="meta"
    )
    weights = {name: leaf for name, leaf in x.leaves.items() if isinstance(leaf, nn.Parameter)}
    module.load_state_dict(weights, assign=True)
    target = x.leaves["target"]
    history = JaggedTensor(x.leaves["history"], offsets=x.offsets)
    return lambda: module(target, history)


def _peer(make: Callable[[Inputs, int], Attend], x: Inputs) -> Callable[[], Tensor]:
    attend = make(x, x.case.num_targets)
    return lambda: explicit(x, attend)


SUITE = Suite(
    name="target_attention",
    cases={name: case for name, case in CASES.items() if case.large},
    inputs=make_inputs,
    oracle=functools.partial(formula, attention=flash_attention_oracle),
    plain=functools.partial(formula, attention=flash_attention_plain),
    cost=cost,
    providers={
        "ours": ours,
        **{f"linear+{name}": functools.partial(_peer, peer) for name, peer in PEERS.items()},
    },
)
