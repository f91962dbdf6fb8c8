"""Rules of the source itself, so that nobody has to remember them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from residentd.config import key_table

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path
    for folder in ("daemon/residentd", "build_engines/residentd_build", "tools", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
CORE = [path for path in SOURCES if "daemon/residentd/core" in path.as_posix()]
FUNCTION_LINES_MAX = 70
NESTING_MAX = 4
BANNED_IN_CORE = {"open", "print", "input", "eval", "exec", "id", "hash", "globals", "set_trace"}
BANNED_ANYWHERE = {"eval", "exec"}
BANNED_MODULES = {"pickle", "marshal", "shelve", "torch"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def calls(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def depth(node: ast.AST) -> int:
    """Levels of control flow inside `node`."""
    nests = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.AsyncFor, ast.AsyncWith, ast.Match)
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        below = depth(child)
        is_elif = isinstance(node, ast.If) and child in node.orelse and isinstance(child, ast.If)
        deepest = max(deepest, below + (isinstance(child, nests) and not is_elif))
    return deepest


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_are_short_and_flat(path: Path) -> None:
    """No function is longer than 70 lines or nested deeper than the limit."""
    for function in functions(path):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        assert lines <= FUNCTION_LINES_MAX, f"{name_of(path)}:{function.lineno} {function.name} has {lines} lines"
        assert depth(function) <= NESTING_MAX, f"{name_of(path)}:{function.lineno} {function.name} nests too deep"


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_core_calls_nothing_impure(path: Path) -> None:
    """The core makes no call whose result is not decided by its arguments."""
    assert not calls(path) & BANNED_IN_CORE


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_loads_code_from_data(path: Path) -> None:
    """No pickle, eval or torch anywhere; the mutants of the simulator compile our own source and say so."""
    allowed = {"exec"} if path.name == "mutants.py" else set()
    assert not calls(path) & (BANNED_ANYWHERE - allowed)
    fixture_makers = {
        "make_export_fixtures.py",
        "make_encoder_fixtures.py",
        "make_exporter_fixtures.py",
        "make_gemma3_goldens.py",
        "make_minilm_goldens.py",
        "make_smollm2_goldens.py",
        "make_sampling_goldens.py",
    }
    assert not imports(path) & BANNED_MODULES or path.name in fixture_makers


def test_generated_stubs_are_current(tmp_path: Path) -> None:
    """The committed stubs are what the generator makes of protos/ today."""
    subprocess.run(
        [ROOT / "tools/gen_protos", tmp_path], check=True, env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    )
    fresh = sorted((tmp_path / "resident/v1").iterdir())
    assert len(fresh) == 8
    for path in fresh:
        committed = ROOT / "daemon/resident/v1" / path.name
        assert committed.read_text() == path.read_text(), f"{path.name} is stale: run tools/gen_protos"


def test_readme_documents_every_configuration_key() -> None:
    """README's table has every key with its default, and no key that does not exist."""
    readme = (ROOT / "README.md").read_text()
    documented = dict(re.findall(r"^\| `([a-z_.]+)` \|[^|]*\|\s*`?([^|`]*?)`?\s*\|$", readme, re.MULTILINE))
    expected = {key: default for key, _, default in key_table()}
    assert documented == expected


def test_no_committed_file_carries_an_address_or_a_machine_path() -> None:
    """Locks are by name, version and hash; nothing names an index or a path of one machine."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    pattern = re.compile(r"(?:--index-url|--extra-index-url|files\.pythonhosted|pypi\.org)|/(?:root|home)/\w")
    for name in listed:
        path = ROOT / name
        if name == "tests/test_tidy.py" or not path.is_file():
            continue
        found = pattern.search(path.read_bytes().decode(errors="ignore"))
        assert not found, f"{name} contains {found.group(0)!r}" if found else ""
