"""Keep rows in few bytes in several ways, and print what squared error each leaves.

Rows are normal, with a spectrum that falls as a power of its rank.

    integers       each row's own range in equal steps of 2, 4 or 8 bits, with its least value and
                   step in fp16, as tables of FBGEMM have them
    k-means        residual k-means: one byte a stage, for 256 centers of what is left before it
    discrete PCA   codes of three levels, five to a byte, or of 15, two to a byte

Bytes are those that a row takes, counted; those that all rows share (centers; mean and directions)
are given beside them, in fp32. Errors are in parts of the rows' squared distances from their mean:
of the rows that were fitted, three quarters of all, and of the others. Many centers fit few rows.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, whatever is installed

from torchrec_jagged_attn.semantic_ids import DiscretePCA, PackedCodes

ROWS, WIDTH = 20_000, 64
BITS = (2, 4, 8)
LEVELS = (3, 15)
CENTERS = 256
BYTES = (8, 20, 36)
"""Of a row, for k-means and discrete PCA; integers of 2 and 4 bits take 20 and 36."""


class Kept(NamedTuple):
    """What a way of keeping rows makes of them."""

    stored: list[Tensor]  # tensors of N rows each, whose bytes count
    shared: list[Tensor]  # those that all rows need
    rows: Tensor  # [N, D] as decoded


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


def compare(rows: Tensor, budgets: Sequence[int] = BYTES) -> Iterator[dict[str, object]]:
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
            "way": way,
            "bytes": sum(x.nbytes for x in kept.stored) / len(fitted),
            "shared, KiB": sum(x.nbytes for x in kept.shared) / 2**10,
            "error": error_of(fitted, kept.rows),
            "of others": error_of(others, keep(others).rows),
        }


def error_of(rows: Tensor, kept: Tensor) -> float:
    """Squares of what is lost, in parts of those of distances from the mean."""
    return ((rows - kept).square().sum() / (rows - rows.mean(0)).square().sum()).item()


def main() -> None:
    """Print a line for each way and budget, by bytes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lines = pd.DataFrame(compare(make_up(ROWS, WIDTH).to(device)))
    print(lines.sort_values("bytes", kind="stable").to_string(index=False))


if __name__ == "__main__":
    main()
