"""Find the longest histories, and the largest batches, that a DLRM trains in one GPU's memory.

    python benchmarks/end_to_end_memory.py --csv memory.csv

The model is that of ``end_to_end.py``. From ``--mean`` and its batch on, one of the two is doubled
while some steps can be trained, and then bisected to 10 %. A note says why the next larger size
that was tried cannot: memory, or any other limit. What stands in the CSV is not searched again.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # TorchRec and FBGEMM say much about themselves
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)

import torch
from end_to_end import Training, add_sizes, clear_memory, labels_of, sizes_of
from end_to_end_models import CLIP, Sizes, process_group
from end_to_end_peers import PROVIDERS, in_a_line
from end_to_end_results import add, by_provider, matching, measured_with
from options import HelpFormatter, writable_file

SEARCHED = ("padded", "padded-din", "fbgemm-sll", "linear-varlen", "ours")
FOUND = {
    "mean": ("longest_history", "rows", CLIP),
    "batch": ("largest_batch", "samples", 1),
}
"""Of each field of ``Sizes`` that varies: metric, unit, and how much of it is one of the field."""
CLOSE = 1.1
"""Between the largest size that fits and the smallest tried that does not."""


MAX_HELD = 2**28
"""Bytes on the GPU between two trials, beyond which those that follow would not be true."""


def largest(fits: Callable[[int], bool], start: int) -> int:
    """The largest size that fits, or one less than ``CLOSE`` times smaller; 0 if none does."""
    low, high = start, 2 * start
    while low and not fits(low):
        low, high = low // 2, low
    while low and high == 2 * low and fits(high):
        low, high = high, 2 * high
    while low and high > max(low + 1, CLOSE * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def try_size(name: str, sizes: Sizes, device: torch.device) -> str:
    """Why some steps cannot be trained; empty if they can."""
    try:
        Training(name, sizes, device, num_batches=1)
    except Exception as error:  # any limit ends the search, and the CSV says which
        return in_a_line(error)
    return ""


def labels(first: Sizes) -> dict[str, Any]:
    """What tells searches apart."""
    return {**labels_of(first), "suite": "end_to_end_memory"}


def search(csv: Path, name: str, first: Sizes, field: str, device: torch.device) -> None:
    """Adds what was found of a provider.

    Args:
        first: where it begins.
        field: of ``first``, which varies.

    Raises:
        RuntimeError: if the process has lost its GPU, or some of its memory. A size that was found
            until then is added, with a note that it is no more than that.
    """
    reasons: dict[int, str] = {}

    def fits(size: int) -> bool:
        reasons[size] = try_size(name, replace(first, **{field: size}), device)
        print(f"{name}: {field} {size}: {reasons[size] or 'fits'}", flush=True)
        clear_memory()
        if (held := torch.cuda.memory_allocated()) > MAX_HELD:
            raise RuntimeError(f"{held} bytes are held by nothing: call this once more")
        return not reasons[size]

    def write(more: str = "") -> None:
        metric, unit, factor = FOUND[field]
        found = max((size for size, reason in reasons.items() if not reason), default=0)
        beyond = min(size for size, reason in reasons.items() if reason)
        row = {"metric": metric, "median": found * factor, "unit": unit,
               "note": f"{beyond * factor}: {reasons[beyond]}{more}"}  # fmt: skip
        add(csv, [{**labels(first), **measured_with(), "provider": name, **row}])

    try:
        largest(fits, getattr(first, field))
    except RuntimeError:
        if any(reasons.values()) and not all(reasons.values()):
            write("; not bisected")
        raise
    write()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=[*SEARCHED])
    parser.add_argument("--csv", type=writable_file, required=True)
    add_sizes(parser, means=[1000])
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("a GPU is needed, got none")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    first, *_ = sizes_of(args)
    with process_group() as device:
        for name, field in itertools.product(args.providers, FOUND):
            found = {**labels(first), "provider": name, "metric": FOUND[field][0]}
            if matching(args.csv, found).empty:
                search(args.csv, name, first, field, device)
        of = by_provider(matching(args.csv, labels(first)))
        print(of.to_string(float_format="{:.0f}".format, na_rep="–"))


if __name__ == "__main__":
    main()
