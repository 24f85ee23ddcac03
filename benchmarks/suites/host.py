"""Host time of a call of every module and op, on 64 short samples, which do not fill a GPU.

    python benchmarks/run.py host --host --csv benchmarks/results/host.csv

Each case is the function of another suite.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from suites import (
    Cost,
    Inputs,
    PreparedCall,
    Suite,
    UnavailableError,
    self_attention,
    table1,
    target_attention,
    target_attention_kernel,
)
from suites._attention import torch_varlen
from tests.cases import Case
from tests.oracles import flash_attention_oracle

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def make_rows(case: Case, device: str) -> Inputs:
    """Return histories ``[N, E]`` and the weights of ``nn.MultiheadAttention``."""
    x = target_attention.make_inputs(case, device)
    width = case.width
    shapes = {
        "in_proj_weight": (3 * width, width),
        "in_proj_bias": (3 * width,),
        "out_proj.weight": (width, width),
        "out_proj.bias": (width,),
    }
    weights = target_attention.draw_weights(case, device, shapes)
    leaves = {"history": x.leaves["history"], **weights}
    return Inputs(case, leaves, x.offsets, x.offsets, x.max_length, x.max_length)


def attend(x: Inputs, attention: Attention) -> Tensor:
    """Project the rows, apply ``attention(q, k, v)`` of ``[N, H, D]``, and project its output."""
    history, in_weight, in_bias, out_weight, out_bias = list(x.leaves.values())[:5]
    heads = (3, x.case.num_heads, x.case.width // x.case.num_heads)
    qkv = F.linear(history, in_weight, in_bias).unflatten(-1, heads)
    return F.linear(attention(*qkv.unbind(1)).flatten(1), out_weight, out_bias)


def row_cost(x: Inputs) -> dict[str, Cost]:
    """Rows are read and written once; backward also reads a gradient."""
    moved = x.leaves["history"].nbytes
    return {"forward": Cost(2 * moved, 0), "backward": Cost(3 * moved, 0)}


def self_attention_module(x: Inputs) -> PreparedCall:
    """``JaggedSelfAttention``, whose scores have a bias by distance."""
    from torchrec.sparse.jagged_tensor import JaggedTensor

    from torchrec_jagged_attn import JaggedSelfAttention

    x = target_attention.with_recency(x)
    attention = JaggedSelfAttention(x.case.width, x.case.num_heads, device="meta")
    weights = {name: leaf for name, leaf in x.leaves.items() if name != "history"}
    attention.load_state_dict(weights, assign=True)
    history = JaggedTensor(x.leaves["history"], offsets=x.offsets)
    return PreparedCall(lambda: attention(history).values(), x.leaves, inputs=x)


def self_attention_oracle(x: Inputs) -> Tensor:
    """Self-attention of the rows, with a bias by distance if ``x`` has its table."""
    biases = {}
    if target_attention.POSITION_WEIGHT in x.leaves:
        biases["relative_bias"] = x.leaves[target_attention.POSITION_WEIGHT]
    return attend(x, functools.partial(flash_attention_oracle, q_offsets=x.offsets, **biases))


SELF_ATTENTION_MODULE = Suite(
    name="self_attention_module",
    measures="JaggedSelfAttention",
    cases={},
    inputs=make_rows,
    oracle=self_attention_oracle,
    cost=row_cost,
    providers={
        "ours": self_attention_module,
        "linear+torch-varlen": lambda x: functools.partial(attend, x, torch_varlen(x)),
    },
)
FUNCTIONS = {
    suite.name: suite
    for suite in (
        target_attention.SUITE,
        target_attention_kernel.SUITE,
        SELF_ATTENTION_MODULE,
        self_attention.SUITE,
    )
} | dict.fromkeys(table1.OPS, table1.SUITE)
PEERS = (
    *("linear+torch-varlen", "torch-varlen", "flash-attention-3", "fbgemm-cuda", "fbgemm-sll"),
    *("linear+padded-sdpa", "padded-sdpa", "padded"),
)


def host_case(function: str) -> Case:
    """Return a case of 64 samples of up to 50 rows, with a total width of 128."""
    heads = 1 if function in table1.OPS else 4
    width = 32 if function == "self_attention" else 128
    name = f"{function}-host"  # table1 takes the op from the name
    return Case(name, 64, 50, heads, width, lengths="uniform", dtype=torch.bfloat16, large=True)


def suite_for(case: Case) -> Suite:
    """Return the suite of the function of ``case``."""
    return FUNCTIONS[case.name.rpartition("-")[0]]


def provide(name: str, x: Inputs) -> Callable[[], Tensor] | PreparedCall:
    """Return a provider of the suite of the case; ``ours`` is its first provider of ours."""
    providers = suite_for(x.case).providers
    if name == "ours":
        name = next((known for known in providers if known.startswith("ours")), name)
    if name not in providers:
        raise UnavailableError("computes another function")
    return providers[name](x)


SUITE = Suite(
    name="host",
    measures="host time of every module and op",
    cases={f"{function}-host": host_case(function) for function in FUNCTIONS},
    inputs=lambda case, device: suite_for(case).inputs(case, device),
    oracle=lambda x: suite_for(x.case).oracle(x),
    cost=lambda x: suite_for(x.case).cost(x),
    providers={name: functools.partial(provide, name) for name in ("ours", *PEERS)},
)
