"""The telemetry file of a job, merged from the files of its samplers.

``RUN/jobs/<job>/telemetry.jsonl.gz`` has one line per device: a JSON object whose lists are columns of equal length.
``pandas.read_json(path, lines=True)`` reads it; docs/telemetry.md describes it.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from seatrial.model import Frozen
from seatrial.model.telemetry import HARDWARE_SLOWDOWN, HOST, POWER_CAP, THROTTLE_REASONS
from seatrial.util.files import atomic_write
from seatrial.util.input_files import MAX_LINE_BYTES, gzip_lines, open_file, tail_lines

TELEMETRY_FILE = "telemetry.jsonl.gz"
_SAMPLES_PATH = re.compile(r"/attempt(?P<attempt>\d+)/rank(?P<rank>\d+)\.samples$")
_TAIL_LINES, _TAIL_BYTES = 16, 64 * 1024  # latest_samples reads the end of a file; a sample of 8 GPUs has 1 KB
_Line = dict[str, Any]
T = TypeVar("T")


class DeviceSamples(Frozen):
    """One line of the telemetry file: the samples of one device during one attempt of a job.

    Extra fields are columns: gauge → its value in each sample. ``device``: ``host`` or ``gpuN``. ``rank``: rank of the
    sampler. ``hz``: samples per second. ``skipped``: number of damaged lines in the sampler's file. ``reasons``: bit of
    ``clocks_event_reasons`` → name. ``unreadable``: gauge → why it could not be read.
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
    time: tuple[FiniteFloat, ...]  # Unix seconds by the node's clock

    @model_validator(mode="after")
    def _equal_lengths(self) -> Self:
        if any(len(column) != len(self.time) for column in self.__pydantic_extra__.values()):
            raise ValueError("columns of different lengths")
        return self

    @property
    def subject(self) -> str:
        """The device as in verdicts: ``node3`` for the host, ``node3/gpu5`` for a GPU."""
        return self.node if self.device == HOST else f"{self.node}/{self.device}"

    def column(self, gauge: str) -> tuple[float | None, ...]:
        """Return the samples of a gauge; empty if there are none."""
        return self.__pydantic_extra__.get(gauge, ())

    @cached_property
    def sampled_indices(self) -> list[int]:
        """Indices of the samples in which this device was read: some are missing if GPUs are sampled in turn."""
        rows = zip(*self.__pydantic_extra__.values(), strict=True)
        return [index for index, row in enumerate(rows) if row.count(None) < len(row)]

    def throttle_reasons(self, mask: float) -> frozenset[str]:
        """Return the reasons in ``mask`` that throttle the GPU, without idleness and settings of the user.

        "Hardware slowdown" is omitted if a reason other than the power cap explains the slowdown. Without such a
        reason, hardware slowdown means high power draw (NVML API reference, nvmlClocksEventReasonHwSlowdown).
        """
        active = {reason for bit, reason in self.reasons.items() if int(mask) & int(bit)}
        throttling = frozenset(active.intersection((POWER_CAP, *THROTTLE_REASONS)))
        explanations = throttling - {HARDWARE_SLOWDOWN, POWER_CAP}
        return throttling - {HARDWARE_SLOWDOWN} if explanations else throttling


def read_devices(path: Path) -> Iterator[DeviceSamples]:
    """Yield the devices in a telemetry file, up to where it is truncated; invalid lines are skipped.

    Raises OSError, or ValueError if a line is longer, or the compression ratio higher, than a sampler can produce.
    """
    for line in _merged_lines(path):
        try:
            yield DeviceSamples.model_validate_json(line)
        except ValidationError:
            continue


def merge_samples(folder: Path) -> str:
    """Merge the samplers' files of the job in ``folder`` into its telemetry file, and remove them.

    Returns a message if damaged lines were skipped, otherwise "". Devices that are already in the telemetry file stay.
    Raises OSError, or ValueError as ``read_devices``.
    """
    sample_files = sorted(folder.glob("attempt*/rank*.samples"))
    if not sample_files:
        return ""
    compressed, merged_keys, skipped_lines = io.BytesIO(), set[object](), 0
    with gzip.open(compressed, "wb") as file:
        for line in (*_merged_lines(folder / TELEMETRY_FILE), *_new_lines(sample_files)):
            parsed = _parse_json(line)
            device: _Line = parsed if isinstance(parsed, dict) else {}
            first_times = repr(device.get("time"))[:40]  # two samplers of one attempt and rank began at different times
            key = (device.get("attempt"), device.get("rank"), device.get("device"), first_times)
            if device and key not in merged_keys:  # duplicate if an earlier call was killed before it removed the files
                merged_keys.add(key)
                if device.get("device") == HOST:  # the line of each device has the sampler's ``skipped``: add it once
                    skipped_lines += int(device.get("skipped", 0))
                file.write(line.strip() + b"\n")
    atomic_write(folder / TELEMETRY_FILE, compressed.getvalue())
    for path in sample_files:
        path.unlink()
    return f"{folder.name}: damaged telemetry lines skipped: {skipped_lines}" if skipped_lines else ""


def _merged_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a telemetry file, up to where it is truncated."""
    try:
        yield from gzip_lines(path)
    except FileNotFoundError:
        return


def _new_lines(paths: Iterable[Path]) -> Iterator[bytes]:
    """Yield the lines for a telemetry file from samplers' files, one per device and sampler."""
    for path in paths:
        match = _SAMPLES_PATH.search(path.as_posix())
        attempt, rank = (int(match[name]) if match else 0 for name in ("attempt", "rank"))
        for sampler in _read_samplers(path):
            for device in sampler.devices():
                line = {**device, "attempt": attempt, "rank": rank}
                yield json.dumps(line, allow_nan=False, separators=(",", ":")).encode()


def latest_samples(path: Path) -> dict[str, dict[str, float | None]]:
    """Return node → column (such as ``time`` or ``gpu0.power_w``) → latest value, from a sampler's file.

    Reads only the first line and the last lines. Empty before the first sample. Raises OSError.
    """
    with open_file(path) as file:
        header = _parse_header(_parse_json(file.readline(MAX_LINE_BYTES)))
    lines = [_parse_json(line.encode()) for line in tail_lines(path, _TAIL_LINES, _TAIL_BYTES)]
    for line in lines:  # use the last header
        header = _parse_header(line) or header
    if header is None:
        return {}
    values: dict[str, float | None] = {}
    for line in lines:
        if isinstance(line, list) and len(line) == len(header.columns) and all(map(_is_value, line)):
            # GPUs can be sampled in turn: if this sample has no value, the value of an earlier sample stays
            values |= {name: value for name, value in zip(header.columns, line, strict=True) if value is not None}
    return {header.node: values} if values else {}


class Header(Frozen):
    """The first line of a sampler's file. ``columns``: names, such as gpu0.power_w, of the numbers in later lines.

    ``devices``: device → its properties (name, uuid). ``hz``, ``reasons``: as in ``DeviceSamples``.
    """

    node: str
    hz: FiniteFloat
    devices: dict[str, dict[str, str | None]]
    reasons: dict[str, str]
    columns: tuple[str, ...] = Field(min_length=1)


@dataclass
class _SamplerRows:
    """The lines of one sampler process, from its header on; ``rows``: its samples.

    ``skipped``: number of lines that are neither a sample nor an object of unreadable gauges.
    A file has the lines of several processes if a job was started again by hand.
    """

    header: Header
    rows: list[list[float | None]] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    skipped: int = 0

    def add(self, line: object) -> None:
        """Add a parsed line: a sample or an object of unreadable gauges; count any other line."""
        match line:
            case list() if len(line) == len(self.header.columns) and line[0] is not None and all(map(_is_value, line)):
                self.rows.append(line)
            case {"unreadable": dict(unreadable)}:
                self.unreadable = {str(name): str(reason) for name, reason in unreadable.items()}
            case _:
                self.skipped += 1

    def devices(self) -> Iterator[_Line]:
        """Yield the fields of ``DeviceSamples`` for each device, without ``attempt`` and ``rank``."""
        columns = dict(zip(self.header.columns, zip(*self.rows, strict=True), strict=True)) if self.rows else {}
        times = columns.pop("time", ())
        for device, properties in self.header.devices.items():
            line: _Line = {"node": self.header.node, "device": device, "hz": self.header.hz, **properties}
            line |= {"unreadable": _with_prefix(self.unreadable, f"{device}.")}
            line |= {"reasons": self.header.reasons, "skipped": self.skipped, "time": times}
            yield line | _with_prefix(columns, f"{device}.")


def _with_prefix(values: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Return the values whose names start with ``prefix``, by the name without it."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _read_samplers(path: Path) -> list[_SamplerRows]:
    """Return the lines of each sampler process in a file; lines before the first header are ignored."""
    samplers: list[_SamplerRows] = []
    with open_file(path) as file:
        for text in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
            line = _parse_json(text)
            if header := _parse_header(line):
                samplers.append(_SamplerRows(header))
            elif samplers:
                samplers[-1].add(line)
    return samplers


def _parse_header(line: object) -> Header | None:
    try:
        return Header.model_validate(line) if isinstance(line, dict) and "columns" in line else None
    except ValidationError:
        return None


def _is_value(value: object) -> bool:
    """Whether ``value`` is a finite number or null."""
    if isinstance(value, bool):
        return False
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


def _parse_json(text: bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
