"""Compare NE and AUC of one attention, computed by ours and by peers.

    python benchmarks/end_to_end_quality.py --csv quality.csv
    python benchmarks/end_to_end_quality.py data/ml-1m --csv quality.csv

Trains a DLRM with each provider of ``end_to_end.py``, with the same initial weights and batches,
and evaluates it ten times per epoch. Trainings in the CSV are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":  # silence TorchRec and FBGEMM
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, whatever is installed
sys.path.append(str(Path(__file__).parents[1] / "examples"))

from end_to_end_models import make_pipeline, process_group, shard
from end_to_end_peers import PROVIDERS, Provider, make_collection, summarize_error
from end_to_end_results import add, matching, measured_with
from events import NUM_DENSE_FEATURES, Events, Examples, evaluation_batches, training_batches
from movielens import read_movielens
from options import HelpFormatter, number, writable_file
from planted import planted_log
from quality_models import ATTENDED, make_tables, rate
from torch import Tensor
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_jagged_attn import TargetAttentionConfig

PLANTED = "planted"
SAME = ("padded", "linear-varlen", "ours")
"""Providers that compute the same function."""
BATCH = 1024  # samples of all ranks
WIDTH, HEADS = 16, 4
MAX_HISTORY = 200
TABLE_LR, MOVIELENS_TABLE_LR = 0.05, 0.01
"""Learning rates of RowWiseAdagrad. With the first, the loss on MovieLens-1M is unstable."""
POINTS = 10
"""Number of evaluations per epoch."""


def read_events(data: str) -> Events:
    """Return the events of ``PLANTED``, or of a folder of MovieLens-1M."""
    log = planted_log() if data == PLANTED else read_movielens(Path(data))
    return Events(log, max_history=MAX_HISTORY)


def make_model(provider: Provider, events: Events) -> DLRMTrain:
    """Return the model of ``examples/train_dlrm.py``, without a recency bias."""
    tables = make_tables(EmbeddingBagConfig, events.log.cardinalities(), WIDTH)
    config = TargetAttentionConfig(
        target=[*ATTENDED],
        history=[f"{name}_history" for name in ATTENDED],
        num_heads=HEADS,
        recency_bias=False,
        value_projection=True,
    )
    return DLRMTrain(
        DLRM(
            embedding_bag_collection=make_collection(provider, tables, [config], MAX_HISTORY),  # pyright: ignore[reportArgumentType]
            dense_in_features=NUM_DENSE_FEATURES,
            dense_arch_layer_sizes=[64, WIDTH],
            over_arch_layer_sizes=[128, 64, 1],
            dense_device=None,
        )
    )


def curve(
    provider: Provider,
    events: Events,
    epochs: int,
    device: torch.device,
    table_lr: float = TABLE_LR,
) -> Iterator[tuple[float, float, float]]:
    """Train a model, and yield epochs, test AUC and test NE ``POINTS`` times per epoch.

    On a GPU, autocast to bf16 is enabled.
    """
    torch.manual_seed(0)
    rank_options = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    model, optimizer = shard(
        provider,
        make_model(provider, events),
        BATCH // rank_options["world_size"],
        device,
        table_lr=table_lr,
    )
    pipeline = make_pipeline(provider, model, optimizer, device)
    testing = events.testing()
    every = evaluation_batches(len(testing), BATCH, **rank_options)
    for epoch in range(epochs):
        examples = events.training(epoch)
        batches = training_batches(len(examples), BATCH, seed=0, epoch=epoch, **rank_options)
        bounds = [len(batches) * i // POINTS for i in range(POINTS + 1)]
        for i, (first, last) in enumerate(itertools.pairwise(bounds), 1):
            if first < last:
                run(pipeline, examples, batches[first:last], True, device)
            yield epoch + i / POINTS, *rate(*run(pipeline, testing, every, False, device))


def run(
    pipeline: TrainPipelineSparseDist,
    examples: Examples,
    batches: list[Tensor],
    trains: bool,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return logits and labels ``[S]`` of ``batches`` of all ranks."""
    on_gpu = device.type == "cuda"
    pipeline._model.train(trains)
    made = (examples[index] for index in batches)
    loader = iter([batch.pin_memory() for batch in made] if on_gpu else made)
    logits, labels = [], []
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=on_gpu)
    with torch.set_grad_enabled(trains), autocast:
        for _ in batches:
            _, batch_logits, batch_labels = pipeline.progress(loader)
            logits.append(batch_logits.float())
            labels.append(batch_labels)
    both = torch.stack([torch.cat(logits), torch.cat(labels)])
    gathered = [torch.empty_like(both) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, both)
    all_logits, all_labels = torch.stack(gathered, 2).flatten(1)
    return all_logits[: len(examples)], all_labels[: len(examples)]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("data", nargs="?", default=PLANTED, help="or a folder of MovieLens-1M")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=[*SAME])
    parser.add_argument("--epochs", type=number(int, 1, 1000), default=1)
    parser.add_argument("--csv", type=writable_file, required=True)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    events, data = read_events(args.data), Path(args.data).name
    table_lr = TABLE_LR if data == PLANTED else MOVIELENS_TABLE_LR
    with process_group() as device:
        gpus = dist.get_world_size()
        suite = {"suite": "end_to_end_quality", "gpus": gpus}
        last = f"{data}-{args.epochs}.0"
        finished = {*matching(args.csv, {**suite, "case": last})["provider"]}
        for name in args.providers:
            if name in finished:
                continue
            rows = []
            try:
                points = curve(PROVIDERS[name], events, args.epochs, device, table_lr)
                for epoch, auc, ne in points:
                    label = {**suite, **measured_with(), "case": f"{data}-{epoch:.1f}",
                             "provider": name, "mode": "test", "batch": BATCH // gpus,
                             "width": WIDTH}  # fmt: skip
                    for metric, value in (("ne", ne), ("auc", auc)):
                        figure = {"metric": metric, "unit": metric.upper(), "median": value}
                        rows.append(label | figure)
                    if dist.get_rank() == 0:
                        print(f"{name}, epoch {epoch:.1f}: AUC {auc:.4f}, NE {ne:.4f}", flush=True)
            except (ImportError, RuntimeError) as error:  # cannot run on this machine
                print(f"{name}: not trained, {summarize_error(error)}", flush=True)
                continue
            if dist.get_rank() == 0:
                add(args.csv, rows)


if __name__ == "__main__":
    main()
