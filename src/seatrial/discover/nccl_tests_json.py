"""Reads the JSON report of nccl-tests 2.17.3 and later (option -J FILE)."""

from __future__ import annotations

import re
from typing import Any

from seatrial.discover.nccl_log import NcclLog
from seatrial.discover.nccl_tests_output import OTHER_ALGBW, Device, NcclTestsOutput, Row, Table, Timing, is_consistent

_MAX_NAME = 300  # characters of a name or message that are kept


def is_report(document: Any) -> bool:
    """Whether a JSON document is a report of nccl-tests."""
    return isinstance(document, dict) and "nccl_version" in document and ("args" in document or "config" in document)


def parse(document: dict[str, Any]) -> NcclTestsOutput:
    """The table and the devices of a report; values of another type than nccl-tests writes are omitted."""
    config, out_of_bounds = _mapping(document.get("config")), _mapping(document.get("out_of_bounds"))
    table = Table(program=_program(document.get("args")), max_bytes=_integer(config.get("maximum_bytes")))
    table.step_bytes = _integer(config.get("step_bytes")) or 0
    table.out_of_bounds = _integer(out_of_bounds.get("count"))
    table.footer_count = int("average_bus_bandwidth" in document)
    for result in _mappings(document.get("results")):
        row, size = _row(result), _integer(result.get("size")) or "unknown"
        if row is None:
            table.rejected.append(f"row of {size} B: incomplete")
        elif _contradicts_itself(table.program, result, row):
            table.rejected.append(f"row of {size} B: algbw contradicts the time")
        else:
            table.rows.append(row)
    # A process with several GPUs lists only its first GPU
    table.devices = [device for entry in _mappings(config.get("devices")) if (device := _device(entry))]
    # The last message of ncclGetLastError. After a complete run, which has an average, it can be a warning.
    errors = [text for text in _list(document.get("errors")) if isinstance(text, str) and text]
    settings = dict(
        text.split("=", 1)
        for text in _list(document.get("env"))
        if isinstance(text, str) and text.startswith("NCCL_") and "=" in text
    )
    return NcclTestsOutput(
        tables=(table,),
        nccl=NcclLog(version=_version(document.get("nccl_version")), settings=settings),
        comm_sizes=frozenset(),
        failure=errors[0][:_MAX_NAME] if errors and not table.footer_count else "",
    )


def _row(result: dict[str, Any]) -> Row | None:
    """The row of one size; None if a value is missing."""
    size, count = _integer(result.get("size")), _integer(result.get("count"))
    out_of_place, in_place = _timing(result.get("out_of_place")), _timing(result.get("in_place"))
    type_name, redop, root = result.get("type"), result.get("redop"), str(result.get("root", "")).strip()
    if size is None or count is None or not isinstance(type_name, str) or not (out_of_place or in_place):
        return None
    return Row(
        size=size,
        count=count,
        type=type_name,
        redop=redop if isinstance(redop, str) else "",
        root=int(root) if re.fullmatch(r"-1|\d{1,6}", root) else None,
        out_of_place=out_of_place,
        in_place=in_place,
    )


def _contradicts_itself(program: str, result: dict[str, Any], row: Row) -> bool:
    """Whether an algbw of the row is not size ÷ time.

    Only ``time`` is compared, not ``cpu_time`` (option -C), which is shorter than the operation.
    """
    places = (("out_of_place", row.out_of_place), ("in_place", row.in_place))
    timings = [timing for name, timing in places if timing and _number(result[name].get("time")) is not None]
    return program not in OTHER_ALGBW and not all(is_consistent(row, timing) for timing in timings)


def _timing(entry: Any) -> Timing | None:
    """Time and bandwidths in ``out_of_place`` or ``in_place`` of a result; None if one of them is missing."""
    values = _mapping(entry)
    time_us, algbw, busbw = (_number(values.get(name)) for name in ("time", "alg_bw", "bus_bw"))
    if time_us is None:
        time_us = _number(values.get("cpu_time"))
    if time_us is None or algbw is None or busbw is None:
        return None
    return Timing(time_us, algbw, busbw, _number(values.get("nwrong")))


def _device(entry: dict[str, Any]) -> Device | None:
    rank, pid, index = (_integer(entry.get(name)) for name in ("rank", "pid", "device"))
    host, name = entry.get("hostname"), entry.get("device_info")
    if rank is None or pid is None or index is None or not isinstance(host, str) or not isinstance(name, str):
        return None
    return Device(
        rank=rank,
        pid=pid,
        host=host[:_MAX_NAME],
        index=index,
        name=name[:_MAX_NAME].strip(),
        group=_integer(entry.get("group")) or 0,
    )


def _program(args: Any) -> str:
    """The program's name without ``_perf``, from its command line; empty if it is not there."""
    path = next((text for text in _list(args) if isinstance(text, str)), "")
    match = re.search(r"(\w+?)_perf(?:_mpi)?$", path.replace("\\/", "/"))
    return match[1] if match else ""


def _version(code: Any) -> str | None:
    """The version of NCCL from its version code: ``2.28.9`` for 22809; None for anything else."""
    number = _integer(code)
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number and number >= 10000 else None


def _integer(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and value >= 0 else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _mappings(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in _list(value) if isinstance(entry, dict)]
