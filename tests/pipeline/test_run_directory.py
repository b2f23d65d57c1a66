"""Run directories on real files: no measurement is lost or counted twice; the directory is locked."""

from __future__ import annotations

import grp
import json
import os
from pathlib import Path

import pytest

from seatrial.config.schema import CheckSettings, Config
from seatrial.model import Machine, Measurement, UsageError
from seatrial.pipeline.run_directory import Request, RunDir
from seatrial.util.journal import Journal, read, record_line

REQUEST = Request(
    config=Config(name="t", checks={"host.inventory": CheckSettings()}),
    origins={},
    only=(),
    skip=(),
    command=("seatrial", "run"),
    started=1.0,
)


def measured(check: str = "a", rank: int = 0, error: str | None = None) -> Measurement:
    return Measurement(check=check, subject=f"n0/rank{rank}", rank=rank, error=error, started=5.0)


def closed(run_dir: RunDir) -> Path:
    """Release the lock, as at the end of the process."""
    os.close(run_dir._journal.fileno())
    return run_dir.path


def test_saved_records_are_recovered_in_order(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "out", REQUEST)
    machine = Machine(host="h", gpus=("GPU-1",))
    run_dir.save(machine)
    run_dir.save(measured("a"))
    run_dir.save(measured("b"))
    run_dir.discard_checks(["a"])
    saved = RunDir.reopen(closed(run_dir)).recover()
    assert [measurement.check for measurement in saved.measurements] == ["b"]
    assert (saved.machine, saved.warnings) == (machine, [])


def test_measurement_only_in_a_rank_journal_is_recovered_once(tmp_path: Path) -> None:
    """The main process was killed before it saved a measurement that a rank had written."""
    run_dir = RunDir.create(tmp_path / "out", REQUEST)
    run_dir.save(measured("a", 0))
    for rank in (0, 1):
        journal = Journal(tmp_path / "out/jobs/ranks/attempt1" / f"rank{rank}.jsonl")
        journal.append({"start": "a", "time": 5.0})
        journal.append({"measurement": measured("a", rank).model_dump(mode="json")})
        journal.append({"measurement": measured("c", rank, error="peer lost").model_dump(mode="json")})
    reopened = RunDir.reopen(closed(run_dir))
    assert [(item.check, item.rank) for item in reopened.recover().measurements] == [("a", 0), ("a", 1)]
    assert [item.rank for item in RunDir.reopen(closed(reopened)).recover().measurements] == [0, 1]


def test_run_directory_is_locked(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "out", REQUEST)
    with pytest.raises(UsageError, match="is in use"):
        RunDir.reopen(tmp_path / "out")
    RunDir.reopen(closed(run_dir))


def test_directory_without_measurements_is_removed(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "out", REQUEST).remove_if_unused()
    assert not (tmp_path / "out").exists()
    used = RunDir.create(tmp_path / "out", REQUEST)
    used.save(measured())
    used.remove_if_unused()
    assert (tmp_path / "out/run.json").exists()


def test_changed_or_damaged_request_is_refused(tmp_path: Path) -> None:
    out = closed(RunDir.create(tmp_path / "out", REQUEST))
    original = (out / "run.json").read_text()
    (out / "run.json").write_text(json.dumps({**json.loads(original), "only": ["x"]}))
    with pytest.raises(UsageError, match="was changed"):
        RunDir.reopen(out)
    (out / "run.json").write_text(original)
    (out / "measurements.jsonl").unlink()
    with pytest.raises(UsageError, match="no matching measurements"):
        RunDir.reopen(out)
    (out / "run.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UsageError, match=r"run\.json is damaged: .*utf-8"):
        RunDir.reopen(out)


def retried(check: str, rank: int = 0, error: str | None = None, started: float = 6.0) -> Measurement:
    return measured(check, rank, error).model_copy(update={"retry": True, "started": started})


@pytest.mark.parametrize("change", [{"format": "0123456789abcdef", "seatrial": "0.0.9"}, {"format": None}])
def test_journal_of_a_build_with_other_records_is_refused(tmp_path: Path, change: dict[str, str]) -> None:
    path = closed(RunDir.create(tmp_path / "out", REQUEST))
    journal = path / "measurements.jsonl"
    ((first,), _) = read(journal)
    journal.write_text(record_line({**first, **change}))
    with pytest.raises(UsageError, match=change.get("seatrial", "begun by")):
        RunDir.reopen(path)
    journal.write_text(record_line(first))
    assert RunDir.reopen(path).request == REQUEST


def test_retries_are_discarded_without_their_first_measurements(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "out", REQUEST)
    for measurement in (measured("a"), measured("b"), retried("a"), retried("b")):
        run_dir.save(measurement)
    run_dir.discard_retries(["a"])
    saved = run_dir.recover()
    assert [measurement.check for measurement in saved.measurements] == ["a", "b"]
    assert saved.retries == [retried("b")]
    run_dir.discard_checks(["b"])
    saved = run_dir.recover()
    assert ([measurement.check for measurement in saved.measurements], saved.retries) == (["a"], [])


def test_retry_only_in_a_rank_journal_replaces_its_error(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "out", REQUEST)
    run_dir.save(measured("a", 0))
    run_dir.save(retried("a", 0, error="start it by hand"))
    journal = Journal(tmp_path / "out/jobs/ranks-retry/attempt1/rank0.jsonl")
    journal.append({"measurement": retried("a", 0, started=7.0).model_dump(mode="json")})
    for _ in range(2):
        saved = run_dir.recover()
        assert saved.measurements == [measured("a", 0)], "the run_dir measurement is not lost"
        assert saved.retries == [retried("a", 0, started=7.0)]


def test_path_that_is_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"^--resume .*: not a run directory: it has no run.json$"):
        RunDir.reopen(tmp_path)
    with pytest.raises(UsageError, match=r"^--resume .*: is a file"):
        RunDir.reopen(tmp_path / "file")
    with pytest.raises(UsageError, match=r"^--resume .*: no such directory"):
        RunDir.reopen(tmp_path / "absent")
    (tmp_path / "run1").mkdir()
    (tmp_path / "run1" / "run.json").touch()
    with pytest.raises(UsageError, match=f"contains run directories: name one of them, such as {tmp_path}/run1"):
        RunDir.reopen(tmp_path)
    with pytest.raises(UsageError, match=r"^--out .* is a file: name a new or empty directory"):
        RunDir.create(tmp_path / "file", REQUEST)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_only_the_owner_reads_a_new_run_directory(tmp_path: Path) -> None:
    os.umask(0o022)
    run_dir = RunDir.create(tmp_path / "runs" / "out", REQUEST)
    run_dir.save(measured())
    (run_dir.path / "jobs").mkdir()
    (run_dir.path / "jobs" / "log").touch()
    assert mode(tmp_path / "runs") == 0o755, "the directory of all runs stays as the user wants it"
    assert {mode(path) for path in (run_dir.path, run_dir.path / "jobs")} == {0o700}
    assert {mode(path) for path in run_dir.path.rglob("*") if path.is_file()} == {0o600}


def test_a_group_reads_all_but_the_files_with_secrets(tmp_path: Path) -> None:
    group = grp.getgrall()[-1] if os.geteuid() == 0 else grp.getgrgid([*os.getgroups(), os.getegid()][0])
    request = REQUEST.model_copy(update={"config": REQUEST.config.model_copy(update={"group": group.gr_name})})
    run_dir = RunDir.create(tmp_path / "out", request)
    (run_dir.path / "jobs").mkdir()
    (run_dir.path / "jobs" / "log").touch()
    assert {mode(path) for path in (run_dir.path, run_dir.path / "jobs")} == {0o2750}
    assert {path.stat().st_gid for path in (run_dir.path, *run_dir.path.rglob("*"))} == {group.gr_gid}
    modes = {path.name: mode(path) for path in run_dir.path.rglob("*") if path.is_file()}
    assert modes == {"run.json": 0o600, "measurements.jsonl": 0o640, "log": 0o640}


@pytest.mark.parametrize(("group", "is_root"), [("no-such-group", True), ("root", False)])
def test_group_that_cannot_be_set_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, is_root: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0 if is_root else 12345)
    monkeypatch.setattr(os, "getegid", lambda: 12345)
    monkeypatch.setattr(os, "getgroups", lambda: [12345])
    config = REQUEST.config.model_copy(update={"group": group})
    request = REQUEST.model_copy(update={"config": config, "origins": {"group": "--group"}})
    with pytest.raises(UsageError, match=f"--group {group}: .*Run first: id; getent group {group}"):
        RunDir.create(tmp_path / "out", request)
    assert not (tmp_path / "out").exists()


def test_a_reopened_directory_keeps_its_modes(tmp_path: Path) -> None:
    out = closed(RunDir.create(tmp_path / "out", REQUEST))
    out.chmod(0o2770)  # by its owner, for a group
    os.umask(0o022)
    RunDir.reopen(out)
    (out / "log").touch()
    assert (mode(out), mode(out / "log")) == (0o2770, 0o660)


def test_a_directory_of_another_user_keeps_its_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the root of a Kubernetes volume, which belongs to root and to the fsGroup of the pod."""
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume").chmod(0o2775)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os, "getegid", lambda: grp.getgrnam("root").gr_gid)
    config = REQUEST.config.model_copy(update={"group": "root"})
    with pytest.raises(UsageError, match="volume is of another user or a mounted volume"):
        RunDir.create(tmp_path / "volume", REQUEST.model_copy(update={"config": config}))
    run_dir = RunDir.create(tmp_path / "volume", REQUEST)
    (run_dir.path / "log").touch()
    assert (mode(run_dir.path), mode(run_dir.path / "log")) == (0o2775, 0o660)
