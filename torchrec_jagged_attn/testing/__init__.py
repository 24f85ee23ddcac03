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
    flash_attention_oracle,
    recency_bias_oracle,
    target_attention_oracle,
)
from torchrec_jagged_attn.testing.rounding import RoundingErrors
from torchrec_jagged_attn.testing.tolerance import (
    assert_close,
    assert_matches_oracle,
    outputs_and_gradients,
)

__all__ = [
    "CASES",
    "Case",
    "RoundingErrors",
    "ScoreBiases",
    "assert_close",
    "assert_matches_oracle",
    "flash_attention_oracle",
    "jagged_lengths",
    "make_flash_inputs",
    "make_target_inputs",
    "offsets_of",
    "outputs_and_gradients",
    "recency_bias_oracle",
    "target_attention_oracle",
]
