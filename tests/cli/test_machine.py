"""The commands discover and checks."""

from __future__ import annotations

import json

from seatrial.checks import catalog
from tests.processes import call


def test_checks_lists_every_check_with_its_rules() -> None:
    _, out, _ = call("checks")
    for check in catalog().values():
        assert check.name in out
    code, out, _ = call("checks", "--json")
    assert code == 0
    assert {entry["name"] for entry in json.loads(out)} == set(catalog())


def test_discover_prints_json_or_text() -> None:
    code, out, _ = call("discover", "--json")
    assert code == 0
    assert set(json.loads(out)) == {"host", "gpu"}
    assert "kernel" in call("discover")[1]
