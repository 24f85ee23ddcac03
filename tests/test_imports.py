"""Who imports whom, as ``docs/architecture.md`` has it."""

import ast
import functools
from pathlib import Path

PACKAGE = "torchrec_jagged_attn"
ROOT = Path(__file__).parents[1] / PACKAGE
OPERATIONS = {"target_attention", "flash_attention", "interaction"}
BELOW = {  # the folders that a folder imports, beside itself and what has no folder
    "pipeline": {"collection"},
    "collection": {*OPERATIONS, "attention", "codes", "modules", "runtime"},
    "modules": {*OPERATIONS, "attention", "codes", "runtime"},
    "target_attention": {"attention", "codes", "flash_attention", "interaction", "runtime"},
    "flash_attention": {"attention", "codes", "runtime"},
    "attention": {"codes", "runtime"},
    "interaction": {"runtime"},
    "codes": {"runtime"},
    "runtime": set(),
    "data": set(),
    "semantic_ids": {"codes", "runtime", "target_attention"},
    "events": {"collection", "runtime"},
    "": {*OPERATIONS, "codes"},  # what has no folder
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


def test_what_is_installed_imports_nothing_that_is_not():
    for path in ROOT.rglob("*.py"):
        for node in nodes_of(path):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            tops = {module.partition(".")[0] for module in modules}
            assert not tops & {"benchmarks", "examples", "tests"}, path


def test_imports_go_down():
    for path in ROOT.rglob("*.py"):
        if path.name in ("__init__.py", "__main__.py"):
            continue
        folder, *inner = path.relative_to(ROOT).parts[:-1] or ("",)
        for module, name in imports(path):
            assert not name.startswith("_"), f"{path}: {module}.{name}"
            top, *rest = module.split(".")
            if not (ROOT / top).is_dir():
                continue
            assert top == folder or top in BELOW.get(folder, set()), f"{path}: {module}"
            if inner == ["kernels"]:  # of what runs on a GPU, kernels import kernels alone
                assert not {"api", "cpu"} & {*rest}, f"{path}: {module}"
