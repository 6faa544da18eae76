"""The house plan as a test: imports run downward, mechanisms do not know each other, nothing grows out of hand."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "blocktrain"
# The house plan: a module imports from its own folder and from levels above its own in this list, never across a level.
LEVELS = [
    {"errors"},
    {"units", "runtime"},
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


def test_no_import_cycles() -> None:
    modules = {".".join(("blocktrain", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in FILES}
    graph = {
        name: {other for other in imports(ast.parse(path.read_text())) if other in modules}
        for name, path in modules.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        if name != "blocktrain.__init__":  # it names everything, lazily
            visit(name, ())


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
