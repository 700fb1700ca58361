"""The shape of the package: who may import whom, how long files and functions are, what is documented."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "meshwise"
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

# ---- the import table: a part of the package, and the other parts it may import -----------------

VALUES = {"errors", "events", "grid", "job", "layout", "mesh", "plans", "quantities", "tree"}
HARDWARE = {"hardware.cluster", "hardware.files", "hardware.named", "hardware.limits", "hardware.remembered"}
COST = VALUES | HARDWARE | {"schedule", "cost"}
PURE = COST | {"data.order", "planner"}  # planning: no torch
MODEL = PURE | {"model"}
PARALLEL = MODEL | {"parallel"}
RUNTIME = PARALLEL | {"data", "checkpoint", "runtime"}
LAUNCH = RUNTIME | {"launch", "hardware.probe"}
SURFACE = {
    *("parity", "comparing", "epochs", "planning", "probing", "session", "settling", "training", "trials"),
    "verification",
}  # what `import meshwise` offers

MAY_IMPORT: dict[str, set[str]] = {
    **{name: VALUES for name in VALUES},
    "schedule": VALUES,
    "hardware": VALUES,
    "hardware.cluster": VALUES,
    "hardware.limits": VALUES,
    "hardware.files": VALUES | {"hardware.cluster"},
    "hardware.remembered": VALUES | {"hardware.cluster", "hardware.files"},
    "hardware.named": VALUES | {"hardware.cluster", "hardware.files"},
    "hardware.probe": VALUES | {"hardware.cluster", "parallel"},
    "cost": COST,
    "planner": PURE,
    "data.order": VALUES,
    "model": PURE,
    "parallel": MODEL,
    "data": PURE,
    "checkpoint": PURE,
    "runtime": PARALLEL | {"data", "checkpoint"},
    "launch": VALUES,
    "report": PURE,
    **{name: LAUNCH | {"report"} | SURFACE for name in SURFACE},
    "cli": LAUNCH | {"report", ""} | SURFACE,
    "": LAUNCH | {"report"} | SURFACE,  # __init__.py itself, lazily
}

# An import that breaks the table, as (module, imported module), with the reason. Keep it short.
EXCEPTIONS: dict[tuple[str, str], str] = {}

# No module of these imports torch, except for annotations.
TORCH_FREE = PURE | {"", "report"}


@dataclass(frozen=True, kw_only=True)
class Module:
    """Hold one file of the package: its dotted name without `meshwise.`, and its parsed text."""

    name: str
    path: Path
    text: str
    body: ast.Module

    @property
    def is_package(self) -> bool:
        """Tell an `__init__.py` from the other files."""
        return self.path.name == "__init__.py"


@dataclass(frozen=True, kw_only=True)
class Import:
    """Hold one imported name: absolute, and whether it is for annotations only."""

    target: str
    line: int
    typing_only: bool


def _read(path: Path) -> Module:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    text = path.read_text(encoding="utf-8")
    return Module(name=".".join(parts), path=path, text=text, body=ast.parse(text))


MODULES = [_read(path) for path in sorted(PACKAGE.rglob("*.py"))]
NAMES = {module.name for module in MODULES}
each_module = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name or "__init__")


def _imports(module: Module) -> Iterator[Import]:
    """List all imports of a module, those inside functions too."""
    for node, typing_only in _walk(module.body, False):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            yield Import(target=target, line=node.lineno, typing_only=typing_only)


def _walk(node: ast.AST, typing_only: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Visit all nodes, and say which stand under `if TYPE_CHECKING:`."""
    yield node, typing_only
    guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child, typing_only or (guarded and name == "body"))


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = ["meshwise", *filter(None, module.name.split("."))]
    up = node.level - 1 if module.is_package else node.level
    return ".".join([*parts[: len(parts) - up], *filter(None, [node.module])])


def _imported_modules(module: Module) -> Iterator[tuple[str, int]]:
    """List the modules of this package that a module imports, each with the line."""
    for item in _imports(module):
        if item.target.split(".")[0] == "meshwise":
            name = item.target.removeprefix("meshwise").removeprefix(".")
            while name not in NAMES:  # the last parts may be a function or a class
                name = name.rpartition(".")[0]
            yield name, item.line


def _part(name: str) -> str:
    """Give the part of the table that a module belongs to: its own entry, or its folder's."""
    return name if name in MAY_IMPORT else name.split(".")[0]


@each_module
def test_every_module_has_its_place_in_the_import_table(module: Module) -> None:
    """A new file at the top or a new folder is entered in MAY_IMPORT before it is used."""
    assert _part(module.name) in MAY_IMPORT, f"add {module.name!r} to MAY_IMPORT in {__file__}"


@each_module
def test_a_module_imports_only_from_below(module: Module) -> None:
    """Every import inside the package, at the top or in a function, is in the table or a named exception."""
    part = _part(module.name)
    allowed = MAY_IMPORT.get(part, set()) | {part}
    wrong = [
        f"line {line}: {module.name} imports {name}"
        for name, line in _imported_modules(module)
        if _part(name) not in allowed and (module.name, name) not in EXCEPTIONS
    ]
    assert not wrong, "\n".join(wrong)


def test_every_exception_is_still_needed() -> None:
    """An exception to the table goes away with the import it excuses."""
    present = {(module.name, name) for module in MODULES for name, _ in _imported_modules(module)}
    assert set(EXCEPTIONS) <= present


def test_the_table_has_no_cycle_between_folders() -> None:
    """The parts can be put in an order in which each imports only earlier ones (values count as one part)."""
    group = {
        name: "values" if name in VALUES else "surface" if name in SURFACE else name for name in MAY_IMPORT
    }
    rest = {
        group[part]: {
            group[name] for other in MAY_IMPORT if group[other] == group[part] for name in MAY_IMPORT[other]
        }
        - {group[part]}
        for part in MAY_IMPORT
    }
    while ready := [part for part, below in rest.items() if not below & set(rest)]:
        for part in ready:
            del rest[part]
    assert not rest, f"these import each other: {rest}"


@pytest.mark.parametrize("module", [m for m in MODULES if _part(m.name) in TORCH_FREE], ids=lambda m: m.name)
def test_planning_and_reporting_name_no_torch(module: Module) -> None:
    """Values, schedules, the order of samples and reports import torch at most for annotations."""
    wrong = [
        f"line {item.line}: {item.target}"
        for item in _imports(module)
        if item.target.split(".")[0] == "torch" and not item.typing_only
    ]
    assert not wrong, "\n".join(wrong)


def _problem_of_importing(names: list[str]) -> str:
    """Import modules in a fresh process; say what went wrong, or that torch came with them."""
    code = "import importlib, sys\n" + "".join(f"importlib.import_module({name!r})\n" for name in names)
    code += "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT / "src",
    )
    return done.stderr if done.returncode else ""


def test_importing_the_package_does_not_import_torch() -> None:
    """`import meshwise` is quick: it loads no torch until a name that needs it is used."""
    assert _problem_of_importing(["meshwise"]) == ""


def test_planning_and_reporting_load_no_torch() -> None:
    """No module of theirs pulls torch in through another one."""
    names = [module.name for module in MODULES if module.name and _part(module.name) in TORCH_FREE]
    assert _problem_of_importing([f"meshwise.{name}" for name in names]) == ""


@pytest.mark.parametrize("folder", ["src", "examples", "benchmarks"])
def test_files_are_short(folder: str) -> None:
    """No file has more than 500 lines."""
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / folder).rglob("*.py")
    }
    assert not {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}


@each_module
def test_functions_are_short(module: Module) -> None:
    """No function has more than 60 lines, its docstring and inner functions included."""
    functions = [
        node for node in ast.walk(module.body) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    lengths = {f"{node.name}, line {node.lineno}": _num_lines(node) for node in functions}
    assert not {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES}


def _num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@each_module
def test_every_public_name_is_documented(module: Module) -> None:
    """The file, its public classes and functions, and their public methods have a docstring."""
    assert not [name for name, node in _public(module.body, module.name) if not ast.get_docstring(node)]


def _public(
    node: ast.Module | ast.ClassDef, name: str
) -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    yield name or "__init__", node
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if child.name.startswith("_") or _is_overload(child):
                continue
            if isinstance(child, ast.ClassDef):
                yield from _public(child, f"{name}.{child.name}")
            else:
                yield f"{name}.{child.name}", child


def _is_overload(node: ast.AST) -> bool:
    return any("overload" in ast.dump(item) for item in getattr(node, "decorator_list", []))
