"""Names of the cases of ``end_to_end.py``."""

from collections.abc import Sequence

GPUS = (1, 2, 4, 8)
SHARDINGS = ("row_wise", "table_wise")
"""Shardings of the item table on several GPUs."""


def step_case(
    mean: int,
    gpus: int,
    sharding: str,
    candidates: int = 1,
    candidate_features: int = 0,
    ways: Sequence[str] = (),
) -> str:
    """Return the name of a case. ``ways`` are further options that distinguish it."""
    parts = [f"mean-{mean}"]
    parts += [f"candidates-{candidates}"] * (candidates > 1)
    parts += [f"features-{candidate_features}"] * (candidate_features > 0)
    parts += [f"{gpus}-gpus-{sharding}"] * (gpus > 1)
    return "-".join([*parts, *ways])
