"""Serves what train_dlrm.py has trained: scores one user's candidates, and says how fast.

    python examples/train_dlrm.py --pooling attention     # leaves a checkpoint
    python examples/serve_dlrm.py                         # scores examples/request.json

From the checkpoint to the scores: the tables are quantized to int8, the model is exported for any
number of candidates and history rows, and compiled ahead of time into one file. A user's history is
looked up and read once for all candidates; training looks it up for each of them.

With --explain K, it also shows which K events of the history each of the best candidates looks at
most, and the weight that each head of the attention gives them.

A request names the user's features, the history from the oldest event to the newest, and the
candidates, with counts as they are, and at most 10,000 rows of either:

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
import reprlib
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from options import end_on_ctrl_c, number, package_file

T = TypeVar("T", int, list, dict)
TARGETS = ["item", "category"]
HISTORIES = ["item_history", "category_history"]
PERCENTILES = (50, 90, 99)
MAX_ROWS = 10_000
"""Of a request's history, and of its candidates."""
MAX_BYTES = 16 * 2**20
"""Of a request's file."""
MAX_COUNT = 2**63 - 1
KINDS = {int: "an integer from {} to {}", list: "a list of {} to {}", dict: "an object"}


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
                        help="what the tables are served in (default: %(default)s)")
    parser.add_argument("--package", type=package_file, default="runs/serve_dlrm/scorer.pt2",
                        help="the compiled model (default: %(default)s)")
    parser.add_argument("--no-compile", dest="compile", action="store_false",
                        help="run the exported model as it is")
    parser.add_argument("--times", type=number(int, 1, 10**6), default=200,
                        help="how often to score the request (default: %(default)s)")
    parser.add_argument("--top", type=number(int, 1, 10**6), default=5,
                        help="candidates to show (default: %(default)s)")
    parser.add_argument("--explain", type=number(int, 0, MAX_ROWS), default=0, metavar="K",
                        help="events to show of the history for each of them, those of the largest "
                             "weight, mean of the heads, as trained (default: %(default)s)")
    # fmt: on
    return parser.parse_args()


if __name__ == "__main__":
    end_on_ctrl_c()
    ARGS = parse_args()  # before the imports, which take seconds

# TorchRec and FBGEMM have much to say about themselves when imported.
logging.disable(logging.WARNING)
warnings.simplefilter("ignore", FutureWarning)
warnings.filterwarnings("ignore", "torch.distributed is disabled")

import numpy as np
import torch
from checkpoint import CheckpointError, describe_checkpoint, load_state, newest_checkpoint
from events import NUM_DENSE_FEATURES
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torchrec.inference.modules import quantize_inference_model
from torchrec.models.dlrm import DLRM
from torchrec.pt2.utils import register_fake_classes
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from train_dlrm import build_model


class RequestError(Exception):
    """The request or the checkpoint cannot be used; the message says where and why."""


class Scorer(nn.Module):
    """A trained DLRM that scores all candidates of one user.

    Args:
        dlrm: with a TargetAttentionEmbeddingBagCollection whose one attention is that of
            train_dlrm.py.
    """

    def __init__(self, dlrm: DLRM) -> None:
        super().__init__()
        self.dlrm = dlrm
        self.user_keys = [
            name
            for table in dlrm.sparse_arch.embedding_bag_collection.embedding_bag_configs()
            for name in table.feature_names
            if name not in TARGETS + HISTORIES
        ]

    def forward(self, dense: Tensor, ids: Tensor, lengths: Tensor, user: Tensor) -> Tensor:
        """Probabilities `[C]` that the user takes each of `C` candidates.

        Args:
            dense: `[C, NUM_DENSE_FEATURES]`.
            ids: `[2·C + 2·L]`, items and categories of the candidates, then of `L` history rows.
            lengths: `[4]`, the parts of `ids`: `C, C, L, L`.
            user: one id for each of `user_keys`.
        """
        collection = self.dlrm.sparse_arch.embedding_bag_collection
        count = dense.shape[0]
        columns, targets, history = self._rows(count, ids, lengths)
        attended = collection.pooling.attentions[0](
            JaggedTensor(targets, lengths=lengths[:1]), history
        )
        columns |= zip(HISTORIES, attended.chunk(2, dim=1), strict=True)
        users = KeyedJaggedTensor(
            keys=self.user_keys, values=user, lengths=torch.ones_like(user), stride=1
        )
        for name, row in collection.embedding_bag_collection(users).to_dict().items():
            columns[name] = row.expand(count, -1)

        names = self.dlrm.sparse_arch.sparse_feature_names
        interacted = self.dlrm.inter_arch(
            dense_features=self.dlrm.dense_arch(dense),
            sparse_features=torch.stack([columns[name] for name in names], dim=1),
        )
        return self.dlrm.over_arch(interacted).squeeze(1).sigmoid()

    def explain(self, dense: Tensor, ids: Tensor, lengths: Tensor, user: Tensor) -> Tensor:
        """Weights `[L, C, H]` that each head of each candidate gives each row of the history.

        The arguments are those of `forward`. Encoder layers have mixed the rows before, if there
        are any.
        """
        pooling = self.dlrm.sparse_arch.embedding_bag_collection.pooling
        _, targets, history = self._rows(dense.shape[0], ids, lengths)
        return pooling.attentions[0].attention_weights(targets.unsqueeze(0), history).values()

    def _rows(
        self, count: int, ids: Tensor, lengths: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, JaggedTensor]:
        """Rows of the candidates by their key, side by side, and those of the encoded history."""
        collection = self.dlrm.sparse_arch.embedding_bag_collection
        features = KeyedJaggedTensor(keys=TARGETS + HISTORIES, values=ids, lengths=lengths)
        (lookup,) = collection.embedding_collections.values()  # of one width
        rows = lookup(features)
        columns = {name: rows[name].values() for name in TARGETS}
        for column in columns.values():
            torch._check(column.shape[0] == count)
        item_history, category_history = (rows[name].values() for name in HISTORIES)
        torch._check(item_history.shape[0] == category_history.shape[0])
        history = JaggedTensor(
            torch.cat([item_history, category_history], dim=1), lengths=lengths[2:3]
        )
        targets = torch.cat(list(columns.values()), dim=1)
        return columns, targets, collection.pooling.encoders[0](history)


class Requests:
    """Turns requests into tensors, and refuses what the model does not know.

    Args:
        features: of the checkpoint: ids per feature, and mean and deviation of dense features.
        device: of the tensors.
    """

    def __init__(self, features: dict, user_keys: list[str], device: torch.device) -> None:
        self._cardinalities: dict[str, int] = features["cardinalities"]
        self._mean, self._std = (np.array(features[f"dense_{name}"]) for name in ("mean", "std"))
        self._user_keys, self._device = user_keys, device

    def tensors(self, request: dict) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of `Scorer.forward`; a lone candidate is in them twice.

        Raises:
            RequestError: something is missing, of another kind, or out of range.
        """
        user = _field(request, "user", "the request", dict)
        history = _field(request, "history", "the request", list, most=MAX_ROWS)
        candidates = _field(request, "candidates", "the request", list, least=1, most=MAX_ROWS)
        if len(candidates) == 1:
            candidates = candidates * 2  # the compiled model takes two or more
        counts = [
            [
                _field(user, "events", "user", int),
                _field(user, "seconds_since_last", "user", int),
                _field(candidate, "events", f"candidates[{index}]", int),
            ]
            for index, candidate in enumerate(candidates)
        ]
        dense = (np.log1p(counts) - self._mean) / self._std
        ids = [
            self._id(row, name, f"{where}[{index}]")
            for where, some in (("candidates", candidates), ("history", history))
            for name in TARGETS
            for index, row in enumerate(some)
        ]
        lengths = [len(candidates)] * len(TARGETS) + [len(history)] * len(HISTORIES)
        user_ids = [self._id(user, name, "user") for name in self._user_keys]
        return (
            torch.tensor(dense, dtype=torch.float32, device=self._device),
            *(torch.tensor(some, device=self._device) for some in (ids, lengths, user_ids)),
        )

    def _id(self, row: object, name: str, where: str) -> int:
        return _field(row, name, where, int, most=self._cardinalities[name] - 1)


def _field(
    row: object, name: str, where: str, kind: type[T], least: int = 0, most: int = MAX_COUNT
) -> T:
    """`row[name]`, an integer in a range, a list of as many members, or an object."""
    if not isinstance(row, dict):
        raise RequestError(f"{where} must be an object, got {reprlib.repr(row)}")
    value = row.get(name)
    # True is an int, too, but not of this type.
    if type(value) is not kind or not least <= (value if kind is int else len(value)) <= most:
        got = f"a list of {len(value)}" if isinstance(value, list) else reprlib.repr(value)
        expected = KINDS[kind].format(least, most)
        raise RequestError(f"{name} of {where} must be {expected}, got {got}")
    return value


def load_scorer(run: Path, device: torch.device) -> tuple[Scorer, dict]:
    """The model of a run's newest checkpoint, and the features of its data."""
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        raise RequestError(f"{run} holds no checkpoint; make one with train_dlrm.py")
    description = describe_checkpoint(checkpoint)
    options, features = description["options"], description["features"]
    if (pooling := description["progress"]["pooling"]) != "attention":
        raise RequestError(f"{checkpoint} must pool by attention, got {pooling}")
    names = ("width", "heads", "encoder_layers")
    shape = argparse.Namespace(**{name: int(options[name]) for name in names})
    model = build_model("attention", features["cardinalities"], shape)
    load_state({"model": model.state_dict()}, checkpoint, no_dist=True)
    return Scorer(model.model).to(device).eval(), features


def export_scorer(scorer: Scorer, device: torch.device) -> torch.export.ExportedProgram:
    """For any number of history rows, and of candidates from two on."""
    example = (
        torch.zeros(3, NUM_DENSE_FEATURES, device=device),
        torch.zeros(10, dtype=torch.int64, device=device),
        torch.tensor([3, 3, 2, 2], device=device),
        torch.zeros(len(scorer.user_keys), dtype=torch.int64, device=device),
    )
    dynamic = {0: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        scorer(*example)  # quantized lookups note the order of keys when they are first called
        return torch.export.export(
            scorer,
            example,
            dynamic_shapes={"dense": dynamic, "ids": dynamic, "lengths": None, "user": None},
            strict=False,
        )


def compile_program(program: torch.export.ExportedProgram, package: Path) -> Callable[..., Tensor]:
    """`program` compiled into one file, and loaded from it."""
    package.parent.mkdir(parents=True, exist_ok=True)
    torch._inductor.aoti_compile_and_package(program, package_path=str(package))
    return torch._inductor.aoti_load_package(str(package))


@torch.no_grad()
def score(
    scorer: Callable[..., Tensor], requests: Requests, request: dict
) -> tuple[np.ndarray, float]:
    """The candidates' probabilities, and the milliseconds from the parsed request to these."""
    start = time.perf_counter()
    scores = scorer(*requests.tensors(request)).cpu().numpy()[: len(request["candidates"])]
    return scores, 1000 * (time.perf_counter() - start)


@torch.no_grad()
def explain(
    scorer: Scorer, requests: Requests, request: dict, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """The events that each candidate looks at most, `most` or all, from the largest weight on.

    Returns:
        `[C, K]`, places in the history; and `[C, K, H]`, the weight by each head, whose mean ranks.
    """
    weights = scorer.explain(*requests.tensors(request)).cpu().numpy()
    weights = weights.swapaxes(0, 1)[: len(request["candidates"])]
    events = np.argsort(-weights.mean(axis=2), axis=1, kind="stable")[:, :most]
    return events, np.take_along_axis(weights, events[:, :, None], axis=1)


def read_request(path: Path) -> object:
    """What the file holds; integers past 64 bits as text, for a message that names their field.

    Raises:
        RequestError: the file cannot be read, is too large, or not JSON in UTF-8.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        return json.loads(
            content.decode(), parse_int=lambda text: int(text) if len(text) < 20 else text
        )
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"--request {path} cannot be read as JSON in UTF-8: {error}") from None


def serve(args: argparse.Namespace, device: torch.device) -> None:
    request = read_request(args.request)
    trained, features = load_scorer(args.run, device)
    requests = Requests(features, trained.user_keys, device)
    exact, _ = score(trained, requests, request)

    served = trained
    if args.tables == "int8":
        served, _ = load_scorer(args.run, device)
        register_fake_classes()  # of FBGEMM, for the exporter
        quantize_inference_model(served)
    program = export_scorer(served, device)
    name = f"{'compiled' if args.compile else 'exported'}, {args.tables}"
    scorer = compile_program(program, args.package) if args.compile else program.module()
    scores, _ = score(scorer, requests, request)

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
        some = {**request, "candidates": [request["candidates"][index] for index in shown]}
        console.print(table_of_weights(some, *explain(trained, requests, some, args.explain)))
    console.print(f"largest difference of all scores: {np.abs(scores - exact).max():.2g}")

    latency = Table("milliseconds", title=f"One request, {args.times} times, on {device.type}")
    for percentile in PERCENTILES:
        latency.add_column(f"p{percentile}", justify="right")
    for label, model in (("as trained", trained), (name, scorer)):
        times = [score(model, requests, request)[1] for _ in range(args.times)]
        latency.add_row(label, *(f"{ms:.2f}" for ms in np.percentile(times, PERCENTILES)))
    console.print(latency)
    if args.compile:
        print(f"the compiled model: {args.package}")


def table_of_weights(request: dict, events: np.ndarray, weights: np.ndarray) -> Table:
    """What `explain` returns, a row for each candidate and event."""
    table = Table("candidate", "event", title="What they look at, as trained")
    for name in ("mean", *(f"head {head}" for head in range(weights.shape[2]))):
        table.add_column(name, justify="right")
    for candidate, *looked_at in zip(request["candidates"], events, weights, strict=True):
        for event, by_head in zip(*looked_at, strict=True):
            seen = request["history"][event]["item"]
            numbers = (f"{weight:.3f}" for weight in (by_head.mean(), *by_head))
            table.add_row(f"item {candidate['item']}", f"{event}: item {seen}", *numbers)
        table.add_section()
    return table


def main(args: argparse.Namespace) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # more cost such small layers more than they bring
    try:
        serve(args, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except (RequestError, CheckpointError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(ARGS)
