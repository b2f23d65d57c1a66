"""Search of logs: the same result for any blocks, in constant memory, at the speed that the issue of logs needs."""

from __future__ import annotations

import io
import random
import time
import tracemalloc
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest

from seatrial.diagnose import explain, log_search, log_text
from seatrial.diagnose.log_search import search
from seatrial.diagnose.log_text import line_blocks
from seatrial.diagnose.patterns import reduced_database
from seatrial.diagnose.signature import MAX_LINE, Signature
from seatrial.diagnose.signatures import all_signatures, signatures

OOM = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
FILES = b"OSError: [Errno 24] Too many open files"


def found(text: bytes, ignore: str = "") -> list[tuple[str, str]]:
    return [(match.signature.id, match.source) for match in search(io.BytesIO(text), "x", ignore)]


def test_first_line_of_each_signature_in_the_order_of_the_log() -> None:
    text = b"\n".join([b"fine", FILES, OOM, b"", FILES, b"Read-only file system", b""])
    assert [source for _, source in found(text)] == ["x:2", "x:3", "x:6"]


@pytest.mark.parametrize("text", [OOM, OOM + b"\n", b"\n" + OOM, b"\xff\x00" * 99 + b"\n" + OOM])
def test_last_line_needs_no_newline(text: bytes) -> None:
    assert [identifier for identifier, _ in found(text)] == ["cuda.out_of_memory"]


def test_message_below_a_bare_error_names_the_failure() -> None:
    """As programs print it that format exceptions themselves (torchmd/torchmd-net#323)."""
    assert found(b"RuntimeError:\nPin memory thread exited unexpectedly\n") == [("data.pin_memory", "x:2")]
    assert found(b"RuntimeError:\nsomething else\n") == [("exception.runtime", "x:1")]
    above = [("exception.runtime", "x:1"), ("data.pin_memory", "x:2")]
    assert found(b"RuntimeError: something else\nPin memory thread exited unexpectedly\n") == above


def test_every_example_is_found() -> None:
    for signature in signatures():
        for example in signature.examples:
            assert signature.id in [identifier for identifier, _ in found(example.encode() + b"\n")], example


def test_pattern_does_not_match_across_lines() -> None:
    assert found(b"NVRM: Xid (PCI:0000:79:00\n): 48, pid=79\n") == []
    assert found(b"NVRM: Xid (PCI:0000\nNVRM: Xid (PCI:0000:79:00): 48,\nx): 48,") == [("xid.48", "x:2")]


def test_only_the_beginning_of_a_long_line_counts() -> None:
    assert found(b"x" * MAX_LINE + OOM + b"\n" + FILES) == [("host.too_many_files", "x:2")]
    assert found(OOM + b"x" * MAX_LINE) == [("cuda.out_of_memory", "x:1")]


def test_empty_log_needs_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_search, "cached_database", None)
    log_search._database.cache_clear()
    assert found(b"") == []
    with pytest.raises(TypeError):
        found(b"a line\n")


def test_ignored_lines_do_not_hide_later_ones() -> None:
    assert found(b"NCCL INFO " + OOM + b"\n" + OOM, "NCCL INFO") == [("cuda.out_of_memory", "x:2")]


@pytest.mark.parametrize("size", [1, 7, 64, 4096, 5000, 5001, 5002, 2**16])
def test_blocks_do_not_change_the_result(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(size)
    examples = [example.encode() for signature in signatures() for example in signature.examples]
    lines = [source.choice(examples) if source.random() < 0.2 else b"y" * source.randrange(9000) for _ in range(60)]
    text = b"\n".join(lines)
    whole = list(search(io.BytesIO(text), "x"))
    monkeypatch.setattr(log_text, "BLOCK_BYTES", size)
    assert list(search(io.BytesIO(text), "x")) == whole != []


class Endless:
    """A stream of ``size`` bytes without a newline, or of equal lines."""

    def __init__(self, size: int, line: bytes) -> None:
        self.left, self.data = size, line * (2**20 // len(line))

    def read(self, size: int, /) -> bytes:
        self.left -= len(self.data)
        return self.data if self.left > 0 else b""


@pytest.mark.parametrize("line", [b"x", b"loss 1.0\n", b"NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"])
def test_large_logs_need_little_memory_and_time(line: bytes) -> None:
    found(b"x")  # compiles the patterns
    tracemalloc.start()
    started = time.process_time()
    assert list(search(Endless(100 * 2**20, line), "x")) == []
    seconds = time.process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30 * 2**20
    assert seconds < 6, "the limit is 50 MB/s on one core; this allows for a slow machine and for tracemalloc"


def test_lines_of_one_signature_on_every_line() -> None:
    started = time.process_time()
    assert len(found((OOM + b"\n") * 200_000)) == 1
    assert time.process_time() - started < 3


def test_signatures_with_many_rejected_lines_are_searched_by_their_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    other = b"RuntimeError: out of memory in bond0: Error: 1\n"
    monkeypatch.setattr(log_text, "BLOCK_BYTES", 4096)
    log = other * 200 + OOM + b"\n" + FILES + b"\n"
    expected = found(log)
    monkeypatch.setattr(log_search, "_MAX_REJECTED", 10)
    log_search._pattern_database.cache_clear()
    assert found(log) == expected
    assert log_search._pattern_database.cache_info().misses


def test_findings_are_ordered_by_time_across_logs() -> None:
    late = b"2026-11-23 10:00:05 start\nTraceback\n" + OOM + b"\n"
    early = b"[2026-11-23T10:00:01.5] start\n" + FILES + b"\n"
    matches = [*search(io.BytesIO(late), "late"), *search(io.BytesIO(early), "early"), *search(io.BytesIO(OOM), "none")]
    assert [finding.source for finding in explain(matches)] == ["early:2", "late:3"]


def test_a_failure_of_many_logs_is_one_finding() -> None:
    matches = [match for number in range(8) for match in search(io.BytesIO(OOM), f"rank{number}.log")]
    (finding,) = explain(matches)
    assert (finding.source, finding.subject) == ("rank0.log:1", "rank 0")
    assert finding.evidence.startswith("In 8 logs. ")


def test_blocks_end_at_lines() -> None:
    text = b"a\n" * 10 + b"b"
    assert b"".join(line_blocks(io.BytesIO(text))) == text + b"\n"


def test_a_database_without_decided_signatures_finds_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_search, "_MAX_IGNORED", 100)
    compiled: list[int] = []

    def compile_and_count(signatures: Mapping[int, Signature], numbers: Collection[int]) -> Any:
        compiled.append(len(numbers))
        return reduced_database(signatures, numbers)

    monkeypatch.setattr(log_search, "reduced_database", compile_and_count)
    lines = (OOM + b"\n") * 60_000  # several blocks
    assert [match[0] for match in found(lines + FILES)] == ["cuda.out_of_memory", "host.too_many_files"]
    assert len(all_signatures()) // 2 < max(compiled) < len(all_signatures())


def test_reason_that_many_lines_only_resemble_is_not_searched_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_search, "_MAX_NO_ERRORS", 50)
    calls: list[str] = []
    values = Signature.values

    def count(signature: Signature, line: str, above: Callable[[], Sequence[str]] = list) -> dict[str, str] | None:
        calls.append(signature.id)
        return values(signature, line, above)

    monkeypatch.setattr(Signature, "values", count)
    lines = b"step 3 failed=0\n" * 1000
    assert [match[0] for match in found(lines + OOM)] == ["cuda.out_of_memory"]
    assert 0 < calls.count("unknown.error") <= 52
