"""Files, links and names in the documents exist."""

import re
from pathlib import Path

import pytest

import torchrec_jagged_attn
from torchrec_jagged_attn import data, events, ops, semantic_ids

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/NOTES.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = ("torchrec_jagged_attn", "tests", "benchmarks", "examples", "docs")
FILES = [
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.*"), *(p for name in FOLDERS for p in (ROOT / name).rglob("*.*")))
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document):
    names = re.findall(r"`([\w./-]+\.(?:py|cpp|md|csv|toml))(?:::\w+)?`", document.read_text())
    missing = {name for name in names if not any(f"/{file}".endswith(f"/{name}") for file in FILES)}
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_exist(document):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", document.read_text()):
        name, _, heading = target.partition("#")
        file = document.parent / name if name else document
        assert file.is_file(), target
        heads = re.findall(r"^#+ (.*)", file.read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
        anchors.update(re.findall(r"^::: ([\w.]+)$", file.read_text(), re.MULTILINE))
        assert not heading or heading in anchors, target


def test_architecture_page_lists_every_file():
    page = (ROOT / "docs" / "architecture.md").read_text()
    house = set(re.findall(r"[a-z]\w*\*?", page.partition("```text")[2].partition("```")[0]))
    files = (ROOT / "torchrec_jagged_attn").rglob("*.py")
    stems = {path.stem for path in files if path.stem[0] != "_"}
    families = tuple(name[:-1] for name in house if name.endswith("*"))
    assert {stem for stem in stems if stem not in house and not stem.startswith(families)} == set()


def test_environment_variables_are_documented():
    page = (ROOT / "docs" / "environment_variables.md").read_text()
    rows = set(re.findall(r"^\| `(TORCHREC_JAGGED_ATTN_\w+)` \|", page, re.MULTILINE))
    sources = [
        path
        for suffix in ("py", "cpp")
        for path in (ROOT / "torchrec_jagged_attn").rglob(f"*.{suffix}")
    ]
    read = {
        name
        for path in sources
        for name in re.findall(r"\bTORCHREC_JAGGED_ATTN_[A-Z]\w*", path.read_text())
    }
    assert read
    assert rows == read


def public_names() -> dict[str, set[str]]:
    """By module; names of the package itself are not repeated."""
    names = {torchrec_jagged_attn.__name__: set(torchrec_jagged_attn.__all__)}
    for module in (ops, data, semantic_ids, events):
        names[module.__name__] = set(module.__all__) - set(torchrec_jagged_attn.__all__)
    return names


def test_every_public_name_is_in_the_reference():
    pages = (ROOT / "docs" / "api").glob("*.md")
    found = {
        name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)
    }
    public = {f"{module}.{name}" for module, names in public_names().items() for name in names}
    assert found - {"torchrec_jagged_attn.modules.recency_bias.RecencyBias"} == public


def test_tables_of_the_reference_have_every_public_name():
    page = (ROOT / "docs" / "api" / "index.md").read_text()
    sections = re.split(r"^## .*`(torchrec_jagged_attn[\w.]*)`", page, flags=re.M)
    named = {
        module: set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.*?) \|", table, re.M))))
        for module, table in zip(sections[1::2], sections[2::2], strict=True)
    }
    assert named == public_names()


def test_line_length():
    for document in DOCUMENTS:
        for number, line in enumerate(document.read_text().splitlines(), 1):
            assert line.startswith("|") or len(line) <= 105, f"{document.name}:{number}"
