"""Compare ``jagged_target_attention_over_codes`` with ``jagged_target_attention`` on decoded rows.

Rows of 25 codes of three levels, five bytes each. ``ours-decoded`` decodes them in each call.
``ours-rows`` reads decoded rows from memory, in the dtype of the case, and has a gradient of the
rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from suites import Cost, Inputs, PreparedCall, Suite
from suites import target_attention_kernel as base
from suites._attention import exact
from tests.cases import Case, jagged_lengths, offsets_of
from torchrec_jagged_attn.semantic_ids import PackedCodes, jagged_target_attention_over_codes

IDS = PackedCodes(num_codes=25)
BF16 = torch.bfloat16
CASES = {
    case.name: case
    for case in (
        Case("full-512", 10000, 512, 1, 128, lengths=1.0, dtype=BF16, large=True),
        Case("full-512-4-heads", 10000, 512, 4, 128, lengths=1.0, dtype=BF16, large=True),
        Case("rank-1k", 4096, 1024, 4, 128, 1, "log-normal", BF16, large=True),
        Case("cpu-half-full", 512, 200, 4, 64, lengths="uniform"),
    )
}


@dataclass(frozen=True)
class Codes(Inputs):
    """Inputs with a history of packed codes ``[N, bytes]``."""

    packed: Tensor

    def decoded(self) -> Tensor:
        """Decode the rows."""
        codes = IDS.unpack(self.packed).to(self.leaves["basis"].dtype)
        return torch.addmm(self.leaves["mean"], codes, self.leaves["basis"])

    def over(self, history: Tensor) -> Inputs:
        """The same inputs with a materialized ``history``."""
        return replace(self, leaves={"query": self.leaves["query"], "history": history})


def make_inputs(case: Case, device: str) -> Codes:
    """Query ``[B, T, H, D]``, mean ``[D]`` and basis ``[L, D]``, and random codes."""
    generator = torch.Generator().manual_seed(0)
    lengths = jagged_lengths(case.batch_size, case.max_length, case.lengths, generator)
    query = torch.randn(
        case.batch_size, case.num_targets, case.num_heads, case.width, generator=generator
    )
    shape = int(lengths.sum()), IDS.num_codes
    codes = torch.randint(-1, 2, shape, generator=generator, dtype=torch.int8)
    leaves = {
        "query": query.to(device, case.dtype),
        "mean": torch.randn(case.width, generator=generator).to(device, case.dtype),
        "basis": torch.randn(IDS.num_codes, case.width, generator=generator),
    }
    leaves["basis"] = (leaves["basis"] * IDS.num_codes**-0.5).to(device, case.dtype)
    leaves = {name: tensor.requires_grad_() for name, tensor in leaves.items()}
    even = Inputs.even(case, leaves, offsets_of(lengths, case.index_dtype, device))
    return Codes(**vars(even), packed=IDS.pack(codes.to(device)))


def over_rows(x: Codes) -> Inputs:
    """Inputs with decoded rows, through which mean and basis get their gradients."""
    return x if "history" in x.leaves else x.over(x.decoded())


def cost(x: Codes) -> dict[str, Cost]:
    """Bytes are read once per pass, and codes are multiplied with queries and weights.

    Products with the basis are negligible.
    """
    num_queries = x.leaves["query"].numel() // x.case.width
    product = 2 * x.num_pairs() * x.case.num_heads * IDS.num_codes
    rows = x.case.dtype.itemsize * x.case.width * num_queries
    return {
        "forward": Cost(x.packed.nbytes + 2 * rows, 2 * product),
        "backward": Cost(x.packed.nbytes + 3 * rows, 3 * product),
    }


def ours(x: Codes) -> Callable[[], Tensor]:
    """The op."""
    return lambda: jagged_target_attention_over_codes(
        x.leaves["query"], x.packed, x.offsets, x.leaves["mean"], x.leaves["basis"]
    )


def rows(x: Codes) -> PreparedCall:
    """Rows are decoded before the measurement."""
    inputs = x.over(x.decoded().detach().requires_grad_())
    return PreparedCall(base.ours(inputs), inputs.leaves, inputs=inputs)


SUITE = Suite(
    name="semantic_ids",
    measures="jagged_target_attention_over_codes, 25 codes",
    cases=CASES,
    inputs=make_inputs,
    oracle=lambda x: base.over_rows(exact, over_rows(x))(),
    cost=cost,
    providers={
        "ours-codes": ours,
        "ours-decoded": lambda x: lambda: base.ours(over_rows(x))(),
        "ours-rows": rows,
    },
)
