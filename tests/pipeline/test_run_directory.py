"""What a run directory keeps, on real files: nothing measured is lost, nothing counts twice, nobody shares it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from seatrial.config.schema import CheckSettings, Config
from seatrial.model import Machine, Measurement, UsageError
from seatrial.pipeline.run_directory import Request, RunDir
from seatrial.util.journal import Journal

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
    """Give the lock back, as the end of the process does."""
    os.close(run_dir._journal.fileno())
    return run_dir.path


def test_what_was_kept_is_recovered_in_order(tmp_path: Path) -> None:
    first = RunDir.create(tmp_path / "out", REQUEST)
    here = Machine(host="h", gpus=("GPU-1",))
    first.save_machine(here)
    first.save(measured("a"))
    first.save(measured("b"))
    first.discard_checks(["a"])
    kept = RunDir.reopen(closed(first)).recover()
    assert [one.check for one in kept.measurements] == ["b"]
    assert (kept.machine, kept.warnings) == (here, [])


def test_what_only_a_rank_wrote_is_recovered_once(tmp_path: Path) -> None:
    """The main process was killed between a rank's measurement and its own note of it."""
    first = RunDir.create(tmp_path / "out", REQUEST)
    first.save(measured("a", 0))
    for rank in (0, 1):
        journal = Journal(tmp_path / "out/jobs/ranks/attempt1" / f"rank{rank}.jsonl")
        journal.append({"start": "a", "time": 5.0})
        journal.append({"measurement": measured("a", rank).model_dump(mode="json")})
        journal.append({"measurement": measured("c", rank, error="peer lost").model_dump(mode="json")})
    again = RunDir.reopen(closed(first))
    assert [(one.check, one.rank) for one in again.recover().measurements] == [("a", 0), ("a", 1)]
    assert [one.rank for one in RunDir.reopen(closed(again)).recover().measurements] == [0, 1]


def test_two_trials_cannot_share_a_directory(tmp_path: Path) -> None:
    first = RunDir.create(tmp_path / "out", REQUEST)
    with pytest.raises(UsageError, match="is in use"):
        RunDir.reopen(tmp_path / "out")
    RunDir.reopen(closed(first))


def test_a_directory_in_which_nothing_was_measured_is_taken_back(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "out", REQUEST).discard()
    assert not (tmp_path / "out").exists()
    used = RunDir.create(tmp_path / "out", REQUEST)
    used.save(measured())
    used.discard()
    assert (tmp_path / "out/run.json").exists()


def test_only_the_request_that_was_measured_for_is_gone_on_with(tmp_path: Path) -> None:
    out = closed(RunDir.create(tmp_path / "out", REQUEST))
    whole = (out / "run.json").read_text()
    (out / "run.json").write_text(json.dumps({**json.loads(whole), "only": ["x"]}))
    with pytest.raises(UsageError, match="was changed"):
        RunDir.reopen(out)
    (out / "run.json").write_text(whole)
    (out / "measurements.jsonl").unlink()
    with pytest.raises(UsageError, match="no matching measurements"):
        RunDir.reopen(out)
    (out / "run.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UsageError, match=r"run\.json is damaged: .*utf-8"):
        RunDir.reopen(out)


def again(check: str, rank: int = 0, error: str | None = None, started: float = 6.0) -> Measurement:
    return measured(check, rank, error).model_copy(update={"retry": True, "started": started})


def test_a_second_measurement_is_kept_beside_the_first_and_forgotten_without_it(tmp_path: Path) -> None:
    first = RunDir.create(tmp_path / "out", REQUEST)
    for one in (measured("a"), measured("b"), again("a"), again("b")):
        first.save(one)
    first.discard_retries(["a"])
    kept = first.recover()
    assert [one.check for one in kept.measurements] == ["a", "b"]
    assert kept.retries == [again("b")]
    first.discard_checks(["b"])
    kept = first.recover()
    assert ([one.check for one in kept.measurements], kept.retries) == (["a"], [])


def test_a_second_measurement_that_only_a_rank_wrote_is_recovered_and_replaces_its_error(tmp_path: Path) -> None:
    first = RunDir.create(tmp_path / "out", REQUEST)
    first.save(measured("a", 0))
    first.save(again("a", 0, error="start it by hand"))
    journal = Journal(tmp_path / "out/jobs/ranks-retry/attempt1/rank0.jsonl")
    journal.append({"measurement": again("a", 0, started=7.0).model_dump(mode="json")})
    for _ in range(2):
        kept = first.recover()
        assert kept.measurements == [measured("a", 0)], "the first is not lost for a trouble of the second"
        assert kept.retries == [again("a", 0, started=7.0)]
