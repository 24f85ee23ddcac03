"""What ``JaggedTargetAttention`` does as it comes while it trains, beside the attention itself.

    python benchmarks/run.py restraint --graph --host --csv benchmarks/results/restraint.csv

``ours`` drops rows and outputs, adds noise, multiplies outputs by powers of the length and adds a
bias by it. ``ours-power`` is without noise and bias. ``ours-elementwise`` drops rows, and does the
rest by PyTorch's own ops. ``ours-unrestrained`` does none of it: a bound of what it costs.
``linear+padded-sdpa`` does all but dropping rows in PyTorch. So little is dropped and added that
the oracle does neither.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suites import Cost, Inputs, Relaid, Suite, UnavailableError, target_attention_recency
from suites import target_attention as base
from suites._attention import PEERS, Attend
from torchrec_jagged_attn.testing import (
    UNRESTRAINED,
    Case,
    flash_attention_oracle,
    flash_attention_plain,
    make_target_inputs,
)

POWER, BIAS = "length_power", "length_bias"
RARELY = 1e-9  # four of 2^32 draws
DROPOUT = {"row_dropout": RARELY, "output_dropout": RARELY, "output_noise": RARELY}


def make_inputs(case: Case, device: str) -> Inputs:
    """Targets ``[B, E]``, history ``[N, E]`` and weights of a module that projects no values."""
    drawn = make_target_inputs(case, device, bias=False)
    generator = torch.Generator().manual_seed(1)

    def weight(*shape: int, scale: float) -> nn.Parameter:
        values = torch.randn(shape, generator=generator) * scale
        return nn.Parameter(values.to(device, case.dtype))

    buckets = target_attention_recency.NUM_BUCKETS
    leaves = {
        "target": drawn["query"][:, 0, 0].contiguous().requires_grad_(),
        "history": drawn["history"].requires_grad_(),
        "q_proj_weight": weight(case.width, case.width, scale=case.width**-0.5),
        "k_proj_weight": weight(case.width, case.width, scale=case.width**-0.5),
        "in_proj_bias": weight(case.width, scale=1.0),
        base.POSITION_WEIGHT: weight(buckets, case.num_heads, scale=1.0),
        POWER: weight(case.width, scale=0.1),
        BIAS: weight(case.width, scale=0.1),
    }
    return Inputs.even(case, leaves, drawn["offsets"])


def lengths_of(x: Inputs) -> Tensor:
    """``[B, 1]``."""
    return x.offsets.diff().unsqueeze(1)


def over_keys(x: Inputs, attend: Attend) -> Tensor:
    """Keys of all history rows, then ``attend``, which has the bias: each target's pooled row."""
    heads = x.case.num_heads, x.case.width // x.case.num_heads
    history, target = x.leaves["history"], x.leaves["target"]
    q = F.linear(target, x.leaves["q_proj_weight"], x.leaves["in_proj_bias"])
    k = F.linear(history, x.leaves["k_proj_weight"])
    rows = (tensor.unflatten(1, heads) for tensor in (q, k, history))
    return attend(*rows).flatten(1)


def formula(x: Inputs, attention: Callable[..., Tensor]) -> Tensor:
    """By one of the package's test formulas."""
    return scale(x, over_keys(x, target_attention_recency.biased(x, base.formula(x, attention))))


def scale(x: Inputs, pooled: Tensor, deviation: float = 0.0) -> Tensor:
    """What the length does to a pooled row, with the parameters that ``x`` has, and with noise."""
    lengths = lengths_of(x).to(torch.promote_types(pooled.dtype, torch.float32))
    log, row = lengths.clamp(min=1).log(), pooled
    if POWER in x.leaves:
        row = row * torch.exp(log * x.leaves[POWER])
    if BIAS in x.leaves:
        row = row + log * x.leaves[BIAS]
    if deviation:
        uniform = torch.rand_like(pooled, dtype=torch.float32) * 12**0.5 - 3**0.5
        row = row + uniform * (deviation * lengths.clamp(min=1).rsqrt())
    return row.to(pooled.dtype)


def cost(x: Inputs) -> dict[str, Cost]:
    """Read history once, and in backward again, and write its gradient; the rest is per target."""
    num_rows, width = x.leaves["history"].shape
    num_targets, size = x.leaves["target"].shape[0], x.case.dtype.itemsize
    pairs = 2 * num_rows * width * x.case.num_heads  # of each product
    products = 4 * num_targets * width**2
    return {
        "forward": Cost(
            size * width * (num_rows + 2 * num_targets + 2 * width), 2 * pairs + products
        ),
        "backward": Cost(
            size * width * (2 * num_rows + 3 * num_targets + 4 * width), 5 * pairs + 2 * products
        ),
    }


def module_of(x: Inputs, **options: float | bool) -> Callable[[], Tensor]:
    """``JaggedTargetAttention`` with the weights of ``x``, in training."""
    try:
        from torchrec.sparse.jagged_tensor import JaggedTensor
    except ImportError as error:
        raise UnavailableError("torchrec is not installed") from error
    from torchrec_jagged_attn import JaggedTargetAttention

    module = JaggedTargetAttention(x.case.width, x.case.num_heads, device="meta", **options)
    wanted = module.state_dict()
    module.load_state_dict({name: x.leaves[name] for name in wanted}, assign=True)
    history = JaggedTensor(x.leaves["history"], offsets=x.offsets)
    return lambda: module(x.leaves["target"], history)


def restrain(x: Inputs, pooled: Tensor) -> Tensor:
    """What ``ours`` does to a pooled row, by PyTorch's own ops."""
    odds = RARELY / (1 - RARELY)
    kept = 1 / (1 + lengths_of(x).clamp(min=1).float().rsqrt() * odds)
    is_kept = torch.rand_like(pooled, dtype=torch.float32) < kept
    return (scale(x, pooled, RARELY) * (is_kept / kept)).to(pooled.dtype)


def elementwise(x: Inputs) -> Callable[[], Tensor]:
    """Rows dropped by the kernels, the rest by PyTorch."""
    attend = module_of(x, **UNRESTRAINED | {"row_dropout": RARELY})
    return lambda: restrain(x, attend())


def padded(x: Inputs) -> Callable[[], Tensor]:
    """All by PyTorch, and no rows dropped."""
    attend = target_attention_recency.biased(x, PEERS["padded-sdpa"](x))
    return lambda: restrain(x, over_keys(x, attend))


def without(x: Inputs, names: tuple[str, ...], **options: float | bool) -> Relaid:
    """A module that does not have these parameters, and so without their gradients."""
    own = replace(x, leaves={name: leaf for name, leaf in x.leaves.items() if name not in names})
    return Relaid(module_of(own, **options), own.leaves, inputs=own)


def case_of(name: str, num_samples: int, longest: int, num_heads: int) -> Case:
    """One target, 128 numbers wide."""
    sizes = num_samples, longest, num_heads, 128
    return Case(name, *sizes, lengths="uniform", dtype=torch.bfloat16, large=True)


SUITE = Suite(
    name="restraint",
    measures="JaggedTargetAttention as it comes, training",
    cases={
        case.name: case
        for case in (
            case_of("restraint-64", 64, 50, 4),
            case_of("restraint-64-x8", 64, 50, 8),
            case_of("restraint-4k", 4096, 200, 4),
            case_of("restraint-4k-x8", 4096, 200, 8),
        )
    },
    inputs=make_inputs,
    oracle=functools.partial(formula, attention=flash_attention_oracle),
    plain=functools.partial(formula, attention=flash_attention_plain),
    cost=cost,
    providers={
        "ours": lambda x: module_of(x, **DROPOUT),
        "ours-power": lambda x: without(
            x,
            (BIAS,),
            **UNRESTRAINED
            | {"row_dropout": RARELY, "output_dropout": RARELY, "length_power": True},
        ),
        "ours-elementwise": elementwise,
        "ours-unrestrained": lambda x: without(x, (POWER, BIAS), **UNRESTRAINED),
        "linear+padded-sdpa": padded,
    },
)
