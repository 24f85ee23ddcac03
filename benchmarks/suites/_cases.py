"""Named shapes that suites share."""

from tests.cases import CASES, Case

CPU_CASES = {
    case.name: case
    for case in (
        Case("cpu-half-full", 512, 200, 4, 64, lengths="uniform"),
        Case("cpu-skewed", 256, 1024, 4, 128, lengths="log-normal"),
    )
}
TRAINING_CASES = {name: case for name, case in CASES.items() if case.large} | CPU_CASES
