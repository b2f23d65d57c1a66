"""Faults of a shared filesystem; see tests.bench.cluster."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from seatrial.bench import metadata, shared_files, storage
from tests.bench import cluster

CACHED_S = 1.2
SLOW_S = 60.0  # added to the reported time only


def _replace_in_place(path: Path, data: bytes) -> None:
    """Replace a file in place with two writes."""
    with path.open("wb", buffering=0) as file:
        file.write(data[:100])
        time.sleep(0.001)
        file.write(data[100:])


def _append_at_cached_end(file: int, data: bytes) -> None:
    """Append as an NFS client does, at the end of the file in its cache."""
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_APPEND)
    end = os.fstat(file).st_size
    time.sleep(0.01)
    os.pwrite(file, data, end)


def _no_locks(file: int) -> bool:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def _hang(file: int) -> bool:
    time.sleep(60)
    return False


def _negative_cache() -> Any:
    """Return a fake of has_content with a negative name cache of CACHED_S seconds."""
    first_query: dict[Path, float] = {}
    real = shared_files.has_content

    def has_content(path: Path, digest: str) -> bool:
        since = time.monotonic() - first_query.setdefault(path, time.monotonic())
        return (since > CACHED_S or not path.name.startswith("late")) and real(path, digest)

    return has_content


def _other_owner(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_uid + 1, stat.st_gid


def _fail_to_remove(*arguments: Any, **options: Any) -> None:
    return None


def _no_direct_io(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
    return _open(path, flags, *arguments, **options)


def _slow_write(path: Path, size: int) -> storage.StreamResult:
    written = _write_stream(path, size)
    return storage.StreamResult(written.seconds + SLOW_S, written.direct)


def _at_rate(rate: float) -> cluster.Fault:
    """Let all metadata operations report this rate per node, whatever the disk of the test does."""
    measured, listed = metadata._time_operation, metadata.list_files

    def replaced(*arguments: Any) -> metadata.OperationTiming:
        files = measured(*arguments).files
        return metadata.OperationTiming(files, files / rate)

    def replaced_list(folder: Path, count: int) -> metadata.OperationTiming:
        files = listed(folder, count).files
        return metadata.OperationTiming(files, files / rate)

    return lambda rank: patch.multiple(metadata, _time_operation=replaced, list_files=replaced_list)


def _short_timeouts(rank: int) -> AbstractContextManager[Any]:
    """Shorten the timeouts of the probes, for faults that are visible immediately."""
    del rank
    return patch.multiple(shared_files, VISIBILITY_TIMEOUT_S=0.3, REPLACE_S=0.1, RECORDS=10)


_open, _write_stream = os.open, storage.write_stream

FAULTS: dict[str, cluster.Fault] = {
    "no_flock": cluster.everywhere(shared_files, "try_flock", lambda file: True),
    "no_fcntl": cluster.on(1, shared_files, "try_fcntl", lambda file: True),
    "flock_unsupported": cluster.everywhere(shared_files, "try_flock", _no_locks),
    "flock_hangs": cluster.on(1, shared_files, "try_flock", _hang),
    "short_lock_timeout": cluster.everywhere(shared_files, "LOCK_TIMEOUT_S", 0.1),
    "never_contended": cluster.everywhere(
        shared_files, "contend_for_lock", lambda *arguments: shared_files.LockCounts(0, 0)
    ),
    "partial_rename": cluster.everywhere(shared_files, "replace", _replace_in_place),
    "no_append": cluster.everywhere(shared_files, "append", _append_at_cached_end),
    "stale_pages": cluster.on(1, shared_files, "mapped_digest", cache(shared_files.mapped_digest)),
    "late_names": cluster.on(1, shared_files, "has_content", _negative_cache()),
    "short_timeouts": _short_timeouts,
    "other_owner": cluster.on(1, shared_files, "owner", _other_owner),
    "other_user": cluster.on(2, os, "geteuid", lambda: 1234),
    "rmtree_fails": cluster.everywhere(shutil, "rmtree", _fail_to_remove),
    "no_direct_io": cluster.on(1, os, "open", _no_direct_io),
    "fast_metadata": _at_rate(10_000),
    "slow_metadata": _at_rate(50),
    "slow_disk": cluster.on(2, storage, "write_stream", _slow_write),
}
