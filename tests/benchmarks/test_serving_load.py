"""The load generator: its latencies, and the CSV of a run."""

import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

import report
import serving_load
from figures import shown
from specs import TABLES

from tests.examples.test_serve_dlrm import run  # noqa: F401, a fixture


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that advances only by sleeping, serving and reading it."""
    clock = SimpleNamespace(now=100.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    def perf_counter() -> float:
        clock.now += 1e-6
        return clock.now

    clock.sleep, clock.perf_counter = sleep, perf_counter
    monkeypatch.setattr(serving_load, "time", clock)
    return clock


def test_a_latency_counts_the_wait_for_others(clock: SimpleNamespace):
    """Latencies start at the scheduled arrival, however late the loop sees it."""
    batches: list[list[bytes]] = []

    def serve(batch: Sequence[bytes]) -> None:
        batches.append(list(batch))
        clock.now += 0.010

    arrivals = np.array([0.002, 0.003, 0.004, 0.005, 0.200])
    requests = [b"0", b"1", b"2", b"3", b"4"]
    latencies = serving_load.replay(serve, arrivals, requests, max_batch=2)
    assert batches == [[b"0"], [b"1", b"2"], [b"3"], [b"4"]]
    expected = [0.010, 0.019, 0.018, 0.027, 0.010]
    np.testing.assert_allclose(latencies, expected, atol=1e-5)


FEATURES = {"cardinalities": {"item": 9, "category": 3}, "max_history": 5}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small requests of few users."""
    small = {"candidates": 5, "history": 20, "users": 3, "warm_up": 1}
    monkeypatch.setattr(serving_load, "SIZES", serving_load.SIZES | small)


def test_requests_pending_after_the_warm_up_are_timed(clock: SimpleNamespace):
    """An overloaded server is measured at the rate at which it serves."""

    def scores(batch: Sequence[bytes]) -> list[None]:
        clock.now += len(batch) * 0.002
        return [None] * len(batch)

    traffic = serving_load.Traffic(FEATURES)
    figures = serving_load.measure(SimpleNamespace(scores=scores), traffic, 2000, seconds=1)
    assert abs(figures["counted"][0] - 2000) < 5 * 2000**0.5
    assert abs(figures["served"][0] - 500) < 16  # a batch more or less, in more than a second


def test_arrivals_are_a_poisson_process():
    traffic = serving_load.Traffic(FEATURES)
    times = traffic.arrivals(200, 100)
    assert (np.diff(times) > 0).all()
    assert 0 < times[0] < times[-1] < 100
    # Numbers of arrivals in equal parts of the time have their mean for variance; five sigmas.
    counts, _ = np.histogram(times, bins=1000, range=(0, 100))
    assert abs(counts.sum() - 20_000) < 5 * 20_000**0.5
    assert abs(counts.var() / counts.mean() - 1) < 5 * (2 / 1000) ** 0.5


def test_a_run_is_in_the_csv(
    run: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    path = tmp_path / "serving_load.csv"
    options = ["--run", str(run), "--forms", "as trained", "--csv", str(path)]
    options += ["--seconds", "0.5", "--package", str(tmp_path / "scorer.pt2")]
    assert serving_load.main([*options, "--rates", "100", "400"]) == 0
    printed = capsys.readouterr().out
    figures = pd.read_csv(path).set_index(["case", "metric"])["median"]
    for case, rate in (("100/s", 100), ("400/s", 400)):
        assert 0 < figures[case, "counted"] < rate  # in half a second
        assert 0 < figures[case, "p50"] <= figures[case, "p99"]
        # A loose bound: a busy machine also serves requests that waited after the warm-up.
        assert 0 < figures[case, "served"] < 3.5 * rate
        assert re.search(rf"as trained +{rate} ", printed)
    table = report.figures_table(TABLES["serving_load"], tmp_path)
    p50 = shown(Decimal(str(figures["400/s", "p50"])), "ms")
    assert f"| 400 | {p50} / " in table
    with pytest.raises(SystemExit):
        serving_load.main(options)
    assert "--csv: must be a new file, got '" in capsys.readouterr().err
