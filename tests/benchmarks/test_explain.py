"""benchmarks/explain_held_out.py and explain_speed.py: the logs, the rule that holds sources out, and the numbers."""

from __future__ import annotations

import json

import pytest
import yaml

from benchmarks import explain_held_out, explain_speed


def test_numbers_do_not_get_worse() -> None:
    logs = explain_held_out.read_logs()
    committed = json.loads(explain_held_out.RESULT.read_text(encoding="utf-8"))
    unexpected = {log.file for log in logs if not log.passed} - {log["file"] for log in committed["now"]["failed"]}
    assert unexpected == set()
    assert explain_held_out.counts(logs) == committed["now"]["counts"]
    first = {kind: row["logs"] for round_ in committed["first"].values() for kind, row in round_["counts"].items()}
    now = {kind: row["logs"] for kind, row in committed["now"]["counts"].items()}
    assert first == now, "a log that is added later has no first measurement"


def test_logs_are_held_out_by_the_rule_and_are_short() -> None:
    logs = explain_held_out.read_logs()
    assert [log.held_out for log in logs] == [log.round > 1 or explain_held_out.is_held_out(log.source) for log in logs]
    files = {path.name: path.stat().st_size for path in explain_held_out.INCIDENTS.glob("*.log")}
    assert set(files) == {log.file for log in logs}
    assert max(files.values()) <= 8192
    assert len([log for log in logs if log.expected]) >= 120
    assert len([log for log in logs if not log.expected]) >= 30


@pytest.mark.parametrize(
    ("findings", "expected", "passed"),
    [(["a", "b"], ["a"], True), (["b", "a"], ["a"], False), ([], ["a"], False), ([], [], True), (["a"], [], False)],
)
def test_the_first_finding_counts(findings: list[str], expected: list[str], passed: bool) -> None:
    log = explain_held_out.Log(file="x", source="x", expected=expected, round=1, held_out=True, findings=findings)
    assert log.passed is passed


def test_speed_is_measured_and_judged() -> None:
    result = explain_speed.run(2**22, explain_speed.mixed_block(2**22))
    assert result["megabytes"] == 4
    assert result["findings"] > 5
    assert result["last_xid_found"]
    good = {"start_seconds": 0.8, "megabytes_per_second": 53.7, "peak_memory_mb": 150, "last_xid_found": True}
    assert explain_speed.meets_limits(good)
    bad = {"start_seconds": 0.9, "megabytes_per_second": 49.0, "peak_memory_mb": 201, "last_xid_found": False}
    for name, value in bad.items():
        assert not explain_speed.meets_limits(good | {name: value})


def test_judgements_of_families_are_of_logs_of_their_round() -> None:
    rows = yaml.safe_load(explain_held_out.JUDGED.read_text(encoding="utf-8"))
    rounds = {log.file: log.round for log in explain_held_out.read_logs() if log.expected}
    assert [row["file"] for row in rows if rounds.get(row["file"]) != row["round"]] == []
    assert [row["file"] for row in rows if row["command"] and not row["cause"]] == []
    assert len({row["file"] for row in rows}) == len(rows)
    unseen = json.loads(explain_held_out.RESULT.read_text(encoding="utf-8"))["unseen"]
    assert set(unseen) == {f"round {number}" for number in explain_held_out.BEFORE}
