"""The names of the cases of ``end_to_end.py``, for the script and for what reads its figures."""

from collections.abc import Sequence

GPUS = (1, 2, 4, 8)
SHARDINGS = ("row_wise", "table_wise")
"""Of the item table, on several GPUs."""


def step_case(
    mean: int,
    gpus: int,
    sharding: str,
    candidates: int = 1,
    candidate_features: int = 0,
    ways: Sequence[str] = (),
) -> str:
    """The name of a case; on one GPU nothing is sharded. ``ways`` are in what it differs else."""
    parts = [f"mean-{mean}"]
    parts += [f"candidates-{candidates}"] * (candidates > 1)
    parts += [f"features-{candidate_features}"] * (candidate_features > 0)
    parts += [f"{gpus}-gpus-{sharding}"] * (gpus > 1)
    return "-".join([*parts, *ways])
