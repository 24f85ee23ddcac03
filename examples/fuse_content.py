"""Learn semantic ids of the films of MovieLens-1M from their content, and evaluate them.

    python examples/fuse_content.py --data data/ml-1m --download
    python examples/fuse_content.py --data data/ml-1m --bytes 4

A film has three embeddings: hashed words of its title, genres, and co-ratings, which count films
that users rated immediately before or after it in the training split. VQFusion encodes them
together as codes of three levels, five per byte, from which it reconstructs the embeddings and
predicts the combination of genres and the decade. Codes and model are saved for `history_codes` of
TargetAttentionConfig.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from options import HelpFormatter, end_on_ctrl_c, number, writable_file

HASHES = 64
"""Width of the embeddings of titles and of co-ratings."""
SHOWN = ("Toy Story (1995)", "Alien (1979)", "Casablanca (1942)")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    # fmt: off
    parser.add_argument("--data", type=Path, required=True, help="folder of MovieLens-1M")
    parser.add_argument("--download", action="store_true", help="fetch MovieLens-1M into --data")
    parser.add_argument("--bytes", type=number(int, 1, 512), default=8, help="per film")
    parser.add_argument("--width", type=number(int, 1, 4096), default=64,
                        help="width of the latents")
    parser.add_argument("--steps", type=number(int, 1, 10**6), default=300,
                        help="full-batch steps, before and after latents are quantized each")
    parser.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0,
                        help="seed of the weights")
    parser.add_argument("--out", type=writable_file, default="runs/fuse_content/codes.pt",
                        help="output file of codes and model")
    # fmt: on
    return parser.parse_args()


if __name__ == "__main__":
    end_on_ctrl_c()
    ARGS = parse_args()  # before the imports, which take seconds

import numpy as np
import torch
import torch.nn.functional as F
from events import DataError, Events
from movielens import download_movielens, read_films, read_movielens
from rich.console import Console
from rich.table import Table
from torch import Tensor

from torchrec_jagged_attn.semantic_ids import VQFusion


def hashed_titles(titles: Sequence[str]) -> Tensor:
    """Hash titles to ``[F, HASHES]``: a word adds 1 or -1 to the column of its hash."""
    rows = torch.zeros(len(titles), HASHES)
    for row, title in zip(rows, titles, strict=True):
        for word in re.findall(r"[a-z0-9]+", title.lower()):
            digest = zlib.crc32(word.encode())
            row[digest % HASHES] += 1 if digest >> 31 else -1
    return rows


def genre_columns(genres: Sequence[str]) -> Tensor:
    """Multi-hot genres ``[F, G]`` of films with genres such as `Comedy|Drama`."""
    names = sorted({name for combined in genres for name in combined.split("|")})
    return torch.tensor([[float(name in x.split("|")) for name in names] for x in genres])


def co_rating_factors(before: Tensor, after: Tensor, num_films: int) -> Tensor:
    """Factorize the positive pointwise mutual information of co-rated films: ``[F, HASHES]``.

    Args:
        before, after: ``[P]``, pairs of films that a user rated one after the other.
        num_films: ``F``.
    """
    counts = torch.zeros(num_films, num_films, device=before.device)
    counts.index_put_((before, after), torch.ones_like(before, dtype=torch.float32), True)
    counts += counts.T.clone()
    totals = counts.sum(1)
    expected = torch.outer(totals, totals) / totals.sum()
    information = torch.where(counts > 0, torch.log(counts / expected), 0).clamp(min=0)
    torch.manual_seed(0)
    left, values, _ = torch.svd_lowrank(information, HASHES)
    return left * values.sqrt()


def make_labels(titles: Sequence[str], genres: Sequence[str]) -> dict[str, Tensor]:
    """Classes ``[F]``: the combination of genres, and the decade at the end of the title."""
    years = [re.search(r"\((\d{4})\)\s*$", title) for title in titles]
    decades = [int(year[1]) // 10 if year else 0 for year in years]
    return {
        name: torch.from_numpy(np.unique(values, return_inverse=True)[1])
        for name, values in (("genres combined", genres), ("decade", decades))
    }


def fuse(
    embeddings: Mapping[str, Tensor],
    labels: Mapping[str, Tensor],
    *,
    width: int,
    num_bytes: int,
    steps: int,
    seed: int = 0,
) -> VQFusion:
    """Train a model on all films, ``steps`` without quantization and ``steps`` with it."""
    torch.manual_seed(seed)
    fusion = VQFusion(
        {name: x.shape[1] for name, x in embeddings.items()},
        {name: int(x.max()) + 1 for name, x in labels.items()},
        latent_dim=width,
        num_codes=5 * num_bytes,
        device=next(iter(embeddings.values())).device,
    )
    optimizer = torch.optim.Adam(fusion.parameters(), lr=1e-3)
    for quantize in (False, True):
        if quantize:
            fusion.fit([embeddings])
        for _ in range(steps):
            optimizer.zero_grad()
            fusion(embeddings, labels, quantize=quantize).loss.backward()
            optimizer.step()
    return fusion


@torch.no_grad()
def show(
    fusion: VQFusion,
    embeddings: Mapping[str, Tensor],
    labels: Mapping[str, Tensor],
    titles: Sequence[str],
) -> None:
    """Print reconstruction and accuracy from codes, and films with similar codes."""
    rows = fusion.pca.decode(fusion.encode(embeddings))
    console = Console()
    metrics = Table("decoded", title="Decoded from codes")
    metrics.add_column("cosine similarity", justify="right")
    metrics.add_column("accuracy", justify="right")
    for decoder, (name, x) in zip(fusion.decoders, embeddings.items(), strict=True):
        metrics.add_row(name, f"{F.cosine_similarity(decoder(rows), x).mean():.3f}", "")
    for head, (name, label) in zip(fusion.heads, labels.items(), strict=True):
        accuracy = (head(rows).argmax(1) == label).double().mean()
        metrics.add_row(name, "", f"{accuracy:.1%}")
    console.print(metrics)
    similar = Table("film", "nearest by codes")
    unit = F.normalize(rows - fusion.pca.mean)
    for title in (title for title in SHOWN if title in titles):
        index = titles.index(title)
        nearest = (unit @ unit[index]).topk(min(4, len(titles))).indices.tolist()
        similar.add_row(title, ", ".join(titles[i] for i in nearest if i != index))
    if similar.row_count:
        console.print(similar)


def main(args: argparse.Namespace) -> None:
    if args.download:
        download_movielens(args.data)
    log = read_movielens(args.data)
    titles, genres = read_films(args.data)
    rows = Events(log).rows_of_training
    pairs = rows[1:][(np.diff(rows) == 1) & (np.diff(log.user[rows]) == 0)]
    embeddings = {
        "title": hashed_titles(titles),
        "genres": genre_columns(genres),
        "co-ratings": co_rating_factors(
            torch.from_numpy(log.item[pairs - 1]), torch.from_numpy(log.item[pairs]), len(titles)
        ),
    }
    labels = make_labels(titles, genres)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    embeddings = {name: x.to(device) for name, x in embeddings.items()}
    labels = {name: x.to(device) for name, x in labels.items()}
    fusion = fuse(
        embeddings,
        labels,
        width=args.width,
        num_bytes=args.bytes,
        steps=args.steps,
        seed=args.seed,
    )
    show(fusion, embeddings, labels, titles)
    codes = fusion.pca.packed_codes.pack(fusion.encode(embeddings))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"codes": codes.cpu(), "fusion": fusion.state_dict()}, args.out)
    print(f"{len(codes):,} codes of {codes.shape[1]} bytes: {args.out}")


if __name__ == "__main__":
    try:
        main(ARGS)
    except (DataError, OSError) as error:
        sys.exit(f"error: {error}")
