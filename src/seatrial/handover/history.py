"""The runs of some folders, one entry for each: when, what, decision and failing parts.

An entry is read from the record once and kept in the user's cache folder, in one file for each folder. The cache only
saves time: it is made again if it is absent, damaged or of another version, and replaced atomically.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from seatrial import __version__
from seatrial.model import Frozen, Outcome, UsageError, node_of
from seatrial.pipeline.run_directory import load_trial
from seatrial.report.identity import gpus_of
from seatrial.report.parts import parts, problems
from seatrial.report.view import decision_title, machine_size
from seatrial.util import journal, user_cache
from seatrial.util.gc_pause import gc_paused
from seatrial.util.text import plural

RECORD, REQUEST, JOURNAL = "trial.json", "run.json", "measurements.jsonl"
_RECORD_SUFFIXES = (".trial.json", ".json.gz")  # records outside of a run directory
_PROGRESS_AT = 100  # records that are read without a message


class Run(Frozen):
    """One run. ``note``: why there is no record. ``failing``: part with FAIL → its cause and worst figure.

    ``gpus``: subject → serial number and UUID of each GPU.
    """

    path: str
    state: Literal["finished", "in progress", "unfinished", "unreadable"]
    note: str = ""
    started: float = 0.0
    trial: str = ""
    size: str = ""
    decision: str = ""
    failing: dict[str, str] = {}
    gpus: dict[str, tuple[str, str]] = {}


_Entry = tuple[tuple[int, int], Run]  # modification time in ns and size of the record, and what was read from it
_CACHE = TypeAdapter(dict[str, _Entry])


@dataclass(frozen=True)
class Sighting:
    """A part in a run: its place, the serial number of the GPU there, and why it failed; empty if it did not."""

    run: Run
    place: str
    serial: str
    failure: str


def find_records(folder: Path) -> Iterator[Path]:
    """The run directories below ``folder``, and the files of records, sorted; links to folders are not followed."""
    for path, folders, files in os.walk(folder):
        if REQUEST in files or RECORD in files:
            folders.clear()  # a run directory has no runs inside
            yield Path(path)
            continue
        folders.sort()
        yield from (Path(path, name) for name in sorted(files) if name.endswith(_RECORD_SUFFIXES))


@gc_paused()
def read_runs(folders: Sequence[Path]) -> list[Run]:
    """All runs below these folders, each once: those without a record, then by start. Raises UsageError without any."""
    runs: dict[str, Run] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a directory: give a directory that contains run directories")
        for run in _runs(folder):
            runs.setdefault(os.path.realpath(run.path), run)  # folders can overlap, and have several names
    if not runs:
        raise UsageError(f"no run in {', '.join(map(str, folders))}: a run directory has {RECORD} or {REQUEST}")
    return sorted(runs.values(), key=lambda run: (run.state == "finished", run.started, run.path))


def _runs(folder: Path) -> Iterator[Run]:
    """The runs below one folder, from its cache where the record is unchanged."""
    name = f"history.{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]}"
    key = user_cache.key(__version__.encode(), repr(_CACHE.json_schema()).encode())
    cached = _read_cache(name, key)
    entries = {}
    read = 0
    for path in find_records(folder):
        file = path / RECORD if path.is_dir() else path
        try:
            status = file.stat()
        except OSError:
            if journal.is_locked(path / JOURNAL):
                yield Run(path=str(path), state="in progress", note=f"seatrial watch {path}")
            else:  # it ended before the record was written
                yield Run(path=str(path), state="unfinished", note=f"seatrial run --resume {path}")
            continue
        stamp, entry = (status.st_mtime_ns, status.st_size), cached.get(str(path))
        if not entry or entry[0] != stamp:
            read += 1
            if read == _PROGRESS_AT:
                print(f"seatrial: reading the records in {folder}; later calls use a cache", file=sys.stderr)
            entry = stamp, _run(path, file)
        entries[str(path)] = entry
        yield entry[1]
    if entries != cached:
        user_cache.write(name, key, _CACHE.dump_json(entries))


def _read_cache(name: str, key: str) -> dict[str, _Entry]:
    try:
        return _CACHE.validate_json(user_cache.read(name, key) or b"{}")
    except ValidationError:
        return {}


def _run(path: Path, file: Path) -> Run:
    """The entry of a record with the decision and failing parts as recorded; the record is not judged again."""
    try:
        trial = load_trial(file, verify_results=False)
    except UsageError as error:
        return Run(path=str(path), state="unreadable", note=str(error))
    return Run(
        path=str(path),
        state="finished",
        started=trial.started,
        trial=trial.name,
        size=machine_size(trial),
        decision=decision_title(trial),
        failing={
            part.name: problem.text
            for problem in problems(parts(trial))
            for part in problem.parts
            if part.outcome is Outcome.FAIL
        },
        gpus={subject: (gpu.serial, gpu.uuid) for subject, gpu in gpus_of(trial).items()},
    )


def part_history(runs: Iterable[Run], part: str) -> list[Sighting]:
    """The runs with a part: a serial number or UUID, a GPU such as node3/gpu5, or a node. Raises UsageError."""
    found = []
    for run in runs:
        is_node = any(node_of(subject) == part for subject in run.gpus)
        places = [subject for subject, ids in run.gpus.items() if part in (subject, *ids)]
        failing = [name for name in run.failing if name in (part, *places)]
        failing += [name for name in run.failing if is_node and node_of(name) == part]
        places += [part] if is_node else failing
        if places:
            serial = run.gpus.get(places[0], ("", ""))[0]
            found.append(Sighting(run, places[0], serial, run.failing[failing[0]] if failing else ""))
    if not found:
        raise UsageError(
            f"no run has a part {part}: give a serial number, a UUID, a GPU such as node3/gpu5, or a node; many "
            "virtual machines hide serial numbers, and `seatrial history DIR --json` lists the GPUs of each run"
        )
    return found


def summary(part: str, sightings: Sequence[Sighting]) -> str:
    """In how many runs a part failed, where, and whether the fault goes with the GPU or with the place."""
    failed = [each for each in sightings if each.failure]
    places, failed_at = ({each.place: 0 for each in some} for some in (sightings, failed))
    serials, failed_serials = ({each.serial: 0 for each in some if each.serial} for some in (sightings, failed))
    text = f"{part} failed in {len(failed)} of {plural(len(sightings), 'run')}"
    if len(places) > 1:
        nodes = plural(len({node_of(place) for place in places}), "node")
        text += f", in {len(places)} places on {nodes} ({', '.join(places)}): the GPU moved"
        if len(failed_at) > 1:
            text += "; the fault moved with it: suspect the GPU"
        elif failed:
            text += f"; it failed only at {failed[0].place}: suspect the slot or the node"
    elif len(serials) > 1:
        text += f", with {len(serials)} GPUs (serials {', '.join(serials)})"
        if len(failed_serials) > 1:
            text += ": the fault stayed: suspect the slot or the node"
        elif failed_serials:
            text += f": only with serial {failed[0].serial}: suspect that GPU"
    return text
