"""Trains a DLRM on user histories and compares poolings.

    python examples/train_dlrm.py                                  # synthetic data, all poolings
    python examples/train_dlrm.py --data data/ml-1m --download     # MovieLens-1M
    python examples/train_dlrm.py --select relevance newest random # subsets of the events
    torchrun --nproc_per_node=2 examples/train_dlrm.py --pooling attention

The model is TorchRec's DLRM. Poolings differ only in the embedding module: an
EmbeddingBagCollection with the sum, the mean or a recency-weighted mean of the history, or a
TargetAttentionEmbeddingBagCollection, in which the candidate item attends to the history. Data,
seed, widths, learning rates and steps are equal.

With --select, models differ in the events of a history that are kept: all events, the events most
likely to convert, the newest, or random events. Other events are removed before the lookups.
Examples are then events that converted, and the plot shows normalized entropy over throughput. Most
of the synthetic events are noise, with short dwell times and few conversions. In MovieLens-1M,
ratings of four stars or more convert, surfaces are genres, and the time to the user's next rating
is the dwell time.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import gc
import logging
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import NamedTuple, NoReturn

from options import HelpFormatter, end_on_ctrl_c, number, writable_folder

POOLINGS = ("sum", "mean", "recency", "attention")
WAYS = ("relevance", "newest", "random")
"""Ways to select events."""
DEFAULT_OUT = Path("runs/train_dlrm")
RESULTS, PICTURE = "results.json", "results.png"
STEPS_PER_LOOK = 10
"""Steps between synchronizations, which report the loss and check for Ctrl-C."""


class Run(NamedTuple):
    """One of the compared models: its pooling, and the share of a history that is kept."""

    pooling: str
    way: str = "all"
    budget: float = 1.0

    @property
    def name(self) -> str:
        """Name in tables."""
        if self.way == "all":
            return self.pooling
        return f"{self.pooling}, {self.budget:g} by {self.way}"

    @property
    def folder(self) -> str:
        """Folder of its checkpoints."""
        return self.name.replace(", ", "-").replace(" ", "-")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    # fmt: off
    data = parser.add_argument_group("data")
    data.add_argument("--data", type=Path,
                      help="folder of MovieLens-1M; without one, data are synthetic")
    data.add_argument("--download", action="store_true", help="fetch MovieLens-1M into --data")
    data.add_argument("--users", type=number(int, 1, 10**6), default=1500,
                      help="users in synthetic data")
    data.add_argument("--max-history", type=number(int, 1, 10**6), default=200,
                      help="newest events to see")
    data.add_argument("--noise", type=number(float, 0, 1),
                      help="share of synthetic events that are noise; by default 0.75 with "
                           "--select, otherwise 0")
    data.add_argument("--negatives", type=number(int, 1, 1000), default=1,
                      help="negative examples per positive example")

    model = parser.add_argument_group("model")
    model.add_argument("--pooling", nargs="+", choices=[*POOLINGS, "all"],
                       help="poolings of the histories, trained one after the other; by default "
                            "attention with --select, otherwise all")
    model.add_argument("--select", nargs="+", choices=WAYS, default=[],
                       help="selections of events, each trained with each budget below 1")
    model.add_argument("--budget", nargs="+", type=number(float, 1e-3, 1),
                       default=[1, 0.5, 0.25, 0.125],
                       help="shares of a history that --select keeps; 1 is the whole history")
    model.add_argument("--width", type=number(int, 4, 4096), default=16,
                       help="width of all tables")
    model.add_argument("--heads", type=number(int, 1, 4096), default=4, help="attention heads")
    model.add_argument("--encoder-layers", type=number(int, 0, 100), default=0,
                       help="layers of self-attention over the history, before target attention")
    model.add_argument("--half-life", type=number(float, 0.01, 1000), default=3,
                       help="half-life of weights in recency pooling, in events; the default is "
                            "the best on MovieLens-1M of 1.5, 3, 6, 12, 20 and 40")

    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=number(int, 1, 10**6),
                          help="training epochs; by default 12 on MovieLens, 2 on synthetic data, "
                               "3 with --select")
    training.add_argument("--batch-size", type=number(int, 1, 10**9), default=1024,
                          help="global batch size, of all ranks")
    training.add_argument("--balance", action="store_true",
                          help="balance the history rows of each batch between the ranks")
    training.add_argument("--lr", type=number(float, 0, 100), default=1e-3,
                          help="learning rate of Adam, for dense layers")
    training.add_argument("--table-lr", type=number(float, 0, 100), default=0.05,
                          help="learning rate of row-wise Adagrad, for tables")
    training.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0,
                          help="seed of data, negatives and weights")
    training.add_argument("--workers", type=number(int, 0, 256),
                          help="data loader processes per rank; by default 4 on a GPU, 0 on a CPU")
    training.add_argument("--out", type=writable_folder, default=str(DEFAULT_OUT),
                          help=f"folder of checkpoints, {RESULTS} and {PICTURE}; an earlier run in "
                               "the default folder is renamed, in another folder it is an error")
    earlier = training.add_mutually_exclusive_group()
    earlier.add_argument("--resume", action="store_true",
                         help="continue from the checkpoints in --out")
    earlier.add_argument("--overwrite", action="store_true",
                         help="delete an earlier run in --out")
    # fmt: on
    args = parser.parse_args()
    if args.download and args.data is None:
        parser.error("--download needs --data, the folder to fetch into")
    if args.width % 4 != 0 or 2 * args.width % args.heads != 0:
        parser.error(
            f"--width must be a multiple of 4, and --heads divide twice the width: got --width "
            f"{args.width} and --heads {args.heads}"
        )
    if args.noise is not None and args.data is not None:
        parser.error("--noise is for synthetic data, got --data, too")
    for option, values in (("--select", args.select), ("--budget", args.budget)):
        if len({*values}) < len(values):
            parser.error(f"{option} must name nothing twice, got {' '.join(map(str, values))}")
    args.pooling = args.pooling or ["attention" if args.select else "all"]
    poolings = [x for name in args.pooling for x in (POOLINGS if name == "all" else [name])]
    if len(set(poolings)) < len(poolings):
        parser.error(f"--pooling must name no pooling twice, got {' '.join(args.pooling)}")
    if args.select and "recency" in poolings:
        parser.error("--select cannot go with --pooling recency, whose weights are of all events")
    args.epochs = args.epochs or (12 if args.data else 3 if args.select else 2)
    args.noise = args.noise if args.noise is not None else 0.75 * bool(args.select)
    args.pooling = poolings
    args.runs = [
        run
        for pooling in poolings
        for run in (
            *([Run(pooling)] if not args.select or 1 in args.budget else []),
            *(Run(pooling, way, part) for way in args.select for part in args.budget if part < 1),
        )
    ]
    return args


if __name__ == "__main__":
    end_on_ctrl_c()
    ARGS = parse_args()  # before the imports, which take seconds

# TorchRec and FBGEMM log many messages on import and sharding.
logging.disable(logging.WARNING)
warnings.simplefilter("ignore", FutureWarning)

import numpy as np
import torch
import torch.distributed as dist
from checkpoint import (
    CheckpointError,
    Checkpoints,
    StopSignal,
    checkpoints_in,
    ignore_stop_signals,
)
from events import (
    NUM_DENSE_FEATURES,
    DataError,
    Events,
    Examples,
    evaluation_batches,
    training_batches,
)
from movielens import download_movielens, read_movielens
from planted import planted_log
from progress import Progress, plot, plot_selections, print_table, write_json
from selecting import HISTORY, SelectingTrain, fit_relevance, selection_of
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.functional.classification import binary_auroc
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.metrics.ne import compute_ne, get_ne_states
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from tqdm import tqdm

from torchrec_jagged_attn import (
    EncoderConfig,
    HistoryEmbeddingCollectionSharder,
    HistoryEmbeddingShardingPlanner,
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
    TrainPipelineCudaGraph,
    embedding_parameters,
)
from torchrec_jagged_attn.data import BalancedBatchSampler


def build_model(
    pooling: str, cardinalities: dict[str, int], args: argparse.Namespace, candidates: str = "one"
) -> DLRMTrain:
    """Return a DLRM with one table per kind of id; a history shares the table of its candidate."""
    tables = [
        EmbeddingBagConfig(
            name=f"{name}_table",
            embedding_dim=args.width,
            num_embeddings=cardinality,
            feature_names=[name, f"{name}_history"] if name in ("item", "category") else [name],
            pooling=PoolingType.MEAN if pooling == "mean" else PoolingType.SUM,
        )
        for name, cardinality in cardinalities.items()
    ]
    if pooling == "attention":
        attention = TargetAttentionConfig(
            target=["item", "category"],
            history=["item_history", "category_history"],
            num_heads=args.heads,
            encoder=EncoderConfig(args.encoder_layers) if args.encoder_layers else None,
        )
        collection = TargetAttentionEmbeddingBagCollection(
            tables, [attention], candidates=candidates
        )
    else:
        # The weights of recency pooling are in the batch, see events.py.
        collection = EmbeddingBagCollection(tables, is_weighted=pooling == "recency")
    return DLRMTrain(
        DLRM(
            embedding_bag_collection=collection,
            dense_in_features=NUM_DENSE_FEATURES,
            dense_arch_layer_sizes=[64, args.width],
            over_arch_layer_sizes=[128, 64, 1],
        )
    )


def shard(
    model: DLRMTrain, args: argparse.Namespace, device: torch.device, mean_history: float
) -> tuple[DistributedModelParallel, KeyedOptimizer]:
    """Shard the tables, and replicate the dense layers on all ranks.

    Tables are updated in the backward pass; the returned optimizer's step is for the dense layers.
    (Tables that are too large for one process must be created on the meta device.)
    """
    apply_optimizer_in_backward(RowWiseAdagrad, embedding_parameters(model), {"lr": args.table_lr})
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    tables = model.model.sparse_arch.embedding_bag_collection.embedding_bag_configs()
    sharders = [EmbeddingBagCollectionSharder(), HistoryEmbeddingCollectionSharder()]
    planner = HistoryEmbeddingShardingPlanner(
        batch_size=args.batch_size // dist.get_world_size(),
        constraints={
            table.name: ParameterConstraints(
                compute_kernels=["fused"],  # updated in backward, also on a CPU
                # Mean ids per sample, for the cost estimates of the planner.
                pooling_factors=[
                    mean_history if feature.endswith("_history") else 1.0
                    for feature in table.feature_names
                ],
            )
            for table in tables
        },
        debug=False,
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    # Sharding initializes tables anew: use the same weights with any number of ranks.
    sharded.load_state_dict(initial)

    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    adam = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=args.lr))
    adam.init_state()
    return sharded, CombinedOptimizer([sharded.fused_optimizer, adam])


class Training:
    """The training of one model, from the first step or the newest checkpoint."""

    def __init__(
        self, run: Run, events: Events, args: argparse.Namespace, device: torch.device
    ) -> None:
        torch.manual_seed(args.seed)
        model = build_model(run.pooling, events.log.cardinalities(), args)
        if run.way != "all":
            relevance = fit_relevance(events)
            model = SelectingTrain(model, selection_of(run.way, run.budget, HISTORY, relevance))
        mean_history = run.budget * float(np.mean(events.history_end - events.history_start))
        self.model, self.optimizer = shard(model, args, device, mean_history)
        pipeline = TrainPipelineCudaGraph if device.type == "cuda" else TrainPipelineSparseDist
        self.pipeline = pipeline(
            self.model, self.optimizer, device, pipeline_postproc=run.way != "all"
        )
        self.events, self.args, self.device = events, args, device
        self.half_life = args.half_life if run.pooling == "recency" else None
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

        excluded = ("pooling", "epochs", "workers", "out", "resume", "overwrite", "download")
        excluded += ("select", "budget", "runs")
        options = {name: str(v) for name, v in vars(args).items() if name not in excluded}
        options["conversions"] = str(events.conversions)
        folder = args.out / run.folder
        self.checkpoints = Checkpoints(folder, options, events.features())
        self.progress = Progress(run.name, way=run.way, budget=run.budget)
        if args.resume:
            saved = self.checkpoints.load(self.model, self.optimizer)
            if saved is not None:
                self.progress = Progress(**saved)
            elif self.rank == 0:
                print(f"{folder} holds no checkpoint to resume: {run.name} starts anew", flush=True)

    def run(self, stop: StopSignal) -> Progress:
        """Train, and save a checkpoint after each epoch and on a stop."""
        progress = self.progress
        while progress.epoch < self.args.epochs:
            stopped = self._train_epoch(stop)
            if not stopped:
                progress.auc, progress.ne = self._evaluate()
                progress.epoch, progress.batch = progress.epoch + 1, 0
                if self.rank == 0:
                    print(progress.summary(), flush=True)
            steps = len(progress.losses)
            self.checkpoints.save(self.model, self.optimizer, steps, asdict(progress))
            if stopped:
                break
        return progress

    def _train_epoch(self, stop: StopSignal) -> bool:
        """Train the rest of the epoch. Return True if it was stopped before its end."""
        args, progress = self.args, self.progress
        examples = self.events.training(progress.epoch, self.half_life)
        batches = self._training_batches(examples)
        num_batches = len(examples) // args.batch_size
        self.model.train()
        loader = self._load(examples, batches)
        with tqdm(
            desc=f"{progress.pooling}, epoch {progress.epoch + 1} of {args.epochs}",
            total=num_batches * args.batch_size,
            initial=progress.batch * args.batch_size,
            unit=" samples",
            unit_scale=True,
            leave=False,
            disable=self.rank > 0,
        ) as bar:
            while progress.batch < num_batches:
                steps = min(STEPS_PER_LOOK, num_batches - progress.batch)
                start = time.perf_counter()
                report = [self.pipeline.progress(loader)[0] for _ in range(steps)]
                report.append(torch.tensor(float(stop.number > 0), device=self.device))
                report = torch.stack(report)
                dist.all_reduce(report)
                *losses, stopped = (report / self.world_size).tolist()

                progress.batch += steps
                progress.losses += losses
                progress.speeds.append(steps * args.batch_size / (time.perf_counter() - start))
                bar.set_postfix(loss=f"{sum(losses) / steps:.4f}", refresh=False)
                bar.update(steps * args.batch_size)
                if stopped and progress.batch < num_batches:
                    return True
        return False

    def _training_batches(self, examples: Examples) -> Iterable[Tensor | list[int]]:
        """Return this rank's remaining batches of the epoch."""
        args, progress = self.args, self.progress
        if not args.balance:
            batches = training_batches(
                len(examples),
                args.batch_size,
                seed=args.seed,
                epoch=progress.epoch,
                rank=self.rank,
                world_size=self.world_size,
            )
            return batches[progress.batch :]
        sampler = BalancedBatchSampler(
            examples.history_end - examples.history_start,
            args.batch_size // self.world_size,
            self.world_size,
            self.rank,
            cost="quadratic" if args.encoder_layers else "linear",
            seed=args.seed,
            drop_last=True,
        )
        sampler.load_state_dict({"epoch": progress.epoch, "batches": progress.batch})
        return sampler

    def _evaluate(self) -> tuple[float, float]:
        """Return AUC and normalized entropy of the test examples, which ranks share."""
        examples = self.events.testing(self.half_life)
        batches = evaluation_batches(
            len(examples), self.args.batch_size, rank=self.rank, world_size=self.world_size
        )
        self.model.eval()
        loader = self._load(examples, batches)
        with torch.no_grad():
            logits = [self.pipeline.progress(loader)[1]]  # waits for the first batch
            start = time.perf_counter()
            logits = torch.cat(logits + [self.pipeline.progress(loader)[1] for _ in batches[1:]])
        logits.sum().item()  # waits for the device
        if len(batches) > 1:
            timed = (len(batches) - 1) * self.args.batch_size
            self.progress.test_speed = timed / (time.perf_counter() - start)
        gathered = [torch.empty_like(logits) for _ in range(self.world_size)]
        dist.all_gather(gathered, logits)
        predictions = torch.stack(gathered, dim=1).flatten()[: len(examples)].sigmoid()
        labels = examples.label.to(self.device)
        states = get_ne_states(labels, predictions, torch.ones_like(labels), eta=1e-12)
        ne = compute_ne(
            states["cross_entropy_sum"],
            states["weighted_num_samples"],
            states["pos_labels"],
            states["neg_labels"],
            eta=1e-12,
        )
        return binary_auroc(predictions, labels.long()).item(), ne.item()

    def _load(self, examples: Examples, batches: Iterable[Tensor | list[int]]) -> Iterator[Batch]:
        loader = DataLoader(
            examples,
            batch_size=None,
            sampler=batches,
            num_workers=self.args.workers,
            worker_init_fn=ignore_stop_signals,
            pin_memory=self.device.type == "cuda",
        )
        return iter(loader)


def read_events(args: argparse.Namespace) -> Events:
    """Read MovieLens-1M from --data; without it, generate synthetic data."""
    if args.data is None:
        log = planted_log(num_users=args.users, noise=args.noise, seed=args.seed)
    else:
        if args.download and os.environ.get("LOCAL_RANK", "0") == "0":
            download_movielens(args.data)
        dist.barrier()
        log = read_movielens(args.data)
    events = Events(
        log,
        max_history=args.max_history,
        negatives=args.negatives,
        conversions=bool(args.select),
        seed=args.seed,
    )
    if args.batch_size > len(events.train_rows):
        raise DataError(
            f"--batch-size {args.batch_size} is more than the {len(events.train_rows)} events to "
            "train on; give a smaller one"
        )
    return events


def make_room(args: argparse.Namespace) -> None:
    """Clear --out for a new run; an earlier run is deleted only if requested.

    Raises:
        CheckpointError: --out has an earlier run, and is not the default folder.
    """
    results = [args.out / name for name in (RESULTS, PICTURE)]
    left = [path for run in args.runs for path in checkpoints_in(args.out / run.folder)]
    left += [path for path in results if path.exists()]
    if args.resume or not left:
        return
    if not args.overwrite and args.out != DEFAULT_OUT:
        raise CheckpointError(
            f"--out must hold no earlier run, got {args.out} with {left[-1].relative_to(args.out)};"
            " give another folder, --resume to go on, or --overwrite to delete that run"
        )
    dist.barrier()  # all ranks have listed the files
    if dist.get_rank() != 0:
        return
    if args.overwrite:
        for path in left:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    else:
        asides = (args.out.with_name(f"{args.out.name}-{n}") for n in count(1))
        aside = next(path for path in asides if not path.exists())
        args.out.rename(aside)
        print(f"{args.out} held an earlier run, which is in {aside} now", flush=True)


def compare(args: argparse.Namespace, device: torch.device) -> None:
    """Train a model for each pooling, or selection of events, and compare them."""
    if args.batch_size % dist.get_world_size() != 0:
        raise DataError(
            f"--batch-size {args.batch_size} cannot be shared equally by {dist.get_world_size()} "
            "ranks; give a multiple"
        )
    events = read_events(args)
    make_room(args)
    stop = StopSignal()
    finished = []
    for run in args.runs:
        progress = Training(run, events, args, device).run(stop)
        if progress.epoch < args.epochs:
            leave(
                f"stopped; a checkpoint is in {args.out}, go on from it with --resume",
                code=128 + (stop.number or signal.SIGINT),
            )
        finished.append(progress)
    if dist.get_rank() == 0:
        write_json(finished, args.out / RESULTS)
        print_table(finished)
        (plot_selections if args.select else plot)(finished, args.out / PICTURE)
        print(f"as a picture: {args.out / PICTURE}")


def leave(message: str, code: int = 1) -> NoReturn:
    """Exit on all ranks; one of them prints the reason."""
    if dist.get_rank() == 0:
        print(message, file=sys.stderr)
    destroy_process_group()
    sys.exit(code)


def destroy_process_group() -> None:
    """Destroy the process group, on all ranks.

    After an error on one rank, NCCL would wait for the others: the process then exits without this,
    and torchrun stops the other ranks.
    """
    # Sharded models are in reference cycles and refer to the group. If its threads outlived the
    # interpreter, the process could abort on exit.
    gc.collect()
    dist.destroy_process_group()


def main(args: argparse.Namespace) -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if args.workers is None:
        args.workers = 4 if device.type == "cuda" else 0
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ:  # started by torchrun
        dist.init_process_group(backend)
    else:
        # As torchrun does: layers are too small for several threads.
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    # With one GPU per process, backward needs no other thread, whose core would lack Python's
    # objects in its caches. With attention, training was 20 % faster on an H200.
    torch.autograd.set_multithreading_enabled(False)
    try:
        compare(args, device)
    except (DataError, CheckpointError) as error:
        leave(f"error: {error}")
    except (OSError, MemoryError) as error:
        sys.exit(f"error: {error}")  # perhaps on this rank only
    destroy_process_group()


if __name__ == "__main__":
    main(ARGS)
