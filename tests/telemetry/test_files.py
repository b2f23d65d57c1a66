"""From the lines of samplers, whole or damaged, to the one file of a job."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from seatrial.telemetry import files
from seatrial.telemetry.files import TELEMETRY_FILE, DeviceSamples, merge_samples, read_devices

HEADER = {
    "node": "n0",
    "hz": 1.0,
    "devices": {"host": {}, "gpu0": {"name": "H200", "uuid": "GPU-0"}},
    "reasons": {"4": "software power cap"},
    "columns": ["time", "host.cpu_util", "gpu0.power_w", "gpu0.clocks_event_reasons"],
}
UNREAD = {"unread": {"gpu0.nvlink_rx_gbs": "no NVLink is up", "host.gpu": "no driver"}}


def left(job: Path, *lines: Any, attempt: int = 1, rank: int = 0) -> Path:
    path = job / f"attempt{attempt}/rank{rank}.samples"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    path.write_bytes(text)
    return path


def gathered(job: Path) -> list[DeviceSamples]:
    return list(read_devices(job / TELEMETRY_FILE))


def test_rows_become_columns_a_line_for_each_device(tmp_path: Path) -> None:
    raw = left(tmp_path, HEADER, [10.0, 50.0, 80.1, 4], UNREAD, [11.0, None, 700.0, 0])
    assert merge_samples(tmp_path) == ""
    host, gpu = gathered(tmp_path)
    assert (host.subject, gpu.subject, gpu.name, gpu.attempt, gpu.rank) == ("n0", "n0/gpu0", "H200", 1, 0)
    assert host.time == gpu.time == (10.0, 11.0)
    assert host.column("cpu_util") == (50.0, None)
    assert gpu.column("power_w") == (80.1, 700.0)
    assert gpu.reasons == HEADER["reasons"]
    assert (host.unreadable, gpu.unreadable) == ({"gpu": "no driver"}, {"nvlink_rx_gbs": "no NVLink is up"})
    assert gpu.column("sm_util") == ()
    assert not raw.exists()


def test_the_file_is_plain_json_lines_whose_lists_are_columns(tmp_path: Path) -> None:
    """What pandas.read_json(path, lines=True) reads."""
    left(tmp_path, HEADER, [10.0, 50, 80.1, 4])
    merge_samples(tmp_path)
    with gzip.open(tmp_path / TELEMETRY_FILE, "rt") as file:
        lines = [json.loads(line) for line in file]
    assert [(line["node"], line["device"]) for line in lines] == [("n0", "host"), ("n0", "gpu0")]
    assert lines[1]["power_w"] == [80.1]


@pytest.mark.parametrize(
    "line",
    [
        b"[10.0,50.0,80.1",  # cut off
        b"\xff\xfe",
        [10.0, 50.0, 80.1],
        [10.0, 50.0, 80.1, 4, 5],
        [None, 50.0, 80.1, 4],
        [10.0, "50", 80.1, 4],
        [10.0, True, 80.1, 4],
        b"[10.0,NaN,80.1,4]",
        b"[10.0,1e999,80.1,4]",
        b"[" * 100_000,
        b"[10.0,50.0,80.1," + b"9" * 5000 + b"]",
        {"columns": 3},
        {"unread": 3},
        "text",
    ],
)
def test_a_damaged_line_is_left_out_and_counted(tmp_path: Path, line: Any) -> None:
    left(tmp_path, HEADER, [9.0, 50.0, 80.1, 4], line, [11.0, 50.0, 80.1, 4])
    assert merge_samples(tmp_path).endswith(": 1 damaged lines of telemetry are left out")
    host, gpu = gathered(tmp_path)
    assert gpu.time == (9.0, 11.0)
    assert host.skipped == 1


def test_what_begins_without_a_header_says_nothing(tmp_path: Path) -> None:
    left(tmp_path, [9.0, 50.0, 80.1, 4], {**HEADER, "columns": []}, {**HEADER, "hz": "often"})
    merge_samples(tmp_path)
    assert gathered(tmp_path) == []


def test_a_header_without_a_sample_is_a_device_without_one(tmp_path: Path) -> None:
    left(tmp_path, HEADER)
    merge_samples(tmp_path)
    assert [(device.device, device.time) for device in gathered(tmp_path)] == [("host", ()), ("gpu0", ())]


def test_a_job_that_is_started_again_by_hand_goes_on_in_the_same_file(tmp_path: Path) -> None:
    left(tmp_path, HEADER, [9.0, 1.0, 80.1, 4], b"[10.0,", HEADER, [50.0, 2.0, 80.1, 4])
    merge_samples(tmp_path)
    assert [device.time for device in gathered(tmp_path) if device.device == "host"] == [(9.0,), (50.0,)]


def test_what_was_gathered_before_stays_and_nothing_is_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left(tmp_path, HEADER, [9.0, 1.0, 80.1, 4])
    with monkeypatch.context() as dying:
        dying.setattr(Path, "unlink", lambda _path: None)  # killed before it could remove them
        merge_samples(tmp_path)
    left(tmp_path, {**HEADER, "node": "n1"}, [9.0, 1.0, 80.1, 4], attempt=2, rank=8)
    merge_samples(tmp_path)
    found = [(device.node, device.device, device.attempt, device.rank) for device in gathered(tmp_path)]
    assert found == [("n0", "host", 1, 0), ("n0", "gpu0", 1, 0), ("n1", "host", 2, 8), ("n1", "gpu0", 2, 8)]
    assert merge_samples(tmp_path) == "", "nothing new"
    assert len(gathered(tmp_path)) == 4


def test_a_file_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    for rank in range(200):
        left(tmp_path, HEADER, *([n * 1.37 + rank, n % 7, 80.1, 4] for n in range(20)), rank=rank)
    merge_samples(tmp_path)
    whole = (tmp_path / TELEMETRY_FILE).read_bytes()
    (tmp_path / TELEMETRY_FILE).write_bytes(whole[: len(whole) // 2])
    assert 0 < len(gathered(tmp_path)) < 400


# named: gzip writes the time into its bytes, and two workers of a second apart would know two tests
@pytest.mark.parametrize(
    "content", [b"", b"no gzip at all", gzip.compress(b'{"node": 3}\n[1]\nx\n')], ids=["empty", "no gzip", "no header"]
)
def test_a_file_of_something_else_has_no_devices(tmp_path: Path, content: bytes) -> None:
    (tmp_path / TELEMETRY_FILE).write_bytes(content)
    assert gathered(tmp_path) == []


def test_columns_of_different_lengths_are_no_device() -> None:
    line = {"node": "n0", "device": "gpu0", "attempt": 1, "rank": 0, "hz": 1, "time": [1, 2], "power_w": [1]}
    with pytest.raises(ValueError, match="different lengths"):
        DeviceSamples.model_validate(line)


def test_an_hour_of_eight_gpus_is_small(tmp_path: Path) -> None:
    names = [f"gpu{gpu}.{name}" for gpu in range(8) for name in ("power_w", "temperature_c", "sm_clock_mhz")]
    header = {**HEADER, "devices": {f"gpu{gpu}": {} for gpu in range(8)}, "columns": ["time", *names]}
    rows = ([1e9 + n, *(600 + n * k % 97 / 10 for k in range(24))] for n in range(3600))
    raw = left(tmp_path, header, *rows).stat().st_size
    merge_samples(tmp_path)
    assert (tmp_path / TELEMETRY_FILE).stat().st_size < raw / 3
    assert files.TELEMETRY_FILE == "telemetry.jsonl.gz"
