"""seatrial.diagnose.patterns: patterns compiled for hyperscan."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.diagnose import patterns
from seatrial.diagnose.patterns import cached_database, candidate_expressions, compile_patterns, unsupported
from seatrial.diagnose.signatures import all_signatures, signatures
from seatrial.util import user_cache

SIGNATURE = signatures()[0]


def test_a_match_has_the_position_of_its_signature() -> None:
    three = ("no space left", r"rank (?P<rank>\d+) failed", "(?<!not )aborted")
    database = compile_patterns({n: SIGNATURE.model_copy(update={"pattern": each}) for n, each in enumerate(three)})
    found: list[int] = []
    database.scan(b"rank 3 failed\n", match_event_handler=lambda number, *_: found.append(number))
    assert set(found) == {1}


def test_the_cached_database_is_the_compiled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with other patterns, and after content that hyperscan does not load, as from a host with another CPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def numbers(pattern: str) -> set[int]:
        found: set[int] = set()
        database = cached_database({7: SIGNATURE.model_copy(update={"pattern": pattern})})
        database.scan(b"Rank 3 failed\n", match_event_handler=lambda number, *_: found.add(number))
        return found

    assert numbers("rank 3") == {7}
    assert numbers("rank 4") == set()
    (file,) = (tmp_path / "seatrial").iterdir()
    assert numbers("rank 3") == {7}
    (file,) = (tmp_path / "seatrial").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(patterns, "compile_patterns", None)
        assert numbers("rank 3") == {7}
    user_cache.write("patterns", file.name.removeprefix("patterns-"), b"of another CPU")
    assert numbers("rank 3") == {7}


@pytest.mark.parametrize(("pattern", "supported"), [("a+b", True), ("(?<=a)b", True), ("(?<!a)b", True), ("(", False)])
def test_unsupported_patterns_have_a_reason(pattern: str, supported: bool) -> None:
    assert bool(unsupported(SIGNATURE.model_copy(update={"pattern": pattern}))) is not supported


@pytest.mark.parametrize(
    ("pattern", "expressions"),
    [
        ("No space left", [rb"no\ space\ left"]),  # the database ignores case
        (r"(?<!not )aborted(?! by user)$", [b"aborted"]),
        (r"link (?:is )?down(?: again)*", [rb"link\ down", rb"link\ is\ down"]),
        (r"(?P<gpu>\d{1,3})[Ff]ailed: (?:code|status)", [rb"failed:\ code", rb"failed:\ status"]),
        (r"fallback.{0,9}[a-z]ib", [b"fallback"]),
        (r"NCCL \d: warn|long enough", [rb"(?:nccl\ ).*(?::\ warn)", rb"long\ enough"]),
        (r"(?:lost packets|\d\d) now", [rb"\ now"]),  # an alternative without a literal
        (r"(?:out of memory)+.|\d(?:killed)?", [rb"(?:out of memory)+.|\d(?:killed)?"]),
        (r"(?P<gpu>\d{1,3})[{1,2}]?[^]{1,2}\]]\d{2,}", [rb"(?:\d{1,})[{1,2}]?[^]{1,2}\]]\d{2,}"]),
        (r"NVRM: Xid \((?:PCI:)?[0-9a-f]", [rb"nvrm:\ xid\ \("]),  # without "xid (pci:", which begins with it
        (r"(?P<gpu>\d{1,3})é", [r"(?:\d{1,})é".encode()]),  # no ASCII literal
    ],
)
def test_literals_that_a_pattern_requires(pattern: str, expressions: list[bytes]) -> None:
    assert candidate_expressions(pattern) == expressions


def test_each_example_has_the_literals_of_its_pattern() -> None:
    database = compile_patterns(dict(enumerate(all_signatures())))
    for number, signature in enumerate(all_signatures()):
        for example in signature.examples:
            found: set[int] = set()
            database.scan(example.encode(), match_event_handler=lambda each, *_, ids=found: ids.add(each))
            assert number in found, example


def test_few_signatures_are_candidates_of_one_line() -> None:
    """A count and no time: 221 signatures share the literal of an Xid line, so that each such line took 0.5 ms."""
    database = compile_patterns(dict(enumerate(all_signatures())))
    for line in (example for signature in all_signatures() for example in signature.examples):
        found: set[int] = set()
        database.scan(line.encode() + b"\n", match_event_handler=lambda each, *_, ids=found: ids.add(each))
        assert len(found) <= (12 if "NVRM: Xid (" in line else 32), line


def test_all_literals_of_a_pattern_in_sequence() -> None:
    pattern = r"NVRM: Xid \((?:PCI:)?[0-9a-f:]{5,16}\): 48, pid"
    assert candidate_expressions(pattern) == [rb"nvrm:\ xid\ \("]
    assert candidate_expressions(pattern, in_sequence=True) == [rb"(?:nvrm:\ xid\ \().*(?:\):\ 48,\ pid)"]
    assert candidate_expressions(r"\d{3}", in_sequence=True) == [rb"\d{3}"]


def test_short_literals_select_no_lines_among_those_with_the_longest() -> None:
    whole = rb"NVRM: Xid \((?:PCI:)?[0-9a-f:]{5,}\): (?:[^4]|4[^8]),"
    assert candidate_expressions(whole.decode(), in_sequence=True) == [whole]
