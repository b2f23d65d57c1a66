"""Atomic writes: a file or folder with its final name is never incomplete, even after a crash or on a full disk."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # EFBIG: the process limit (ulimit -f)
# The suffix of a temporary file (the pid, see stage) or of a temporary folder (8 random characters of mkdtemp)
_INCOMPLETE = re.compile(r"\.incomplete-(\d+|[a-z0-9_]{8})$")
Content = bytes | Callable[[BinaryIO], object]  # the bytes, or a function that writes them


def atomic_write(path: Path, content: Content, *, sync: bool = True, mode: int | None = None) -> None:
    """Replace the file ``path`` atomically; on failure the previous file remains. Raises OSError.

    ``sync``: fsync before returning; without it a crash of the machine can lose the content. ``mode``: by default that
    of the previous file, or 0o666 for a new file; without the bits of the umask in all cases.
    """
    stage(path, content, sync=sync, mode=mode).replace(path)


def stage(path: Path, content: Content, *, sync: bool = True, mode: int | None = None) -> Path:
    """Write ``content`` to a temporary file beside ``path`` and return its path; the caller renames it.

    Raises OSError, after removing the temporary file.
    """
    if path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    staged = path.with_name(f"{path.name}.incomplete-{os.getpid()}")
    if mode is None:
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666
    try:
        with open(staged, "wb", opener=partial(os.open, mode=mode)) as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    return staged


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Write ``record`` as indented JSON. Raises OSError, and ValueError on NaN or infinity."""
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    atomic_write(path, text.encode())


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to ``path`` on exit, and removed on failure. Raises OSError.

    If another process created ``path`` meanwhile, that folder is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f"{path.name}.incomplete-", dir=path.parent))
    try:
        staged.chmod(0o755)  # mkdtemp sets 0700
        yield staged
        try:
            staged.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def remove_incomplete(folder: Path) -> None:
    """Remove temporary files and folders of killed processes below ``folder``, while no process writes there."""
    for path in sorted(folder.rglob("*.incomplete-*")):
        if not _INCOMPLETE.search(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder to disk, such as a renamed file. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
