"""Time whole training steps of a DLRM whose histories are pooled by ours, by peers, or by a sum.

    python benchmarks/end_to_end.py --csv end_to_end_graphs.csv
    torchrun --nproc-per-node 2 benchmarks/end_to_end.py --csv end_to_end_graphs.csv
    python benchmarks/end_to_end.py --quick                     # tiny; always so without a GPU

``DistributedModelParallel``, fused RowWiseAdagrad, ``TrainPipelineSparseDist`` or
``TrainPipelineCudaGraph``; on GPUs NCCL, autocast and lookups in bf16. A batch has 26 pooled
features of one id, an item and its histories, whose lengths are log-normal and clipped at four
times their mean. With ``--candidates 32``, so many samples are candidates of one request, and have
its histories and features. On several ranks, the item table, and what is looked up in one with it,
is sharded by row, the others are spread table by table. Adam is for all else than the tables.

Output and gradients of each attention are first held against fp64. A model is made once for each
provider, and goes through all mean lengths; all go through the same batches, and none
shares its tables. A step's time is that of the slowest rank, in the median of rounds, in which
models take turns: each batch once without being timed, then four times. A
``TrainPipelineCudaGraph`` is made anew for each mean length, and all of its timed steps are
replayed. Peak memory, allocated and reserved, has the model's own tables in it, but not what the
other models hold. Only reserved memory includes that of CUDA graphs, and none includes NCCL's.

Bytes sent are those of all collectives in a step, in the mean of ranks, without what stays on its
rank. Those that depend on the length of histories are what the same batches send beyond the newest
event of each history; rows and their gradients are the part of them in floating point. They are
not counted with a CUDA graph. Last, some steps are profiled on each rank. GPU busy is the part of
the first rank's step in which anything runs on the GPU, and the ten kernels that take most are
named. Communication waits for the slowest rank.

Figures are written as they come. What stands in the CSV is not measured again. A provider that ran
out of memory beside the others is left for the next call of the same command, which then measures
it alone, and the exit status is 1. On several GPUs it ends the run: name fewer providers.
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

if __name__ == "__main__":  # TorchRec and FBGEMM say much about themselves
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
from end_to_end_peers import PROVIDERS, check_attentions, in_a_line, set_longest
from end_to_end_results import SIZES, add, matching, measured_with, step_table
from end_to_end_trace import SentBytes, Trace
from figures import LACKS_MEMORY
from options import HelpFormatter, number, writable_file

from torchrec_jagged_attn.modules.target_attention_arguments import check_target_heads
from torchrec_jagged_attn.pipeline.train_pipeline import WARM_UP_STEPS

BATCHES = {200: 4096, 1000: 2048, 4000: 512}
"""Samples of a step and rank, unless --batch says so: of this mean, or of the next smaller one."""
QUICK = Sizes(5, 16, features=3, feature_rows=40, item_rows=60, width=32,
              dense=(16,), over=(16, 1))  # fmt: skip
DEFAULT = ("sum", "sum-graph", "linear-varlen", "ours", "ours-graph", "encoder-graph")
WAYS = ("by_popularity", "fused")  # in which cases of equal sizes differ
NUM_BATCHES = 4  # which steps go through again and again
WARMUP = 4  # steps before all else: those ahead of a pipeline are of the batches before
STEPS_OF_ROUND = 4 * NUM_BATCHES
STEPS_TO_PROFILE = NUM_BATCHES
KERNELS = 10  # that take most, which are written


class Training:
    """The training of a model with one provider.

    Args:
        warmup: steps with new batches that go before all else.
        sharding: of :func:`shard`.

    Attributes:
        rows_per_sample: of its histories, in the mean.
        times: milliseconds of a step, of each round of the sizes that it has now.
        held: bytes of allocated and of reserved memory that it holds between steps.
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
        self.times_of: dict[Sizes, list[float]] = {}
        before = self.memory()
        torch.manual_seed(0)
        model = make_model(self.provider, sizes)
        self.model, self.optimizer = shard(
            self.provider, model, sizes.batch, device, sharding=sharding
        )
        self.pipeline = self.make_pipeline(sizes)
        self.held = self.memory() - before
        self.use(sizes)

    def make_pipeline(self, sizes: Sizes) -> TrainPipelineSparseDist:
        return make_pipeline(
            self.provider, self.model, self.optimizer, self.device, fused=sizes.fused
        )

    def use(self, sizes: Sizes) -> None:
        """Goes on with batches of other lengths, or another number of samples."""
        if sizes == self.sizes:
            return
        held_before = self.memory()
        before = self.sizes or sizes  # some of whose batches the pipeline still has
        if self.sizes is not None and self.provider.graph:
            self.renew_pipeline(sizes)  # or it has the capacities of other batches
        self.sizes, self.times = sizes, self.times_of.setdefault(sizes, [])
        set_longest(self.model, CLIP * max(sizes.mean, before.mean))
        by_request = self.provider.by_request
        self.made = make_batches(
            sizes, NUM_BATCHES, self.device, dist.get_rank(), by_request=by_request
        )
        lengths = [
            b.sparse_features[key].lengths() for b in self.made for key in sizes.history_keys
        ]
        self.rows_per_sample = sizes.histories * torch.cat(lengths).double().mean().item()
        self.go_through(self.made)
        set_longest(self.model, CLIP * sizes.mean)
        self.held += self.memory() - held_before

    def renew_pipeline(self, sizes: Sizes) -> None:
        """Trains on the batches that are in the pipeline, and makes another one."""
        self.batches = iter(())
        with contextlib.suppress(StopIteration):
            while True:
                self.step()
        self.pipeline.detach()
        self.pipeline = None
        clear_memory()
        self.pipeline = self.make_pipeline(sizes)

    def memory(self) -> Tensor:
        """Bytes that all models hold on this GPU, allocated and reserved; zeros on a CPU."""
        if not self.on_gpu:
            return torch.zeros(2)
        torch.cuda.empty_cache()
        return torch.tensor([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])

    def go_through(self, batches: list[Batch]) -> None:
        """Takes these batches from now on, once those ahead are through."""
        self.batches: Iterator[Batch] = itertools.cycle(batches)
        self.run(self.warmup)

    def step(self) -> Tensor:
        """One step; its loss."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.on_gpu):
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
        dist.barrier()
        with self.replays(STEPS_OF_ROUND):
            seconds = self.over_ranks(self.run(STEPS_OF_ROUND), dist.ReduceOp.MAX)
        self.times.append(seconds[0] / STEPS_OF_ROUND * 1e3)

    @contextlib.contextmanager
    def replays(self, steps: int) -> Iterator[None]:
        """Checks that so many steps of a ``TrainPipelineCudaGraph`` are replayed."""
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

    def over_ranks(self, values: Any, op: dist.ReduceOp.RedOpType) -> list[float]:
        """Figures of all ranks as one."""
        of_all = torch.atleast_1d(torch.as_tensor(values, dtype=torch.float64).to(self.device))
        dist.all_reduce(of_all, op)
        return of_all.tolist()

    def sent_bytes(self) -> list[float]:
        """Bytes of a step in the mean of ranks: all, those that depend on the length of histories,
        and of these the ones in floating point."""
        counted = []
        for batches in ([newest_events(batch, self.sizes) for batch in self.made], self.made):
            self.go_through(batches)
            with SentBytes() as sent:
                self.run(len(batches))
            counted.append((sent.total / len(batches), sent.floats / len(batches)))
        (short, short_floats), (total, floats) = counted
        length = self.rows_per_sample / self.sizes.histories
        share = length / (length - 1)  # what rows send is in proportion to them
        figures = [total, (total - short) * share, (floats - short_floats) * share]
        return [x / dist.get_world_size() for x in self.over_ranks(figures, dist.ReduceOp.SUM)]

    def peaks(self) -> list[float]:
        """MiB of allocated and of reserved memory that a step takes, tables included."""
        others = self.memory() - self.held
        torch.cuda.reset_peak_memory_stats()
        self.run(NUM_BATCHES)
        peaks = torch.tensor([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
        return self.over_ranks((peaks - others) / 2**20, dist.ReduceOp.MAX)

    def figures(self) -> Iterator[dict[str, Any]]:
        """Rows of the CSV, with metric, quantiles and unit."""
        median, p20, p80 = np.quantile(self.times, (0.5, 0.2, 0.8))
        samples = self.sizes.batch * dist.get_world_size() * 1e3
        yield {"metric": "time", "unit": "ms", "median": median, "p20": p20, "p80": p80}
        yield {"metric": "throughput", "unit": "samples/s", "median": samples / median,
               "p20": samples / p80, "p80": samples / p20}  # fmt: skip
        if self.on_gpu:
            for name, peak in zip(("peak_memory", "peak_reserved"), self.peaks(), strict=True):
                yield {"metric": name, "unit": "MiB", "median": peak}

    def traffic(self) -> Iterator[dict[str, Any]]:
        """Rows of the CSV, of several ranks."""
        if self.provider.graph:  # replayed collectives cannot be counted
            return
        names = ("sent", "sent_by_length", "sent_rows")
        for name, sent in zip(names, self.sent_bytes(), strict=True):
            yield {"metric": name, "unit": "MiB", "median": sent / 2**20}

    def profile(self) -> Iterator[dict[str, Any]]:
        """Rows of the CSV from a profile."""
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


def labels_of(sizes: Sizes) -> dict[str, Any]:
    """Which case it is: what tells measurements of one provider apart."""
    gpus = dist.get_world_size()
    ways = [f"batch-{sizes.batch}"] * (sizes.batch not in (*BATCHES.values(), QUICK.batch))
    ways += [name.replace("_", "-") for name in WAYS if getattr(sizes, name)]
    of_requests = (sizes.candidates, sizes.candidate_features)
    return {
        "suite": "end_to_end",
        "case": step_case(sizes.mean, gpus, SHARDINGS[0], *of_requests, ways),
        "mode": "step",
        **{name: getattr(sizes, name) for name in SIZES},
        "heads": check_target_heads(None, sizes.width),
        "gpus": gpus,
    }


class Measurement:
    """Of providers, side by side; adds their figures to the CSV.

    Attributes:
        left: providers for which there was no memory beside the others.
    """

    def __init__(self, device: torch.device, csv: Path) -> None:
        self.device, self.csv = device, csv
        self.trainings: dict[str, Training] = {}
        self.left: list[str] = []

    def run(self, missing: dict[Sizes, list[str]], rounds: int) -> None:
        """Profiles come last: what they hook into CUDA stays there, and slows down what follows.

        Args:
            missing: providers that are measured with which sizes.
        """
        sizes, *_ = missing
        lengths = make_lengths(sizes, torch.Generator().manual_seed(1))[:64].to(self.device)
        names = dict.fromkeys(itertools.chain.from_iterable(missing.values()))
        wrong = check_attentions(names, lengths, sizes.width, CLIP * sizes.mean)
        for name in names:
            own = [sizes for sizes in missing if name in missing[sizes]]
            if name in wrong:
                self.refuse(name, own, wrong[name])
            else:
                self.attempt(name, own, lambda name=name, own=own: self.build(name, own[0]))
        for sizes in missing:
            self.time(sizes, missing[sizes], rounds)
        # The last sizes first, which pipelines have already.
        for sizes in reversed(missing) if self.device.type == "cuda" else ():
            self.in_turns(sizes, missing[sizes], lambda training, of=sizes: training.use(of))
            self.in_turns(sizes, missing[sizes], lambda x: self.write(x, x.profile()))
        self.trainings.clear()
        clear_memory()

    def attempt(self, name: str, all_sizes: list[Sizes], do: Callable[[], None]) -> None:
        """Does it, or takes the provider out."""
        try:
            do()
        except Exception as error:  # whatever a peer, or this machine's FBGEMM, has not
            self.trainings.pop(name, None)
            lacks_memory = any(words in str(error).lower() for words in LACKS_MEMORY)
            if lacks_memory and dist.get_world_size() > 1:
                raise  # the other ranks wait in vain
            if lacks_memory and self.trainings:
                self.left.append(name)
            else:
                self.refuse(name, all_sizes, in_a_line(error))
        if name not in self.trainings:
            clear_memory()

    def build(self, name: str, sizes: Sizes) -> None:
        self.trainings[name] = Training(name, sizes, self.device)
        clear_memory()

    def in_turns(self, sizes: Sizes, names: list[str], do: Callable[[Training], None]) -> None:
        """Does it with each training that there is."""
        for name in [name for name in names if name in self.trainings]:
            self.attempt(name, [sizes], lambda name=name: do(self.trainings[name]))

    def time(self, sizes: Sizes, names: list[str], rounds: int) -> None:
        """Writes all figures but those of profiles."""
        self.in_turns(sizes, names, lambda training: training.use(sizes))
        for _ in range(rounds):
            self.in_turns(sizes, names, Training.time_round)
        self.in_turns(sizes, names, lambda training: self.write(training, training.figures()))
        if dist.get_world_size() > 1:
            self.in_turns(sizes, names, lambda training: self.write(training, training.traffic()))

    def refuse(self, name: str, all_sizes: list[Sizes], reason: str) -> None:
        """Writes why it has no figures."""
        for sizes in all_sizes:
            row = {"metric": "refused", "median": 0, "note": reason}
            self.add(name, sizes, [row])

    def write(self, training: Training, rows: Iterable[dict[str, Any]]) -> None:
        """Figures of a training."""
        of_rows = {"rows_per_sample": training.rows_per_sample}
        self.add(training.name, training.sizes, [{**of_rows, **row} for row in rows])

    def add(self, name: str, sizes: Sizes, rows: list[dict[str, Any]]) -> None:
        label = {**labels_of(sizes), **measured_with(), "provider": name}
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


def sizes_of(args: argparse.Namespace) -> list[Sizes]:
    """Those asked for; without a GPU, or with --quick, ``QUICK`` in their place."""
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
    known = [f"  {name:{width}}  {provider.does}" for name, provider in PROVIDERS.items()]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=HelpFormatter, epilog="\n".join(["providers:", *known])
    )
    # fmt: off
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, metavar="NAME",
                        default=DEFAULT, help="see below; by default some of them")
    parser.add_argument("--csv", type=writable_file, help="what stands there is not measured again")
    parser.add_argument("--rounds", type=number(int, 2, 1000), default=5,
                        help="whose median is a step's time")
    parser.add_argument("--fused", action="store_true",
                        help="in a TrainPipelineFusedSparseDist, which starts lookups earlier")
    of_sizes = parser.add_argument_group("sizes", "of the model and its batches, see Sizes")
    count = number(int, 1, 10**6)
    of_sizes.add_argument("--quick", action="store_true", help="tiny; always so without a GPU")
    of_sizes.add_argument("--mean", nargs="+", type=count, default=[*BATCHES], help="of lengths")
    of_sizes.add_argument("--batch", type=count, help="samples of a step and rank")
    of_sizes.add_argument("--candidates", type=count, default=Sizes.candidates,
                          help="of a request, whose samples they are; a divisor of the batch")
    of_sizes.add_argument("--candidate-features", type=number(int, 0, 10**6), metavar="N",
                          default=Sizes.candidate_features, help="features not of requests")
    of_sizes.add_argument("--by-popularity", action="store_true",
                          help="ids are in this order, not hashed")
    # fmt: on
    args = parser.parse_args(argv)
    all_sizes = sizes_of(args)
    for sizes in all_sizes:
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
            return matching(csv, labels_of(sizes))

        missing = {
            sizes: [name for name in args.providers if name not in {*known(sizes)["provider"]}]
            for sizes in sizes_of(args)
        }
        dist.barrier()  # before anything is added
        measurement = Measurement(device, csv)
        if missing := {sizes: names for sizes, names in missing.items() if names}:
            measurement.run(missing, args.rounds)
        if dist.get_rank() == 0:
            for sizes in sizes_of(args):
                case = labels_of(sizes)["case"]
                print(f"{case}, batch {sizes.batch}:\n{step_table(known(sizes))}\n")
        if left := measurement.left:
            print(f"{', '.join(left)}: out of memory beside the others; call this once more")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
