"""One signature: values of a log line in its commands, and patterns that can take hours."""

from __future__ import annotations

import pytest

from seatrial.diagnose.signature import Signature

ROW = {
    "id": "a.b",
    "title": "t",
    "pattern": "x",
    "cause": "c",
    "first_command": "f",
    "fix": "f",
    "action": "none",
    "source": "s",
    "examples": ["x"],
    "counter_examples": ["y"],
}


def test_values_of_the_line_are_quoted_for_a_shell() -> None:
    signature = Signature.model_validate({**ROW, "pattern": r"peer (?P<peer>[^<]+)(?:<(?P<port>\d+))?"})
    assert signature.filled("ping {peer} {port} ${HOME}", "peer a;reboot<1") == "ping 'a;reboot' 1 ${HOME}"
    assert signature.filled("ping {peer} {port}", "peer a") == "ping a ''"
    assert signature.filled("ping {peer}", "other") == "ping {peer}"
    signature = Signature.model_validate({**ROW, "pattern": r"GPU (?P<gpu>\d) lost|lost GPU (?P<gpu2>\d)"})
    assert signature.filled("nvidia-smi -i {gpu}", "lost GPU 5") == "nvidia-smi -i 5"


@pytest.mark.parametrize(
    ("pattern", "nested"),
    [("(a+)+b", True), ("((?:a|b*)x)*", True), ("a+b+", False), ("(a{1,9})+", False), (r"(?:\w{1,9} )*x", False)],
)
def test_nested_repeat(pattern: str, nested: bool) -> None:
    assert Signature.model_validate({**ROW, "pattern": pattern}).nested_repeat() is nested
