"""``jagged_target_attention`` whose weights are a function of their own score, as HSTU's are.

Beside the same with the softmax of scores, run ``target_attention_kernel`` in the same command.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from suites import Inputs, Suite
from suites import target_attention_kernel as base
from torchrec_jagged_attn.testing import target_attention_oracle, target_attention_plain


def padded(x: Inputs, score: str) -> Callable[[], Tensor]:
    """The formula, of all samples padded to the longest."""
    attention = functools.partial(target_attention_plain, score=score)
    return lambda: base.formula(x, attention)


def suite_of(score: str) -> Suite:
    """Of one function of scores."""
    oracle = functools.partial(target_attention_oracle, score=score)
    return replace(
        base.SUITE,
        name=f"target_attention_{score}",
        measures=f"target_attention_kernel with {score} of scores",
        oracle=functools.partial(base.formula, attention=oracle),
        plain=functools.partial(base.plain, score=score),
        providers={
            f"ours-{score}": functools.partial(base.ours, score=score),
            "padded": functools.partial(padded, score=score),
        },
    )


SUITE = suite_of("silu")
