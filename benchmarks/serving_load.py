"""Measure latencies of the serving example at fixed rates of requests.

    python examples/train_dlrm.py --pooling attention
    python benchmarks/serving_load.py --rates 100 400 --csv serving_load.csv

The loop is open: requests arrive by a Poisson process, independently of earlier requests. A latency
is the time from the scheduled arrival to the scores on the host, including the time in the queue.
One thread serves all requests that have arrived, up to 16, as one batch. The network and the queue
of a server are not included. Run it on an idle machine, and long enough for a p99.

A request is JSON, which is parsed, checked and scored. Users are drawn by Zipf's law, and have
histories of log-normal length, to which each visit adds a few events. Requests of the first seconds
are scored, but not counted.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from options import HelpFormatter, number, package_file, writable_file

FORMS = ("as trained", "compiled")
"""fp32 tables in eager mode, and int8 tables compiled."""
SIZES = {"max_batch": 16, "candidates": 100, "history": 100, "users": 1000, "seed": 0, "warm_up": 3}
"""Maximum batch, candidates per request, median events per user, number of users, seed, and seconds
that are not counted."""
SPIN = 2e-4
"""Seconds before an arrival without sleep, since sleep returns late."""

import numpy as np
import pandas as pd
import torch
from checkpoint import CheckpointError
from scoring import RequestError, Requests, Server
from serve_dlrm import load_scorer, prepare
from stamps import stamp


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    # fmt: off
    add("--run", type=Path, default=Path("runs/train_dlrm/attention"), help="of train_dlrm.py")
    add("--forms", nargs="+", choices=FORMS, default=[*FORMS],
        help="of the model")
    add("--rates", nargs="+", type=number(int, 1, 10**6), default=[100, 400, 800, 2000],
        help="requests per second")
    add("--seconds", type=number(float, 0.1, 3600), default=10, help="of each rate, to be counted")
    add("--package", type=package_file, default="runs/serving_load/scorer.pt2",
        help="the compiled model")
    add("--csv", type=writable_file, help="for the figures, a new file")
    # fmt: on
    args = parser.parse_args(argv)
    if args.csv is not None and args.csv.exists():
        parser.error(f"argument --csv: must be a new file, got {str(args.csv)!r}")
    return args


class Traffic:
    """Requests of recurring users.

    Args:
        features: cardinalities of the model's features, and the maximum length of a history.
    """

    def __init__(self, features: dict[str, Any]) -> None:
        self._random = np.random.default_rng(SIZES["seed"])
        self._ids, self._max_history = features["cardinalities"], features["max_history"]
        lengths = np.exp(self._random.normal(np.log(SIZES["history"]), 1, SIZES["users"]))
        self._num_events = lengths.astype(int) + 1
        popularity = 1 / np.arange(1, SIZES["users"] + 1)
        self._popularity = popularity / popularity.sum()

    def arrivals(self, rate: float, seconds: float) -> np.ndarray:
        """Return arrival times in seconds of a Poisson process."""
        gaps = self._random.exponential(1 / rate, int(2 * rate * seconds) + 100)
        times = gaps.cumsum()
        return times[times < seconds]

    def requests(self, count: int) -> list[bytes]:
        """Return ``count`` requests as JSON."""
        users = self._random.choice(len(self._popularity), count, p=self._popularity)
        return [self._request(int(user)) for user in users]

    def _request(self, user: int) -> bytes:
        self._num_events[user] += self._random.poisson(2)
        num_events = int(self._num_events[user])
        events = np.arange(max(0, num_events - self._max_history), num_events)
        items = (user * 7919 + events * 104_729) % self._ids["item"]  # deterministic for each user
        candidates = self._random.integers(self._ids["item"], size=SIZES["candidates"])
        features = {name: user % count for name, count in self._ids.items()}
        user_features = {"events": num_events, "seconds_since_last": 60, **features}
        rows = [
            [{"item": int(item), "category": int(item) % self._ids["category"]} for item in some]
            for some in (items, candidates)
        ]
        shown = [{**row, "events": 1 + row["item"] % 100} for row in rows[1]]
        return json.dumps({"user": user_features, "history": rows[0], "candidates": shown}).encode()


def replay(
    serve: Callable[[Sequence[bytes]], object],
    arrivals: np.ndarray,
    requests: Sequence[bytes],
    max_batch: int,
) -> np.ndarray:
    """Serve requests as they arrive, and return their latencies in seconds."""
    done = np.empty(len(arrivals))
    begin, start = 0, time.perf_counter()
    while begin < len(arrivals):
        now = time.perf_counter() - start
        if (early := arrivals[begin] - now) > 0:
            if early > SPIN:
                time.sleep(early - SPIN)
            continue
        arrived = int(np.searchsorted(arrivals, now, side="right"))
        end = min(arrived, begin + max_batch)
        serve(requests[begin:end])
        done[begin:end] = time.perf_counter() - start
        begin = end
    return done - arrivals


def measure(
    server: Server, traffic: Traffic, rate: int, seconds: float
) -> dict[str, tuple[float, str]]:
    """Return figures at one rate, each with its unit."""
    arrivals = traffic.arrivals(rate, SIZES["warm_up"] + seconds)
    requests = traffic.requests(len(arrivals))
    gc.collect()

    def serve(batch: Sequence[bytes]) -> None:
        for scores in server.scores(batch):
            if isinstance(scores, Exception):
                raise scores

    latencies = replay(serve, arrivals, requests, SIZES["max_batch"])
    counted = arrivals >= SIZES["warm_up"]
    if not counted.any():
        raise SystemExit(f"no request came in --seconds {seconds} at a rate of {rate}")
    p50, p99 = np.percentile(1000 * latencies[counted], [50, 99])
    done = arrivals + latencies - SIZES["warm_up"]
    return {
        "counted": (float(counted.sum()), "requests"),
        "p50": (p50, "ms"),
        "p99": (p99, "ms"),
        # After the warm-up, including requests that were in the queue.
        "served": ((done > 0).sum() / max(done.max(), seconds), "requests/s"),
    }


def describe(args: argparse.Namespace) -> dict[str, object]:
    """Return settings, hardware, versions and date."""
    measured = stamp("triton", "torchrec")
    if not torch.cuda.is_available():
        measured["gpu"] += f", {os.cpu_count()} cores"
    return {
        **SIZES,
        "seconds": args.seconds,
        "threads": torch.get_num_threads(),
        **measured,
        "note": f"load average {os.getloadavg()[0]:.1f} before",
    }


def serve_form(form: str, args: argparse.Namespace, device: torch.device) -> tuple[Server, dict]:
    """Return the server of a form, and its features."""
    if form == "as trained":
        scorer, features = load_scorer(args.run, device)
        return Server(scorer, Requests(features, device)), features
    return prepare(argparse.Namespace(**vars(args), tables="int8", compile=True), device)


def main(argv: list[str] | None = None) -> int:
    """Measure, print and append to the CSV."""
    args = parse_args(argv)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    described = describe(args)
    printed = []
    for form in args.forms:
        try:
            server, features = serve_form(form, args, device)
        except (RequestError, CheckpointError) as error:
            sys.exit(f"error: {error}")
        traffic = Traffic(features)
        for rate in args.rates:
            figures = measure(server, traffic, rate, args.seconds)
            printed.append({"form": form, "rate/s": rate} | {k: x for k, (x, _) in figures.items()})
            labels = {"suite": "serving_load", "case": f"{rate}/s", "provider": form}
            rows = pd.DataFrame(
                {**labels, "mode": "forward", "metric": metric, "median": value, "unit": unit}
                for metric, (value, unit) in figures.items()
            ).assign(**described)
            if args.csv is not None:
                args.csv.parent.mkdir(parents=True, exist_ok=True)
                header = not args.csv.exists()
                rows.to_csv(args.csv, mode="a", header=header, index=False, float_format="%.4g")
    print(pd.DataFrame(printed).to_string(index=False, float_format="{:,.4g}".format))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
