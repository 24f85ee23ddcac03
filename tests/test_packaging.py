"""The extras, and their versions in the documents."""

import re
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or newer has it")

ROOT = Path(__file__).parents[1]
INSTALL = (ROOT / "docs" / "install.md").read_text()
EXTRAS = {
    extra: {requirement.name: requirement for requirement in map(Requirement, requirements)}
    for extra, requirements in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ].items()
}
TORCHREC = EXTRAS["torchrec"]["torchrec"]


def rows() -> list[dict[str, str]]:
    """The table of tested versions."""
    table = re.search(r"^\| torch \|.*\n\|---.*\n((?:\|.*\n)+)", INSTALL, re.MULTILINE)
    assert table
    heads = ("torch", "triton", "torchrec", "fbgemm-gpu", "python", "device", "tests")
    columns = [re.findall(r"[^|]+", row) for row in table[1].splitlines()]
    return [dict(zip(heads, map(str.strip, row), strict=True)) for row in columns]


def test_both_extras_ask_for_one_torch_and_one_fbgemm():
    cuda, cpu = EXTRAS["torchrec"], EXTRAS["torchrec-cpu"]
    assert cuda["torch"].specifier == cpu["torch"].specifier
    assert cuda["fbgemm-gpu"].specifier == cpu["fbgemm-gpu-cpu"].specifier
    assert "torchrec" not in cpu  # would bring fbgemm-gpu along


def test_extras_take_the_first_set_of_the_table():
    first = rows()[0]
    for name, requirement in EXTRAS["torchrec"].items():
        assert str(requirement.specifier) == f"=={first[name]}"
    assert str(EXTRAS["torchrec-cpu"]["triton"].specifier) == f"=={first['triton']}"


def test_the_makefile_names_no_version_of_its_own():
    makefile = (ROOT / "Makefile").read_text()
    assert not re.findall(r"==\d.*", makefile)
    for name in ("torch", "torchrec"):
        pattern = re.search(rf"grep -om1 '({name}==.*?)' pyproject.toml", makefile)[1]
        found = re.search(pattern, (ROOT / "pyproject.toml").read_text())
        assert found
        assert found[0] == str(EXTRAS["torchrec"][name])


def test_the_page_installs_the_torchrec_of_the_extra_without_its_needs():
    assert f"pip install --no-deps {TORCHREC}" in INSTALL


def test_the_cpu_extra_has_all_else_that_torchrec_needs():
    if not TORCHREC.specifier.contains(version("torchrec")):
        pytest.skip(f"needs {TORCHREC}")
    needs = [Requirement(line) for line in requires("torchrec") or ()]
    for need in needs:
        if need.marker is None and need.name != "fbgemm-gpu":
            assert EXTRAS["torchrec-cpu"][need.name].specifier == need.specifier
