"""The archive of a bundle: a .tar.gz whose bytes depend on its files only, and which is read without trusting it.

Nothing is extracted to disk: a name in the archive never becomes a path.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import IO, BinaryIO, cast

from seatrial.model import UsageError
from seatrial.util.files import atomic_write
from seatrial.util.input_files import LOG_ALLOWANCE, MAX_GZIP_RATIO, MAX_RECORD_BYTES, open_file

ROOT = "seatrial-bundle"  # folder of all files in the archive
SUMS = "SHA256SUMS"
MAX_FILES = 500_000  # 1,024 nodes of 8 GPUs write a tenth
_MAX_HEADER_BYTES = 2**20  # tar headers of one file; its path takes a few KiB at most
_PAX_HEADERS = {"path", "size"}  # of long names and large files; any other could hold data beside the files
_CHUNK = 2**20


def write(path: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Write an archive of these files (name, content) in this order. Raises UsageError if it cannot be written."""

    def write_to(file: BinaryIO) -> None:
        with (
            gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
        ):
            for name, content in files:
                tar.addfile(_member(f"{ROOT}/{name}", len(content)), io.BytesIO(content))

    try:
        atomic_write(path, write_to)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; name another file with --out") from error


def _member(name: str, size: int) -> tarfile.TarInfo:
    """A regular file with mode 0644, time 0 and owner 0."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def sums_text(digests: Mapping[str, str]) -> str:
    """The lines of SHA256SUMS (name → SHA-256), as sha256sum of coreutils writes them."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def is_plain_name(name: str) -> bool:
    """Whether a name has the same form in SHA256SUMS, which escapes line breaks and backslashes."""
    return name.isprintable() and "\\" not in name


def read(archive: Path, kept: Collection[str] | None = None) -> tuple[dict[str, str], dict[str, bytes]]:
    """Name → SHA-256 of all files, and name → content of the files ``kept``, by default of all.

    Raises UsageError for an archive that is damaged, cut, too large, or not as ``write`` writes it: with other paths,
    links, devices, two files of one name, or data beside the files.
    """
    digests: dict[str, str] = {}
    contents = {}
    try:
        with open_file(archive) as file, gzip.GzipFile(fileobj=file) as packed:
            left = os.fstat(file.fileno()).st_size * MAX_GZIP_RATIO + LOG_ALLOWANCE
            stream = _BoundedStream(packed)
            with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|") as tar:
                for member in tar:
                    name = _name(member, digests)
                    left -= member.size
                    if left < 0 or member.size > MAX_RECORD_BYTES or len(digests) >= MAX_FILES:
                        limit = f"expands to more than {MAX_GZIP_RATIO} times its size, or {MAX_FILES:,} files"
                        raise ValueError(limit)
                    stream.left = member.size + _MAX_HEADER_BYTES
                    source = cast("io.BufferedReader", tar.extractfile(member))
                    if kept is None or name in kept:
                        contents[name] = source.read()
                        digests[name] = hashlib.sha256(contents[name]).hexdigest()
                    else:
                        digests[name] = hashlib.file_digest(source, "sha256").hexdigest()
                    stream.left = _MAX_HEADER_BYTES
                while tar.fileobj and (data := tar.fileobj.read(_CHUNK)):  # gzip compares its checksum at the end
                    if data.strip(b"\0"):
                        raise ValueError("has data after the last file")
    except FileNotFoundError as error:
        raise UsageError(f"cannot read {archive}: {error.strerror}") from error
    except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError, RecursionError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise UsageError(f"{archive} is not a bundle of seatrial, or is cut or damaged: {reason}") from error
    if SUMS not in digests:
        raise UsageError(f"{archive} is not a bundle of seatrial, or is cut: it has no {ROOT}/{SUMS}")
    return digests, contents


class _BoundedStream:
    """A stream that raises ValueError after ``left`` bytes, since tarfile reads headers of any size into memory."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file, self.left = file, _MAX_HEADER_BYTES

    def read(self, size: int) -> bytes:
        data = self._file.read(min(size, _CHUNK))
        self.left -= len(data)
        if self.left < 0:
            raise ValueError(f"a header of more than {_MAX_HEADER_BYTES:,} bytes, or data after the last file")
        return data


def _name(member: tarfile.TarInfo, earlier: Mapping[str, str]) -> str:
    """The name of a file below ROOT. Raises ValueError for a member that ``write`` does not write."""
    shown = repr(member.name[:200])
    info, expected = ({**each.get_info(), "chksum": 0} for each in (member, _member(member.name, member.size)))
    if info != expected or member.size < 0 or member.pax_headers.keys() - _PAX_HEADERS:
        raise ValueError(f"{shown} is not a regular file as seatrial writes it, but a link, a device, a folder or such")
    root, _, name = member.name.partition("/")
    if root != ROOT or not is_plain_name(name) or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{shown} is not a path below {ROOT}/")
    if name in earlier:
        raise ValueError(f"{shown} is there twice")
    return name
