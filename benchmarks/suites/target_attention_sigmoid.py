"""``target_attention_silu`` with the sigmoid of scores."""

from suites.target_attention_silu import suite_of

SUITE = suite_of("sigmoid")
