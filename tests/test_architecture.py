"""Limits of the architecture: imports go downwards, the base install needs no torch, no file is a monster."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from seatrial.checks import catalog
from seatrial.config.schema import Config
from tests.paths import ROOT

SOURCES = sorted((ROOT / "src").rglob("*.py"))
PACKAGE = ROOT / "src" / "seatrial"
PACKAGES = {path.relative_to(PACKAGE).parts[0] for path in SOURCES}
EXAMPLES = PACKAGE / "cli" / "examples.py"


def test_imports_keep_the_contracts() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "3 kept, 0 broken" in done.stdout


@cache
def nodes(source: Path) -> list[ast.AST]:
    """Return all nodes of the syntax tree of a file."""
    return list(ast.walk(ast.parse(source.read_text())))


def test_nobody_above_bench_and_train_names_torch() -> None:
    """import-linter reads the imports of modules; this test reads import statements inside functions too."""
    imports = []
    for source in SOURCES:
        if source.relative_to(ROOT / "src" / "seatrial").parts[0] in ("bench", "train"):
            continue
        for node in nodes(source):
            if isinstance(node, ast.Import):
                imports += [(source.name, alias.name.partition(".")[0]) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                imports.append((source.name, node.module.partition(".")[0]))
    assert [each for each in imports if each[1] in ("torch", "numpy", "sklearn", "transformers")] == []


@pytest.mark.parametrize("package", sorted(PACKAGES - {"checks", "drill"}))
def test_a_check_declares_what_others_need_to_know_of_it(package: str) -> None:
    """No string names a check, or is the beginning of such names (``collectives.``); docstrings too.

    Settings may have the name of a check (``kubernetes.nodes``), and examples of the command line name checks.
    """
    groups = {name: getattr(group.annotation, "model_fields", ()) for name, group in Config.model_fields.items()}
    settings = {f"{group}.{name}" for group, names in groups.items() for name in names}
    checks = "|".join(re.escape(name) for name in set(catalog()) - settings)
    prefixes = {f"{name.partition('.')[0]}." for name in catalog()} - {f"{name}." for name in groups}
    named = re.compile(rf"(?<![\w.])(?:{checks})(?!\w)")
    found = [
        (path.name, node.lineno, node.value)
        for path in SOURCES
        if path.relative_to(PACKAGE).parts[0] == package and path != EXAMPLES
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value in prefixes or named.search(node.value)
    ]
    assert found == []


def test_only_shell_starts_processes() -> None:
    callers = [path.name for path in SOURCES if "import subprocess" in path.read_text()]
    assert callers == ["processes.py"]


def test_only_signals_sets_signal_handlers() -> None:
    callers = [path.name for path in SOURCES if "signal.signal(" in path.read_text()]
    assert callers == ["signals.py"]


def test_the_command_line_is_instant() -> None:
    """At least one of 20 imports takes less than 300 ms of CPU time; other load of the machine slows the others."""
    code = "import time; t = time.process_time(); import seatrial.cli.app; print(time.process_time() - t)"
    times = (
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(20)
    )
    assert any(taken < 0.300 for taken in times)


def test_the_command_line_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, seatrial.cli.app; sys.exit(bool({'torch', 'transformers', 'numpy', 'jinja2'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_functions_and_files_are_readable_in_one_go() -> None:
    definitions = (node for path in SOURCES for node in nodes(path))
    functions = [node for node in definitions if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert max((function.end_lineno or function.lineno) - function.lineno + 1 for function in functions) <= 100
    assert max(path.read_text().count("\n") for path in SOURCES) <= 800
