"""Every kernel that is for an H100 compiles for it."""

from __future__ import annotations

import pytest

from tests.kernels.compiled import (
    assert_compiles,
    assert_every_kernel_is_compiled,
    cases_of,
    layer,
    ops_on,
)

pytestmark = pytest.mark.reference  # nothing is compiled where kernels are interpreted


@pytest.mark.parametrize("name", cases_of(90))
def test_compiles(name: str) -> None:
    assert_compiles(name, 90)


def test_every_kernel_is_compiled() -> None:
    assert_every_kernel_is_compiled(90)


def test_launches_of_a_layer() -> None:
    """As many without a value projection: other kernels replace those of products."""
    names = {}
    for value_projection in (True, False):
        with ops_on(90) as launches:
            layer(value_projection)
            names[value_projection] = [x.kernel.fn.__name__ for x in launches]
    in_place_of = {
        "_own_columns_kernel": "_from_heads_kernel",
        "_spread_columns_kernel": "_to_heads_kernel",
    }
    assert {*in_place_of} <= {*names[False]}
    assert [in_place_of.get(name, name) for name in names[False]] == names[True]
