"""``jagged_target_attention`` whose weights are a function of their own score, as HSTU's are.

Beside the same with the softmax of scores, run ``target_attention_kernel`` in the same command.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from suites import Inputs, Suite
from suites import target_attention_kernel as base
from suites._attention import Attend, Padding
from torchrec_jagged_attn.testing import target_attention_oracle


def attend_padded(x: Inputs, weigh: Callable[[Tensor], Tensor]) -> Attend:
    """The formula on padded tensors; the padding is timed, too.

    It needs no mask: rows of zeros add nothing, whatever their weights.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        targets = Padding(x.query_offsets, q.shape[0], x.max_targets)
        histories = Padding(x.offsets, k.shape[0], x.max_length)
        q_BTHD, k_BLHD = targets.pad(q), histories.pad(k)
        v_BLHD = k_BLHD if v is k else histories.pad(v)
        scores = q_BTHD.transpose(1, 2) @ k_BLHD.permute(0, 2, 3, 1) * q.shape[-1] ** -0.5
        return targets.unpad((weigh(scores) @ v_BLHD.transpose(1, 2)).transpose(1, 2))

    return attend


def padded(x: Inputs, score: str) -> Callable[[], Tensor]:
    """A provider of it."""
    weigh = {"silu": F.silu, "sigmoid": torch.sigmoid}[score]
    return base.over_rows(functools.partial(attend_padded, weigh=weigh), x)


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
