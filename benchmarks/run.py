"""Check and time the package's functions against their peers.

    python benchmarks/run.py --list
    python benchmarks/run.py target_attention --cases 'rank-1k*' --graph --csv out.csv --plot out
    python benchmarks/run.py --device cpu --quick

For each case of a suite, every provider's output and gradients are first held against an fp64
oracle by the tolerance rule of ``torchrec_jagged_attn.testing``; one that fails, or cannot run
here, gets a line that says why, and no figure. Times are medians; the CSV has the 20 % and 80 %
quantiles beside them. The floor is the time that the inputs and outputs take at the copy bandwidth
measured in the same run, or that the FLOPs take at PEAK_FLOPS, whichever is longer.
"""

import argparse
import datetime
import fnmatch
import functools
import gc
import importlib
import pkgutil
import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import triton
import triton.testing
from rich.console import Console
from torch import Tensor
from torch.utils.benchmark import Timer

sys.path.append(str(Path(__file__).parents[1]))  # a checkout runs without being installed

import suites
from report import make_table, plot
from suites import Cost, Inputs, Suite, UnavailableError

import torchrec_jagged_attn
from torchrec_jagged_attn.testing import assert_close

MODES = ("forward", "backward", "both")
METRICS = {"time": "ms", "graph_time": "ms", "peak_memory": "MiB"}
COLUMNS = ("suite", "case", "provider", "mode", "metric", "median", "p20", "p80", "unit")
QUANTILES = (0.5, 0.2, 0.8)
PEAK_FLOPS = 790e12  # of a large bf16 matmul on an H200, as measured through torch


def load_suites() -> dict[str, Suite]:
    """Every suite under ``suites/``, by name."""
    names = [m.name for m in pkgutil.iter_modules(suites.__path__) if not m.name.startswith("_")]
    return {name: importlib.import_module(f"suites.{name}").SUITE for name in names}


def time_ms(call: Callable[[], object], device: str, quick: bool) -> list[float]:
    """Median, 20 % and 80 % quantile of the milliseconds that ``call`` takes."""
    if device == "cuda":
        rep = 20 if quick else 100
        return triton.testing.do_bench(call, warmup=rep // 4, rep=rep, quantiles=QUANTILES)
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    seconds = timer.blocked_autorange(min_run_time=0.01 if quick else 0.2).times
    return (np.quantile(seconds, QUANTILES) * 1e3).tolist()


def copy_bandwidth(device: str, quick: bool) -> float:
    """Bytes per second of a large copy on ``device``, reads and writes counted."""
    source = torch.rand((2**30 if device == "cuda" else 2**26) // 4, device=device)
    target = torch.empty_like(source)
    median, *_ = time_ms(lambda: target.copy_(source), device, quick)
    return 2 * source.nbytes / (median / 1e3)


def peak_memory_mib(call: Callable[[], object]) -> float:
    """CUDA memory that one ``call`` takes on top of what is allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def make_step(mode: str, call: Callable[[], Tensor], x: Inputs, grad_out: Tensor) -> Callable:
    """The function to time: ``forward`` keeps nothing for backward, ``both`` does both."""
    leaves = list(x.leaves.values())
    if mode == "forward":
        return torch.no_grad()(call)
    if mode == "both":
        return lambda: torch.autograd.grad(call(), leaves, grad_out)
    out = call()
    return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)


def capture(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call of ``step``, on the current stream, which is not the default one."""
    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    return graph


def outcome(call: Callable[[], Tensor], x: Inputs, grad_out: Tensor) -> dict[str, Tensor]:
    """The output of ``call`` and the gradient of every leaf."""
    out = call()
    grads = torch.autograd.grad(out, list(x.leaves.values()), grad_out.to(out.dtype))
    named = {f"gradient of {name}": grad for name, grad in zip(x.leaves, grads, strict=True)}
    return {"out": out.detach(), **named}


def check(actual: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    """Raise AssertionError if an output or gradient is wrong, by the one tolerance rule."""
    for name, tensor in actual.items():
        assert_close(tensor, exact[name], plain[name], gradient=name != "out", name=name)


def describe(error: Exception) -> str:
    """Why a provider has no figure, in one line."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, UnavailableError | ImportError):
        return f"not run here: {first_line}"
    if isinstance(error, AssertionError):
        return f"WRONG, so not timed: {first_line}"
    return f"FAILED: {type(error).__name__}: {first_line}"


def release(device: str) -> None:
    """Free what the last provider left. Raises if it left the CUDA context broken."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def floor_ms(costs: list[Cost], device: str, bandwidth: float) -> float:
    """The milliseconds below which no implementation runs."""
    arithmetic = sum(cost.flops for cost in costs) / PEAK_FLOPS if device == "cuda" else 0.0
    return max(sum(cost.bytes for cost in costs) / bandwidth, arithmetic) * 1e3


def run_case(
    suite: Suite,
    x: Inputs,
    providers: list[str],
    args: argparse.Namespace,
    bandwidth: float,
    add: Callable[[str, str, str, list[float]], None],
) -> dict[str, str]:
    """Check and time ``providers``; ``add(provider, mode, metric, figures)`` takes the figures.

    Returns:
        Why, for each provider that lacks figures.
    """
    costs = suite.cost(x)
    for mode in args.modes:
        parts = ("forward", "backward") if mode == "both" else (mode,)
        floor = floor_ms([costs[part] for part in parts], args.device, bandwidth)
        add("floor", mode, "time", [floor] * 3)

    double = x.double()
    with torch.no_grad():
        shape = suite.plain(x).shape
    grad_out = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    grad_out = grad_out.to(args.device, x.case.dtype)
    exact = outcome(functools.partial(suite.oracle, double), double, grad_out)
    plain = outcome(functools.partial(suite.plain, x), x, grad_out)
    del double

    reasons = {}
    for provider in providers:
        release(args.device)
        try:
            call = suite.providers[provider](x)
            check(outcome(call, x, grad_out), exact, plain)
            for mode in args.modes:
                step = make_step(mode, call, x, grad_out)
                add(provider, mode, "time", time_ms(step, args.device, args.quick))
                if args.device == "cuda":
                    add(provider, mode, "peak_memory", [peak_memory_mib(step)] * 3)
                if args.graph:
                    graph = capture(step)
                    add(provider, mode, "graph_time", time_ms(graph.replay, "cuda", args.quick))
        except Exception as error:  # one provider never stops the others
            reasons[provider] = describe(error)
        call = step = graph = None  # their tensors are freed before the next provider
    release(args.device)
    return reasons


def select(what: str, patterns: list[str], names: Iterable[str]) -> list[str]:
    """The ``names`` that match any of ``patterns``; each pattern must match one."""
    names = list(dict.fromkeys(names))
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise SystemExit(f"no {what} is called {pattern!r}; there are: {', '.join(names)}")
    return [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]


def parse(known: dict[str, Suite], argv: list[str] | None) -> argparse.Namespace:
    """The command line, its names checked and their ``*`` expanded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def names(text: str) -> list[str]:
        return text.split(",")

    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("suites", nargs="*", default=["*"], metavar="SUITE", help="default: all")
    add("--cases", type=names, default=["*"], metavar="A,B*", help="default: all")
    add("--providers", type=names, default=["*"], metavar="A,B*", help="default: all")
    add("--modes", type=names, default=["*"], metavar="A,B*", help=f"of {', '.join(MODES)}")
    add("--device", choices=("cuda", "cpu"), default=default_device, help="default: cuda if there")
    add("--graph", action="store_true", help="time CUDA graphs, too")
    add("--csv", type=Path, metavar="FILE", help="write the figures here")
    add("--plot", type=Path, metavar="DIR", help="draw a picture of each suite here")
    add("--list", action="store_true", help="print suites, cases and providers, and stop")
    add("--quick", action="store_true", help="tiny inputs and short runs, to see that all works")
    args = parser.parse_args(argv)

    args.suites = select("suite", args.suites, known)
    chosen = [known[name] for name in args.suites]
    args.cases = select("case", args.cases, [c for s in chosen for c in s.cases])
    args.providers = select("provider", args.providers, [p for s in chosen for p in s.providers])
    args.modes = select("mode", args.modes, MODES)
    if args.device == "cpu" and not (args.quick or args.list):
        parser.error("the cases are too large for a CPU: add --quick")
    if args.device == "cpu" and args.graph:
        parser.error("--graph needs --device cuda")
    return args


def main(argv: list[str] | None = None, known: dict[str, Suite] | None = None) -> int:
    """Run the command line ``argv`` over the suites ``known``; 1 if one of ours failed."""
    known = load_suites() if known is None else known
    args = parse(known, argv)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    if args.list:
        for suite in (known[name] for name in args.suites):
            console.print(suite.name)
            console.print("  cases:    ", ", ".join(suite.cases))
            console.print("  providers:", ", ".join(suite.providers))
        return 0

    stamp = {
        "gpu": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "torchrec_jagged_attn": torchrec_jagged_attn.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    rows: list[dict] = []
    ours_failed = False
    # One stream for all: a graph cannot capture the default one, nor a backward that began there.
    stream = torch.cuda.Stream() if args.device == "cuda" else None
    try:
        with torch.cuda.stream(stream):
            bandwidth = copy_bandwidth(args.device, args.quick)
            console.print(", ".join(f"{key} {value}" for key, value in stamp.items()))
            console.print(f"copy {bandwidth / 1e12:.3g} TB/s, reads and writes counted")
            for suite in (known[name] for name in args.suites):
                for name in (case for case in args.cases if case in suite.cases):
                    case = suite.cases[name]
                    if args.quick:
                        name = f"{name}-quick"
                        case = replace(case, batch_size=6, max_length=min(case.max_length, 40))
                    first = len(rows)

                    def add(provider, mode, metric, figures, suite=suite.name, case=name):
                        values = (suite, case, provider, mode, metric, *figures, METRICS[metric])
                        rows.append(dict(zip(COLUMNS, values, strict=True)) | stamp)

                    x = suite.inputs(case, args.device)
                    console.print(
                        f"\n{suite.name} {name}: B={case.batch_size} T={case.num_targets} "
                        f"H={case.num_heads} D={case.width} N={int(x.offsets[-1])} "
                        f"L≤{x.max_length} {case.lengths} {case.dtype}"
                    )
                    providers = [p for p in args.providers if p in suite.providers]
                    reasons = run_case(suite, x, providers, args, bandwidth, add)
                    console.print(make_table(rows[first:]))
                    for provider, reason in reasons.items():
                        console.print(f"{provider}: {reason}", markup=False)
                        is_ours = provider.startswith("ours")
                        ours_failed |= is_ours and not reason.startswith("not run")
    finally:  # what was measured is kept, also after Ctrl-C
        frame = pd.DataFrame(rows, columns=[*COLUMNS, *stamp])
        if args.csv:
            args.csv.parent.mkdir(parents=True, exist_ok=True)
            frame.to_csv(args.csv, index=False)
        if args.plot and rows:
            plot(frame, args.plot)
    return int(ours_failed)


if __name__ == "__main__":
    raise SystemExit(main())
