"""``DiscretePCA``: rows as a mean plus a sum of few directions, each times a small integer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchrec_jagged_attn.base.autocast import autocast_off
from torchrec_jagged_attn.base.checks import (
    check_int,
    check_real,
    check_same,
    check_shape,
    should_validate,
)
from torchrec_jagged_attn.base.ranks import Ranks
from torchrec_jagged_attn.codes.linear_decoder import LinearDecoder

BLOCK = 2**16
"""Number of rows that are processed at a time."""
BINS, BINS_PER_OCTAVE = 4096, 64
"""Size and resolution of the histograms from which scales are computed."""
NUM_SWEEPS = 1
"""Updates of each code after the greedy choice."""


class DiscretePCA(LinearDecoder):
    r"""Encodes rows as integer codes: a mean plus a sum of directions, each times a code.

    .. math:: \hat x = \mu + \sum_l c_l b_l = \mu + B^T c, \qquad c_l \in \{-h, …, h\}

    The length of a direction :math:`b_l` is its scale. :meth:`fit` takes directions from a PCA of
    the residuals of the previous codes, with the scales that minimize the error, also beyond ``D``
    directions. Then it alternates between choosing codes and least squares for :math:`B`. It
    computes in fp64, and its result does not depend on how rows are divided into batches. Under a
    process group, it fits the rows of all ranks together.

    :meth:`encode` chooses codes greedily, one direction after the other, then updates each once
    with the others fixed. :meth:`DiscretePCA.decode` is linear in the codes, with gradients of
    ``mean`` and ``basis``. Both require a fitted or loaded basis. They raise TypeError for a wrong
    dtype, and ValueError for a wrong shape or device or (on CPU, or under
    ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) for codes out of range, rows that are not finite, or a
    module that is not fitted.

    Args:
        embed_dim: width of the rows, ``D``.
        num_codes: number of codes per row, ``L``; may exceed ``D``.
        num_levels: number of values of a code, ``2 h + 1``: an odd number from 3 to 255.
        trainable: whether ``mean`` and ``basis`` are parameters instead of buffers.
        device: device of both.
        dtype: dtype of both, fp32 or fp64; PyTorch's default dtype by default.

    Attributes:
        mean: ``[D]``.
        basis: ``[L, D]``, the rows of ``B``; zeros for directions without a residual.
        packed_codes: the :class:`PackedCodes` that pack its codes.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: an argument is out of range.

    Example:
        >>> pca = DiscretePCA(embed_dim=2, num_codes=2)
        >>> rows = torch.tensor([[3.0, 1.0], [-1.0, 1.0], [3.0, 0.0], [-1.0, 0.0]])
        >>> errors = pca.fit(rows)
        >>> pca.encode(rows)
        tensor([[ 1,  1],
                [-1,  1],
                [ 1, -1],
                [-1, -1]], dtype=torch.int8)
        >>> torch.equal(pca.decode(pca.encode(rows)), rows)
        True

    Source:
        After the abstract of SIDE (https://arxiv.org/abs/2506.16698), which names Discrete-PCA, a
        generalization of residual quantization, and an embedding of ids without parameters. The
        algorithm that finds codes, directions and scales is our own.
    """

    @torch.no_grad()
    def fit(
        self,
        rows: Tensor | Iterable[Tensor],
        *,
        tolerance: float = 1e-3,
        max_steps: int = 50,
        process_group: dist.ProcessGroup | None = None,
    ) -> list[float]:
        """Compute mean and directions from rows of any scale that fp32 holds.

        Rows are read in blocks: once for mean and covariance, twice for each round of directions (a
        few more than ``L / D``), and once for each step of least squares.

        If a process group is initialized, every rank must call it with its own rows. They are
        fitted together, and all ranks get bit-equal results.

        Args:
            rows: ``[N, D]``, floating point, ``N > 0``; or an iterable of such batches that can be
                iterated repeatedly, like a list or a ``DataLoader`` that does not shuffle. Batches
                are moved to the device of this module.
            tolerance: least squares end when a step lowers the error by less than this fraction.
            max_steps: maximum number of steps of least squares.
            process_group: the ranks whose rows are fitted together; by default, the default process
                group. A group of this rank alone fits its rows alone.

        Returns:
            The mean over rows of the squared error, before least squares and after each step. It
            never rises.

        Raises:
            TypeError: ``rows`` are not floating-point rows, or can be iterated only once.
            ValueError: ``rows`` are empty, not finite, not of width ``D``, or differ between
                passes; the dtype of this module does not hold their scale; or ``tolerance`` or
                ``max_steps`` is negative.
        """
        check_real(tolerance, "tolerance")
        check_int(max_steps, "max_steps", 0)
        if not isinstance(rows, Iterable) or isinstance(rows, Iterator):
            raise TypeError(
                "rows must be a tensor, or batches that can be iterated repeatedly, got a "
                f"{type(rows).__name__}"
            )
        data = _Rows(rows, self.embed_dim, self.mean.device, process_group)
        layout, no_basis = self.packed_codes, data.mean.new_zeros(0, self.embed_dim)
        model = _Model(data.mean, no_basis, layout.largest_code)
        model = _add_directions(model, data, layout.num_codes)
        error, change = data.least_squares(model)
        errors = [error]
        for _ in range(max_steps):
            changed = model._replace(basis=model.basis + change)
            error, change = data.least_squares(changed)
            if error >= errors[-1]:
                break
            model = changed
            errors.append(error)
            if error > (1 - tolerance) * errors[-2]:
                break
        _check_scale(model, self.basis.dtype)
        self.mean.copy_(model.mean)
        self.basis.copy_(model.basis)
        self._is_fitted = True
        return errors

    @torch.no_grad()
    def encode(self, rows: Tensor) -> Tensor:
        """Encode floating-point rows ``[N, D]`` as codes ``[N, L]`` int8."""
        _check_rows(rows, self.embed_dim)
        check_same(self.mean, "mean", dtype=False, rows=rows)
        if should_validate(rows):
            if not rows.isfinite().all():
                raise ValueError("rows must be finite, got infinite or NaN values")
            self.check_fitted()
        model = _Model(self.mean, self.basis, self.packed_codes.largest_code)
        with autocast_off(rows):  # codes must not depend on autocast
            return torch.cat([model.encode(block)[0] for block in rows.split(BLOCK)])


def _check_rows(rows: Tensor, embed_dim: int) -> None:
    check_shape(rows, "rows", "[N, D]", (None, embed_dim))
    if not rows.is_floating_point():
        raise TypeError(f"rows must be floating point, got {rows.dtype}")


def _check_scale(model: _Model, dtype: torch.dtype) -> None:
    """Raise unless ``dtype`` holds all decoded rows, and directions as normal numbers."""
    limits, sizes = torch.finfo(dtype), model.basis.abs().amax(1)
    largest = (model.mean.abs() + model.largest_code * model.basis.abs().sum(0)).max().item()
    smallest = sizes[sizes > 0].min().item() if sizes.any() else limits.tiny
    if largest > limits.max or smallest < limits.tiny:
        raise ValueError(
            f"rows must have a scale within the range of {dtype}, {limits.tiny:.3g} to "
            f"{limits.max:.3g}, got {smallest if smallest < limits.tiny else largest:.3g}: scale "
            "them, or make DiscretePCA with dtype=torch.float64"
        )


class _Model(NamedTuple):
    """Mean ``[D]``, basis ``[L, D]`` and largest code, with which rows are encoded."""

    mean: Tensor
    basis: Tensor
    largest_code: int

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes ``[N, L]`` int8 of ``rows`` and their residuals ``[N, D]``.

        The greedy choice is a sweep of coordinate descent that starts at zeros.
        """
        dtype = torch.promote_types(rows.dtype, self.mean.dtype)
        basis, limit = self.basis.to(dtype), self.largest_code
        # Squares of directions may under- or overflow. Scaling by a power of two avoids that
        # without changing a bit of the codes.
        sizes = basis.abs().amax(1)
        powers = torch.where(sizes > 0, sizes / (2 * torch.frexp(sizes).mantissa), 1)
        scaled = basis / powers.unsqueeze(1)
        squares = scaled.square().sum(1)
        factors = torch.where(squares > 0, 1 / squares / powers, 0)
        factors = factors.clamp(max=torch.finfo(dtype).max)
        residual = rows.to(dtype) - self.mean.to(dtype)
        codes = residual.new_zeros(len(basis), len(rows))
        for _ in range(1 + NUM_SWEEPS):
            for code, direction, unit, factor in zip(codes, basis, scaled, factors, strict=True):
                best = (code + (residual @ unit) * factor).round().clamp(-limit, limit)
                residual.addr_(best - code, direction, alpha=-1)
                code.copy_(best)
        return codes.T.to(torch.int8, memory_format=torch.contiguous_format), residual


class _Rows:
    """The rows of a fit, read in fp64 and in blocks of a fixed size, whatever the batch sizes.

    Each rank reads its own ``num_rows`` rows. Methods return sums over all ranks, like the
    attributes ``total`` (the number of rows ``N``), ``mean`` ``[D]`` and ``covariance`` ``[D, D]``
    (times ``N``).
    """

    def __init__(
        self,
        rows: Tensor | Iterable[Tensor],
        dim: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.batches: Iterable[Tensor] = [rows] if isinstance(rows, Tensor) else rows
        self.dim, self.device, self.ranks = dim, device, Ranks(group)
        self.num_rows = 0
        self.mean = torch.zeros(dim, dtype=torch.float64, device=device)
        self.covariance = self.mean.new_zeros(dim, dim)
        origin = self.mean
        for block in self.blocks():
            if self.num_rows == 0:
                origin = block[0]  # loses fewer digits if rows are far from zero
            self._update(block - origin)
        self.mean += origin
        self.total = self.num_rows
        if self.ranks.size > 1:
            self._combine_ranks()
        if self.total == 0:
            raise ValueError("rows must hold at least one row, got none")
        if not self.covariance.isfinite().all():
            raise ValueError("rows must be finite, also when squared, got others")

    def _combine_ranks(self) -> None:
        """Compute ``total``, ``mean`` and ``covariance`` of the rows of all ranks."""
        count = self.mean.new_tensor([self.num_rows])
        gathered = self.ranks.all(torch.cat([count, self.mean]))
        counts, means = gathered[:, 0], gathered[:, 1:]
        self.total = int(counts.sum())
        center = means[counts.argmax()]
        shifts = torch.where(counts.unsqueeze(1) > 0, means - center, 0)
        shift = self.ranks.first(counts @ shifts / max(self.total, 1))
        if self.num_rows:
            local_shift = self.mean - center - shift
            self.covariance += torch.outer(local_shift, local_shift) * self.num_rows
        self.mean = center + shift
        self.covariance = self.ranks.sum(self.covariance)

    def _update(self, block: Tensor) -> None:
        """Update mean and covariance with a block, as Chan, Golub and LeVeque (1979) do."""
        before, self.num_rows = self.num_rows, self.num_rows + len(block)
        mean = block.mean(0)
        centered, shift = block - mean, mean - self.mean
        self.covariance += centered.T @ centered
        self.covariance += torch.outer(shift, shift) * (before * len(block) / self.num_rows)
        self.mean += shift * (len(block) / self.num_rows)

    def blocks(self) -> Iterator[Tensor]:
        """Yield the rows in order, ``BLOCK`` at a time; they must be as many in every pass."""
        pending, count, total = [], 0, 0
        for batch in self.batches:
            _check_rows(batch, self.dim)
            total += len(batch)
            for block in batch.split(BLOCK):
                pending.append(block.detach().to(self.device, torch.float64))
                count += len(block)
                if count >= BLOCK:
                    joined = torch.cat(pending)
                    yield joined[:BLOCK]
                    pending, count = [joined[BLOCK:]], count - BLOCK
        if count:
            yield torch.cat(pending)
        if total != self.num_rows:
            raise ValueError(
                f"rows must be the same in each pass, got {self.num_rows} and then {total}"
            )

    def residual_covariance(self, model: _Model) -> Tensor:
        """Second moments ``[D, D]`` of the residuals, times ``N``."""
        covariance = torch.zeros_like(self.covariance)
        for block in self.blocks():
            residual = model.encode(block)[1]
            covariance += residual.T @ residual
        return self.ranks.sum(covariance)

    def histograms(self, model: _Model, directions: Tensor, tops: Tensor) -> Tensor:
        """Histograms ``[k, BINS]`` of absolute residuals along ``directions`` ``[k, D]``.

        The bins of each direction are logarithmic and end at its value in ``tops`` ``[k]``.
        """
        first = torch.arange(len(directions), device=self.device) * BINS
        counts = torch.zeros(len(directions) * BINS, dtype=torch.int64, device=self.device)
        for block in self.blocks():
            sizes = (model.encode(block)[1] @ directions.T).abs()
            octaves = torch.log2(tops / sizes)
            bins = (BINS - 1 - octaves * BINS_PER_OCTAVE).ceil().clamp(0, BINS - 1).long()
            counts += (bins + first).flatten().bincount(minlength=len(counts))
        return self.ranks.sum(counts).view(-1, BINS)

    def least_squares(self, model: _Model) -> tuple[float, Tensor]:
        """Return the mean squared error of ``model``, and the least-squares change of its basis."""
        error = self.mean.new_zeros(())
        products = self.mean.new_zeros(len(model.basis), len(model.basis))
        moments = torch.zeros_like(model.basis)
        for block in self.blocks():
            codes, residual = model.encode(block)
            codes = codes.double()
            error += residual.square().sum()
            products += codes.T @ codes
            moments += codes.T @ residual
        error, products, moments = (self.ranks.sum(x) for x in (error, products, moments))
        change = torch.linalg.pinv(products, hermitian=True) @ moments
        return error.item() / self.total, self.ranks.first(change)


def _add_directions(model: _Model, data: _Rows, num_codes: int) -> _Model:
    """Add principal directions of the residuals to ``model`` until it has ``num_codes``.

    A round adds directions in the order of their variance, until an earlier one would keep more
    variance after encoding than the next one has. They are orthogonal, so that their codes and
    scales are independent.
    """
    covariance = data.covariance
    threshold = covariance.trace() * data.dim * torch.finfo(torch.float64).eps
    below_top = torch.arange(BINS - 0.5, 0, -1, dtype=torch.float64, device="cpu")
    below_top /= BINS_PER_OCTAVE
    while (missing := num_codes - len(model.basis)) > 0:
        variances, directions = map(data.ranks.first, torch.linalg.eigh(covariance))
        candidates = (variances > threshold).nonzero().flatten().flip(0)[:missing]
        if len(candidates) == 0:
            return model._replace(basis=F.pad(model.basis, (0, 0, 0, missing)))
        variances, directions = variances[candidates], directions.T[candidates]
        directions *= directions.gather(1, directions.abs().argmax(1, keepdim=True)).sign()
        tops = variances.sqrt()  # root of a sum over all rows, so an upper bound for each row
        counts = data.histograms(model, directions, tops).cpu()
        scales, remaining = [], 0.0
        for variance, top, count in zip(variances.tolist(), tops.tolist(), counts, strict=True):
            if variance <= remaining:
                break
            scale, fraction = _best_scale(top * torch.exp2(-below_top), count, model.largest_code)
            scales.append(scale)
            remaining = max(remaining, variance * fraction)
        added = directions.new_tensor(scales).unsqueeze(1) * directions[: len(scales)]
        model = model._replace(basis=torch.cat([model.basis, data.ranks.first(added)]))
        covariance = data.residual_covariance(model)
    return model


def _best_scale(sizes: Tensor, counts: Tensor, largest_code: int) -> tuple[float, float]:
    """Find the scale whose multiples up to ``largest_code`` have the least squared error.

    Each of the values ``sizes`` ``[n]`` occurs ``counts`` ``[n]`` times. Returns the scale, and the
    remaining fraction of the squares.

    The search is exact: a code changes only at the scales ``size / (code - 1/2)``. In their
    descending order, cumulative sums give the sum of codes · sizes and the sum of squared codes.
    The best scale for given codes is the first divided by the second, and it reduces the squares by
    the square of the first divided by the second.
    """
    sizes, counts = sizes[counts > 0], counts[counts > 0]
    codes = torch.arange(1, largest_code + 1, dtype=sizes.dtype, device=sizes.device)
    order = (sizes.unsqueeze(1) / (codes - 0.5)).flatten().argsort(descending=True, stable=True)

    def cumulative(x: Tensor, y: Tensor) -> Tensor:
        return torch.outer(x, y).flatten()[order].cumsum(0)

    products = cumulative(counts * sizes, torch.ones_like(codes))
    squares = cumulative(counts.to(sizes.dtype), 2 * codes - 1)
    gains = products.square() / squares
    best = int(gains.argmax())
    total = (counts * sizes.square()).sum()
    return (products[best] / squares[best]).item(), (1 - gains[best] / total).clamp(min=0).item()
