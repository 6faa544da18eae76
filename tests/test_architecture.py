"""The house plan as a test: imports run downward, mechanisms do not know each other, nothing grows out of hand."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "blocktrain"
# The house plan: a module imports from its own folder and from levels above its own in this list, never across a level.
LEVELS = [
    {"errors"},
    {"units", "runtime", "dotted_path", "outputs", "parse"},
    {"probe"},
    {"records", "modules", "reference", "testing"},
    {"memory"},
    {"chain"},
    {"schedule", "stopping"},
    {"optim", "cache", "parallel", "data", "plan"},
    {"contrib"},  # experiments of ours that are not the paper's
    {"train"},
    {"compare", "report"},
    {"integrations"},
    {"cli"},
    {"__init__", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_CLASS_LINES = 600, 100, 400  # a net, not a rule: split by concept

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The top-level module or package a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> set[str]:
    """Full names of the blocktrain modules imported anywhere in a file, lazily or only for types too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module or "")
    return {name for name in names if name.startswith("blocktrain.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downward(path: Path) -> None:
    mine = part_of(path)
    assert mine in LEVEL, f"'{mine}' has no place in the house plan"
    for name in imports(ast.parse(path.read_text())):
        other = name.split(".")[1]
        if other == mine:
            continue
        assert LEVEL[other] < LEVEL[mine], f"{path.name} imports {name}, which is not below '{mine}' in the house plan"


def cycle(graph: Mapping[str, Collection[str]]) -> list[str]:
    """Names that lead back to the first of them, which is the last again; empty where there are none."""
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        for other in () if name in done else sorted(graph.get(name, ())):
            if found := visit(other, (*trail, name)):
                return found
        done.add(name)
        return []

    return next((found for name in graph if (found := visit(name, ()))), [])


def imported_files() -> dict[str, set[str]]:
    """For each file, by its module's full name, the files that it imports."""
    modules = {".".join(("blocktrain", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in FILES}
    names = {module.removesuffix(".__init__"): module for module in modules}
    graph = {}
    for module, path in modules.items():
        tree = ast.parse(path.read_text())
        taken = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        files = {
            f"{node.module}.{alias.name}" for node in taken for alias in node.names
        }  # from blocktrain.plan import fit
        packages = {node.module for node in taken if not all(f"{node.module}.{a.name}" in names for a in node.names)}
        plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        graph[module] = {names[other] for other in files | packages | plain if other in names}
    graph["blocktrain.__init__"] = set()  # it names everything, lazily
    return graph


def imported_folders(files: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    """For each folder (or file that lies in none), those that its files import from; the version is anybody's."""
    graph: dict[str, set[str]] = {}
    for module, others in files.items():
        mine = module.split(".")[1]
        graph.setdefault(mine, set()).update({other.split(".")[1] for other in others} - {mine, "__init__"})
    return graph


def test_no_import_cycles() -> None:
    assert cycle(imported_files()) == []


def test_no_import_cycles_between_folders() -> None:
    """No folder imports from one that imports from it, not even by way of others, whatever `LEVELS` says."""
    graph = imported_folders(imported_files())
    assert graph["train"] >= {"optim", "chain", "cache", "parallel"}
    assert cycle(graph) == []


def test_no_folder_imports_from_above() -> None:
    upward = [
        f"{mine} -> {other}"
        for mine, others in imported_folders(imported_files()).items()
        for other in sorted(others)
        if LEVEL[other] >= LEVEL[mine]
    ]
    assert upward == []


def test_a_cycle_would_be_found() -> None:
    files = {"blocktrain.a.one": ["blocktrain.b.one"], "blocktrain.b.one": [], "blocktrain.b.two": ["blocktrain.a.two"]}
    assert cycle(files) == []  # between files there is none
    assert cycle(imported_folders(files)) == ["a", "b", "a"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_sizes(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, node.name
        elif isinstance(node, ast.ClassDef):
            assert (node.end_lineno or 0) - node.lineno < MAX_CLASS_LINES, node.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_unpickled_and_no_remote_code_runs(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not {"pickle", "dill", "cloudpickle", "joblib", "marshal"} & set(names)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert called != "torch.load" or keywords.get("weights_only") == "True"
            assert keywords.get("trust_remote_code", "False") == "False"
            assert keywords.get("allow_pickle", "False") == "False"


def test_the_command_line_imports_no_torch() -> None:
    """`blocktrain --help` answers at once (the issue says half a second; without torch it is a tenth of that)."""
    code = "import sys, blocktrain, blocktrain.cli.main as m; m.parser(); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_a_violation_would_be_found(tmp_path: Path) -> None:
    """The checks above can fail: an upward import is seen, also when it is lazy or relative."""
    assert imports(ast.parse("def f():\n    from blocktrain.train.trainer import Trainer")) == {
        "blocktrain.train.trainer"
    }
    with pytest.raises(AssertionError):
        imports(ast.parse("from . import loop"))
    assert LEVEL["train"] > LEVEL["optim"]
