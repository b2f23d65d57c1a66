"""Results of long computations, in files of the user's cache folder. Errors are ignored: the cache only saves time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from seatrial.util.files import atomic_write

_DIGEST_BYTES = hashlib.sha256().digest_size


def key(*inputs: bytes) -> str:
    """The key of a result that is computed from ``inputs``."""
    return hashlib.sha256(b"".join(hashlib.sha256(each).digest() for each in inputs)).hexdigest()


def read(name: str, key: str) -> bytes | None:
    """The content that ``write`` stored; None if there is none, it is damaged, or another user may have written it."""
    path = _path(name, key)
    if not path.is_absolute():  # the current folder can hold files of others, such as a cloned repository
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or not _is_own(status) or status.st_mode & 0o022:
                return None
            data = file.read()
    except OSError:
        return None
    digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else None


def write(name: str, key: str, content: bytes) -> None:
    """Store ``content`` as the result of ``name`` for ``key``; results of ``name`` for other keys are removed.

    Writes nothing into a folder of another user.
    """
    path = _path(name, key)
    if not path.is_absolute():
        return
    with contextlib.suppress(OSError):
        existing = next(folder for folder in path.parents if folder.exists())
        if not _is_own(existing.stat()):  # HOME belongs to another user, as with sudo
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_write(path, hashlib.sha256(content).digest() + content, sync=False, mode=0o600)
        for earlier in path.parent.glob(f"{name}-*"):
            if earlier != path:
                earlier.unlink()


def _path(name: str, key: str) -> Path:
    """The file of a result. Without HOME or with a relative XDG_CACHE_HOME, the path is relative: do not use it."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(folder) / "seatrial" / f"{name}-{key[:32]}"


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid()
