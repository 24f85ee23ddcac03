"""Time training steps of a DLRM whose histories are pooled by ours, by peers, or by a sum.

    python benchmarks/end_to_end.py --csv end_to_end_graphs.csv
    torchrun --nproc-per-node 2 benchmarks/end_to_end.py --csv end_to_end_graphs.csv
    python benchmarks/end_to_end.py --quick                     # tiny; the default without a GPU

``DistributedModelParallel``, fused RowWiseAdagrad, ``TrainPipelineSparseDist`` or
``TrainPipelineCudaGraph``; on GPUs NCCL, autocast and lookups in bf16. A batch has 26 pooled
features of one id, an item and its histories, whose lengths are log-normal and clipped at four
times their mean. With ``--candidates 32``, each 32 samples are the candidates of one request, and
share its histories and features. On several ranks, the item table and tables of the same lookup are
sharded by row, all others by table. Dense layers have Adam.

Output and gradients of each attention are first compared with fp64. Each provider has a separate
model, which is created once and used for all mean lengths; all have the same batches. The time of a
step is the time of the slowest rank, the median of several rounds. In a round, each model in turn
trains on each batch once without timing, then four times. A ``TrainPipelineCudaGraph`` is created
for each mean length, and all of its timed steps must be replayed. Peak memory, allocated and
reserved, includes the model's tables, but not other models. Only reserved memory includes the
memory of CUDA graphs, and neither includes NCCL's memory.

Bytes sent are the mean over ranks of all collectives in a step, without data that remains on its
rank. Bytes by length are the difference to the same batches with only the newest event of each
history; bytes of rows are the floating-point part of it. Bytes are not counted with a CUDA graph.
Finally, some steps are profiled on each rank. GPU busy is the time in which anything runs on the
first rank's GPU, including collectives that wait for other ranks. The ten slowest kernels are
recorded.

Figures are appended to the CSV at once, and figures in the CSV are not measured again. If a
provider runs out of memory beside other models, it is skipped and the exit status is 1; the next
call of the same command measures it alone. On several GPUs, this ends the run: name fewer
providers.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # silence TorchRec and FBGEMM
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, whatever is installed
sys.path.append(str(Path(__file__).parents[1] / "examples"))

from end_to_end_cases import SHARDINGS, step_case
from end_to_end_models import (
    CLIP,
    Sizes,
    make_batches,
    make_lengths,
    make_model,
    make_pipeline,
    newest_events,
    process_group,
    shard,
)
from end_to_end_peers import PROVIDERS, check_attentions, set_max_length, summarize_error
from end_to_end_results import SIZES, add, matching, measured_with, step_table
from end_to_end_trace import SentBytes, Trace
from figures import OUT_OF_MEMORY_ERRORS
from options import HelpFormatter, number, writable_file

from torchrec_jagged_attn.modules.target_attention_arguments import default_num_heads
from torchrec_jagged_attn.pipeline.train_pipeline import WARM_UP_STEPS

BATCHES = {200: 4096, 1000: 2048, 4000: 512}
"""Default samples per step and rank, by the largest of these mean lengths up to the given one."""
QUICK = Sizes(5, 16, features=3, feature_rows=40, item_rows=60, width=32,
              dense=(16,), over=(16, 1))  # fmt: skip
DEFAULT = ("sum", "sum-graph", "linear-varlen", "ours", "ours-graph", "encoder-graph")
WAYS = ("by_popularity", "fused")  # options in the names of cases
NUM_BATCHES = 4  # batches, used in a cycle
WARMUP = 4  # steps until a pipeline has no earlier batches
STEPS_PER_ROUND = 4 * NUM_BATCHES
STEPS_TO_PROFILE = NUM_BATCHES
KERNELS = 10  # number of recorded kernels


class Training:
    """The training of a model with one provider.

    Args:
        warmup: number of steps after a change of batches.
        sharding: argument of :func:`shard`.

    Attributes:
        rows_per_sample: mean number of history rows per sample.
        times: time of a step in milliseconds, for each round with the current sizes.
        held_bytes: allocated and reserved memory of the model between steps.
    """

    def __init__(
        self,
        name: str,
        sizes: Sizes,
        device: torch.device,
        *,
        warmup: int = WARMUP,
        sharding: str = SHARDINGS[0],
    ) -> None:
        self.name, self.device = name, device
        self.on_gpu, self.provider = device.type == "cuda", PROVIDERS[name]
        self.warmup = warmup + WARM_UP_STEPS * self.provider.graph
        self.sizes: Sizes | None = None
        self.times_by_sizes: dict[Sizes, list[float]] = {}
        before = self.memory()
        torch.manual_seed(0)
        model = make_model(self.provider, sizes)
        self.model, self.optimizer = shard(
            self.provider, model, sizes.batch, device, sharding=sharding
        )
        self.pipeline = self.make_pipeline(sizes)
        self.held_bytes = self.memory() - before
        self.set_sizes(sizes)

    def make_pipeline(self, sizes: Sizes) -> TrainPipelineSparseDist:
        return make_pipeline(
            self.provider, self.model, self.optimizer, self.device, fused=sizes.fused
        )

    def set_sizes(self, sizes: Sizes) -> None:
        """Change the lengths of histories or the number of samples."""
        if sizes == self.sizes:
            return
        held_before = self.memory()
        before = self.sizes or sizes  # the pipeline still has batches of these sizes
        if self.sizes is not None and self.provider.graph:
            self.rebuild_pipeline(sizes)  # for other capacities
        self.sizes, self.times = sizes, self.times_by_sizes.setdefault(sizes, [])
        set_max_length(self.model, CLIP * max(sizes.mean, before.mean))
        by_request = self.provider.by_request
        self.host_batches = make_batches(
            sizes, NUM_BATCHES, self.device, dist.get_rank(), by_request=by_request
        )
        lengths = [
            b.sparse_features[key].lengths()
            for b in self.host_batches
            for key in sizes.history_keys
        ]
        self.rows_per_sample = sizes.histories * torch.cat(lengths).double().mean().item()
        self.set_batches(self.host_batches)
        set_max_length(self.model, CLIP * sizes.mean)
        self.held_bytes += self.memory() - held_before

    def rebuild_pipeline(self, sizes: Sizes) -> None:
        """Train on the remaining batches of the pipeline, and create another pipeline."""
        self.batches = iter(())
        with contextlib.suppress(StopIteration):
            while True:
                self.step()
        self.pipeline.detach()
        self.pipeline = None
        clear_memory()
        self.pipeline = self.make_pipeline(sizes)

    def memory(self) -> Tensor:
        """Return the bytes allocated and reserved by all models; zeros on a CPU."""
        if not self.on_gpu:
            return torch.zeros(2)
        torch.cuda.empty_cache()
        return torch.tensor([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])

    def set_batches(self, batches: list[Batch]) -> None:
        """Change the batches, and train until the pipeline has no earlier ones."""
        self.batches: Iterator[Batch] = itertools.cycle(batches)
        self.run(self.warmup)

    def step(self) -> Tensor:
        """Train one step and return its loss."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.on_gpu):
            return self.pipeline.progress(self.batches)[0]

    def run(self, steps: int) -> float:
        """Return the seconds of ``steps`` steps, including their work on the GPU."""
        synchronize = torch.cuda.synchronize if self.on_gpu else contextlib.nullcontext
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize()
        return time.perf_counter() - start

    def time_round(self) -> None:
        """Time a round and append it to ``times``."""
        if self.on_gpu:
            torch.cuda.empty_cache()  # outside the timed steps
        self.run(NUM_BATCHES)
        dist.barrier()
        with self.replays(STEPS_PER_ROUND):
            seconds = self.reduce_over_ranks(self.run(STEPS_PER_ROUND), dist.ReduceOp.MAX)
        self.times.append(seconds[0] / STEPS_PER_ROUND * 1e3)

    @contextlib.contextmanager
    def replays(self, steps: int) -> Iterator[None]:
        """Check that ``steps`` steps of a ``TrainPipelineCudaGraph`` are replayed."""
        if not self.provider.graph:
            yield
            return
        before = self.pipeline.num_replayed_steps
        yield
        replayed = self.pipeline.num_replayed_steps - before
        if replayed != steps:
            raise RuntimeError(
                f"all {steps} steps must be replayed, got {replayed}; eager steps by reason: "
                f"{dict(self.pipeline.eager_steps)}"
            )

    def reduce_over_ranks(self, values: Any, op: dist.ReduceOp.RedOpType) -> list[float]:
        """Reduce figures over all ranks."""
        figures = torch.atleast_1d(torch.as_tensor(values, dtype=torch.float64).to(self.device))
        dist.all_reduce(figures, op)
        return figures.tolist()

    def sent_bytes(self) -> list[float]:
        """Return the mean over ranks of the bytes of a step: all, by length, and of rows."""
        counted = []
        for batches in (
            [newest_events(batch, self.sizes) for batch in self.host_batches],
            self.host_batches,
        ):
            self.set_batches(batches)
            with SentBytes() as sent:
                self.run(len(batches))
            counted.append((sent.total / len(batches), sent.floats / len(batches)))
        (short, short_floats), (total, floats) = counted
        length = self.rows_per_sample / self.sizes.histories
        share = length / (length - 1)  # bytes are proportional to rows
        figures = [total, (total - short) * share, (floats - short_floats) * share]
        return [
            x / dist.get_world_size() for x in self.reduce_over_ranks(figures, dist.ReduceOp.SUM)
        ]

    def peaks(self) -> list[float]:
        """Return the peaks of allocated and reserved memory in MiB, including tables."""
        others = self.memory() - self.held_bytes
        torch.cuda.reset_peak_memory_stats()
        self.run(NUM_BATCHES)
        peaks = torch.tensor([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
        return self.reduce_over_ranks((peaks - others) / 2**20, dist.ReduceOp.MAX)

    def figures(self) -> Iterator[dict[str, Any]]:
        """Yield rows of the CSV: times, throughput and memory."""
        median, p20, p80 = np.quantile(self.times, (0.5, 0.2, 0.8))
        samples = self.sizes.batch * dist.get_world_size() * 1e3
        yield {"metric": "time", "unit": "ms", "median": median, "p20": p20, "p80": p80}
        yield {"metric": "throughput", "unit": "samples/s", "median": samples / median,
               "p20": samples / p80, "p80": samples / p20}  # fmt: skip
        if self.on_gpu:
            for name, peak in zip(("peak_memory", "peak_reserved"), self.peaks(), strict=True):
                yield {"metric": name, "unit": "MiB", "median": peak}

    def traffic(self) -> Iterator[dict[str, Any]]:
        """Yield rows of the CSV: bytes sent between ranks."""
        if self.provider.graph:  # replayed collectives cannot be counted
            return
        names = ("sent", "sent_by_length", "sent_rows")
        for name, sent in zip(names, self.sent_bytes(), strict=True):
            yield {"metric": name, "unit": "MiB", "median": sent / 2**20}

    def profile(self) -> Iterator[dict[str, Any]]:
        """Yield rows of the CSV: figures of a profile."""
        self.run(1)
        with (
            self.replays(STEPS_TO_PROFILE),
            profile(activities=[ProfilerActivity.CUDA]) as profiled,
        ):
            self.run(STEPS_TO_PROFILE)
        if dist.get_rank() > 0:
            return
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trace.json")
            profiled.export_chrome_trace(str(file))
            trace = Trace(json.loads(file.read_text())["traceEvents"])
        busy = trace.busy_us / STEPS_TO_PROFILE / 1e3
        yield {"metric": "gpu_busy", "unit": "ms", "median": busy}
        share = busy / float(np.median(self.times))
        yield {"metric": "gpu_busy_share", "unit": "of step", "median": share}
        for i, (name, us) in enumerate(itertools.islice(trace.kernels_us.items(), KERNELS), 1):
            yield {"metric": f"kernel_{i}", "unit": "ms", "note": name[:200],
                   "median": us / STEPS_TO_PROFILE / 1e3}  # fmt: skip


def case_labels(sizes: Sizes) -> dict[str, Any]:
    """Return the columns that identify a case."""
    gpus = dist.get_world_size()
    ways = [f"batch-{sizes.batch}"] * (sizes.batch not in (*BATCHES.values(), QUICK.batch))
    ways += [name.replace("_", "-") for name in WAYS if getattr(sizes, name)]
    request_options = (sizes.candidates, sizes.candidate_features)
    return {
        "suite": "end_to_end",
        "case": step_case(sizes.mean, gpus, SHARDINGS[0], *request_options, ways),
        "mode": "step",
        **{name: getattr(sizes, name) for name in SIZES},
        "heads": default_num_heads(sizes.width),
        "gpus": gpus,
    }


class Measurement:
    """Measures providers in turns and appends their figures to the CSV.

    Attributes:
        postponed: providers without enough memory beside the others.
    """

    def __init__(self, device: torch.device, csv: Path) -> None:
        self.device, self.csv = device, csv
        self.trainings: dict[str, Training] = {}
        self.postponed: list[str] = []

    def run(self, missing: dict[Sizes, list[str]], rounds: int) -> None:
        """Measure all providers. Profiles are last, since the profiler slows down later steps.

        Args:
            missing: providers to measure, by sizes.
        """
        sizes, *_ = missing
        lengths = make_lengths(sizes, torch.Generator().manual_seed(1))[:64].to(self.device)
        names = dict.fromkeys(itertools.chain.from_iterable(missing.values()))
        wrong = check_attentions(names, lengths, sizes.width, CLIP * sizes.mean)
        for name in names:
            all_sizes = [sizes for sizes in missing if name in missing[sizes]]
            if name in wrong:
                self.refuse(name, all_sizes, wrong[name])
            else:
                self.attempt(
                    name,
                    all_sizes,
                    lambda name=name, all_sizes=all_sizes: self.build(name, all_sizes[0]),
                )
        for sizes in missing:
            self.time(sizes, missing[sizes], rounds)
        # Start with the last sizes, which are set.
        for sizes in reversed(missing) if self.device.type == "cuda" else ():
            self.for_each_training(
                sizes, missing[sizes], lambda training, sizes=sizes: training.set_sizes(sizes)
            )
            self.for_each_training(sizes, missing[sizes], lambda x: self.write(x, x.profile()))
        self.trainings.clear()
        clear_memory()

    def attempt(self, name: str, all_sizes: list[Sizes], do: Callable[[], None]) -> None:
        """Call ``do``; if it fails, remove the provider."""
        try:
            do()
        except Exception as error:  # peers raise different errors
            self.trainings.pop(name, None)
            is_out_of_memory = any(words in str(error).lower() for words in OUT_OF_MEMORY_ERRORS)
            if is_out_of_memory and dist.get_world_size() > 1:
                raise  # other ranks would wait forever
            if is_out_of_memory and self.trainings:
                self.postponed.append(name)
            else:
                self.refuse(name, all_sizes, summarize_error(error))
        if name not in self.trainings:
            clear_memory()

    def build(self, name: str, sizes: Sizes) -> None:
        self.trainings[name] = Training(name, sizes, self.device)
        clear_memory()

    def for_each_training(
        self, sizes: Sizes, names: list[str], do: Callable[[Training], None]
    ) -> None:
        """Call ``do`` with each training that has not failed."""
        for name in [name for name in names if name in self.trainings]:
            self.attempt(name, [sizes], lambda name=name: do(self.trainings[name]))

    def time(self, sizes: Sizes, names: list[str], rounds: int) -> None:
        """Record all figures except profiles."""
        self.for_each_training(sizes, names, lambda training: training.set_sizes(sizes))
        for _ in range(rounds):
            self.for_each_training(sizes, names, Training.time_round)
        self.for_each_training(
            sizes, names, lambda training: self.write(training, training.figures())
        )
        if dist.get_world_size() > 1:
            self.for_each_training(
                sizes, names, lambda training: self.write(training, training.traffic())
            )

    def refuse(self, name: str, all_sizes: list[Sizes], reason: str) -> None:
        """Record why a provider has no figures."""
        for sizes in all_sizes:
            row = {"metric": "refused", "median": 0, "note": reason}
            self.add(name, sizes, [row])

    def write(self, training: Training, rows: Iterable[dict[str, Any]]) -> None:
        """Record figures of a training."""
        labels = {"rows_per_sample": training.rows_per_sample}
        self.add(training.name, training.sizes, [{**labels, **row} for row in rows])

    def add(self, name: str, sizes: Sizes, rows: list[dict[str, Any]]) -> None:
        label = {**case_labels(sizes), **measured_with(), "provider": name}
        if dist.get_rank() == 0:
            add(self.csv, [{**label, **row} for row in rows])


def clear_memory() -> None:
    """Free GPU memory; sharded models are in reference cycles.

    Raises:
        RuntimeError: the CUDA context is broken, as after an illegal memory access.
    """
    if torch.cuda.is_available():
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # scanning the remaining objects again is slow
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def requested_sizes(args: argparse.Namespace) -> list[Sizes]:
    """Return the requested sizes; without a GPU, or with --quick, ``QUICK``."""
    same = {name: getattr(args, name) for name in ("candidates", "candidate_features", *WAYS)}
    if args.quick or not torch.cuda.is_available():
        return [replace(QUICK, **same)]
    return [
        Sizes(
            mean,
            args.batch or BATCHES[max(m for m in BATCHES if m <= max(mean, min(BATCHES)))],
            **same,
        )
        for mean in args.mean
    ]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    width = max(map(len, PROVIDERS))
    known = [f"  {name:{width}}  {provider.description}" for name, provider in PROVIDERS.items()]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=HelpFormatter, epilog="\n".join(["providers:", *known])
    )
    # fmt: off
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, metavar="NAME",
                        default=DEFAULT, help="see below; by default a selection")
    parser.add_argument("--csv", type=writable_file, help="figures in it are not measured again")
    parser.add_argument("--rounds", type=number(int, 2, 1000), default=5,
                        help="number of rounds, whose median is recorded")
    parser.add_argument("--fused", action="store_true",
                        help="use TrainPipelineFusedSparseDist, which starts lookups earlier")
    group = parser.add_argument_group("sizes", "of the model and its batches, see Sizes")
    count = number(int, 1, 10**6)
    group.add_argument("--quick", action="store_true", help="tiny; the default without a GPU")
    group.add_argument("--mean", nargs="+", type=count, default=[*BATCHES], help="mean lengths")
    group.add_argument("--batch", type=count, help="samples per step and rank")
    group.add_argument("--candidates", type=count, default=Sizes.candidates,
                       help="candidates per request; a divisor of the batch")
    group.add_argument("--candidate-features", type=number(int, 0, 10**6), metavar="N",
                       default=Sizes.candidate_features,
                       help="features that differ between candidates")
    group.add_argument("--by-popularity", action="store_true",
                       help="ids are ordered by popularity, not hashed")
    # fmt: on
    args = parser.parse_args(argv)
    for sizes in requested_sizes(args):
        if sizes.batch % sizes.candidates:
            parser.error(f"--candidates must divide the batch {sizes.batch}, got "
                         f"{sizes.candidates}")  # fmt: skip
        if sizes.candidate_features > sizes.features:
            parser.error(f"--candidate-features must be at most all {sizes.features} features, "
                         f"got {sizes.candidate_features}")  # fmt: skip
    if args.fused and not torch.cuda.is_available():
        parser.error("--fused needs a GPU, got none")
    if args.fused and (graphs := [name for name in args.providers if PROVIDERS[name].graph]):
        parser.error(f"--fused needs providers without a CUDA graph, got {', '.join(graphs)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    with process_group() as device, tempfile.TemporaryDirectory() as folder:
        csv = args.csv or Path(folder, "results.csv")

        def known(sizes: Sizes) -> pd.DataFrame:
            return matching(csv, case_labels(sizes))

        missing = {
            sizes: [name for name in args.providers if name not in {*known(sizes)["provider"]}]
            for sizes in requested_sizes(args)
        }
        dist.barrier()  # all ranks have read the CSV
        measurement = Measurement(device, csv)
        if missing := {sizes: names for sizes, names in missing.items() if names}:
            measurement.run(missing, args.rounds)
        if dist.get_rank() == 0:
            for sizes in requested_sizes(args):
                case = case_labels(sizes)["case"]
                print(f"{case}, batch {sizes.batch}:\n{step_table(known(sizes))}\n")
        if postponed := measurement.postponed:
            print(f"{', '.join(postponed)}: out of memory beside the others; run this again")
    return 1 if postponed else 0


if __name__ == "__main__":
    sys.exit(main())
