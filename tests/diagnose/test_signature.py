"""One signature: values of a log line in its commands, and patterns that can take hours."""

from __future__ import annotations

import pytest

from seatrial.diagnose.signature import Signature, place_of

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

    command = {"first_command": "ping {peer}; nc {peer} {port}; ls ${HOME}"}
    signature = signature.model_copy(update=command)
    assert signature.command(values(signature, "peer a;reboot<1")) == "ping 'a;reboot'; nc 'a;reboot' 1; ls ${HOME}"
    assert signature.command(values(signature, "peer a")) == "ping a; ls ${HOME}"
    assert signature.command({}) == "ls ${HOME}"
    signature = Signature.model_validate({**ROW, "pattern": r"GPU (?P<gpu>\d) lost|lost GPU (?P<gpu2>\d)"})
    assert values(signature, "lost GPU 5") == {"gpu": "5"}
    assert signature.values("other") is None


def values(signature: Signature, line: str, *above: str) -> dict[str, str]:
    """The values of a line that the signature matches."""
    found = signature.values(line, lambda: above)
    assert found is not None
    return found


def test_title_has_the_values_that_are_known() -> None:
    signature = Signature.model_validate({**ROW, "title": "node {node} is down[ since {time}]"})
    assert signature.titled({"node": "n7", "time": "10:00"}) == "node n7 is down since 10:00"
    assert signature.titled({"node": "n7", "time": ""}) == "node n7 is down"
    assert signature.name == "node {node} is down"


def test_header_of_a_block_belongs_to_the_lines_below() -> None:
    row = {**ROW, "pattern": "State: Down", "header": r"^CA '(?P<hca>\w+)'"}
    signature = Signature.model_validate(row)
    lines = ["CA 'mlx5_0'", "Port 1:", "CA 'mlx5_1'", "Port 1:"]
    assert place_of(values(signature, "State: Down", *lines)) == "mlx5_1"
    assert place_of(values(signature, "State: Down")) == ""
    own = Signature.model_validate({**row, "pattern": r"(?:(?P<hca>\w+) )?State: Down"})
    assert values(own, "mlx5_7 State: Down", *lines) == {"hca": "mlx5_7"}  # before that of the header
    assert values(own, "State: Down", *lines) == {"hca": "mlx5_1"}


@pytest.mark.parametrize(
    ("requires", "facts", "fits"),
    [((), (), True), (("a",), (), False), (("a",), ("a",), True), (("not a",), ("a",), False), (("not a",), (), True)],
)
def test_facts_that_are_required(requires: tuple[str, ...], facts: tuple[str, ...], fits: bool) -> None:
    assert Signature.model_validate({**ROW, "requires": requires}).fits(facts) is fits


@pytest.mark.parametrize(
    ("pattern", "nested"),
    [("(a+)+b", True), ("((?:a|b*)x)*", True), ("a+b+", False), ("(a{1,9})+", False), (r"(?:\w{1,9} )*x", False)],
)
def test_nested_repeat(pattern: str, nested: bool) -> None:
    assert Signature.model_validate({**ROW, "pattern": pattern}).nested_repeat() is nested
