"""The time of log lines in the formats of Slurm, syslog, PyTorch, NCCL and Python."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from seatrial.util.log_time import log_time

AT = datetime(2026, 11, 23, 5, 56, 51, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ("[2026-11-23T05:56:51.250] error: Node n1 not responding", AT + 0.25),  # slurmctld
        ("2026-11-23T07:56:51+02:00 n1 kernel: NVRM: Xid (PCI:0000:3b:00): 79", AT),  # journalctl -o short-iso
        ("2026-11-23 05:56:51,250 ERROR main: failed", AT + 0.25),  # Python's logging
        ("[2026-11-23 05:56:51] n1:7:9 [0] NCCL WARN Call to ibv_create_qp failed", AT),  # NCCL 2.30
        ("[Mon Nov 23 05:56:51 2026] NVRM: Xid (PCI:0000:3b:00): 79", AT),  # dmesg -T
        ("NCCL WARN no time", None),
        ("2026-13-45 05:56:51 impossible", None),
        ("[12345.678] NVRM: Xid", None),  # dmesg: seconds since boot
    ],
)
def test_log_time(line: str, seconds: float | None) -> None:
    assert log_time(line) == seconds


@pytest.mark.parametrize(
    "line", ["[rank3]:[E1123 05:56:51.250000 12 x.cpp:1] Watchdog", "Nov 23 05:56:51 n1 kernel: x"]
)
def test_time_without_a_year_is_in_the_current_one(line: str) -> None:
    seconds = log_time(line)
    assert seconds is not None
    time = datetime.fromtimestamp(seconds, UTC)
    assert (time.month, time.day, time.hour, time.minute, time.second) == (11, 23, 5, 56, 51)


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ("Mon 2026-11-23 05:56:51 UTC n1 kernel: x", AT),  # journalctl -o short-full
        ("Mon 2026-11-23 05:56:51.250000 UTC [s=0a;i=1;b=2;m=3;t=4;x=5]", AT + 0.25),  # journalctl -o verbose
        ("1795413411.250000 n1 kernel[1]: x", 1795413411.0),  # journalctl -o short-unix
        ("__REALTIME_TIMESTAMP=1795413411250000", 1795413411.0),  # journalctl -o export
        ("2026-11-23T06:56:51,250000+01:00 NVRM: Xid", AT + 0.25),  # dmesg --time-format=iso
        ("2023/03/27 15:41:13 Loading NVML", datetime(2023, 3, 27, 15, 41, 13, tzinfo=UTC).timestamp()),  # Go
        (f"[pod/{'a' * 63}-x2k4f/{'c' * 63}] 2026-11-23T05:56:51.250000000Z x", AT + 0.25),  # kubectl --prefix
        ("2026-11-23T07:56:51.250000000+02:00 stderr F x", AT + 0.25),  # containerd
        ("[    5.250000] NVRM: loading NVIDIA UNIX Open Kernel Module", None),
        ("Feb 29 05:56:51 2025 n1 x", None),
    ],
)
def test_formats_of_journal_kernel_and_containers(line: str, seconds: float | None) -> None:
    assert log_time(line) == seconds


@pytest.mark.parametrize(
    ("line", "month", "day"),
    [
        ("[rank0]:[E602 11:17:52.185053341 ProcessGroupNCCL.cpp:632] x", 6, 2),
        ("E1206 18:44:12.715298 1 x.go:1] x", 12, 6),
    ],
)
def test_months_of_one_and_two_digits(line: str, month: int, day: int) -> None:
    time = datetime.fromtimestamp(log_time(line) or 0, UTC)
    assert (time.month, time.day) == (month, day)


def test_a_time_without_a_year_is_not_in_the_future() -> None:
    tomorrow = datetime.fromtimestamp(datetime.now(UTC).timestamp() + 3 * 86400, UTC)
    seconds = log_time(f"{tomorrow:%b %d} 05:56:51 n1 kernel: x")
    assert seconds is not None
    assert seconds < datetime.now(UTC).timestamp()
