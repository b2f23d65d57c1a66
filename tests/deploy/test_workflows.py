""".github: schemas, security findings, pinned actions, shell scripts; the steps of accept-cluster.yml are executed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.release_notes import release_notes

from tests.paths import ROOT
from tests.processes import HOST_ONLY

GITHUB = ROOT / ".github"
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in sorted((GITHUB / "workflows").glob("*.yml"))}
CALLER = re.search(r"```yaml\n(.*?)```", (ROOT / "docs/ci.md").read_text(), re.DOTALL)
BIN = Path(sys.executable).parent


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN / name, *arguments], capture_output=True, text=True, check=False)


def steps(workflow: str) -> list[dict[str, Any]]:
    return [step for job in WORKFLOWS[workflow]["jobs"].values() for step in job.get("steps", [])]


@pytest.fixture
def caller(tmp_path: Path) -> Path:
    """The workflow of docs/ci.md that calls accept-cluster.yml, as a file."""
    assert CALLER
    path = tmp_path / ".github/workflows/caller.yml"
    path.parent.mkdir(parents=True)
    path.write_text(CALLER[1])
    return path


def test_workflows_match_the_schema(caller: Path) -> None:
    files = [*sorted((GITHUB / "workflows").iterdir()), caller]
    checked = tool("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *files)
    assert checked.returncode == 0, checked.stdout
    checked = tool("check-jsonschema", "--builtin-schema", "vendor.dependabot", GITHUB / "dependabot.yml")
    assert checked.returncode == 0, checked.stdout


def test_zizmor_has_no_findings(caller: Path) -> None:
    checked = tool("zizmor", "--offline", "--pedantic", "--strict-collection", "--format=json-v1", GITHUB, caller)
    findings = [(finding["ident"], finding["desc"]) for finding in json.loads(checked.stdout or "[]")]
    assert (checked.returncode, findings) == (0, []), checked.stderr


def test_the_tools_reject_a_bad_workflow(tmp_path: Path) -> None:
    bad = tmp_path / ".github/workflows/bad.yml"
    bad.parent.mkdir(parents=True)
    bad.write_text(
        "on: pull_request_target\njobs:\n  a:\n    runs-on: ubuntu-24.04\n    step:\n"
        "    steps:\n    - uses: actions/checkout@v4\n    - run: echo ${{ github.head_ref }}\n"
    )
    assert tool("check-jsonschema", "--builtin-schema", "vendor.github-workflows", bad).returncode == 1
    found = tool("zizmor", "--offline", "--format=json-v1", bad)
    assert {"unpinned-uses", "template-injection"} <= {finding["ident"] for finding in json.loads(found.stdout)}


def test_each_action_is_pinned_by_one_commit_with_its_version() -> None:
    pins: dict[str, set[str]] = {}
    for path in (GITHUB / "workflows").iterdir():
        for line in path.read_text().splitlines():
            if "uses:" in line:
                pinned = re.fullmatch(r"\s+(?:- )?uses: ([\w/-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)", line)
                assert pinned, line
                pins.setdefault(pinned[1], set()).add(f"{pinned[2]} {pinned[3]}")
    assert len(pins) >= 11
    assert {name: versions for name, versions in pins.items() if len(versions) > 1} == {}


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_scripts_of_steps_pass_shellcheck(workflow: str, tmp_path: Path) -> None:
    scripts = [step["run"] for step in steps(workflow) if "run" in step]
    for number, script in enumerate(scripts):
        (tmp_path / f"{number}.sh").write_text(f"#!/bin/bash\nset -eo pipefail\n{script}")
    if scripts:
        checked = tool("shellcheck", "--exclude", "SC2153", *tmp_path.iterdir())  # variables that `env` sets
        assert checked.returncode == 0, checked.stdout


def test_commands_of_steps_exist() -> None:
    """Targets of make, files and tools of the repository that steps use."""
    text = "\n".join(step.get("run", "") for workflow in WORKFLOWS for step in steps(workflow))
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make ([\w-]+)$", text, re.MULTILINE)
    assert targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
    files = re.findall(r"(?:^|\s)((?:\.ci|tools|\.github)/[\w./-]+)", text)
    assert {".ci/run", "tools/release_notes.py"} <= set(files)
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_images_are_stages_of_the_dockerfile() -> None:
    image = WORKFLOWS["image.yml"]["jobs"]
    builds = [step["with"] for step in steps("image.yml") if "docker/build-push-action" in step.get("uses", "")]
    assert {build["target"] for build in builds} == {"test", "${{ matrix.target }}"}
    targets = {"test", *(entry["target"] for entry in image["push"]["strategy"]["matrix"]["include"])}
    for build in builds:
        stages = re.findall(r"^FROM .+ AS (\S+)$", (ROOT / build["file"]).read_text(), re.MULTILINE)
        assert targets <= set(stages)
    assert image["push"]["needs"] == "test"


def test_release_requirements_are_pinned_by_hash() -> None:
    lines = (GITHUB / "release-requirements.txt").read_text().splitlines()[1:]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    (twine,) = [line for line in lines if line.startswith("twine==")]
    assert int(twine.removeprefix("twine==").split(".")[0]) >= 7  # trusted publishing: since 6.1


CHANGELOG = (
    "# Changelog\n\n## 0.2.0 (2026-12-01)\n\n- second\n\n### Part\n\n- more\n\n## 0.1.0 (unreleased)\n\n- first\n"
)


def test_release_notes_are_the_section_of_the_version() -> None:
    assert release_notes("v0.2.0", CHANGELOG, "0.2.0") == "- second\n\n### Part\n\n- more\n"


@pytest.mark.parametrize(
    ("tag", "changelog", "version", "problem"),
    [
        ("v0.2.0", CHANGELOG, "0.3.0", "the tag must be v0.3.0"),
        ("v0.1.0", CHANGELOG, "0.1.0", "no heading '## 0.1.0"),  # no date yet
        ("v0.2.0", "## 0.2.0 (2026-12-01)\n\n## 0.1.0 (2026-11-01)\n- x\n", "0.2.0", "is empty"),
    ],
)
def test_a_release_without_notes_is_refused(tag: str, changelog: str, version: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        release_notes(tag, changelog, version)


def accept(tmp_path: Path, trial: str, **environment: str) -> tuple[list[int], str, str]:
    """Exit codes of the two scripts of accept-cluster.yml, run as GitHub runs them; their output and summary."""
    job = WORKFLOWS["accept-cluster.yml"]["jobs"]["accept"]
    (tmp_path / "trial.yaml").write_text(trial)
    output, summary, run = tmp_path / "output", tmp_path / "summary", tmp_path / "run"
    env = {
        **os.environ,
        "SEATRIAL": str(BIN / "seatrial"),
        "RUN": str(run),
        "TRIAL": "trial.yaml",
        "LAUNCHER": "local",
        "NODES": "1",
        "GPUS_PER_NODE": "0",
        "ARGUMENTS": "",
        "GITHUB_OUTPUT": str(output),
        "GITHUB_STEP_SUMMARY": str(summary),
        "RUNNER_TEMP": str(tmp_path),
        **environment,
    }
    declared = set(job["env"]) | set(job["steps"][0]["env"])
    assert declared == {"SEATRIAL", "RUN", "TRIAL", "LAUNCHER", "NODES", "GPUS_PER_NODE", "ARGUMENTS"}
    codes = []
    for number, step in enumerate(job["steps"][:2]):
        script = tmp_path / f"{number}.sh"
        script.write_text(step["run"])
        bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]  # GitHub's command for shell: bash
        codes.append(subprocess.run(bash, cwd=tmp_path, env=env, capture_output=True, check=False).returncode)
    texts = [path.read_text() if path.exists() else "" for path in (output, summary)]
    return codes, texts[0], texts[1]


def test_an_accepted_cluster_passes_and_arguments_are_kept_apart(tmp_path: Path) -> None:
    codes, output, summary = accept(tmp_path, HOST_ONLY, ARGUMENTS="--set\n\ndescription=two words; exit 1\n")
    assert (codes, output) == ([0, 0], "decision=ACCEPTED\n")
    assert "ACCEPTED" in summary
    assert json.loads((tmp_path / "run/trial.json").read_text())["config"]["description"] == "two words; exit 1"


# run TRIAL --launcher L --nodes N --gpus-per-node G --out RUN [--dry-run], and judge RUN --format markdown
FAKE = """#!/bin/bash
case "$1 $3 $5 $7 $9" in
"run --launcher --nodes --gpus-per-node --out")
    if [ "${11}" = --dry-run ]; then exit 0; fi
    mkdir "${10}"
    echo '{"decision": {"value": "DECISION"}}' > "${10}/trial.json"
    exit CODE ;;
"judge --format   ") echo DECISION ;;
*) exit 64 ;;
esac
"""


@pytest.mark.parametrize(
    ("decision", "code", "environment", "codes", "output"),
    [
        ("REJECTED", 1, {}, [1, 1], "decision=REJECTED\n"),
        ("INCOMPLETE", 3, {}, [3, 1], "decision=INCOMPLETE\n"),
        ("REJECTED", 0, {}, [0, 1], "decision=REJECTED\n"),  # the record decides
        ("ACCEPTED", 0, {"ARGUMENTS": "--dry-run"}, [0, 1], ""),  # exit code 0 without a record
        ("ACCEPTED", 0, {"SEATRIAL": "/no/such/seatrial"}, [127, 1], ""),
    ],
)
def test_anything_else_fails(
    tmp_path: Path, decision: str, code: int, environment: dict[str, str], codes: list[int], output: str
) -> None:
    fake = tmp_path / "seatrial"
    fake.write_text(FAKE.replace("DECISION", decision).replace("CODE", str(code)))
    fake.chmod(0o755)
    assert accept(tmp_path, HOST_ONLY, **{"SEATRIAL": str(fake), **environment})[:2] == (codes, output)
