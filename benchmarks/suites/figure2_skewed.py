"""Figure 2 with lengths as of real users: log-normal, so that 85 % of a batch is padding."""

from dataclasses import replace

from suites import figure2

SUITE = replace(
    figure2.SUITE,
    name="figure2_skewed",
    measures="Figure 2 with log-normal lengths: 85 % padding",
    cases={
        name: replace(case, name=name, lengths="skewed")
        for length, case in zip(figure2.LENGTHS, figure2.SUITE.cases.values(), strict=True)
        for name in [f"skewed-{length}"]
    },
)
