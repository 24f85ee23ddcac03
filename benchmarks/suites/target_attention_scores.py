"""``jagged_target_attention`` by its function of scores: the softmax, and those of a score alone.

SiLU's are HSTU's weights. A case is one of ``target_attention_kernel`` and the function.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from suites import TRAINING_CASES, Inputs, UnavailableError
from suites import target_attention_kernel as base
from suites._attention import Attend, Padding
from tests.cases import Case
from tests.oracles import target_attention_oracle

SCORES = ("silu", "sigmoid", "softmax")


@dataclass(frozen=True)
class Scored(Inputs):
    """And the function of scores."""

    score: str


def make_inputs(case: Case, device: str) -> Scored:
    """Those of ``target_attention_kernel``."""
    score = case.name.rpartition("-")[2]
    return Scored(**vars(base.make_inputs(case, device)), score=score)


def attend_padded(x: Scored) -> Attend:
    """The formula on padded tensors; the padding is timed, too.

    It needs no mask: rows of zeros add nothing, whatever their weights.
    """
    weigh = {"silu": F.silu, "sigmoid": torch.sigmoid}[x.score]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        targets = Padding(x.query_offsets, q.shape[0], x.max_targets)
        histories = Padding(x.offsets, k.shape[0], x.max_length)
        q_BTHD, k_BLHD = targets.pad(q), histories.pad(k)
        v_BLHD = k_BLHD if v is k else histories.pad(v)
        scores = q_BTHD.transpose(1, 2) @ k_BLHD.permute(0, 2, 3, 1) * q.shape[-1] ** -0.5
        return targets.unpad((weigh(scores) @ v_BLHD.transpose(1, 2)).transpose(1, 2))

    return attend


def padded(x: Scored) -> Callable[[], Tensor]:
    """A provider of it."""
    if x.score == "softmax":
        raise UnavailableError("target_attention_kernel has the softmax's peers")
    return base.over_rows(attend_padded, x)


def oracle(x: Scored) -> Tensor:
    """In fp64."""
    return base.formula(x, functools.partial(target_attention_oracle, score=x.score))


SUITE = replace(
    base.SUITE,
    name="target_attention_scores",
    measures="target_attention_kernel by function of scores",
    cases={
        f"{name}-{score}": replace(case, name=f"{name}-{score}")
        for score in SCORES
        for name, case in TRAINING_CASES.items()
        if case.large or name == "cpu-skewed"
    },
    inputs=make_inputs,
    oracle=oracle,
    providers={"ours": lambda x: base.ours(x, score=x.score), "padded": padded},
)
