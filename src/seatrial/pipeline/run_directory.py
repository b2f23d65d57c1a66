"""The run directory: what a trial keeps while it runs, so that nothing measured is lost whatever happens to it.

``run.json`` holds what was asked for, ``measurements.jsonl`` one line for each measurement and each ended job as it
comes. ``--resume`` needs no more than these and the ranks' own journals.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from seatrial.config.schema import Config
from seatrial.model import Frozen, JobResult, Machine, Measurement, Session, Trial, UsageError, first_validation_error
from seatrial.pipeline.upgrade import upgrade
from seatrial.util import journal
from seatrial.util.files import atomic_write
from seatrial.util.journal import Journal

_LOG_ENDINGS = (".log", ".err", ".out")


class Request(Frozen):
    """What run.json keeps: enough to go on."""

    config: Config
    origins: dict[str, str]
    only: tuple[str, ...]
    skip: tuple[str, ...]
    command: tuple[str, ...]
    started: float


@dataclass
class SavedRun:
    """What a journal of measurements holds."""

    measurements: list[Measurement] = field(default_factory=list)
    repeats: list[Measurement] = field(default_factory=list)  # the second of what fell short
    results: list[JobResult] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    machine: Machine | None = None  # whose figures they are
    complaints: list[str] = field(default_factory=list)


class RunDir:
    """An open run directory."""

    def __init__(self, path: Path, request: Request) -> None:
        self.path = path
        self.request = request
        self._journal = Journal(path / "measurements.jsonl")
        self._lock()

    @classmethod
    def create(cls, path: Path, request: Request) -> RunDir:
        """A new one. Raises UsageError when ``path`` holds something already or cannot be written."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise UsageError(f"--out {path} is not empty: name another folder, or go on with --resume {path}")
            text = request.model_dump_json(indent=2)
            atomic_write(path / "run.json", text.encode())
            made = cls(path.resolve(), request)
            made._journal.append({"request": _digest(text)})
            return made
        except OSError as error:
            raise UsageError(f"cannot write to --out {path}: {error.strerror or error}") from error

    @classmethod
    def reopen(cls, path: Path) -> RunDir:
        """An earlier one. Raises UsageError when it is none, was changed, or cannot be read or written."""
        try:
            text = (path / "run.json").read_text(encoding="utf-8")
            request = Request.model_validate_json(text)
            _refuse_changed(path, text)
            return cls(path.resolve(), request)
        except OSError as error:
            raise UsageError(f"--resume {path}: {error.strerror or error}: {error.filename}") from error
        except ValidationError as error:
            raise UsageError(f"--resume {path}: run.json is damaged: {error.errors()[0]['msg']}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"--resume {path}: run.json is damaged: {error}") from error

    def discard(self) -> None:
        """Take the directory back while it holds nothing but the request: the same --out can then be used again."""
        if all("request" in record for record in journal.read(self._journal.path)[0]):
            self._journal.path.unlink()
            (self.path / "run.json").unlink()
            self.path.rmdir()

    def save(self, measurement: Measurement) -> None:
        """On disk when this returns. Raises OSError."""
        self._journal.append({"measurement": measurement.model_dump(mode="json")})

    def save_result(self, result: JobResult) -> None:
        self._journal.append({"result": result.model_dump(mode="json")})

    def save_session(self, session: Session) -> None:
        self._journal.append({"session": session.model_dump(mode="json")})

    def save_machine(self, machine: Machine) -> None:
        self._journal.append({"machine": machine.model_dump(mode="json")})

    def discard_checks(self, checks: Iterable[str]) -> None:
        """Mark that these checks are run again: what was measured of them before does not count any more."""
        self._journal.append({"discarded_checks": sorted(checks)})

    def discard_retries(self, checks: Iterable[str]) -> None:
        """Mark that these checks are measured a second time once more; their first measurements count as before."""
        self._journal.append({"discarded_retries": sorted(checks)})

    def recover(self) -> SavedRun:
        """All that counts so far, with measurements that only a rank's journal holds (we were killed before it)."""
        kept = SavedRun()
        records, kept.complaints = journal.read(self._journal.path)
        seen = {_key(record) for record in records}
        paths = sorted(self.path.glob("jobs/*/attempt*/rank*.jsonl"))
        new = [one for path in paths for one in journal.read(path)[0] if _is_whole(one) and _key(one) not in seen]
        # what ranks have measured since an error was told of the check (a person started them late) takes its place
        late = {_told_of(one) for one in new} & {_told_of(one) for one in records if _failed(one)}
        marks = {
            word: sorted(check for check, mark in late if mark == word)
            for word in ("discarded_checks", "discarded_retries")
        }
        for record in [*({word: checks} for word, checks in marks.items() if checks), *new]:
            self._journal.append(record)
            records.append(record)
        for record in records:
            try:
                _take_in(record, kept)
            except (ValidationError, TypeError) as error:
                said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
                kept.complaints.append(f"{self._journal.path}: a record is damaged, left out: {said}")
        return kept

    def _lock(self) -> None:
        if not journal.lock(self._journal.fileno(), self.path):
            raise UsageError(f"{self.path} is in use: another seatrial runs in it")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse_changed(path: Path, text: str) -> None:
    """What was measured answers to the request that it was measured for, not to one written over it afterwards."""
    kept = [record["request"] for record in journal.read(path / "measurements.jsonl")[0] if "request" in record]
    if kept != [_digest(text)]:
        why = "was changed since the trial began" if kept else "belongs to no journal of measurements"
        raise UsageError(f"--resume {path}: run.json {why}; start anew: seatrial run")


def _key(record: journal.Record) -> tuple[object, ...]:
    """What tells one measurement from another; of a damaged record, what it looks like."""
    measurement = record.get("measurement")
    if not isinstance(measurement, dict):
        return (repr(measurement),)
    return tuple(repr(measurement.get(name)) for name in ("check", "subject", "rank", "started"))


def _is_whole(record: journal.Record) -> bool:
    """Whether a rank's record is a measurement without error: one with an error is told again by the launcher."""
    measurement = record.get("measurement")
    return isinstance(measurement, dict) and not measurement.get("error")


def _failed(record: journal.Record) -> bool:
    measurement = record.get("measurement")
    return isinstance(measurement, dict) and bool(measurement.get("error"))


def _told_of(record: journal.Record) -> tuple[str, str]:
    """The check that was measured, and the word that would forget it: the second measurement goes without the first."""
    measurement = record.get("measurement")
    if not isinstance(measurement, dict):
        return "", ""
    return str(measurement.get("check")), "discarded_retries" if measurement.get("retry") else "discarded_checks"


def _take_in(record: journal.Record, kept: SavedRun) -> None:
    if "discarded_checks" in record:
        again = set(record["discarded_checks"])
        kept.measurements = [one for one in kept.measurements if one.check not in again]
        kept.repeats = [one for one in kept.repeats if one.check not in again]
    elif "discarded_retries" in record:
        kept.repeats = [one for one in kept.repeats if one.check not in set(record["discarded_retries"])]
    elif "result" in record:
        kept.results.append(JobResult.model_validate(record["result"]))
    elif "machine" in record:
        kept.machine = Machine.model_validate(record["machine"])
    elif "session" in record:
        kept.sessions.append(Session.model_validate(record["session"]))
    elif "measurement" in record:
        measurement = Measurement.model_validate(record["measurement"])
        (kept.repeats if measurement.retry else kept.measurements).append(measurement)


MOST_LEVELS = 100  # of nesting in trial.json; facts of a machine have been seen to take ten


def load_trial(path: Path) -> Trial:
    """The record of a run: ``path`` is its folder or its trial.json. Raises UsageError that says what is wrong."""
    file = path / "trial.json" if path.is_dir() else path
    hint = f"; its measurements may be whole: seatrial run --resume {file.parent}" if _has_journal(file.parent) else ""
    try:
        return Trial.model_validate(upgrade(_strict_json(file.read_text(encoding="utf-8"))))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror or error}{hint}") from error
    except ValidationError as error:
        raise UsageError(f"{file} is no trial.json of this version: {first_validation_error(error)}{hint}") from error
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{file} is damaged: {error}{hint}") from error


def _strict_json(text: str) -> object:
    """JSON as the standard has it, its numbers finite and its nesting no deeper than MOST_LEVELS. Raises ValueError."""
    try:
        document: object = json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {MOST_LEVELS} levels") from error
    level = [document]
    for _ in range(MOST_LEVELS):
        groups = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [inner for group in groups for inner in group]
    if level:
        raise ValueError(f"it is nested deeper than {MOST_LEVELS} levels")
    return document


def _integer(text: str) -> int:
    if len(text) > 20:  # 64 bits, and a sign
        raise ValueError(f"{text[:20]}… is too large a number")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def _has_journal(folder: Path) -> bool:
    return (folder / "measurements.jsonl").exists()


def logs(path: Path) -> list[Path]:
    """The logs of a run directory's jobs; a file is itself. Raises UsageError for a directory without logs."""
    if not path.is_dir():
        return [path]
    found = sorted(log for log in (path / "jobs").rglob("*") if log.suffix in _LOG_ENDINGS and log.is_file())
    if not found:
        raise UsageError(f"no logs (*.log, *.err, *.out) in {path / 'jobs'}")
    return found
