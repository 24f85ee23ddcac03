"""``Relevance`` finds planted coefficients, and sessions."""

import math

import pytest
import torch

from tests.fixtures import sync_debug_mode
from tests.rounding import RoundingErrors
from tests.tolerance import assert_close
from torchrec_jagged_attn.events import Relevance, boost_weights, segment_sessions

PLANTED = torch.tensor([[-4.0, 1.0], [-2.0, 0.0], [-1.0, 0.5]])  # a and b of each surface


def draw_events(count, seed=0):
    """Dwell times and surfaces, and conversions of the planted probability."""
    generator = torch.Generator().manual_seed(seed)
    surface = torch.randint(0, len(PLANTED), (count,), generator=generator)
    dwell = torch.exp(2 + 1.5 * torch.randn(count, generator=generator))
    p = planted(dwell, surface)
    return dwell, surface, torch.rand(count, generator=generator) < p


def planted(dwell, surface):
    a, b = PLANTED[surface].unbind(1)
    return torch.sigmoid(a + b * dwell.clamp(max=3600).log1p())


def fitted(*events, **options):
    relevance = Relevance(len(PLANTED), device=events[0].device, **options)
    relevance.update(*events)
    relevance.fit()
    return relevance


def newton_step(coefficients, dwell, converted):
    """The step to the maximum of the likelihood, and standard errors of coefficients."""
    x = torch.stack([torch.ones_like(dwell), dwell.log1p()], 1).double()
    p = torch.sigmoid(x @ coefficients.double())
    covariance = torch.linalg.inv((p * (1 - p)).unsqueeze(1).mul(x).T @ x)
    return covariance @ (x.T @ (converted.double() - p)), covariance.diagonal().sqrt()


def test_planted_coefficients_are_found(device):
    events = [x.to(device) for x in draw_events(200_000)]
    relevance = fitted(*events)
    dwell, surface, converted = (x.cpu() for x in events)
    for s, expected in enumerate(PLANTED):
        _, errors = newton_step(expected, dwell[surface == s], converted[surface == s])
        assert ((relevance.coefficients[s].cpu() - expected).abs() < 4 * errors).all()


def test_fit_equals_logistic_regression():
    """On the events themselves. Binning changes coefficients by a hundredth of a standard error."""
    dwell, surface, converted = draw_events(5000)
    relevance = Relevance(1, num_bins=4096, prior=1e-6)
    relevance.update(dwell, surface * 0, converted)
    relevance.fit()
    step, errors = newton_step(relevance.coefficients[0], dwell, converted)
    assert torch.all(step.abs() < errors / 100)


def test_batches_and_their_order_change_nothing(device):
    events = [x.to(device) for x in draw_events(3000)]
    whole = fitted(*events)
    parts = Relevance(len(PLANTED), device=device)
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(1)).to(device)
    for at in order.split(700):
        parts.update(*(x[at] for x in events))
    parts.fit()
    assert torch.equal(parts.counts, whole.counts)
    assert torch.equal(parts.coefficients, whole.coefficients)


def test_surface_without_events():
    dwell, surface, converted = draw_events(4000)
    relevance = Relevance(4)
    relevance.update(dwell, surface * 0, converted)
    relevance.fit()
    for s in (0, 3):  # the prior moves both by less than a quarter of a standard error
        step, errors = newton_step(relevance.coefficients[s], dwell, converted)
        assert torch.all(step.abs() < errors / 4)
    assert torch.equal(relevance.coefficients[3], relevance.coefficients[1])


@pytest.mark.parametrize("label", [0, 1])
def test_equal_labels(label):
    """The fit is finite, with probabilities on the right side of 0.5."""
    dwell, surface, _ = draw_events(1000)
    relevance = fitted(dwell, surface, torch.full((1000,), label))
    p = relevance(dwell, surface)
    assert p.isfinite().all()
    assert ((p > 0.5) == bool(label)).all()


def test_no_event(device):
    empty = torch.zeros(0, device=device)
    relevance = fitted(empty, empty.long(), empty.bool())
    p = relevance(torch.tensor([3, 4], device=device), torch.tensor([0, 1], device=device))
    assert p.tolist() == [0.5, 0.5]
    assert relevance.mutual_information().tolist() == [0, 0, 0]


def test_odd_dwell_times():
    relevance = fitted(*draw_events(2000))
    dwell = torch.tensor([torch.nan, 0.0, -5.0, 3600.0, torch.inf])
    p = relevance(dwell, torch.zeros(5).long())
    assert p[0] == p[1] == p[2]
    assert p[3] == p[4]
    relevance.update(dwell, torch.zeros(5).long(), torch.ones(5).bool())
    assert relevance.counts.sum() == 2005


def test_probabilities_have_no_gradient():
    dwell, surface, _ = draw_events(5)
    assert not Relevance(len(PLANTED))(dwell.requires_grad_(), surface).requires_grad


def test_state_dict():
    relevance = fitted(*draw_events(2000))
    other = Relevance(len(PLANTED))
    other.load_state_dict(relevance.state_dict())
    assert torch.equal(other.coefficients, relevance.coefficients)
    assert torch.equal(other.counts, relevance.counts)


def entropy(p):
    return -(p[p > 0] * p[p > 0].log()).sum()


def test_mutual_information():
    dwell, surface, converted = draw_events(4000)
    relevance = fitted(dwell, surface, converted)
    bins = (dwell.double().log1p() / relevance.bin_width).long().clamp(max=255) // 16
    actual = relevance.mutual_information(16)
    for s in range(len(PLANTED)):
        rows = surface == s
        joint = torch.zeros(16, 2, dtype=torch.float64)
        joint.index_put_((bins[rows], converted[rows].long()), torch.tensor(1.0).double(), True)
        with RoundingErrors(torch.float32) as errors:
            joint = joint / joint.sum()
            expected = entropy(joint.sum(0)) + entropy(joint.sum(1)) - entropy(joint)
        assert_close(actual[s], expected, errors)
    assert actual.argmin() == 1  # where dwell tells nothing


def test_sessions_are_divided_at_pauses(device):
    lengths = [4, 0, 3]
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    times = torch.tensor([0, 5, 16, 17, 3, 4, 50], device=device)
    relevance = torch.tensor([0.4, 0.4, 0.5, 0.1, 0.9, 0.0, 0.7], device=device)
    # Sessions of the first user: 0 and 1 (0.64), 2 and 3 (0.55); of the last: 4 and 5 (0.9), 6.
    for threshold, expected in (
        (0.6, [1, 1, 0, 0, 1, 1, 1]),
        (0.8, [0, 0, 0, 0, 1, 1, 0]),
        (0.0, [1, 1, 1, 1, 1, 1, 1]),
    ):
        actual = segment_sessions(relevance, offsets, times, gap=10, threshold=threshold)
        assert actual.tolist() == expected


def test_a_certain_event_makes_its_session_active(device):
    relevance = torch.tensor([1.0, 0.0, 0.0], device=device)
    offsets = torch.tensor([0, 3], device=device)
    times = torch.tensor([0, 1, 90], device=device)
    actual = segment_sessions(relevance, offsets, times, gap=10, threshold=1.0)
    assert actual.tolist() == [1, 1, 0]


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_session(lengths, device):
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    empty = torch.zeros(0, device=device)
    assert segment_sessions(empty, offsets, empty.long(), gap=1, threshold=0.5).shape == (0,)


def test_pauses_of_any_unit():
    """Exact in nanoseconds, and for all differences of int32."""
    year = 365 * 24 * 3600 * 10**9
    relevance, offsets = torch.tensor([0.9, 0.0]), torch.tensor([0, 2])
    for gap, pause, expected in ((10**9, 10**9, [1, 1]), (10**9, 10**9 + 1, [1, 0])):
        times = 50 * year + torch.tensor([0, pause])
        assert segment_sessions(relevance, offsets, times, gap=gap, threshold=0.5).tolist() == (
            expected
        )
    times = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32)
    actual = segment_sessions(relevance, offsets, times, gap=1e9, threshold=0.5)
    assert actual.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"timestamps": torch.tensor([0.0, 1.0])}, TypeError, "timestamps must be int32 or int64"),
        (
            {"timestamps": torch.tensor([5, 4])},
            ValueError,
            "must not decrease .*, got 5 then 4 at position 1",
        ),
        ({"relevance": torch.tensor([0.5, 1.5])}, ValueError, "relevance must be 0 to 1, got 1.5"),
        ({"gap": -1}, ValueError, "gap must be finite and not negative, got -1"),
        ({"gap": math.nan}, ValueError, "gap must be finite, got nan"),
        ({"threshold": 1.5}, ValueError, r"threshold must be a probability, 0 to 1, got 1\.5"),
        ({"offsets": torch.tensor([0, 1])}, ValueError, "offsets must end at the 2 rows"),
    ],
)
def test_wrong_sessions_are_named(change, error, message):
    arguments = {
        "relevance": torch.ones(2),
        "offsets": torch.tensor([0, 2]),
        "timestamps": torch.tensor([0, 1]),
        "gap": 1,
        "threshold": 0.5,
    }
    with pytest.raises(error, match=message):
        segment_sessions(**arguments | change)


@pytest.mark.gpu
def test_never_waits_for_the_device():
    dwell, surface, converted = (x.cuda() for x in draw_events(1000))
    relevance = Relevance(len(PLANTED), device="cuda")
    offsets = torch.tensor([0, 400, 1000], device="cuda")
    factors = torch.tensor([1.0, 2.0], device="cuda")

    def call():
        relevance.update(dwell, surface, converted)
        relevance.fit()
        scores = relevance(dwell, surface)
        times = dwell.cumsum(0).long()
        segments = segment_sessions(scores, offsets, times, gap=10, threshold=0.5)
        boost_weights(scores, segments=segments, factors=factors)

    call()
    with sync_debug_mode("error"):
        call()


def test_wrong_events_are_named():
    relevance = Relevance(3)
    dwell, surface, converted = draw_events(4)
    with pytest.raises(ValueError, match="surface must be 0 to 2, got 0 to 3"):
        relevance(dwell, torch.tensor([0, 1, 2, 3]))
    with pytest.raises(TypeError, match=r"surface must be int32 or int64, got torch\.float32"):
        relevance(dwell, surface.float())
    with pytest.raises(ValueError, match=r"surface must have shape \[N\] = \[4\], got \[3\]"):
        relevance(dwell, surface[:3])
    with pytest.raises(ValueError, match=r"converted must have shape \[N\] = \[4\], got \[2\]"):
        relevance.update(dwell, surface, converted[:2])
    with pytest.raises(TypeError, match="dwell must be integers or floating point, got"):
        relevance(dwell > 0, surface)
    with pytest.raises(TypeError, match="converted must be bool or integers 0 and 1, got"):
        relevance.update(dwell, surface, converted.float())
    with pytest.raises(ValueError, match="converted must be 0 or 1, got 2"):
        relevance.update(dwell, surface, 2 * torch.ones_like(surface))
    with pytest.raises(ValueError, match="max_dwell must be positive and finite, got 0"):
        Relevance(2, max_dwell=0)
    with pytest.raises(ValueError, match="prior must be positive and finite, got -1"):
        Relevance(2, prior=-1)
    with pytest.raises(ValueError, match="num_bins must divide 256, got 7"):
        relevance.mutual_information(7)
