"""Reads the JSON report of nccl-tests 2.17.3 and later (option -J FILE), as the lines of its text output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from seatrial.discover import nccl_tests_output
from seatrial.discover.nccl_tests_output import NcclTestsOutput

_PLACES = ("out_of_place", "in_place")


def is_report(document: Any) -> bool:
    return isinstance(document, dict) and "nccl_version" in document and ("args" in document or "config" in document)


def parse(document: dict[str, Any]) -> NcclTestsOutput:
    """The table and the devices of a report; values of another type than nccl-tests writes are omitted."""
    return nccl_tests_output.parse(_lines(document))


def _lines(document: dict[str, Any]) -> Iterator[str]:
    config, has_average = _mapping(document.get("config")), "average_bus_bandwidth" in document
    path = next((text for text in _list(document.get("args")) if isinstance(text, str)), "")
    if match := re.search(r"(\w+?_perf)(?:_mpi)?$", path.replace("\\/", "/")):
        yield f"# Collective test starting: {match[1]}"
    if _is_count(config.get("maximum_bytes")):
        step = f"{config['step_bytes']}(bytes)" if _is_count(config.get("step_bytes")) else "2(factor)"
        yield f"# nThread 1 nGpus 1 minBytes 1 maxBytes {config['maximum_bytes']} step: {step}"
    for each in _mappings(config.get("devices")):  # a process with several GPUs lists only its first GPU
        rank, group, pid, device = (each.get(name) for name in ("rank", "group", "pid", "device"))
        host, model = each.get("hostname"), each.get("device_info")
        if all(map(_is_count, (rank, pid, device))) and isinstance(host, str) and isinstance(model, str):
            yield f"# Rank {rank} Group {group or 0} Pid {pid} on {host} device {device} [] {model}"
    if (version := document.get("nccl_version")) and _is_count(version) and version >= 10000:
        yield f"NCCL version {version // 10000}.{version // 100 % 100}.{version % 100}"
    for text in _list(document.get("env")):
        if isinstance(text, str) and text.startswith("NCCL_") and "=" in text:
            yield "NCCL INFO {} set by environment to {}".format(*text.split("=", 1))
    yield from _table(_mappings(document.get("results")))
    if _is_count(wrong := _mapping(document.get("out_of_bounds")).get("count")):
        yield f"# Out of bounds values : {wrong}"
    # The last message of ncclGetLastError. After a complete run, which has an average, it can be a warning.
    errors = [text for text in _list(document.get("errors")) if isinstance(text, str) and text]
    if has_average:
        yield "# Avg bus bandwidth :"
    elif errors:
        yield f"Test NCCL failure: {errors[0]}"


def _table(results: list[dict[str, Any]]) -> Iterator[str]:
    has_time = any(_mapping(result.get("out_of_place")).get("time") is not None for result in results)
    time = "time" if has_time else "cputime"  # option -C
    places = [place for place in _PLACES if place == "out_of_place" or any(place in result for result in results)]
    yield f"# size count type redop root {' '.join([f'{time} algbw busbw #wrong'] * len(places))}"
    for result in results:
        row = [result.get(name) for name in ("size", "count", "type", "redop", "root")]
        for values in (_mapping(result.get(place)) for place in places):
            row += (values.get(name) for name in ("time" if has_time else "cpu_time", "alg_bw", "bus_bw", "nwrong"))
        yield " ".join("N/A" if value is None else str(value) for value in row)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _mappings(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in _list(value) if isinstance(entry, dict)]
