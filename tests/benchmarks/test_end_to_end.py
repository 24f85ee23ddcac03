"""The benchmark of whole steps: what it writes, and that it times nothing that is wrong."""

import dataclasses
import socket
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.multiprocessing as mp

pytest.importorskip("rich")

import end_to_end
import end_to_end_models
import end_to_end_quality
from end_to_end import QUICK, Options, Trace, largest, main, measure
from end_to_end_models import CLIP, LADDER, PROVIDERS, Sizes, make_lengths
from events import Events
from planted import planted_log
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.processes import start_method

FEW_STEPS = Options(steps=2, rounds=2, warmup=1)
ON_GPU = torch.cuda.is_available()
CANNOT = set() if ON_GPU else {"linear-varlen", "ours-index-dedup"}
NO_GPU = pytest.mark.skipif(ON_GPU, reason="there is a GPU")
LAUNCHED = {name for name, provider in PROVIDERS.items() if not provider.replays}


class InProcess:
    """Workers of one rank, in this process."""

    ranks = 1

    def __init__(self, ranks: int) -> None:
        assert ranks == 1

    def run(self, task, *args):
        return task(0, 1, free_port(), *args)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return any_port.getsockname()[1]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(end_to_end, "Workers", InProcess)


def run(csv: Path, *options: str) -> pd.DataFrame:
    few = ["--quick", "--steps", "2", "--rounds", "2", "--warmup", "1", "--csv", str(csv)]
    main([*few, *options])
    return pd.read_csv(csv)


def test_each_provider_is_timed_or_refused(tmp_path, in_process, capsys):
    frame = run(tmp_path / "steps.csv", "--providers", *PROVIDERS)
    refused = frame[frame["metric"] == "refused"].set_index("provider")
    assert {*refused.index} == CANNOT
    assert refused["note"].notna().all()
    steps = frame[frame["metric"] == "time"].set_index("provider")
    assert {*steps.index} == {*PROVIDERS} - CANNOT
    assert (steps["p20"] > 0).all()
    assert (steps["p20"] <= steps["median"]).all()
    assert (steps.loc[[*LAUNCHED], "replays"] == 0).all()
    # As of all files from which the docs are made.
    assert (frame["median"] >= 0).all()
    assert frame[["gpu", "date"]].notna().all(axis=None)
    printed = capsys.readouterr().out
    assert "× padded" in printed
    assert f"ladder: {LADDER[0]}, " in printed


def test_what_stands_is_not_measured_again(tmp_path, in_process, monkeypatch):
    csv, asked = tmp_path / "steps.csv", []

    def counted(rank, ranks, port, names, *rest):
        asked.append(names)
        measure(rank, ranks, port, names, *rest)

    monkeypatch.setattr(end_to_end, "measure", counted)
    first = run(csv, "--providers", "sum")
    second = run(csv, "--providers", "sum", "padded")
    assert asked == [["sum"], ["padded"]]
    pd.testing.assert_frame_equal(second.iloc[: len(first)], first, check_dtype=False)
    third = run(csv, "--providers", "sum", "--width", "32")
    fourth = run(csv, "--providers", "sum", "--again")
    assert asked[2:] == [["sum"], ["sum"]]
    assert len(fourth) == len(third) == len(second) + len(first)


def test_nothing_begins_when_the_time_is_up(tmp_path, in_process, capsys):
    main(["--quick", "--csv", str(tmp_path / "steps.csv"), "--limit-s", "-1"])
    assert "mean-5, batch 16: sum, padded" in capsys.readouterr().out
    assert not (tmp_path / "steps.csv").exists()


def test_a_wrong_attention_is_not_timed(tmp_path, in_process, monkeypatch):
    padded = PROVIDERS["padded"]
    wrong = dataclasses.replace(padded, attend=lambda *args: 1.1 * padded.attend(*args))
    monkeypatch.setitem(PROVIDERS, "padded", wrong)
    frame = run(tmp_path / "steps.csv", "--providers", "sum", "padded").set_index("provider")
    assert frame.loc["padded", "note"].startswith("AssertionError: out: error")
    assert frame.loc["sum", "note"].isna().all()


def test_what_fails_leaves_the_others_their_turn(tmp_path, in_process, monkeypatch, capsys):
    real = end_to_end.Training.time_round

    def broken(training):
        if training.name == "padded":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        real(training)

    monkeypatch.setattr(end_to_end.Training, "time_round", broken)
    frame = run(tmp_path / "steps.csv", "--providers", "padded", "sum")
    assert {*frame["provider"]} == {"sum"}
    printed = capsys.readouterr().out
    assert "\npadded, sum: failed, RuntimeError: CUDA error" in printed
    assert "\npadded: failed, " in printed


def test_padding_in_parts(monkeypatch):
    rows = torch.randn(5, 20)
    history = JaggedTensor(rows, lengths=torch.tensor([2, 0, 3]))
    whole, visible = end_to_end_models.pad(rows, history, 4)
    assert whole.shape == (3, 4, 20)
    assert whole[visible].equal(rows)
    for most in (1, 3 * 4 * 17):
        monkeypatch.setattr(end_to_end_models, "MAX_PADDED", most)
        assert end_to_end_models.pad(rows, history, 4)[0].equal(whole)


def test_out_of_memory_is_a_result(tmp_path, in_process, monkeypatch):
    class Full(end_to_end.Training):
        def __init__(self, name, *rest):
            if name == "padded":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
            super().__init__(name, *rest)

    monkeypatch.setattr(end_to_end, "Training", Full)
    frame = run(tmp_path / "steps.csv", "--providers", "padded", "sum").set_index("provider")
    assert frame.loc["padded", "note"].startswith("out of memory, of which other providers held")
    assert (frame.loc["sum", "median"] > 0).all()


def losses(ranks: int, names: list[str]) -> dict[str, list[float]]:
    """Of the first steps from the same weights; those of the first rank."""
    sizes = dataclasses.replace(QUICK, histories=2)
    arguments = (ranks, free_port(), names, sizes, 4)
    if ranks == 1:
        return end_to_end.train_losses(0, *arguments)
    with mp.get_context(start_method()).Pool(ranks) as pool:
        every = [
            pool.apply_async(end_to_end.train_losses, (rank, *arguments)) for rank in range(ranks)
        ]
        of_first, *_ = [result.get(timeout=100) for result in every]
        return of_first


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_are_the_same_where_the_function_is(ranks: int):
    if ranks > max(1, torch.cuda.device_count()) and ON_GPU:
        pytest.skip("needs two GPUs")
    few = ("sum", "padded", "ours")
    names = [name for name in (PROVIDERS if ranks == 1 else few) if name not in CANNOT]
    all_losses = losses(ranks, names)
    ours = all_losses["ours"]
    assert abs(ours[0] - ours[-1]) > 1e-4
    tolerance = 2e-3 if ON_GPU else 1e-5
    for name in names:  # with a single lookup, tables are drawn in another order
        if PROVIDERS[name].is_attention and not PROVIDERS[name].single_lookup:
            assert all_losses[name] == pytest.approx(ours, abs=tolerance), name
        else:
            assert all_losses[name] != pytest.approx(ours, abs=tolerance), name


def test_trainings_share_tables_and_learn_in_them(tmp_path):
    with end_to_end.process_group(0, 1, free_port()) as device:
        known = {}
        ours, padded = (
            end_to_end.Training(name, QUICK, device, FEW_STEPS, known)
            for name in ("ours", "padded")
        )
        tables = [
            [
                table
                for lookup in end_to_end_models.table_operators(training.pipeline._model)
                for table in (lookup.weights_dev, lookup.weights_host)
                if table.numel()
            ]
            for training in (ours, padded)
        ]
        assert [x.data_ptr() for x in tables[0]] == [x.data_ptr() for x in tables[1]]
        assert len({x.data_ptr() for x in tables[0]}) == 2
        before = [table.clone() for table in tables[0]]
        padded.step()
        padded.synchronize()
        assert not any(map(torch.equal, before, tables[0]))
        total = sum(table.numel() for table in before)
        assert total == QUICK.table_rows * QUICK.width


def test_parts_of_a_trace():
    events = [
        {"cat": "user_annotation", "name": end_to_end.MARK, "tid": 1, "ts": 10, "dur": 10},
        {"cat": "cuda_runtime", "tid": 1, "ts": 12, "dur": 1, "args": {"correlation": 1}},
        {"cat": "cuda_driver", "tid": 1, "ts": 22, "dur": 1, "args": {"correlation": 2}},
        {"cat": "cuda_driver", "tid": 2, "ts": 12, "dur": 1, "args": {"correlation": 3}},
        {"cat": "kernel", "name": "gemm", "ts": 30, "dur": 5, "args": {"correlation": 1}},
        {"cat": "kernel", "name": "gemm", "ts": 33, "dur": 4, "args": {"correlation": 2}},
        {"cat": "kernel", "name": "split_embedding_codegen", "ts": 50, "dur": 3,
         "args": {"correlation": 3}},
        {"cat": "kernel", "name": "ncclDevKernel_SendRecv", "ts": 60, "dur": 2, "args": {}},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 61, "dur": 3, "args": {}},
    ]  # fmt: skip
    trace = Trace(events)
    assert trace.busy_us == 7 + 3 + 4
    assert trace.parts_us == {
        "attention": 5, "dense": 4, "lookups": 3, "communication": 2, "copies": 3
    }  # fmt: skip


def test_marks_enclose_the_attention_and_leave_its_results(tmp_path):
    with end_to_end.process_group(0, 1, free_port()) as device:
        training = end_to_end.Training("ours", QUICK, device, FEW_STEPS)
        plain = end_to_end.Training("ours", QUICK, device, FEW_STEPS)
        for _ in range(end_to_end.STEPS_TO_PROFILE + 1):
            loss = plain.step()
        names = []
        real = end_to_end.record_function

        def counted(name):
            names.append(name)
            return real(name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(end_to_end, "record_function", counted)
            training.trace()
        assert len(names) == 2 * (end_to_end.STEPS_TO_PROFILE + 1)
        plain.step(), training.step()
        assert training.step().item() == plain.step().item() != loss.item()


@pytest.fixture
def few_events(monkeypatch):
    events = Events(planted_log(num_users=40, num_steps=40), max_history=50)
    monkeypatch.setattr(end_to_end_quality, "read_events", lambda data: events)
    monkeypatch.setattr(end_to_end_quality, "BATCH", 256)
    monkeypatch.setattr(end_to_end_quality, "POINTS", 4)


def test_curves_are_the_same_where_the_function_is(few_events):
    curves = {}
    with end_to_end.process_group(0, 1, free_port()) as device:
        for name in ("padded", "ours", "sum"):
            points = end_to_end_quality.curve(PROVIDERS[name], "planted", 1, device)
            curves[name] = {(p.epoch, *key): x for p in points for key, x in p.figures.items()}
    assert {*curves["ours"]} == {
        ((i + 1) / 4, mode, metric)
        for i in range(4)
        for mode in ("train", "test")
        for metric in ("loss", "ne", "auc")
    }
    tolerance = 2e-2 if ON_GPU else 2e-3
    assert curves["ours"] == pytest.approx(curves["padded"], abs=tolerance)
    assert curves["ours"] != pytest.approx(curves["sum"], abs=tolerance)
    assert 0.9 < curves["ours"][0.25, "train", "ne"] < 1.1


def test_curves_that_stand_are_not_trained_again(few_events, in_process, tmp_path, capsys):
    csv = tmp_path / "quality.csv"
    frames = []
    for providers in (["padded"], ["padded", "ours"]):
        main(["--quality", "--csv", str(csv), "--providers", *providers])
        frames.append(pd.read_csv(csv))
    assert "padded, epoch" not in capsys.readouterr().out.partition("ours, epoch")[2]
    assert len(frames[1]) == 2 * len(frames[0])
    assert not frames[1].duplicated(["case", "provider", "mode", "metric", "unit"]).any()
    assert {*frames[1]["case"]} == {f"planted-{x}" for x in ("0.2", "0.5", "0.8", "1.0")}


@pytest.mark.parametrize("capacity", [0, 1, 7, 1000, 1499, 40000])
def test_the_largest_size_that_fits_is_found(capacity: int):
    tried = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= capacity

    best = largest(fits, 1000)
    assert best <= capacity
    assert capacity < max(best + 1, end_to_end.CLOSE * best)
    assert len(tried) == len(set(tried)) <= 20


def test_a_search_goes_on_where_it_stopped(tmp_path, monkeypatch):
    results, tried = end_to_end.Results(tmp_path / "search.csv"), []

    def try_size(rank, ranks, port, name, sizes, options):
        tried.append((sizes.mean, sizes.batch))
        fits = sizes.mean * sizes.batch <= 100_000
        figures = dict.fromkeys(("median", "p20", "p80"), 5.0 if fits else 0.0)
        return {**figures, "note": "" if fits else "out of memory", "gpu": "of this test"}

    monkeypatch.setattr(end_to_end, "try_size", try_size)
    first = dataclasses.replace(QUICK, mean=100, batch=256)

    def searched(field: str, options: Options) -> None:
        end_to_end.Search(InProcess(1), results, options, "ours", first, field).run()

    for _ in range(2):
        searched("mean", Options())
        searched("batch", Options())
    assert len(tried) == len(set(tried))  # (100, 256), where both begin, among them
    frame = pd.read_csv(results.csv).set_index("metric")
    found = frame.loc["longest_history"]
    assert 100_000 / 256 / 1.1 < found["median"] / CLIP <= 100_000 / 256
    assert 1000 / 1.1 < frame.loc["largest_batch", "median"] <= 1000
    assert found["note"].endswith(": out of memory")
    with pytest.raises(end_to_end.TimeIsUpError):
        searched("mean", Options(deadline=0.0, recency_bias=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "0"], "--gpus must be at least 1, got 0"),
        (["--means", "5,6", "--batches", "4"], "--batches must be one for each of [5, 6], got [4]"),
        (["--means", "5,0"], "argument --means: invalid"),
        (["--rounds", "1"], "--rounds must be at least 2, got 1"),
        pytest.param(["--search"], "--search needs a GPU, got none", marks=NO_GPU),
        pytest.param(["--cuda-graph"], "--cuda-graph needs a GPU, got none", marks=NO_GPU),
    ],
)
def test_bad_options_are_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        main(options)
    assert message in capsys.readouterr().err


def test_histories_are_as_long_as_asked_for():
    sizes = Sizes(mean=200, batch=4096)
    lengths = make_lengths(sizes, torch.Generator().manual_seed(0))
    assert lengths.min() >= 1
    assert lengths.max() == CLIP * sizes.mean
    assert 160 < lengths.double().mean() < 200


@pytest.mark.gpu
def test_a_gpu_s_figures(tmp_path):
    frame = run(tmp_path / "steps.csv", "--cuda-graph", "--providers", "ours", "padded")
    assert (frame["dense_layers"] == "CUDA graphs, fused Adam").all()
    of = frame.pivot(index="provider", columns="metric", values="median")
    for name in ("peak_memory", "gpu_busy", "gpu_attention", "gpu_lookups", "gpu_dense"):
        assert (of[name] > 0).all(), name
    assert (of["gpu_busy"] <= of["time"] * 1.2).all()
