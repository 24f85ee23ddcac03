"""The oracles: what they make of rows that see nothing, and what they cost where there are many."""

import pytest
import torch
import torch.nn.functional as F

from tests.cases import Case, make_flash_inputs
from tests.oracles import flash_attention_oracle
from tests.runs import assert_same_run


def double(inputs):
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_each_head_is_sdpa_of_its_own_and_zero_where_it_sees_nothing(kv_heads):
    case = Case("heads", 4, 9, 4, 8, lengths=1.0)
    x = double(make_flash_inputs(case, "cpu", cross=True, kv_heads=kv_heads, bias=True))
    x["bias"][:9, 1] = -torch.inf  # of the first sample, one head
    x["bias"][9:14] = -torch.inf  # of the second, five of nine keys
    out = flash_attention_oracle(**x)
    for sample in range(4):
        rows = slice(9 * sample, 9 * sample + 9)
        for head in range(4):
            q, bias = x["q"][rows, head], x["bias"][rows, head]
            k, v = (x[name][rows, head // (4 // kv_heads)] for name in "kv")
            sees_nothing = (sample, head) == (0, 1)
            expected = torch.zeros_like(q)
            if not sees_nothing:
                expected = F.scaled_dot_product_attention(q, k, v, bias.expand(9, -1))
            assert_same_run(out[rows, head], expected, num_terms=8 + 9, dtype=torch.float64)
