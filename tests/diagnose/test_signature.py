"""One signature: values of a log line in its commands, and patterns that can take hours."""

from __future__ import annotations

import re
import shlex

import pytest

from seatrial.diagnose.signature import Match, Signature, place_of
from seatrial.diagnose.signatures import all_signatures

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


def test_a_hostile_value_stays_one_word_of_the_command() -> None:
    """Somebody may paste the command, and anybody may write a line of a log."""
    command = "srun -N1 hostname; ssh {host} 'uptime; dmesg'; ping {host}"
    signature = Signature.model_validate({**ROW, "pattern": "host (?P<host>.+)", "first_command": command})
    hostile = "x; sacct; touch /tmp/P; '$(id)'"
    quoted = shlex.quote(hostile)
    assert signature.command({"host": hostile}, has_slurm=False) == f"ssh {quoted} 'uptime; dmesg'; ping {quoted}"
    assert signature.command({"host": "-oProxyCommand=x"}) == "srun -N1 hostname"
    assert signature.command({"host": "n1"}) == "srun -N1 hostname; ssh n1 'uptime; dmesg'; ping n1"


def test_no_command_has_a_free_value_within_quotes() -> None:
    """There the quotes of the value would end those of the command. These values are hexadecimal, words or numbers."""
    for signature in all_signatures():
        for text in re.findall(r"'[^']*'|\"[^\"]*\"", signature.first_command):
            names = set(re.findall(r"\{([a-z_]+)\}", text)) if "$(" not in text else set()
            assert names <= {"bdf", "xid", "attribute", "module", "number"}, signature.id


def test_a_secret_is_replaced_before_a_quotation_is_cut() -> None:
    signature = Signature.model_validate({**ROW, "title": "t: {reason}", "pattern": "E: (?P<reason>.{1,60})"})
    for words in range(70):
        line = f"E: {'word ' * words}https://user:s3cr3tPw99LongLong@git.example/x"
        match = Match(signature=signature, line=line, source="x", values=signature.values(line) or {})
        finding = match.finding("", "medium")
        assert "s3cr3t" not in f"{finding.title} {finding.evidence}"


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
