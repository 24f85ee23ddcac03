"""``examples/serve_dlrm.py``: from a checkpoint to scores of a compiled model."""

import argparse
import contextlib
import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import serve_dlrm
import torch
from events import NUM_DENSE_FEATURES
from scoring import HISTORIES, TARGETS, RequestError, Requests, Server, read_request
from serve_dlrm import (
    Scorer,
    compile_program,
    explain,
    export_scorer,
    load_scorer,
    score,
    write_triton_model,
)
from torch import Tensor
from torchrec.inference.modules import quantize_inference_model
from torchrec.pt2.utils import deregister_fake_classes
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from train_dlrm import build_model

from tests.processes import run_script
from tests.runs import assert_same_run

logging.disable(logging.NOTSET)  # which the examples turn off

EXAMPLES = Path(__file__).parents[2] / "examples"
CPU = torch.device("cpu")
REQUEST = json.loads((EXAMPLES / "request.json").read_text())
SHAPES = {  # candidates and history rows
    "one candidate": (1, 40),
    "no history": (23, 0),
    "one history row": (23, 1),
    "neither but one": (1, 0),
    "many candidates": (500, 40),
}


ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short training on the CPU."""
    out = tmp_path_factory.mktemp("run")
    options = ["--pooling=attention", "--users=60", "--batch-size=256", "--epochs=1"]
    done = run_script(EXAMPLES / "train_dlrm.py", f"--out={out}", *options, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return out / "attention"


def request_of(candidates: int, history: int) -> dict:
    rows = REQUEST["candidates"] * (candidates // len(REQUEST["candidates"]) + 1)
    return {**REQUEST, "candidates": rows[:candidates], "history": REQUEST["history"][:history]}


def loaded(run: Path, device: torch.device) -> tuple[Scorer, Requests, dict]:
    """The trained model, the converter of its requests, and the features of the run."""
    scorer, features = load_scorer(run, device)
    return scorer, Requests(features, device), features


def scores_of(scorer: Callable[..., Tensor], requests: Requests, request: dict) -> np.ndarray:
    return score(Server(scorer, requests), request)[0]


def in_fp64(run: Path, scorer: Scorer) -> Server:
    """The trained model in fp64, with the tables of ``scorer``, which may be quantized."""
    exact, features = load_scorer(run, CPU)
    state = scorer.state_dict()
    for name, weight in exact.double().state_dict().items():
        table = state[name].cpu()
        if table.dtype == torch.uint8:  # of a row: its scale and its offset, in fp16, its integers
            scale, offset = table[:, :4].contiguous().view(torch.float16).double().split(1, dim=1)
            table = table[:, 4 : 4 + weight.shape[1]] * scale + offset
        weight.copy_(table)
    return Server(lambda dense, *ids: exact(dense.double(), *ids), Requests(features, CPU))


NUM_TERMS = 400 + 40  # inputs of all layers, and rows of a history


def assert_scores(scores: Sequence[np.ndarray], exact: Server, batch: list[dict]) -> None:
    expected = np.concatenate(exact.scores(batch))
    assert_same_run(np.concatenate(scores), expected, num_terms=NUM_TERMS)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_request_scores_as_its_candidates_do_in_training(run: Path, shape: str):
    """In training, each candidate is a sample with the whole history."""
    scorer, requests, features = loaded(run, CPU)
    request = request_of(*SHAPES[shape])
    scores = scores_of(scorer, requests, request)
    count = len(request["candidates"])
    assert scores.shape == (count,)

    bags = {name: [[row[name]] for row in request["candidates"]] for name in TARGETS}
    for target, history in zip(TARGETS, HISTORIES, strict=True):
        bags[history] = [[row[target] for row in request["history"]]] * count
    for name in requests.keys[len(bags) :]:
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
    shape = argparse.Namespace(width=16, heads=4, encoder_layers=0)
    trained = build_model("attention", features["cardinalities"], shape).model
    trained.load_state_dict(scorer.dlrm.state_dict())
    dense = torch.tensor(dense, dtype=torch.float32)
    with torch.no_grad():
        expected = trained.double()(dense.double(), batch).squeeze(1).sigmoid()
    assert_same_run(scores, expected, num_terms=NUM_TERMS)


def test_a_batch_scores_as_its_requests_do(run: Path):
    """An invalid request does not affect the others."""
    scorer, requests, _ = loaded(run, CPU)
    batch = [request_of(*shape) for shape in SHAPES.values()]
    *scores, empty, cut, last = Server(scorer, requests).scores([*batch, {}, b"{", REQUEST])
    batch, scores = [*batch, REQUEST], [*scores, last]
    alone = [scores_of(scorer, requests, request) for request in batch]
    assert [len(some) for some in scores] == [len(some) for some in alone]
    assert_scores(scores, in_fp64(run, scorer), batch)
    assert str(empty) == "user of the request must be an object, got None"
    assert str(cut).startswith("the request must be JSON in UTF-8: ")


@pytest.mark.parametrize("most", [3, 10_000])
def test_explained_events_are_sorted(run: Path, most: int):
    scorer, requests, _ = loaded(run, CPU)
    for count, length in SHAPES.values():
        events, weights = explain(scorer, requests, request_of(count, length), most)
        assert events.shape == weights.shape[:2] == (count, min(most, length))
        assert (np.diff(weights.mean(axis=2), axis=1) <= 0).all()
        if most >= length > 0:
            assert all(sorted(indices) == [*range(length)] for indices in events.tolist())


def test_an_explained_output_is_the_sum_of_its_events(run: Path):
    """Each head sums its columns of the rows by its weights."""
    scorer, requests, _ = loaded(run, CPU)
    dense, ids, lengths = requests.tensors([requests.check(REQUEST)])
    attended = []
    attention = scorer.dlrm.sparse_arch.embedding_bag_collection.pooling.attentions[0]
    attention.register_forward_hook(lambda _, inputs, out: attended.append((inputs[1], out)))
    with torch.no_grad():
        scorer(dense, ids, lengths)
        weights = scorer.explain(ids, lengths)
    ((history, out),) = attended
    columns = history.values().unflatten(1, (attention.num_heads, -1))
    sums = torch.einsum("lch,lhd->chd", weights, columns).flatten(1)
    assert_same_run(sums, out[:-1], num_terms=len(columns))  # the last one is nobody's


@pytest.mark.parametrize("tables", ["fp32", "int8"])
def test_the_exported_model_takes_any_candidates_and_history(
    run: Path, tables: str, device: torch.device, fake_classes: None
):
    scorer, requests, _ = loaded(run, device)
    if tables == "int8":
        quantize_inference_model(scorer)
    exported = export_scorer(scorer, device).module()
    for shape in SHAPES.values():
        expected = scores_of(scorer, requests, request_of(*shape))
        scores = scores_of(exported, requests, request_of(*shape))
        np.testing.assert_array_equal(scores, expected)


COMPILE_QUICKLY = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # in half the time
packages_load = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 crashed when it loaded a package, of any module"
)


@pytest.fixture(scope="module")
def served(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the compiled model, and the output of the script."""
    folder, printed = tmp_path_factory.mktemp("served"), io.StringIO()
    options = [f"--run={run}", f"--package={folder}/scorer.pt2", f"--triton={folder}", "--times=3"]
    options += ["--top=4", "--explain=2"]
    complaints = io.StringIO()
    with contextlib.ExitStack() as left:
        left.callback(deregister_fake_classes)
        patch = left.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(sys, "argv", ["serve_dlrm.py", *options])
        patch.setattr(torch.cuda, "is_available", lambda: False)
        left.enter_context(torch._inductor.config.patch(COMPILE_QUICKLY))
        left.enter_context(contextlib.redirect_stdout(printed))
        left.enter_context(contextlib.redirect_stderr(complaints))
        serve_dlrm.main(serve_dlrm.parse_args())
    assert complaints.getvalue() == ""
    return folder, printed.getvalue()


def test_script_output(run: Path):
    """In another process, with the exported model, which is not compiled."""
    options = [f"--run={run}", "--no-compile", "--times=1"]
    done = run_script(EXAMPLES / "serve_dlrm.py", *options, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "exported, int8" in done.stdout
    assert "One request, 1 times, on cpu" in done.stdout


@packages_load
def test_printed_results(run: Path, served: tuple[Path, str]):
    scorer, requests, _ = loaded(run, CPU)
    scores = scores_of(scorer, requests, REQUEST)
    events, weights = explain(scorer, requests, REQUEST, 2)
    _, printed = served
    assert f"The best 4 of {len(REQUEST['candidates'])}" in printed
    for said in (f"{scores.max():.4f}", "p50", "p90", "p99"):
        assert said in printed
    lines = [
        line.split() for line in printed.partition("Largest attention weights")[2].splitlines()
    ]
    best = int(scores.argmax())
    item = str(REQUEST["candidates"][best]["item"])
    for event, by_head in zip(events[best], weights[best], strict=True):
        seen = str(REQUEST["history"][event]["item"])
        (line,) = (x for x in lines if x[1:3] == ["item", item] and x[4:7:2] == [f"{event}:", seen])
        assert [x for x in line[7:] if x != "│"] == [
            f"{weight:.3f}" for weight in (by_head.mean(), *by_head)
        ]


@packages_load
def test_the_compiled_model_takes_any_candidates_and_history(run: Path, served: tuple[Path, str]):
    folder, _ = served
    scorer, requests, _ = loaded(run, CPU)
    quantize_inference_model(scorer)
    compiled = torch._inductor.aoti_load_package(str(folder / "scorer.pt2"))
    server, exact = Server(compiled, requests), in_fp64(run, scorer)
    for shape in SHAPES.values():
        request = request_of(*shape)
        scores, milliseconds = score(server, request)
        assert_scores([scores], exact, [request])
        assert milliseconds > 0


@pytest.mark.gpu
@packages_load
def test_compiled_for_a_gpu(run: Path, tmp_path: Path, fake_classes: None):
    scorer, requests, _ = loaded(run, torch.device("cuda"))
    quantize_inference_model(scorer)
    program = export_scorer(scorer, torch.device("cuda"))
    compiled, exact = compile_program(program, tmp_path / "scorer.pt2"), in_fp64(run, scorer)
    for shape in SHAPES.values():
        request = request_of(*shape)
        assert_scores([scores_of(compiled, requests, request)], exact, [request])


TRITON_STUB = """
class Tensor:
    def __init__(self, name, array):
        self.name, self.array = name, array

    def as_numpy(self):
        return self.array


class TritonError:
    def __init__(self, message):
        self.message = message


class InferenceResponse:
    def __init__(self, output_tensors=(), error=None):
        self.output_tensors, self.error = output_tensors, error


def get_input_tensor_by_name(request, name):
    return next(tensor for tensor in request if tensor.name == name)
"""
"""A stub of ``triton_python_backend_utils``, which exists in a server only."""
CALL_AS_TRITON = """
import importlib, json, sys
import numpy as np
folder, stub, requests = sys.argv[1:]
sys.path += [f"{folder}/1", folder, stub]
import triton_python_backend_utils as pb_utils
model = importlib.import_module("1.model").TritonPythonModel()
model.initialize({"model_repository": folder, "model_version": "1",
                  "model_instance_kind": "CPU", "model_instance_device_id": "0"})
for batch in json.load(open(requests)):
    responses = model.execute(
        [[pb_utils.Tensor("REQUEST", np.array([[json.dumps(x).encode()]], dtype=object))]
         for x in batch]
    )
    print(json.dumps([
        x.error.message if x.error else x.output_tensors[0].as_numpy().tolist() for x in responses
    ]))
"""


@packages_load
def test_triton_loads_the_compiled_model(run: Path, served: tuple[Path, str], tmp_path: Path):
    """Load it in a stub of Triton's Python backend: scores, and one bad request."""
    folder, printed = served
    assert f"for Triton: {folder / 'serve_dlrm'}" in printed

    valid_requests = [request_of(*shape) for shape in SHAPES.values()]
    batches = [valid_requests[:1], valid_requests[1:], [REQUEST, {**REQUEST, "user": {}}]]
    (tmp_path / "requests.json").write_text(json.dumps(batches))
    (tmp_path / "triton_python_backend_utils.py").write_text(TRITON_STUB)
    script = tmp_path / "call_as_triton.py"
    script.write_text(CALL_AS_TRITON)
    paths = [str(x) for x in (folder / "serve_dlrm", tmp_path, tmp_path / "requests.json")]
    done = run_script(script, *paths, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    *responses, (last, error) = [json.loads(line) for line in done.stdout.splitlines()]

    scorer, *_ = loaded(run, CPU)
    quantize_inference_model(scorer)
    exact = in_fp64(run, scorer)
    for batch, outputs in zip([*batches[:2], [REQUEST]], [*responses, [last]], strict=True):
        scores = [np.array(output, dtype=np.float32) for (output,) in outputs]
        assert_scores(scores, exact, batch)
    assert error == "events of user must be an integer from 0 to 9223372036854775807, got None"


def test_triton_configuration(tmp_path: Path):
    (tmp_path / "scorer.pt2").write_text("")
    folder = write_triton_model(tmp_path, tmp_path / "scorer.pt2", FEATURES)
    config = (folder / "config.pbtxt").read_text()
    model = (folder / "1" / "model.py").read_text()
    for name in re.findall(r'name: "([A-Z]+)"', config):
        assert f'"{name}"' in model
    assert f'name: "{folder.name}"' in config


ROW = {"item": 1, "category": 0, "events": 0}
USER = REQUEST["user"]
BAD_REQUESTS = [
    ({"candidates": []}, "candidates of the request must be a list of 1 to 10000, got a list of 0"),
    ({"candidates": [ROW] * 10_001}, "candidates of .* a list of 1 to 10000, got a list of 10001"),
    ({"history": ROW}, "history of the request must be a list of 0 to 10000, got {"),
    ({"history": [ROW, 7]}, r"history\[1\] must be an object, got 7"),
    ({"user": [3]}, r"user of the request must be an object, got a list of 1"),
    ({"user": {**USER, "cohort": 99}}, "cohort of user must be an integer from 0 to 7, got 99"),
    ({"user": {**USER, "events": 10**30}}, "events of user must be an .* to 92233.*, got 10{11}"),
    ({"history": [{"item": 1}]}, r"category of history\[0\] must be an integer .*, got None"),
    ({"history": [{"item": True}]}, r"item of history\[0\] must be an integer from 0 .*, got True"),
    ({"history": [{"item": "1" * 9000}]}, r"item of history\[0\] .*, got '1{12}...1{13}'"),
    ({"candidates": [{**ROW, "item": 10**6}]}, r"item of candidates\[0\] .* to 1499, got 1000000"),
]
FEATURES = {
    "cardinalities": {"item": 1500, "category": 30, "cohort": 8, "device": 3},
    "dense_mean": [0.0] * NUM_DENSE_FEATURES,
    "dense_std": [1.0] * NUM_DENSE_FEATURES,
}


@pytest.fixture
def requests() -> Requests:
    """For ``FEATURES``, without a model."""
    return Requests(FEATURES, CPU)


@pytest.mark.parametrize(("change", "message"), BAD_REQUESTS)
def test_bad_requests_are_refused(requests: Requests, change: dict, message: str):
    with pytest.raises(RequestError, match=f"^{message}"):
        requests.check(REQUEST | change)


def test_the_largest_counts_and_ids_are_taken(requests: Requests):
    row = {"item": 1499, "category": 29, "events": 2**63 - 1}
    user = {"cohort": 7, "device": 2, "events": 2**63 - 1, "seconds_since_last": 0}
    some = {"user": user, "history": [row] * 10_000, "candidates": [row] * 10_000}
    dense, ids, lengths = requests.tensors([requests.check(some)])
    assert dense.isfinite().all()
    assert ids.shape == (40_002 + 2 * 2,)  # with nobody's
    assert lengths.tolist() == [[10_000, 1]] * 2 + [[10_000, 0]] * 2 + [[1, 1]] * 2


BAD_FILES = {
    "latin-1": ('{"user": "é"}'.encode("latin-1"), "'utf-8' codec can't decode byte 0xe9"),
    "brackets": (b"[" * 100_000, "maximum recursion depth exceeded"),
    "truncated": (b'{"user": ', "Expecting value: line 1"),
    "large": (b" " * (16 * 2**20 + 1), "it has more than 16777216 bytes"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_unreadable_files_are_refused(tmp_path: Path, case: str):
    content, message = BAD_FILES[case]
    path = tmp_path / "request.json"
    path.write_bytes(content)
    with pytest.raises(
        RequestError, match="cannot be read: the request must be JSON in UTF-8: "
    ) as error:
        read_request(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_integers_of_many_digits_are_named(tmp_path: Path, requests: Requests):
    text = (EXAMPLES / "request.json").read_text()
    path = tmp_path / "request.json"
    for digits in ("1" * 5000, "-" + "9" * 5000):
        path.write_text(text.replace('"item": 971', f'"item": {digits}'))
        message = r"item of history\[0\] must be an integer from 0 to 1499, got '"
        with pytest.raises(RequestError, match=message) as error:
            requests.check(read_request(path))
        assert len(str(error.value)) < 150


def end_of(monkeypatch: pytest.MonkeyPatch, *options: str) -> int | str:
    """The exit code of the script with these options, or its last message."""
    monkeypatch.setattr(sys, "argv", ["serve_dlrm.py", *options])
    with pytest.raises(SystemExit) as error:
        serve_dlrm.main(serve_dlrm.parse_args())
    return error.value.code


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--run=nowhere"], "nowhere holds no checkpoint; make one with train_dlrm.py"),
        (["--request=nowhere.json"], "nowhere.json cannot be read"),
    ],
)
def test_unusable_files_end_with_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
):
    code = end_of(monkeypatch, f"--run={run}", *options)
    assert code.startswith("error: ")
    assert message in code
    assert "\n" not in code


def test_a_damaged_checkpoint_ends_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "run.json").write_text("{}")
    expected = "must be an object with features, options, progress, got {}"
    code = end_of(monkeypatch, f"--run={tmp_path}")
    assert code == f"error: {tmp_path}/step-1/run.json {expected}"


BAD_OPTIONS = {
    "--triton x --no-compile": "--triton needs the compiled model, got --no-compile",
    "--times 0": "argument --times: must be an integer from 1 to 1000000, got '0'",
    "--explain -1": "argument --explain: must be an integer from 0 to 10000, got '-1'",
    "--package scorer": "argument --package: must be a file that ends in .pt2, got 'scorer'",
    "--package file/x.pt2": "argument --package: must be a folder that can be written, got 'file'",
    "--tables int4": "argument --tables: invalid choice: 'int4'",
}


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_invalid_options(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    assert end_of(monkeypatch, *options.split()) == 2
    assert BAD_OPTIONS[options] in capsys.readouterr().err.splitlines()[-1]
