"""Reads files of users and nodes, but only regular files of limited size: others could block or fill the memory.

The functions raise OSError for an unreadable, irregular or too large file, and ValueError for invalid content.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import math
import os
import select
import stat
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

MAX_RECORD_BYTES = 4 * 2**30  # trial.json and measurements.jsonl: 0.9 GB for 1,024 nodes of 8 GPUs
MAX_CONFIG_BYTES = 2**20  # YAML. Trials and baselines are a page long; PyYAML needs minutes for a larger file
MAX_DOCUMENT_BYTES = 64 * 2**20  # other JSON files, such as manifests and configs of models
MAX_NESTING = 100  # levels in JSON; records have about ten
MAX_LINE_BYTES = 2**27  # a line of telemetry has all samples of a GPU: 60 MB for a day at 10 samples a second
GZIP_MAGIC = b"\x1f\x8b"  # first bytes of gzipped data
MAX_GZIP_RATIO = 200  # unpacked / packed bytes; telemetry has 10 to 40, as a column of times hardly compresses
LOG_ALLOWANCE = 2**30  # unpacked bytes of a log that are allowed at any ratio: repeated lines shrink to a thousandth
# of a pipe or device, which may be endless; a log of 1,024 ranks with NCCL_DEBUG=INFO has less
MAX_PIPE_BYTES = 4 * 2**30
SILENT_S = 10.0
_GZIP_ALLOWANCE = 2**20  # unpacked bytes of other files that are allowed at any ratio


class Readable(Protocol):
    """A binary stream."""

    def read(self, size: int, /) -> bytes: ...


def open_file(path: Path, pipes: bool = False) -> io.BufferedReader:
    """Open a regular file, or with ``pipes`` also a pipe, which is empty while no process writes to it.

    Raises OSError for any other file: reading it may block or never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without O_NONBLOCK, opening a FIFO blocks
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode)):
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_bytes(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """The content of a regular file of at most ``max_bytes``."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size <= max_bytes and len(content := file.read(max_bytes + 1)) <= max_bytes:
            return content
    raise OSError(errno.EOVERFLOW, f"larger than the limit of {max_bytes} bytes", str(path))


def read_text(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> str:
    """The content of a regular UTF-8 file of at most ``max_bytes``, unpacked if it is gzipped."""
    content = read_bytes(path, max_bytes)
    if content.startswith(GZIP_MAGIC):
        content = gunzip(content, min(max_bytes, len(content) * MAX_GZIP_RATIO + _GZIP_ALLOWANCE))
    return content.decode("utf-8")


def read_json(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> Any:
    """The JSON document in a regular file of at most ``max_bytes``, see parse_json."""
    return parse_json(read_text(path, max_bytes))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON with finite numbers and at most MAX_NESTING levels. Raises ValueError."""
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        document: Any = json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise ValueError(f"nested deeper than {MAX_NESTING} levels") from error
    level = [document] if isinstance(document, dict | list) else []
    for _ in range(MAX_NESTING):
        groups = (node.values() if isinstance(node, dict) else node for node in level)
        level = [child for group in groups for child in group if isinstance(child, dict | list)]
    if level:
        raise ValueError(f"nested deeper than {MAX_NESTING} levels")
    return document


def _integer(text: str) -> int:
    if len(text) > 20:  # 64 bits, and a sign
        raise ValueError(f"number too large: {text[:20]}…")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number not finite: {text}")
    return value


def gunzip(packed: bytes, max_bytes: int) -> bytes:
    """The content of gzipped data. Raises ValueError if it is damaged, truncated or larger than ``max_bytes``."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            content = file.read(max_bytes + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"is truncated or damaged: {error}") from error
    if len(content) > max_bytes:
        raise ValueError(f"unpacks to more than the limit of {max_bytes} bytes")
    return content


def gzip_lines(path: Path) -> Iterator[bytes]:
    """The lines of a gzipped file, up to where it is truncated or damaged.

    Raises ValueError for a line above MAX_LINE_BYTES, or for more unpacked bytes than MAX_GZIP_RATIO allows.
    """
    ends = suppress(EOFError, zlib.error, gzip.BadGzipFile)
    with open_file(path) as packed, gzip.GzipFile(fileobj=packed) as file, ends:
        limit = os.fstat(packed.fileno()).st_size * MAX_GZIP_RATIO + _GZIP_ALLOWANCE
        unpacked = 0
        while line := file.readline(min(MAX_LINE_BYTES, limit - unpacked) + 1):
            unpacked += len(line)
            if unpacked > limit:
                raise ValueError(f"expands more than {MAX_GZIP_RATIO} times: not written by a sampler")
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"has a line of more than {MAX_LINE_BYTES} bytes")
            yield line


class LimitedGzip(gzip.GzipFile):
    """A gzipped log. Reading raises ValueError above MAX_GZIP_RATIO times the packed bytes plus LOG_ALLOWANCE.

    ``file`` may be a pipe; ``name`` is for the message.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._packed = _CountingStream(file)
        super().__init__(fileobj=cast("BinaryIO", self._packed), mode="rb")
        self._log_name, self._unpacked = name, 0

    def read(self, size: int | None = -1) -> bytes:
        """As GzipFile.read; raises ValueError beyond the limit."""
        data = super().read(size)
        self._unpacked += len(data)
        if self._unpacked > self._packed.count * MAX_GZIP_RATIO + LOG_ALLOWANCE:
            raise ValueError(f"{self._log_name}: expands more than {MAX_GZIP_RATIO} times; read up to there")
        return data


class PipeReader(io.RawIOBase):
    """A pipe, terminal or device, which may never end: reading raises ValueError beyond MAX_PIPE_BYTES.

    ``read`` returns what has arrived. If the pipe is silent for SILENT_S, or does not end in this time, a line on
    stderr says once what is awaited. ``name`` is for the messages.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name, self._bytes = file, name, 0
        self._started, self._is_wait_reported = time.monotonic(), False

    def readable(self) -> bool:
        """Return True, as io.BufferedReader requires."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read into ``buffer``; return the number of bytes, 0 at the end."""
        if not self._is_wait_reported and (not self._has_data(SILENT_S) or time.monotonic() > self._started + SILENT_S):
            self._is_wait_reported = True
            so_far = f"{self._bytes / 2**20:.0f} MiB" if self._bytes else "no data"
            end = f"until the program that writes it ends, for Ctrl-D, or until {MAX_PIPE_BYTES / 2**30:g} GiB"
            print(f"seatrial: {self._name}: {so_far} so far; still waiting {end}", file=sys.stderr, flush=True)
        size = 0
        while size < len(buffer) and (size == 0 or self._has_data(0)):
            data = os.read(self._file.fileno(), len(buffer) - size)
            if not data:
                break
            buffer[size : size + len(data)] = data
            size += len(data)
        self._bytes += size
        if self._bytes > MAX_PIPE_BYTES:
            raise ValueError(
                f"{self._name}: does not end within {MAX_PIPE_BYTES / 2**30:g} GiB; read up to there. "
                "A file of this size can be given by its path"
            )
        return size

    def _has_data(self, timeout_s: float) -> bool:
        return bool(select.select([self._file], [], [], timeout_s)[0])


def with_limit(file: BinaryIO, name: str, *, is_stdin: bool) -> BinaryIO:
    """``file``, from which nothing has been read; if it may never end, as a PipeReader.

    Raises OSError for a pipe other than standard input to which no process writes.
    """
    try:
        mode = os.fstat(file.fileno()).st_mode
    except io.UnsupportedOperation:  # a stream in memory
        return file
    if stat.S_ISREG(mode):
        return file
    head = b"" if is_stdin else _first_byte(file.fileno())
    return cast("BinaryIO", HeadThenRest(PipeReader(file, name), head))


def _first_byte(pipe: int) -> bytes:
    """The first byte of a pipe, empty if it has none yet. Raises OSError if no process writes to it."""
    os.set_blocking(pipe, False)
    try:
        if data := os.read(pipe, 1):
            return data
        raise OSError(errno.EPIPE, "a pipe to which no process writes; start the program that writes to it first")
    except BlockingIOError:
        return b""
    finally:
        os.set_blocking(pipe, True)


class HeadThenRest(io.RawIOBase):
    """A stream of ``head``, then the rest of ``file``, from which ``head`` was read: pipes cannot seek back."""

    def __init__(self, file: Readable, head: bytes = b"") -> None:
        self._file, self._head = file, head

    def readable(self) -> bool:
        """Return True, as io.BufferedReader requires."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Return at most ``size`` bytes, or with -1 all; bytes of the head first."""
        if not self._head:
            return self._file.read(size)
        end = size if size >= 0 else len(self._head)
        data, self._head = self._head[:end], self._head[end:]
        return data if size >= 0 else data + self._file.read(-1)

    def readinto(self, buffer: Any, /) -> int:
        """Read into ``buffer``; return the number of bytes."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _CountingStream:
    """A stream that counts the bytes that were read from it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.count = file, 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.count += len(data)
        return data


def tail_lines(path: Path, count: int, max_bytes: int) -> list[str]:
    """The last ``count`` lines of a regular file, from its last ``max_bytes`` bytes; undecodable bytes are replaced.

    Of a line with carriage returns, which progress bars write, only the text after the last one is returned. A line
    longer than ``max_bytes`` loses its start.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - max_bytes))
        text = file.read(max_bytes).decode("utf-8", errors="replace")
    lines = text.split("\n")
    if size > max_bytes and len(lines) > 1:
        lines = lines[1:]  # the first line is incomplete
    if lines[-1] == "":
        lines.pop()
    return [line.rstrip("\r").rpartition("\r")[2] for line in lines[-count:]]
