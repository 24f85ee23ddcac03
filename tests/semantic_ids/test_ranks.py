"""Fits on several ranks give equal results on all ranks."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.rounding import RoundingErrors
from tests.semantic_ids.test_discrete_pca import draw_rows, error_of
from tests.tolerance import assert_close
from tests.torchrec.two_ranks import run_ranks
from torchrec_jagged_attn.base.ranks import Ranks
from torchrec_jagged_attn.events import Relevance
from torchrec_jagged_attn.semantic_ids import DiscretePCA, VQFusion

SIZES = (370, 0), (20, 350), (1, 369)
"""Numbers of rows per rank."""


def fit_rows(device):
    """Mean, basis and errors for each of ``SIZES``, and the basis of this rank's rows alone."""
    found = []
    rank = dist.get_rank()
    for sizes in SIZES:
        rows = draw_rows(370, 6, device, torch.float32).split(sizes)[rank]
        pca = DiscretePCA(6, 14, device=device)
        errors = pca.fit(rows.split(64))
        found.append((pca.mean, pca.basis, errors))
    single = DiscretePCA(6, 14, device=device)
    group = [dist.new_group([rank]) for rank in range(2)][rank]
    single.fit(rows, process_group=group)
    with contextlib.suppress(ValueError):  # on both ranks, so that none waits for the other
        DiscretePCA(6, 14, device=device).fit(rows * (torch.nan if rank else 1))
        raise AssertionError
    return found, single.basis


def train_fusion(device):
    """Codes and losses after a warm-up, a fit and a step with codes, under DDP."""
    torch.manual_seed(dist.get_rank())
    fusion = VQFusion({"text": 6}, {"kind": 3}, latent_dim=4, num_codes=8, device=device)
    on_gpu = None if device.type == "cpu" else [device.index]
    ddp = DistributedDataParallel(fusion, device_ids=on_gpu)
    batches = [{"text": torch.randn(16, 6, device=device)} for _ in range(3)]
    labels = {"kind": torch.arange(16, device=device) % 3}
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    losses = []
    for quantize in (False, True, False):
        if quantize:
            fusion.fit(batches[: 1 + 2 * dist.get_rank()])
            basis = fusion.pca.basis.detach().clone()
        for batch in batches:
            optimizer.zero_grad()
            loss = ddp(batch, labels, quantize=quantize).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    rows = torch.randn(1000, 6, generator=torch.Generator().manual_seed(9)).to(device)
    return basis, fusion.encode({"text": rows}), losses


def fit_relevance(device):
    generator = torch.Generator().manual_seed(0)
    dwell = torch.rand(600, generator=generator) * 100
    surface = torch.randint(3, (600,), generator=generator)
    converted = torch.rand(600, generator=generator) < dwell / 100
    events = [x.to(device) for x in (dwell, surface, converted)]
    whole, shared = (Relevance(3, device=device) for _ in range(2))
    shared.update(*(x[dist.get_rank() * 200 :][: 200 * (1 + dist.get_rank())] for x in events))
    for _ in range(2):
        shared.fit()
    whole.update(*events)
    whole.fit(process_group=[dist.new_group([rank]) for rank in range(2)][dist.get_rank()])
    return whole.coefficients, shared.coefficients, shared.counts.sum().item()


def fit_all(device):
    return {
        "rows": fit_rows(device),
        "fusion": train_fusion(device),
        "relevance": fit_relevance(device),
    }


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def fitted(request, tmp_path_factory):
    """The device, and the results of two ranks."""
    ranks = run_ranks(fit_all, tmp_path_factory.mktemp("ranks"), request.param, ranks=2)
    return "cuda" if request.param == "nccl" else "cpu", ranks


def test_rows_of_all_ranks_are_fitted_together(fitted):
    device, ranks = fitted
    (first, first_basis), (second, second_basis) = (results["rows"] for results in ranks)
    rows = draw_rows(370, 6, device, torch.float32)
    whole = DiscretePCA(6, 14, device=device)
    errors = whole.fit(rows)
    with RoundingErrors(torch.float32) as errors_of_mean:
        mean = rows.double().mean(0)
    for (mean_0, basis_0, errors_0), (mean_1, basis_1, errors_1) in zip(first, second, strict=True):
        assert torch.equal(mean_0, mean_1)
        assert torch.equal(basis_0, basis_1)
        assert errors_0 == errors_1
        combined = DiscretePCA(6, 14, device=device)
        combined.load_state_dict({"mean": mean_0, "basis": basis_0})
        assert_close(combined.mean, mean, errors_of_mean)
        assert error_of(combined, rows) < 1.1 * errors[-1]
    for basis, part in zip((first_basis, second_basis), rows.split(SIZES[-1]), strict=True):
        alone = DiscretePCA(6, 14, device=device)
        alone.fit(part)
        assert torch.equal(basis.cpu(), alone.basis.cpu())


def test_fusion_trains_and_has_the_same_codes_on_all_ranks(fitted):
    first, second = (results["fusion"] for results in fitted[1])
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert first[1].any(0).sum() > 1
    assert first[2] != second[2]  # each rank has different rows


def test_relevance_of_all_ranks(fitted):
    ranks = [results["relevance"] for results in fitted[1]]
    for whole, shared, _ in ranks:
        assert torch.equal(shared, whole)
        assert whole.any()
    assert [count for *_, count in ranks] == [200, 400]


def test_one_rank():
    x = torch.ones(3)
    ranks = Ranks()
    assert ranks.size == 1
    assert ranks.sum(x) is x
    assert ranks.first(x) is x
    assert torch.equal(ranks.all(x), x.unsqueeze(0))
