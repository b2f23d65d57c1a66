"""Merging samplers' lines, valid or damaged, into the telemetry file of a job."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from seatrial.telemetry import files
from seatrial.telemetry.files import TELEMETRY_FILE, DeviceSamples, latest_samples, merge_samples, read_devices

HEADER = {
    "node": "n0",
    "hz": 1.0,
    "devices": {"host": {}, "gpu0": {"name": "H200", "uuid": "GPU-0"}},
    "reasons": {"4": "software power cap"},
    "columns": ["time", "host.cpu_util", "gpu0.power_w", "gpu0.clocks_event_reasons"],
}
UNREADABLE = {"unreadable": {"gpu0.nvlink_rx_gbs": "no NVLink is up", "host.gpu": "no driver"}}


def write_samples(job: Path, *lines: Any, attempt: int = 1, rank: int = 0) -> Path:
    path = job / f"attempt{attempt}/rank{rank}.samples"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    path.write_bytes(text)
    return path


def read_merged(job: Path) -> list[DeviceSamples]:
    return list(read_devices(job / TELEMETRY_FILE))


def test_rows_become_columns_with_one_line_per_device(tmp_path: Path) -> None:
    raw = write_samples(tmp_path, HEADER, [10.0, 50.0, 80.1, 4], UNREADABLE, [11.0, None, 700.0, 0])
    assert merge_samples(tmp_path) == ""
    host, gpu = read_merged(tmp_path)
    assert (host.subject, gpu.subject, gpu.name, gpu.attempt, gpu.rank) == ("n0", "n0/gpu0", "H200", 1, 0)
    assert host.time == gpu.time == (10.0, 11.0)
    assert host.column("cpu_util") == (50.0, None)
    assert gpu.column("power_w") == (80.1, 700.0)
    assert gpu.reasons == HEADER["reasons"]
    assert (host.unreadable, gpu.unreadable) == ({"gpu": "no driver"}, {"nvlink_rx_gbs": "no NVLink is up"})
    assert gpu.column("sm_util") == ()
    assert not raw.exists()


def test_merged_file_is_json_lines_with_columns(tmp_path: Path) -> None:
    """pandas.read_json(path, lines=True) reads it."""
    write_samples(tmp_path, HEADER, [10.0, 50, 80.1, 4])
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
        {"unreadable": 3},
        "text",
    ],
)
def test_damaged_line_is_skipped_and_counted(tmp_path: Path, line: Any) -> None:
    write_samples(tmp_path, HEADER, [9.0, 50.0, 80.1, 4], line, [11.0, 50.0, 80.1, 4])
    assert merge_samples(tmp_path).endswith("damaged telemetry lines skipped: 1")
    host, gpu = read_merged(tmp_path)
    assert gpu.time == (9.0, 11.0)
    assert host.skipped == 1


def test_lines_without_a_valid_header_are_ignored(tmp_path: Path) -> None:
    write_samples(tmp_path, [9.0, 50.0, 80.1, 4], {**HEADER, "columns": []}, {**HEADER, "hz": "often"})
    merge_samples(tmp_path)
    assert read_merged(tmp_path) == []


def test_header_without_samples_gives_devices_without_samples(tmp_path: Path) -> None:
    write_samples(tmp_path, HEADER)
    merge_samples(tmp_path)
    assert [(device.device, device.time) for device in read_merged(tmp_path)] == [("host", ()), ("gpu0", ())]


def test_second_header_in_a_file_starts_new_devices(tmp_path: Path) -> None:
    write_samples(tmp_path, HEADER, [9.0, 1.0, 80.1, 4], b"[10.0,", HEADER, [50.0, 2.0, 80.1, 4])
    merge_samples(tmp_path)
    assert [device.time for device in read_merged(tmp_path) if device.device == "host"] == [(9.0,), (50.0,)]


def test_merging_again_keeps_earlier_devices_without_duplicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(tmp_path, HEADER, [9.0, 1.0, 80.1, 4])
    with monkeypatch.context() as killed:
        killed.setattr(Path, "unlink", lambda _path: None)  # killed before it could remove them
        merge_samples(tmp_path)
    write_samples(tmp_path, {**HEADER, "node": "n1"}, [9.0, 1.0, 80.1, 4], attempt=2, rank=8)
    merge_samples(tmp_path)
    devices = [(device.node, device.device, device.attempt, device.rank) for device in read_merged(tmp_path)]
    assert devices == [("n0", "host", 1, 0), ("n0", "gpu0", 1, 0), ("n1", "host", 2, 8), ("n1", "gpu0", 2, 8)]
    assert merge_samples(tmp_path) == "", "no new samples"
    assert len(read_merged(tmp_path)) == 4


def test_truncated_file_is_read_up_to_its_end(tmp_path: Path) -> None:
    for rank in range(200):
        write_samples(tmp_path, HEADER, *([n * 1.37 + rank, n % 7, 80.1, 4] for n in range(20)), rank=rank)
    merge_samples(tmp_path)
    content = (tmp_path / TELEMETRY_FILE).read_bytes()
    (tmp_path / TELEMETRY_FILE).write_bytes(content[: len(content) // 2])
    assert 0 < len(read_merged(tmp_path)) < 400


# With ids: gzip output contains the time, and xdist workers must collect the same test names
@pytest.mark.parametrize(
    "content", [b"", b"no gzip at all", gzip.compress(b'{"node": 3}\n[1]\nx\n')], ids=["empty", "no gzip", "no header"]
)
def test_other_content_has_no_devices(tmp_path: Path, content: bytes) -> None:
    (tmp_path / TELEMETRY_FILE).write_bytes(content)
    assert read_merged(tmp_path) == []


def test_columns_of_different_lengths_are_refused() -> None:
    line = {"node": "n0", "device": "gpu0", "attempt": 1, "rank": 0, "hz": 1, "time": [1, 2], "power_w": [1]}
    with pytest.raises(ValueError, match="different lengths"):
        DeviceSamples.model_validate(line)


def test_merged_file_is_compressed(tmp_path: Path) -> None:
    names = [f"gpu{gpu}.{name}" for gpu in range(8) for name in ("power_w", "temperature_c", "sm_clock_mhz")]
    header = {**HEADER, "devices": {f"gpu{gpu}": {} for gpu in range(8)}, "columns": ["time", *names]}
    rows = ([1e9 + n, *(600 + n * k % 97 / 10 for k in range(24))] for n in range(3600))
    raw = write_samples(tmp_path, header, *rows).stat().st_size
    merge_samples(tmp_path)
    assert (tmp_path / TELEMETRY_FILE).stat().st_size < raw / 3
    assert files.TELEMETRY_FILE == "telemetry.jsonl.gz"


def test_the_latest_sample_of_a_sampler_that_still_writes(tmp_path: Path) -> None:
    """GPUs can be sampled in turn: a value that the last sample lacks is that of an earlier one."""
    raw = write_samples(tmp_path, HEADER, [10.0, 50.0, 80.1, 4], UNREADABLE, [11.0, 60.0, None, None], b"[12.0, 5")
    assert latest_samples(raw) == {
        "n0": {"time": 11.0, "host.cpu_util": 60.0, "gpu0.power_w": 80.1, "gpu0.clocks_event_reasons": 4}
    }
    again = {**HEADER, "node": "n1"}
    raw = write_samples(tmp_path, HEADER, *([[1.0, 2.0, 3.0, 4]] * 100), again, [13.0, 1.0, 2.0, 0])
    assert latest_samples(raw)["n1"]["time"] == 13.0
    for lines in ((), (b"\x00",), (HEADER,), (b"[1, 2]", b"[3, 4]")):
        assert latest_samples(write_samples(tmp_path, *lines)) == {}
