"""The decision on each node of a readmission, its partners, and the changes of node states."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tools.records import record_path

from seatrial.model import Decision, DecisionValue, Finding, Outcome, SeatrialError, Trial, Verdict
from seatrial.operate import readmit
from seatrial.operate.drain_limit import prepare
from seatrial.operate.node_changes import (
    DRAIN,
    DRAIN_AGAIN,
    END_RESERVATION,
    Candidates,
    Flags,
    NodeChange,
    NodeResult,
    Partner,
)
from seatrial.operate.readmit import Options, Readmission, Session, choose_partners, nodes_at_fault
from seatrial.pipeline.run_directory import load_trial

RECORD = load_trial(record_path("2026-11-23-2xh200/p2p-disabled"))
ACCEPTED, REJECTED, INCOMPLETE = DecisionValue.ACCEPTED, DecisionValue.REJECTED, DecisionValue.INCOMPLETE
POOL = [Partner(node=name, why="idle") for name in ("p1", "p2", "p3", "p4")]


def failed(subject: str, check: str = "collectives.pairs") -> Verdict:
    return Verdict(check, subject, Outcome.FAIL, "gpu_share", value=0.5)


def located(place: str, *verdicts: Verdict) -> Finding:
    explains = tuple(verdict.key for verdict in verdicts)
    return Finding(title=f"{place} is slow", subject=place, confidence="high", evidence="", explains=explains)


def trial(
    decision: DecisionValue = REJECTED,
    verdicts: Sequence[Verdict] = (),
    findings: Sequence[Finding] = (),
    stop_reason: str = "",
) -> Trial:
    update: dict[str, Any] = {"verdicts": tuple(verdicts), "findings": tuple(findings), "stop_reason": stop_reason}
    return RECORD.model_copy(update={**update, "decision": Decision(value=decision, reason=f"trial {decision}")})


def bad(node: str) -> Trial:
    """Return a trial that rejects ``node``, found by the search for slow nodes."""
    verdict = failed("cluster", "collectives.localization")
    return trial(verdicts=[verdict], findings=[located(node, verdict)])


class FakeCandidates(Candidates[Any]):
    """Records the changes; those with an action in ``fails`` fail. Nodes are drained before if ``drained``."""

    cluster_node_count = 10

    def __init__(
        self, drained: bool = False, fails: Sequence[str] = (), changed: Mapping[str, str] | None = None
    ) -> None:
        self.drained, self.fails, self.changed = drained, fails, changed or {}
        self.done: list[str] = []
        self.tested: list[list[str]] = []

    def partners(self, names: Sequence[str] = ()) -> list[Partner]:
        return [Partner(node=name, why="--partner") for name in names] or POOL

    def _settings(self, nodes: Sequence[str]) -> dict[str, Any]:
        self.tested.append(list(nodes))
        return {}

    def _refusal(self, node: Any) -> str:
        raise NotImplementedError

    _partner_problem = _partners = _refusal  # type: ignore[assignment]

    def before_test(self, partners: Sequence[str]) -> list[NodeChange]:
        actions = ("reserve", "resume") if self.drained else ()
        return [NodeChange(nodes=("c1",), action=action, command=()) for action in actions]

    def wait_until_testable(self) -> None: ...

    def changed_meanwhile(self) -> dict[str, str]:
        return dict(self.changed)

    def after_test(self, results: Mapping[str, NodeResult]) -> list[NodeChange]:
        drain = DRAIN_AGAIN if self.drained else DRAIN
        bad_nodes = [name for name, result in results.items() if result.decision is REJECTED]
        changes = [NodeChange(nodes=(name,), action=drain, command=()) for name in bad_nodes]
        end = NodeChange(nodes=("c1",), action=END_RESERVATION, command=(), needs=(DRAIN_AGAIN,))
        return [*changes, *([end] if self.drained else [])]

    def execute(self, change: NodeChange) -> None:
        if change.action in self.fails:
            raise SeatrialError("refused by Slurm")
        self.done.append(change.action)


class Runner:
    """Runs a readmission with scripted trials."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.notes: list[str] = []

    def run(
        self, candidates: FakeCandidates, *trials: Trial | BaseException, nodes: Sequence[str] = ("c1",)
    ) -> Readmission:
        script = list(trials)

        def run(_run_dir: object, _display: object) -> Trial:
            outcome = script.pop(0)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        self.monkeypatch.setattr(readmit, "run", run)
        state_dir = self.folder / "state"
        state_dir.mkdir()
        prepare(state_dir)
        options = Options(
            nodes=tuple(nodes),
            partners=(),
            trial="quick",
            overrides=(),
            flags=Flags(),
            state_dir=state_dir,
            drain_share=0.1,
        )
        folder = self.folder / "run-1"
        folder.mkdir()
        display: Any = nullcontext
        session = Session(options, candidates, folder, choose_partners(options, candidates), display, self.notes.append)
        result = session.run()
        assert not script
        assert Readmission.model_validate_json((folder / "readmit.json").read_bytes()) == result
        return result


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(tmp_path, monkeypatch)


def decisions(result: Readmission) -> dict[str, DecisionValue]:
    return {row.node: row.decision for row in result.results}


def test_a_node_is_accepted_by_an_accepted_trial_with_two_partners(runner: Runner) -> None:
    candidates = FakeCandidates(drained=True)
    result = runner.run(candidates, trial(ACCEPTED))
    assert candidates.tested == [["c1", "p1", "p2"]]
    assert (result.decision, decisions(result)) == (ACCEPTED, {"c1": ACCEPTED})
    assert [(change.action, change.outcome) for change in result.changes] == [
        ("reserve", "done"),
        ("resume", "done"),
        (END_RESERVATION, "done"),
    ]


def test_a_node_at_fault_is_rejected(runner: Runner) -> None:
    result = runner.run(FakeCandidates(drained=True), bad("c1"))
    assert (result.decision, result.results[0].reason) == (REJECTED, "c1 is slow")
    assert [change.action for change in result.changes][-2:] == [DRAIN_AGAIN, END_RESERVATION]


def test_a_bad_partner_is_replaced_and_rejects_no_node(runner: Runner) -> None:
    candidates = FakeCandidates()
    both = failed("cluster"), failed("c1/gpu0", "device.gemm")
    first = trial(verdicts=both, findings=[located("p2", both[0])])
    result = runner.run(candidates, first, trial(ACCEPTED))
    assert candidates.tested == [["c1", "p1", "p2"], ["c1", "p1", "p3"]]
    assert (decisions(result), result.suspects) == ({"c1": ACCEPTED}, {"p2": "p2 is slow"})
    assert [partner.node for partner in result.partners] == ["p1", "p2", "p3"]


def test_no_good_partner_left_after_bad_ones(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCandidates, "partners", lambda _self, _names: POOL[:3])
    result = runner.run(FakeCandidates(), bad("p1"), bad("p2"))
    assert (decisions(result), set(result.suspects)) == ({"c1": INCOMPLETE}, {"p1", "p2"})
    assert "p3 can be a partner" in result.results[0].reason


def test_a_node_at_fault_in_each_trial(runner: Runner) -> None:
    result = runner.run(FakeCandidates(), bad("p1"), bad("p2"), bad("p3"))
    assert decisions(result) == {"c1": INCOMPLETE}


def test_the_good_one_of_two_nodes_is_tested_again_without_the_bad_one(runner: Runner) -> None:
    candidates = FakeCandidates()
    result = runner.run(candidates, bad("c2"), trial(ACCEPTED), nodes=("c1", "c2"))
    assert candidates.tested == [["c1", "c2", "p1", "p2", "p3"], ["c1", "p1", "p2", "p3"]]
    assert decisions(result) == {"c1": ACCEPTED, "c2": REJECTED}
    assert result.decision is REJECTED


@pytest.mark.parametrize(
    "verdicts", [[failed("cluster")], [failed("c1->p1")], []], ids=["cluster", "path", "not measured"]
)
def test_without_a_node_at_fault_nothing_is_decided(runner: Runner, verdicts: list[Verdict]) -> None:
    result = runner.run(FakeCandidates(), trial(REJECTED if verdicts else INCOMPLETE, verdicts))
    assert (result.decision, decisions(result)) == (INCOMPLETE, {"c1": INCOMPLETE})
    assert result.changes == ()


@pytest.mark.parametrize("end", [SeatrialError("no controller"), KeyboardInterrupt(), ValueError("output")])
def test_a_drained_node_is_protected_until_the_end_also_after_an_error(runner: Runner, end: BaseException) -> None:
    result = runner.run(FakeCandidates(drained=True), end)
    assert decisions(result) == {"c1": INCOMPLETE}
    assert result.interrupted == isinstance(end, KeyboardInterrupt)
    assert result.changes[-1].action == END_RESERVATION


def test_the_reservation_stays_if_a_node_could_not_be_drained(runner: Runner) -> None:
    candidates = FakeCandidates(drained=True, fails=[DRAIN_AGAIN])
    result = runner.run(candidates, bad("c1"))
    assert [(change.action, change.outcome) for change in result.changes][-2:] == [
        (DRAIN_AGAIN, "failed"),
        (END_RESERVATION, "refused"),
    ]
    assert candidates.done == ["reserve", "resume"]


def test_nothing_follows_a_refused_reservation(runner: Runner) -> None:
    result = runner.run(FakeCandidates(drained=True, fails=["reserve"]))
    assert [(change.action, change.outcome) for change in result.changes] == [("reserve", "failed")]
    assert (decisions(result), result.trials) == ({"c1": INCOMPLETE}, ())


def test_accepted_is_not_the_decision_if_the_node_could_not_be_returned(runner: Runner) -> None:
    result = runner.run(FakeCandidates(drained=True, fails=[END_RESERVATION]), trial(ACCEPTED))
    assert (decisions(result), result.decision) == ({"c1": ACCEPTED}, INCOMPLETE)


def test_a_node_that_something_else_drained_meanwhile_is_not_accepted(runner: Runner) -> None:
    result = runner.run(FakeCandidates(drained=True, changed={"c1": "IDLE+DRAIN: fan"}), trial(ACCEPTED))
    assert decisions(result) == {"c1": INCOMPLETE}
    assert "IDLE+DRAIN: fan" in result.results[0].reason


def test_a_rejected_node_stays_rejected_if_someone_drained_it_meanwhile(runner: Runner) -> None:
    result = runner.run(FakeCandidates(changed={"c1": "IDLE+DRAIN: fan"}), bad("c1"))
    assert decisions(result) == {"c1": REJECTED}


def test_drains_stop_at_the_limit(runner: Runner) -> None:
    """At most a tenth of ten nodes: the second one is not drained."""
    verdicts = [failed("c1"), failed("c2")]
    result = runner.run(FakeCandidates(), trial(verdicts=verdicts), nodes=("c1", "c2"))
    assert [(change.nodes, change.outcome) for change in result.changes] == [(("c1",), "done"), (("c2",), "refused")]
    assert "drain limit" in result.changes[1].detail
    assert result.decision is REJECTED


def test_a_drain_limit_that_hangs_refuses(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readmit, "_DRAIN_ANSWER_LIMIT_S", 0.0)
    monkeypatch.setattr(readmit, "request_drain", lambda *_, **__: time.sleep(5))
    result = runner.run(FakeCandidates(), bad("c1"))
    assert [(change.outcome, "did not answer" in change.detail) for change in result.changes] == [("refused", True)]


def test_a_killed_readmission_leaves_the_change_that_it_made_in_the_record(runner: Runner, tmp_path: Path) -> None:
    class Killed(FakeCandidates):
        def execute(self, change: NodeChange) -> None:
            self.record = json.loads((tmp_path / "run-1" / "readmit.json").read_text())
            super().execute(change)

    candidates = Killed(drained=True)
    runner.run(candidates, trial(ACCEPTED))
    assert [change["outcome"] for change in candidates.record["changes"]] == ["done", "done", "started"]


def test_too_few_partners_are_refused() -> None:
    options = Options(("c1",), ("p1",), "quick", (), Flags())
    with pytest.raises(SeatrialError, match="no good partner left: p1 can be a partner of c1, but 1 node needs 2"):
        choose_partners(options, FakeCandidates())


def test_places_of_faults() -> None:
    path, cluster, own = failed("c1->p1"), failed("cluster"), failed("p1.site/gpu3")
    nodes = ["c1", "p1", "p2"]
    assert nodes_at_fault(trial(verdicts=[path, cluster]), nodes) == {}
    assert list(nodes_at_fault(trial(verdicts=[own]), nodes)) == ["p1"]
    explained = trial(verdicts=[own, cluster], findings=[located("c1/gpu0, c1/gpu1", own, cluster)])
    assert nodes_at_fault(explained, nodes) == {"c1": "c1/gpu0, c1/gpu1 is slow"}
    of_all = trial(verdicts=[own], findings=[located("cluster", own)])
    assert list(nodes_at_fault(of_all, nodes)) == ["p1"]
    warned = trial(verdicts=[Verdict("host.inventory", "c1", Outcome.WARN, "x")])
    assert nodes_at_fault(warned, nodes) == {}
