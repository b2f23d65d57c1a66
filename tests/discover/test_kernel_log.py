"""Xids of /dev/kmsg: the format of the kernel, and records that are not Xids."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from seatrial.discover import kernel_log
from seatrial.discover.kernel_log import XidEvent, read

# the kernel's format; the texts are examples of NVIDIA's Xid documentation
KMSG = """\
5,0,0,-;Linux version 6.8.0
 SUBSYSTEM=acpi
6,1201,86400123456,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
4,1202,86400200000,-;NVRM: Xid (PCI:0000:05:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel
4,1203,86400300000,-;NVRM: Xid (0000:03:00): 13, 0001 00000000 0000a097 00001b0c 1000f010 00000040
4,1204,86400400000,-;nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 12028, Non-fatal, Link 32
4,1205,86400500000,-;user text: Xid 79, and (PCI:0000:3b:00)
broken line
"""


def kmsg(root: Path, text: str) -> Path:
    (root / "dev").mkdir()
    (root / "dev/kmsg").write_text(text)
    return root


def test_xids_with_time_address_and_number(tmp_path: Path) -> None:
    log = read(kmsg(tmp_path, KMSG))
    assert log.from_s == 0
    assert [(xid.address, xid.number) for xid in log.xids] == [
        ("0000:3b:00", 79),
        ("0000:05:00", 94),
        ("0000:03:00", 13),
    ]
    assert log.xids[0] == XidEvent(seconds=86400.123456, address="0000:3b:00", number=79)


def test_the_newest_xids_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "_MAX_XIDS", 2)
    assert [xid.number for xid in read(kmsg(tmp_path, KMSG)).xids] == [94, 13]


def test_an_empty_log(tmp_path: Path) -> None:
    log = read(kmsg(tmp_path, ""))
    assert (log.from_s, log.xids) == (None, ())


def test_a_log_without_a_new_message_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    os.mkfifo(tmp_path / "dev/kmsg")
    writer = os.open(tmp_path / "dev/kmsg", os.O_RDWR)
    assert read(tmp_path).xids == ()  # else it waits for a message until the test's time limit
    os.close(writer)


def test_a_log_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path)


def test_the_log_of_this_machine() -> None:
    try:
        log = read()
    except (FileNotFoundError, PermissionError) as error:  # in a container os.access() allows what open() does not
        pytest.skip(f"may not read the kernel log: {error}")
    assert log.from_s is not None
