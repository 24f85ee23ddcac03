"""Imports between folders, as in ``docs/architecture.md``."""

import ast
import functools
from pathlib import Path

PACKAGE = "torchrec_jagged_attn"
ROOT = Path(__file__).parents[1] / PACKAGE
BELOW = {  # the folders that a folder imports, beside itself
    "pipeline": {"base", "codes", "collection", "modules", "ops"},
    "collection": {"base", "codes", "modules", "ops"},
    "modules": {"base", "codes", "ops"},
    "ops": {"base", "codes"},
    "codes": {"base"},
    "base": set(),
    "data": {"base"},
    "semantic_ids": {"base", "codes", "ops"},
    "events": {"base", "collection", "ops"},
}
OPS_BELOW = {  # the same within ops
    "target_attention": {"attention", "flash_attention", "interaction"},
    "flash_attention": {"attention"},
}


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


def imports(path: Path) -> list[tuple[str, str]]:
    """Module and name of each import from the package, without the package's own name, and of what
    is read of an imported module.
    """
    found = []
    nodes = nodes_of(path)
    reads = [
        (node.value.id, node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
            module = node.module.removeprefix(PACKAGE).removeprefix(".")
            for alias in node.names:
                as_file = ROOT.joinpath(*module.split("."), alias.name)
                is_module = as_file.is_dir() or as_file.with_suffix(".py").is_file()
                whole = f"{module}.{alias.name}".strip(".") if is_module else module
                found.append((whole, alias.name))
                if is_module:
                    local = alias.asname or alias.name
                    found += [(whole, name) for module_name, name in reads if module_name == local]
    return found


def test_package_imports_no_tests():
    for path in ROOT.rglob("*.py"):
        for node in nodes_of(path):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            tops = {module.partition(".")[0] for module in modules}
            assert not tops & {"benchmarks", "examples", "tests"}, path


def test_import_layers():
    for path in ROOT.rglob("*.py"):
        if path.name in ("__init__.py", "__main__.py"):
            continue
        folder, *inner = path.relative_to(ROOT).parts[:-1] or ("",)
        for module, name in imports(path):
            assert not name.startswith("_"), f"{path}: {module}.{name}"
            top, *rest = module.split(".")
            assert top == folder or top in BELOW[folder], f"{path}: {module}"
            if folder == top == "ops" and inner and rest and rest[0] in ("attention", *OPS_BELOW):
                below = {inner[0], *OPS_BELOW.get(inner[0], ())}
                assert rest[0] in below, f"{path}: {module}"
            if inner[-1:] in (["kernels"], ["device"]):
                assert not {"api", "cpu"} & {*rest}, f"{path}: {module}"
