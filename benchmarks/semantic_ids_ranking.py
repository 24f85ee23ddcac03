"""Rank with items that are kept in few bytes, in several ways, and print AUC, NE and footprints.

    python benchmarks/semantic_ids_ranking.py --data data/ml-1m --csv semantic_ids_ranking.csv
    python benchmarks/semantic_ids_ranking.py --data data/ml-1m@1000 --bytes 8 --epochs 2

Data are a folder of MovieLens-1M; ``PATH@1000`` takes the 1000 users of the lowest ids. Items are
embedded by the ranking model of ``quality.py`` with mean pooling, and these rows are kept in few
bytes, as ``semantic_ids.py`` keeps them:

    rows              fp32, which bound the others
    integers          each row's own range in equal steps of 2, 4 or 8 bits
    k-means           residual k-means; a byte a stage
    discrete PCA      codes of three levels, five to a byte
    FSQ               finite scalar quantization of a linear autoencoder's latents, 15 levels, two
                      to a byte

Then a model with target attention is trained on what comes back of them, for candidates, too. Rows
are data; of ``+ tables`` and ``+ basis``, what codes stand for is trained further. Two ways do not
begin with those rows:

    hashed table      a table of as many bytes as all codes have, which items share by a hash
    VQ fusion         codes of what content says: hashes of the title's words, genres, and which
                      films are rated one after the other; with the genres and the decade as labels

Bytes are those of a row, counted. The footprint is that of all rows and of what they share, in
fp32. Models, batches and figures are those of ``quality.py``, of its test events. Finished
trainings are written to --csv at once; those that are in it are not run again.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))  # a checkout runs without being installed
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import quality
from events import DataError, Events
from fuse_content import fuse, genre_columns, hashed_titles, labels_of, neighbours
from movielens import read_films
from options import writable_file
from semantic_ids import (
    BITS,
    Kept,
    fit_discrete_pca,
    fit_k_means,
    keep_integers,
    learn,
)

from torchrec_jagged_attn import PackedCodes

LEVELS = 15  # of FSQ
STEPS = 300  # of each stage of an autoencoder


KEY = ["data", "max_history", "width", "epochs", "way", "budget", "seed"]
"""What tells a training from others."""


class Way(NamedTuple):
    """A way to keep items in a budget of bytes a row, and the module that makes rows of ids.

    The budget of those that have none is 0.
    """

    name: str
    budget: int
    kept: Kept
    items: nn.Module


class Rows(nn.Module):
    """Rows that are not trained."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows.detach().clone())

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows[ids]


class Codes(nn.Module):
    """Rows of codes: a mean and a basis, which are trained.

    All items' rows are made in each call: they are fewer than those of a batch.
    """

    def __init__(self, codes: Tensor, mean: Tensor, basis: Tensor) -> None:
        super().__init__()
        self.register_buffer("codes", codes.to(basis.dtype))
        self.mean, self.basis = (nn.Parameter(x.detach().clone()) for x in (mean, basis))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, torch.addmm(self.mean, self.codes, self.basis))


class Tables(nn.Module):
    """Sums of rows of tables, one for each byte, which are trained; made as those of codes."""

    def __init__(self, codes: Tensor, tables: list[Tensor]) -> None:
        super().__init__()
        lengths = torch.tensor([len(table) for table in tables], device=codes.device)
        self.register_buffer("places", codes.long() + lengths.cumsum(0) - lengths)
        self.tables = nn.Parameter(torch.cat(tables).clone())

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, F.embedding(self.places, self.tables).sum(1))


def fit_fsq(rows: Tensor, num_bytes: int, seed: int = 0) -> Kept:
    """Latents of a linear autoencoder, rounded to multiples of ``1 / h`` between -1 and 1.

    Source:
        Finite Scalar Quantization (ICLR '24, https://arxiv.org/abs/2309.15505).
    """
    torch.manual_seed(seed)
    ids = PackedCodes(2 * num_bytes, LEVELS)
    encoder = nn.Linear(rows.shape[1], ids.num_codes).to(rows.device)
    decoder = nn.Linear(ids.num_codes, rows.shape[1]).to(rows.device)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
    for _ in range(4 * STEPS):
        latents = encoder(rows).tanh() * ids.largest_code
        made = decoder((latents + (latents.round() - latents).detach()) / ids.largest_code)
        optimizer.zero_grad()
        F.mse_loss(made, rows).backward()
        optimizer.step()
    with torch.no_grad():
        codes = (encoder(rows).tanh() * ids.largest_code).round().to(torch.int8)
        shared = [x.detach() for x in decoder.parameters()]
        made = decoder(codes.to(rows.dtype) / ids.largest_code)
        return Kept([ids.pack(codes)], shared, made)


def content_of(
    data: str, events: Events, device: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Embeddings of films by what is said of them, and their labels, as ``fuse_content.py`` has
    them: neighbours are of training events alone.
    """
    titles, genres = read_films(Path(re.sub(r"@\d+$", "", data)))
    user, item, rows = events.log.user, events.log.item, events.rows_of_training
    rows = rows[1:][user[rows[1:]] == user[rows[1:] - 1]]  # those of a user come first
    before, after = torch.from_numpy(item[rows - 1]), torch.from_numpy(item[rows])
    embeddings = {
        "title": hashed_titles(titles),
        "genres": genre_columns(genres),
        "neighbours": neighbours(before, after, len(titles)),
    }
    return (
        {key: value.to(device) for key, value in embeddings.items()},
        {key: value.to(device) for key, value in labels_of(titles, genres).items()},
    )


def keep_content(data: str, events: Events, width: int, num_bytes: int, device: str) -> Kept:
    """Codes of what content says, by ``VQFusion``, of rows of length one in the mean."""
    embeddings, labels = content_of(data, events, device)
    fusion = fuse(embeddings, labels, width=width, num_bytes=num_bytes, steps=STEPS)
    packed = fusion.pca.packed_codes.pack(fusion.encode(embeddings))
    rows = fusion.pca(packed).detach()
    factor = 1 / rows.norm(dim=1).mean()
    shared = [fusion.pca.mean.detach() * factor, fusion.pca.basis.detach() * factor]
    return Kept([packed], shared, rows * factor)


def codes_of(kept: Kept) -> Codes:
    """Of what :func:`fit_discrete_pca` or :func:`keep_content` keeps, in three levels."""
    mean, basis = kept.shared
    return Codes(PackedCodes(len(basis)).unpack(kept.stored[0]), mean, basis)


def ways(data: str, events: Events, rows: Tensor, budgets: list[int]) -> list[Way]:
    """All of them."""
    found = [Way("rows", 0, Kept([rows], [], rows), Rows(rows))]
    for bits in BITS:
        kept = keep_integers(rows, bits)
        found.append(Way(f"integers, {bits} bits", 0, kept, Rows(kept.rows)))
    num_items, width = rows.shape
    for size in budgets:
        k_means = fit_k_means(rows, size)(rows)
        pca = fit_discrete_pca(rows, size, 3)(rows)
        fsq, fused = fit_fsq(rows, size), keep_content(data, events, width, size, str(rows.device))
        table = torch.randn(-(-num_items * size // (4 * width)), width, device=rows.device)
        places = torch.arange(num_items, device=rows.device) * 2654435761 % 2**32 % len(table)
        found += [
            Way("k-means", size, k_means, Rows(k_means.rows)),
            Way("k-means + tables", size, k_means, Tables(k_means.stored[0], k_means.shared)),
            Way("discrete PCA", size, pca, Rows(pca.rows)),
            Way("discrete PCA + basis", size, pca, codes_of(pca)),
            Way("FSQ", size, fsq, Rows(fsq.rows)),
            Way(
                "hashed table",
                size,
                Kept([], [table], table[places]),
                Tables(places.unsqueeze(1), [table * width**-0.5]),
            ),
            Way("VQ fusion + basis", size, fused, codes_of(fused)),
        ]
    return found


def compare(args: argparse.Namespace, device: str) -> Iterator[dict[str, object]]:
    """A line for each seed and way; those that ``args.csv`` has are not trained again."""
    done = quality.finished(args.csv, [*KEY, "auc", "ne"])
    done = {tuple(line[name] for name in KEY): line for line in done}
    run = quality.Run(args.data, "attention", max_history=args.max_history, width=args.width)
    events = quality.events_of(args.data, args.max_history, 0)
    rows = learn(args.data, args.width, args.epochs, device, all_items=True)
    found = ways(args.data, events, rows, args.bytes)
    of_run = [Path(args.data).name, args.max_history, args.width, args.epochs]
    for seed in range(args.seeds):
        for way in found:
            key = (*of_run, way.name, way.budget, seed)
            if key not in done:
                stored = sum(x.nbytes for x in way.kept.stored)
                shared = sum(x.nbytes for x in way.kept.shared)
                items = copy.deepcopy(way.items)
                scores = quality.train(dataclasses.replace(run, seed=seed), device, items)
                line = dict(zip(KEY, key, strict=True)) | {
                    "bytes": stored / len(rows),
                    "shared, KiB": shared / 2**10,
                    "footprint, KiB": (stored + shared) / 2**10,
                    "auc": scores["auc"],
                    "ne": scores["ne"],
                }
                done[key] = quality.append(args.csv, line, device)
            yield done[key]


def print_comparison(lines: pd.DataFrame, console: Console) -> None:
    """Means of all seeds, in the order of the ways; the bytes of a row are its budget, if any."""
    lines = lines.assign(bytes=lines["budget"].where(lines["budget"] > 0, lines["bytes"]))
    keys = ["way", "bytes", "shared, KiB", "footprint, KiB"]
    means = lines.groupby(keys, sort=False)[["auc", "ne"]].mean().reset_index()
    table = Table(*means.columns, box=None)
    for way, size, shared, footprint, auc, ne in means.itertuples(index=False):
        cells = f"{size:g}", f"{shared:.1f}", f"{footprint:.1f}", f"{auc:.4f}", f"{ne:.4f}"
        table.add_row(way, *cells)
    console.print(table)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="a folder of MovieLens-1M, or PATH@USERS")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--max-history", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=6, help="in which rows are learned")
    parser.add_argument("--bytes", type=int, nargs="+", default=[8, 20], help="of a row of codes")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--csv", type=writable_file, help="of all trainings; those in it are not run again"
    )
    args = parser.parse_args(argv)
    if args.width < 4 or args.width % 4:
        parser.error(f"--width must be a multiple of 4, got {args.width}")
    for name in ("max_history", "epochs", "seeds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if min(args.bytes) < 1:
        parser.error(f"--bytes must be at least 1, got {min(args.bytes)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lines = []
    try:
        for line in compare(args, device):
            lines.append(line)
            print(f"{line['way']}: AUC {line['auc']:.4f}", file=sys.stderr)
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    print_comparison(pd.DataFrame(lines), Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
