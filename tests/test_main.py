"""``python -m torchrec_jagged_attn`` tells what is here."""

import os
import subprocess
import sys

import pytest
import torch
import triton

import torchrec_jagged_attn


@pytest.fixture(params=["0", "1"], ids=["compiled", "interpreted"])
def output(request) -> dict[str, list[str]]:
    """First words of the printed lines, and the words after them."""
    done = subprocess.run(
        [sys.executable, "-m", "torchrec_jagged_attn"],
        env={**os.environ, "TRITON_INTERPRET": request.param, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split() for line in done.stdout.splitlines() if line]
    return {line[0]: line[1:] for line in lines} | {"interpret": [request.param]}


def test_prints_versions_and_the_path_of_every_op(output):
    assert output["torchrec_jagged_attn"] == [torchrec_jagged_attn.__version__]
    assert output["torch"] == [torch.__version__]
    assert output["triton"] == [triton.__version__]
    interpreted = output["interpret"] == ["1"]
    assert output["TRITON_INTERPRET"] == ["on" if interpreted else "off"]
    ops = [name for name in torchrec_jagged_attn.__all__ if name.startswith("jagged_")]
    assert len(ops) >= 2
    for op in ops:
        device, path, *why = output[op]
        assert device == "cpu"
        here = "c++" if op.endswith("_attention") else "reference"
        assert path == ("triton-interpreter" if interpreted else here)
        assert why


def test_an_absent_package_is_no_error(monkeypatch):
    from torchrec_jagged_attn import __main__

    monkeypatch.setattr(__main__, "find_spec", lambda name: None)
    assert ("torchrec", "not installed") in __main__.versions()


A10, A100, H100 = 99 * 1024, 163 * 1024, 227 * 1024  # bytes of shared memory


@pytest.mark.parametrize(
    ("room", "multiprocessors", "expected"),
    [
        (0, 0, []),
        (A10, 0, ["gluon", "gluon, one warp"]),
        (A100, 0, ["gluon", "gluon, one warp"]),
        (H100, 0, ["gluon", "gluon, one warp", "gluon, a few warps"]),
        (H100, 132, ["gluon", "gluon, one warp", "gluon, a few warps", "gluon, wgmma"]),
    ],
)
def test_says_which_kernels_a_gpu_takes(room, multiprocessors, expected, monkeypatch):
    from torchrec_jagged_attn import __main__
    from torchrec_jagged_attn.kernels import flash_hopper, pairs_hopper, target_attention

    monkeypatch.setattr(__main__, "devices", lambda: [(torch.device("cuda"), "a GPU")])
    monkeypatch.setattr(__main__.ops, "implementation", lambda device: ("triton", "CUDA device"))
    monkeypatch.setattr(target_attention, "_room_for_warps", lambda device: room)
    for module in (flash_hopper, pairs_hopper, target_attention):
        monkeypatch.setattr(module, "multiprocessors", lambda device: multiprocessors)
    paths = {}
    for op, _, path, why in __main__.paths():
        assert why
        paths.setdefault(op, []).append(path)
    flash = ["triton, whole samples"]
    if multiprocessors:
        flash = ["gluon, Hopper, whole samples", *flash, "gluon, Hopper"]
    assert paths.pop("jagged_flash_attention") == ["triton", *flash]
    of_pairs = ["triton", "gluon, Hopper"] if multiprocessors else ["triton"]
    assert paths.pop("jagged_jagged_bmm_jagged_out") == of_pairs
    assert paths.pop("jagged_target_attention") == ["triton", *expected]
    assert all(of_op == ["triton"] for of_op in paths.values())
