"""Check and time the package's functions against their peers.

    python benchmarks/run.py --list                    # suites; --list SUITE for its cases
    python benchmarks/run.py target_attention --cases 'rank-1k*' --graph --csv out.csv
    python benchmarks/run.py serving --cases 'serving-2*'
    python benchmarks/run.py --device cpu              # the small cases
    python benchmarks/run.py --device cpu --quick      # every case, made tiny

For each case of a suite, every provider's output and gradients are first compared with an fp64
oracle by the tolerance rule of ``tests/tolerance.py``. A provider that fails, or cannot run on this
machine, is not timed, and the reason is printed. Times are medians; the CSV also has the 20 % and
80 % quantiles. The provider "floor" is the roofline: the time of copying the inputs and outputs at
the bandwidth measured in the same run, or of the FLOPs at PEAK_FLOPS, whichever is longer. Products
of fp32 are exact unless --tf32 is given, for all providers and for the tolerance. --host times the
host without waiting for the GPU, with backward in autograd's thread and in the caller's thread.
"""

import argparse
import fnmatch
import functools
import gc
import importlib
import pkgutil
import sys
import textwrap
import timeit
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, whatever is installed
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import suites
from options import writable_file
from stamps import stamp
from suites import MODES, Cost, Inputs, PreparedCall, Suite, UnavailableError

from tests.cases import Case
from tests.rounding import RoundingErrors
from tests.tolerance import assert_close

QUICK_REPEATS = 2
MAX_REPEATS = 500  # enough for a stable median of calls that take microseconds
METRICS = {
    "time": "ms",
    "graph_time": "ms",
    "host_time": "ms",
    "host_time_one_thread": "ms",
    "peak_memory": "MiB",
    "operands": "MiB",
}
LABELS = ("suite", "case", "provider", "mode", "metric", "median", "p20", "p80", "unit")
QUANTILES = (0.5, 0.2, 0.8)
PEAK_FLOPS = 790e12  # of a large bf16 matmul in PyTorch on an H200


def load_suites() -> dict[str, Suite]:
    """Return the suites under ``suites/`` by name."""
    names = [m.name for m in pkgutil.iter_modules(suites.__path__) if not m.name.startswith("_")]
    return {name: importlib.import_module(f"suites.{name}").SUITE for name in names}


def time_ms(call: Callable[[], object], device: str, quick: bool) -> list[float]:
    """Return the median, 20 % and 80 % quantile of the time of ``call`` in milliseconds."""
    if device == "cuda":
        return np.quantile(_event_times_ms(call, 20 if quick else 100), QUANTILES).tolist()
    if quick:
        seconds = timeit.repeat(call, repeat=QUICK_REPEATS, number=1)
    else:
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        seconds = timer.blocked_autorange(min_run_time=0.2).times
    return (np.quantile(seconds, QUANTILES) * 1e3).tolist()


def _event_times_ms(call: Callable[[], object], budget_ms: float) -> list[float]:
    """Return the times of as many calls as take ``budget_ms``: at least ten, or five if slow.

    Before each call, the L2 cache is filled with unrelated data by reads, as in a model.
    ``triton.testing.do_bench`` fills it by writes, whose write-back delays the call by 10 µs on an
    H200.
    """
    evict = _evict()
    call()
    repeats = 5
    while True:
        spans = []
        for _ in range(repeats):
            evict()
            spans.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            spans[-1][0].record()
            call()
            spans[-1][1].record()
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) for begin, end in spans]
        if repeats > 5 or sum(times) > 2 * budget_ms:
            return times
        repeats = max(10, min(MAX_REPEATS, int(budget_ms / max(np.median(times), 1e-3))))


@functools.cache
def _evict() -> Callable[[], object]:
    """Return a function that fills the L2 cache by reading."""
    other = torch.ones(2**28 // 4, dtype=torch.int32, device="cuda")
    return functools.partial(torch.amax, other)


def host_time_ms(call: Callable[[], object], quick: bool) -> list[float]:
    """Return the median and quantiles of the host time of ``call`` in milliseconds.

    Few calls are made between two synchronizations, so that the launch queue is never full.
    """
    number, times = 20, []
    for _ in range(QUICK_REPEATS if quick else 15):
        torch.cuda.synchronize()
        times.append(timeit.timeit(call, number=number) / number * 1e3)
    torch.cuda.synchronize()
    return np.quantile(times, QUANTILES).tolist()


def copy_bandwidth(device: str, quick: bool) -> float:
    """Return the bytes per second of a large copy on ``device``, counting reads and writes."""
    source = torch.rand((2**30 if device == "cuda" else 2**26) // 4, device=device)
    target = source.clone()
    median, *_ = time_ms(lambda: target.copy_(source), device, quick)
    return 2 * source.nbytes / (median / 1e3)


def peak_memory_mib(call: Callable[[], object]) -> float:
    """Return the peak of CUDA memory allocated by ``call`` in MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def make_step(mode: str, call: Callable[[], Tensor], x: Inputs, grad_out: Tensor) -> Callable:
    """Return the function to time; ``forward`` runs in inference mode."""
    leaves = list(x.leaves.values())
    if mode == "forward":
        return torch.inference_mode()(call)
    if mode == "both":
        return lambda: torch.autograd.grad(call(), leaves, grad_out)
    out = call()
    return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)


def capture(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture a call of ``step`` on the current stream, which must not be the default stream."""
    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    return graph


def make_grad_out(out: Tensor, x: Inputs) -> Tensor:
    """Return a gradient of ``out`` with a fixed seed, rounded to the dtype of the case."""
    generator = torch.Generator(out.device).manual_seed(2)
    grad_out = torch.randn(out.shape, generator=generator, device=out.device)
    return grad_out.to(x.case.dtype).to(out)


def outcome(
    call: Callable[[], Tensor] | PreparedCall, x: Inputs, modes: Iterable[str]
) -> dict[str, Tensor]:
    """Return the output of ``call`` and, if ``modes`` have a backward, the gradients of leaves."""
    prepared = as_prepared(call, x)
    if set(modes) <= {"forward"}:
        with torch.no_grad():
            return {"out": prepared.restore("out", prepared.call())}
    out = prepared.call()
    restored = prepared.restore("out", out.detach())
    grad_out = prepared.prepare("out", make_grad_out(restored, x))
    grads = torch.autograd.grad(out, list(prepared.leaves.values()), grad_out)
    named = {
        f"gradient of {name}": prepared.restore(name, grad)
        for name, grad in zip(x.leaves, grads, strict=True)
    }
    return {"out": restored, **named}


def as_prepared(call: Callable[[], Tensor] | PreparedCall, x: Inputs) -> PreparedCall:
    """Return a provider's call as a ``PreparedCall``, by default with the leaves of ``x``."""
    return call if isinstance(call, PreparedCall) else PreparedCall(call, x.leaves)


def expected_outcome(suite: Suite, x: Inputs) -> tuple[dict[str, Tensor], RoundingErrors]:
    """Return the outcome of the oracle in fp64 and the error bounds for the dtype of ``x``."""
    double = x.double()
    with RoundingErrors(x.case.dtype) as errors:
        return outcome(functools.partial(suite.oracle, double), double, suite.modes), errors


def check(actual: dict[str, Tensor], exact: dict[str, Tensor], errors: RoundingErrors) -> None:
    """Raise AssertionError if an output or gradient exceeds its tolerance."""
    for name, tensor in actual.items():
        assert_close(tensor, exact[name], errors, name=name)


def describe(error: Exception) -> str:
    """Return in one line why a provider is not timed."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, UnavailableError | ImportError):
        return f"not run here: {first_line}"
    if isinstance(error, AssertionError):
        return f"WRONG, so not timed: {first_line}"
    return f"FAILED: {type(error).__name__}: {first_line}"


def release(device: str) -> None:
    """Free the memory of the last provider. Raises if the CUDA context is broken."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def roofline_ms(cost: Cost, device: str, bandwidth: float) -> float:
    """Return the minimum time of a call in milliseconds."""
    arithmetic = cost.flops / PEAK_FLOPS if device == "cuda" else 0.0
    return max(cost.bytes / bandwidth, arithmetic) * 1e3


def minimum_costs(suite: Suite, x: Inputs, modes: list[str]) -> dict[str, Cost]:
    """Return the minimum cost of each of ``modes`` that the suite has."""
    costs = suite.cost(x)
    costs["both"] = costs["forward"] + costs["backward"]
    return {mode: costs[mode] for mode in modes if mode in suite.modes}


def shape_columns(x: Inputs) -> dict[str, object]:
    """Return the columns with the shape of a case; ``fill`` is the share of rows if padded."""
    num_rows = int(x.offsets[-1])
    return {
        "B": x.case.batch_size,
        "T": x.case.num_targets,
        "H": x.case.num_heads,
        "D": x.case.width,
        "L": x.max_length,
        "N": num_rows,
        "fill": round(num_rows / (x.case.batch_size * x.max_length), 3),
        "dtype": str(x.case.dtype).removeprefix("torch."),
    }


def shrink(case: Case) -> Case:
    """Return a tiny case of the same kind."""
    length, targets = min(case.max_length, 40), min(case.num_targets, 20)
    return replace(case, batch_size=6, max_length=length, num_targets=targets)


def run_case(
    suite: Suite, name: str, x: Inputs, args: argparse.Namespace, bandwidth: float, rows: list[dict]
) -> dict[str, str]:
    """Check and time the providers of ``suite`` on ``x``, and append the figures to ``rows``.

    Returns:
        The reason by provider that was not timed.
    """
    costs = minimum_costs(suite, x, args.modes)
    shape = shape_columns(x)

    def add(provider: str, mode: str, metric: str, figures: list[float]) -> None:
        labels = (suite.name, name, provider, mode, metric, *figures, METRICS[metric])
        work = {"bytes": costs[mode].bytes, "flops": costs[mode].flops}
        rows.append(dict(zip(LABELS, labels, strict=True)) | shape | work)

    for mode, cost in costs.items():
        add("floor", mode, "time", [roofline_ms(cost, args.device, bandwidth)] * 3)

    expected = expected_outcome(suite, x)

    def checked(prepared: PreparedCall) -> Tensor:
        """Check output and gradients, and return the gradient of the output."""
        call_inputs = prepared.inputs or x
        exact, errors = expected_outcome(suite, call_inputs) if prepared.inputs else expected
        actual = outcome(prepared, call_inputs, suite.modes)
        check(actual, exact, errors)
        return prepared.prepare("out", make_grad_out(actual["out"], call_inputs))

    reasons = {}
    for provider in (p for p in suite.providers if p in args.providers):
        release(args.device)
        try:
            prepared = as_prepared(suite.providers[provider](x), x)
            grad_out = checked(prepared)
            steps = {
                mode: make_step(mode, prepared.call, replace(x, leaves=prepared.leaves), grad_out)
                for mode in costs
            }
            for mode, step in steps.items():
                add(provider, mode, "time", time_ms(step, args.device, args.quick))
                if args.device == "cuda":
                    add(provider, mode, "peak_memory", [peak_memory_mib(step)] * 3)
                    operands = sum(leaf.nbytes for leaf in prepared.leaves.values()) / 2**20
                    add(provider, mode, "operands", [operands] * 3)
            for mode, step in steps.items() if args.graph else ():
                graph = capture(step)
                add(provider, mode, "graph_time", time_ms(graph.replay, "cuda", args.quick))
            for mode, step in steps.items() if args.host else ():
                add(provider, mode, "host_time", host_time_ms(step, args.quick))
                with torch.autograd.set_multithreading_enabled(False):
                    one_thread = host_time_ms(step, args.quick)
                add(provider, mode, "host_time_one_thread", one_thread)
        except Exception as error:  # a failure does not affect other providers
            reasons[provider] = describe(error)
        # Free the tensors before the next provider.
        prepared = grad_out = steps = step = graph = None
    release(args.device)
    return reasons


def make_table(rows: list[dict]) -> str:
    """Return a table of figures, speedups over the best peer and shares of the roofline."""
    frame = pd.DataFrame(rows)
    lines = dict.fromkeys(zip(frame["mode"], frame["provider"], strict=True))
    medians = frame.pivot(index=["mode", "provider"], columns="metric", values="median")
    medians = medians.loc[sorted(lines, key=lambda line: [*frame["mode"].unique()].index(line[0]))]
    names = medians.index.get_level_values("provider")
    table = pd.DataFrame(index=medians.index)
    for metric in [name for name in METRICS if name in medians and METRICS[name] == "ms"]:
        best = medians.loc[~names.str.startswith(("ours", "floor")), metric].groupby("mode").min()
        times = medians[metric]
        table[metric] = times
        table[f"{metric}, × peer"] = (1 / times[names != "floor"]).mul(best, level="mode")
        if not metric.startswith("host"):  # the roofline is of the GPU
            roofline = medians["time"].xs("floor", level="provider")
            table[f"{metric}, of roofline"] = (1 / times).mul(roofline, level="mode")
    if "peak_memory" in medians:
        table["MiB"] = medians["peak_memory"]
    return table.dropna(axis=1, how="all").to_string(float_format="{:.4g}".format, na_rep="–")


def select(what: str, patterns: list[str], names: Iterable[str]) -> list[str]:
    """Return the ``names`` that match any of ``patterns``; each pattern must match one."""
    names = list(dict.fromkeys(names))
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise SystemExit(f"no {what} is called {pattern!r}; there are: {', '.join(names)}")
    return [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]


def print_names(suites: list[Suite], *, all_names: bool) -> None:
    """Print each suite with its number of cases, or with all names that options accept."""
    for suite in suites:
        print(f"{suite.name:24} {suite.measures:49} {len(suite.cases):4}")
        for what in ("cases", "providers", "modes") if all_names else ():
            names = textwrap.wrap(" ".join(getattr(suite, what)), 80, break_on_hyphens=False)
            print(f"\n{what}:", *names, sep="\n")
    if not all_names:
        print("Right column: number of cases; --list SUITE prints them; --help prints the options")


def parse(known: dict[str, Suite], argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line, check its names and expand ``*``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def names(text: str) -> list[str]:
        return text.split(",")

    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("suites", nargs="*", metavar="SUITE", help="default: all")
    add("--cases", type=names, metavar="A,B*", help="default: those for the device")
    add("--providers", type=names, default=["*"], metavar="A,B*", help="default: all")
    add("--modes", type=names, default=["*"], metavar="A,B*", help=f"of {', '.join(MODES)}")
    add("--device", choices=("cuda", "cpu"), default=default_device, help="default: cuda if there")
    add("--graph", action="store_true", help="also time CUDA graphs")
    add("--host", action="store_true", help="also time the host without the GPU")
    add("--csv", type=writable_file, metavar="FILE", help="write the figures of each case here")
    add("--tf32", action="store_true", help="products of fp32 may be rounded to TF32")
    add("--list", action="store_true", help="print the suites, or all names of those given")
    add("--quick", action="store_true", help="tiny inputs and short runs, for tests")
    args = parser.parse_args(argv)

    args.overview = args.list and not args.suites
    args.suites = select("suite", args.suites or ["*"], known)
    chosen = [known[name] for name in args.suites]
    args.providers = select("provider", args.providers, [p for s in chosen for p in s.providers])
    args.modes = select("mode", args.modes, [m for s in chosen for m in s.modes])
    cases = {name: case for suite in chosen for name, case in suite.cases.items()}
    any_size = args.quick or args.list
    if args.cases is None:
        on_gpu = args.device == "cuda"
        args.cases = [name for name in cases if any_size or cases[name].large == on_gpu]
    else:
        args.cases = select("case", args.cases, cases)
    too_large = args.device == "cpu" and any(cases[name].large for name in args.cases)
    if not args.cases or (too_large and not any_size):
        parser.error("the cases are too large for a CPU: add --quick")
    if args.device == "cpu" and (args.graph or args.host):
        parser.error("--graph and --host need --device cuda")
    if not args.list and args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device must be cpu here, got 'cuda': PyTorch finds no CUDA device")
    return args


def main(argv: list[str] | None = None, known: dict[str, Suite] | None = None) -> int:
    """Run the command line ``argv`` with the suites ``known``; return 1 if one of ours failed."""
    known = load_suites() if known is None else known
    args = parse(known, argv)
    chosen = [known[name] for name in args.suites]
    if args.list:
        print_names(chosen, all_names=not args.overview)
        return 0

    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    measured = {
        "fp32_products": "tf32" if args.tf32 else "fp32",
        **stamp("triton", device=args.device),
    }
    gc.collect()
    gc.freeze()  # imported objects are not collected again, which takes half a second
    rows: list[dict] = []
    written = 0
    ours_failed = False

    def write() -> None:
        """Append new figures to the CSV."""
        nonlocal written
        if args.csv and rows[written:]:
            args.csv.parent.mkdir(parents=True, exist_ok=True)
            frame = pd.DataFrame(rows[written:]).assign(**measured)
            frame.to_csv(args.csv, mode="a" if written else "w", header=not written, index=False)
            written = len(rows)

    # A graph can capture neither the default stream nor a backward of a forward on it.
    stream = torch.cuda.Stream() if args.device == "cuda" else None
    num_threads = torch.get_num_threads()
    # With tiny inputs, threads mostly wait for each other.
    torch.set_num_threads(1 if args.quick else num_threads)
    try:
        with torch.cuda.stream(stream):
            bandwidth = copy_bandwidth(args.device, args.quick)
            print(", ".join(f"{key} {value}" for key, value in measured.items()))
            print(f"copy {bandwidth / 1e12:.3g} TB/s, reads and writes")
            if args.quick:
                print("quick: tiny inputs in one thread; times are not meaningful")
            for suite in chosen:
                for name in (name for name in args.cases if name in suite.cases):
                    case = suite.cases[name]
                    if args.quick:
                        gc.freeze()  # objects imported by cases
                        name, case = f"{name}-quick", shrink(case)
                    x = suite.inputs(case, args.device)
                    shape = " ".join(f"{key}={value}" for key, value in shape_columns(x).items())
                    print(f"\n{suite.name} {name}: {shape}", flush=True)
                    first = len(rows)
                    reasons = run_case(suite, name, x, args, bandwidth, rows)
                    write()
                    print(make_table(rows[first:]), flush=True)
                    for reason in dict.fromkeys(reasons.values()):
                        lacking = [name for name, text in reasons.items() if text == reason]
                        print(f"{', '.join(lacking)}: {reason}")
                        is_ours = any(name.startswith("ours") for name in lacking)
                        ours_failed |= is_ours and not reason.startswith("not run")
    finally:  # keep figures after Ctrl-C
        torch.set_num_threads(num_threads)
        write()
    return int(ours_failed)


if __name__ == "__main__":
    raise SystemExit(main())
