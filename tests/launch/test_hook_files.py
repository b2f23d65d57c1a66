"""The files of hooks: golden files, schemas of their readers, shellcheck, and scripts that run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from seatrial.launch.hook_files import HookSite, render
from tests import paths

COMPLETE = HookSite(
    folder="/etc/seatrial/hooks",
    seatrial="/shared/venv/bin/seatrial",
    records="/var/log/seatrial/hook.jsonl",
    status="/var/log/seatrial/health.status",
    state_dir="/shared/seatrial",
    gpus_per_node=8,
    nodes=64,
    gpu_model="H200",
    soperator_tag="4.1.7",
)
SITES = {
    "complete": COMPLETE,
    "record-only": COMPLETE._replace(
        state_dir=None, gpus_per_node=None, nodes=None, gpu_model=None, soperator_tag="", fail_closed=True
    ),
}
SCHEMAS = {
    "npd/seatrial-health.json": "npd",
    "soperator/activecheck.yaml": "activecheck",
    "soperator/seatrial.sh.json": "soperator-check",
}


@pytest.mark.parametrize("name", SITES)
def test_files_match_golden_files(name: str) -> None:
    text = "".join(f"===== {path}\n{content}" for path, content in sorted(render(SITES[name]).items()))
    golden = paths.GOLDEN / "hook" / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def schema(name: str) -> Any:
    return yaml.safe_load((paths.ROOT / "tests/fixtures/hook" / f"{name}.yaml").read_text())


@pytest.mark.parametrize("path", SCHEMAS)
def test_the_schema_of_its_reader_accepts_the_file_and_refuses_another_field(path: str) -> None:
    document = yaml.safe_load(render(COMPLETE)[path])
    validator = jsonschema.Draft202012Validator(schema(SCHEMAS[path]))
    validator.validate(document)
    assert not validator.is_valid({**document, "unknown": 1})


def test_rules_of_node_problem_detector_beyond_its_schema() -> None:
    monitor = json.loads(render(COMPLETE)["npd/seatrial-health.json"])
    conditions = {condition["type"] for condition in monitor["conditions"]}
    for rule in monitor["rules"]:
        assert rule["condition"] in conditions
        assert int(rule["timeout"].rstrip("s")) <= int(monitor["pluginConfig"]["timeout"].rstrip("s"))


def test_values_of_helm_hold_the_same_script_and_configuration() -> None:
    files = render(COMPLETE)
    extra = yaml.safe_load(files["soperator/values.yaml"])["slurmScripts"]["extra"]["seatrial.sh"]
    assert json.loads(extra["config"]) == json.loads(files["soperator/seatrial.sh.json"])
    assert extra["content"].strip() == files["soperator/seatrial.sh"].strip()
    assert "{{" not in files["soperator/values.yaml"], "Helm renders both texts as templates"


def test_no_slurm_command_is_inside(tmp_path: Path) -> None:
    scripts = [text for name, text in render(COMPLETE).items() if name.endswith(".sh")]
    code_words = {
        word for text in scripts for line in text.splitlines() if not line.startswith("#") for word in line.split()
    }
    assert not code_words & {"scontrol", "squeue", "sinfo", "sacctmgr", "srun", "sacct"}


@pytest.mark.parametrize("name", SITES)
def test_shellcheck_accepts_the_scripts(name: str, tmp_path: Path) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    scripts = []
    for path, text in render(SITES[name]).items():
        if path.endswith(".sh"):
            scripts.append(tmp_path / path.replace("/", "-"))
            scripts[-1].write_text(text)
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    files = render(COMPLETE._replace(seatrial="/bin/true"))
    units = [tmp_path / name.removeprefix("systemd/") for name in files if name.startswith("systemd/")]
    for unit in units:
        unit.write_text(files[f"systemd/{unit.name}"])
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def run_script(
    tmp_path: Path, program: str, name: str = "prolog.sh", wait_s: int = 8, env: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Return exit code, output and descriptor 3 of a script that starts ``program``, a shell script, as seatrial."""
    seatrial = tmp_path / "seatrial"
    seatrial.write_text(f"#!/bin/sh\n{program}\n")
    seatrial.chmod(0o755)
    script = tmp_path / "script.sh"
    script.write_text(render(COMPLETE._replace(seatrial=str(seatrial), time_limit_s=wait_s))[name])
    argv = ["bash", "-c", f"sh {shlex.quote(str(script))} 3>&1 1>{shlex.quote(str(tmp_path / 'out'))} 2>&1"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False, env={**os.environ, **(env or {})})
    return done.returncode, (tmp_path / "out").read_text(), done.stdout


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="writes to /run, as root")


@needs_root
@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1), (2, 0), (3, 0), (126, 0), (137, 0)])
def test_only_exit_code_1_fails_a_prolog(code: int, expected: int, tmp_path: Path) -> None:
    returned, out, _ = run_script(tmp_path, f'echo "$@"; exit {code}')
    assert returned == expected
    assert out.split()[:4] == ["hook", "prolog", "--caller", "slurm"]


@needs_root
def test_a_seatrial_that_is_not_there_passes(tmp_path: Path) -> None:
    assert run_script(tmp_path, "exec /nonexistent/python")[0] == 0


@needs_root
def test_a_seatrial_that_does_not_start_ends_in_time_and_holds_no_output(tmp_path: Path) -> None:
    before = set(Path("/run").glob("seatrial-hook.*"))
    started = time.monotonic()
    code, out, _ = run_script(tmp_path, "trap '' TERM; exec sleep 60", wait_s=1)
    assert time.monotonic() - started < 30
    assert code == 0
    assert "no answer within 3 s" in out
    assert set(Path("/run").glob("seatrial-hook.*")) <= before


@needs_root
@pytest.mark.parametrize(("context", "kind"), [("prolog", "prolog"), ("epilog", "epilog"), ("hc_program", "health")])
def test_soperator_gets_the_detail_on_descriptor_3(context: str, kind: str, tmp_path: Path) -> None:
    program = 'echo "$@"; echo "seatrial 12ab: gpu3 is missing" >&3; exit 1'
    code, out, detail = run_script(tmp_path, program, "soperator/seatrial.sh", env={"CHECKS_CONTEXT": context})
    assert (code, detail) == (1, "seatrial 12ab: gpu3 is missing\n")
    assert out.split()[:4] == ["hook", kind, "--caller", "soperator"]


def plugin(tmp_path: Path, status: str | None, age_s: int = 0) -> tuple[int, str]:
    script, file = tmp_path / "npd.sh", tmp_path / "health.status"
    script.write_text(render(COMPLETE)["npd/seatrial-health.sh"])
    script.chmod(stat.S_IRWXU)
    if status is not None:
        file.write_text(status)
        os.utime(file, (time.time() - age_s,) * 2)
    done = subprocess.run([script, file], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_plugin_of_node_problem_detector_returns_the_last_result(code: int, tmp_path: Path) -> None:
    assert plugin(tmp_path, f"{code}\nseatrial 12ab: text\n") == (code, "seatrial 12ab: text")


@pytest.mark.parametrize(("status", "age_s"), [(None, 0), ("", 0), ("1\n", 0), ("x\ntext\n", 0), ("0\ntext\n", 1000)])
def test_the_plugin_says_unknown_without_a_recent_result(status: str | None, age_s: int, tmp_path: Path) -> None:
    assert plugin(tmp_path, status, age_s)[0] == 2
