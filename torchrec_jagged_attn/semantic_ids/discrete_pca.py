"""``DiscretePCA``: rows as sums of few directions, each times a small integer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torchrec_jagged_attn.checks import (
    check_bool,
    check_device,
    check_int,
    check_real,
    check_same,
    check_shape,
    check_tensor,
    has_values,
    should_validate,
)
from torchrec_jagged_attn.ranks import Ranks
from torchrec_jagged_attn.runtime.autocast import autocast_off
from torchrec_jagged_attn.semantic_ids.packed_codes import PackedCodes

BLOCK = 2**16
"""Rows that are taken at a time."""
BINS, BINS_PER_OCTAVE = 4096, 64
"""Of the histograms that scales come from."""
LEAST_SPREAD = 1e-140
"""Of values: fp64 holds the squares of these with all of their bits."""


class DiscretePCA(nn.Module):
    r"""Encodes rows as integer codes: a mean plus a sum of directions, each times a code.

    .. math:: \hat x = \mu + \sum_l c_l b_l = \mu + B^T c, \qquad c_l \in \{-h, …, h\}

    The length of a direction :math:`b_l` is its scale. :meth:`fit` takes directions from a PCA of
    the residuals of the previous codes, with the scales that minimize the error, also beyond ``D``
    directions. Then it alternates between choosing codes and least squares for :math:`B`. It
    computes in fp64, and its result does not depend on how rows are divided into batches. Under a
    process group, it fits the rows of all ranks together.

    :meth:`encode` chooses codes greedily, one direction after the other, then updates each with the
    others fixed. :meth:`decode` is linear in the codes, with gradients of ``mean`` and ``basis``.
    Both methods require a fitted or loaded basis.

    Args:
        embed_dim: ``D``, of rows.
        num_codes: ``L``, of a row; may be more than ``D``.
        num_levels: of a code, ``2 h + 1``: an odd number of 3 to 255.
        num_sweeps: number of updates of each code in :meth:`encode`, after the greedy choice.
        trainable: whether ``mean`` and ``basis`` are parameters; else they are buffers.
        device: of both.
        dtype: of both, fp32 or fp64; that of PyTorch by default.

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
        generalization of residual quantization, and an embedding of ids without parameters. How
        codes, directions and scales are found is ours.
    """

    mean: Tensor
    basis: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_codes: int,
        num_levels: int = 3,
        *,
        num_sweeps: int = 1,
        trainable: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = check_int(embed_dim, "embed_dim", 1)
        self.num_sweeps = check_int(num_sweeps, "num_sweeps", 0)
        check_bool(trainable, "trainable")
        check_device(device)
        if dtype not in (None, torch.float32, torch.float64):
            raise TypeError(f"dtype must be float32 or float64, got {dtype}")
        self.packed_codes = PackedCodes(num_codes, num_levels)
        self._is_fitted = False
        for name, shape in (
            ("mean", [self.embed_dim]),
            ("basis", [self.packed_codes.num_codes, self.embed_dim]),
        ):
            value = torch.zeros(shape, device=device, dtype=dtype)
            if trainable:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    @torch.no_grad()
    def fit(
        self,
        rows: Tensor | Iterable[Tensor],
        *,
        tolerance: float = 1e-3,
        max_steps: int = 50,
        process_group: dist.ProcessGroup | None = None,
    ) -> list[float]:
        """Find mean and directions of rows, of any scale that the dtype of this module holds.

        Rows are read, a block at a time: once for mean and covariance, twice for each round of
        directions (a few more than ``L / D``), and once for each step of least squares.

        Where a process group is initialized, every rank must call it, each with rows of its own:
        they are fitted together, and all ranks get the same mean and basis, bit by bit.

        Args:
            rows: ``[N, D]``, floating point, ``N > 0``; or batches of such rows, which can be
                iterated again and again, as a list or a ``DataLoader`` that does not shuffle.
                Each batch is moved to the device of this module.
            tolerance: least squares end when a step lowers the error by less than this fraction.
            max_steps: of least squares at most.
            process_group: the ranks whose rows are fitted together; by default, those of the
                default process group. One of this rank alone fits its rows alone.

        Returns:
            The mean squared error of a row, summed over its columns, before least squares and after
            each step: it never rises.

        Raises:
            TypeError: ``rows`` are no floating-point rows, or can be iterated only once.
            ValueError: ``rows`` are none, not finite, not of ``D`` columns, or not the same again;
                their scale is not held by the dtype of this module; or ``tolerance`` or
                ``max_steps`` is negative.
        """
        check_real(tolerance, "tolerance")
        check_int(max_steps, "max_steps", 0)
        if not isinstance(rows, Iterable) or isinstance(rows, Iterator):
            raise TypeError(
                "rows must be a tensor, or batches that can be iterated again and again, got a "
                f"{type(rows).__name__}"
            )
        data = _Rows(rows, self.embed_dim, self.mean.device, process_group)
        model = self._model(data.mean, data.mean.new_zeros(0, self.embed_dim))
        model = _with_directions(model, data, self.packed_codes.num_codes)
        error, change = data.measure(model)
        found = [error]
        for _ in range(max_steps):
            changed = model._replace(basis=model.basis + change)
            error, change = data.measure(changed)
            if error >= found[-1]:
                break
            model = changed
            found.append(error)
            if error > (1 - tolerance) * found[-2]:
                break
        _check_scale(model, self.basis.dtype)
        self.mean.copy_(model.mean)
        self.basis.copy_(model.basis)
        self._is_fitted = True
        return found

    def check_fitted(self) -> None:
        """Raise ValueError if ``mean`` and ``basis`` are the zeros that they begin with."""
        if self._is_fitted or not has_values(self.mean):
            return
        if not self.mean.any() and not self.basis.any():
            raise ValueError(
                "DiscretePCA must be fitted, or have the state of one that was, before it is used, "
                "got a mean and a basis of zeros: call fit()"
            )
        self._is_fitted = True

    @torch.no_grad()
    def encode(self, rows: Tensor) -> Tensor:
        """Codes ``[N, L]`` int8 of floating-point rows ``[N, D]``.

        Raises:
            TypeError: ``rows`` are not floating point.
            ValueError: their shape or device does not fit; or (on CPU, or under
                ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) one is not finite, or this module is not
                fitted.
        """
        _check_rows(rows, self.embed_dim)
        check_same(self.mean, "mean", dtype=False, rows=rows)
        if should_validate(rows):
            if not rows.isfinite().all():
                raise ValueError("rows must be finite, got some that are not")
            self.check_fitted()
        model = self._model(self.mean, self.basis)
        with autocast_off(rows):  # codes do not depend on it
            return torch.cat([model.encode(block)[0] for block in rows.split(BLOCK)])

    def decode(self, codes: Tensor) -> Tensor:
        """Rows ``[N, D]``, in the dtype of ``basis``, of integer codes ``[N, L]``, ``-h`` to ``h``.

        Raises:
            TypeError: ``codes`` are no integers.
            ValueError: their shape does not fit; or (on CPU, or under
                ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) one is out of range, or this module is not
                fitted.
        """
        self.packed_codes.check_codes(codes)
        check_same(self.mean, "mean", dtype=False, codes=codes)
        if should_validate(codes):
            self.check_fitted()
        with autocast_off(codes):
            return self.mean + codes.to(self.basis.dtype) @ self.basis

    def forward(self, packed: Tensor) -> Tensor:
        """Rows ``[N, D]`` of packed codes ``[N, num_bytes]``, as :meth:`decode`."""
        return self.decode(self.packed_codes.unpack(packed))

    def _model(self, mean: Tensor, basis: Tensor) -> _Model:
        return _Model(mean, basis, self.packed_codes.largest_code, self.num_sweeps)

    def extra_repr(self) -> str:
        """What the module was made of."""
        return (
            f"embed_dim={self.embed_dim}, num_codes={self.packed_codes.num_codes}, "
            f"num_levels={self.packed_codes.num_levels}, num_sweeps={self.num_sweeps}"
        )


def _check_rows(rows: Tensor, embed_dim: int) -> None:
    check_tensor(rows, "rows")
    if not rows.is_floating_point():
        raise TypeError(f"rows must be floating point, got {rows.dtype}")
    check_shape(rows, "rows", "[N, D]", (None, embed_dim))


def _check_scale(model: _Model, dtype: torch.dtype) -> None:
    """``dtype`` must hold directions with all of its bits, and every row that has codes."""
    limits, sizes = torch.finfo(dtype), model.basis.abs().amax(1)
    largest = (model.mean.abs() + model.largest_code * model.basis.abs().sum(0)).max().item()
    least = sizes[sizes > 0].min().item() if sizes.any() else limits.tiny
    if largest > limits.max or least < limits.tiny:
        raise ValueError(
            f"rows must have a scale within the range of {dtype}, {limits.tiny:.3g} to "
            f"{limits.max:.3g}, got {least if least < limits.tiny else largest:.3g}: scale them, "
            "or make DiscretePCA with dtype=torch.float64"
        )


class _Model(NamedTuple):
    """What a fit finds, mean ``[D]`` and basis ``[L, D]``, and how its codes are chosen."""

    mean: Tensor
    basis: Tensor
    largest_code: int
    num_sweeps: int

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Codes ``[N, L]``, int8, and what they leave of ``rows``, ``[N, D]``.

        The greedy choice is a sweep of coordinate descent that begins with zeros.
        """
        dtype = torch.promote_types(rows.dtype, self.mean.dtype)
        basis, most = self.basis.to(dtype), self.largest_code
        # Squares of directions may be too small or too large. Divided by a power of two, they are
        # not, and codes have the same bits.
        sizes = basis.abs().amax(1)
        powers = torch.where(sizes > 0, sizes / (2 * torch.frexp(sizes).mantissa), 1)
        scaled = basis / powers.unsqueeze(1)
        squares = scaled.square().sum(1)
        factors = torch.where(squares > 0, 1 / squares / powers, 0)
        factors = factors.clamp(max=torch.finfo(dtype).max)
        residual = rows.to(dtype) - self.mean.to(dtype)
        codes = residual.new_zeros(len(basis), len(rows))
        for _ in range(1 + self.num_sweeps):
            for code, direction, unit, factor in zip(codes, basis, scaled, factors, strict=True):
                wanted = code + (residual @ unit) * factor
                chosen = wanted.round().clamp(-most, most)
                residual.addr_(chosen - code, direction, alpha=-1)
                code.copy_(chosen)
        return codes.T.to(torch.int8, memory_format=torch.contiguous_format), residual


class _Rows:
    """Rows that a fit passes over, in fp64 and in blocks of one size, whatever the batches are.

    Each rank passes over its own rows, ``num_rows``; all that methods return is of all ranks' rows,
    and so are ``total``, their number ``N``, ``mean [D]`` and ``covariance [D, D]``, times ``N``.
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
        origin, spread = self.mean, self.mean.new_zeros(())
        for block in self._blocks():
            if self.num_rows == 0:
                origin = block[0]  # so that little is lost of rows far from zero
            centered = block - origin
            spread = torch.maximum(spread, centered.abs().max())
            self._add(centered)
        self.mean += origin
        self.total = self.num_rows
        if self.ranks.size > 1:
            spread = self._combine(spread)
        if self.total == 0:
            raise ValueError("rows must hold at least one row, got none")
        if not self.covariance.isfinite().all():
            raise ValueError("rows must be finite, got some that are not, or whose squares are not")
        if 0 < spread < LEAST_SPREAD:
            raise ValueError(
                f"rows must differ by {LEAST_SPREAD} or more, or not at all, got {spread.item()}: "
                "squares of less are lost in fp64"
            )

    def _combine(self, spread: Tensor) -> Tensor:
        """Mean and covariance of all ranks' rows; returns how far they are apart at most."""
        count = self.mean.new_tensor(self.num_rows)
        of_ranks = self.ranks.all(torch.cat([torch.stack([count, spread]), self.mean]))
        counts, spreads, means = of_ranks[:, 0], of_ranks[:, 1], of_ranks[:, 2:]
        self.total = int(counts.sum())
        center = means[counts.argmax()]
        shifts = torch.where(counts.unsqueeze(1) > 0, means - center, 0)
        shift = self.ranks.first(counts @ shifts / max(self.total, 1))
        if self.num_rows:
            own = self.mean - center - shift
            self.covariance += torch.outer(own, own) * self.num_rows
        self.mean = center + shift
        self.covariance = self.ranks.sum(self.covariance)
        return torch.maximum(spreads.max(), shifts.abs().max())

    def _add(self, block: Tensor) -> None:
        """Take a block into mean and covariance, as Chan, Golub and LeVeque (1979) do."""
        before, self.num_rows = self.num_rows, self.num_rows + len(block)
        mean = block.mean(0)
        centered, shift = block - mean, mean - self.mean
        self.covariance += centered.T @ centered
        self.covariance += torch.outer(shift, shift) * (before * len(block) / self.num_rows)
        self.mean += shift * (len(block) / self.num_rows)

    def _blocks(self) -> Iterator[Tensor]:
        """The rows in their order, ``BLOCK`` at a time."""
        kept, count = [], 0
        for batch in self.batches:
            _check_rows(batch, self.dim)
            for block in batch.split(BLOCK):
                kept.append(block.detach().to(self.device, torch.float64))
                count += len(block)
                if count >= BLOCK:
                    whole = torch.cat(kept)
                    yield whole[:BLOCK]
                    kept, count = [whole[BLOCK:]], count - BLOCK
        if count:
            yield torch.cat(kept)

    def blocks(self) -> Iterator[Tensor]:
        """As before, and as many."""
        count = 0
        for block in self._blocks():
            count += len(block)
            yield block
        if count != self.num_rows:
            raise ValueError(
                f"rows must be the same in each pass, got {self.num_rows} and then {count}"
            )

    def residual_covariance(self, model: _Model) -> Tensor:
        """Of what the codes leave, ``[D, D]``, about zero and times ``N``."""
        covariance = torch.zeros_like(self.covariance)
        for block in self.blocks():
            residual = model.encode(block)[1]
            covariance += residual.T @ residual
        return self.ranks.sum(covariance)

    def histograms(self, model: _Model, directions: Tensor, tops: Tensor) -> Tensor:
        """How many rows leave how much along each of ``directions`` ``[k, D]``: ``[k, BINS]``, in
        bins from zero to ``tops`` ``[k]``.
        """
        first = torch.arange(len(directions), device=self.device) * BINS
        counts = torch.zeros(len(directions) * BINS, dtype=torch.int64, device=self.device)
        for block in self.blocks():
            sizes = (model.encode(block)[1] @ directions.T).abs()
            octaves = torch.log2(tops / sizes)
            bins = (BINS - 1 - octaves * BINS_PER_OCTAVE).ceil().clamp(0, BINS - 1).long()
            counts += (bins + first).flatten().bincount(minlength=len(counts))
        return self.ranks.sum(counts).view(-1, BINS)

    def measure(self, model: _Model) -> tuple[float, Tensor]:
        """The mean squared error of a row, and the change of the basis by least squares."""
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


def _with_directions(model: _Model, data: _Rows, num_codes: int) -> _Model:
    """``model`` with a basis of ``num_codes`` directions by PCA, in rounds.

    A round takes the principal directions of the residual, from the first to the last that has more
    variance than one before it will have when its code is known. These are at right angles: their
    codes and scales do not depend on each other.
    """
    covariance = data.covariance
    least = covariance.trace() * data.dim * torch.finfo(torch.float64).eps
    below_top = torch.arange(BINS - 0.5, 0, -1, dtype=torch.float64, device="cpu")
    below_top /= BINS_PER_OCTAVE
    while (missing := num_codes - len(model.basis)) > 0:
        variances, directions = map(data.ranks.first, torch.linalg.eigh(covariance))
        candidates = (variances > least).nonzero().flatten().flip(0)[:missing]
        if len(candidates) == 0:
            return model._replace(basis=F.pad(model.basis, (0, 0, 0, missing)))
        variances, directions = variances[candidates], directions.T[candidates]
        directions *= directions.gather(1, directions.abs().argmax(1, keepdim=True)).sign()
        tops = variances.sqrt()  # of sums over all rows: no row has more
        counts = data.histograms(model, directions, tops).cpu()
        scales, left = [], 0.0
        for variance, top, count in zip(variances.tolist(), tops.tolist(), counts, strict=True):
            if variance <= left:
                break
            scale, fraction = _best_scale(top * torch.exp2(-below_top), count, model.largest_code)
            scales.append(scale)
            left = max(left, variance * fraction)
        taken = directions.new_tensor(scales).unsqueeze(1) * directions[: len(scales)]
        taken = data.ranks.first(taken)
        model = model._replace(basis=torch.cat([model.basis, taken]))
        covariance = data.residual_covariance(model)
    return model


def _best_scale(sizes: Tensor, counts: Tensor, largest_code: int) -> tuple[float, float]:
    """The scale whose multiples, up to the largest code, are nearest to values of these sizes.

    Exact: codes change only where the scale passes ``size / (code - 1/2)``. As it falls past all
    of these in their order, the sums of codes · sizes and of squared codes grow. What the best
    scale for these codes takes of the squares is the first sum, squared, over the second. Returns
    the scale, and the fraction of the squares that is left. Of each of ``sizes [n]`` there are
    ``counts [n]`` values.
    """
    sizes, counts = sizes[counts > 0], counts[counts > 0]
    codes = torch.arange(1, largest_code + 1, dtype=sizes.dtype, device=sizes.device)
    order = (sizes.unsqueeze(1) / (codes - 0.5)).flatten().argsort(descending=True, stable=True)

    def summed(of_size: Tensor, of_code: Tensor) -> Tensor:
        return torch.outer(of_size, of_code).flatten()[order].cumsum(0)

    along = summed(counts * sizes, torch.ones_like(codes))
    squares = summed(counts.to(sizes.dtype), 2 * codes - 1)
    gains = along.square() / squares
    best = int(gains.argmax())
    total = (counts * sizes.square()).sum()
    return (along[best] / squares[best]).item(), (1 - gains[best] / total).clamp(min=0).item()
