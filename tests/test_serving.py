"""``examples/serve_dlrm.py``: from a training's checkpoint to scores of a compiled model."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.inference.modules import quantize_inference_model
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import serve_dlrm  # noqa: E402
from serve_dlrm import (  # noqa: E402
    HISTORIES,
    TARGETS,
    RequestError,
    Requests,
    export_scorer,
    load_scorer,
    score,
)

logging.disable(logging.NOTSET)  # which the examples turn off

CPU = torch.device("cpu")
REQUEST = json.loads((EXAMPLES / "request.json").read_text())
SHAPES = {  # candidates and history rows
    "one candidate": (1, 40),
    "no history": (23, 0),
    "one history row": (23, 1),
    "neither but one": (1, 0),
    "many candidates": (500, 40),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short training on the CPU."""
    out = tmp_path_factory.mktemp("run")
    command = [sys.executable, str(EXAMPLES / "train_dlrm.py"), f"--out={out}"]
    paths = [str(EXAMPLES.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    subprocess.run(
        [*command, "--pooling=attention", "--users=60", "--batch-size=256", "--epochs=1"],
        env=os.environ
        | {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        },
        check=True,
        capture_output=True,
        timeout=120,
    )
    return out / "attention"


def request_of(candidates: int, history: int) -> dict:
    rows = REQUEST["candidates"] * (candidates // len(REQUEST["candidates"]) + 1)
    return {**REQUEST, "candidates": rows[:candidates], "history": REQUEST["history"][:history]}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_history_looked_up_once_scores_as_in_training(run: Path, shape: str):
    """Where each candidate is a sample that has the whole history."""
    scorer, features = load_scorer(run, CPU)
    request = request_of(*SHAPES[shape])
    requests = Requests(features, scorer.user_keys, CPU)
    scores, _ = score(scorer, requests, request)
    count = len(request["candidates"])
    assert scores.shape == (count,)

    bags = {name: [[row[name]] for row in request["candidates"]] for name in TARGETS}
    for target, history in zip(TARGETS, HISTORIES, strict=True):
        bags[history] = [[row[target] for row in request["history"]]] * count
    for name in scorer.user_keys:
        bags[name] = [[request["user"][name]]] * count
    batch = KeyedJaggedTensor(
        keys=list(bags),
        values=torch.tensor([i for samples in bags.values() for ids in samples for i in ids]),
        lengths=torch.tensor([len(ids) for samples in bags.values() for ids in samples]),
    )
    user = request["user"]
    counts = [
        [user["events"], user["seconds_since_last"], row["events"]] for row in request["candidates"]
    ]
    dense = (np.log1p(counts) - features["dense_mean"]) / features["dense_std"]
    with torch.no_grad():
        logits = scorer.dlrm(torch.tensor(dense, dtype=torch.float32), batch)
    np.testing.assert_allclose(scores, logits.squeeze(1).sigmoid().numpy(), atol=1e-6)


@pytest.mark.parametrize("tables", ["fp32", "int8"])
def test_the_exported_model_takes_any_candidates_and_history(
    run: Path, tables: str, device: torch.device, fake_classes: None
):
    scorer, features = load_scorer(run, device)
    requests = Requests(features, scorer.user_keys, device)
    if tables == "int8":
        quantize_inference_model(scorer)
    exported = export_scorer(scorer, device).module()
    for shape in SHAPES.values():
        expected, _ = score(scorer, requests, request_of(*shape))
        scores, _ = score(exported, requests, request_of(*shape))
        np.testing.assert_array_equal(scores, expected)


packages_load = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 crashed when it loaded a package, of any module"
)


@pytest.fixture(scope="module")
def served(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The compiled model, and what the script prints."""
    package = tmp_path_factory.mktemp("package") / "scorer.pt2"
    command = [sys.executable, str(EXAMPLES / "serve_dlrm.py"), f"--run={run}"]
    process = subprocess.run(
        [*command, f"--package={package}", "--times=3", "--top=4"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(EXAMPLES.parent)},
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.stderr == ""
    return package, process.stdout


@packages_load
def test_the_best_candidates_and_the_latency_are_printed(run: Path, served: tuple[Path, str]):
    scorer, features = load_scorer(run, CPU)
    scores, _ = score(scorer, Requests(features, scorer.user_keys, CPU), REQUEST)
    _, printed = served
    assert f"The best 4 of {len(REQUEST['candidates'])}" in printed
    best = REQUEST["candidates"][int(scores.argmax())]["item"]
    assert f"item {best} " in printed
    assert f"{scores.max():.4f}" in printed
    for percentile in ("p50", "p90", "p99"):
        assert percentile in printed


@packages_load
@pytest.mark.parametrize("shape", SHAPES)
def test_the_compiled_model_takes_any_candidates_and_history(
    run: Path, served: tuple[Path, str], shape: str
):
    package, _ = served
    scorer, features = load_scorer(run, CPU)
    requests = Requests(features, scorer.user_keys, CPU)
    exact, _ = score(scorer, requests, request_of(*SHAPES[shape]))
    quantize_inference_model(scorer)
    expected, _ = score(scorer, requests, request_of(*SHAPES[shape]))
    compiled = torch._inductor.aoti_load_package(str(package))
    scores, milliseconds = score(compiled, requests, request_of(*SHAPES[shape]))
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    np.testing.assert_allclose(scores, exact, atol=0.05)
    assert milliseconds > 0


BAD_REQUESTS = {
    "no-history": ({"history": None}, "the request must have a list called 'history'"),
    "no-candidates": ({"candidates": []}, "candidates must hold at least one, got none"),
    "missing-id": (
        {"history": [{"item": 1}]},
        r"category of history\[0\] must be an integer from 0 on, got None",
    ),
    "unknown-id": (
        {"candidates": [{"item": 10**6, "category": 0, "events": 0}]},
        r"item of candidates\[0\] must be under \d+, got 1000000",
    ),
    "negative-count": (
        {"user": {**REQUEST["user"], "events": -1}},
        "events of user must be an integer from 0 on, got -1",
    ),
    "unknown-user": (
        {"user": {**REQUEST["user"], "cohort": 99}},
        "cohort of user must be under 8, got 99",
    ),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_requests_are_refused(run: Path, case: str):
    change, message = BAD_REQUESTS[case]
    scorer, features = load_scorer(run, CPU)
    with pytest.raises(RequestError, match=message):
        Requests(features, scorer.user_keys, CPU).tensors(REQUEST | change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--run=nowhere"], "nowhere holds no checkpoint; make one with train_dlrm.py"),
        (["--request=nowhere.json"], "nowhere.json cannot be read"),
    ],
)
def test_unusable_options_end_with_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
):
    monkeypatch.setattr(sys, "argv", ["serve_dlrm.py", f"--run={run}", *options])
    with pytest.raises(SystemExit) as error:
        serve_dlrm.main()
    assert error.value.code.startswith("error: ")
    assert message in error.value.code
    assert "\n" not in error.value.code
