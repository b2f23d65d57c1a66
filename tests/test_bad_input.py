"""Bad input to the real program: one message, the exit code, never ACCEPTED, no measurement lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from seatrial import report
from seatrial.model import DecisionValue, Outcome, Trial, UsageError
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial
from seatrial.report import FILES, FORMATS
from seatrial.util.journal import read, record_line
from tests.checks.host.mounts import CAN_MOUNT
from tests.processes import CPU_ONLY, HOST_ONLY, call, load, run, run_host_only
from tests.report import samples


@pytest.fixture
def trial(tmp_path: Path) -> Path:
    path = tmp_path / "host.yaml"
    path.write_text(HOST_ONLY)
    return path


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB that can be made read-only."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if not CAN_MOUNT:
        pytest.skip("mounting a small filesystem needs CAP_SYS_ADMIN")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", mount], check=True)
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a passing trial."""
    return run_host_only(tmp_path_factory.mktemp("accepted"))[0]


@pytest.fixture
def out(accepted: Path, tmp_path: Path) -> Path:
    """A copy of the passing run directory."""
    return shutil.copytree(accepted, tmp_path / "out")


def refused(*arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a command that must end with a usage error; return its message as one line."""
    return told_to_a_user(call(*arguments, env=env, cwd=cwd))


def told_to_a_user(ended: tuple[int, str, str]) -> str:
    code, out, err = ended
    assert code == 2, (code, out, err)
    assert "ACCEPTED" not in out + err
    assert "Traceback" not in err
    return err


def records(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines()]


@pytest.mark.parametrize("start", [run, call])
def test_missing_trial_file(start: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    assert "cannot read" in told_to_a_user(start("run", tmp_path / "nosuch.yaml"))


def test_malformed_trial_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("checks: {host.inventory: [}")
    assert f"{path}: not valid YAML" in refused("run", path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("checks: &a [*a]", "anchors and aliases"),
        ("checks: " + "[" * 10_000, "nested deeper than"),
        ("name: /../x\n" + HOST_ONLY, "name: "),
        ("limits: {heartbeat_timeout_s: .inf}\n" + HOST_ONLY, "limits.heartbeat_timeout_s"),
    ],
)
def test_hostile_trial_file_leaves_no_run_directory(tmp_path: Path, text: str, expected: str) -> None:
    """Other malformed files are in tests/config."""
    path = tmp_path / "hostile.yaml"
    path.write_text(text)
    err = refused("run", path, cwd=tmp_path)
    assert err.startswith(f"seatrial: {path}: ")
    assert expected in err
    assert list(tmp_path.iterdir()) == [path]


def test_an_unknown_check(tmp_path: Path) -> None:
    assert "did you mean 'host.inventory'" in refused("run", "quick", "--only", "host.inventori")


def test_unknown_option_and_command() -> None:
    assert "--nodse" in refused("run", "--nodse", "2")
    assert "explode" in refused("explode")


def test_out_folder_not_empty(trial: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("ten years of work")
    err = refused("run", trial, "--out", out)
    assert "not empty" in err
    assert "--resume" in err
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]


def test_out_is_a_file(trial: Path) -> None:
    assert "is a file" in refused("run", trial, "--out", trial)


def test_read_only_out_folder(trial: Path, tiny_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    assert "Read-only file system" in refused("run", trial, "--out", tiny_disk / "out")


def test_disk_full_at_start(trial: Path, tiny_disk: Path) -> None:
    _fill(tiny_disk, leave=0)
    assert "No space left on device" in refused("run", trial, "--out", tiny_disk / "out")


@pytest.mark.parametrize("leave", [12 << 10, 16 << 10, 40 << 10])
def test_disk_fills_up_during_the_run(trial: Path, tiny_disk: Path, leave: int) -> None:
    """No space for the job, the measurements or the reports: INCOMPLETE with the reason."""
    _fill(tiny_disk, leave=leave)
    out = tiny_disk / "out"
    code, output, err = call("run", trial, "--out", out)
    assert code == 3, (output, err)
    assert "INCOMPLETE" in output
    assert "No space left on device" in output + err
    assert "Traceback" not in err
    assert ("Report: " in output) == (out / "report.html").exists()
    (tiny_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", tiny_disk], check=True)
    code, output, err = call("run", "--resume", out)
    assert code == 0, (output, err)
    assert load(out).decision.value is DecisionValue.ACCEPTED


def test_corrupt_trial_json_names_the_next_step(out: Path) -> None:
    whole = (out / "trial.json").read_text()
    (out / "trial.json").write_text(whole[: len(whole) // 2])
    err = refused("judge", out)
    assert "trial.json is damaged" in err
    assert f"seatrial run --resume {out}" in err
    (out / "trial.json").write_text(json.dumps({**json.loads(whole), "schema_version": "99"}))
    assert "not a trial.json of this version: schema_version" in refused("judge", out)
    assert call("run", "--resume", out)[0] == 0
    assert call("judge", out)[0] == 0


def test_judge_of_another_file(tmp_path: Path) -> None:
    assert "is a directory without trial.json" in refused("judge", tmp_path)
    (tmp_path / "trial.json").write_bytes(b"\xff\xfe\x00")
    assert "is damaged" in refused("judge", tmp_path)


def test_resume_of_another_directory(tmp_path: Path) -> None:
    assert "--resume" in refused("run", "--resume", tmp_path)
    (tmp_path / "run.json").write_text("{}")
    assert "run.json has no matching measurements.jsonl" in refused("run", "--resume", tmp_path)
    assert "no other option" in refused("run", "--resume", tmp_path, "--nodes", "2")


def test_truncated_journal_loses_only_the_last_line(out: Path) -> None:
    journal = out / "measurements.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join(lines) + '\n{"measurement": {"chec')
    (out / "trial.json").unlink()
    code, _, err = call("run", "--resume", out)
    assert code == 0, err
    assert "measurements.jsonl:6: damaged record" in err
    assert len(load(out).measurements) == 1
    assert len(load(out).sessions) == 2
    assert [job.name for job in load(out).jobs] == ["nodes"]
    assert "start   job" not in err, "nothing was measured twice"


@pytest.mark.parametrize("damage", ["one byte", "cut", "missing"])
def test_changed_results_under_an_unchanged_manifest_are_found(out: Path, damage: str) -> None:
    manifest = load(out).manifest
    assert set(manifest) == {"measurements.jsonl", "jobs/nodes/attempt1/rank0.jsonl"}
    for name in manifest:
        file = out / name
        intact = file.read_bytes()
        at = intact.index(b'"subject": "') + 12
        file.write_bytes(intact[:at] + b"~" + intact[at + 1 :] if damage == "one byte" else intact[:-200])
        if damage == "missing":
            file.rename(out / "moved")
        with pytest.raises(UsageError, match=f"{file} is damaged"):
            load_trial(out)
        file.write_bytes(intact)
        assert load_trial(out).manifest == manifest
    copy = out.parent / "archive"
    copy.mkdir()
    shutil.copy(out / "trial.json", copy)
    assert load_trial(copy).manifest == manifest


@pytest.mark.parametrize("name", ["measurements.jsonl", "jobs/nodes/attempt1/rank0.jsonl"])
def test_resume_takes_a_damaged_measurement_from_the_other_journal(out: Path, name: str) -> None:
    before, file = load(out), out / name
    file.write_text(file.read_text().replace('"subject": "', '"subject": "~'))
    assert str(file) in refused("judge", out)
    code, _, err = call("run", "--resume", out)
    assert code == 0, err
    assert f"{file}:" in err.replace("\n", "")
    assert load(out).measurements == before.measurements
    assert load_trial(out).manifest != before.manifest
    assert call("judge", out)[0] == 0


def test_measurements_of_another_machine_are_repeated(out: Path) -> None:
    journal = out / "measurements.jsonl"
    here = socket.gethostname()
    saved = read(journal)[0]
    (machine,) = [record["machine"] for record in saved if "machine" in record]
    assert machine["host"] == here
    machine["host"] = "elsewhere"
    journal.write_text("".join(map(record_line, saved)))
    code, _, err = call("run", "--resume", out)
    assert code == 0, err
    assert f"machine changed from elsewhere to {here}" in err.replace("\n", " ")
    assert "start   job" in err
    first, second = (record["measurement"] for record in records(journal) if "measurement" in record)
    (kept,) = load(out).measurements
    assert (kept.started, kept.started > first["started"]) == (second["started"], True)


def test_changed_request_is_refused(out: Path) -> None:
    request = json.loads((out / "run.json").read_text())
    request["config"]["cluster"]["nodes"] = 4
    (out / "run.json").write_text(json.dumps(request))
    assert "run.json was changed" in refused("run", "--resume", out)


def test_record_with_missing_measurement_or_larger_cluster_is_not_accepted(out: Path) -> None:
    whole = json.loads((out / "trial.json").read_text())
    (out / "trial.json").write_text(json.dumps({**whole, "measurements": []}))
    assert call("judge", out)[0] == 3
    whole["config"]["cluster"]["nodes"] = 4
    (out / "trial.json").write_text(json.dumps(whole))
    code, output, _ = call("judge", out)
    assert code == 3
    assert "expected_nodes 1, expected 4 by cluster.nodes" in " ".join(output.split())


def test_expected_gpus_without_a_gpu_check_are_not_accepted(trial: Path, tmp_path: Path) -> None:
    code, output, _ = call("run", trial, "--gpus-per-node", "64", "--out", tmp_path / "out")
    assert code == 3
    assert "64 GPUs expected" in output


def test_damaged_record_is_reported_and_measured_again(out: Path) -> None:
    journal = out / "measurements.jsonl"
    lines = [line for line in journal.read_text().splitlines() if '"measurement"' not in line]
    damaged: list[dict[str, Any]] = [
        {"measurement": 5},
        {"discarded_checks": 7},
        {"result": []},
        {"machine": None},
        {"measurement": {}},
    ]
    journal.write_text("\n".join(lines) + "\n" + "".join(map(record_line, damaged)))
    for ranks in out.glob("jobs/*/attempt*/rank*.jsonl"):
        ranks.write_text(record_line({"measurement": "x"}))
    code, _, err = call("run", "--resume", out)
    assert code == 0, err
    assert err.count("damaged record ignored") == len(damaged)
    assert len(load(out).measurements) == 1


def test_excluded_check_is_never_accepted(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text("checks: {host.inventory: , gpu.inventory: }")
    for flags in (["--only", "host.*"], ["--skip", "gpu.inventory"]):
        code, output, _ = call("run", path, *flags, "--dry-run")
        assert code == 0
        assert f"# excluded by {flags[0]}: gpu.inventory" in output
    code, output, _ = call("run", path, "--skip", "gpu.inventory", "--out", tmp_path / "out")
    assert code == 3
    record = rejudge(load(tmp_path / "out"))
    assert record.decision.value is DecisionValue.INCOMPLETE
    assert record.excluded_checks == {"gpu.inventory": "--skip"}
    outcomes = {verdict.outcome for verdict in record.verdicts if verdict.check == "host.inventory"}
    assert outcomes <= {Outcome.PASS, Outcome.WARN, Outcome.SKIP}, "no other check fails"
    assert [verdict.outcome for verdict in record.verdicts if verdict.check == "gpu.inventory"] == [Outcome.SKIP]


def test_more_expected_gpus_than_installed(tmp_path: Path) -> None:
    path = tmp_path / "gpu.yaml"
    path.write_text("checks: {gpu.inventory: , nodes.reachable: }")
    out = tmp_path / "out"
    code, _, _ = call("run", path, "--gpus-per-node", "64", "--out", out)
    assert code == 1
    record = load(out)
    outcomes = {verdict.check: verdict.outcome for verdict in record.verdicts}
    assert outcomes["nodes.reachable"] is Outcome.ERROR, "never replaced by a run on the CPU"
    assert any("64 GPUs expected" in verdict.message for verdict in record.verdicts)


def test_cuda_visible_devices_with_unknown_gpu(tmp_path: Path) -> None:
    err = refused("run", "quick", "--out", tmp_path / "out", env={"CUDA_VISIBLE_DEVICES": "77"})
    assert "CUDA_VISIBLE_DEVICES" in err
    assert "77" in err
    assert not (tmp_path / "out").exists()


def test_several_nodes_with_the_local_launcher(tmp_path: Path) -> None:
    err = refused("run", "quick", "--launcher", "local", "--nodes", "2", "--out", tmp_path / "out")
    assert "cluster.nodes is 2" in err
    assert not (tmp_path / "out").exists()


def test_path_with_non_utf8_bytes(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"Universit\xe9") / "host.yaml"
    path.parent.mkdir()
    path.write_text(HOST_ONLY)
    code, out, err = run("run", path, "--out", tmp_path / "out", env={"PYTHONIOENCODING": "utf-8"})
    assert code == 0, (out, err)
    assert load(tmp_path / "out").command[2].endswith("Universit\ufffd/host.yaml")
    assert {path.name for path in (tmp_path / "out").iterdir()} >= set(FILES)
    (tmp_path / "out").rename(path.parent / "out")
    for format in FORMATS:
        assert call("judge", path.parent / "out", "--format", format)[0] == 0
    code, out, err = run("run", "--resume", path.parent / "out", env={"PYTHONIOENCODING": "utf-8"})
    assert code == 0, (out, err)
    assert r"Universit\udce9/out/report.html" in out


def test_ascii_terminal(out: Path) -> None:
    code, output, err = run("run", "--resume", out, env={"PYTHONIOENCODING": "ascii"})
    assert code == 0, (output, err)
    assert "ACCEPTED" in output


def test_unwritable_output_is_not_rejected(out: Path) -> None:
    (out / "trial.json").unlink()
    command = [sys.executable, "-m", "seatrial", "run", "--resume", str(out)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "No space left on device" in done.stderr
    assert load(out).decision.value is DecisionValue.ACCEPTED


@pytest.mark.parametrize("gone", ["/dev/full", "a pipe without a reader"])
def test_closed_stderr_does_not_end_the_trial(trial: Path, tmp_path: Path, gone: str) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "seatrial", "run", str(trial), "--out", str(out)]
    with _unwritable(gone) as stream:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stream, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "ACCEPTED" in done.stdout
    assert load(out).decision.value is DecisionValue.ACCEPTED


def test_closed_stdout_is_not_rejected(out: Path) -> None:
    (out / "trial.json").unlink()
    command = [sys.executable, "-m", "seatrial", "run", "--resume", str(out)]
    with _unwritable("a pipe without a reader") as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 128 + signal.SIGPIPE, done.stderr
    assert "Traceback" not in done.stderr
    assert load(out).decision.value is DecisionValue.ACCEPTED


@contextmanager
def _unwritable(what: str) -> Iterator[int]:
    """A file descriptor that cannot be written."""
    if what.startswith("/"):
        descriptor = os.open(what, os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    yield descriptor
    os.close(descriptor)


def test_worker_without_torch(tmp_path: Path) -> None:
    """A Python without torch: the preflight refuses the node before any check starts."""
    blocker = tmp_path / "site" / "torch"
    blocker.mkdir(parents=True)
    (blocker / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    path = tmp_path / "two.yaml"
    path.write_text(CPU_ONLY + "checks: {host.inventory: , nodes.reachable: }")
    out = tmp_path / "out"
    code, _, err = call("run", path, "--out", out, env={"PYTHONPATH": str(blocker.parent)})
    assert code == 3, err
    record = load(out)
    assert record.measurements == ()
    assert {verdict.outcome for verdict in record.verdicts} == {Outcome.ERROR}
    assert "torch" in record.decision.reason
    assert [finding.title for finding in record.findings] == ["The node does not meet the requirements of the trial"]


BASE_INSTALL = """
import contextlib, io, json, sys
sys.modules |= dict.fromkeys(("torch", "numpy", "sklearn"))
from seatrial.cli import main
output = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["seatrial", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main()
        except SystemExit as end:
            output.append((end.code or 0, out.getvalue()))
print(json.dumps(output))
"""


def test_base_install_without_torch(tmp_path: Path) -> None:
    record = tmp_path / "trial.json"
    record.write_text(report.render(samples.rejected(), "json"))
    log = tmp_path / "x.log"
    log.write_text("CUDA out of memory")
    commands = {
        "show checks": "host.inventory",
        "schema": '"properties"',
        "render local": "torch.distributed.run",
        "discover --json": '"kernel"',
        "run --dry-run": "torch.distributed.run",
        f"explain {log}": "GPU out of memory",
    }
    judging = [f"judge {record} --json", *(f"judge {record} --format {format}" for format in FORMATS)]
    lines = [line.split() for line in (*commands, *judging)]
    command = [sys.executable, "-c", BASE_INSTALL, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    outputs = json.loads(done.stdout)
    for (line, expected), (code, output) in zip(commands.items(), outputs, strict=False):
        assert (code, expected in output, bool(output)) == (0, True, True), (line, done.stderr)
    judged = outputs[len(commands) :]
    assert all(code in (1, 3) and output for code, output in judged), done.stderr
    assert Trial.model_validate_json(judged[0][1]).verdicts


def _fill(folder: Path, leave: int) -> None:
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    (folder / "filler").write_bytes(b"x" * (free - leave))
