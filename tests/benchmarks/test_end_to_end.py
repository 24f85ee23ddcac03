"""The benchmark of training steps writes complete figures, and times no wrong provider."""

import dataclasses
import functools
import gc
import itertools
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp

pytest.importorskip("torchrec")

import end_to_end
import end_to_end_peers
import end_to_end_quality
import end_to_end_results
from end_to_end import QUICK, Training, main
from end_to_end_models import CLIP, Sizes, make_batches, make_lengths, newest_events, process_group
from end_to_end_peers import PROVIDERS
from end_to_end_trace import SentBytes, Trace
from events import Events
from planted import planted_log
from torch.nn.parallel import DistributedDataParallel

from tests.processes import start_method, variables_of_ranks
from tests.runs import assert_same_run

ON_GPU = torch.cuda.is_available()
UNAVAILABLE = set() if ON_GPU else {"linear-varlen", "ours-index-dedup"}
NO_GPU = pytest.mark.skipif(ON_GPU, reason="there is a GPU")
SAMPLE_PROVIDERS = [name for name, provider in PROVIDERS.items() if not provider.by_request]


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch):
    """Shorten rounds, and exclude imported objects from garbage collection."""
    monkeypatch.setattr(end_to_end, "STEPS_PER_ROUND", end_to_end.NUM_BATCHES)
    yield
    gc.freeze()


def run(csv: Path, *options: str, status: int = 0) -> pd.DataFrame:
    assert main(["--quick", "--rounds", "2", "--csv", str(csv), *options]) == status
    return pd.read_csv(csv)


def assert_has_figures(frame: pd.DataFrame, provider: str) -> None:
    """Times of steps are positive; other figures may be zero on a GPU."""
    medians = frame.loc[[provider]].set_index("metric")["median"]
    assert (medians[["time", "throughput"]] > 0).all()
    assert (medians >= 0).all()


def test_each_provider_is_timed_or_refused(tmp_path, capsys):
    frame = run(tmp_path / "steps.csv", "--providers", *SAMPLE_PROVIDERS)
    refused = frame[frame["metric"] == "refused"].set_index("provider")
    assert {*refused.index} == UNAVAILABLE
    assert refused["note"].notna().all()
    steps = frame[frame["metric"] == "time"].set_index("provider")
    assert {*steps.index} == {*SAMPLE_PROVIDERS} - UNAVAILABLE
    assert (steps["p20"] > 0).all()
    assert (steps["p20"] <= steps["median"]).all()
    assert (steps["median"] <= steps["p80"]).all()
    # Required of all files of the documents.
    assert (frame["median"] >= 0).all()
    assert frame[["gpu", "date"]].notna().all(axis=None)
    printed = capsys.readouterr().out
    assert "× sum" in printed
    assert all(f"\n{name}: " in printed for name in UNAVAILABLE)


def test_models_go_through_the_same_batches_in_turns(tmp_path, monkeypatch):
    """Each model is created once for all mean lengths."""
    created, timed = [], []
    init, time_round = Training.__init__, Training.time_round

    def make(training, name, sizes, *args, **kwargs):
        created.append(name)
        init(training, name, sizes, *args, **kwargs)

    def time(training):
        time_round(training)
        ids = [batch.sparse_features.values() for batch in training.host_batches]
        timed.append((training.sizes.mean, training.name, ids))

    monkeypatch.setattr(Training, "__init__", make)
    monkeypatch.setattr(Training, "time_round", time)
    longer = dataclasses.replace(QUICK, mean=9)
    with process_group() as device:
        measurement = end_to_end.Measurement(device, tmp_path / "steps.csv")
        measurement.run({sizes: ["sum", "ours"] for sizes in (QUICK, longer)}, rounds=2)
    assert created == ["sum", "ours"]
    turns = [(mean, name) for mean in (5, 9) for _ in range(2) for name in created]
    assert [(mean, name) for mean, name, _ in timed] == turns
    for mean in (5, 9):
        first, *others = [ids for timed_mean, _, ids in timed if timed_mean == mean]
        for ids in others:
            assert all(map(torch.equal, ids, first))
    frame = pd.read_csv(tmp_path / "steps.csv")
    assert [*dict.fromkeys(frame["case"])] == ["mean-5", "mean-9"]
    assert frame.groupby(["case", "provider"]).size().nunique() == 1


def test_timed_steps_are_replayed(tmp_path, monkeypatch):
    """Each mean length has a new pipeline of the same model; eager steps are an error."""
    csv, longer = tmp_path / "steps.csv", dataclasses.replace(QUICK, mean=9, batch=8)
    names = ["sum-graph", "ours-graph"]
    with process_group() as device:
        measurement = end_to_end.Measurement(device, csv)
        measurement.run(dict.fromkeys((QUICK, longer), names), rounds=2)
        training = Training("ours-graph", QUICK, device)
        pipeline = training.pipeline
        training.set_sizes(longer)
        assert training.pipeline is not pipeline
        assert training.pipeline.num_captures == 1
        training.time_round()
        too_long = make_batches(dataclasses.replace(longer, mean=90), 4, device)
        training.batches = itertools.cycle(too_long)
        with pytest.raises(RuntimeError, match="all 4 steps must be replayed, got 0; eager"):
            training.time_round()
    frame = pd.read_csv(csv)
    assert {*frame["metric"]} >= {"time", "throughput"}
    assert "refused" not in {*frame["metric"]}
    times = frame[frame["metric"] == "time"]
    assert [*zip(times["case"], times["provider"], strict=True)] == [
        (case, name) for case in ("mean-5", "mean-9-batch-8") for name in names
    ]


def test_recorded_figures_are_measured_again_only_on_another_gpu(tmp_path, monkeypatch):
    csv, asked = tmp_path / "new/steps.csv", []

    def counted(measurement, missing, rounds):
        asked.append(missing[QUICK])
        real(measurement, missing, rounds)

    real = end_to_end.Measurement.run
    monkeypatch.setattr(end_to_end.Measurement, "run", counted)
    first = run(csv, "--providers", "sum")
    second = run(csv, "--providers", "sum", "padded")
    pd.testing.assert_frame_equal(second.iloc[: len(first)], first, check_dtype=False)
    other = {**end_to_end_results.measured_with(), "gpu": "another"}
    for module in (end_to_end, end_to_end_results):
        monkeypatch.setattr(module, "measured_with", lambda: other)
    run(csv, "--providers", "sum")
    assert asked == [["sum"], ["padded"], ["sum"]]


def test_a_wrong_attention_is_not_timed(tmp_path, monkeypatch):
    padded, real = PROVIDERS["padded"], end_to_end_peers.JaggedTargetAttention.forward
    wrong = dataclasses.replace(padded, attend=lambda *args: 1.1 * padded.attend(*args))
    monkeypatch.setitem(PROVIDERS, "padded", wrong)
    monkeypatch.setattr(
        end_to_end_peers.JaggedTargetAttention, "forward", lambda *args: 1.1 * real(*args)
    )
    names = ("padded", "ours", "ours-value-projection")
    frame = run(tmp_path / "steps.csv", "--providers", "sum", *names).set_index("provider")
    for name in names:
        assert frame.loc[name, "note"].startswith("AssertionError: out: error")
    assert frame.loc["sum", "note"].isna().all()


def train_losses(
    names: list[str], candidates: int = 1, **environment: str
) -> dict[str, list[float]]:
    """Losses of the first steps of each provider, with the same initial weights."""
    os.environ.update(environment)
    sizes, losses = dataclasses.replace(QUICK, histories=2, candidates=candidates), {}
    with process_group() as device:
        for name in names:
            training = Training(name, sizes, device, sharding="table_wise", warmup=0)
            losses[name] = [training.step().item() for _ in range(4)]
            del training
            end_to_end.clear_memory()
    return losses


def on_ranks(ranks: int, function, *args) -> list:
    """Call ``function`` on each rank with its environment variables, and return all results."""
    if ON_GPU and ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs")
    with mp.get_context(start_method()).Pool(ranks, maxtasksperchild=1) as pool:
        every = [
            pool.apply_async(function, args, variables) for variables in variables_of_ranks(ranks)
        ]
        return [result.get(timeout=100) for result in every]


assert_same_losses = functools.partial(
    assert_same_run,
    num_terms=1000,  # layers have 500 inputs or less; gradients, as many
    num_steps=None,
    dtype=torch.bfloat16 if ON_GPU else torch.float32,
)


def assert_other_losses(*losses: list[float], **options: Any) -> None:
    with pytest.raises(AssertionError, match="times its bound"):
        assert_same_losses(*losses, **options)


@pytest.mark.parametrize("ranks", [1, 2])
def test_providers_of_the_same_function_have_the_same_losses(ranks: int):
    same = ["ours-as-peers", "padded", "fbgemm-sll", "linear-varlen"]
    default = ["ours", "ours-rows-sent"]
    others = ["sum", "ours-value-projection", "padded-din"]
    names = [name for name in (*same, *default, *others) if name not in UNAVAILABLE]
    if ranks > 1:
        names = ["ours-as-peers", "padded", *default, "sum"]
    all_losses = train_losses(names) if ranks == 1 else on_ranks(ranks, train_losses, names)[0]
    for reference, equal in (("ours-as-peers", same), ("ours", default)):
        losses = all_losses[reference]
        assert_other_losses(losses, losses[:1] * len(losses))
        for name in names:
            compare = assert_same_losses if name in equal else assert_other_losses
            compare(all_losses[name], losses, name=name)


def test_batches_of_requests_and_samples_have_the_same_losses():
    by_request, by_sample = "ours-by-request", "ours-single-ids"
    losses = train_losses([by_request, by_sample], candidates=4)
    assert_other_losses(losses[by_sample], train_losses([by_sample])[by_sample])
    assert_same_losses(losses[by_request], losses[by_sample])


def count_sent_bytes(**environment: str) -> tuple[dict[str, tuple], dict[str, list[float]]]:
    """Return the bytes of known collectives, in total and in floating point, of this rank; and the
    mean bytes of a step of each provider, with the rows per sample of this rank.
    """
    os.environ.update(environment)
    collective_bytes, step_bytes = {}, {}
    with process_group() as device:
        num_received = [2, 4][dist.get_rank()]
        floats = torch.ones(6, device=device)
        ids = torch.arange(6, device=device)
        model = DistributedDataParallel(torch.nn.Linear(4, 3, device=device))

        def exchange() -> None:
            """Each rank sends two of six numbers to the first rank, and four to the second."""
            out = floats.new_empty(2 * num_received)
            dist.all_to_all_single(out, floats, [num_received] * 2, [2, 4])

        def exchange_and_back() -> None:
            x = floats.clone().requires_grad_()
            functional.all_to_all_single_autograd(
                x, [num_received] * 2, [2, 4], dist.group.WORLD
            ).sum().backward()

        for name, do in {
            "even": lambda: dist.all_to_all_single(torch.empty_like(ids), ids),
            "by splits": exchange,
            "functional, both ways": exchange_and_back,
            "all_reduce": lambda: dist.all_reduce(floats),
            "all_gather": lambda: dist.all_gather_into_tensor(ids.new_empty(12), ids),
            "reduced gradients": lambda: model(torch.ones(2, 4, device=device)).sum().backward(),
            "barrier": dist.barrier,
        }.items():
            with SentBytes() as sent:
                do()
            collective_bytes[name] = (sent.total, sent.floats)
        for name in ("ours", "ours-rows-sent", "sum"):
            training = Training(name, QUICK, device, sharding="table_wise")
            step_bytes[name] = [*training.sent_bytes(), training.rows_per_sample]
    return collective_bytes, step_bytes


def test_bytes_are_counted_and_owner_side_attention_sends_no_rows():
    every = on_ranks(2, count_sent_bytes)
    rows = QUICK.batch * sum(step_bytes["sum"][-1] for _, step_bytes in every) / 2
    size = 2 if ON_GPU else 4
    for rank, (collective_bytes, step_bytes) in enumerate(every):
        to_other, back = [4, 2][rank] * 4, [2, 4][rank] * 4
        assert collective_bytes == {
            "even": (3 * 8, 0),
            "by splits": (to_other, to_other),
            "functional, both ways": (to_other + back, to_other + back),
            "all_reduce": (6 * 4, 6 * 4),
            "all_gather": (6 * 8, 0),
            "reduced gradients": (15 * 4, 15 * 4),
            "barrier": (0, 0),
        }
        # Half of the rows are needed by the rank without the table.
        total, by_length, row_bytes, _ = step_bytes["ours-rows-sent"]
        assert row_bytes == pytest.approx(rows / 2 * 2 * QUICK.width * size, rel=0.2)
        assert by_length - row_bytes == pytest.approx(rows / 2 * 8, rel=0.2)
        assert by_length < total
        assert step_bytes["ours"][2] == step_bytes["sum"][2] == 0
        assert 0 < step_bytes["sum"][1] <= step_bytes["ours"][1] < 3 * step_bytes["sum"][1]


def test_rows_of_several_gpus_are_complete(tmp_path):
    csv = tmp_path / "steps.csv"
    options = (
        "--providers",
        "ours",
        "--csv",
        str(csv),
    )  # on a CPU, TorchRec cannot shard sum pooling by row
    assert on_ranks(2, main_on_rank, [*options, "--quick", "--rounds", "2"]) == [0, 0]
    frame = pd.read_csv(csv)
    assert {*frame["case"]} == {"mean-5-2-gpus-row_wise"}
    assert {*frame["gpus"]} == {2}
    metrics = {"time", "throughput", "sent", "sent_by_length", "sent_rows"}
    assert metrics <= {*frame["metric"]}
    medians = frame.set_index("metric", verify_integrity=True)["median"]
    expected = 2 * QUICK.batch * 1e3 / medians["time"]
    assert medians["throughput"] == pytest.approx(expected, rel=1e-3)


def main_on_rank(options: list[str], **environment: str) -> int:
    os.environ.update(environment)
    return main(options)


def test_the_newest_events_are_left():
    (batch,) = make_batches(QUICK, 1, torch.device("cpu"))
    short = newest_events(batch, QUICK)
    for key in (*QUICK.request_keys, *QUICK.candidate_keys):
        before, after = (x.sparse_features[key].to_dense() for x in (batch, short))
        assert [x.tolist() for x in after] == [x[-1:].tolist() for x in before]


def test_kernels_of_a_trace():
    events = [
        {"cat": "user_annotation", "name": "a step", "tid": 1, "ts": 10, "dur": 10},
        {"cat": "kernel", "name": "gemm", "ts": 30, "dur": 5},
        {"cat": "kernel", "name": "ncclDevKernel_SendRecv", "ts": 33, "dur": 4},
        {"cat": "kernel", "name": "gemm", "ts": 50, "dur": 3},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 61, "dur": 3},
    ]
    trace = Trace(events)
    assert trace.busy_us == 7 + 3 + 3
    kernels = {"gemm": 8, "ncclDevKernel_SendRecv": 4, "Memcpy HtoD": 3}
    assert [*trace.kernels_us.items()] == [*kernels.items()]


@pytest.fixture
def few_events(monkeypatch):
    events = Events(planted_log(num_users=40, num_steps=40), max_history=50)
    monkeypatch.setattr(end_to_end_quality, "read_events", lambda data: events)
    monkeypatch.setattr(end_to_end_quality, "BATCH", 256)
    monkeypatch.setattr(end_to_end_quality, "POINTS", 4)
    return events


def test_providers_of_the_same_function_have_the_same_curves(few_events):
    curves = {}
    with process_group() as device:
        for name in ("padded", "ours", "sum"):
            points = end_to_end_quality.curve(PROVIDERS[name], few_events, 1, device)
            epochs, *curves[name] = zip(*points, strict=True)
            assert epochs == (0.25, 0.5, 0.75, 1)
    ours, padded, other = (sum(curves[name], ()) for name in ("ours", "padded", "sum"))
    num_steps = len(few_events.training(0)) // 256
    assert_same_losses(ours, padded, num_steps=num_steps)
    assert_other_losses(ours, other, num_steps=num_steps)
    auc, ne = curves["ours"]
    assert 0.4 < min(auc) < max(auc) < 1
    assert 0.9 < ne[0] < 1.1


def test_recorded_curves_are_not_trained_again(few_events, tmp_path, capsys):
    csv = tmp_path / "quality.csv"
    frames = []
    for providers in (["padded"], ["padded", "ours"]):
        end_to_end_quality.main(["--csv", str(csv), "--providers", *providers])
        frames.append(pd.read_csv(csv))
    assert "padded, epoch" not in capsys.readouterr().out.partition("ours, epoch")[2]
    assert len(frames[1]) == 2 * len(frames[0])
    assert not frames[1].duplicated(["case", "provider", "mode", "metric", "unit"]).any()
    assert {*frames[1]["case"]} == {f"planted-{x}" for x in ("0.2", "0.5", "0.8", "1.0")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mean", "0"], "argument --mean: must be an integer from 1 to 1000000, got '0'"),
        (["--rounds", "1"], "argument --rounds: must be an integer from 2 to 1000, got '1'"),
        (["--csv", "."], "argument --csv: must be a file, got the folder '.'"),
        (["--quick", "--candidates", "3"], "--candidates must divide the batch 16, got 3"),
        (["--quick", "--candidate-features", "4"], "must be at most all 3 features, got 4"),
        pytest.param(["--fused"], "--fused needs a GPU, got none", marks=NO_GPU),
    ],
)
def test_bad_options_are_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        main(options)
    assert message in capsys.readouterr().err


def test_histories_have_the_requested_lengths():
    sizes = Sizes(mean=200, batch=4096)
    lengths = make_lengths(sizes, torch.Generator().manual_seed(0))
    assert lengths.min() >= 1
    assert lengths.max() == CLIP * sizes.mean
    assert 160 < lengths.double().mean() < 200


@pytest.mark.gpu
def test_a_gpu_s_figures(tmp_path):
    frame = run(tmp_path / "steps.csv", "--providers", "ours", "ours-graph", "padded")
    medians = frame.pivot(index="provider", columns="metric", values="median")
    for name in ("peak_memory", "peak_reserved", "gpu_busy", "gpu_busy_share"):
        assert (medians[name] > 0).all(), name
    assert (medians["gpu_busy"] <= medians["time"] * 1.2).all()
    kernels = medians[[f"kernel_{i}" for i in range(1, 11)]].to_numpy()
    assert (kernels[:, :-1] >= kernels[:, 1:]).all()
    assert frame.loc[frame["metric"].str.startswith("kernel_"), "note"].notna().all()
