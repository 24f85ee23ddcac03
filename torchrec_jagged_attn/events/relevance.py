"""``Relevance``: the probability that an event converts, by dwell time and surface."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_jagged_attn.base.checks import (
    check_device,
    check_int,
    check_numbers,
    check_real,
    check_same,
    check_shape,
    should_validate,
)
from torchrec_jagged_attn.base.ranks import Ranks

NEWTON_STEPS, HALVINGS = 30, 12


class Relevance(nn.Module):
    r"""The probability that an event converts, by dwell time and surface:

    .. math:: P(conversion \mid dwell, s) = \sigma(a_s + b_s \log(1 + dwell))

    :meth:`update` counts events by surface, bin of :math:`\log(1 + dwell)` and conversion. Counts
    are integers, so their sum does not depend on the order of events, on batches or on ranks.
    :meth:`fit` computes :math:`a` and :math:`b` from the counts by Newton's method in fp64, first
    for all surfaces together: the result is the mean of the prior of each surface. Neither method
    waits for the device. Before :meth:`fit`, all probabilities are ½.

    Args:
        num_surfaces: ``S``; surfaces are 0 to S - 1.
        max_dwell: longer dwell times count as this one, in any unit.
        num_bins: number of bins of the dwell time; a bin counts as its middle.
        prior: precision of the normal prior of each surface's ``a`` and ``b``.
        device: device of the buffers.

    Attributes:
        counts: ``[S, num_bins, 2]`` int64: events without and with conversion.
        coefficients: ``[S, 2]`` fp32: ``a`` and ``b``.

    Raises:
        TypeError: an argument has another type.
        ValueError: an argument is out of range.

    Example:
        >>> relevance = Relevance(num_surfaces=2)
        >>> dwell = torch.tensor([0.0, 1, 2, 3, 60, 90, 2, 120])
        >>> surface = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])
        >>> relevance.update(dwell, surface, dwell > 30)
        >>> relevance.fit()
        >>> relevance(torch.tensor([1.0, 100.0]), torch.tensor([0, 0])) > 0.5
        tensor([False,  True])

    Source:
        After the abstract of DynamiX (https://arxiv.org/abs/2511.18331), which finds sessions and
        surfaces of the highest relevance by dwell time and conversion. The model is ours.
    """

    counts: Tensor
    coefficients: Tensor

    def __init__(
        self,
        num_surfaces: int,
        *,
        max_dwell: float = 3600.0,
        num_bins: int = 256,
        prior: float = 1.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_device(device)
        num_surfaces = check_int(num_surfaces, "num_surfaces", 1)
        num_bins = check_int(num_bins, "num_bins", 1)
        max_dwell = check_real(max_dwell, "max_dwell", positive=True)
        self.num_surfaces, self.num_bins = num_surfaces, num_bins
        self.prior = check_real(prior, "prior", positive=True)
        self.bin_width = math.log1p(max_dwell) / num_bins
        counts = torch.zeros(num_surfaces, num_bins, 2, dtype=torch.int64, device=device)
        self.register_buffer("counts", counts)
        coefficients = torch.zeros(num_surfaces, 2, dtype=torch.float32, device=device)
        self.register_buffer("coefficients", coefficients)

    @torch.no_grad()
    def update(self, dwell: Tensor, surface: Tensor, converted: Tensor) -> None:
        """Count events.

        Args:
            dwell: ``[N]``, integers or floating point; negative values and NaN count as 0.
            surface: ``[N]`` integers.
            converted: ``[N]`` bool, or integers 0 and 1.

        Raises:
            TypeError: a dtype does not fit.
            ValueError: a shape or a device does not fit, or (on CPU, or under
                ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) a surface is not in 0 to S - 1, or
                ``converted`` is neither 0 nor 1.
        """
        self._check(dwell, surface)
        check_shape(converted, "converted", "[N]", (dwell.shape[0],))
        check_same(dwell, "dwell", dtype=False, converted=converted)
        if converted.is_floating_point() or converted.is_complex():
            raise TypeError(f"converted must be bool or integers 0 and 1, got {converted.dtype}")
        if should_validate(converted) and (wrong := (converted != 0) & (converted != 1)).any():
            raise ValueError(f"converted must be 0 or 1, got {converted[wrong][0].item()}")
        bins = (self._log_dwell(dwell).double() / self.bin_width).long().clamp(0, self.num_bins - 1)
        index = (surface.long() * self.num_bins + bins) * 2 + (converted != 0).long()
        self.counts.view(-1).index_add_(0, index, torch.ones_like(index))

    @torch.no_grad()
    def fit(self, *, process_group: dist.ProcessGroup | None = None) -> None:
        """Fit ``coefficients`` to the counted events of all ranks.

        If a process group is initialized, every rank must call this method. It sums the counts of
        all ranks, and leaves ``counts`` of each rank unchanged.

        Args:
            process_group: the ranks whose counts are summed, by default the default process group.
        """
        middles = (torch.arange(self.num_bins, device=self.counts.device) + 0.5) * self.bin_width
        x = torch.stack([torch.ones_like(middles), middles], 1).double()  # [bins, 2]
        counts = Ranks(process_group).sum(self.counts).double()
        start = torch.zeros(1, 2, dtype=torch.float64, device=counts.device)
        shared = _newton(x, counts.sum(0, keepdim=True), start, self.prior)
        coefficients = _newton(x, counts, shared.expand(self.num_surfaces, -1), self.prior)
        self.coefficients.copy_(coefficients)

    @torch.no_grad()
    def forward(self, dwell: Tensor, surface: Tensor) -> Tensor:
        """Return the probability that each event converts, ``[N]`` fp32; without a gradient.

        Args:
            dwell, surface: as in :meth:`update`.

        Raises:
            TypeError, ValueError: as in :meth:`update`.
        """
        self._check(dwell, surface)
        a, b = self.coefficients[surface].unbind(1)
        return torch.sigmoid(a + b * self._log_dwell(dwell))

    @torch.no_grad()
    def mutual_information(self, num_bins: int = 16) -> Tensor:
        r"""Return the mutual information of dwell time and conversion on each surface, in nats.

        Args:
            num_bins: number of bins after neighbors are joined, a divisor of the module's
                ``num_bins``. With few events per bin, the mutual information is overestimated.

        Returns:
            ``[S]`` fp64; 0 for surfaces without events.

        Raises:
            TypeError: ``num_bins`` is not an int.
            ValueError: ``num_bins`` does not divide the number of bins.
        """
        num_bins = check_int(num_bins, "num_bins", 1)
        if self.num_bins % num_bins:
            raise ValueError(f"num_bins must divide {self.num_bins}, got {num_bins}")
        p = self.counts.view(self.num_surfaces, num_bins, -1, 2).sum(2).double()
        p = p / p.sum((1, 2), keepdim=True).clamp(min=1)
        independent = p.sum(2, keepdim=True) * p.sum(1, keepdim=True)
        return torch.where(p > 0, p * (p / independent.clamp(min=1e-300)).log(), 0).sum((1, 2))

    def _check(self, dwell: Tensor, surface: Tensor) -> None:
        check_shape(dwell, "dwell", "[N]", (None,))
        check_shape(surface, "surface", "[N]", (dwell.shape[0],))
        check_same(self.counts, "this module", dtype=False, dwell=dwell, surface=surface)
        if dwell.is_complex() or dwell.dtype == torch.bool:
            raise TypeError(f"dwell must be integers or floating point, got {dwell.dtype}")
        check_numbers(surface, "surface", self.num_surfaces)

    def _log_dwell(self, dwell: Tensor) -> Tensor:
        """``log(1 + dwell)`` in fp32, with ``dwell`` limited to ``max_dwell``."""
        longest = self.num_bins * self.bin_width
        return dwell.float().nan_to_num(nan=0.0).clamp(min=0).log1p().clamp(max=longest)


def _newton(x: Tensor, counts: Tensor, center: Tensor, prior: float) -> Tensor:
    """``[S, 2]``: maximum a posteriori coefficients for ``counts [S, bins, 2]``.

    ``center`` is the mean of the prior. A step is halved until it lowers the loss, so the iteration
    converges from any start.
    """

    def loss(w: Tensor) -> Tensor:
        scores = w @ x.T  # [S, bins]
        softplus = nn.functional.softplus
        nll = counts[..., 0] * softplus(scores) + counts[..., 1] * softplus(-scores)
        return nll.sum(1) + prior / 2 * (w - center).square().sum(1)

    w, total = center.clone(), counts.sum(2)
    squares = torch.stack([x[:, 0], x[:, 1], x[:, 1].square()], 1)  # 1, x, x² of the Hessian
    for _ in range(NEWTON_STEPS):
        p = torch.sigmoid(w @ x.T)
        gradient = (total * p - counts[..., 1]) @ x + prior * (w - center)
        aa, ab, bb = ((total * p * (1 - p)) @ squares).unbind(1)
        aa, bb = aa + prior, bb + prior
        grad_a, grad_b = gradient.unbind(1)
        step = torch.stack([bb * grad_a - ab * grad_b, aa * grad_b - ab * grad_a], 1)
        step /= (aa * bb - ab * ab).unsqueeze(1)
        before = loss(w)
        size = torch.ones_like(before)
        for _ in range(HALVINGS):
            size = torch.where(loss(w - size.unsqueeze(1) * step) <= before, size, size / 2)
        improves = loss(w - size.unsqueeze(1) * step) <= before
        w = torch.where(improves.unsqueeze(1), w - size.unsqueeze(1) * step, w)
    return w
