"""Every kernel that is for an H100 compiles for it."""

from __future__ import annotations

import pytest

from tests.kernels.compiled import (
    assert_compiles,
    assert_every_kernel_is_compiled,
    cases_of,
)

pytestmark = pytest.mark.reference  # nothing is compiled where kernels are interpreted


@pytest.mark.parametrize("name", cases_of(90))
def test_compiles(name: str) -> None:
    assert_compiles(name, 90)


def test_every_kernel_is_compiled() -> None:
    assert_every_kernel_is_compiled(90)
