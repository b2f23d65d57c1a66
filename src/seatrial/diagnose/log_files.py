"""Reads files for ``seatrial explain``: finds the logs of a folder, and opens a log as a stream, unpacking gzip."""

from __future__ import annotations

import gzip
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from seatrial.model import UsageError
from seatrial.util.input_files import (
    GZIP_MAGIC,
    HeadThenRest,
    LimitedGzip,
    Readable,
    open_file,
    with_limit,
)

STDIN = Path("-")
_RUN_FILES = frozenset(("run.json", "measurements.jsonl"))  # in each run directory from the start of the run
_RUN_LOG = re.compile(r"\.(?:log|err|out)$|_trace_rank_")  # also dumps of torch's flight recorder
# Not searched, since programs and documents quote error messages
_NO_LOG_SUFFIXES = frozenset(
    (".py", ".pyc", ".ipynb", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".go", ".rs", ".js", ".html")
)
_NO_LOG_FOLDERS = frozenset((".git", "__pycache__", "site-packages", "node_modules", ".venv"))
_HEAD_BYTES = 1024
_PRINTABLE = bytes([*range(32, 127), *b"\t\r\n\x1b"])
# First bytes of other formats → name of the format, and the command that unpacks it
_FORMATS = {
    b"\x28\xb5\x2f\xfd": ("zstd data", "zstd -dc"),
    b"\xfd7zXZ\x00": ("xz data", "xz -dc"),
    b"BZh": ("bzip2 data", "bzip2 -dc"),
    b"LPKSHHRH": ("a binary journal", "journalctl -o short-iso-precise --file"),
    b"\xff\xfe": ("UTF-16 text", "iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "iconv -f UTF-16 -t UTF-8"),
}
_MAX_MAGIC_BYTES = max(map(len, _FORMATS))


class BinaryFileError(UsageError):
    """The file is not text."""


def log_files(path: Path, errors: list[str]) -> list[Path]:
    """The logs of a folder and its subfolders, in the order of the numbers in their names; a file gives itself.

    Of a run directory, only the logs of its jobs are returned, since its reports quote log lines. Links to folders are
    not followed. Adds a sentence to ``errors`` for a folder without logs and for each unreadable folder.
    """
    if not path.is_dir():
        return [path]
    files: list[Path] = []
    errors_before = len(errors)
    in_jobs = set()  # the folder ``jobs`` of each run directory, and its subfolders
    for folder, subfolders, names in os.walk(
        path, onerror=lambda error: errors.append(f"cannot read {error.filename}: {error.strerror}")
    ):
        if _RUN_FILES.issubset(names) or (folder == str(path) and "jobs" in subfolders):
            subfolders[:] = [name for name in subfolders if name == "jobs"]
            in_jobs.add(os.path.join(folder, "jobs"))
            continue
        subfolders[:] = [name for name in subfolders if name not in _NO_LOG_FOLDERS]
        is_job = folder in in_jobs
        if is_job:
            in_jobs.update(os.path.join(folder, name) for name in subfolders)
        candidates = (Path(folder, name) for name in names if is_job or Path(name).suffix not in _NO_LOG_SUFFIXES)
        files += [file for file in candidates if (not is_job or _RUN_LOG.search(file.name)) and _is_regular(file)]
    if not files and len(errors) == errors_before:
        errors.append(f"no logs in {path}")
    return sorted(files, key=_natural_order)


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return True  # such as a broken link: reading it tells why


def _natural_order(path: Path) -> list[tuple[int, str]]:
    """Key that sorts rank2.log before rank10.log."""
    return [(int(digits or 0), text) for text, digits in re.findall(r"(\D*)(\d{0,18})", str(path))]


@contextmanager
def open_log(log: Path, in_folder: bool = False) -> Iterator[tuple[Readable, str]]:
    """The stream of a log or of standard input, unpacked if it is gzipped, and its name.

    Raises UsageError if it cannot be read to its end, and BinaryFileError if it is not text. A file of a folder
    (``in_folder``) is not text if its first bytes contain a zero byte.
    """
    name = "standard input" if log == STDIN else str(log)
    try:
        if log == STDIN:
            if sys.stdin is None:  # Python's value for a closed stream
                raise UsageError("standard input is closed")
            yield _unpacked(with_limit(sys.stdin.buffer, name, is_stdin=True), name, in_folder), name
            return
        with open_file(log, pipes=True) as file:
            yield _unpacked(with_limit(file, name, is_stdin=False), name, in_folder), name
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{name}: the gzip data is truncated or damaged: {error}; read up to there") from error
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from error


def _unpacked(file: BinaryIO, name: str, in_folder: bool) -> Readable:
    head = _head(file)
    stream = HeadThenRest(file, head)
    if head.startswith(GZIP_MAGIC):
        return LimitedGzip(cast("BinaryIO", stream), name)
    for magic, (kind, command) in _FORMATS.items():
        if head.startswith(magic):
            raise UsageError(f"{name} is {kind}, which is not read; run: {command} {name} | seatrial explain -")
    if b"\0" in head and (in_folder or not _is_mostly_text(head)):
        raise BinaryFileError(name)
    return stream


def _is_mostly_text(head: bytes) -> bool:
    """Whether the bytes besides zeros are text; a log may begin with a run of zeros."""
    data = head.replace(b"\0", b"")
    return len(data.translate(None, _PRINTABLE)) <= len(data) / 10


def _head(file: BinaryIO) -> bytes:
    """The first bytes, read until they are a line or _HEAD_BYTES: a pipe may deliver single bytes."""
    head = b""
    while len(head) < _HEAD_BYTES and (b"\n" not in head or len(head) < _MAX_MAGIC_BYTES):
        chunk = file.read(_HEAD_BYTES)
        if not chunk:
            break
        head += chunk
    return head
