"""What an errno means depends on who speaks."""

from __future__ import annotations

import io

import pytest

from seatrial.diagnose import explain
from seatrial.diagnose.errnos import errno_rows, has_speaker
from seatrial.diagnose.log_search import search
from seatrial.diagnose.signature import Signature
from seatrial.diagnose.signatures import signatures

NO_FILE = ("disk", "df -", "quota", "findmnt")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cp: error writing '/scratch/x': No space left on device", "host.disk_full"),
        ("OSError: [Errno 28] No space left on device", "host.disk_full"),
        ("mkdir /sys/fs/cgroup/memory/docker/01: no space left on device", "errno.cgroup_full"),
        ("inotify_add_watch failed: No space left on device", "host.file_watches"),
        ("[n1:3312] semget failed: No space left on device", "errno.semaphores"),
        ("unshare failed: No space left on device", "errno.user_namespaces"),
        ("foo: flux_open failed: No space left on device", "errno.enospc"),
        ("write failed: Disk quota exceeded", "filesystem.quota"),
        ("join session keyring: create session key: disk quota exceeded", "containers.keyring"),
        ("failed to create fsnotify watcher: too many open files", "host.file_watches"),
        ("accept: too many open files", "host.too_many_files"),
        ("foo: flux_open failed: Invalid argument", "errno.einval"),
        ("error: write /sys/module/x/y: Invalid argument", "file.invalid_argument"),
        ("foo: flux_open failed: Operation not supported", "errno.eopnotsupp"),
        ("foo: flux_open failed: No such device", "errno.enodev"),
        ("mmap with MAP_HUGETLB failed: Cannot allocate memory", "errno.huge_pages"),
        ("failed to create bpf map: Cannot allocate memory", "errno.bpf"),
        ("mlock failed: Cannot allocate memory", "errno.locked_memory"),
    ],
)
def test_errno_is_read_by_its_speaker(line: str, expected: str) -> None:
    finding = explain(search(io.BytesIO(line.encode()), "x"))[0]
    assert finding.signature == expected
    if expected.startswith("errno.") and has_speaker(line):
        assert not any(word in f"{finding.title} {finding.first_command}" for word in NO_FILE)


def test_errno_of_an_unknown_speaker_has_no_command() -> None:
    stated = [Signature.model_validate(row) for row in errno_rows() if row.get("role") == "family"]
    assert stated
    for signature in stated:
        (finding,) = explain(search(io.BytesIO(signature.examples[0].encode()), "x"))
        assert (finding.signature, finding.first_command, finding.confidence) == (signature.id, "", "low")


def test_every_meaning_has_a_speaker_in_its_examples() -> None:
    ids = {row["id"] for row in errno_rows() if row.get("role") != "family"}
    meanings = [signature for signature in signatures() if signature.id in ids]
    assert {signature.id for signature in meanings} == ids
    assert [each.id for each in meanings if not any(map(has_speaker, each.examples))] == []
