"""seatrial.diagnose.patterns: patterns compiled for hyperscan."""

from __future__ import annotations

import pytest

from seatrial.diagnose.patterns import compile_patterns, unsupported
from seatrial.diagnose.signatures import signatures

SIGNATURE = signatures()[0]


def test_a_match_has_the_position_of_its_signature() -> None:
    patterns = ("no space left", r"rank (?P<rank>\d+) failed", "(?<!not )aborted")
    database = compile_patterns([SIGNATURE.model_copy(update={"pattern": pattern}) for pattern in patterns])
    found: list[int] = []
    database.scan(b"rank 3 failed\n", match_event_handler=lambda number, *_: found.append(number))
    assert set(found) == {1}


@pytest.mark.parametrize(("pattern", "supported"), [("a+b", True), ("(?<=a)b", True), ("(?<!a)b", True), ("(", False)])
def test_unsupported_patterns_have_a_reason(pattern: str, supported: bool) -> None:
    assert bool(unsupported(SIGNATURE.model_copy(update={"pattern": pattern}))) is not supported
