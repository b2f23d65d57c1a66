"""What the documents say is true: they are followed here."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.checks import catalog
from seatrial.checks.fabric._collective import CollectiveOptions
from seatrial.config.layers import CheckSchema, resolve
from tests.paths import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(document: Path, language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", document.read_text(), re.DOTALL)
    assert found, f"{document} has no {language} block"
    return found


def test_following_add_a_check_adds_a_check(tmp_path: Path) -> None:
    guide = ROOT / "docs" / "add-a-check.md"
    shutil.copytree(ROOT / "src" / "seatrial", tmp_path / "seatrial", ignore=shutil.ignore_patterns("__pycache__"))
    check, test = blocks(guide, "python")
    (tmp_path / "seatrial" / "checks" / "host" / "processes.py").write_text(check)
    (tmp_path / "test_host_processes.py").write_text(test)
    (tmp_path / "mine.yaml").write_text(blocks(guide, "yaml")[0])
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-m", "seatrial", "run", "mine.yaml"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "host.processes" in done.stdout
    assert "PASS" in done.stdout
    listed = subprocess.run(
        [sys.executable, "-m", "seatrial", "checks"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert "Room for processes" in listed.stdout
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_host_processes.py"]
    tested = subprocess.run(pytest_run, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert "2 passed" in tested.stdout, tested.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_pick_checks_that_their_trial_has(document: Path) -> None:
    known = {name: CheckSchema(check.options, check.metrics) for name, check in catalog().items()}
    for trial, options in re.findall(r"seatrial run ([a-z-]+) (--only [^\n`#]+)", document.read_text()):
        has = resolve(trial, environ={}, schemas=known).config.checks
        for pattern in ",".join(re.findall(r"--only (\S+)", options)).split(","):
            assert fnmatch.filter(has, pattern), f"{document.name}: {trial} has no {pattern}"


def test_the_readme_names_every_word_outcome_and_exit_code() -> None:
    text = (ROOT / "README.md").read_text()
    for word in ("run", "discover", "checks", "render", "judge", "report", "explain", "schema"):
        assert f"seatrial {word}" in text, word
    for outcome in ("PASS", "WARN", "FAIL", "SKIP", "UNJUDGED", "ERROR", "ACCEPTED", "REJECTED", "INCOMPLETE"):
        assert outcome in text
    for target in ("make trial", "make test"):
        assert target in text
        assert re.search(rf"^{target.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_options_of_collectives_are_as_they_are_shown(tmp_path: Path) -> None:
    shown = tmp_path / "shown.yaml"
    shown.write_text(blocks(ROOT / "docs" / "collectives.md", "yaml")[0])
    known = {name: CheckSchema(check.options, check.metrics) for name, check in catalog().items()}
    options = resolve(str(shown), environ={}, schemas=known).config.checks["collectives.all_gather"].options
    assert CollectiveOptions.model_validate(options).sizes == tuple(2**power for power in range(3, 34))
