"""Time whole training steps of a DLRM whose histories are pooled by ours, by peers, or by a sum.

    python benchmarks/end_to_end.py --mean 200 --csv end_to_end.csv
    torchrun --nproc-per-node 2 benchmarks/end_to_end.py --mean 200 --csv end_to_end.csv
    python benchmarks/end_to_end.py --quick                     # tiny; always so without a GPU

``DistributedModelParallel``, fused RowWiseAdagrad, ``TrainPipelineSparseDist``; on GPUs NCCL,
autocast and lookups in bf16. A batch has 26 pooled features of one id, an item and its histories,
whose lengths are log-normal and clipped at four times their mean. With ``--candidates 32``, so many
samples are candidates of one request, and have its histories and features. Some providers are rungs
of a ladder, each with one optimization more. Adam is for all else than the tables. On several
ranks, ``ours-balanced`` has the samples of the others, shared out such that all ranks have as many
history rows in a step.

Output and gradients of each attention are first held against fp64. All providers go through the
same batches, and look up the same tables. Peak memory has the tables in it, but not what the other
providers hold. A step's time is the median of rounds, in which providers take turns: each batch
once without being timed, then twice. Then some steps are profiled. GPU busy is the part of a step
in which anything runs on the GPU, host is what remains of the step. The GPU's time is split by
kernels: those launched inside of the attention, those of lookups by their names, communication,
copies, and all that is dense, optimizer included. Communication waits for the slowest rank. History
traffic of a step is counted: the ids of histories that lookups are sent, the rows that they give to
attention, those of all keys where it reads them by index, and the gradients that come back.

What stands in the CSV is not measured again. A provider that ran out of memory beside the others is
left for the next call of the same command, which then measures it alone, and the exit status is 1.
On several GPUs it ends the run, and nothing of that run is written: name fewer providers.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # TorchRec and FBGEMM say much about themselves
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torchrec.datasets.utils import Batch

sys.path.append(str(Path(__file__).parents[1]))  # a checkout runs without being installed
sys.path.append(str(Path(__file__).parents[1] / "examples"))

from end_to_end_models import (
    CLIP,
    Sizes,
    make_batches,
    make_lengths,
    make_model,
    make_pipeline,
    make_selection,
    process_group,
    share_tables,
)
from end_to_end_peers import LADDER, PROVIDERS, check_attentions, in_a_line, replays_of
from end_to_end_results import SIZES, add, ladder_table, matching, measured_with, step_table
from end_to_end_trace import Trace, attentions_of, marked_attentions
from options import HelpFormatter, number, writable_file

from torchrec_jagged_attn.replay import calls

LACKS_MEMORY = ("out of memory", "alloc_failed")  # of CUDA, and of its libraries
BATCHES = {50: 16384, 200: 8192, 1000: 4096, 4000: 2048}
"""Samples of a step, unless --batch says so: of this mean, or of the next smaller one."""
QUICK = Sizes(5, 16, features=3, feature_rows=40, item_rows=60, width=32, heads=2,
              dense=(16,), over=(16, 1))  # fmt: skip
NUM_BATCHES = 8  # which steps go through again and again
WARMUP = 3  # steps before all else
STEPS_OF_ROUND = 2 * NUM_BATCHES
STEPS_TO_PROFILE = NUM_BATCHES


class Training:
    """The training of a model with one provider.

    Args:
        known: tables that it shares with other trainings, see :func:`share_tables`; none if not
            given.

    Attributes:
        rows_per_sample: of its histories, in the mean.
        peak_mib: memory of a step, without what the other trainings hold; 0 without a GPU.
        times: milliseconds of a step, of each round.
    """

    def __init__(
        self,
        name: str,
        sizes: Sizes,
        device: torch.device,
        *,
        known: dict[tuple, Tensor] | None = None,
        cuda_graph: bool = False,
        num_batches: int = NUM_BATCHES,
        warmup: int = WARMUP,
    ) -> None:
        self.name, self.sizes, self.on_gpu = name, sizes, device.type == "cuda"
        self.provider = PROVIDERS[name]
        before = torch.cuda.memory_allocated() if self.on_gpu else 0
        batches = make_batches(sizes, num_batches, device, dist.get_rank(), self.provider.batches)
        lengths = [b.sparse_features[key].lengths() for b in batches for key in sizes.history_keys]
        self.rows_per_sample = sizes.histories * torch.cat(lengths).double().mean().item()
        torch.manual_seed(0)
        model = make_model(self.provider, sizes)
        self.pipeline = make_pipeline(
            self.provider, model, sizes.batch, device, cuda_graph=cuda_graph
        )
        shared = 0 if known is None else share_tables(self.pipeline._model, known)
        self.made = batches
        self.batches: Iterator[Batch] = itertools.cycle(batches)
        self.times: list[float] = []
        self.peak_mib = 0.0
        self.run(warmup)
        if self.on_gpu and warmup:
            torch.cuda.reset_peak_memory_stats()
            self.run(num_batches)
            self.peak_mib = (torch.cuda.max_memory_allocated() - before + shared) / 2**20

    def step(self) -> Tensor:
        """One step; its loss."""
        autocast = torch.autocast("cuda", torch.bfloat16, enabled=self.on_gpu)
        with autocast, replays_of(self.provider):
            return self.pipeline.progress(self.batches)[0]

    def run(self, steps: int) -> float:
        """Seconds of so many steps, to the end of what they do on the GPU."""
        synchronize = torch.cuda.synchronize if self.on_gpu else contextlib.nullcontext
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize()
        return time.perf_counter() - start

    def time_round(self) -> None:
        """Adds to ``times``."""
        if self.on_gpu:
            torch.cuda.empty_cache()  # what the one before left there is none of its time
        self.run(NUM_BATCHES)
        self.times.append(self.run(STEPS_OF_ROUND) / STEPS_OF_ROUND * 1e3)

    def history_traffic(self) -> float:
        """Bytes of a step on this rank, in the mean of all batches; 0 without an attention."""
        counted: list[int] = []

        def count(_module: nn.Module, inputs: tuple, _keywords: dict[str, Any]) -> None:
            rows = inputs[1].values()
            counted.append(rows.nbytes)
            rows.register_hook(lambda grad: counted.append(grad.nbytes))

        attentions = [*itertools.chain.from_iterable(attentions_of(self.pipeline._model))]
        hooks = [x.register_forward_pre_hook(count, with_kwargs=True) for x in attentions]
        self.run(len(self.made))
        for hook in hooks:
            hook.remove()
        keys = self.sizes.history_keys if attentions else []
        selection = make_selection(self.provider, self.sizes)
        looked_up = [selection(batch.sparse_features) for batch in self.made]
        ids = [features[key].values().nbytes for features in looked_up for key in keys]
        return sum(counted + ids) / len(self.made)

    def trace(self, file: Path) -> Trace:
        """Of ``STEPS_TO_PROFILE`` steps, on this rank; written to ``file``, too."""
        with marked_attentions(self.pipeline._model):
            self.run(1)
            activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
            with profile(activities=activities if self.on_gpu else activities[:1]) as trace:
                self.run(STEPS_TO_PROFILE)
        trace.export_chrome_trace(str(file))
        return Trace.read(file)

    def figures(self, traces: Path) -> Iterator[dict[str, Any]]:
        """Rows of the CSV, with metric, quantiles and unit."""
        median, p20, p80 = np.quantile(self.times, (0.5, 0.2, 0.8))
        samples = self.sizes.batch * dist.get_world_size() * 1e3
        yield {"metric": "time", "unit": "ms", "median": median, "p20": p20, "p80": p80}
        yield {"metric": "throughput", "unit": "samples/s", "median": samples / median,
               "p20": samples / p80, "p80": samples / p20}  # fmt: skip
        if traffic := self.history_traffic() / 2**20:
            yield {"metric": "history_traffic", "unit": "MiB", "median": traffic}
        if not self.on_gpu:
            return
        yield {"metric": "peak_memory", "unit": "MiB", "median": self.peak_mib}
        trace = self.trace(traces / f"{self.name}-rank-{dist.get_rank()}.json")
        busy = trace.busy_us / STEPS_TO_PROFILE / 1e3
        yield {"metric": "gpu_busy", "unit": "ms", "median": busy}
        yield {"metric": "host", "unit": "ms", "median": max(0.0, median - busy)}
        for part, us in trace.parts_us.items():
            yield {"metric": f"gpu_{part}", "unit": "ms", "median": us / STEPS_TO_PROFILE / 1e3}


def labels_of(sizes: Sizes, cuda_graph: bool = False) -> dict[str, Any]:
    """Which case it is: what tells measurements of one provider apart."""
    gpus = dist.get_world_size()
    return {
        "suite": "end_to_end",
        "case": "-".join(
            [
                f"mean-{sizes.mean}",
                *([f"candidates-{sizes.candidates}"] if sizes.candidates > 1 else []),
                *([f"features-{sizes.candidate_features}"] if sizes.candidate_features else []),
                *([f"{gpus}-gpus"] if gpus > 1 else []),
            ]
        ),
        "mode": "step",
        **{name: getattr(sizes, name) for name in SIZES},
        "gpus": gpus,
        "dense_layers": "CUDA graphs, fused Adam" if cuda_graph else "eager",
    }


class Measurement:
    """Of providers, side by side; adds their figures to the CSV.

    Args:
        traces: folder for the profiles.

    Attributes:
        left: providers for which there was no memory beside the others.
    """

    def __init__(
        self, sizes: Sizes, device: torch.device, csv: Path, traces: Path, cuda_graph: bool = False
    ) -> None:
        self.sizes, self.device, self.csv, self.traces = sizes, device, csv, traces
        self.cuda_graph = cuda_graph
        self.label = {**labels_of(sizes, cuda_graph), **measured_with()}
        self.trainings: dict[str, Training] = {}
        self.tables: dict[tuple, Tensor] = {}
        self.left: list[str] = []

    def run(self, names: list[str], rounds: int) -> None:
        """Profiles come last: what they hook into CUDA stays there, and slows down what follows."""
        lengths = make_lengths(self.sizes, torch.Generator().manual_seed(1))[:64].to(self.device)
        longest = CLIP * self.sizes.mean
        wrong = check_attentions(names, lengths, self.sizes.width, self.sizes.heads, longest)
        for name in names:
            if name in wrong:
                self.refuse(name, wrong[name])
            else:
                self.attempt(name, self.build)
        for _ in range(rounds):
            for name in [*self.trainings]:
                self.attempt(name, lambda name: self.trainings[name].time_round())
        for name in [*self.trainings]:
            self.attempt(name, self.finish)
        self.trainings.clear()
        clear_memory()

    def attempt(self, name: str, do: Callable[[str], None]) -> None:
        """Does it, or takes the provider out."""
        try:
            do(name)
        except Exception as error:  # whatever a peer, or this machine's FBGEMM, has not
            self.trainings.pop(name, None)
            lacks_memory = any(words in str(error).lower() for words in LACKS_MEMORY)
            if lacks_memory and dist.get_world_size() > 1:
                raise  # the other ranks wait in vain
            if lacks_memory and self.trainings:
                self.left.append(name)
            else:
                self.refuse(name, in_a_line(error))
        if name not in self.trainings:
            clear_memory()

    def build(self, name: str) -> None:
        self.trainings[name] = Training(
            name, self.sizes, self.device, known=self.tables, cuda_graph=self.cuda_graph
        )
        clear_memory()

    def finish(self, name: str) -> None:
        """Writes its figures."""
        self.label["rows_per_sample"] = self.trainings[name].rows_per_sample
        self.write(name, [*self.trainings[name].figures(self.traces)])

    def refuse(self, name: str, reason: str) -> None:
        """Writes why it has no figures."""
        self.write(name, [{"metric": "refused", "median": 0, "note": reason}])

    def write(self, name: str, rows: list[dict[str, Any]]) -> None:
        replays = int(calls.ENABLED and PROVIDERS[name].replays)
        label = {**self.label, "provider": name, "replays": replays}
        if dist.get_rank() == 0:
            add(self.csv, [{**label, **row} for row in rows])


def clear_memory() -> None:
    """Frees what nothing needs of a GPU's memory; sharded models lie in reference cycles.

    Raises:
        RuntimeError: if this process has lost its GPU, as after a wrong address.
    """
    if torch.cuda.is_available():
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # what is left is no garbage, and takes long to look through
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Options from which :func:`sizes_of` makes the sizes."""
    of_sizes = parser.add_argument_group("sizes", "of the model and its batches, see Sizes")
    of_sizes.add_argument("--quick", action="store_true", help="tiny; always so without a GPU")
    of_sizes.add_argument("--mean", type=number(int, 1, 10**6), default=200, help="of lengths")
    of_sizes.add_argument("--batch", type=number(int, 1, 10**6), help="samples of a step and rank")
    of_sizes.add_argument(
        "--candidates",
        type=number(int, 1, 10**6),
        default=Sizes.candidates,
        help="of a request, whose samples they are; a divisor of the batch",
    )
    of_sizes.add_argument(
        "--candidate-features",
        type=number(int, 0, 10**6),
        metavar="N",
        default=Sizes.candidate_features,
        help="features not of requests",
    )
    for name in ("histories", "features", "feature_rows", "item_rows", "width", "heads"):
        option = f"--{name.replace('_', '-')}"
        of_sizes.add_argument(option, type=number(int, 1, 10**9), default=getattr(Sizes, name))
    of_sizes.add_argument("--skew", type=number(float, 1, 100), default=Sizes.skew,
                          help="of ids; 1 is none")  # fmt: skip


def sizes_of(args: argparse.Namespace) -> Sizes:
    """Those asked for; without a GPU, or with --quick, ``QUICK`` of as many candidates."""
    of_requests = {name: getattr(args, name) for name in ("candidates", "candidate_features")}
    if args.quick or not torch.cuda.is_available():
        return replace(QUICK, **of_requests)
    batch = args.batch or BATCHES[max(m for m in BATCHES if m <= max(args.mean, min(BATCHES)))]
    names = ("histories", "features", "feature_rows", "item_rows", "width", "heads", "skew")
    return Sizes(args.mean, batch, **of_requests, **{name: getattr(args, name) for name in names})


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    width = max(map(len, PROVIDERS))
    known = [f"  {name:{width}}  {provider.does}" for name, provider in PROVIDERS.items()]
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=HelpFormatter,
        epilog="\n".join(["providers:", *known, f"ladder: {', '.join(LADDER)}"]),
    )
    # fmt: off
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, metavar="NAME",
                        help="see below; all, if not given, whose batches differ from those of "
                             "others: of one candidate, or on one rank, some do not")
    parser.add_argument("--csv", type=writable_file, help="what stands there is not measured again")
    parser.add_argument("--rounds", type=number(int, 2, 1000), default=7,
                        help="whose median is a step's time")
    parser.add_argument("--cuda-graph", action="store_true",
                        help="dense layers are CUDA graphs, and Adam one kernel, in all models")
    parser.add_argument("--traces", type=Path, help="a folder for the profiles, for Perfetto")
    # fmt: on
    add_sizes(parser)
    args = parser.parse_args(argv)
    sizes = sizes_of(args)
    if sizes.batch % sizes.candidates:
        parser.error(f"--candidates must divide the batch {sizes.batch}, got {sizes.candidates}")
    if sizes.candidate_features > sizes.features:
        parser.error(f"--candidate-features must be at most all {sizes.features} features, got "
                     f"{sizes.candidate_features}")  # fmt: skip
    if args.providers is None:  # where others hold the same as samples, these alone
        forms = {"samples"}
        forms |= {"once", "requests"} if sizes.candidates > 1 else set()
        forms |= {"balanced"} if int(os.environ.get("WORLD_SIZE", "1")) > 1 else set()
        args.providers = [name for name, p in PROVIDERS.items() if p.batches in forms]
    if args.cuda_graph and not torch.cuda.is_available():
        parser.error("--cuda-graph needs a GPU, got none")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    sizes = sizes_of(args)
    with process_group() as device, tempfile.TemporaryDirectory() as folder:
        csv, traces = args.csv or Path(folder, "results.csv"), args.traces or Path(folder)
        traces.mkdir(parents=True, exist_ok=True)
        labels = labels_of(sizes, args.cuda_graph)
        stand = {*matching(csv, labels)["provider"]}
        dist.barrier()  # before anything is added
        missing = [name for name in args.providers if name not in stand]
        measurement = Measurement(sizes, device, csv, traces, args.cuda_graph)
        if missing:
            measurement.run(missing, args.rounds)
        if dist.get_rank() == 0:
            frame = matching(csv, labels)
            print(f"{labels['case']}, batch {sizes.batch}:\n{step_table(frame)}\n")
            print(ladder_table(frame))
        if left := measurement.left:
            print(f"{', '.join(left)}: out of memory beside the others; call this once more")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
