"""Check and time the package's functions against their peers.

    python benchmarks/run.py --list                    # suites; --list SUITE for its cases
    python benchmarks/run.py target_attention --cases 'rank-1k*' --graph --csv out.csv
    python benchmarks/run.py serving --cases 'serving-2*'
    python benchmarks/run.py --device cpu              # the small cases
    python benchmarks/run.py --device cpu --quick      # every case, made tiny

For each case of a suite, every provider's output and gradients are first held against an fp64
oracle by the tolerance rule of ``tests/tolerance.py``. One that fails, or cannot run here, gets a
line that says why, and no figure. Times are medians; the CSV has the 20 % and 80 % quantiles beside
them. The floor is the time that the inputs and outputs take at the copy bandwidth measured in the
same run, or that the FLOPs take at PEAK_FLOPS, whichever is longer. Products of fp32 are exact
unless --tf32 says otherwise, for all providers and for the tolerance. --host times the host alone:
of many calls without a wait for the GPU, with backward in autograd's thread, and in the caller's.
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
from suites import MODES, Cost, Inputs, Relaid, Suite, UnavailableError

from tests.cases import Case
from tests.rounding import RoundingErrors
from tests.tolerance import assert_close

QUICK_REPEATS = 2
MAX_REPEATS = 500  # whose median is steady, also of calls that take microseconds
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
PEAK_FLOPS = 790e12  # of a large bf16 matmul on an H200, as measured through torch


def load_suites() -> dict[str, Suite]:
    """Every suite under ``suites/``, by name."""
    names = [m.name for m in pkgutil.iter_modules(suites.__path__) if not m.name.startswith("_")]
    return {name: importlib.import_module(f"suites.{name}").SUITE for name in names}


def time_ms(call: Callable[[], object], device: str, quick: bool) -> list[float]:
    """Median, 20 % and 80 % quantile of the milliseconds that ``call`` takes."""
    if device == "cuda":
        return np.quantile(_event_times_ms(call, 20 if quick else 100), QUANTILES).tolist()
    if quick:
        seconds = timeit.repeat(call, repeat=QUICK_REPEATS, number=1)
    else:
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        seconds = timer.blocked_autorange(min_run_time=0.2).times
    return (np.quantile(seconds, QUANTILES) * 1e3).tolist()


def _event_times_ms(call: Callable[[], object], budget_ms: float) -> list[float]:
    """Times of each of the calls that take ``budget_ms`` in all, or of ten, or of five slow ones.

    Each finds the L2 cache full of unrelated data, as in a model, but of lines that were read.
    ``triton.testing.do_bench`` leaves written ones, tens of MiB that the call's own traffic must
    wait for: 10 µs on an H200.
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
    """A function that fills the L2 cache by reading."""
    other = torch.ones(2**28 // 4, dtype=torch.int32, device="cuda")
    return functools.partial(torch.amax, other)


def host_time_ms(call: Callable[[], object], quick: bool) -> list[float]:
    """Median and quantiles of the milliseconds after which ``call`` returns; the GPU may go on.

    The calls between two waits are few, so that no queue of launches is ever full.
    """
    number, times = 20, []
    for _ in range(QUICK_REPEATS if quick else 15):
        torch.cuda.synchronize()
        times.append(timeit.timeit(call, number=number) / number * 1e3)
    torch.cuda.synchronize()
    return np.quantile(times, QUANTILES).tolist()


def copy_bandwidth(device: str, quick: bool) -> float:
    """Bytes per second of a large copy on ``device``, reads and writes counted."""
    source = torch.rand((2**30 if device == "cuda" else 2**26) // 4, device=device)
    target = source.clone()
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
        return torch.inference_mode()(call)
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


def make_grad_out(out: Tensor, x: Inputs) -> Tensor:
    """A gradient for ``out``, always the same, that the dtype of the case can represent."""
    generator = torch.Generator(out.device).manual_seed(2)
    grad_out = torch.randn(out.shape, generator=generator, device=out.device)
    return grad_out.to(x.case.dtype).to(out)


def outcome(
    call: Callable[[], Tensor] | Relaid, x: Inputs, modes: Iterable[str]
) -> dict[str, Tensor]:
    """The output of ``call`` and, if ``modes`` have a backward, the gradient of every leaf."""
    own = relaid(call, x)
    if set(modes) <= {"forward"}:
        with torch.no_grad():
            return {"out": own.restore("out", own.call())}
    out = own.call()
    restored = own.restore("out", out.detach())
    grad_out = own.lay("out", make_grad_out(restored, x))
    grads = torch.autograd.grad(out, list(own.leaves.values()), grad_out)
    named = {
        f"gradient of {name}": own.restore(name, grad)
        for name, grad in zip(x.leaves, grads, strict=True)
    }
    return {"out": restored, **named}


def relaid(call: Callable[[], Tensor] | Relaid, x: Inputs) -> Relaid:
    """What a provider made: where it does not say otherwise, it reads the leaves of ``x``."""
    return call if isinstance(call, Relaid) else Relaid(call, x.leaves)


def expected_of(suite: Suite, x: Inputs) -> tuple[dict[str, Tensor], RoundingErrors]:
    """The outcomes of the oracle in fp64, and what errors the dtype of ``x`` allows."""
    double = x.double()
    with RoundingErrors(x.case.dtype) as errors:
        return outcome(functools.partial(suite.oracle, double), double, suite.modes), errors


def check(actual: dict[str, Tensor], exact: dict[str, Tensor], errors: RoundingErrors) -> None:
    """Raise AssertionError if an output or gradient is wrong, by the one tolerance rule."""
    for name, tensor in actual.items():
        assert_close(tensor, exact[name], errors, name=name)


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


def floor_ms(cost: Cost, device: str, bandwidth: float) -> float:
    """The milliseconds below which no implementation runs."""
    arithmetic = cost.flops / PEAK_FLOPS if device == "cuda" else 0.0
    return max(cost.bytes / bandwidth, arithmetic) * 1e3


def costs_of(suite: Suite, x: Inputs, modes: list[str]) -> dict[str, Cost]:
    """What each of ``modes`` that the suite has must do at least."""
    costs = suite.cost(x)
    costs["both"] = costs["forward"] + costs["backward"]
    return {mode: costs[mode] for mode in modes if mode in suite.modes}


def shape_of(x: Inputs) -> dict[str, object]:
    """The columns that say what a case is; ``fill`` is what padding leaves of a padded history."""
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
    """A tiny case of the same kind."""
    length, targets = min(case.max_length, 40), min(case.num_targets, 20)
    return replace(case, batch_size=6, max_length=length, num_targets=targets)


def run_case(
    suite: Suite, name: str, x: Inputs, args: argparse.Namespace, bandwidth: float, rows: list[dict]
) -> dict[str, str]:
    """Check and time the providers of ``suite`` on ``x``; figures go to the end of ``rows``.

    Returns:
        Why, for each provider that lacks figures.
    """
    costs = costs_of(suite, x, args.modes)
    shape = shape_of(x)

    def add(provider: str, mode: str, metric: str, figures: list[float]) -> None:
        labels = (suite.name, name, provider, mode, metric, *figures, METRICS[metric])
        work = {"bytes": costs[mode].bytes, "flops": costs[mode].flops}
        rows.append(dict(zip(LABELS, labels, strict=True)) | shape | work)

    for mode, cost in costs.items():
        add("floor", mode, "time", [floor_ms(cost, args.device, bandwidth)] * 3)

    expected = expected_of(suite, x)

    def checked(own: Relaid) -> Tensor:
        """The gradient of the output of ``own``, which must be right."""
        its = own.inputs or x
        exact, errors = expected_of(suite, its) if own.inputs else expected
        actual = outcome(own, its, suite.modes)
        check(actual, exact, errors)
        return own.lay("out", make_grad_out(actual["out"], its))

    reasons = {}
    for provider in (p for p in suite.providers if p in args.providers):
        release(args.device)
        try:
            own = relaid(suite.providers[provider](x), x)
            of_out = checked(own)
            steps = {
                mode: make_step(mode, own.call, replace(x, leaves=own.leaves), of_out)
                for mode in costs
            }
            for mode, step in steps.items():
                add(provider, mode, "time", time_ms(step, args.device, args.quick))
                if args.device == "cuda":
                    add(provider, mode, "peak_memory", [peak_memory_mib(step)] * 3)
                    operands = sum(leaf.nbytes for leaf in own.leaves.values()) / 2**20
                    add(provider, mode, "operands", [operands] * 3)
            for mode, step in steps.items() if args.graph else ():
                graph = capture(step)
                add(provider, mode, "graph_time", time_ms(graph.replay, "cuda", args.quick))
            for mode, step in steps.items() if args.host else ():
                add(provider, mode, "host_time", host_time_ms(step, args.quick))
                with torch.autograd.set_multithreading_enabled(False):
                    one_thread = host_time_ms(step, args.quick)
                add(provider, mode, "host_time_one_thread", one_thread)
        except Exception as error:  # one provider never stops the others
            reasons[provider] = describe(error)
        own = of_out = steps = step = graph = (
            None  # their tensors are freed before the next provider
        )
    release(args.device)
    return reasons


def make_table(rows: list[dict]) -> str:
    """A line per mode and provider of a case: figures, ratio to the best peer, share of roofline.

    A ratio over 1 is faster than the best peer; the best peer's own is 1.
    """
    frame = pd.DataFrame(rows)
    lines = dict.fromkeys(zip(frame["mode"], frame["provider"], strict=True))
    of = frame.pivot(index=["mode", "provider"], columns="metric", values="median")
    of = of.loc[sorted(lines, key=lambda line: [*frame["mode"].unique()].index(line[0]))]
    names = of.index.get_level_values("provider")
    table = pd.DataFrame(index=of.index)
    for metric in [name for name in METRICS if name in of and METRICS[name] == "ms"]:
        best = of.loc[~names.str.startswith(("ours", "floor")), metric].groupby("mode").min()
        table[metric] = of[metric]
        table[f"{metric}, × peer"] = (1 / of[metric][names != "floor"]).mul(best, level="mode")
        if not metric.startswith("host"):  # the floor is the GPU's
            floors = of["time"].xs("floor", level="provider")
            table[f"{metric}, of floor"] = (1 / of[metric]).mul(floors, level="mode")
    if "peak_memory" in of:
        table["MiB"] = of["peak_memory"]
    return table.dropna(axis=1, how="all").to_string(float_format="{:.4g}".format, na_rep="–")


def select(what: str, patterns: list[str], names: Iterable[str]) -> list[str]:
    """The ``names`` that match any of ``patterns``; each pattern must match one."""
    names = list(dict.fromkeys(names))
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise SystemExit(f"no {what} is called {pattern!r}; there are: {', '.join(names)}")
    return [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]


def print_names(suites: list[Suite], *, all_names: bool) -> None:
    """What each suite measures, and how many cases it has; or all that options may name."""
    for suite in suites:
        print(f"{suite.name:24} {suite.measures:49} {len(suite.cases):4}")
        for what in ("cases", "providers", "modes") if all_names else ():
            names = textwrap.wrap(" ".join(getattr(suite, what)), 80, break_on_hyphens=False)
            print(f"\n{what}:", *names, sep="\n")
    if not all_names:
        print("At the right, how many cases; --list SUITE prints these; --help the options")


def parse(known: dict[str, Suite], argv: list[str] | None) -> argparse.Namespace:
    """The command line, its names checked and their ``*`` expanded."""
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
    add("--graph", action="store_true", help="time CUDA graphs, too")
    add("--host", action="store_true", help="time the host without the GPU, too")
    add("--csv", type=writable_file, metavar="FILE", help="write the figures of each case here")
    add("--tf32", action="store_true", help="products of fp32 may be rounded to TF32")
    add("--list", action="store_true", help="print the suites, or all names of those given")
    add("--quick", action="store_true", help="tiny inputs and short runs, to see that all works")
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
    """Run the command line ``argv`` over the suites ``known``; 1 if one of ours failed."""
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
    gc.freeze()  # what is imported is no garbage, and takes half a second to look through
    rows: list[dict] = []
    written = 0
    ours_failed = False

    def write() -> None:
        """Add the figures to the CSV that it lacks."""
        nonlocal written
        if args.csv and rows[written:]:
            args.csv.parent.mkdir(parents=True, exist_ok=True)
            frame = pd.DataFrame(rows[written:]).assign(**measured)
            frame.to_csv(args.csv, mode="a" if written else "w", header=not written, index=False)
            written = len(rows)

    # One stream for all: a graph cannot capture the default one, nor a backward that began there.
    stream = torch.cuda.Stream() if args.device == "cuda" else None
    num_threads = torch.get_num_threads()
    # Threads only wait for each other where inputs are tiny, and for long where cores are busy.
    torch.set_num_threads(1 if args.quick else num_threads)
    try:
        with torch.cuda.stream(stream):
            bandwidth = copy_bandwidth(args.device, args.quick)
            print(", ".join(f"{key} {value}" for key, value in measured.items()))
            print(f"copy {bandwidth / 1e12:.3g} TB/s, reads and writes counted")
            if args.quick:
                print("quick: tiny inputs in one thread; times show that all works, no more")
            for suite in chosen:
                for name in (name for name in args.cases if name in suite.cases):
                    case = suite.cases[name]
                    if args.quick:
                        gc.freeze()  # nor is what cases import; what else they leave is tiny
                        name, case = f"{name}-quick", shrink(case)
                    x = suite.inputs(case, args.device)
                    shape = " ".join(f"{key}={value}" for key, value in shape_of(x).items())
                    print(f"\n{suite.name} {name}: {shape}", flush=True)
                    first = len(rows)
                    reasons = run_case(suite, name, x, args, bandwidth, rows)
                    write()
                    print(make_table(rows[first:]), flush=True)
                    for reason in dict.fromkeys(reasons.values()):
                        lacking = [name for name, its in reasons.items() if its == reason]
                        print(f"{', '.join(lacking)}: {reason}")
                        is_ours = any(name.startswith("ours") for name in lacking)
                        ours_failed |= is_ours and not reason.startswith("not run")
    finally:  # what was measured is kept, also after Ctrl-C
        torch.set_num_threads(num_threads)
        write()
    return int(ours_failed)


if __name__ == "__main__":
    raise SystemExit(main())
