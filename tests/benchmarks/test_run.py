"""The benchmark harness writes complete figures, and times no wrong provider."""

import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import run
import torch
from suites import Cost, UnavailableError, serving, target_attention_kernel
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.cases import jagged_lengths

SUITES = run.load_suites()
KERNEL = target_attention_kernel.SUITE
TIMED_HERE = {
    "figure2": {"floor", "ours", "ours-unfused", "padded", "dense-flash"},
    "self_attention_recency": {"floor", "ours+recency", "ours-unbiased", "padded"},
    "table1": {"floor", "ours", "padded", "jagged-padded-jagged", "fbgemm-cuda"},
    "target_attention": {"floor", "ours", "linear+padded-sdpa"},
    "target_attention_kernel": {"floor", "ours-kernel", "padded-sdpa"},
}
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


def with_one_case_of_each_kind(suite):
    """Keep one case per name without numbers, dtype, single target and equal lengths."""
    kinds = {}
    for case in suite.cases.values():
        words = re.sub(r"[\d.]+k?", "", case.name)
        one = case.num_targets == 1, case.lengths == 1
        kinds.setdefault((words, case.dtype, *one), case)
    return replace(suite, cases={case.name: case for case in kinds.values()})


@pytest.mark.parametrize("names", [[], ["table1"]], ids=str)
def test_list_prints_suites_or_all_names_of_one(names, capsys):
    assert run.main(["--list", *names]) == 0
    words = {*capsys.readouterr().out.split()}
    assert words >= {*(names or SUITES)}
    for name in names:
        suite = SUITES[name]
        assert words >= {*suite.cases, *suite.providers, *suite.modes}


def test_quick_checks_and_times_every_kind_of_case(tmp_path, capsys):
    known = {name: with_one_case_of_each_kind(suite) for name, suite in SUITES.items()}
    status, frame = run_quickly(tmp_path, known=known)
    assert status == 0
    assert list(frame.columns) == COLUMNS
    assert {*frame["metric"]} == {"time"}
    assert (frame["median"] > 0).all()
    assert ((frame["p20"] <= frame["median"]) & (frame["median"] <= frame["p80"])).all()
    assert not frame.duplicated(["suite", "case", "provider", "mode", "metric"]).any()
    for name, suite in known.items():
        timed = frame[frame["suite"] == name]
        assert {*timed["mode"]} == {*suite.modes}
        assert {*timed["provider"]} >= TIMED_HERE.get(name, {"floor"})
        is_ours = timed["provider"].str.startswith("ours")
        assert {*timed.loc[is_ours, "case"]} == {f"{case}-quick" for case in suite.cases}
    left_out = re.findall(r"(.*): not run here: needs CUDA", capsys.readouterr().out)
    for peer in ("flash-attention-3", "torch-varlen", "fbgemm-sll"):
        assert any(peer in names.split(", ") for names in left_out)


def test_quick_times_are_times_of_calls():
    calls = []
    median, low, high = run.time_ms(lambda: (calls.append(1), time.sleep(0.01)), "cpu", quick=True)
    assert 10 <= low <= median <= high
    assert len(calls) == run.QUICK_REPEATS


def test_providers_are_right_on_empty_histories(tmp_path, capsys):
    """With PyTorch's math backend, since the errors of its CPU kernel may exceed the tolerance."""
    known = {}
    for name, suite in SUITES.items():
        case = replace(next(iter(suite.cases.values())), lengths="edges", dtype=torch.float32)
        known[name] = replace(suite, cases={case.name: case})
    with sdpa_kernel(SDPBackend.MATH):
        status, frame = run_quickly(tmp_path, "--modes", "forward", known=known)
    printed = capsys.readouterr().out
    assert status == 0
    assert {*frame.loc[frame["provider"].str.startswith("ours"), "suite"]} == {*SUITES}
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


def test_roofline_is_the_maximum_of_bytes_and_flops():
    cost = Cost(bytes=4e9, flops=run.PEAK_FLOPS) + Cost(bytes=2e9, flops=run.PEAK_FLOPS)
    assert run.roofline_ms(cost, "cuda", bandwidth=1e9) == pytest.approx(6000)
    assert run.roofline_ms(cost, "cuda", bandwidth=1e10) == pytest.approx(2000)


def test_flops_are_two_products_of_pairs_forward_and_five_backward():
    case = replace(KERNEL.cases["rank-2k-8-targets-fp32"], batch_size=5, max_length=9)
    x = KERNEL.inputs(case, "cpu")
    product = 2 * len(x.leaves["history"]) * 8 * 4 * 128  # 2 N T H D
    cost = KERNEL.cost(x)
    assert (cost["forward"].flops, cost["backward"].flops) == (2 * product, 5 * product)


def test_flops_with_projections_are_the_minimum_of_both_forms():
    suite, width, rows = SUITES["target_attention"], 128, 640
    cases = (
        replace(suite.cases["rank-1k"], batch_size=5, max_length=128, num_targets=1, lengths=1.0),
    )
    few = suite.inputs(cases[0], "cpu")
    many = suite.inputs(replace(cases[0], num_targets=512), "cpu")
    assert suite.cost(few)["forward"].flops == 4 * 5 * width**2 + 4 * rows * 4 * width
    projections = 2 * (5 * 512 + rows) * width**2
    assert suite.cost(many)["forward"].flops == projections + 4 * rows * 512 * width


def test_candidates_are_uneven_with_a_fixed_total():
    x = serving.SUITE.inputs(replace(serving.CASES["serving-256"], max_length=20), "cpu")
    candidates = x.query_offsets.diff()
    assert len(x.leaves["target"]) == x.query_offsets[-1] == 15 * 256
    assert 256 / 3 - 1 < candidates.min() < 256 < candidates.max() == x.max_targets < 256 * 3 + 1


@pytest.mark.parametrize("lengths", [0.05, 0.25, 0.5, 1.0, "skewed"])
def test_lengths_fill_a_part_of_the_longest(lengths):
    drawn = jagged_lengths(1024, 2000, lengths, torch.Generator().manual_seed(0))
    assert drawn.max() == 2000
    assert drawn.min() >= 1
    fill = 0.15 if lengths == "skewed" else lengths
    assert drawn.float().mean() / 2000 == pytest.approx(fill, abs=0.002)


def test_figures_record_tf32(tf32, tmp_path):
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
def test_error_of_an_unknown_name_lists_known_names(argv, message):
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
def test_bad_options_are_refused_before_timing(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    places = {"folder": tmp_path, "file": tmp_path / "file"}
    places["file"].write_text("kept")
    with pytest.raises(SystemExit) as exit_:
        run.main(["table1", "--quick", "--device", "cpu", *(a.format(**places) for a in argv)])
    assert exit_.value.code == 2
    assert message.format(**places) in capsys.readouterr().err
    assert places["file"].read_text() == "kept"


def test_small_cases_are_the_default_on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    large = {name for suite in SUITES.values() for name, case in suite.cases.items() if case.large}
    on_cpu, on_gpu = ({*run.parse(SUITES, ["--device", x]).cases} for x in ("cpu", "cuda"))
    assert on_gpu == large
    assert on_cpu
    assert not on_cpu & large


@pytest.mark.gpu
def test_quick_run_on_a_gpu_measures_graphs_and_memory(tmp_path):
    csv = tmp_path / "figures.csv"
    argv = ["--quick", "--device", "cuda", "--graph", "--providers", "ours*"]
    assert run.main([*argv, "--cases", "rank-1k,rank-200-fp32", "--csv", str(csv)]) == 0
    frame = pd.read_csv(csv)
    ours = frame[frame["provider"] != "floor"]
    assert set(ours["metric"]) == set(run.METRICS) - {"host_time", "host_time_one_thread"}
