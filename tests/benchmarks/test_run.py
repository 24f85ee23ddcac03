"""The benchmark harness: what it writes, and that it times nothing that is wrong."""

import contextlib
import gc
import io
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import run
import torch
from suites import (
    Cost,
    UnavailableError,
    _attention,
    _self_attention,
    ikbo,
    self_attention_window,
    serving,
    table1,
    target_attention,
    target_attention_kernel,
    targets,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cases import jagged_lengths
from tests.oracles import flash_attention_oracle

SUITES = run.load_suites()
TRAINING = ["target_attention", "target_attention_kernel", "target_attention_recency"]
KERNEL = target_attention_kernel.SUITE
COLUMNS = [
    *("suite", "case", "provider", "mode", "metric", "median", "p20", "p80", "unit"),
    *("B", "T", "H", "D", "L", "N", "fill", "dtype", "bytes", "flops"),
    *("fp32_products", "gpu", "torch", "triton", "torchrec_jagged_attn", "date"),
]


def run_quickly(tmp_path: Path, *argv: str, known=None) -> tuple[int, pd.DataFrame]:
    """Exit status and CSV of a quick run on CPU."""
    csv = tmp_path / "figures.csv"
    status = run.main(["--quick", "--device", "cpu", "--csv", str(csv), *argv], known)
    return status, pd.read_csv(csv)


def test_every_suite_file_is_found():
    others = ["figure2", "host", "ikbo", "select_events", "semantic_ids", "serving", "table1"]
    variants = [f"target_attention_{name}" for name in ("rows", "scores")]
    self_attention = ["self_attention", "self_attention_recency", "self_attention_window"]
    assert list(SUITES) == sorted([*TRAINING, *others, "targets", *variants, *self_attention])
    assert all(suite.name == name for name, suite in SUITES.items())


def test_list_fits_a_screen(capsys):
    assert run.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 80
    for suite in SUITES.values():
        assert [suite.name, *suite.measures.split(), str(len(suite.cases))] in map(str.split, lines)
    assert len({suite.measures for suite in SUITES.values()}) == len(SUITES)
    assert "--list SUITE" in lines[-1]


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_list_of_a_suite_prints_all_its_names(suite, capsys):
    assert run.main(["--list", suite.name]) == 0
    words = capsys.readouterr().out.split()
    assert words[0] == suite.name
    assert {*suite.cases, *suite.providers, *suite.modes} <= {*words}


def with_one_case_of_each_kind(suite):
    """One case for each name without its numbers, each dtype, and whether targets, places
    of a row and lengths are one.
    """
    kinds = {}
    for case in suite.cases.values():
        words = re.sub(r"[\d.]+k?", "", case.name)
        one = case.num_targets == 1, case.name.endswith("-x1"), case.lengths == 1
        kinds.setdefault((words, case.dtype, *one), case)
    return replace(suite, cases={case.name: case for case in kinds.values()})


@pytest.fixture(scope="module")
def all_of_quick(tmp_path_factory):
    """Exit status, CSV, what is printed and seconds of a core of a quick run of all kinds."""
    begin, printed = time.process_time(), io.StringIO()
    known = {name: with_one_case_of_each_kind(suite) for name, suite in SUITES.items()}
    with contextlib.redirect_stdout(printed):
        status, frame = run_quickly(tmp_path_factory.mktemp("quick"), known=known)
    return status, frame, printed.getvalue(), time.process_time() - begin


def test_suites_of_self_attention_are_right(all_of_quick):
    status, frame, printed, _ = all_of_quick
    assert status == 0
    of_figure = frame[frame["suite"] == "figure2"]
    dense = {"padded", "dense-flash"}
    assert set(of_figure["provider"]) == {"floor", "ours", "ours-unfused", *dense}
    left_out = re.findall(r"(.*): not run here", printed)
    for peer in ("flash-attention-3", "torch-varlen", "fbgemm-sll"):
        assert any(peer in names.split(", ") for names in left_out)
    with_bias = frame[frame["suite"] == "self_attention_recency"]
    assert set(with_bias["provider"]) == {"floor", "ours+recency", "ours-unbiased", "padded"}


def test_pairs_of_a_window_are_those_that_are_seen():
    suite = SUITES["self_attention_window"]
    case = replace(suite.cases["cpu-1k-window-64"], batch_size=3, max_length=6, window=3)
    x = replace(suite.inputs(case, "cpu"), offsets=torch.tensor([0, 5, 5, 7]))
    assert self_attention_window.visible_pairs(x) == 1 + 2 + 3 + 3 + 3 + 0 + 1 + 2
    whole = replace(x, case=replace(case, window=None))
    assert self_attention_window.visible_pairs(whole) == 15 + 3


def unscaled(q, k, v, offsets, length, *rest):
    """What FBGEMM's op of self-attention computes, of ``[H, N, D]``."""
    out = flash_attention_oracle(*(t.transpose(0, 1) for t in (q, k, v)), offsets, scale=1.0)
    return out.transpose(0, 1) / length


def test_fbgemm_is_right_with_nothing_but_its_op_in_the_call(monkeypatch):
    pytest.importorskip("fbgemm_gpu.sll")
    suite = SUITES["self_attention"]
    x = suite.inputs(run.shrink(suite.cases["cpu-self-200"]), "cpu").double()
    monkeypatch.setattr(_self_attention, "need_cuda", lambda x: None)
    op = SimpleNamespace(sll_multi_head_jagged_flash_attention=unscaled)
    monkeypatch.setattr(torch.ops, "fbgemm", op)
    actual = run.outcome(_self_attention.fbgemm_sll_multi_head(x), x, ["both"])
    expected = run.outcome(lambda: suite.oracle(x), x, ["both"])
    torch.testing.assert_close(actual, expected)


def test_quick_run_writes_csv_and_table(tmp_path, capsys):
    argv = ["--cases", "rank-1k-fp32,rank-200-fp32", "--modes", "forward,both"]
    status, frame = run_quickly(tmp_path, *TRAINING, *argv)
    assert status == 0
    assert list(frame.columns) == COLUMNS
    assert set(frame["suite"]) == set(TRAINING)
    assert set(frame["case"]) == {"rank-1k-fp32-quick", "rank-200-fp32-quick"}
    assert set(frame["mode"]) == {"forward", "both"}
    assert set(frame["metric"]) == {"time"}
    expected = {
        "floor",
        "ours",
        "ours-materialized",
        "ours+recency",
        "ours-kernel",
        "padded-sdpa",
        "linear+fbgemm-chain",
    }
    assert expected <= set(frame["provider"])
    assert (frame["median"] > 0).all()
    assert ((frame["p20"] <= frame["median"]) & (frame["median"] <= frame["p80"])).all()
    assert not frame.duplicated(["suite", "case", "provider", "mode", "metric"]).any()
    printed = capsys.readouterr().out
    assert re.search("torch-varlen.*: not run here: needs CUDA", printed)


def test_a_quick_time_is_that_of_a_call():
    calls = []
    median, low, high = run.time_ms(lambda: (calls.append(1), time.sleep(0.01)), "cpu", quick=True)
    assert 10 <= low <= median <= high
    assert len(calls) == run.QUICK_REPEATS


def test_what_stays_after_a_case_is_not_looked_through_as_garbage(tmp_path, monkeypatch):
    stays, looked_through, release = [], [], run.release
    num_threads, set_threads = torch.get_num_threads(), []

    def imports_much(x):
        stays.append([[] for _ in range(10**6)])
        return target_attention_kernel.ours(x)

    def counting(device):
        looked_through.append(len(gc.get_objects()))
        release(device)

    monkeypatch.setattr(run, "release", counting)
    monkeypatch.setattr(torch, "set_num_threads", set_threads.append)
    known = {KERNEL.name: replace(KERNEL, providers={"ours-kernel": imports_much})}
    run_quickly(tmp_path, "--cases", "rank-1k-fp32,cpu-skewed", "--modes", "forward", known=known)
    assert set_threads == [1, num_threads]
    before_first, after_first, before_second, _ = looked_through
    assert before_first < 10**6 < after_first
    assert before_second < 10**6


def test_quick_times_ours_on_every_kind_of_case_within_a_minute_of_a_core(all_of_quick):
    status, frame, _, seconds = all_of_quick
    assert status == 0
    assert seconds < 60
    for suite in SUITES.values():
        timed = frame[(frame["suite"] == suite.name) & frame["provider"].str.startswith("ours")]
        cases = {*with_one_case_of_each_kind(suite).cases}
        assert {*timed["case"]} == {f"{case}-quick" for case in cases}


class NoWaits(TorchDispatchMode):
    """What waits for the device, or copies from the host, which no CUDA graph captures, raises."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh"), name
        return func(*args, **(kwargs or {}))


PADDED = ("padded", "padded-sdpa", "linear+padded-sdpa")


@pytest.mark.parametrize("name", [*TRAINING, "target_attention_scores"])
def test_padded_attention_waits_for_nothing(name):
    suite = SUITES[name]
    case = next(iter(suite.cases.values()))
    x = suite.inputs(replace(case, batch_size=5, max_length=30, lengths="uniform"), "cpu")
    (provider,) = {*suite.providers} & {*PADDED}
    call = suite.providers[provider](x)
    with NoWaits():
        out = call()
        if "backward" in suite.modes:
            torch.autograd.grad(out, list(x.leaves.values()), torch.ones_like(out))
    assert out.shape == suite.oracle(x.double()).shape


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_all_that_runs_here_is_right_on_empty_histories(suite, tmp_path, capsys):
    """PyTorch's attention by its formula: its kernel for CPUs may err by more than the rule."""
    case = next(iter(suite.cases.values()))
    cases = {"edges": replace(case, lengths="edges", dtype=torch.float32)}
    known = {suite.name: replace(suite, cases=cases)}
    with sdpa_kernel(SDPBackend.MATH):
        status, frame = run_quickly(tmp_path, "--modes", "forward", known=known)
    printed = capsys.readouterr().out
    assert status == 0
    assert frame["provider"].str.startswith("ours").any()
    assert "WRONG" not in printed
    assert "FAILED" not in printed


def wrong_output(x):
    call = target_attention_kernel.ours(x)
    return lambda: call() * 1.01


def wrong_gradient(x):
    call = target_attention_kernel.ours(x)

    def doubled():
        out = call()
        return 2 * out - out.detach()

    return doubled


def not_a_number(x):
    call = target_attention_kernel.ours(x)
    return lambda: call() * float("nan")


def raises(x):
    raise RuntimeError("no such kernel [here]")


def unavailable(x):
    raise UnavailableError("needs a kettle")


@pytest.mark.parametrize(
    ("provider", "reason", "expected_status"),
    [
        (wrong_output, "WRONG, so not timed: out: error", 1),
        (wrong_gradient, "WRONG, so not timed: gradient of query: error", 1),
        (not_a_number, "WRONG, so not timed: out: error nan", 1),
        (raises, "FAILED: RuntimeError: no such kernel [here]", 1),
        (unavailable, "not run here: needs a kettle", 0),
    ],
)
def test_a_provider_that_is_wrong_has_no_figure(
    provider, reason, expected_status, tmp_path, capsys
):
    providers = {"ours-kernel": provider, "plain": lambda x: partial(KERNEL.oracle, x)}
    known = {KERNEL.name: replace(KERNEL, providers=providers)}
    status, frame = run_quickly(tmp_path, "--cases", "rank-1k-fp32", known=known)
    assert status == expected_status
    assert set(frame["provider"]) == {"floor", "plain"}
    assert f"ours-kernel: {reason}" in capsys.readouterr().out


def test_figures_of_a_case_are_written_before_the_next_begins(tmp_path):
    """Ctrl-C while the second case is made, which then finds the figures of the first."""
    csv, found = tmp_path / "figures.csv", []
    csv.write_text("of an earlier run")

    def make(case, device):
        if case.name == "cpu-skewed":
            found.append(csv.read_text())
            raise KeyboardInterrupt
        return KERNEL.inputs(case, device)

    known = {KERNEL.name: replace(KERNEL, inputs=make)}
    argv = ["--cases", "rank-1k-fp32,cpu-skewed", "--modes", "forward", "--providers", "ours*"]
    with pytest.raises(KeyboardInterrupt):
        run_quickly(tmp_path, *argv, known=known)
    assert [csv.read_text()] == found
    frame = pd.read_csv(csv)
    assert list(frame.columns) == COLUMNS
    assert frame["provider"].tolist() == ["floor", "ours-kernel"]


def test_figures_of_several_cases_stand_under_one_header(tmp_path):
    argv = ["--cases", "rank-1k-fp32,cpu-skewed", "--modes", "forward", "--providers", "ours*"]
    _, frame = run_quickly(tmp_path, KERNEL.name, *argv)
    assert frame["case"].tolist() == ["rank-1k-fp32-quick"] * 2 + ["cpu-skewed-quick"] * 2


def test_floor_is_the_longer_of_bytes_and_flops():
    cost = Cost(bytes=4e9, flops=run.PEAK_FLOPS) + Cost(bytes=2e9, flops=run.PEAK_FLOPS)
    assert run.floor_ms(cost, "cuda", bandwidth=1e9) == pytest.approx(6000)
    assert run.floor_ms(cost, "cuda", bandwidth=1e10) == pytest.approx(2000)


@pytest.mark.parametrize("name", TRAINING)
def test_floor_of_both_is_three_passes_over_the_history(name):
    suite = SUITES[name]
    case = replace(suite.cases["rank-1k"], batch_size=2, max_length=4096, lengths="uniform")
    x = suite.inputs(case, "cpu")
    history = x.leaves["history"]
    total = sum(cost.bytes for cost in suite.cost(x).values())
    others = sum(t.nbytes for name, t in x.leaves.items() if name != "history")
    assert 3 * history.nbytes < total < 3 * history.nbytes + 8 * others


def test_flops_are_two_products_of_pairs_forward_and_five_backward():
    case = replace(KERNEL.cases["rank-2k-8-targets-fp32"], batch_size=5, max_length=9)
    x = KERNEL.inputs(case, "cpu")
    product = 2 * len(x.leaves["history"]) * 8 * 4 * 128  # 2 N T H D
    cost = KERNEL.cost(x)
    assert (cost["forward"].flops, cost["backward"].flops) == (2 * product, 5 * product)


def test_flops_with_projections_are_those_of_the_cheaper_form():
    suite, width, rows = SUITES["targets"], 128, 640
    cases = (
        replace(suite.cases["targets-4"], batch_size=5, max_length=128, num_targets=1, lengths=1.0),
    )
    few = suite.inputs(cases[0], "cpu")
    many = suite.inputs(replace(cases[0], num_targets=512), "cpu")
    assert suite.cost(few)["forward"].flops == 8 * 5 * width**2 + 4 * rows * 4 * width
    projections = 4 * (5 * 512 + rows) * width**2
    assert suite.cost(many)["forward"].flops == projections + 4 * rows * 512 * width


def test_candidates_are_uneven_and_as_many_in_all():
    name = "u15-t64-l1024-d128"
    x = serving.SUITE.inputs(replace(serving.CASES[name], max_length=20), "cpu")
    candidates = x.query_offsets.diff()
    assert len(x.leaves["target"]) == x.query_offsets[-1] == 15 * 64
    assert 64 / 3 - 1 < candidates.min() < 64 < candidates.max() == x.max_targets < 64 * 3 + 1
    x = serving.SUITE.inputs(replace(serving.CASES["u1-t64-l4096-d128"], max_length=20), "cpu")
    assert x.query_offsets.tolist() == [0, 64]
    assert x.offsets.tolist() == [0, 20]


@pytest.mark.parametrize("lengths", ["edges", "uniform"])
def test_a_copy_of_the_history_for_each_candidate_changes_nothing(lengths):
    case = replace(serving.CASES["u15-t4-l1024-d128"], max_length=20, lengths=lengths)
    suite = SUITES["targets"]
    x = serving.make_inputs(replace(case, dtype=torch.float32), "cpu").double()
    assert 0 in x.offsets.diff() or lengths != "edges"

    def attend(x):
        return target_attention.formula(x, flash_attention_oracle)

    copies = partial(_attention.expanded, attend)
    actual = run.outcome(target_attention.over_keys(copies, x), x, ["both"])
    expected = run.outcome(partial(suite.oracle, x), x, ["both"])
    torch.testing.assert_close(actual, expected)


LIKE_IKBO = """
from types import SimpleNamespace
import torch.nn.functional as F

def config(m, n, warps, stages):
    kwargs = {"BLOCK_M": m, "BLOCK_N": n}
    return SimpleNamespace(kwargs=kwargs, num_warps=warps, num_stages=stages)

sizes, calls = (16, 32, 64, 128), []
_attn_fwd_tma = SimpleNamespace(
    configs=[
        config(m, n, warps, stages)
        for m in sizes for n in sizes for warps in (4, 8, 16, 32) for stages in (1, 2, 3, 4, 5)
    ],
)

def triton_flash_attn_ikbo_tma(query, key, value, users, rows, longest, scale=None):
    calls.append((users.tolist(), rows, longest))
    k, v = (x.unflatten(0, (-1, longest))[users].transpose(1, 2) for x in (key, value))
    out = F.scaled_dot_product_attention(query.unflatten(0, (-1, rows)).transpose(1, 2), k, v)
    return out.transpose(1, 2).flatten(0, 1)
"""


@pytest.mark.parametrize(("rows", "block"), [(64, 64), (1, 16)])
@pytest.mark.parametrize("lengths", [1.0, "uniform"])
def test_ikbo_is_given_what_it_wants(rows, block, lengths, tmp_path, monkeypatch):
    path = tmp_path / "triton_ikbo_fa.py"
    path.write_text(LIKE_IKBO)
    monkeypatch.setenv("IKBO_ATTENTION", str(path))
    monkeypatch.setattr(ikbo, "need_cuda", lambda x: None)
    sizes = {"batch_size": 3, "max_length": 9, "num_targets": 2, "width": 16}
    case = replace(ikbo.CASES["ikbo-512"], **sizes, rows=rows, lengths=lengths, dtype=torch.float32)
    x = ikbo.make_inputs(case, "cpu")
    own = ikbo.ikbo(x)
    its = own.inputs or x
    assert (own.inputs is None) == (lengths == 1.0)
    assert its.offsets.tolist() == [0, 9, 18, 27]
    run.check(run.outcome(own, its, ["forward"]), *run.expected_of(ikbo.SUITE, its))
    of_module = own.call.func.__globals__
    assert of_module["calls"] == [([0, 0, 1, 1, 2, 2], rows, 9)]
    tried = of_module["_attn_fwd_tma"].configs
    assert len(tried) == 18
    assert {config.kwargs["BLOCK_M"] for config in tried} == {block}


def test_ikbo_is_left_out_without_its_file(monkeypatch):
    monkeypatch.setattr(ikbo, "need_cuda", lambda x: None)
    monkeypatch.delenv("IKBO_ATTENTION", raising=False)
    with pytest.raises(UnavailableError, match="IKBO_ATTENTION names no file"):
        ikbo.ikbo(ikbo.make_inputs(ikbo.CASES["cpu-ikbo"], "cpu"))


def test_requests_have_as_many_candidates_in_all():
    cases = targets.REQUESTS.values()
    assert {c.batch_size * c.num_targets for c in cases if c.large} == {8192}
    x = targets.make_inputs(replace(targets.REQUESTS["requests-4"], batch_size=20), "cpu")
    assert x.leaves["target"].shape == (80, 128)
    assert len({*x.query_offsets.diff().tolist()}) > 1


def test_serving_is_forward_only(tmp_path):
    argv = ["serving", "--cases", "u15-t64-l1024-d128"]
    status, frame = run_quickly(tmp_path, *argv)
    assert status == 0
    assert set(frame["mode"]) == {"forward"}
    with pytest.raises(SystemExit, match="no mode is called 'both'; there are: forward"):
        run_quickly(tmp_path, *argv, "--modes", "both")


@pytest.mark.parametrize("fill", [0.05, 0.25, 0.5, 1.0])
def test_lengths_of_a_given_fill(fill):
    lengths = jagged_lengths(1000, 2000, fill, torch.Generator().manual_seed(0))
    assert lengths.max() == 2000
    assert lengths.min() >= 1
    assert lengths.float().mean() / 2000 == pytest.approx(fill, abs=0.001)


@pytest.mark.parametrize(
    "case",
    [case for case in SUITES["figure2"].cases.values() if case.lengths == "skewed"],
    ids=lambda c: c.name,
)
def test_skewed_lengths_fill_three_twentieths(case):
    generator = torch.Generator().manual_seed(0)
    lengths = jagged_lengths(case.batch_size, case.max_length, case.lengths, generator)
    assert lengths.max() == case.max_length
    assert lengths.min() >= 1
    assert lengths.median() < lengths.float().mean()
    assert lengths.float().mean() / case.max_length == pytest.approx(0.15, abs=0.002)


def test_tf32_is_said_in_the_figures(tf32, tmp_path):
    argv = ["target_attention_kernel", "--cases", "rank-1k-fp32", "--modes", "forward"]
    for options, precision, said in ([[], "highest", "fp32"], [["--tf32"], "high", "tf32"]):
        status, frame = run_quickly(tmp_path, *argv, *options)
        assert status == 0
        assert torch.get_float32_matmul_precision() == precision
        assert set(frame["fp32_products"]) == {said}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no-suite"], "no suite is called 'no-suite'; there are: figure2"),
        (["--cases", "rank-7"], "no case is called 'rank-7'; there are: length-64"),
        (["--providers", "ours,oars"], "no provider is called 'oars'; there are: ours"),
        (
            ["--modes", "sideways"],
            "no mode is called 'sideways'; there are: forward, both, backward",
        ),
    ],
)
def test_an_unknown_name_lists_the_known_ones(argv, message):
    with pytest.raises(SystemExit, match=message):
        run.main(["--device", "cpu", "--quick", *argv])


@pytest.mark.parametrize("argv", [["--cases", "cpu-*,rank-1k"], ["serving"]])
def test_large_cases_are_refused_on_cpu(argv, capsys):
    with pytest.raises(SystemExit):
        run.main(["--device", "cpu", *argv])
    assert "add --quick" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--device", "cuda"], "--device must be cpu here, got 'cuda'"),
        (["--csv", "{folder}"], "--csv: must be a file, got the folder '{folder}'"),
        (["--csv", "{file}/a.csv"], "--csv: must be a folder that can be written, got '{file}'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_timed(
    argv, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    places = {"folder": tmp_path, "file": tmp_path / "file"}
    places["file"].write_text("kept")
    with pytest.raises(SystemExit) as exit_:
        run.main(["ikbo", "--quick", "--device", "cpu", *(a.format(**places) for a in argv)])
    assert exit_.value.code == 2
    assert message.format(**places) in capsys.readouterr().err
    assert places["file"].read_text() == "kept"


def test_small_cases_are_the_default_on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run.parse(SUITES, ["--device", "cpu"]).cases == [
        "cpu-ikbo",
        "cpu-events-200",
        "cpu-events-200-newest",
        "cpu-self-200",
        "cpu-self-1k",
        *(f"cpu-1k-window-{window}" for window in ("all", 256, 64)),
        "cpu-half-full",
        *(f"{op}-cpu" for op in table1.OPS),
        "cpu-skewed",
        *(f"cpu-skewed-x{places}" for places in (1, 4, 16, 64)),
        *(f"cpu-skewed-{score}" for score in ("silu", "sigmoid", "softmax")),
        *(f"cpu-requests-{candidates}" for candidates in (1, 16, 256)),
        *(f"cpu-targets-{targets}" for targets in (1, 4, 16, 32, 64, 128, 192)),
    ]
    on_gpu = run.parse(SUITES, ["--device", "cuda"]).cases
    assert {"rank-1k", *serving.CASES} <= set(on_gpu)
    assert "cpu-skewed" not in on_gpu


@pytest.mark.gpu
def test_quick_run_on_a_gpu_measures_graphs_and_memory(tmp_path):
    csv = tmp_path / "figures.csv"
    argv = ["--quick", "--device", "cuda", "--graph", "--providers", "ours*"]
    assert run.main([*argv, "--cases", "rank-1k,rank-200-fp32", "--csv", str(csv)]) == 0
    frame = pd.read_csv(csv)
    ours = frame[frame["provider"] != "floor"]
    assert set(ours["metric"]) == set(run.METRICS) - {"host_time", "host_time_one_thread"}
