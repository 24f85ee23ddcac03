"""Serves a model of train_dlrm.py: scores the candidates of users, and prints latencies.

    python examples/train_dlrm.py --pooling attention     # writes a checkpoint
    python examples/serve_dlrm.py                         # scores examples/request.json

The tables are quantized to int8, and the model is exported for any number of requests, candidates
and history rows, and compiled ahead of time into one file. Samples are requests: a user's history
is looked up and read once for all candidates.

With --triton FOLDER, it also writes a model for Triton Inference Server. With --explain K, it shows
the K events of the history with the largest weights for each of the best candidates, and the
weights by head.

A request has the user's features, up to 10,000 history events from the oldest to the newest, and up
to 10,000 candidates; counts are not normalized:

    {"user": {"cohort": 1, "device": 2, "events": 57, "seconds_since_last": 40},
     "history": [{"item": 7, "category": 0}, ...],
     "candidates": [{"item": 12, "category": 0, "events": 210}, ...]}
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from options import end_on_ctrl_c, number, package_file, writable_folder

PERCENTILES = (50, 90, 99)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # fmt: off
    parser.add_argument("--run", type=Path, default=Path("runs/train_dlrm/attention"),
                        help="folder of the checkpoints of one run (default: %(default)s)")
    parser.add_argument("--request", type=Path, default=Path(__file__).parent / "request.json",
                        help="JSON file, see above (default: %(default)s)")
    parser.add_argument("--tables", choices=["int8", "fp32"], default="int8",
                        help="data type of the served tables (default: %(default)s)")
    parser.add_argument("--package", type=package_file, default="runs/serve_dlrm/scorer.pt2",
                        help="the compiled model (default: %(default)s)")
    parser.add_argument("--no-compile", dest="compile", action="store_false",
                        help="run the exported model without compilation")
    parser.add_argument("--triton", type=writable_folder, metavar="FOLDER",
                        help="model repository for Triton Inference Server to write the compiled "
                             "model to")
    parser.add_argument("--times", type=number(int, 1, 10**6), default=200,
                        help="how often to score the request (default: %(default)s)")
    parser.add_argument("--top", type=number(int, 1, 10**6), default=5,
                        help="candidates to show (default: %(default)s)")
    parser.add_argument("--explain", type=number(int, 0, 10_000), default=0, metavar="K",
                        help="events to show for each of them, with the largest mean weight of the "
                             "heads in the trained model (default: %(default)s)")
    # fmt: on
    args = parser.parse_args()
    if args.triton is not None and not args.compile:
        parser.error("--triton needs the compiled model, got --no-compile")
    return args


if __name__ == "__main__":
    end_on_ctrl_c()
    ARGS = parse_args()  # before the imports, which take seconds

# TorchRec and FBGEMM log a lot when imported.
logging.disable(logging.WARNING)
warnings.simplefilter("ignore", FutureWarning)
warnings.filterwarnings("ignore", "torch.distributed is disabled")

import numpy as np
import torch
from checkpoint import CheckpointError, describe_checkpoint, load_state, newest_checkpoint
from events import NUM_DENSE_FEATURES
from rich.console import Console
from rich.table import Table
from scoring import HISTORIES, TARGETS, RequestError, Requests, Server, read_request
from torch import Tensor, nn
from torchrec.inference.modules import quantize_inference_model
from torchrec.models.dlrm import DLRM
from torchrec.pt2.utils import register_fake_classes
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from train_dlrm import build_model

TRITON_CONFIG = """\
name: "serve_dlrm"
backend: "python"
max_batch_size: 32
dynamic_batching {}
input [{ name: "REQUEST", data_type: TYPE_STRING, dims: [ 1 ] }]
output [{ name: "SCORES", data_type: TYPE_FP32, dims: [ -1 ] }]
instance_group [{ kind: KIND_AUTO, count: 1 }]
"""
"""Configuration with JSON requests and one instance, or one per GPU."""


class Scorer(nn.Module):
    """A trained DLRM that scores the candidates of requests.

    Args:
        dlrm: a DLRM with a TargetAttentionEmbeddingBagCollection of jagged candidates.
        keys: keys of the features, in the order of `Requests.tensors`.
    """

    def __init__(self, dlrm: DLRM, keys: list[str]) -> None:
        super().__init__()
        self.dlrm, self.keys = dlrm, keys

    def forward(self, dense: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the probabilities `[ΣC]` that users take each of their candidates.

        Args:
            dense: `[ΣC, NUM_DENSE_FEATURES]`.
            ids: ids of all requests, ordered by feature.
            lengths: `[F, B]`, number of ids of each feature and request.
        """
        return self.dlrm(dense, self._features(ids, lengths)).squeeze(1).sigmoid()

    def explain(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the attention weights `[L, C, H]` of history rows, for each candidate and head.

        Arguments are as in `forward`; only the first request is explained. With encoder layers,
        rows are encoded rows.
        """
        collection = self.dlrm.sparse_arch.embedding_bag_collection
        (lookup,) = collection.embedding_collections.values()  # one per width
        rows = lookup(self._features(ids, lengths))
        targets, histories = (
            torch.cat([rows[name].to_dense()[0] for name in names], dim=1)
            for names in (TARGETS, HISTORIES)
        )
        history = JaggedTensor(histories, lengths=lengths[len(TARGETS), :1])
        encoded = collection.pooling.encoders[0](history)
        attention = collection.pooling.attentions[0]
        return attention.attention_weights(targets.unsqueeze(0), encoded).values()

    def _features(self, ids: Tensor, lengths: Tensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            keys=self.keys, values=ids, lengths=lengths.flatten(), stride=lengths.shape[1]
        )


def load_scorer(run: Path, device: torch.device) -> tuple[Scorer, dict]:
    """Load the model of a run's newest checkpoint, and the features of its data."""
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        raise RequestError(f"{run} holds no checkpoint; make one with train_dlrm.py")
    description = describe_checkpoint(checkpoint)
    options, features = description["options"], description["features"]
    if (pooling := description["progress"]["pooling"]) != "attention":
        raise RequestError(f"{checkpoint} must pool by attention, got {pooling}")
    names = ("width", "heads", "encoder_layers", "max_history")
    numbers = {name: int(options[name]) for name in names}
    shape = argparse.Namespace(**numbers)
    model = build_model("attention", features["cardinalities"], shape, candidates="jagged")
    load_state({"model": model.state_dict()}, checkpoint, no_dist=True)
    features |= {"max_history": shape.max_history}
    scorer = Scorer(model.model, Requests(features, device).keys)
    return scorer.to(device).eval(), features


def export_scorer(scorer: Scorer, device: torch.device) -> torch.export.ExportedProgram:
    """Export for any number of history rows, and at least two requests and candidates."""
    candidates, history = [2, 1, 3], [2, 0, 3]
    columns = [candidates] * len(TARGETS) + [history] * len(HISTORIES)
    columns += [[1] * len(candidates)] * (len(scorer.keys) - len(columns))
    lengths = torch.tensor(columns, device=device)
    example = (
        torch.zeros(sum(candidates), NUM_DENSE_FEATURES, device=device),
        torch.zeros(int(lengths.sum()), dtype=torch.int64, device=device),
        lengths,
    )
    dynamic = torch.export.Dim.DYNAMIC
    shapes = ({0: dynamic}, {0: dynamic}, {1: dynamic})
    with torch.no_grad():
        scorer(*example)  # the first call initializes quantized lookups
        return torch.export.export(scorer, example, dynamic_shapes=shapes, strict=False)


def compile_program(program: torch.export.ExportedProgram, package: Path) -> Callable[..., Tensor]:
    """Compile `program` into one file, and load it."""
    package.parent.mkdir(parents=True, exist_ok=True)
    torch._inductor.aoti_compile_and_package(program, package_path=str(package))
    return torch._inductor.aoti_load_package(str(package))


def score(server: Server, request: object) -> tuple[np.ndarray, float]:
    """Return the candidates' probabilities, and the time of scoring in milliseconds."""
    start = time.perf_counter()
    (scores,) = server.scores([request])
    milliseconds = 1000 * (time.perf_counter() - start)
    if isinstance(scores, RequestError):
        raise scores
    return scores, milliseconds


@torch.no_grad()
def explain(
    scorer: Scorer, requests: Requests, request: object, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return up to `most` events with the largest weights for each candidate, in descending order.

    Returns:
        `[C, K]`, indices into the history, ordered by the mean weight of the heads; and
        `[C, K, H]`, the weights by head.
    """
    _, *tensors = requests.tensors([requests.check(request)])
    weights = scorer.explain(*tensors).cpu().numpy().swapaxes(0, 1)
    events = np.argsort(-weights.mean(axis=2), axis=1, kind="stable")[:, :most]
    return events, np.take_along_axis(weights, events[:, :, None], axis=1)


def write_triton_model(repository: Path, package: Path, features: dict) -> Path:
    """Write a model for Triton's Python backend, with all files that it reads."""
    folder = repository / "serve_dlrm"
    version = folder / "1"
    version.mkdir(parents=True, exist_ok=True)
    examples = Path(__file__).parent
    shutil.copy(examples / "triton_model.py", version / "model.py")
    shutil.copy(examples / "scoring.py", version)
    shutil.copy(package, version / "scorer.pt2")
    (version / "features.json").write_text(json.dumps(features))
    (folder / "config.pbtxt").write_text(TRITON_CONFIG)
    return folder


def prepare(args: argparse.Namespace, device: torch.device) -> tuple[Server, dict]:
    """Return a server of the exported or compiled model, and the features of its data."""
    scorer, features = load_scorer(args.run, device)
    if args.tables == "int8":
        register_fake_classes()  # FBGEMM's, for the exporter
        quantize_inference_model(scorer)
    program = export_scorer(scorer, device)
    served = compile_program(program, args.package) if args.compile else program.module()
    return Server(served, Requests(features, device)), features


def serve(args: argparse.Namespace, device: torch.device) -> None:
    request = read_request(args.request)
    model, features = load_scorer(args.run, device)
    requests = Requests(features, device)
    trained = Server(model, requests)
    exact, _ = score(trained, request)
    server, features = prepare(args, device)
    scores, _ = score(server, request)
    name = f"{'compiled' if args.compile else 'exported'}, {args.tables}"

    console = Console()
    best = Table("candidate", title=f"The best {min(args.top, len(scores))} of {len(scores)}")
    best.add_column(name, justify="right")
    best.add_column("as trained", justify="right")
    shown = np.argsort(-scores, kind="stable")[: args.top]
    for index in shown:
        item = request["candidates"][index]["item"]
        best.add_row(f"item {item}", f"{scores[index]:.4f}", f"{exact[index]:.4f}")
    console.print(best)
    if args.explain:
        shortened = {**request, "candidates": [request["candidates"][index] for index in shown]}
        console.print(weights_table(shortened, *explain(model, requests, shortened, args.explain)))
    console.print(f"largest difference of all scores: {np.abs(scores - exact).max():.2g}")

    latency = Table("milliseconds", title=f"One request, {args.times} times, on {device.type}")
    for percentile in PERCENTILES:
        latency.add_column(f"p{percentile}", justify="right")
    for label, timed in (("as trained", trained), (name, server)):
        times = [score(timed, request)[1] for _ in range(args.times)]
        latency.add_row(label, *(f"{ms:.2f}" for ms in np.percentile(times, PERCENTILES)))
    console.print(latency)
    if args.compile:
        print(f"the compiled model: {args.package}")
    if args.triton is not None:
        print(f"for Triton: {write_triton_model(args.triton, args.package, features)}")


def weights_table(request: dict, events: np.ndarray, weights: np.ndarray) -> Table:
    """Return the results of `explain` as a table, with a row for each candidate and event."""
    table = Table("candidate", "event", title="Largest attention weights, as trained")
    for name in ("mean", *(f"head {head}" for head in range(weights.shape[2]))):
        table.add_column(name, justify="right")
    for candidate, *explained in zip(request["candidates"], events, weights, strict=True):
        for event, by_head in zip(*explained, strict=True):
            seen = request["history"][event]["item"]
            numbers = (f"{weight:.3f}" for weight in (by_head.mean(), *by_head))
            table.add_row(f"item {candidate['item']}", f"{event}: item {seen}", *numbers)
        table.add_section()
    return table


def main(args: argparse.Namespace) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # layers are too small for several threads
    try:
        serve(args, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except (RequestError, CheckpointError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(ARGS)
