"""Time training steps of a DLRM whose history is pooled by a sum, by our attention, or by a peer's.

    python benchmarks/dlrm_step.py --csv dlrm_step.csv           # mean lengths of 200 and of 1,000
    python benchmarks/dlrm_step.py --quick --host                # where the host's time goes
    python benchmarks/dlrm_step.py --cuda-graph                  # less of the host around poolings

One process and one GPU: ``DistributedModelParallel`` with tables by table, fused RowWiseAdagrad,
``TrainPipelineSparseDist``, and on a GPU autocast and lookups in bf16. A batch has 20 plain
features, a target and its history, whose lengths are log-normal and clipped at four times their
mean. Poolings:

    sum                  EmbeddingBagCollection, no attention
    attention            TargetAttentionEmbeddingBagCollection
    single-lookup        the same with single_lookup=True
    attention-unbiased   the same without the bias by recency, which peers cannot have
    linear+torch-varlen  the same with FlashAttention-2 in its place
    linear+padded-sdpa   the same with scaled_dot_product_attention of padded histories

Of each, output and gradients of the attention are first held against fp64. A step's time is the
median of rounds, in which the poolings take turns. GPU busy is the part of a step in which anything
runs on the GPU. Peak memory has the tables in it.
"""

import argparse
import collections
import contextlib
import datetime
import gc
import importlib.metadata
import itertools
import json
import logging
import os
import platform
import re
import statistics
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # before the imports: TorchRec and FBGEMM say much about themselves
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fbgemm_gpu.split_embedding_configs import SparseType
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

sys.path.append(str(Path(__file__).parents[1]))  # a checkout runs without being installed
sys.path.append(str(Path(__file__).parents[1] / "examples"))

from cuda_graphs import replay_dense_layers

import torchrec_jagged_attn
from torchrec_jagged_attn import (
    JaggedTargetAttention,
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
    embedding_parameters,
)
from torchrec_jagged_attn.testing import (
    assert_close,
    flash_attention_oracle,
    flash_attention_plain,
)

NUM_DENSE, NUM_PLAIN = 13, 20
MAX_PARTS = 30  # of the host's time, which are shown
NUM_BATCHES = 8  # which steps go through again and again
CLIP = 4
"""The longest history, as a multiple of the mean."""


@dataclass(frozen=True)
class Sizes:
    """What a model and its batches measure.

    Args:
        mean: of the lengths of histories, before they are clipped.
        batch: samples of a step.
        plain_rows: of each of the plain features' tables.
        item_rows: of the table of the target and its history.
        width: columns of all tables.
        heads: of the attention.
        dense: widths of the layers for dense features; ``width`` follows.
        over: widths of the layers after the interaction.
    """

    mean: int
    batch: int
    plain_rows: int = 210_000
    item_rows: int = 2_000_000
    width: int = 128
    heads: int = 4
    dense: tuple[int, ...] = (512, 256)
    over: tuple[int, ...] = (1024, 1024, 512, 256, 1)


SIZES = (Sizes(200, 4096), Sizes(1000, 2048))
QUICK = (Sizes(5, 16, 100, 100, 16, 2, (16,), (16, 1)),)


def varlen(q: Tensor, kv: Tensor, history: JaggedTensor, max_length: int) -> Tensor:
    """FlashAttention-2: ``q`` is ``[B, H, D]``, ``kv`` is ``[N, 2, H, D]``."""
    from torch.nn.attention.varlen import varlen_attn

    each = torch.arange(q.shape[0] + 1, device=q.device, dtype=torch.int32)
    return varlen_attn(q, *kv.unbind(1), each, history.offsets().int(), 1, max_length)


def padded(q: Tensor, kv: Tensor, history: JaggedTensor, max_length: int) -> Tensor:
    """Padded to ``max_length``, and masked."""
    rows = torch.ops.fbgemm.jagged_to_padded_dense(
        kv.flatten(1), [history.offsets()], [max_length], 0.0
    )
    k, v = rows.unflatten(2, kv.shape[1:]).permute(2, 0, 3, 1, 4)  # [B, H, L, D] each
    places = torch.arange(max_length, device=q.device)
    mask = (places < history.lengths().unsqueeze(1))[:, None, None]
    return F.scaled_dot_product_attention(q.unsqueeze(2), k, v, mask).squeeze(2)


class Explicit(nn.Module):
    """Keys and values of all history rows, and then a peer's attention.

    Args:
        attention: whose weights it has.
        attend: takes ``q``, ``kv``, the history and its longest length.
        max_length: no history is longer.
    """

    def __init__(
        self, attention: JaggedTargetAttention, attend: Callable[..., Tensor], max_length: int
    ) -> None:
        super().__init__()
        self.attention, self.attend, self.max_length = attention, attend, max_length

    def forward(
        self, target: Tensor, history: JaggedTensor, timestamps: None = None, prior: None = None
    ) -> Tensor:
        """As :class:`JaggedTargetAttention`."""
        width = target.shape[1]
        weights = self.attention.in_proj_weight.split([width, 2 * width])
        biases = self.attention.in_proj_bias.split([width, 2 * width])
        heads = (self.attention.num_heads, width // self.attention.num_heads)
        q = F.linear(target, weights[0], biases[0]).unflatten(1, heads)
        kv = F.linear(history.values(), weights[1], biases[1]).unflatten(1, (2, *heads))
        out = self.attend(q, kv, history, self.max_length)
        return self.attention.out_proj(out.flatten(1))


PEERS = {"linear+torch-varlen": varlen, "linear+padded-sdpa": padded}
POOLINGS = ("sum", "attention", "single-lookup", "attention-unbiased", *PEERS)


def make_lengths(sizes: Sizes, generator: torch.Generator) -> Tensor:
    """``[B]`` lengths of histories."""
    normal = torch.randn(sizes.batch, generator=generator, dtype=torch.float64)
    return (sizes.mean * (normal - 0.5).exp()).round().long().clamp(1, CLIP * sizes.mean)


def make_batches(sizes: Sizes, device: torch.device) -> list[Batch]:
    """Random batches in the host's memory."""
    generator = torch.Generator().manual_seed(0)

    def one() -> Batch:
        ones = torch.ones((NUM_PLAIN + 1) * sizes.batch, dtype=torch.int64)
        histories = make_lengths(sizes, generator)
        plain = torch.randint(
            sizes.plain_rows, (NUM_PLAIN * sizes.batch,), generator=generator, dtype=torch.int64
        )
        num_items = sizes.batch + int(histories.sum())
        items = torch.randint(sizes.item_rows, (num_items,), generator=generator)
        batch = Batch(
            dense_features=torch.rand(sizes.batch, NUM_DENSE, generator=generator),
            sparse_features=KeyedJaggedTensor(
                keys=[*(f"plain_{i}" for i in range(NUM_PLAIN)), "item", "history"],
                values=torch.cat([plain, items]),
                lengths=torch.cat([ones, histories]).int(),
            ),
            labels=torch.randint(2, (sizes.batch,), generator=generator).float(),
        )
        return batch.pin_memory() if device.type == "cuda" else batch

    return [one() for _ in range(NUM_BATCHES)]


def make_model(pooling: str, sizes: Sizes) -> DLRMTrain:
    """A DLRM; ``pooling`` is one of ``POOLINGS``."""
    meta = torch.device("meta")
    tables = [
        EmbeddingBagConfig(
            name=f"table_{i}",
            embedding_dim=sizes.width,
            num_embeddings=sizes.plain_rows,
            feature_names=[f"plain_{i}"],
        )
        for i in range(NUM_PLAIN)
    ]
    tables.append(
        EmbeddingBagConfig(
            name="table_item",
            embedding_dim=sizes.width,
            num_embeddings=sizes.item_rows,
            feature_names=["item", "history"],
        )
    )
    if pooling == "sum":
        collection = EmbeddingBagCollection(tables, device=meta)
    else:
        attention = TargetAttentionConfig(
            target="item",
            history="history",
            num_heads=sizes.heads,
            recency_bias=pooling in ("attention", "single-lookup"),
        )
        collection = TargetAttentionEmbeddingBagCollection(
            tables, attention, device=meta, single_lookup=pooling == "single-lookup"
        )
        if pooling in PEERS:
            attentions = collection.pooling.attentions
            attentions[0] = Explicit(attentions[0], PEERS[pooling], CLIP * sizes.mean)
    return DLRMTrain(
        DLRM(
            embedding_bag_collection=collection,  # pyright: ignore[reportArgumentType]
            dense_in_features=NUM_DENSE,
            dense_arch_layer_sizes=[*sizes.dense, sizes.width],
            over_arch_layer_sizes=[*sizes.over],
            dense_device=None,
        )
    )


def make_pipeline(
    pooling: str, sizes: Sizes, device: torch.device, cuda_graph: bool
) -> TrainPipelineSparseDist:
    """The model, sharded, with its optimizers; ``cuda_graph`` is the option of that name."""
    torch.manual_seed(0)
    model = make_model(pooling, sizes)
    if cuda_graph:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            replay_dense_layers(model.model, sizes.batch, device, torch.bfloat16)
    apply_optimizer_in_backward(RowWiseAdagrad, embedding_parameters(model), {"lr": 0.01})
    fused = {"output_dtype": SparseType.BF16} if device.type == "cuda" else {}
    sharders: list[ModuleSharder] = [
        EmbeddingBagCollectionSharder(fused_params={**fused}),
        EmbeddingCollectionSharder(fused_params={**fused}),
    ]
    tables = [*(f"table_{i}" for i in range(NUM_PLAIN)), "table_item"]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device=device.type),
        constraints={
            name: ParameterConstraints(
                sharding_types=[ShardingType.TABLE_WISE.value],
                compute_kernels=[EmbeddingComputeKernel.FUSED.value],
            )
            for name in tables
        },
        debug=False,
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    adam = KeyedOptimizerWrapper(
        dense, lambda params: torch.optim.Adam(params, lr=1e-3, fused=cuda_graph)
    )
    optimizer = CombinedOptimizer([sharded.fused_optimizer, adam])
    return TrainPipelineSparseDist(sharded, optimizer, device)


def formula(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One of the package's test formulas, as :class:`Explicit` wants it."""

    def attend(q: Tensor, kv: Tensor, history: JaggedTensor, max_length: int) -> Tensor:
        each = torch.arange(q.shape[0] + 1, device=q.device)
        return attention(q, *kv.unbind(1), each, history.offsets())

    return attend


def check_attentions(sizes: Sizes, device: torch.device, poolings: list[str]) -> dict[str, str]:
    """Output and gradients of the attentions, without a bias, against the formula in fp64.

    Returns:
        Why the ones that failed, or cannot run here, did.
    """
    generator = torch.Generator().manual_seed(1)
    lengths = make_lengths(sizes, generator)[:64].to(device)
    width, dtype = sizes.width, torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = torch.randn(int(lengths.sum()), width, generator=generator).to(device, dtype)
    target = torch.randn(lengths.numel(), width, generator=generator).to(device, dtype)
    out_grad = torch.randn(lengths.numel(), width, generator=generator).to(device, dtype)

    def results(attend: Callable[..., Tensor] | None, dtype: torch.dtype) -> dict[str, Tensor]:
        torch.manual_seed(1)
        attention: nn.Module = JaggedTargetAttention(
            width, sizes.heads, recency_bias=False, init="mha", device=device
        ).to(rows.dtype)
        if attend is not None:
            attention = Explicit(attention, attend, CLIP * sizes.mean)
        attention = attention.to(dtype)
        x, t = (leaf.to(dtype).requires_grad_() for leaf in (rows.clone(), target.clone()))
        out = attention(t, JaggedTensor(x, lengths=lengths))
        grads = torch.autograd.grad(out, (t, x), out_grad.to(dtype))
        return {"out": out, "gradient of target": grads[0], "gradient of history": grads[1]}

    expected = results(formula(flash_attention_oracle), torch.float64)
    plain = results(formula(flash_attention_plain), dtype)
    failed = {}
    for pooling in poolings:
        if pooling == "sum":
            continue
        try:
            actual = results(PEERS.get(pooling), dtype)
            for name, tensor in actual.items():
                is_gradient = name != "out"
                assert_close(tensor, expected[name], plain[name], gradient=is_gradient, name=name)
        except Exception as error:  # whatever a peer raises that cannot run here
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            failed[pooling] = textwrap.shorten(reason, 120)
    return failed


def gpu_busy_ms(step: Callable[[], object], steps: int) -> float:
    """Milliseconds of a step in which anything runs on the GPU."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    busy = end = 0.0
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return busy / steps / 1000


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


@dataclass
class Figures:
    """Of one pooling."""

    mean: int
    batch: int
    pooling: str
    rows_per_sample: float
    step_ms: float
    step_ms_p20: float
    step_ms_p80: float
    samples_per_s: float
    gpu_busy_ms: float = float("nan")
    peak_mib: float = float("nan")


class Training:
    """The training of a model with one pooling, past its first steps.

    Attributes:
        times: milliseconds of a step, of each round.
    """

    def __init__(
        self, pooling: str, sizes: Sizes, device: torch.device, args: argparse.Namespace
    ) -> None:
        self.pooling, self.sizes, self.args, self.device = pooling, sizes, args, device
        self.on_gpu = device.type == "cuda"
        before = torch.cuda.memory_allocated() if self.on_gpu else 0
        batches = make_batches(sizes, device)
        lengths = [batch.sparse_features.lengths()[-sizes.batch :] for batch in batches]
        self.rows_per_sample = int(torch.cat(lengths).sum()) / len(batches) / sizes.batch
        self.pipeline = make_pipeline(pooling, sizes, device, args.cuda_graph)
        self.batches: Iterator[Batch] = itertools.cycle(batches)
        self.times: list[float] = []
        for _ in range(args.warmup):
            self.step()
        self.synchronize()
        self.own_bytes = torch.cuda.memory_allocated() - before if self.on_gpu else 0

    def step(self) -> None:
        with torch.autocast("cuda", torch.bfloat16) if self.on_gpu else contextlib.nullcontext():
            self.pipeline.progress(self.batches)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def time_round(self) -> None:
        self.step()  # what the one before left in the caches is none of its time
        self.synchronize()
        start = time.perf_counter()
        for _ in range(self.args.steps):
            self.step()
        self.synchronize()
        self.times.append((time.perf_counter() - start) / self.args.steps * 1e3)

    def peak_mib(self) -> float:
        """Without what the other trainings hold."""
        others = torch.cuda.memory_allocated() - self.own_bytes
        torch.cuda.reset_peak_memory_stats()
        for _ in range(NUM_BATCHES):
            self.step()
        self.synchronize()
        return (torch.cuda.max_memory_allocated() - others) / 2**20

    def figures(self) -> Figures:
        p20, _, _, p80 = statistics.quantiles(self.times, n=5, method="inclusive")
        median = statistics.median(self.times)
        figures = Figures(
            self.sizes.mean,
            self.sizes.batch,
            self.pooling,
            self.rows_per_sample,
            median,
            p20,
            p80,
            self.sizes.batch / median * 1e3,
        )
        if self.on_gpu:
            figures.peak_mib = self.peak_mib()
            figures.gpu_busy_ms = gpu_busy_ms(self.step, min(self.args.steps, 20))
        return figures


def stamp(device: torch.device, args: argparse.Namespace) -> dict[str, str]:
    """What figures were measured with."""
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "torch": torch.__version__,
        "torchrec": importlib.metadata.version("torchrec"),
        "torchrec_jagged_attn": torchrec_jagged_attn.__version__,
        "replays": os.environ.get("TORCHREC_JAGGED_ATTN_REPLAY", "1"),
        "dense_layers": "CUDA graphs, fused Adam" if args.cuda_graph else "eager",
        "backward_in": "the caller's thread" if args.one_thread else "autograd's thread",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def in_rows(figures: pd.DataFrame) -> pd.DataFrame:
    """A row for each figure, in the columns of ``run.py``'s CSV."""
    metrics = {
        ("time", "ms"): ("step_ms", "step_ms_p20", "step_ms_p80"),
        ("gpu_busy", "ms"): ("gpu_busy_ms",) * 3,
        ("peak_memory", "MiB"): ("peak_mib",) * 3,
    }
    of_figures = {name for names in metrics.values() for name in names} | {"samples_per_s"}
    parts = []
    for (metric, unit), names in metrics.items():
        labels = {
            "suite": "dlrm_step",
            "case": "mean-" + figures["mean"].astype(str),
            "provider": figures["pooling"],
            "mode": "step",
            "metric": metric,
            **{q: figures[name] for q, name in zip(("median", "p20", "p80"), names, strict=True)},
            "unit": unit,
        }
        rest = figures.drop(columns=[*of_figures, "mean", "pooling"])
        parts.append(pd.DataFrame(labels).join(rest))
    return pd.concat(parts).dropna(subset="median")


def print_figures(frame: pd.DataFrame, console: Console) -> None:
    """A table for each size; the last column is a step's time in those of the sum."""
    for (mean, batch), part in frame.groupby(["mean", "batch"], sort=False):
        table = Table(
            *("pooling", "step ms", "GPU busy ms", "peak MiB", "samples/s", "× sum"),
            title=f"mean {mean}, batch {batch}",
            box=None,
        )
        of_sum = part.set_index("pooling")["step_ms"].get("sum")
        for row in part.itertuples():
            ratio = "–" if of_sum is None else f"{row.step_ms / of_sum:.2f}"
            table.add_row(
                row.pooling,
                f"{row.step_ms:.2f}",
                f"{row.gpu_busy_ms:.2f}",
                f"{row.peak_mib:.0f}",
                f"{row.samples_per_s:.4g}",
                ratio,
            )
        console.print(table)


def sizes_of(args: argparse.Namespace) -> tuple[Sizes, ...]:
    """What is measured: tiny sizes if asked for, and on any CPU."""
    return QUICK if args.quick or not torch.cuda.is_available() else SIZES


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # fmt: off
    parser.add_argument("--poolings", nargs="+", choices=POOLINGS, default=[*POOLINGS])
    parser.add_argument("--means", nargs="+", type=int, help="of the sizes, which to run")
    parser.add_argument("--quick", action="store_true",
                        help="tiny sizes, where the host is the limit; always so on a CPU")
    parser.add_argument("--steps", type=int, default=50, help="of a round")
    parser.add_argument("--rounds", type=int, default=7, help="whose median is a step's time")
    parser.add_argument("--warmup", type=int, default=20, help="steps that are not timed")
    parser.add_argument("--one-thread", action="store_true",
                        help="backward runs in the caller's thread, not in one of autograd's own")
    parser.add_argument("--cuda-graph", action="store_true",
                        help="dense layers are CUDA graphs, and Adam one kernel, in all poolings")
    parser.add_argument("--host", action="store_true", help="the host's time by part, profiled")
    parser.add_argument("--csv", type=Path, help="file to write the figures to")
    # fmt: on
    args = parser.parse_args(argv)
    known = [sizes.mean for sizes in sizes_of(args)]
    if unknown := set(args.means or ()).difference(known):
        parser.error(f"--means must be of {known}, got {sorted(unknown)}")
    if args.cuda_graph and not torch.cuda.is_available():
        parser.error("--cuda-graph needs a GPU, got none")
    if args.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {args.rounds}")
    return args


def measure(sizes: Sizes, args: argparse.Namespace, device: torch.device) -> list[Figures]:
    """Figures of all poolings, whose rounds take turns: a machine is not as fast all the time.

    Profiles come last: what they have hooked into CUDA stays there, and slows down what follows.
    """
    failed = check_attentions(sizes, device, args.poolings)
    for pooling, reason in failed.items():
        print(f"{pooling}: not measured, {reason}")
    trainings = [
        Training(pooling, sizes, device, args) for pooling in args.poolings if pooling not in failed
    ]
    gc.collect()
    gc.freeze()  # the models of the others are no garbage, and take long to look through
    for _ in range(args.rounds):
        for training in trainings:
            training.time_round()
    figures = [training.figures() for training in trainings]
    for training in trainings if args.host else ():
        print(f"{training.pooling}:")
        print(host_parts(training.step, args.steps).to_string(float_format="%.1f"))
    gc.unfreeze()
    return figures


def measure_all(args: argparse.Namespace, device: torch.device) -> pd.DataFrame:
    """Figures of all sizes and poolings."""
    figures = []
    for sizes in sizes_of(args):
        if args.means and sizes.mean not in args.means:
            continue
        figures += measure(sizes, args, device)
        gc.collect()  # sharded models lie in reference cycles
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return pd.DataFrame(figures).assign(**stamp(device, args))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        with torch.autograd.set_multithreading_enabled(not args.one_thread):
            figures = measure_all(args, device)
        print_figures(figures, console)
        if args.csv:
            in_rows(figures).to_csv(args.csv, index=False, float_format="%.5g")
    finally:
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
