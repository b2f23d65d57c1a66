"""Files and folders that are complete or not there: no reader, crash or full disk ever meets half of one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the last is a limit of the process (ulimit -f)
Content = bytes | Callable[[BinaryIO], object]  # or a function that writes it


def atomic_write(path: Path, content: Content, *, sync: bool = True) -> None:
    """Replace ``path`` in one step; a failure leaves the previous file. Raises OSError.

    ``sync``: the content is on disk when this returns. False where a crash of the machine may lose it.
    """
    stage(path, content, sync=sync).replace(path)


def stage(path: Path, content: Content, *, sync: bool = True) -> Path:
    """The complete new file beside ``path``, for the caller to put in its place. Raises OSError and leaves nothing."""
    if path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    staged = path.with_name(f"{path.name}.incomplete-{os.getpid()}")
    try:
        with staged.open("wb") as file:
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
    """Write ``record`` as indented JSON. Raises OSError, and ValueError on a number that JSON does not have (NaN)."""
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    atomic_write(path, text.encode())


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``path`` at the end; a failure leaves nothing. Raises OSError.

    Where another process has made ``path`` meanwhile, that one stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f"{path.name}.incomplete-", dir=path.parent))
    try:
        making.chmod(0o755)  # mkdtemp gives no rights to others
        yield making
        try:
            making.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk: after a rename, the new one. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
