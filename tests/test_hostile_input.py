"""Input that must not block, fill memory, run code or leave a trace: one message and the exit code."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from seatrial.model import DecisionValue
from seatrial.pipeline import benchmark_file
from seatrial.telemetry.files import TELEMETRY_FILE
from seatrial.util import input_files
from tests.pipeline.test_load_trial import record
from tests.processes import CPU_ONLY, HOST_ONLY, Program, call, load, run_host_only, until


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


def _large(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


FILES = {
    "judge": "trial.json",
    "baseline learn --out OUT": "trial.json",
    "judge RECORD --baseline": "site.yaml",
    "run --dry-run": "trial.yaml",
    "train run": "config.yaml",
    "run --resume": "run.json",
}


@pytest.mark.parametrize("make", [_device, _pipe, _folder, _large])
@pytest.mark.parametrize("command", FILES)
def test_file_that_cannot_be_read_to_its_end(command: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "trial.json").write_text(record())
    path = tmp_path / FILES[command]
    make(path)
    places = {"RECORD": str(tmp_path / "record"), "OUT": str(tmp_path / "out.yaml")}
    words = [places.get(word, word) for word in command.split()]
    code, out, err = call(*words, path.parent if command == "run --resume" else path)
    assert code == 2, (out, err)
    assert str(path) in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("make", [_device, _folder])
def test_log_that_cannot_be_read_to_its_end(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "x.log")
    assert call("explain", tmp_path / "x.log")[0] == 2


@pytest.mark.parametrize("command", ["explain", "judge"])
def test_pipe_without_a_writer(command: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.log")
    code, out, err = call(command, tmp_path / "x.log")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"cannot read {tmp_path / 'x.log'}" in err
    assert "no process writes" in err


@pytest.mark.parametrize("command", ["explain", "judge"])
def test_endless_standard_input(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "MAX_PIPE_BYTES", 2**22)
    monkeypatch.setattr(benchmark_file, "_MAX_TEXT", 2**23)  # 65,536 short lines, before the limit of bytes
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as yes:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=yes.stdout))
        code, _, err = call(command, "-")
        yes.kill()
    assert (code, len(err.splitlines())) == (2, 1)
    assert ("does not end within" if command == "explain" else "larger than the limit") in err


LAUGHS = "a: &a [x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("text", ["name: " + "[" * 5_000, LAUGHS, "name: &a [*a]", "- " * 5_000, "x: 2024-99-99"])
def test_hostile_baseline(text: str, tmp_path: Path) -> None:
    (tmp_path / "trial.json").write_text(record())
    (tmp_path / "site.yaml").write_text(text)
    code, out, err = call("judge", tmp_path, "--baseline", tmp_path / "site.yaml")
    assert code == 2, (out, err)
    assert f"seatrial: {tmp_path / 'site.yaml'}: not valid YAML" in err
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a passing trial with telemetry."""
    return run_host_only(tmp_path_factory.mktemp("finished"), CPU_ONLY + "checks: {host.inventory: }\n")[0]


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A copy of the directory of a passing run."""
    return shutil.copytree(finished, tmp_path / "out")


NO_JSON = (
    '{"measurement": {"check": "host.inventory", "subject": "x", "rank": 0, "facts": {"a": NaN}}}',
    '{"measurement": {"check": "host.inventory", "subject": "x", "rank": 0, "seconds": Infinity}}',
    '{"measurement": {"check": "host.inventory", "subject": "x", "rank": 0, "seconds": 1e999}}',
    '{"measurement": ' + '{"facts":' * 100_000,
)


def test_records_of_a_rank_that_are_no_json_are_ignored(out: Path) -> None:
    journal = out / "measurements.jsonl"
    kept = [text for text in journal.read_text().splitlines() if '"measurement"' not in text]
    journal.write_text("\n".join(kept) + "\n")
    (ranks,) = out.glob("jobs/*/attempt*/rank0.jsonl")
    ranks.write_text("\n".join(NO_JSON) + "\n")
    code, _, err = call("run", "--resume", out)
    assert code == 0, err
    for number in range(1, len(NO_JSON) + 1):
        assert f"{ranks}:{number}: damaged record ignored" in err.replace("\n", "")
    assert len(load(out).measurements) == 1, "measured again"


def test_gzip_bomb_as_telemetry(out: Path) -> None:
    (folder,) = out.glob("jobs/*/")
    with gzip.open(folder / TELEMETRY_FILE, "wb") as file:
        for _ in range(500):
            file.write(bytes(2**20))
    code, _, err = call("run", "--resume", out)
    assert code == 0, err
    assert "expands more than" in " ".join(err.split())


@pytest.mark.parametrize("share", range(50))
def test_truncated_record(share: int, tmp_path: Path) -> None:
    text = record()
    (tmp_path / "trial.json").write_text(text[: len(text) * share // 50])
    code, output, err = call("judge", tmp_path)
    assert (code, output) == (2, "")
    assert err.startswith(f"seatrial: {tmp_path / 'trial.json'} is damaged: ")
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"schema_version": "99"},
        {"schema_version": 2},
        {"schema_version": None},
        {"schema_version": ["2"]},
        {"note": "checked by hand"},
        {"verdicts": "PASS"},
        {"seconds": "soon"},
        {"decision": {"value": "GREAT", "reason": "", "tested_hardware": ""}},
        {"measurements": [{"check": "a", "subject": "b", "metrics": [{"name": "x", "value": None}]}]},
    ],
)
def test_record_of_another_version_or_edited_by_hand(changes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "trial.json").write_text(record(**changes))
    code, output, err = call("judge", tmp_path)
    assert (code, output) == (2, "")
    assert f"trial.json is not a trial.json of this version: {next(iter(changes))}" in err
    assert len(err.strip().splitlines()) == 1


SECRETS = {
    "HF_TOKEN": "hf_secretsecretsecret",
    "PROXY": "http://me:hunter2hunter2@proxy:8080",
    "DB_PASSWORD": "correct-horse-battery",
}


def test_secrets_are_only_where_the_job_needs_them(tmp_path: Path) -> None:
    trial, out = tmp_path / "host.yaml", tmp_path / "out"
    trial.write_text(HOST_ONLY)
    settings = [word for name, value in SECRETS.items() for word in ("--set", f"env.{name}={value}")]
    code, output, err = call("run", trial, *settings, "--dry-run")
    assert (code, _secrets_in(output + err)) == (0, set())
    code, output, err = call("run", trial, *settings, "--out", out)
    assert (code, _secrets_in(output + err)) == (0, set())
    _check_files(out)
    (job,) = out.glob("jobs/*/job.json")
    (out / "measurements.jsonl").write_text((out / "measurements.jsonl").read_text().splitlines()[0] + "\n")
    job.unlink()
    for rank in out.glob("jobs/*/attempt*/rank0.jsonl"):
        rank.unlink()
    code, output, err = call("run", "--resume", out)
    assert (code, _secrets_in(output + err)) == (0, set())
    assert json.loads(job.read_text())["env"] == SECRETS, "the resumed job has the values"
    _check_files(out)
    for format in ("html", "json", "markdown", "junit", "prometheus"):
        assert not _secrets_in(call("judge", out, "--format", format)[1])
    assert load(out).config["env"]["PROXY"] == "http://REDACTED@proxy:8080"


def test_rendered_scripts_hide_secrets(tmp_path: Path) -> None:
    trial, out = tmp_path / "host.yaml", tmp_path / "out"
    trial.write_text(HOST_ONLY)
    settings = [word for name, value in SECRETS.items() for word in ("--set", f"env.{name}={value}")]
    for launcher in ("local", "slurm", "torchrun"):
        code, output, err = call("render", launcher, trial, "--gpus-per-node", "1", *settings)
        assert (code, _secrets_in(output)) == (0, set()), err
    assert call("render", "torchrun", trial, "--gpus-per-node", "1", *settings, "--out", out)[0] == 0
    (script,) = out.glob("jobs/*/torchrun.sh")
    assert _secrets_in(script.read_text()) == set(SECRETS), "this script is started by the user"
    assert script.stat().st_mode & 0o777 == 0o600


def _secrets_in(text: str) -> set[str]:
    forms = {**SECRETS, "PROXY": "hunter2hunter2"}
    return {name for name, value in forms.items() if value in text}


def _check_files(out: Path) -> None:
    found = {
        path.relative_to(out): path.stat().st_mode & 0o777
        for path in out.rglob("*")
        if path.is_file() and _secrets_in(path.read_text(errors="replace"))
    }
    assert {path.name for path in found} == {"run.json", "job.json", "job.sh"}
    assert set(found.values()) == {0o600}


def test_stopped_sampler_ends_with_the_run(tmp_path: Path) -> None:
    trial = tmp_path / "host.yaml"
    trial.write_text("telemetry: {hz: 5}\nchecks: {host.load: }\n")
    program = Program("run", trial, "--out", tmp_path / "out")
    sampler = until(lambda: _samplers(tmp_path / "out"))[0]
    sampler.send_signal(signal.SIGSTOP)
    code, _, err = program.finish()
    assert code in (0, 1, 3), err
    until(lambda: not _samplers(tmp_path / "out"))


def _samplers(out: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "seatrial.telemetry.sampler" in words and any(word.startswith(str(out)) for word in words):
            found.append(process)
    return found


def test_temporary_files_of_a_killed_report_are_removed(out: Path) -> None:
    (out / "trial.json").unlink()
    program = Program("run", "--resume", out, first=KILLED_BETWEEN_REPORTS)
    program.process.wait(120)
    assert sorted(path.name.partition(".incomplete-")[0] for path in out.glob("*.incomplete-*")) == [
        "figures.csv",
        "junit.xml",
        "metrics.prom",
        "report.html",
        "trial.json",
    ]
    code, _, err = call("run", "--resume", out)
    assert code == 0, err
    assert not list(out.rglob("*.incomplete-*"))
    assert load(out).decision.value is DecisionValue.ACCEPTED


KILLED_BETWEEN_REPORTS = """
import os, signal
from seatrial import report
from seatrial.util import files
stage = files.stage
def stage_and_die(path, *arguments, **options):
    staged = stage(path, *arguments, **options)
    if path.name == "report.html":
        os.kill(os.getpid(), signal.SIGKILL)
    return staged
files.stage = stage_and_die
"""
