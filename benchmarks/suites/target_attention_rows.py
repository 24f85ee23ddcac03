"""``jagged_target_attention`` over rows by index, against the same on a copy of these rows.

The histories of ``rank-1k-x4`` are those of ``rank-1k``, but four places, of any samples, name each
row. A copy is what ``index_select`` makes, whose gradient is added up by atomics. That of
``ours-copied-before`` is made before the clock runs, and its gradient is left as it is: it tells
what reading by index costs where rows are unique.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from suites import TRAINING_CASES, Cost, Inputs, Relaid, Suite
from suites import target_attention_kernel as base
from tests.cases import Case
from tests.oracles import target_attention_oracle
from torchrec_jagged_attn import jagged_target_attention

PLACES_OF_A_ROW = (1, 4, 16, 64)
NAMES = ("rank-1k", "rank-200", "cpu-skewed")
CASES = {
    f"{name}-x{places}": replace(TRAINING_CASES[name], name=f"{name}-x{places}")
    for name in NAMES
    for places in PLACES_OF_A_ROW
}


@dataclass(frozen=True)
class Rows(Inputs):
    """Whose history ``[U, D]`` is read by ``indices`` ``[N]``."""

    indices: Tensor

    def copied(self, history: Tensor) -> Inputs:
        """The same over ``history``, a copy of the rows."""
        return replace(self, leaves=self.leaves | {"history": history})


def make_inputs(case: Case, device: str) -> Rows:
    """Query ``[B, T, H, D]`` and history ``[U, D]``."""
    x = base.make_inputs(case, device)
    num_places = x.leaves["history"].shape[0]
    num_rows = max(1, -(-num_places // int(case.name.rpartition("-x")[2])))
    order = torch.randperm(num_places, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    history = torch.randn(num_rows, case.width, generator=generator).to(device, case.dtype)
    history.requires_grad_()
    leaves = x.leaves | {"history": history}
    return Rows(**vars(replace(x, leaves=leaves)), indices=(order % num_rows).to(device))


def gathered(x: Rows) -> Inputs:
    """On a copy of the rows ``[N, D]``, whose gradient is theirs."""
    return x.copied(x.leaves["history"].index_select(0, x.indices))


def cost(x: Rows) -> dict[str, Cost]:
    """Read each row and each index once, and in backward again, and write the rows' gradient."""
    copied, rows = base.cost(x.copied(x.leaves["history"][x.indices])), base.cost(x)
    return {mode: Cost(rows[mode].bytes + x.indices.nbytes, copied[mode].flops) for mode in copied}


def ours(x: Rows) -> Callable[[], Tensor]:
    """By index."""
    query, history = x.leaves["query"], x.leaves["history"]
    return lambda: jagged_target_attention(query, history, x.offsets, indices=x.indices)


def on_a_copy(x: Rows) -> Callable[[], Tensor]:
    """Rows are copied by ``index_select``."""
    return lambda: base.formula(gathered(x), jagged_target_attention)


def copied_before(x: Rows) -> Relaid:
    """Rows are there."""
    own = x.copied(x.leaves["history"].detach()[x.indices].requires_grad_())

    def restore(name: str, tensor: Tensor) -> Tensor:
        if name != "history":
            return tensor
        sums = torch.zeros_like(x.leaves["history"], dtype=torch.float32)
        return sums.index_add_(0, x.indices, tensor.float()).to(tensor.dtype)

    return Relaid(
        lambda: base.formula(own, jagged_target_attention), leaves=own.leaves, restore=restore
    )


SUITE = Suite(
    name="target_attention_rows",
    measures="jagged_target_attention over rows by index",
    cases=CASES,
    inputs=make_inputs,
    oracle=lambda x: base.formula(gathered(x), target_attention_oracle),
    cost=cost,
    providers={
        "ours-by-index": ours,
        "ours-on-a-copy": on_a_copy,
        "ours-copied-before": copied_before,
    },
)
