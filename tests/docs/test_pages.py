"""The pages of docs/: their commands are run, options exist, links lead to a heading, and they form a site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from tools.docs_site import generated_pages

from seatrial.checks import catalog
from seatrial.cli.app import app
from seatrial.launch.site_folder import _WORKLOADS
from tests.docs.console import COMMAND_LANGUAGES, blocks, run_here
from tests.paths import ROOT

DOCS = ROOT / "docs"
FENCED = re.compile(r"^ *```.*?^ *```", re.M | re.S)
PAGES = sorted(DOCS.rglob("*.md"))
README = ROOT / "README.md"
RUN_HERE = [page for page in [README, *PAGES] if any(block.marker == "run" for block in blocks(page))]


def name(page: Path) -> str:
    return os.path.relpath(page, DOCS)


@pytest.mark.parametrize("page", RUN_HERE, ids=name)
def test_commands_give_the_shown_output(page: Path, tmp_path: Path) -> None:
    for folder in ("benchmarks", "configs", "deploy", "docs", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    run_here(blocks(page), tmp_path)


def test_commands_are_run_or_the_page_says_why_not() -> None:
    unmarked = [
        f"{name(page)}: {block.text.splitlines()[0]}"
        for page in PAGES
        for block in blocks(page)
        if block.language in COMMAND_LANGUAGES and not block.marker
    ]
    assert unmarked == [], (
        "before each block: <!-- run -->, another marker of tests/docs/console.py, or <!-- not run: WHY -->"
    )


def test_commands_and_their_options_exist() -> None:
    options = _options_of_commands()
    wrong = []
    for page in [README, *PAGES]:
        for line in _lines_of_code(page):
            for words in re.findall(r"(?:^|[ /(])seatrial ([a-z][^|>;&#`]*)", line):
                command = next((known for known in options if f"{words} ".startswith(f"{known} ")), None)
                used = re.findall(r"(?<![\w'-])--?[a-z][\w-]*", re.sub(r"'[^']*'", "", words))
                if command is None or not set(used) <= options[command]:
                    wrong.append(f"{page.name}: seatrial {words}")
    assert wrong == []


def test_links_lead_to_headings() -> None:
    broken = [
        f"{name(page)}: {path}#{anchor}"
        for page in PAGES
        for path, anchor in re.findall(r"\]\(([^):#]*)#([^)]+)\)", page.read_text())
        if anchor not in _anchors((page.parent / path).resolve() if path else page)
    ]
    assert broken == []


def test_the_pages_form_a_site(tmp_path: Path) -> None:
    """Strict: each page is in the navigation or a listed folder, each link leads to a page and heading of the site."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {name(page): page.read_text() for page in PAGES} | generated_pages()
    misread = [page for page, text in pages.items() if _html(page, tmp_path).count("<pre>") not in _code_blocks(text)]
    assert misread == [], "code blocks of the page and of the site differ: a list item or a fence has another indent"
    assert max(map(len, generated_pages().values())) < 100_000


def _code_blocks(text: str) -> range:
    """The possible numbers of code blocks: those with fences, and code by indent, of which several can be one block."""
    fenced = len(re.findall(r"^ *```", text, re.M)) // 2
    return range(fenced, fenced + len(re.findall(r"\n\n {4,}\S", re.sub(FENCED, "", text))) + 1)


def _html(page: str, site: Path) -> str:
    path = (site / page).with_suffix(".html")
    return (path.with_name("index.html") if path.stem == "README" else path).read_text()


def _lines_of_code(page: Path) -> Iterator[str]:
    """The commands of the code blocks of a page, and its inline code."""
    for block in blocks(page):
        if block.language == "console":
            yield from (command for command, _ in block.commands())
        elif block.language in COMMAND_LANGUAGES:
            yield from block.text.replace("\\\n", " ").splitlines()
    yield from (" ".join(code.split()) for code in re.findall(r"`(seatrial [^`]+)`", page.read_text()))


def _options_of_commands() -> dict[str, set[str]]:
    """The options of each command, such as "run" and "baseline learn", with the longest names first."""
    commands: dict[str, Any] = {}
    groups = [("", typer.main.get_command(app))]
    while groups:
        prefix, group = groups.pop()
        for name, command in getattr(group, "commands", {}).items():
            commands[f"{prefix}{name}"] = command
            groups.append((f"{prefix}{name} ", command))
    return {
        name: {"-h", "--help", *(option for parameter in commands[name].params for option in _names(parameter))}
        for name in sorted(commands, key=len, reverse=True)
    }


def _names(parameter: Any) -> list[str]:
    return [*parameter.opts, *parameter.secondary_opts]


def test_coverage_names_checks_and_jobs_that_exist() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?)? ?\| ?(.+?)? ?\|$", (DOCS / "coverage.md").read_text(), re.M)
    rows = [row for row in rows if row[0] not in ("task", "---")]
    assert [task for task, command, page in rows if not page and command != "not available"] == []
    code = {name for _, command, _ in rows for name in re.findall(r"`([^`]+)`", command)}
    assert {
        name
        for name in code
        if re.fullmatch(r"[a-z]+\.[a-z_]+", name)
        and not name.endswith((".yml", ".json", ".jsonl", ".html", ".txt", ".sh"))
    } - set(catalog()) == set()
    jobs = {f"jobs/{workload.name}.sbatch" for workload in _WORKLOADS}
    assert {name for name in code if name.startswith("jobs/")} <= jobs


@cache
def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes from the headings of a page."""
    headings = re.findall(r"^#+ (.+?)$", re.sub(FENCED, "", page.read_text()), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
