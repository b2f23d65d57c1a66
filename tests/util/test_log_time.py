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
