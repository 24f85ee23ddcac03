"""Keep rows in few bytes in several ways, and print what squared error each leaves.

    python benchmarks/semantic_ids.py                                # of synthetic rows
    python benchmarks/semantic_ids.py --data data/ml-1m --csv semantic_ids.csv

Synthetic rows are normal, with a spectrum that falls as a power of its rank. With --data, a folder
of MovieLens-1M, the embeddings of films are rows, too, learned by the ranking model of
``quality.py`` with mean pooling, in several passes over its training events.

    integers       each row's own range in equal steps of 2, 4 or 8 bits, with its least value and
                   step in fp16, as tables of FBGEMM have them
    k-means        residual k-means: one byte a stage, for 256 centers of what is left before it
    discrete PCA   codes of three levels, five to a byte, or of 15, two to a byte

Bytes are those that a row takes, counted; those that all rows share (centers; mean and directions)
are given beside them, in fp32. Errors are in parts of the rows' squared distances from their mean:
of the rows that were fitted, three quarters of all, and of the others. Many centers fit few rows.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))  # a checkout runs without being installed

import quality
from events import DataError
from options import writable_file

from torchrec_jagged_attn.semantic_ids import DiscretePCA, PackedCodes

MADE_UP = "synthetic"
BITS = (2, 4, 8)
LEVELS = (3, 15)
CENTERS = 256


class Kept(NamedTuple):
    """What a way of keeping rows makes of them.

    Attributes:
        stored: tensors of ``N`` rows each, whose bytes count.
        shared: those that all rows need.
        rows: ``[N, D]`` as they come back.
    """

    stored: list[Tensor]
    shared: list[Tensor]
    rows: Tensor


Keep = Callable[[Tensor], Kept]


def keep_integers(rows: Tensor, bits: int) -> Kept:
    """Equal steps of each row's own range."""
    low, high = rows.aminmax(dim=1, keepdim=True)
    low, step = low.half(), ((high - low) / (2**bits - 1)).half()
    factor = torch.where(step > 0, 1 / step.float(), 0)
    codes = ((rows - low.float()) * factor).round().clamp(0, 2**bits - 1).to(torch.uint8)
    per_byte = 8 // bits
    parts = F.pad(codes, (0, -codes.shape[1] % per_byte)).unflatten(1, (-1, per_byte))
    packed = (parts << (torch.arange(per_byte, device=rows.device) * bits)).sum(2).byte()
    return Kept([packed, low, step], [], low.float() + step.float() * codes)


def fit_k_means(rows: Tensor, num_bytes: int, seed: int = 0, steps: int = 25) -> Keep:
    """Residual k-means by Lloyd's steps, from rows drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    residual, centers = rows.clone(), []
    for _ in range(num_bytes):
        drawn = torch.randperm(len(rows), generator=generator)[:CENTERS].to(rows.device)
        found = residual[drawn]
        for _ in range(steps):
            nearest = nearest_of(residual, found)
            sums = torch.zeros_like(found).index_add_(0, nearest, residual)
            counts = nearest.bincount(minlength=len(found)).unsqueeze(1)
            found = torch.where(counts > 0, sums / counts, found)
        residual -= found[nearest_of(residual, found)]
        centers.append(found)

    def keep(rows: Tensor) -> Kept:
        residual, codes = rows.clone(), []
        for found in centers:
            nearest = nearest_of(residual, found)
            residual -= found[nearest]
            codes.append(nearest.to(torch.uint8))
        return Kept([torch.stack(codes, 1)], centers, rows - residual)

    return keep


def nearest_of(rows: Tensor, centers: Tensor) -> Tensor:
    """Which center is nearest to each row, ``[N]``."""
    return (centers.square().sum(1) - 2 * rows @ centers.T).argmin(1)


def fit_discrete_pca(rows: Tensor, num_bytes: int, num_levels: int) -> Keep:
    """As many codes as the bytes hold."""
    num_codes = num_bytes * PackedCodes(1, num_levels).codes_per_byte
    pca = DiscretePCA(rows.shape[1], num_codes, num_levels, device=rows.device)
    pca.fit(rows)

    def keep(rows: Tensor) -> Kept:
        packed = pca.packed_codes.pack(pca.encode(rows))
        return Kept([packed], [pca.mean, pca.basis], pca(packed))

    return keep


def make_up(num_rows: int, width: int, power: float = 0.75, seed: int = 0) -> Tensor:
    """Normal rows; their principal components' standard deviations are powers of their rank."""
    generator = torch.Generator().manual_seed(seed)
    axes = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    deviations = torch.arange(1, width + 1) ** -power
    return torch.randn(num_rows, width, generator=generator) * deviations @ axes


def learn(data: str, width: int, epochs: int, device: str, seed: int = 0) -> Tensor:
    """Embeddings of the items of ``data`` that a training event has."""
    run = quality.Run(data, "mean", seed, width=width)
    events = quality.events_of(data, run.max_history, seed)
    trainer = quality.Trainer(run, events, device)
    for epoch in range(epochs):
        for batch in trainer.batches(events.training(epoch)):
            trainer.learn(batch)
    rows = trainer.model.tables.embeddings["item_table"].weight.detach()
    of_training = np.unique(events.log.item[events.train_rows])
    return rows[torch.from_numpy(of_training).to(device)]


def compare(name: str, rows: Tensor, budgets: list[int]) -> Iterator[dict[str, object]]:
    """A line of the table for each way and budget."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).to(rows.device)
    others, fitted = rows[order].split([len(rows) // 4, len(rows) - len(rows) // 4])
    part = functools.partial
    ways: list[tuple[str, Callable[[], Keep]]] = [
        (f"integers, {bits} bits", part(part, keep_integers, bits=bits)) for bits in BITS
    ]
    for size in budgets:
        ways.append(("k-means", part(fit_k_means, fitted, size)))
        for levels in LEVELS:
            way = f"discrete PCA, {levels} levels"
            ways.append((way, part(fit_discrete_pca, fitted, size, levels)))
    for way, fit in ways:
        keep = fit()
        kept = keep(fitted)
        yield {
            "rows": f"{name} {list(rows.shape)}",
            "way": way,
            "bytes": sum(x.nbytes for x in kept.stored) / len(fitted),
            "shared, KiB": sum(x.nbytes for x in kept.shared) / 2**10,
            "error": error_of(fitted, kept.rows),
            "of others": error_of(others, keep(others).rows),
        }


def error_of(rows: Tensor, kept: Tensor) -> float:
    """Squares of what is lost, in parts of those of distances from the mean."""
    return ((rows - kept).square().sum() / (rows - rows.mean(0)).square().sum()).item()


def print_comparison(lines: pd.DataFrame, console: Console) -> None:
    """By rows and bytes."""
    lines = lines.sort_values(["rows", "bytes"], kind="stable")
    table = Table(*(str(name) for name in lines.columns))
    for line in lines.itertuples(index=False):
        rows, way, size, shared, *errors = line
        table.add_row(rows, way, f"{size:g}", f"{shared:.1f}", *(f"{x:.3%}" for x in errors))
    console.print(table)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="a folder of MovieLens-1M, whose embeddings are learned")
    parser.add_argument("--rows", type=int, default=20000, help="of synthetic data")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4, help="of learning embeddings")
    parser.add_argument("--bytes", type=int, nargs="+", help="budgets; those of integers, and half")
    parser.add_argument("--csv", type=writable_file, help="write the table there, too")
    args = parser.parse_args(argv)
    if args.width < 4 or args.width % 4:
        parser.error(f"--width must be a multiple of 4, got {args.width}")
    if args.bytes is None:
        args.bytes = [-(-args.width // 8), *(-(-args.width * bits // 8) + 4 for bits in BITS)]
    for name, values in (("rows", [args.rows]), ("epochs", [args.epochs]), ("bytes", args.bytes)):
        if min(values) < 1:
            parser.error(f"--{name} must be at least 1, got {min(values)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tables = {MADE_UP: make_up(args.rows, args.width).to(device)}
    try:
        if args.data is not None:
            tables[Path(args.data).name] = learn(args.data, args.width, args.epochs, device)
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    lines = pd.DataFrame(
        [line for name, rows in tables.items() for line in compare(name, rows, args.bytes)]
    )
    print_comparison(lines, Console())
    if args.csv is not None:
        lines.assign(**quality.measured_with(device)).to_csv(args.csv, index=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
