"""The documents are followed: commands, links, code and options."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools import drills_page, metrics_page

from seatrial.checks import catalog
from seatrial.checks.fabric._sizes import CollectiveOptions
from seatrial.cli.examples import EXAMPLES
from seatrial.config.layers import resolve
from seatrial.drill import catalog as drills
from seatrial.model import DecisionValue, Outcome
from tests.paths import ROOT

FOLDERS = [ROOT / "docs", ROOT / "deploy"]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(page for f in FOLDERS for page in f.rglob("*.md"))]


def blocks(document: Path, language: str) -> list[str]:
    code = re.findall(rf"```{language}\n(.*?)```", document.read_text(), re.DOTALL)
    assert code, f"{document} has no {language} block"
    return code


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)  # a log line may look like a link
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_pick_checks_that_their_trial_has(document: Path) -> None:
    known = catalog()
    for trial, options in re.findall(r"seatrial run ([a-z-]+) (--only [^\n`#]+)", document.read_text()):
        has = resolve(trial, environ={}, schemas=known).config.checks
        for pattern in ",".join(re.findall(r"--only '?([^\s']+)", options)).split(","):
            assert fnmatch.filter(has, pattern), f"{document.name}: {trial} has no {pattern}"


def test_every_command_is_on_a_page_and_every_outcome_on_that_of_verdicts() -> None:
    pages = "".join(document.read_text() for document in DOCUMENTS)
    for command in EXAMPLES:
        assert f"seatrial {command}" in pages or command in ("seatrial", "schema"), command
    text = (ROOT / "docs" / "verdicts.md").read_text()
    for name in (*Outcome, *DecisionValue):
        assert f"| {name} |" in text


def test_the_readme_is_one_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 100
    assert len(re.findall(r"^\| --- ", text, re.MULTILINE)) <= 2
    for decision in DecisionValue:
        assert decision in text
    for target in ("make trial", "make test"):
        assert target in text
        assert re.search(rf"^{target.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_options_of_collectives_are_as_they_are_shown(tmp_path: Path) -> None:
    shown = tmp_path / "shown.yaml"
    shown.write_text(blocks(ROOT / "docs" / "collectives.md", "yaml")[0])
    known = catalog()
    options = resolve(str(shown), environ={}, schemas=known).config.checks["collectives.all_gather"].options
    assert CollectiveOptions.model_validate(options).sizes == tuple(2**power for power in range(3, 34))


def test_every_declared_metric_is_on_the_page_with_its_meaning() -> None:
    shown = set()
    for section in metrics_page.pages()["metrics.md"].split("\n## ")[1:]:
        checks, *lines = section.splitlines()
        for names, _, meaning, _ in (line.split(" | ") for line in lines if line.startswith("| `")):
            shown |= {
                (check, name, meaning) for check in checks.split(", ") for name in re.findall(r"`([^`]+)`", names)
            }
    declared = {(check.name, each.name, each.meaning) for check in catalog().values() for each in check.declared}
    assert shown == declared
    assert all(meaning for _, _, meaning in declared)


def test_the_example_of_a_signature_of_a_site_works(tmp_path: Path) -> None:
    (example,) = blocks(ROOT / "docs" / "explain.md", "yaml")
    (tmp_path / "site.yaml").write_text(example)
    log = "bb: stage-in of vol7 failed\nNVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
    done = subprocess.run(
        [sys.executable, "-m", "seatrial", "explain", "-", "--json"],
        env={**os.environ, "SEATRIAL_SIGNATURES": str(tmp_path)},
        input=log,
        capture_output=True,
        text=True,
        check=True,
    )
    site, xid = json.loads(done.stdout)
    assert site["first_command"] == "bbctl status vol7"
    assert (xid["action"], xid["title"][:6]) == ("replace-hardware", "Xid 79")


def drill_results() -> drills_page.Document:
    return drills_page.Document.model_validate_json(drills_page.RESULTS.read_bytes())


def test_results_of_drills_are_of_drills_that_exist() -> None:
    unknown = {row.name for row in drill_results().drills} - set(drills())
    assert not unknown, "results of drills that do not exist"


def test_results_of_drills_are_merged_by_name(tmp_path: Path) -> None:
    document = drill_results()
    ran = document.drills[0].model_copy(update={"seconds": 77.0})
    could_not = document.drills[0].model_copy(update={"could_not_run": "needs 2 GPUs"})
    for number, row in enumerate((ran, could_not)):
        (tmp_path / f"{number}.json").write_text(f"[{row.model_dump_json()}]")
    merged = drills_page.merged(document, [tmp_path / "0.json", tmp_path / "1.json"])
    assert merged.drills[0] == ran, "a drill that could not run elsewhere does not replace a result"
    assert len(merged.drills) == len(document.drills)
