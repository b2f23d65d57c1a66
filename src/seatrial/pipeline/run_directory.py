"""The run directory: files that a trial writes while it runs, so that no measurement is lost if it is killed.

``run.json`` holds the request with its secrets, hence mode 0600. ``measurements.jsonl`` is the run's journal. It has
one line for each measurement, each ended job and each session. Other lines state that earlier measurements no longer
count. ``--resume`` reads both files, and the journal of each rank.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import reprlib
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from seatrial import __version__
from seatrial.config.argument_paths import is_folder, path_exists
from seatrial.config.schema import Config, Override
from seatrial.model import Frozen, JobResult, Machine, Measurement, Session, Trial, UsageError, first_validation_error
from seatrial.util import journal
from seatrial.util.files import atomic_write, remove_incomplete
from seatrial.util.input_files import MAX_RECORD_BYTES, open_file, parse_json, read_text
from seatrial.util.journal import Journal
from seatrial.util.secrets import PRIVATE
from seatrial.util.text import and_more

_JOURNAL, _RANK_JOURNALS = "measurements.jsonl", "jobs/*/attempt*/rank*.jsonl"
# A JSON object with any of these keys is taken for a trial.json
_RECORD_KEYS = {"schema_version", "seatrial", "measurements", "verdicts", "seconds"}
# Keys of records in measurements.jsonl
_RECORDS = {"measurement": Measurement, "result": JobResult, "session": Session, "machine": Machine}
_DISCARDED_CHECKS, _DISCARDED_RETRIES = "discarded_checks", "discarded_retries"


class Request(Frozen):
    """Content of run.json: config and options of the trial, sufficient to resume it."""

    config: Config
    origins: dict[str, str]
    only: tuple[str, ...]
    skip: tuple[str, ...]
    command: tuple[str, ...]
    started: float
    time_limit_s: float | None = None


@dataclass(kw_only=True)
class SavedRun:
    """Content of measurements.jsonl, without discarded measurements."""

    measurements: list[Measurement] = field(default_factory=list)
    retries: list[Measurement] = field(default_factory=list)  # second and third measurements of checks
    job_results: list[JobResult] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    machine: Machine | None = None  # the machine on which the measurements were made
    warnings: list[str] = field(default_factory=list)  # records that could not be read

    def discard(self, checks: Collection[str]) -> None:
        """Discard all measurements of these checks, and their retries. Raises TypeError if ``checks`` is no list."""
        self.measurements = _without(self.measurements, checks)
        self.discard_retries(checks)

    def discard_retries(self, checks: Collection[str]) -> None:
        self.retries = _without(self.retries, checks)


def _without(measurements: Iterable[Measurement], checks: Collection[str]) -> list[Measurement]:
    return [measurement for measurement in measurements if measurement.check not in checks]


class RunDir:
    """An open and locked run directory."""

    def __init__(self, path: Path, request: Request) -> None:
        self.path = path
        self.request = request
        self.is_unchanged = False  # set by a resumed run that had nothing to measure and kept the recorded trial
        self._journal = Journal(path / _JOURNAL)
        if not journal.lock(self._journal.fileno(), path):
            raise UsageError(f"{path} is in use by another seatrial process")

    @classmethod
    def create(cls, path: Path, request: Request) -> RunDir:
        """Create a run directory that only this user, or also the group of the config, can read.

        Raises UsageError if ``path`` is not empty, not writable or in use, or for a group that this user cannot set.
        """
        group = _group_id(request)
        if path_exists(path) and not is_folder(path):
            raise UsageError(f"--out {path} is a file: name a new or empty directory")
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise UsageError(f"--out {path} is not empty: use another directory, or continue with --resume {path}")
            _set_access(path, group)
            text = request.model_dump_json(indent=2)
            atomic_write(path / "run.json", text.encode(), mode=PRIVATE)
            run_dir = cls(path.resolve(), request)
            run_dir._journal.append({"request": _digest(text), "seatrial": __version__, "format": record_format()})
            return run_dir
        except OSError as error:
            folders = (path.absolute(), *path.absolute().parents)
            existing = shlex.quote(str(next(folder for folder in folders if os.path.exists(folder))))
            command = f"findmnt -T {existing}; df -h {existing}; ls -ld {existing}"
            reason = f"cannot write to --out {path}: {error.strerror or error}"
            raise UsageError(f"{reason}. Run first: {command}") from error

    @classmethod
    def reopen(cls, path: Path) -> RunDir:
        """Open an existing run directory.

        Raises UsageError if it is in use, if run.json is absent, changed, damaged or not readable, or if the journal
        has another format than this version of seatrial writes.
        """
        try:
            text = read_text(path / "run.json")
            _check_journal(path, text)
            request = Request.model_validate_json(text)
            _set_umask(path)
            run_dir = cls(path.resolve(), request)
            remove_incomplete(run_dir.path)
            return run_dir
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UsageError(f"--resume {path}: {_missing_run(path)}") from error
        except OSError as error:
            raise UsageError(f"--resume {path}: {error.strerror or error}: {error.filename}") from error
        except (UnicodeDecodeError, ValidationError) as error:
            raise UsageError(f"--resume {path}: run.json is damaged: {error}") from error

    def change_slurm(self, overrides: Sequence[Override]) -> None:
        """Change settings slurm.* of a run that has measured nothing: Slurm rejected its jobs.

        Raises UsageError for an invalid setting, or if there are measurements, which were made with other settings.
        """
        if not all(measurement.skipped for measurement in self.recover().measurements):
            raise UsageError(f"--resume {self.path}: its checks were measured with other settings: start a new run")
        config = self.request.config.model_dump()
        config["slurm"] |= {key.removeprefix("slurm."): value for _, key, value in overrides}
        origins = {**self.request.origins, **{key: origin for origin, key, _ in overrides}}
        try:
            update = {"config": Config.model_validate(config), "origins": origins}
        except ValidationError as error:
            raise UsageError(f"--resume {self.path}: {first_validation_error(error)}") from error
        self.request = self.request.model_copy(update=update)
        text = self.request.model_dump_json(indent=2)
        self._journal.append({"request": _digest(text)})
        atomic_write(self.path / "run.json", text.encode(), mode=PRIVATE)

    def remove_if_unused(self) -> None:
        """Remove the directory if it holds only the request, so that the same --out can be used again."""
        records, _warnings = journal.read(self._journal.path)
        if all("request" in record for record in records):
            self._journal.path.unlink()
            (self.path / "run.json").unlink()
            self.path.rmdir()

    def save(self, record: Measurement | JobResult | Session | Machine) -> None:
        """Append a record and flush it to disk. Raises OSError."""
        key = next(key for key, kind in _RECORDS.items() if isinstance(record, kind))
        self._journal.append({key: record.model_dump(mode="json")})

    def discard_checks(self, checks: Iterable[str]) -> None:
        """Record that all measurements of these checks so far, and their retries, no longer count."""
        self._journal.append({_DISCARDED_CHECKS: sorted(checks)})

    def discard_retries(self, checks: Iterable[str]) -> None:
        """Record that the retries of these checks so far no longer count; their first measurements still do."""
        self._journal.append({_DISCARDED_RETRIES: sorted(checks)})

    def recover(self, saved: SavedRun | None = None) -> SavedRun:
        """Return the saved run, by default as a new object.

        After a kill, some measurements are only in a rank's journal: they are saved first.
        """
        saved = saved or SavedRun()
        records, saved.warnings = journal.read(self._journal.path)
        earlier = list(map(_measurement, records))
        saved_keys = set(map(_measurement_key, earlier))
        new_records: list[journal.Record] = []
        for path in sorted(self.path.glob(_RANK_JOURNALS)):
            rank_records, warnings = journal.read(path)
            saved.warnings += warnings
            for record in rank_records:
                fields = _measurement(record)
                # ``run_job`` has already recorded the errors of ranks
                if fields and not fields.get("error") and _measurement_key(fields) not in saved_keys:
                    new_records.append(record)
        # with launcher torchrun, a check has an ERROR until the user starts its ranks; their measurements replace it
        newly_measured = {_check_and_discard_key(_measurement(record)) for record in new_records}
        replaced_errors = newly_measured & {_check_and_discard_key(each) for each in earlier if each.get("error")}
        for discard_key in (_DISCARDED_CHECKS, _DISCARDED_RETRIES):
            if checks := sorted(check for check, key in replaced_errors if key == discard_key):
                new_records.insert(0, {discard_key: checks})
        for record in new_records:
            self._journal.append(record)
            records.append(record)
        return _add_records(records, saved, self._journal.path)

    def manifest(self) -> dict[str, str]:
        """Return the SHA-256 of each file with results: the journals of the run and of all ranks. Raises OSError."""
        files = (self._journal.path, *sorted(self.path.glob(_RANK_JOURNALS)))
        return {str(file.relative_to(self.path)): _file_digest(file) for file in files}


def read_saved_run(path: Path) -> SavedRun:
    """Return the run saved in a measurements.jsonl. Raises OSError."""
    records, warnings = journal.read(path)
    return _add_records(records, SavedRun(warnings=warnings), path)


def _group_id(request: Request) -> int | None:
    """Return the id of the group that may read the run directory, None without one. Raises UsageError."""
    name = request.config.group
    if name is None:
        return None
    try:
        group = grp.getgrnam(name).gr_gid
        if os.geteuid() == 0 or group in (os.getegid(), *os.getgroups()):
            return group
        problem = "this user is not a member of the group"
    except KeyError:
        problem = "no such group on this host"
    origin = request.origins.get("group", "group")
    raise UsageError(f"{origin} {name}: {problem}. Run first: id; getent group {shlex.quote(name)}")


def _set_access(path: Path, group: int | None) -> None:
    """Give the directory to this user and the group, and set the umask. Raises OSError.

    A directory of another user, and a mounted volume, keep their modes: of a Kubernetes volume, fsGroup decides. With a
    group they raise UsageError.
    """
    if path.stat().st_uid == os.geteuid() and not path.is_mount():
        if group is not None:
            os.chown(path, -1, group)
        path.chmod(0o700 if group is None else 0o2750)  # setgid: its files and directories get its group
    elif group is not None:
        raise UsageError(
            f"--group: {path} is of another user or a mounted volume, and keeps its modes: give a new --out"
        )
    _set_umask(path)


def _set_umask(path: Path) -> None:
    """Let the group do with new files what it may do with the run directory, and let others do nothing."""
    os.umask(0o007 | ~path.stat().st_mode & 0o070)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record_format() -> str:
    """Return a digest of the form of a run's journals: their lines, and the names of fields, checks and metrics.

    Builds with equal digests read each other's journals. A build with another digest could misread renamed fields,
    checks or metrics.
    """
    from seatrial.checks import catalog

    records = (Config, JobResult, Machine, Measurement, Request, Session)
    fields = {record.__name__: sorted(record.model_fields) for record in records}
    metrics = {name: sorted(check.units) for name, check in catalog().items()}
    return _digest(json.dumps([fields, metrics, "sha256"], sort_keys=True))[:16]


def _check_journal(path: Path, text: str) -> None:
    """Raise UsageError if another build began the journal, or it has no digest of ``text``, the content of run.json."""
    records, warnings = journal.read(path / _JOURNAL)
    requests = [record for record in records if "request" in record]
    if requests and requests[0].get("format") != record_format():
        version = requests[0].get("seatrial")
        writer = f"seatrial {reprlib.repr(version)}" if version else "an older seatrial"
        raise UsageError(
            f"--resume {path}: the run was begun by {writer}, whose records differ from those of this build "
            f"({__version__}): resume it with the build that began it, or start a new run: seatrial run"
        )
    if _digest(text) not in (record["request"] for record in requests):
        reason = "was changed since the trial started" if requests else "has no matching measurements.jsonl"
        reason = "; ".join([reason, *warnings[:1]])
        raise UsageError(f"--resume {path}: run.json {reason}; start a new run: seatrial run")


def _measurement(record: journal.Record) -> dict[str, Any]:
    """Return the fields of a measurement; empty for any other record."""
    fields = record.get("measurement")
    return fields if isinstance(fields, dict) else {}


def _measurement_key(measurement: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields that identify a measurement."""
    return tuple(repr(measurement.get(name)) for name in ("check", "subject", "rank", "started"))


def _check_and_discard_key(measurement: Mapping[str, Any]) -> tuple[str, str]:
    """Return the check of a measurement, and the key of the record that discards the measurement."""
    return str(measurement.get("check")), _DISCARDED_RETRIES if measurement.get("retry") else _DISCARDED_CHECKS


def _add_records(records: Iterable[journal.Record], saved: SavedRun, path: Path) -> SavedRun:
    """Apply the records of ``path`` to ``saved``; each damaged record adds a warning. Return ``saved``."""
    for record in records:
        try:
            _add_record(record, saved)
        except (ValidationError, TypeError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            saved.warnings.append(f"{path}: damaged record ignored: {reason}")
    return saved


def _add_record(record: journal.Record, saved: SavedRun) -> None:
    """Apply a record of measurements.jsonl to ``saved``. Raises ValidationError or TypeError if it is damaged."""
    if _DISCARDED_CHECKS in record:
        saved.discard(record[_DISCARDED_CHECKS])
    elif _DISCARDED_RETRIES in record:
        saved.discard_retries(record[_DISCARDED_RETRIES])
    elif "result" in record:
        saved.job_results.append(JobResult.model_validate(record["result"]))
    elif "machine" in record:
        saved.machine = Machine.model_validate(record["machine"])
    elif "session" in record:
        saved.sessions.append(Session.model_validate(record["session"]))
    elif "measurement" in record:
        measurement = Measurement.model_validate(record["measurement"])
        (saved.retries if measurement.retry else saved.measurements).append(measurement)


def load_trial(path: Path, *, verify_results: bool = True) -> Trial:
    """Return the trial recorded in ``path``, a run directory or a trial.json.

    Raises UsageError, also if a file with results in the run directory is not as it was when the record was made; with
    ``verify_results`` False, these files are not read.
    """
    file = path / "trial.json" if is_folder(path) else path
    has_journal = path_exists(file.parent / _JOURNAL)
    hint = f"; its measurements may be intact: seatrial run --resume {file.parent}" if has_journal else ""
    if has_journal and journal.is_locked(file.parent / _JOURNAL):
        hint = f"; it is in progress: seatrial watch {file.parent}"
    text = ""
    try:
        text = read_text(file, MAX_RECORD_BYTES)
        document = parse_json(text)
        if isinstance(document, dict) and not document.keys() & _RECORD_KEYS:
            keys = and_more([reprlib.repr(key) for key in document], 3) or "no keys"
            raise UsageError(f"{file} is not a trial.json: it is a JSON object with {keys}, without 'seatrial'")
        _check_version(document, file)
        trial = Trial.model_validate(document)
        if verify_results and file.name == "trial.json":
            _check_results(file.parent, trial.manifest, hint)
        return trial
    except OSError as error:
        if isinstance(error, FileNotFoundError) and file != path:
            raise UsageError(f"{path} {_missing_record(path)}{hint}") from error
        raise UsageError(f"cannot read {file}: {error.strerror or error}{hint}") from error
    except ValidationError as error:
        raise UsageError(
            f"{file} is not a trial.json of this version: {first_validation_error(error)}{hint}"
        ) from error
    except (ValueError, OverflowError) as error:
        if not file.name.endswith(("trial.json", ".gz")) and not text.lstrip().startswith("{"):  # such as report.html
            raise UsageError(f"{file} is not a trial.json; give the run directory") from error
        raise UsageError(f"{file} is damaged: {error}{hint}") from error


def _check_results(run_dir: Path, manifest: Mapping[str, str], hint: str) -> None:
    """Raise UsageError for the first file of the manifest that is missing or changed; a copy of a record has none."""
    if not any(path_exists(run_dir / name) for name in manifest):
        return
    for name, expected in manifest.items():
        try:
            digest = _file_digest(run_dir / name)
        except OSError as error:
            digest = f"unknown ({error.strerror or error})"
        if digest != expected:
            reason = f"its SHA-256 is {digest}, but was {expected} when trial.json was made of the results"
            raise UsageError(f"{run_dir / name} is damaged or of a later measurement: {reason}{hint}")


def _missing_run(path: Path) -> str:
    """Return why a path without run.json is not a run directory."""
    if not path_exists(path):
        return "no such directory"
    if not is_folder(path):
        return "is a file, not a run directory"
    if runs := _directories_with("run.json", path):
        return f"contains run directories: name one of them, such as {runs[-1]}"
    return "not a run directory: it has no run.json"


def _missing_record(folder: Path) -> str:
    """Return what a directory without trial.json is, for an error message after its path."""
    if runs := _directories_with("trial.json", folder):
        return f"contains run directories: name one of them, such as {runs[-1]}"
    if path_exists(folder / _JOURNAL):
        return "has no trial.json: the run is not finished"
    return "is a directory without trial.json: give a run directory, or one file"


def _directories_with(name: str, folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.glob(f"*/{name}"))


def _check_version(document: object, file: Path) -> None:
    """Raise UsageError for a record of another schema version."""
    expected = Trial.model_fields["schema_version"].default
    if isinstance(document, dict) and (version := document.get("schema_version")) != expected:
        writer = reprlib.repr(document.get("seatrial", "unknown"))
        raise UsageError(
            f"{file} is not a trial.json of this version: schema_version is {reprlib.repr(version)}, expected "
            f"{expected}: use the build of seatrial that wrote it ({writer}), or measure again"
        )
