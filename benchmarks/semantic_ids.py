"""Compare methods that store rows in few bytes by their squared error.

Rows are synthetic and normal, with a spectrum that decays as a power of the rank.

    integers       uniform steps over each row's range, 2, 4 or 8 bits per value, with minimum and
                   step in fp16, like FBGEMM's quantized tables
    k-means        residual k-means: one byte per stage, for 256 centers of the previous residual
    discrete PCA   codes of 3 levels, five per byte, or of 15 levels, two per byte

Bytes are counted per row; shared tensors (centers; mean and basis) are listed separately, in fp32.
Errors are relative to the squared distances of the rows from their mean, for the fitted three
quarters of the rows and for the held-out quarter. Many centers overfit few rows.
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
"""Per row, for k-means and discrete PCA; integers of 2 and 4 bits take 20 and 36."""


class Stored(NamedTuple):
    """Rows as a method stores them."""

    per_row: list[Tensor]  # tensors of N rows each
    shared: list[Tensor]  # tensors that all rows share
    decoded: Tensor  # [N, D]


Method = Callable[[Tensor], Stored]


def quantize(rows: Tensor, bits: int) -> Stored:
    """Quantize each row to uniform steps over its range."""
    low, high = rows.aminmax(dim=1, keepdim=True)
    low, step = low.half(), ((high - low) / (2**bits - 1)).half()
    factor = torch.where(step > 0, 1 / step.float(), 0)
    codes = ((rows - low.float()) * factor).round().clamp(0, 2**bits - 1).to(torch.uint8)
    per_byte = 8 // bits
    grouped = F.pad(codes, (0, -codes.shape[1] % per_byte)).unflatten(1, (-1, per_byte))
    packed = (grouped << (torch.arange(per_byte, device=rows.device) * bits)).sum(2).byte()
    return Stored([packed, low, step], [], low.float() + step.float() * codes)


def fit_k_means(rows: Tensor, num_bytes: int, seed: int = 0, steps: int = 25) -> Method:
    """Fit residual k-means by Lloyd's algorithm, initialized with random rows."""
    generator = torch.Generator().manual_seed(seed)
    residual, stages = rows.clone(), []
    for _ in range(num_bytes):
        chosen = torch.randperm(len(rows), generator=generator)[:CENTERS].to(rows.device)
        centers = residual[chosen]
        for _ in range(steps):
            nearest = nearest_center(residual, centers)
            sums = torch.zeros_like(centers).index_add_(0, nearest, residual)
            counts = nearest.bincount(minlength=len(centers)).unsqueeze(1)
            centers = torch.where(counts > 0, sums / counts, centers)
        residual -= centers[nearest_center(residual, centers)]
        stages.append(centers)

    def store(rows: Tensor) -> Stored:
        residual, codes = rows.clone(), []
        for centers in stages:
            nearest = nearest_center(residual, centers)
            residual -= centers[nearest]
            codes.append(nearest.to(torch.uint8))
        return Stored([torch.stack(codes, 1)], stages, rows - residual)

    return store


def nearest_center(rows: Tensor, centers: Tensor) -> Tensor:
    """Index of the nearest center of each row, ``[N]``."""
    return (centers.square().sum(1) - 2 * rows @ centers.T).argmin(1)


def fit_discrete_pca(rows: Tensor, num_bytes: int, num_levels: int) -> Method:
    """Fit a discrete PCA with as many codes as fit into ``num_bytes``."""
    num_codes = num_bytes * PackedCodes(1, num_levels).codes_per_byte
    pca = DiscretePCA(rows.shape[1], num_codes, num_levels, device=rows.device)
    pca.fit(rows)

    def store(rows: Tensor) -> Stored:
        packed = pca.packed_codes.pack(pca.encode(rows))
        return Stored([packed], [pca.mean, pca.basis], pca(packed))

    return store


def synthetic_rows(num_rows: int, width: int, power: float = 0.75, seed: int = 0) -> Tensor:
    """Normal rows; the standard deviation of principal component ``k`` is ``k ** -power``."""
    generator = torch.Generator().manual_seed(seed)
    axes = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    deviations = torch.arange(1, width + 1) ** -power
    return torch.randn(num_rows, width, generator=generator) * deviations @ axes


def compare(rows: Tensor, budgets: Sequence[int] = BYTES) -> Iterator[dict[str, object]]:
    """Yield a line of the table for each method and number of bytes."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).to(rows.device)
    held_out, fitted = rows[order].split([len(rows) // 4, len(rows) - len(rows) // 4])
    partial = functools.partial
    fits: list[tuple[str, Callable[[], Method]]] = [
        (f"integers, {bits} bits", partial(partial, quantize, bits=bits)) for bits in BITS
    ]
    for size in budgets:
        fits.append(("k-means", partial(fit_k_means, fitted, size)))
        for levels in LEVELS:
            name = f"discrete PCA, {levels} levels"
            fits.append((name, partial(fit_discrete_pca, fitted, size, levels)))
    for name, fit in fits:
        store = fit()
        stored = store(fitted)
        yield {
            "method": name,
            "bytes": sum(x.nbytes for x in stored.per_row) / len(fitted),
            "shared, KiB": sum(x.nbytes for x in stored.shared) / 2**10,
            "error": relative_error(fitted, stored.decoded),
            "held-out error": relative_error(held_out, store(held_out).decoded),
        }


def relative_error(rows: Tensor, decoded: Tensor) -> float:
    """Squared error relative to the squared distances of ``rows`` from their mean."""
    return ((rows - decoded).square().sum() / (rows - rows.mean(0)).square().sum()).item()


def main() -> None:
    """Print the table, sorted by bytes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lines = pd.DataFrame(compare(synthetic_rows(ROWS, WIDTH).to(device)))
    print(lines.sort_values("bytes", kind="stable").to_string(index=False))


if __name__ == "__main__":
    main()
