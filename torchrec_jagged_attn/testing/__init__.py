"""What tests and benchmarks share: named shapes, input makers, oracles, the tolerance rule."""

from torchrec_jagged_attn.testing.cases import (
    CASES,
    Case,
    jagged_lengths,
    make_flash_inputs,
    make_target_inputs,
    offsets_of,
)
from torchrec_jagged_attn.testing.oracles import (
    ScoreBiases,
    activation_unit,
    flash_attention_oracle,
    flash_attention_plain,
    recency_bias_oracle,
    target_attention_oracle,
    target_attention_plain,
)
from torchrec_jagged_attn.testing.rounding import RoundingErrors
from torchrec_jagged_attn.testing.tolerance import (
    TF32Products,
    assert_close,
    assert_matches_oracle,
    error_bound,
    outputs_and_gradients,
    plain_products,
)

__all__ = [
    "CASES",
    "Case",
    "RoundingErrors",
    "ScoreBiases",
    "TF32Products",
    "activation_unit",
    "assert_close",
    "assert_matches_oracle",
    "error_bound",
    "flash_attention_oracle",
    "flash_attention_plain",
    "jagged_lengths",
    "make_flash_inputs",
    "make_target_inputs",
    "offsets_of",
    "outputs_and_gradients",
    "plain_products",
    "recency_bias_oracle",
    "target_attention_oracle",
    "target_attention_plain",
]
