"""Reading an archive that a stranger made: nothing is written outside the folder, and nothing fills the memory."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from seatrial.handover import archive
from seatrial.model import UsageError

SUMS = archive.SUMS
ROOT = archive.ROOT


def member(
    name: str, content: bytes = b"x", kind: bytes = tarfile.REGTYPE, target: str = "", mode: int = 0o644
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, len(content) if kind == tarfile.REGTYPE else 0
    info.mode = mode
    return info


def packed(infos: Iterable[tarfile.TarInfo]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for info in (*infos, member(f"{ROOT}/{SUMS}")):
            tar.addfile(info, io.BytesIO(b"x" * info.size))
    return file.getvalue()


def with_headers(headers: dict[str, str]) -> bytes:
    info = member(f"{ROOT}/a")
    info.pax_headers = headers
    return packed([info])


def beside(data: bytes) -> bytes:
    """An archive with data after its last file."""
    return gzip.compress(gzip.decompress(packed([])) + data)


def hidden_member() -> bytes:
    """A file after the blocks that end an archive: tar --ignore-zeros extracts it."""
    return beside(gzip.decompress(packed([member(f"{ROOT}/hidden")])))


PATH, KIND = "not a path below", "not a regular file as seatrial writes it"
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "parent": (lambda: packed([member(f"{ROOT}/../../outside")]), PATH),
    "other root": (lambda: packed([member("outside")]), PATH),
    "absolute": (lambda: packed([member("/tmp/seatrial-outside")]), PATH),
    "empty part": (lambda: packed([member(f"{ROOT}//outside")]), PATH),
    "line break": (lambda: packed([member(f"{ROOT}/a\nb")]), PATH),
    "terminal sequence": (lambda: packed([member(f"{ROOT}/\x1b[2Ja")]), PATH),
    "direction mark": (lambda: packed([member(f"{ROOT}/a\u202egpj.sh")]), PATH),
    "backslash": (lambda: packed([member(f"{ROOT}/a\\nb")]), PATH),
    "undecodable": (lambda: packed([member(f"{ROOT}/a\udcff")]), KIND),
    "symbolic link": (lambda: packed([member(f"{ROOT}/a", kind=tarfile.SYMTYPE, target="/etc/passwd")]), KIND),
    "hard link": (lambda: packed([member(f"{ROOT}/a", kind=tarfile.LNKTYPE, target=f"{ROOT}/b")]), KIND),
    "device": (lambda: packed([member(f"{ROOT}/a", kind=tarfile.CHRTYPE)]), KIND),
    "FIFO": (lambda: packed([member(f"{ROOT}/a", kind=tarfile.FIFOTYPE)]), KIND),
    "folder": (lambda: packed([member(f"{ROOT}/a", kind=tarfile.DIRTYPE)]), KIND),
    "setuid": (lambda: packed([member(f"{ROOT}/a", mode=0o4755)]), KIND),
    "sparse file": (
        lambda: with_headers({"GNU.sparse.major": "0", "GNU.sparse.map": "0,1", "GNU.sparse.size": "99999999999"}),
        KIND,
    ),
    "hidden comment": (lambda: with_headers({"comment": "the limits of annex 2 apply"}), KIND),
    "negative size": (lambda: with_headers({"size": "-1"}), KIND),
    "two records": (lambda: packed([member(f"{ROOT}/run/trial.json"), member(f"{ROOT}/run/trial.json")]), "twice"),
    "huge header": (lambda: with_headers({"comment": "x" * 8 * 2**20}), "a header of more than"),
    "too many files": (lambda: packed(member(f"{ROOT}/{number}") for number in range(12)), "files"),
    "zeros after the end": (lambda: beside(bytes(4 * 2**20)), "after the last file"),
    "data after the end": (lambda: beside(b"x"), "after the last file"),
    "file after the end": (hidden_member, "after the last file"),
    "second gzip stream": (lambda: packed([]) + gzip.compress(b"x"), "after the last file"),
    "cut": (lambda: packed([member(f"{ROOT}/a", bytes(range(256)) * 99)])[:-20], "cut or damaged"),
    "cut before the sums": (lambda: gzip.compress(gzip.decompress(packed([member(f"{ROOT}/a")]))[:1024]), SUMS),
    "cut within a file": (
        lambda: gzip.compress(gzip.decompress(packed([member(f"{ROOT}/a", bytes(9999))]))[:5000]),
        "cut or damaged",
    ),
    "not gzip": (lambda: b"PK\x03\x04 something else", "not a bundle"),
    "empty": (lambda: b"", "not a bundle"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    make, message = HOSTILE[kind]
    monkeypatch.setattr(archive, "MAX_FILES", 10)
    (tmp_path / "a.tar.gz").write_bytes(make())
    with pytest.raises(UsageError, match=message):
        archive.read(tmp_path / "a.tar.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "LOG_ALLOWANCE", 2**20)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        info = tarfile.TarInfo(f"{ROOT}/zeros")
        info.size = 32 * 2**20
        tar.addfile(info, io.BytesIO(bytes(info.size)))
    (tmp_path / "a.tar.gz").write_bytes(file.getvalue())
    with pytest.raises(UsageError, match="times its size"):
        archive.read(tmp_path / "a.tar.gz")


def test_files_that_nobody_asked_for_are_not_kept_in_memory(tmp_path: Path) -> None:
    archive.write(tmp_path / "a.tar.gz", [("large", bytes(24 * 2**20)), (SUMS, b"x")])
    tracemalloc.start()
    digests, contents = archive.read(tmp_path / "a.tar.gz", [SUMS])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (list(digests), contents) == (["large", SUMS], {SUMS: b"x"})
    assert peak < 8 * 2**20


def test_a_long_name_and_a_large_file_come_back(tmp_path: Path) -> None:
    files = {"/".join(["x" * 200] * 3): b"1" * 3 * 2**20, "run/Ärger": b"", SUMS: b""}
    archive.write(tmp_path / "a.tar.gz", files.items())
    assert archive.read(tmp_path / "a.tar.gz")[1] == files


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "no", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UsageError, match=message):
            archive.read(path)
