"""deploy/docker, deploy/apptainer: rules of hadolint and shellcheck, and agreement with pyproject.toml and each other.

Images are not built here; docs/results has the transcript of a build.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.paths import ROOT

BIN = Path(sys.executable).parent
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
DEFINITION = ROOT / "deploy/apptainer/seatrial.def"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def stages() -> dict[str, tuple[str, str]]:
    """The base and the instructions of each stage of the Dockerfile, by its name."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    found = re.findall(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    return {name: (base, body) for base, name, body in found}


def sections() -> dict[str, str]:
    """The sections of the definition file; its header is section ``header``."""
    parts = re.split(r"^%(\w+)\n", DEFINITION.read_text(), flags=re.MULTILINE)
    return {"header": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def installed(text: str) -> list[str]:
    """The extras of seatrial that ``pip install`` installs in a stage or section."""
    (requirement,) = re.findall(r"pip install .* ['\"]?(?:/src|\.)(\[\S+\])?['\"]?\s*$", text, re.MULTILINE)
    return str(requirement).strip("[]").split(",")


def default_base(text: str) -> str:
    (base,) = re.findall(r"^(?:ARG |\s+)BASE=(\S+)$", text, re.MULTILINE)
    return str(base)


def test_hadolint_has_no_objection() -> None:
    done = subprocess.run([BIN / "hadolint", DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("script", ["setup.sh", "%post"])
def test_shellcheck_has_no_objection(script: str, tmp_path: Path) -> None:
    path = ROOT / "tools/setup.sh"
    if script == "%post":
        path = tmp_path / "post.sh"
        path.write_text("#!/bin/sh\n" + sections()["post"])
    done = subprocess.run([BIN / "shellcheck", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_of_the_judge_has_no_extra() -> None:
    assert installed(stages()["judge-venv"][1]) == [""]
    assert re.findall(r"--from=(\S+)", stages()["judge"][1]) == ["judge-venv"]


def test_images_of_docker_and_apptainer_have_the_same_packages() -> None:
    extras = installed(stages()["full-venv"][1])
    assert set(extras) <= PROJECT["optional-dependencies"].keys()
    assert installed(sections()["post"]) == extras
    system = re.compile(r'"\$@" ([a-z0-9 -]+)|install -y --no-install-recommends ([a-z0-9 -]+);')
    apt = [{name for match in system.findall(text) for name in " ".join(match).split()} for text in texts_of_full()]
    assert apt[0] == apt[1]
    assert {"ibverbs-providers", "perftest", "gcc"} < apt[0]


def texts_of_full() -> list[str]:
    return [stages()["base"][1] + stages()["full"][1], sections()["post"]]


def test_both_have_the_same_base_of_a_supported_python() -> None:
    base = default_base(DOCKERFILE.read_text())
    assert default_base(sections()["arguments"]) == base
    assert "From: {{ BASE }}" in sections()["header"]
    assert stages()["base"][0] == "${BASE}"
    versions = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert re.findall(r":(3\.\d+)-slim", base)[0] in versions


@pytest.mark.parametrize("name", ["judge", "full"])
def test_an_image_has_labels_and_no_rights_of_root(name: str) -> None:
    body = stages()[name][1]
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', body))
    assert labels.keys() == {"title", "description", "licenses", "version", "revision"}
    assert labels["licenses"] == PROJECT["license"]
    assert re.findall(r"^USER (\S+)", body, re.MULTILINE)[-1] == "65532:65532"
    assert re.findall(r"^ENTRYPOINT (.*)", body, re.MULTILINE) == ['["seatrial"]']


def test_the_stage_of_the_tests_runs_them() -> None:
    base, body = stages()["test"]
    assert base == "full"
    assert re.search(r"^RUN make .*\btest && ", body, re.MULTILINE)


def test_files_of_the_definition_exist() -> None:
    sources = [line.split()[0] for line in sections()["files"].splitlines() if line.strip()]
    assert {"pyproject.toml", "constraints.txt", "src", PROJECT["readme"]} == set(sources)
    assert all((ROOT / source).exists() for source in sources)


def test_what_git_ignores_is_not_sent_to_the_builder() -> None:
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()} - {"wheelhouse*"}
    sent = {line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().split()}
    assert ignored | {".git"} == sent, "images are built from the wheels of wheelhouse/, where there is no network"
