"""``python -m torchrec_jagged_attn`` prints versions, devices and kernel variants."""

import json

import pytest
import torch
import triton

import torchrec_jagged_attn
from tests.processes import run_code, run_package, write_script
from torchrec_jagged_attn import __main__, ops
from torchrec_jagged_attn.base import devices
from torchrec_jagged_attn.ops.flash_attention import extension

TORCHREC = ("torchrec", "fbgemm_gpu")  # which take most of the time that the package takes


@pytest.fixture(params=["0", "1"], ids=["compiled", "interpreted-without-torchrec"])
def output(request) -> dict[str, list[str]]:
    """First words of the printed lines, and the words after them."""
    absent = TORCHREC if request.param == "1" else ()
    done = run_package(absent=absent, TRITON_INTERPRET=request.param, CUDA_VISIBLE_DEVICES="")
    lines = [line.split() for line in done.stdout.splitlines() if line]
    return {line[0]: line[1:] for line in lines} | {"interpret": [request.param]}


def test_prints_versions_and_the_path_of_every_op(output):
    assert output["torchrec_jagged_attn"] == [torchrec_jagged_attn.__version__]
    assert output["torch"] == [torch.__version__]
    assert output["triton"] == [triton.__version__]
    interpreted = output["interpret"] == ["1"]
    if interpreted:
        assert all(output[package] == ["not", "installed"] for package in TORCHREC)
    assert output["TRITON_INTERPRET"] == ["on" if interpreted else "off"]
    public_ops = [name for name in torchrec_jagged_attn.__all__ if name.startswith("jagged_")]
    assert {*public_ops} <= {*ops.__all__}
    for op in (name for name in ops.__all__ if name.islower()):
        device, path, *why = output[op]
        assert device == "cpu"
        compiled = "c++" if op.endswith("_attention") else "reference"
        assert path == ("triton-interpreter" if interpreted else compiled)
        assert why


def test_json_has_the_three_tables(capsys):
    assert __main__.main(["--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert tables.keys() == {"packages", "devices", "ops"}
    assert tables["packages"]["torch"] == torch.__version__
    assert tables["packages"].items() >= dict(__main__.versions()).items()
    assert tables["devices"] == {str(device): about for device, about in __main__.devices()}
    assert [tuple(row.values()) for row in tables["ops"]] == __main__.variants()
    assert all(list(row) == ["op", "device", "variant", "description"] for row in tables["ops"])


@pytest.mark.reference
@pytest.mark.parametrize("option", [[], ["--json"]], ids=["plain", "json"])
def test_says_that_it_builds(option, monkeypatch, capsys):
    for is_built in (True, False):
        monkeypatch.setattr(extension, "is_built", lambda is_built=is_built: is_built)
        assert __main__.main(option) == 0
        assert ("Building" in capsys.readouterr().err) == (not is_built)


def test_build_prints_the_path(capsys):
    assert __main__.main(["--build"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(extension.build())]


def test_build_prints_compiler_errors(tmp_path):
    compiler = tmp_path / "g++"
    errors = "for i in 1 2 3; do echo a.h:$i: fatal error; done"
    write_script(compiler, '[ "$1" = -MMD ] || exec echo 13.2.0', errors, "exit 1")
    done = run_package(
        "--build",
        check=False,
        imported="torchrec_jagged_attn",
        CXX=str(compiler),
        TORCH_EXTENSIONS_DIR=str(tmp_path),
    )
    assert done.returncode == 1
    assert not done.stdout
    for line in ("a.h:1: fatal error", "a.h:3: fatal error"):
        assert line in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        ("OSError('libtorch_cuda.so: cannot open')", "fbgemm-gpu-cpu"),
        ("ModuleNotFoundError('fbgemm_gpu')", "torchrec_jagged_attn[torchrec]"),
    ],
)
def test_names_packages_to_install_if_fbgemm_does_not_load(raised, expected, tmp_path):
    (tmp_path / "fbgemm_gpu.py").write_text(f"raise {raised}")
    lines = (
        f"sys.path.insert(0, {str(tmp_path)!r})",
        "import torchrec_jagged_attn as ours",
        "ours.jagged_softmax",
        "ours.JaggedTargetAttention",
    )
    done = run_code("import sys", *lines, check=False, imported="torchrec_jagged_attn")
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert "JaggedTargetAttention needs TorchRec" in message
    assert expected in message
    assert "libtorch_cuda.so" in message or "fbgemm_gpu" in message


A10, A100, H100 = 99 * 1024, 163 * 1024, 227 * 1024  # bytes of shared memory


@pytest.mark.parametrize(
    ("room", "multiprocessors", "expected"),
    [
        (0, 0, []),
        (A10, 0, ["one_warp"]),
        (A100, 0, ["one_warp"]),
        (H100, 132, ["one_warp", "warpgroup"]),
    ],
)
def test_lists_kernels_of_a_gpu(room, multiprocessors, expected, monkeypatch):
    monkeypatch.setattr(__main__, "devices", lambda: [(torch.device("cuda"), "a GPU")])
    monkeypatch.setattr(__main__, "implementation", lambda device: ("triton", "CUDA device"))
    monkeypatch.setattr(devices, "gluon_shared_memory", lambda device: room)
    monkeypatch.setattr(devices, "hopper_multiprocessors", lambda device: multiprocessors)
    paths = {}
    for op, _, path, why in __main__.variants():
        assert why
        paths.setdefault(op, []).append(path)
    flash = ["general_short", "general"]
    if multiprocessors:
        flash = ["hopper_short", "general_short", "hopper", "general"]
    assert paths.pop("jagged_flash_attention") == flash
    assert paths.pop("jagged2_softmax") == ["single_tile", "multi_pass"]
    assert paths.pop("jagged_target_attention") == [*expected, "general"]
    assert all(names == ["triton"] for names in paths.values())


@pytest.mark.reference
def test_says_why_a_cpu_has_no_c_plus_plus(tmp_path):
    environment = {"CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    done = run_package("--json", absent=TORCHREC, imported="torchrec_jagged_attn", **environment)
    rows = json.loads(done.stdout)["ops"]
    descriptions = {(row["op"], row["variant"]): row["description"] for row in rows}
    for op in ("jagged_flash_attention", "jagged_target_attention"):
        assert "there is no C++ compiler 'no-such-compiler'" in descriptions[op, "none"]
