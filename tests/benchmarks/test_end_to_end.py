"""The benchmark of whole steps: what it writes, and that it times nothing that is wrong."""

import dataclasses
import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.multiprocessing as mp

pytest.importorskip("torchrec")

import end_to_end
import end_to_end_memory
import end_to_end_models
import end_to_end_peers
import end_to_end_quality
import end_to_end_results
import end_to_end_trace
from end_to_end import QUICK, Training, main
from end_to_end_memory import largest
from end_to_end_models import (
    CLIP,
    Sizes,
    make_batches,
    make_lengths,
    make_sharders,
    process_group,
)
from end_to_end_peers import LADDER, PROVIDERS
from end_to_end_trace import Trace
from events import Events
from fbgemm_gpu.split_embedding_configs import SparseType
from planted import planted_log
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.processes import start_method, variables_of_ranks
from tests.runs import assert_same_run

ON_GPU = torch.cuda.is_available()
CANNOT = set() if ON_GPU else {"linear-varlen", "ours-index-dedup"}
NO_GPU = pytest.mark.skipif(ON_GPU, reason="there is a GPU")
REPLAYED = {"ours", "ours-single-lookup", "ours-index-dedup", "ours-once", "ours-by-request"}
REPLAYED |= {"ours-balanced", "ours-newer-half"}


@pytest.fixture(autouse=True)
def imports_stay_frozen():
    """The benchmark looks through all that this process holds, as it has nothing but models."""
    yield
    gc.freeze()


def run(csv: Path, *options: str, status: int = 0) -> pd.DataFrame:
    assert main(["--quick", "--rounds", "2", "--csv", str(csv), *options]) == status
    return pd.read_csv(csv)


def assert_figures_of(frame: pd.DataFrame, provider: str) -> None:
    """A step takes time; on a GPU other parts may take none."""
    medians = frame.loc[[provider]].set_index("metric")["median"]
    assert (medians[["time", "throughput"]] > 0).all()
    assert (medians >= 0).all()


def test_each_provider_is_timed_or_refused(tmp_path, capsys):
    frame = run(tmp_path / "steps.csv")
    refused = frame[frame["metric"] == "refused"].set_index("provider")
    assert {*refused.index} == CANNOT
    assert refused["note"].notna().all()
    steps = frame[frame["metric"] == "time"].set_index("provider")
    of_samples = {name for name, provider in PROVIDERS.items() if provider.batches == "samples"}
    assert {*steps.index} == of_samples - CANNOT
    assert (steps["p20"] > 0).all()
    assert (steps["p20"] <= steps["median"]).all()
    assert (steps["median"] <= steps["p80"]).all()
    assert {*steps.index[steps["replays"] == 1]} == (REPLAYED & of_samples) - CANNOT
    # As of all files from which the docs are made.
    assert (frame["median"] >= 0).all()
    assert frame[["gpu", "date"]].notna().all(axis=None)
    printed = capsys.readouterr().out
    assert "× padded" in printed
    assert all(f"\n{name}: " in printed for name in CANNOT)
    assert all(adds in printed for name, adds in LADDER.items() if name not in CANNOT)


def test_providers_go_through_the_same_batches_in_turns(tmp_path, monkeypatch):
    went, real = [], Training.run

    def run(training, steps):
        ids = {next(training.batches).sparse_features.values().data_ptr() for _ in range(steps)}
        went.append((training.name, steps, ids))
        return real(training, steps)

    with process_group() as device:
        measurement = end_to_end.Measurement(QUICK, device, tmp_path / "steps.csv", tmp_path)
        for name in ("sum", "ours"):
            measurement.build(name)
        monkeypatch.setattr(Training, "run", run)
        monkeypatch.setattr(measurement, "finish", lambda name: None)
        measurement.run([], rounds=3)
    once, twice = end_to_end.NUM_BATCHES, 2 * end_to_end.NUM_BATCHES
    turns = [(name, steps) for name in ("sum", "ours") for steps in (once, twice)]
    assert [(name, steps) for name, steps, _ in went] == 3 * turns
    assert len(went[0][2]) == once
    assert all(ids == went[0][2] for *_, ids in went)


def test_what_stands_is_not_measured_again(tmp_path, monkeypatch):
    csv, asked, real = tmp_path / "new/steps.csv", [], end_to_end.Measurement.run

    def counted(measurement, names, rounds):
        asked.append(names)
        real(measurement, names, rounds)

    monkeypatch.setattr(end_to_end.Measurement, "run", counted)
    first = run(csv, "--providers", "sum")
    second = run(csv, "--providers", "sum", "padded")
    assert asked == [["sum"], ["padded"]]
    pd.testing.assert_frame_equal(second.iloc[: len(first)], first, check_dtype=False)
    run(csv, "--providers", "sum", "padded")
    assert len(asked) == 2
    other = {**end_to_end_results.measured_with(), "gpu": "another"}
    for module in (end_to_end, end_to_end_results):
        monkeypatch.setattr(module, "measured_with", lambda: other)
    run(csv, "--providers", "sum")
    assert asked[2:] == [["sum"]]
    with process_group():
        for heads, is_known in ((QUICK.heads, True), (1, False)):
            labels = end_to_end.labels_of(dataclasses.replace(QUICK, heads=heads))
            assert end_to_end_results.matching(csv, labels).empty != is_known


def test_a_wrong_attention_is_not_timed(tmp_path, monkeypatch):
    padded = PROVIDERS["padded"]
    wrong = dataclasses.replace(padded, attend=lambda *args: 1.1 * padded.attend(*args))
    monkeypatch.setitem(PROVIDERS, "padded", wrong)
    frame = run(tmp_path / "steps.csv", "--providers", "sum", "padded").set_index("provider")
    assert frame.loc["padded", "note"].startswith("AssertionError: out: error")
    assert frame.loc["sum", "note"].isna().all()


def test_what_fails_leaves_the_others_their_turn(tmp_path, monkeypatch, capsys):
    real = Training.time_round

    def broken(training):
        if training.name == "padded":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        real(training)

    monkeypatch.setattr(Training, "time_round", broken)
    frame = run(tmp_path / "steps.csv", "--providers", "padded", "sum").set_index("provider")
    assert frame.loc["padded", "metric"] == "refused"
    assert_figures_of(frame, "sum")
    assert "\npadded: RuntimeError: CUDA error: an illegal" in capsys.readouterr().out


def test_what_needs_the_memory_alone_is_left_for_another_call(tmp_path, monkeypatch, capsys):
    real, csv, fits_alone = Training.__init__, tmp_path / "steps.csv", {"padded"}
    built = []

    def full(training, name, *args, **kwargs):
        big = name in ("padded", "padded-din")
        if big and (built or name not in fits_alone):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        real(training, name, *args, **kwargs)
        built.append(name)

    monkeypatch.setattr(Training, "__init__", full)
    names = ("--providers", "sum", "padded", "padded-din")
    frame = run(csv, *names, status=1)
    assert {*frame["provider"]} == {"sum"}
    assert "\npadded, padded-din: out of memory beside the others" in capsys.readouterr().out
    for left, status in ((["padded-din"], 1), ([], 0)):
        built.clear()
        frame = run(csv, *names, status=status)
        assert {"sum", "padded", "padded-din"} - {*frame["provider"]} == {*left}
    of = frame.set_index("provider")
    assert_figures_of(of, "padded")
    assert of.loc["padded-din", "note"].startswith("OutOfMemoryError: CUDA out of memory")


def test_a_rung_is_compared_with_the_one_before_it_alone():
    names = [*LADDER]
    missing = names.pop(1)
    rows = [{"provider": name, "metric": "time", "median": 2.0 ** -len(name)} for name in names]
    table = end_to_end_results.ladder_table(pd.DataFrame(rows))
    lines = {line.split()[0]: line.split() for line in table.splitlines()[1:]}
    assert missing not in lines
    assert lines[names[1]][-2] == "–"  # what comes after the missing one
    assert "–" not in lines[names[2]]


def test_padding(monkeypatch):
    rows = torch.randn(5, 20)
    history = JaggedTensor(rows, lengths=torch.tensor([2, 0, 3]))
    whole, visible = end_to_end_peers.pad(rows, history, 4)
    assert whole.shape == (3, 4, 20)
    assert whole[visible].equal(rows)

    q, kv = torch.randn(3, 4, 5), torch.randn(5, 2, 4, 5)
    at_once = end_to_end_peers.padded_sdpa(q, kv, history, 4)
    for most in (1, 2 * 4 * 20):  # one sample, or two
        monkeypatch.setattr(end_to_end_peers, "MAX_PADDED", most)
        in_parts = end_to_end_peers.padded_sdpa(q, kv, history, 4)
        assert_same_run(in_parts, at_once, num_terms=4 + 5)


def train_losses(
    names: list[str], candidates: int = 1, **environment: str
) -> dict[str, list[float]]:
    """Of the first steps of each provider, from the same weights, each with tables of its own."""
    os.environ.update(environment)
    sizes, losses = dataclasses.replace(QUICK, histories=2, candidates=candidates), {}
    with process_group() as device:
        for name in names:
            training = Training(name, sizes, device, warmup=0)
            losses[name] = [training.step().item() for _ in range(4)]
            del training
            end_to_end.clear_memory()
    return losses


def losses_of(ranks: int, names: list[str]) -> dict[str, list[float]]:
    """Those of the first rank."""
    if ranks == 1:
        return train_losses(names)
    with mp.get_context(start_method()).Pool(ranks, maxtasksperchild=1) as pool:
        every = [
            pool.apply_async(train_losses, (names,), variables)
            for variables in variables_of_ranks(ranks)
        ]
        of_first, *_ = [result.get(timeout=100) for result in every]
        return of_first


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
def test_losses_are_the_same_where_the_function_is(ranks: int):
    if ranks > max(1, torch.cuda.device_count()) and ON_GPU:
        pytest.skip("needs two GPUs")
    few = ("sum", "padded", "ours")
    names = [name for name in (PROVIDERS if ranks == 1 else few) if name not in CANNOT]
    all_losses = losses_of(ranks, names)
    ours = all_losses["ours"]
    assert_other_losses(ours, ours[:1] * len(ours))
    for name in names:  # with a single lookup, tables are drawn in another order
        is_same = PROVIDERS[name].is_attention and not PROVIDERS[name].single_lookup
        (assert_same_losses if is_same else assert_other_losses)(all_losses[name], ours, name=name)


def test_requests_of_several_candidates_and_several_ranks_have_more_providers(monkeypatch):
    parse, of_requests = end_to_end.parse_args, {"ours-once", "ours-by-request"}
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    left = {*PROVIDERS}.difference(parse(["--quick", "--candidates", "4"]).providers)
    assert left == {"ours-balanced"}
    left = {*PROVIDERS}.difference(parse(["--quick"]).providers)
    assert left == {"ours-balanced", *of_requests}
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parse(["--quick", "--candidates", "4"]).providers == [*PROVIDERS]
    assert {*PROVIDERS}.difference(parse(["--quick"]).providers) == of_requests


@pytest.mark.parametrize("candidates", [1, 4])
def test_balanced_batches_have_the_samples_of_all_ranks_and_as_many_rows(candidates, monkeypatch):
    ranks, cpu = 3, torch.device("cpu")
    sizes = Sizes(50, 32, candidates, candidates // 2, histories=2, features=3, item_rows=10**9)
    monkeypatch.setattr(end_to_end_models.dist, "get_world_size", lambda: ranks)

    def samples(batch: Batch) -> Iterator[tuple]:
        """What each has: dense features, label, and ids of all keys."""
        ids = [batch.sparse_features[key] for key in sorted(batch.sparse_features.keys())]
        parts = [x.values().split(x.lengths().tolist()) for x in ids]
        for i, of_sample in enumerate(zip(*parts, strict=True)):
            dense = tuple(batch.dense_features[i].tolist())
            yield dense, batch.labels[i].item(), *(tuple(x.tolist()) for x in of_sample)

    def rows(batch: Batch) -> int:
        return sum(batch.sparse_features[key].values().numel() for key in sizes.history_keys)

    plain, balanced = (
        [make_batches(sizes, 2, cpu, rank, form) for rank in range(ranks)]
        for form in ("samples", "balanced")
    )
    for step in range(2):
        before, after = ([of_rank[step] for of_rank in x] for x in (plain, balanced))
        of_before, of_after = (
            sorted(sample for batch in batches for sample in samples(batch))
            for batches in (before, after)
        )
        assert of_after == of_before
        assert {len(batch.labels) for batch in after} == {sizes.batch}
        mean = sum(map(rows, after)) / ranks
        assert max(map(rows, after)) < 1.02 * mean < max(map(rows, before))


def test_losses_are_the_same_whatever_the_form_of_batches():
    samples = {"ours-once": "ours", "ours-by-request": "ours-single-lookup"}
    losses = train_losses([*samples, *samples.values()], candidates=4)
    assert_other_losses(losses["ours"], train_losses(["ours"])["ours"])
    for name, of_samples in samples.items():
        assert_same_losses(losses[name], losses[of_samples], name=name)


def test_history_traffic_is_counted():
    """Of 4 candidates, a request's history crosses once: ids, rows, and gradients of rows."""
    sizes = dataclasses.replace(QUICK, candidates=4, candidate_features=1)
    traffic = {}
    with process_group() as device:
        for name in ("sum", "ours-newer-half", "ours", "ours-once", "ours-by-request"):
            training = Training(name, sizes, device, warmup=0)
            traffic[name] = training.history_traffic()
    rows = training.rows_per_sample * sizes.requests
    element_size = 2 if ON_GPU else 4
    assert traffic["ours-by-request"] == rows * (8 + 2 * sizes.width * element_size)
    assert traffic["ours"] == 4 * traffic["ours-by-request"]
    assert traffic["ours-by-request"] < traffic["ours-once"] < traffic["ours"]
    assert 0.5 <= traffic["ours-newer-half"] / traffic["ours"] < 0.6
    assert traffic["sum"] == 0


def test_trainings_share_tables_and_learn_in_them(tmp_path):
    with process_group() as device:
        known = {}
        ours, padded = (Training(name, QUICK, device, known=known) for name in ("ours", "padded"))
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
        padded.run(1)
        assert not any(map(torch.equal, before, tables[0]))
        total = sum(table.numel() for table in before)
        assert total == QUICK.table_rows * QUICK.width


def test_parts_of_a_trace():
    events = [
        {"cat": "user_annotation", "name": end_to_end_trace.MARK, "tid": 1, "ts": 10, "dur": 10},
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
    with process_group() as device:
        training, plain = (Training("ours", QUICK, device) for _ in range(2))
        for _ in range(end_to_end.STEPS_TO_PROFILE + 1):
            loss = plain.step()
        names = []
        real = end_to_end_trace.record_function

        def counted(name):
            names.append(name)
            return real(name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(end_to_end_trace, "record_function", counted)
            training.trace(tmp_path / "trace.json")
        assert len(names) == 2 * (end_to_end.STEPS_TO_PROFILE + 1)
        plain.step(), training.step()
        assert training.step().item() == plain.step().item() != loss.item()


@pytest.fixture
def few_events(monkeypatch):
    events = Events(planted_log(num_users=40, num_steps=40), max_history=50)
    monkeypatch.setattr(end_to_end_quality, "read_events", lambda data: events)
    monkeypatch.setattr(end_to_end_quality, "BATCH", 256)
    monkeypatch.setattr(end_to_end_quality, "POINTS", 4)
    return events


def test_curves_are_the_same_where_the_function_is(few_events):
    curves = {}
    with process_group() as device:
        for name in ("padded", "ours", "sum"):
            points = end_to_end_quality.curve(PROVIDERS[name], few_events, 1, device)
            curves[name] = {(p.epoch, *key): x for p in points for key, x in p.figures.items()}
    assert {*curves["ours"]} == {
        ((i + 1) / 4, mode, metric)
        for i in range(4)
        for mode in ("train", "test")
        for metric in ("loss", "ne", "auc")
    }
    ours, padded, other = ([*curves[name].values()] for name in ("ours", "padded", "sum"))
    num_steps = len(few_events.training(0)) // 256
    assert_same_losses(ours, padded, num_steps=num_steps)
    assert_other_losses(ours, other, num_steps=num_steps)
    assert 0.9 < curves["ours"][0.25, "train", "ne"] < 1.1


def test_curves_that_stand_are_not_trained_again(few_events, tmp_path, capsys):
    csv = tmp_path / "quality.csv"
    frames = []
    for providers in (["padded"], ["padded", "ours"]):
        end_to_end_quality.main(["--csv", str(csv), "--providers", *providers])
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
    assert capacity < max(best + 1, end_to_end_memory.CLOSE * best)
    assert len(tried) == len(set(tried)) <= 20


FIRST = dataclasses.replace(QUICK, mean=100, batch=256)


def try_size(name: str, sizes: Sizes, device: torch.device) -> str:
    return "out of memory" if sizes.mean * sizes.batch > 100_000 else ""


def test_a_search_writes_what_it_found_and_why_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(end_to_end_memory, "try_size", try_size)
    monkeypatch.setattr(end_to_end_memory, "clear_memory", lambda: None)
    csv = tmp_path / "memory.csv"
    with process_group() as device:
        for field in ("mean", "batch"):
            end_to_end_memory.search(csv, "ours", FIRST, field, device)
    frame = pd.read_csv(csv).set_index("metric")
    for metric, most, factor in (
        ("longest_history", 100_000 / 256, CLIP), ("largest_batch", 1000, 1)
    ):  # fmt: skip
        found = frame.loc[metric]
        assert most / 1.1 < found["median"] / factor <= most
        beyond, _, reason = found["note"].partition(": ")
        assert most < int(beyond) / factor <= 1.1 * found["median"] / factor
        assert reason == "out of memory"


def test_a_search_ends_with_the_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(end_to_end_memory, "try_size", try_size)
    real, tries = end_to_end_memory.clear_memory, []

    def lost():
        tries.append(1)
        if len(tries) == 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        real()

    monkeypatch.setattr(end_to_end_memory, "clear_memory", lost)
    csv = tmp_path / "memory.csv"
    with process_group() as device, pytest.raises(RuntimeError, match="illegal"):
        end_to_end_memory.search(csv, "ours", FIRST, "mean", device)
    found = pd.read_csv(csv).set_index("metric").loc["longest_history"]
    assert (found["median"], found["note"]) == (
        200 * CLIP,
        f"{400 * CLIP}: out of memory; not bisected",
    )


def test_a_search_that_ends_before_anything_fits_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(end_to_end_memory, "try_size", lambda *_: "out of memory")

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(end_to_end_memory, "clear_memory", lost)
    csv = tmp_path / "memory.csv"
    with process_group() as device, pytest.raises(RuntimeError, match="illegal"):
        end_to_end_memory.search(csv, "ours", FIRST, "mean", device)
    assert not csv.exists()


def test_a_size_that_cannot_be_trained_has_a_reason(monkeypatch):
    with process_group() as device:
        assert end_to_end_memory.try_size("ours", QUICK, device) == ""
        reason = end_to_end_memory.try_size("ours", dataclasses.replace(QUICK, heads=3), device)
        assert reason.startswith("ValueError: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mean", "0"], "argument --mean: must be an integer from 1 to 1000000, got '0'"),
        (["--rounds", "1"], "argument --rounds: must be an integer from 2 to 1000, got '1'"),
        (["--csv", "."], "argument --csv: must be a file, got the folder '.'"),
        (["--quick", "--candidates", "3"], "--candidates must divide the batch 16, got 3"),
        (["--quick", "--candidate-features", "4"], "must be at most all 3 features, got 4"),
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


def test_a_trial_of_memory_draws_one_batch(monkeypatch):
    """The host draws it, whose ids are many where histories are long."""
    drawn, draw = [], end_to_end_models._draw
    monkeypatch.setattr(end_to_end_models, "_draw", lambda *args: drawn.append(args) or draw(*args))
    with process_group() as device:
        assert end_to_end_memory.try_size("ours", dataclasses.replace(QUICK, mean=6), device) == ""
    assert len(drawn) == 1


def test_bags_of_varying_batch_sizes_are_looked_up_in_fp32_on_a_gpu():
    """FBGEMM's ``batch_index_select_dim0`` takes no bf16 there."""
    for name, provider in PROVIDERS.items():
        bags, sequences = make_sharders(provider, torch.device("cuda"))
        assert ("output_dtype" in bags.fused_params) == (name != "ours-once")
        assert sequences.fused_params["output_dtype"] == SparseType.BF16
        on_cpu = make_sharders(provider, torch.device("cpu"))
        assert not any("output_dtype" in sharder.fused_params for sharder in on_cpu)
