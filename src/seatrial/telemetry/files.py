"""What the samplers wrote beside the jobs, gathered into one file a job.

``RUN/jobs/<job>/telemetry.jsonl.gz`` has a line for each device that a sampler saw: an object whose lists are columns,
all of one length. ``pandas.read_json(path, lines=True)`` reads it; docs/telemetry.md says what is in it.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from seatrial.model import Frozen
from seatrial.model.telemetry import HARDWARE_SLOWDOWN, HOST, POWER_CAP, THROTTLE_REASONS
from seatrial.util.files import atomic_write

TELEMETRY_FILE = "telemetry.jsonl.gz"
_PLACE = re.compile(r"/attempt(?P<attempt>\d+)/rank(?P<rank>\d+)\.samples$")
_Line = dict[str, Any]


class DeviceSamples(Frozen):
    """A line of the file: one device beside one attempt of a job. Its further fields are columns: one for each gauge.

    ``skipped``: lines of its sampler that were damaged. ``reasons``: what the bits of ``clocks_event_reasons`` mean.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, tuple[FiniteFloat | None, ...]] = Field(init=False)

    node: str
    device: str
    attempt: int
    rank: int
    hz: FiniteFloat = Field(gt=0)
    name: str | None = None
    uuid: str | None = None
    reasons: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    skipped: int = 0
    time: tuple[FiniteFloat, ...]  # Unix seconds by the clock of its node

    @model_validator(mode="after")
    def _of_one_length(self) -> Self:
        if any(len(column) != len(self.time) for column in self.__pydantic_extra__.values()):
            raise ValueError("columns of different lengths")
        return self

    @property
    def subject(self) -> str:
        return self.node if self.device == HOST else f"{self.node}/{self.device}"

    def column(self, gauge: str) -> tuple[float | None, ...]:
        """The samples of a gauge; empty where there is no such column."""
        return self.__pydantic_extra__.get(gauge, ())

    @cached_property
    def sampled_indices(self) -> list[int]:
        """The samples in which it was looked at: where GPUs are looked at in turn, the others have no value."""
        rows = zip(*self.__pydantic_extra__.values(), strict=True)
        return [n for n, row in enumerate(rows) if row.count(None) < len(row)]

    def throttle_reasons(self, mask: float) -> frozenset[str]:
        """The reasons of a mask that are neither a person's choice nor rest.

        "Hardware slowdown" goes with heat and with the power brake, and is left out beside them; alone it is the fast
        trigger on too much power (NVML API reference, nvmlClocksEventReasonHwSlowdown).
        """
        given = {reason for bit, reason in self.reasons.items() if int(mask) & int(bit)}
        known = frozenset(given.intersection((POWER_CAP, *THROTTLE_REASONS)))
        return known - {HARDWARE_SLOWDOWN} if known - {HARDWARE_SLOWDOWN, POWER_CAP} else known


def read_devices(path: Path) -> Iterator[DeviceSamples]:
    """The devices of a gathered file, as far as it is whole. A line that is none of ours is passed over."""
    for line in _lines(path):
        try:
            yield DeviceSamples.model_validate_json(line)
        except ValidationError:
            continue


def merge_samples(folder: Path) -> str:
    """Make one file of what all samplers of the job in ``folder`` left, beside what was gathered before; says what was
    damaged. Their own files are removed. Raises OSError."""
    left = sorted(folder.glob("attempt*/rank*.samples"))
    if not left:
        return ""
    packed, known, skipped = io.BytesIO(), set[object](), 0
    with gzip.open(packed, "wb") as file:
        for line in (*_lines(folder / TELEMETRY_FILE), *_new_lines(left)):
            device = _object(line)
            key = (*(device.get(name) for name in ("attempt", "rank", "device")), repr(device.get("time"))[:40])
            if device and key not in known:  # killed before it could remove them, an earlier call has left them twice
                known.add(key)
                skipped += int(device.get("skipped", 0)) if device.get("device") == HOST else 0
                file.write(line.strip() + b"\n")
    atomic_write(folder / TELEMETRY_FILE, packed.getvalue())
    for path in left:
        path.unlink()
    return f"{folder.name}: {skipped} damaged lines of telemetry are left out" if skipped else ""


def _lines(path: Path) -> Iterator[bytes]:
    """Up to where the file is cut off."""
    try:
        with gzip.open(path, "rb") as file:
            yield from file
    except (FileNotFoundError, EOFError, zlib.error, gzip.BadGzipFile):
        return


def _new_lines(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in paths:
        place = _PLACE.search(path.as_posix())
        attempt, rank = (int(place[name]) if place else 0 for name in ("attempt", "rank"))
        for run in _runs(path):
            for device in run.devices():
                line = {**device, "attempt": attempt, "rank": rank}
                yield json.dumps(line, allow_nan=False, separators=(",", ":")).encode()


class Header(Frozen):
    """The first line of a sampler: what the numbers in the others are, ``gpu0.power_w`` say."""

    node: str
    hz: FiniteFloat
    devices: dict[str, dict[str, str | None]]
    reasons: dict[str, str]
    columns: tuple[str, ...] = Field(min_length=1)


@dataclass
class _Run:
    """The lines of one sampler. A job that a person starts again goes on in the same file, with a header of its own."""

    header: Header
    rows: list[list[float | None]] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    skipped: int = 0

    def take(self, line: object) -> None:
        match line:
            case list() if len(line) == len(self.header.columns) and line[0] is not None and all(map(_is_value, line)):
                self.rows.append(line)
            case {"unread": dict(unread)}:
                self.unread = {str(name): str(why) for name, why in unread.items()}
            case _:
                self.skipped += 1

    def devices(self) -> Iterator[_Line]:
        columns = dict(zip(self.header.columns, zip(*self.rows, strict=True), strict=True)) if self.rows else {}
        times = columns.pop("time", ())
        for device, about in self.header.devices.items():
            prefix = f"{device}."
            unread = {name.removeprefix(prefix): why for name, why in self.unread.items() if name.startswith(prefix)}
            own = {name.removeprefix(prefix): values for name, values in columns.items() if name.startswith(prefix)}
            line = {"node": self.header.node, "device": device, "hz": self.header.hz, **about, "unread": unread}
            yield line | {"reasons": self.header.reasons, "skipped": self.skipped, "time": times, **own}


def _runs(path: Path) -> list[_Run]:
    runs: list[_Run] = []
    with path.open("rb") as file:
        for text in file:
            line = _json(text)
            if header := _header(line):
                runs.append(_Run(header))
            elif runs:
                runs[-1].take(line)
    return runs


def _header(line: object) -> Header | None:
    try:
        return Header.model_validate(line) if isinstance(line, dict) and "columns" in line else None
    except ValidationError:
        return None


def _is_value(value: object) -> bool:
    if isinstance(value, bool):
        return False
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


def _json(text: bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _object(text: bytes) -> _Line:
    found = _json(text)
    return found if isinstance(found, dict) else {}
