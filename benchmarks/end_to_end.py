"""Time whole training steps of a DLRM whose histories are pooled by ours, by peers, or by a sum.

    python benchmarks/end_to_end.py --means 50,200,1000,4000 --gpus 1 --csv end_to_end.csv
    python benchmarks/end_to_end.py --search --csv search.csv   # how long, how many fit in memory
    python benchmarks/end_to_end.py --quality data/ml-1m --csv quality.csv
    python benchmarks/end_to_end.py --quick --host              # where the host's time goes

``DistributedModelParallel``, fused RowWiseAdagrad, ``TrainPipelineSparseDist``; on GPUs NCCL,
autocast and lookups in bf16. A batch has 26 pooled features of one id, an item and its histories,
whose lengths are log-normal and clipped at four times their mean. Without a GPU, sizes are tiny.
Some providers, which --help lists, are rungs of a ladder, each with one optimization more.

Output and gradients of each attention are first held against fp64. A step's time is the median of
rounds, in which providers take turns. Peak memory has the tables in it. Then a window is profiled:
GPU busy is the part of a step in which anything runs on the GPU, host the rest of the step, and the
GPU's time is split by kernels: those launched inside of the attention, those of lookups by their
names, of communication, copies, and the dense rest.

All providers of a mean are timed in one process, on the same tables. What stands in the CSV is not
measured again. --search tries each size in a process of its own: it doubles, then bisects to 10 %.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import gc
import importlib.metadata
import itertools
import json
import logging
import multiprocessing
import os
import platform
import re
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):  # TorchRec and FBGEMM say much about themselves
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)

import pandas as pd
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import JaggedTensor

sys.path.append(str(Path(__file__).parents[1]))  # a checkout runs without being installed
sys.path.append(str(Path(__file__).parents[1] / "examples"))

from end_to_end_models import (
    CLIP,
    LADDER,
    PROVIDERS,
    Sizes,
    check_attentions,
    in_a_line,
    make_batches,
    make_model,
    make_pipeline,
    share_tables,
)
from end_to_end_quality import BATCH as BATCH_OF_CURVES
from end_to_end_quality import WIDTH as WIDTH_OF_CURVES
from end_to_end_quality import curve

import torchrec_jagged_attn

REPLAY = "TORCHREC_JAGGED_ATTN_REPLAY"
NUM_BATCHES = 8  # which steps go through again and again
BATCHES = {50: 16384, 200: 8192, 1000: 4096, 4000: 2048}
"""Samples of a step, unless --batches says so: of a mean, or of the next smaller one."""
QUICK = Sizes(5, 16, features=3, feature_rows=40, item_rows=60, width=16, heads=2,
              dense=(16,), over=(16, 1))  # fmt: skip
STEPS_TO_PROFILE = 5
OUT_OF_MEMORY = "out of memory"
MAX_PARTS = 30  # of the host's time, which are shown
SEARCHED = ("padded", "padded-din", "linear-varlen", "ours", "ours-single-lookup", "sum")
"""What --search tries, unless --providers says so."""
SAME = ("padded", "linear-varlen", "ours-explicit", "ours")
"""What --quality trains, unless --providers says so: one function, computed in several ways."""
CLOSE = 1.1
"""Between the largest size that fits and the smallest tried that does not."""
PARTS = ("lookups", "attention", "dense", "communication", "copies")
LABELS = ("suite", "case", "provider", "mode", "metric", "median", "p20", "p80", "unit", "note")
CONFIG = ("batch", "histories", "width", "table_rows", "skew", "gpus", "recency_bias",
          "dense_layers", "backward_in")  # fmt: skip
MEASURED = ("rows_per_sample", "gpu", "torch", "torchrec", "torchrec_jagged_attn", "replays",
            "date")  # fmt: skip
NOTHING = {"median": 0, "p20": 0, "p80": 0, "unit": ""}
FORM = {"index": False, "na_rep": "nan"}
LOOKUP = re.compile(
    "embedding|rowwise_adagrad|radix|jagged|cumsum|lengths|bounds_check|linearize|permute|"
    "long_segments|expand_into|block_bucketize|keyed|scan",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
        steps: of a round, at most.
        rounds: whose median is a step's time.
        round_s: seconds of a round, which may then have fewer steps.
        warmup: steps before.
        deadline: when to begin no other provider, as ``time.time()``.
    """

    steps: int = 20
    rounds: int = 5
    round_s: float = 0.4
    warmup: int = 10
    recency_bias: bool = False
    cuda_graph: bool = False
    one_thread: bool = False
    host: bool = False
    deadline: float = float("inf")


class Trace:
    """What ran on a GPU, from the trace events that ``torch.profiler`` exports.

    Attributes:
        busy_us: microseconds in which anything ran.
        parts_us: of each of ``PARTS``, those of its kernels.
    """

    def __init__(self, events: list[dict[str, Any]]) -> None:
        ran = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        marks: dict[Any, list[tuple[float, float]]] = collections.defaultdict(list)
        launches = {}
        for event in events:
            category = event.get("cat")
            if category == "user_annotation" and event["name"] == MARK:
                marks[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            elif category in ("cuda_runtime", "cuda_driver"):
                launches[event.get("args", {}).get("correlation")] = event
        self.busy_us = end = 0.0
        for event in sorted(ran, key=lambda event: event["ts"]):
            last = event["ts"] + event["dur"]
            self.busy_us += max(0.0, last - max(event["ts"], end))
            end = max(end, last)
        self.parts_us = dict.fromkeys(PARTS, 0.0)
        self.kernels_us: collections.Counter[tuple[str, str]] = collections.Counter()
        for event in ran:
            launch = launches.get(event.get("args", {}).get("correlation"))
            spans = marks[launch["tid"]] if launch else ()
            inside = any(first <= launch["ts"] <= last for first, last in spans)
            part = part_of(event["name"], event["cat"], inside)
            self.parts_us[part] += event["dur"]
            self.kernels_us[part, event["name"]] += event["dur"]


def part_of(name: str, category: str, in_attention: bool) -> str:
    """One of ``PARTS``: what a kernel, or a copy, of that name is for."""
    if "nccl" in name.lower():
        return "communication"
    if in_attention:
        return "attention"
    if category != "kernel":
        return "copies"
    return "lookups" if LOOKUP.search(name) else "dense"


MARK = "attention of end_to_end"


class _Ends(torch.autograd.Function):
    """The inputs of an attention: their gradients are the last that its backward makes."""

    @staticmethod
    def forward(ctx, marked: Marked, *inputs: Tensor):
        ctx.marked = marked
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        ctx.marked.backward_mark.__exit__(None, None, None)
        return None, *grads


class _Begins(torch.autograd.Function):
    """The output of an attention: its backward begins with the gradient of it."""

    @staticmethod
    def forward(ctx, marked: Marked, out: Tensor):
        ctx.marked = marked
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.marked.backward_mark = record_function(MARK)
        ctx.marked.backward_mark.__enter__()
        return None, grad


class Marked(nn.Module):
    """An attention whose forward and backward are marked in a profile."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, target: Tensor, history: JaggedTensor, *rest: Any) -> Tensor:
        with record_function(MARK):
            target, rows = _Ends.apply(self, target, history.values())
            history = JaggedTensor(rows, lengths=history.lengths(), offsets=history.offsets())
            return _Begins.apply(self, self.attention(target, history, *rest))


@contextlib.contextmanager
def marked_attentions(model: nn.Module) -> Iterator[None]:
    """While it is open, all attentions of ``model`` are :class:`Marked`."""
    lists = [m.attentions for m in model.modules() if isinstance(m, POOLING)]
    for attentions in lists:
        for i, attention in enumerate(attentions):
            attentions[i] = Marked(attention)
    yield
    for attentions in lists:
        for i, marked in enumerate(attentions):
            attentions[i] = marked.attention


POOLING = torchrec_jagged_attn.modules.pooling.TargetAttentionPooling


def host_parts(step: Callable[[], object], steps: int) -> pd.DataFrame:
    """Host microseconds of a step by part, the profiler's own among them.

    Parts are what TorchRec's pipeline and autograd call so, and lie within each other.
    """
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        for _ in range(steps):
            step()
    calls, host_us = collections.Counter(), collections.Counter()
    for event in trace.key_averages():
        if event.key.startswith(("##", "autograd::engine", "Optimizer")):
            part = re.sub(
                r"^autograd::engine::evaluate_function: |#| \d+ ##$", "", event.key
            ).strip()
            calls[part] += event.count / steps
            host_us[part] += event.cpu_time_total / steps
    frame = pd.DataFrame({"calls": calls, "host_us": host_us})
    return frame.sort_values("host_us", ascending=False).head(MAX_PARTS)


class Training:
    """The training of a model with one provider.

    Args:
        known: tables that it shares with other trainings, see :func:`share_tables`; none if not
            given.

    Attributes:
        times: milliseconds of a step, of each round.
    """

    def __init__(
        self,
        name: str,
        sizes: Sizes,
        device: torch.device,
        options: Options,
        known: dict[tuple, Tensor] | None = None,
        num_batches: int = NUM_BATCHES,
    ) -> None:
        self.name, self.sizes, self.options = name, sizes, options
        self.device, self.on_gpu = device, device.type == "cuda"
        before = torch.cuda.memory_allocated() if self.on_gpu else 0
        batches = make_batches(sizes, num_batches, device, dist.get_rank())
        lengths = [b.sparse_features.lengths()[-sizes.histories * sizes.batch :] for b in batches]
        self.rows_per_sample = int(torch.cat(lengths).sum()) / len(batches) / sizes.batch
        torch.manual_seed(0)
        provider = PROVIDERS[name]
        model = make_model(provider, sizes, options.recency_bias)
        self.pipeline = make_pipeline(
            provider, model, sizes.batch, device, cuda_graph=options.cuda_graph
        )
        shared = 0 if known is None else share_tables(self.pipeline._model, known)
        self.batches: Iterator[Batch] = itertools.cycle(batches)
        self.times: list[float] = []
        for _ in range(options.warmup):
            self.step()
        self.synchronize()
        self.own_bytes = shared + (torch.cuda.memory_allocated() - before if self.on_gpu else 0)
        self.steps = self._steps_of_round()

    def step(self) -> Tensor:
        """One step; its loss."""
        with torch.autocast("cuda", torch.bfloat16) if self.on_gpu else contextlib.nullcontext():
            return self.pipeline.progress(self.batches)[0]

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def time_round(self) -> None:
        """Adds to ``times``."""
        self.step()  # what the one before left in the caches is none of its time
        self.times.append(self._time(self.steps))

    def peak_mib(self) -> float:
        """Without what the other trainings hold."""
        others = torch.cuda.memory_allocated() - self.own_bytes
        torch.cuda.reset_peak_memory_stats()
        for _ in range(NUM_BATCHES):
            self.step()
        self.synchronize()
        return (torch.cuda.max_memory_allocated() - others) / 2**20

    def trace(self) -> Trace:
        """Of ``STEPS_TO_PROFILE`` steps, on this rank."""
        with marked_attentions(self.pipeline._model):
            self.step()
            self.synchronize()
            activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
            with profile(activities=activities if self.on_gpu else activities[:1]) as trace:
                for _ in range(STEPS_TO_PROFILE):
                    self.step()
                self.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            trace.export_chrome_trace(str(file))
            return Trace(json.loads(file.read_text())["traceEvents"])

    def figures(self) -> Iterator[dict[str, Any]]:
        """Rows of the CSV, with metric, quantiles and unit."""
        p20, _, _, p80 = statistics.quantiles(self.times, n=5, method="inclusive")
        median = statistics.median(self.times)
        samples = self.sizes.batch * dist.get_world_size() * 1e3

        def row(metric: str, unit: str, *quantiles: float) -> dict[str, Any]:
            values = quantiles * 3 if len(quantiles) == 1 else quantiles
            return {
                "metric": metric,
                **dict(zip(("median", "p20", "p80"), values, strict=True)),
                "unit": unit,
            }

        yield row("time", "ms", median, p20, p80)
        yield row("throughput", "samples/s", samples / median, samples / p80, samples / p20)
        if not self.on_gpu:
            return
        yield row("peak_memory", "MiB", self.peak_mib())
        trace = self.trace()
        busy = trace.busy_us / STEPS_TO_PROFILE / 1e3
        yield row("gpu_busy", "ms", busy)
        yield row("host", "ms", max(0.0, median - busy))
        for part, us in trace.parts_us.items():
            yield row(f"gpu_{part}", "ms", us / STEPS_TO_PROFILE / 1e3)
        if self.options.host and dist.get_rank() == 0:
            for (part, kernel), us in trace.kernels_us.most_common(MAX_PARTS):
                print(f"{self.name}: {us / STEPS_TO_PROFILE:.0f} µs, {part}, {kernel[:100]}")

    def _steps_of_round(self) -> int:
        ms = torch.tensor(self._time(2), device=self.device)
        dist.broadcast(ms, 0)
        return max(2, min(self.options.steps, int(self.options.round_s * 1e3 / ms.item())))

    def _time(self, steps: int) -> float:
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.synchronize()
        return (time.perf_counter() - start) / steps * 1e3


@contextlib.contextmanager
def process_group(rank: int, ranks: int, port: int) -> Iterator[torch.device]:
    """Of NCCL with a GPU for each rank, or of gloo where there is no GPU."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank,
                            world_size=ranks, timeout=timeout)  # fmt: skip
    try:
        yield device
    finally:
        gc.collect()  # sharded models lie in reference cycles
        dist.destroy_process_group()


def stamp() -> dict[str, str]:
    """What figures were measured with."""
    on_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "torch": torch.__version__,
        "torchrec": importlib.metadata.version("torchrec"),
        "torchrec_jagged_attn": torchrec_jagged_attn.__version__,
        "replays": os.environ.get(REPLAY, "1"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def labels_of(sizes: Sizes, options: Options, gpus: int) -> dict[str, Any]:
    """Which case it is: what tells measurements of one provider apart."""
    return {
        "suite": "end_to_end",
        "case": f"mean-{sizes.mean}" + (f"-{gpus}-gpus" if gpus > 1 else ""),
        "mode": "step",
        **{name: getattr(sizes, name) for name in CONFIG[:5]},
        "gpus": gpus,
        "recency_bias": options.recency_bias,
        "dense_layers": "CUDA graphs, fused Adam" if options.cuda_graph else "eager",
        "backward_in": "the caller's thread" if options.one_thread else "autograd's thread",
    }


class Results:
    """A CSV, to which rows are added as soon as they are known."""

    def __init__(self, csv: Path) -> None:
        self.csv = csv
        self.columns = [*LABELS, *CONFIG, *MEASURED]

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Writes ``rows`` at the end."""
        frame = pd.DataFrame([{"note": "", **row} for row in rows], columns=self.columns)
        is_new = not self.csv.exists()
        frame.to_csv(self.csv, mode="a", header=is_new, float_format="%.5g", **FORM)

    def drop(self, labels: dict[str, Any], providers: list[str]) -> None:
        """Takes out the rows of ``providers`` that have ``labels``."""
        if self.csv.exists():
            rows = self.of(labels)
            rows = rows[rows["provider"].isin(providers)]
            self.of({}).drop(rows.index).to_csv(self.csv, **FORM)

    def of(self, labels: dict[str, Any]) -> pd.DataFrame:
        """The rows that have ``labels``."""
        frame = pd.DataFrame(columns=self.columns)
        if self.csv.exists():
            frame = pd.read_csv(self.csv, dtype={"note": str})
            frame["note"] = frame["note"].fillna("")
        for name, value in labels.items():
            frame = frame[frame[name] == value]
        return frame


def is_out_of_memory(error: Exception) -> bool:
    """Whether a GPU lacked memory, whoever says so."""
    return isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY in str(error).lower()


def reason_of(error: Exception) -> str:
    """Why something was not measured, in a line."""
    return OUT_OF_MEMORY if is_out_of_memory(error) else in_a_line(error)


def measure(
    rank: int, ranks: int, port: int, names: list[str], sizes: Sizes, options: Options, csv: Path
) -> None:
    """Adds figures of providers to the CSV; their rounds take turns.

    Profiles come last: what they have hooked into CUDA stays there, and slows down what follows.
    """
    with (
        process_group(rank, ranks, port) as device,
        torch.autograd.set_multithreading_enabled(not options.one_thread),
    ):
        label = {**labels_of(sizes, options, ranks), **stamp()}

        def add(name: str, rows: list[dict[str, Any]]) -> None:
            if rank == 0:
                Results(csv).add([{**label, "provider": name, **row} for row in rows])

        failed = check_attentions(sizes, device, names, PROVIDERS)
        trainings, known = [], {}
        for name in names:
            if not all_ranks(time.time() < options.deadline, device):
                print(f"{name}: not measured, the time is up", flush=True)
                continue
            if name not in failed:
                try:
                    trainings.append(Training(name, sizes, device, options, known))
                except Exception as error:  # whatever this machine's FBGEMM has not
                    if ranks > 1 and is_out_of_memory(error):
                        raise  # the others wait in vain
                    failed[name] = reason_of(error)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if failed.get(name) == OUT_OF_MEMORY:
                held = torch.cuda.memory_allocated() / 2**30
                failed[name] += f", of which other providers held {held:.1f} GiB"
            if name in failed:
                add(name, [{"metric": "refused", **NOTHING, "note": failed[name]}])
                print(f"{name}: not measured, {failed[name]}", flush=True)
        gc.collect()
        gc.freeze()  # the models of the others are no garbage, and take long to look through
        for _ in range(options.rounds):
            for training in trainings:
                training.time_round()
        for training in trainings:
            label["rows_per_sample"] = training.rows_per_sample
            add(training.name, list(training.figures()))
        for training in trainings if options.host else ():
            parts = host_parts(training.step, options.steps)
            if rank == 0:
                print(f"{training.name}:\n{parts.to_string(float_format='%.1f')}", flush=True)
        gc.unfreeze()
        trainings.clear()


def all_ranks(here: bool, device: torch.device) -> bool:
    """Whether it is true on all ranks."""
    there = torch.tensor(float(here), device=device)
    dist.all_reduce(there, dist.ReduceOp.MIN)
    return bool(there.item())


def train_losses(
    rank: int, ranks: int, port: int, names: list[str], sizes: Sizes, steps: int
) -> dict[str, list[float]]:
    """Losses of the first steps of each provider, each with tables of its own."""
    with process_group(rank, ranks, port) as device:
        losses = {}
        for name in names:
            training = Training(name, sizes, device, Options(warmup=0))
            losses[name] = [training.step().item() for _ in range(steps)]
            del training
            gc.collect()
        return losses


def try_size(
    rank: int, ranks: int, port: int, name: str, sizes: Sizes, options: Options
) -> dict[str, Any]:
    """Peak MiB of some steps; or 0, and a note why the size cannot be trained."""
    peak, note = 0.0, ""
    with process_group(rank, ranks, port) as device:
        try:
            training = Training(name, sizes, device, replace(options, warmup=3), None, 2)
            peak = training.peak_mib()
        except Exception as error:  # any limit ends the search, and the CSV says which
            note = reason_of(error)
        return {"median": peak, "p20": peak, "p80": peak, "note": note, **stamp()}


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


class Workers:
    """Processes of a task each, one for each rank; meanwhile, those of the next task import."""

    def __init__(self, ranks: int) -> None:
        method = "spawn" if torch.cuda.is_available() else "forkserver"
        self.ranks = ranks
        self.pool = multiprocessing.get_context(method).Pool(2 * ranks, maxtasksperchild=1)

    def run(self, task: Callable[..., Any], *args: Any, timeout_s: float = 590) -> Any:
        """What ``task(rank, ranks, port, *args)`` returns on the first rank."""
        with socket.socket() as any_port:
            any_port.bind(("127.0.0.1", 0))
            port = any_port.getsockname()[1]
        ranks = range(self.ranks)
        results = [self.pool.apply_async(task, (r, self.ranks, port, *args)) for r in ranks]
        of_first, *_ = [result.get(timeout_s) for result in results]
        return of_first

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.terminate()


def compare(args: argparse.Namespace, options: Options, csv: Path) -> None:
    """Measures what the CSV lacks: a process for each size, and for calls with replays or not."""
    results = Results(csv)
    for replays in (True, False):
        names = [name for name in args.providers if PROVIDERS[name].replays == replays]
        if not names:
            continue
        value = os.environ.get(REPLAY, "1") if replays else "0"
        with environment(REPLAY, value), Workers(args.gpus) as workers:
            for sizes in args.sizes:
                labels = labels_of(sizes, options, args.gpus)
                stand = set() if args.again else {*results.of(labels)["provider"]}
                missing = [name for name in names if name not in stand]
                if not missing:
                    continue
                what = f"{labels['case']}, batch {sizes.batch}: {', '.join(missing)}"
                if time.time() > options.deadline:
                    print(f"{what}: not measured, the time is up", flush=True)
                    continue
                print(what, flush=True)
                results.drop(labels, missing)
                groups = collections.deque([missing])
                while groups and time.time() < options.deadline:
                    group = groups.popleft()
                    try:
                        workers.run(measure, group, sizes, options, csv)
                    except Exception as error:  # what fails alone leaves the others their turn
                        print(f"{', '.join(group)}: failed, {in_a_line(error)}", flush=True)
                        stand = {*results.of(labels)["provider"]}
                        groups += [[n] for n in group if n not in stand and len(group) > 1]


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """An environment variable, for what is started inside."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def search(args: argparse.Namespace, options: Options, csv: Path) -> None:
    """The longest histories and the largest batches of each provider, from the first size on."""
    with Workers(args.gpus) as workers:
        for name in args.providers:
            for field in ("mean", "batch"):
                one = Search(workers, Results(csv), options, name, args.sizes[0], field)
                try:
                    one.run()
                except TimeIsUpError:
                    print(f"{name}: the largest {field} is not known, the time is up", flush=True)


class TimeIsUpError(Exception):
    """``--limit-s`` has passed."""


class Search:
    """Of the largest mean, or batch, that a provider trains; trials that the CSV has stand.

    Args:
        field: of ``first``, which varies.
    """

    def __init__(
        self,
        workers: Workers,
        results: Results,
        options: Options,
        name: str,
        first: Sizes,
        field: str,
    ) -> None:
        self.workers, self.results, self.options = workers, results, options
        self.name, self.first, self.field = name, first, field
        self.trials: dict[int, dict[str, Any]] = {}

    def run(self) -> None:
        """Adds the trials, and what they found.

        Raises:
            TimeIsUpError: before it was found.
        """
        best = largest(self.fits, getattr(self.first, self.field))
        of_field = {
            "mean": ("longest_history", "rows", CLIP),
            "batch": ("largest_batch", "samples", 1),
        }
        metric, unit, factor = of_field[self.field]
        found = {**self._labels(best), "metric": metric}
        if self.results.of(found).empty:
            beyond = min(size for size in self.trials if size > best)
            trial = self.trials[max(best, min(self.trials))]
            quantiles = dict.fromkeys(("median", "p20", "p80"), best * factor)
            note = f"{beyond * factor}: {self.trials[beyond]['note']}"
            self.results.add([{**trial, **found, **quantiles, "unit": unit, "note": note}])

    def fits(self, size: int) -> bool:
        """Whether it can be trained."""
        trial = {**self._labels(size), "metric": "trial"}
        rows = self.results.of(trial)
        if rows.empty:
            if time.time() > self.options.deadline:
                raise TimeIsUpError
            sizes = replace(self.first, **{self.field: size})
            tried = self.workers.run(try_size, self.name, sizes, self.options)
            self.results.add([{**trial, "unit": "MiB", **tried}])
            rows = self.results.of(trial)
            peak = tried["note"] or f"{tried['median']:.0f} MiB"
            print(f"{self.name}: {self.field} {size}: {peak}", flush=True)
        self.trials[size] = rows.iloc[-1].to_dict()
        return self.trials[size]["note"] == ""

    def _labels(self, size: int) -> dict[str, Any]:
        sizes = replace(self.first, **{self.field: size})
        labels = labels_of(sizes, self.options, self.workers.ranks)
        return {**labels, "provider": self.name}


def compare_curves(args: argparse.Namespace, options: Options, csv: Path) -> None:
    """Trains each provider on data with something to learn, from the same weights."""
    results = Results(csv)
    with Workers(args.gpus) as workers:
        for name in args.providers:
            labels = {"suite": "end_to_end_quality", "provider": name, "gpus": args.gpus}
            stand = results.of(labels)
            last = f"{Path(args.quality).name}-{args.epochs}.0"
            if (stand["case"] == last).any() and not args.again:
                continue
            if time.time() > options.deadline:
                print(f"{name}: not trained, the time is up", flush=True)
                continue
            try:
                workers.run(train_curve, name, args.quality, args.epochs, options, csv)
            except Exception as error:  # what cannot run here leaves the others their turn
                print(f"{name}: not trained, {in_a_line(error)}", flush=True)


def train_curve(
    rank: int,
    ranks: int,
    port: int,
    name: str,
    data: str,
    epochs: int,
    options: Options,
    csv: Path,
) -> None:
    """Adds losses, NE and AUC of a provider to the CSV, once all is trained."""
    rows = []
    with process_group(rank, ranks, port) as device:
        for point in curve(PROVIDERS[name], data, epochs, device):
            case = f"{Path(data).name}-{point.epoch:.1f}"
            label = {"suite": "end_to_end_quality", "case": case, "provider": name, "gpus": ranks,
                     "batch": BATCH_OF_CURVES // ranks, "width": WIDTH_OF_CURVES}  # fmt: skip
            for (mode, metric), value in point.figures.items():
                quantiles = dict.fromkeys(("median", "p20", "p80"), value)
                unit = metric.upper() if metric != "loss" else "nats"
                rows.append({**label, "mode": mode, "metric": metric, "unit": unit, **quantiles})
            if rank == 0:
                print(f"{name}, epoch {point.epoch:.1f}: {point}", flush=True)
        if rank == 0:
            results = Results(csv)
            results.drop({"suite": "end_to_end_quality", "gpus": ranks}, [name])
            results.add([{**row, **stamp()} for row in rows])


def print_curves(frame: pd.DataFrame, console: Console) -> None:
    """A table of NE in test, by the part of training that is done."""
    frame = frame[(frame["mode"] == "test") & (frame["metric"] == "ne")]
    of = frame.pivot_table(index="case", columns="provider", values="median", sort=False)
    table = Table("NE in test, epoch", *of.columns, box=None)
    for case, row in of.iterrows():
        table.add_row(str(case), *(f"{x:.4f}" for x in row))
    console.print(table)


def print_results(frame: pd.DataFrame, console: Console) -> None:
    """Tables for each case: figures of a step, and where the GPU's time goes."""
    columns = {
        "step": ("time", "gpu_busy", "host", "peak_memory", "throughput", "× padded"),
        "GPU": tuple(f"gpu_{part}" for part in PARTS),
    }
    for (case, batch), part in frame.groupby(["case", "batch"], sort=False):
        of = part.drop_duplicates(["provider", "metric"], keep="last")
        of = of.pivot(index="provider", columns="metric", values="median")
        if "throughput" not in of:
            continue
        of = of.reindex([name for name in PROVIDERS if name in of.index]).astype(float)
        of["× padded"] = of["throughput"] / of["throughput"].get("padded", float("nan"))
        for title, names in columns.items():
            shown = of.reindex(columns=names).dropna(how="all")
            if shown.empty:
                continue
            heads = [name.removeprefix("gpu_").replace("_", " ") for name in names]
            table = Table("provider", *heads, title=f"{case}, batch {batch}: {title}", box=None)
            for name, row in shown.iterrows():
                table.add_row(str(name), *("–" if pd.isna(x) else f"{x:.4g}" for x in row))
            console.print(table)
        steps = of["time"].dropna()
        rungs = [name for name in LADDER if name in steps]
        if len(rungs) > 1:
            gains = (f"{b} × {steps[a] / steps[b]:.2f}" for a, b in itertools.pairwise(rungs))
            console.print(f"ladder: {rungs[0]}, {', '.join(gains)}\n")


def print_search(frame: pd.DataFrame, console: Console) -> None:
    """What --search found."""
    table = Table("provider", "longest history", "largest batch", box=None)
    found = frame[frame["metric"].isin(["longest_history", "largest_batch"])]
    of = found.drop_duplicates(["provider", "metric"], keep="last")
    of = of.pivot(index="provider", columns="metric", values="median")
    for name, row in of.reindex(columns=["longest_history", "largest_batch"]).iterrows():
        table.add_row(str(name), *("–" if pd.isna(size) else f"{size:.0f}" for size in row))
    console.print(table)


def numbers(text: str) -> list[int]:
    """Positive numbers, with commas between them."""
    values = [int(word) for word in text.split(",")]
    if min(values) < 1:
        raise ValueError
    return values


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    width = max(map(len, PROVIDERS))
    known = [f"  {name:{width}}  {provider.does}" for name, provider in PROVIDERS.items()]
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["providers:", *known, f"ladder: {', '.join(LADDER)}"]),
    )
    # fmt: off
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, metavar="NAME",
                        help="all by default; see below")
    parser.add_argument("--means", type=numbers, help="of lengths; 50,200,1000,4000 by default")
    parser.add_argument("--batches", type=numbers, help="samples of a step, one for each mean")
    parser.add_argument("--gpus", type=int, default=1, help="ranks; without a GPU, processes")
    parser.add_argument("--csv", type=Path, help="what stands there is not measured again")
    parser.add_argument("--again", action="store_true", help="measure what stands there, too")
    parser.add_argument("--limit-s", type=float, default=float("inf"),
                        help="seconds after which nothing new begins")
    parser.add_argument("--search", action="store_true",
                        help="the longest history, and the largest batch, that fit in memory; "
                             "from the first of --means on, 1000 by default")
    parser.add_argument("--quality", nargs="?", const="planted", metavar="DATA",
                        help="losses, NE and AUC from the same weights, at each tenth of an "
                             "epoch, on planted data or a folder of MovieLens-1M")
    parser.add_argument("--epochs", type=int, default=1, help="of --quality")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; always so without a GPU")
    for name in ("histories", "features", "feature_rows", "item_rows", "width", "heads"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="see Sizes")
    parser.add_argument("--skew", type=float, help="of ids; 1 is none")
    parser.add_argument("--steps", type=int, default=20, help="of a round, at most")
    parser.add_argument("--rounds", type=int, default=5, help="whose median is a step's time")
    parser.add_argument("--round-s", type=float, default=0.4, help="seconds of a round, at most")
    parser.add_argument("--warmup", type=int, default=10, help="steps that are not timed")
    parser.add_argument("--recency-bias", action="store_true",
                        help="attentions of ours have it; peers cannot")
    parser.add_argument("--one-thread", action="store_true",
                        help="backward runs in the caller's thread, not in one of autograd's own")
    parser.add_argument("--cuda-graph", action="store_true",
                        help="dense layers are CUDA graphs, and Adam one kernel, in all models")
    parser.add_argument("--host", action="store_true",
                        help="print the host's time by part, and kernels by time")
    # fmt: on
    args = parser.parse_args(argv)
    on_gpu = torch.cuda.is_available()
    if (args.cuda_graph or args.search) and not on_gpu:
        parser.error(f"--{'search' if args.search else 'cuda-graph'} needs a GPU, got none")
    if on_gpu and args.gpus > torch.cuda.device_count():
        parser.error(f"--gpus must be at most {torch.cuda.device_count()}, got {args.gpus}")
    for name, least in (("gpus", 1), ("epochs", 1), ("rounds", 2), ("steps", 2), ("warmup", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(args, name)}")
    is_quick = args.quick or not on_gpu
    means = args.means or ([QUICK.mean] if is_quick else [1000] if args.search else [*BATCHES])
    batches = args.batches or [
        QUICK.batch
        if is_quick
        else BATCHES[max(m for m in BATCHES if m <= max(mean, min(BATCHES)))]
        for mean in means
    ]
    if len(batches) != len(means):
        parser.error(f"--batches must be one for each of {means}, got {batches}")
    given = {
        name: getattr(args, name)
        for name in ("histories", "features", "feature_rows", "item_rows", "width", "heads", "skew")
        if getattr(args, name) is not None
    }
    base = QUICK if is_quick else Sizes(0, 0)
    args.sizes = [
        replace(base, mean=mean, batch=batch, **given)
        for mean, batch in zip(means, batches, strict=True)
    ]
    by_default = SEARCHED if args.search else SAME if args.quality else PROVIDERS
    args.providers = args.providers or [*by_default]
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    options = Options(
        steps=args.steps,
        rounds=args.rounds,
        round_s=args.round_s,
        warmup=args.warmup,
        recency_bias=args.recency_bias,
        cuda_graph=args.cuda_graph,
        one_thread=args.one_thread,
        host=args.host,
        deadline=time.time() + args.limit_s,
    )
    with tempfile.TemporaryDirectory() as folder:
        csv = (args.csv or Path(folder, "results.csv")).resolve()
        measure_all, print_all = compare, print_results
        if args.search:
            measure_all, print_all = search, print_search
        elif args.quality:
            measure_all, print_all = compare_curves, print_curves
        measure_all(args, options, csv)
        print_all(Results(csv).of({}), Console())


if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["end_to_end_models", "torchrec_jagged_attn", "pandas"])
    main()
