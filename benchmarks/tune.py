"""Try ways of cutting up target attention, and print the fastest of each case.

    python benchmarks/tune.py --cases rank-1k,rank-200 --directions forward --csv tiles.csv

What ``torchrec_jagged_attn.kernels.target.plan`` chooses should be among the first lines. All
candidates compute the same; whether it is right is the tests' business. Times are medians of
replayed CUDA graphs, with no host in them; ``of floor`` is the time that the bytes take at the copy
bandwidth, measured in the same run, over that of the candidate.
"""

import argparse
import contextlib
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pandas as pd
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from run import capture, copy_bandwidth, make_step, select, time_ms
from suites import target_attention_kernel
from torch import Tensor

from tests.cases import CASES, Case
from torchrec_jagged_attn import jagged_target_attention
from torchrec_jagged_attn.kernels.target import attention, plan

DEVICE = "cuda"
DIRECTIONS = ("forward", "backward")


def make_call(case: Case, direction: str, buckets: int) -> Callable[[], object]:
    """The op, as it is used, in one direction on random inputs."""
    x = target_attention_kernel.SUITE.inputs(case, DEVICE)
    table = torch.randn(buckets, case.num_heads, device=DEVICE).requires_grad_()
    tables = {"position_bias": table} if buckets else {}

    def call() -> Tensor:
        return jagged_target_attention(x.leaves["query"], x.leaves["history"], x.offsets, **tables)

    grad_out = torch.randn_like(x.leaves["query"])
    return make_step(direction, call, replace(x, leaves=x.leaves | tables), grad_out)


def plan_of(call: Callable[[], object]) -> plan.Plan:
    """How the kernels cut up ``call``, which launches them once."""
    plans = []

    def remember(call: plan.Call) -> plan.Plan:
        plans.append(plan.Plan(call))
        return plans[-1]

    with mock.patch.object(attention, "plan_of", remember):
        call()
    return plans[0]


def candidates(case: Case, direction: str, buckets: int, chunks: list[int]) -> Iterator[dict]:
    """Tiles worth a try, in the words of the kernels' own choice, which comes first."""
    first = plan_of(make_call(replace(case, batch_size=1, max_length=8), direction, buckets))
    chosen = first.tiles
    yield chosen
    warps = [chosen["num_warps"]] if first.path in ("one_warp", "few_warps") else [4, 8]
    shapes = itertools.product((16, 32, 64, 128), chunks, (2, 3, 4), warps)
    for block_n, chunk, stages, num_warps in shapes:
        shape = {"BLOCK_N": block_n, "CHUNK": chunk, "NUM_STAGES": stages, "num_warps": num_warps}
        yield chosen | shape


@contextlib.contextmanager
def with_tiles(tiles: dict) -> Iterator[None]:
    """A context in which the kernels cut their work up so."""
    with (
        mock.patch.object(attention, "plan_of", plan.Plan),  # which remembers none
        mock.patch.object(plan, "tiles_of", return_value=tiles),
    ):
        yield


def compile_tiles(job: tuple[Case, str, int, dict]) -> str | None:
    """Fill Triton's cache; why it cannot be done, if so."""
    case, direction, buckets, tiles = job
    call = make_call(replace(case, batch_size=8), direction, buckets)
    try:
        with with_tiles(tiles):
            call()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def time_tiles(case: Case, direction: str, buckets: int, all_tiles: list[dict]) -> list[float]:
    """Milliseconds of each."""
    call = make_call(case, direction, buckets)
    times = []
    for tiles in track(all_tiles, f"{case.name} {direction}"):
        with with_tiles(tiles):
            graph = capture(call)
        times.append(time_ms(graph.replay, DEVICE, quick=True)[0])
    return times


def main(argv: list[str] | None = None) -> None:
    """Run the command line ``argv``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def names(text: str) -> list[str]:
        return text.split(",")

    add = parser.add_argument
    add("--cases", type=names, default=["rank-1k"], metavar="A,B")
    add("--directions", type=names, default=list(DIRECTIONS), metavar="A,B")
    add("--chunks", type=lambda s: [int(c) for c in s.split(",")], default=[128, 256, 512])
    add("--buckets", type=int, default=0, help="of the recency bias by position; 0: none")
    add("--jobs", type=int, default=multiprocessing.cpu_count(), help="to compile side by side")
    add("--top", type=int, default=8, help="lines to print for each case")
    add("--csv", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device, and PyTorch finds none")
    cases = [CASES[name] for name in select("case", args.cases, CASES)]
    directions = select("direction", args.directions, DIRECTIONS)

    console = Console(width=120)
    rows = []
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        multiprocessing.get_context("spawn").Pool(args.jobs) as pool,
    ):
        bandwidth = copy_bandwidth(DEVICE, quick=False)
        for case, direction in itertools.product(cases, directions):
            tried = list(candidates(case, direction, args.buckets, args.chunks))
            jobs = [(case, direction, args.buckets, tiles) for tiles in tried]
            reasons = pool.map(compile_tiles, jobs, chunksize=1)
            good = [t for t, reason in zip(tried, reasons, strict=True) if reason is None]
            cost = target_attention_kernel.SUITE.cost(
                target_attention_kernel.SUITE.inputs(case, DEVICE)
            )[direction]
            times = time_tiles(case, direction, args.buckets, good)
            for at, (tiles, ms) in enumerate(zip(good, times, strict=True)):
                rows.append(
                    {"case": case.name, "direction": direction, "chosen": at == 0, "ms": ms}
                    | {"of floor": cost.bytes / bandwidth * 1e3 / ms}
                    | tiles
                )
            frame = pd.DataFrame(rows)
            of_case = frame[(frame["case"] == case.name) & (frame["direction"] == direction)]
            best = pd.concat([of_case[of_case["chosen"]], of_case.sort_values("ms")[: args.top]])
            table = Table(*best.columns, box=None)
            for line in best.itertuples(index=False):
                table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in line))
            console.print(table)
            console.print(f"{len(tried) - len(good)} of {len(tried)} do not compile or run here")
            if args.csv:
                frame.to_csv(args.csv, index=False)


if __name__ == "__main__":
    main()
