"""Logs with carriage returns, colours, CRLF, gzip and JSON records: the same findings, whatever the blocks."""

from __future__ import annotations

import gzip
import io
import json
import random

import pytest

from seatrial.diagnose import explain, log_text
from seatrial.diagnose.log_search import search
from seatrial.diagnose.log_text import line_blocks
from seatrial.util.input_files import LimitedGzip

OOM = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
XID = b"NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
QUOTED = b'Warning  Failed  kubelet  Failed to pull image "nvcr.io/x": not found'


def matches_in(text: bytes) -> list[tuple[str, str]]:
    return [(match.signature.id, match.source) for match in search(io.BytesIO(text), "x")]


def journal(message: object, microseconds: int = 1795413411250000) -> bytes:
    record = {"_BOOT_ID": "b" * 32, "__REALTIME_TIMESTAMP": str(microseconds), "MESSAGE": message, "_HOSTNAME": "n1"}
    return json.dumps(record).encode()


@pytest.mark.parametrize(
    ("text", "places"),
    [
        (b"fine\r\n" * 3 + OOM + b"\r\nfine\r\n", ["x:4"]),
        (b"\r 1%\r 2%" * 5000 + OOM + b"\nfine\n", ["x:1"]),  # a progress bar before the error, beyond MAX_LINE
        (b"fine\n\x1b[1;35mtorch.OutOfMemoryError\x1b[0m: \x1b[35mCUDA out\x1b[0m of memory\n", ["x:2"]),
        (b"\0" * 5000 + OOM + b"\n", ["x:1"]),  # after a loss of power
        (b"\x1b(BCUDA \x1b[Kout of memory", ["x:1"]),
        (b"CUDA\x1b out of memory\n" + OOM, ["x:2"]),
        (journal("fine") + b"\n" + journal("first\n" + OOM.decode()) + b"\n", ["x:2"]),
        (journal(list(OOM)), ["x:1"]),
        (b'{"log":"fine\\n","stream":"stdout"}\n{"log":"' + OOM + b'\\n","time":"2026-11-23T05:56:51.25Z"}\n', ["x:2"]),
        (journal("fine") + b"\n{broken\n" + OOM + b"\n" + journal("fine"), ["x:3"]),
    ],
)
def test_line_ends_colours_and_records(text: bytes, places: list[str]) -> None:
    assert matches_in(text) == [("cuda.out_of_memory", place) for place in places]


def test_records_have_the_time_and_text_of_a_line() -> None:
    (match,) = search(io.BytesIO(journal(XID.decode())), "x")
    assert match.signature.id == "xid.79"
    assert match.line == f"2026-11-23T05:56:51.250000+00:00 n1: {XID.decode()}"
    assert match.time == 1795413411.25
    record = json.dumps({"log": QUOTED.decode() + "\n", "time": "2026-11-23T05:56:51Z"}).encode()
    assert ("kubernetes.image_pull", "x:1") in matches_in(record), "quotes are escaped in the record"


def test_other_json_lines_are_searched_as_text() -> None:
    assert matches_in(b'{"level":"error","msg":"CUDA out of memory"}\n') == [("cuda.out_of_memory", "x:1")]
    assert matches_in(b"[1, 2]\n" + OOM) == [("cuda.out_of_memory", "x:2")]
    assert matches_in(b"{" * 10**5 + b"\n" + OOM) == [("cuda.out_of_memory", "x:2")]


def pieces() -> list[bytes]:
    source = random.Random(1)
    parts = [
        OOM,
        b"\r",
        b"\n",
        b"\r\n",
        b"\x1b[31m",
        b"\x1b[0m",
        b"\x1b",
        b"[1",
        b"m",
        b"y" * 3000,
        b"Read-only file system",
    ]
    return [source.choice(parts) for _ in range(400)]


@pytest.mark.parametrize("size", [1, 2, 7, 100, 5001, 2**16])
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_do_not_change_the_result(
    size: int, records: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if records:
        lines = [journal(piece.decode()) if len(piece) % 2 else piece[:50] for piece in pieces()]
        text = journal("x") + b"\n" + b"\n".join(lines)
    else:
        text = b"".join(pieces())
    whole = list(search(io.BytesIO(text), "x"))
    monkeypatch.setattr(log_text, "BLOCK_BYTES", size)
    stream = LimitedGzip(io.BytesIO(gzip.compress(text)), "x") if packed else io.BytesIO(text)
    assert list(search(stream, "x")) == whole != []


def test_long_records_are_cut_like_long_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    long = journal("z" * 2**19)
    text = journal("x") + b"\n" + long + b"\n" + journal(OOM.decode()) + b"\n"
    for size in (2**10, 2**20):
        monkeypatch.setattr(log_text, "BLOCK_BYTES", size)
        assert matches_in(text) == [("cuda.out_of_memory", "x:3")]


def test_blocks_have_no_escape_sequences() -> None:
    assert b"".join(line_blocks(io.BytesIO(b"\x1b[1mbold\x1b[0m\n\x1b[?25lx"))) == b"bold\nx\n"


def test_findings_of_ranks_at_one_time_are_ordered_by_rank() -> None:
    line = "[rank{}]: 2026-11-23 05:56:51 {}\n"
    text = "".join(
        line.format(rank, message)
        for rank, message in ((11, "CUDA out of memory"), (2, "Read-only file system"), (3, "Too many open files"))
    )
    ids = [each.signature for each in explain(search(io.BytesIO(text.encode()), "x"))]
    assert ids == ["host.read_only", "host.too_many_files", "cuda.out_of_memory"]
