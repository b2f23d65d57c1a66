"""Candidates and partners by the facts of Slurm, and the commands that change the state of nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from seatrial.model import DecisionValue, SeatrialError, UsageError
from seatrial.operate import slurm_nodes as node_state
from seatrial.operate.node_changes import Flags, NodeResult
from seatrial.operate.slurm_nodes import SlurmCandidates
from tests.fakes.slurm import NODES, FakeSlurm, Reply, cluster, failure, recorded, success

OURS, OTHERS = "seatrial 20261120-quick: NIC", "fan broken"
ALL = Flags(comment=True, drain=True, undrain=True)
RESERVATION = "ReservationName=seatrial-run_1"


def nodes_text(changes: Mapping[str, tuple[str, str]], comments: Mapping[str, str] | None = None) -> str:
    """Return the recorded nodes of Slurm 22.05, with another state and reason of some, and comments."""
    blocks = recorded("scontrol-show-nodes-healthy.txt").out.strip().split("\n\n")
    for index, block in enumerate(blocks):
        name = block.partition(" ")[0].removeprefix("NodeName=")
        state, reason = changes.get(name, ("IDLE", ""))
        block = re.sub(r"State=\S+", f"State={state}", block)
        block += f"\n   Reason={reason} [root@2026-11-20T02:00:00]" if reason else ""
        blocks[index] = block + (f"\n   Comment={comments[name]}" if comments and name in comments else "")
    return "\n\n".join(blocks) + "\n"


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr(node_state, "_RESPONSE_LIMIT_S", 0.0)
    return FakeSlurm(cluster()).install(monkeypatch)


def candidates(
    slurm: FakeSlurm,
    *names: str,
    flags: Flags = ALL,
    states: Mapping[str, tuple[str, str]] | None = None,
    comments: Mapping[str, str] | None = None,
    prefix: str = "",
    reservation: str | None = None,
) -> SlurmCandidates:
    reply: Reply = success(nodes_text(states or {}, comments))
    slurm.replies[NODES] = reply
    return SlurmCandidates(names, flags, "run/1", reason_prefix=prefix, reservation=reservation)


def results(decision: DecisionValue, *names: str, reason: str = "slow link") -> dict[str, NodeResult]:
    return {name: NodeResult(node=name, decision=decision, reason=reason) for name in names}


@pytest.mark.parametrize(
    ("state", "reason", "undrain", "prefix", "refusal"),
    [
        ("IDLE", "", False, "", None),
        ("IDLE+DRAIN", OURS, True, "", None),
        ("IDLE+DRAIN", OURS, False, "", "--undrain"),
        ("IDLE+DRAIN", OTHERS, True, "", "someone else"),
        ("IDLE+DRAIN", "", True, "", "someone else"),
        ("IDLE+DRAIN", "Prolog error", True, "", "seatrial hook list"),
        ("IDLE+DRAIN", "Prolog error", True, "Prolog error", None),
        ("IDLE+DRAIN", OTHERS, True, "fan", None),
        ("IDLE+DRAIN", "not seatrial run: x", True, "", "someone else"),
        ("DOWN", OURS, True, "", None),
        ("DOWN*", OURS, True, "", "slurmd"),
        ("DOWN+INVALID_REG", OURS, True, "", "INVALID_REG"),
        ("MIXED", "", True, "", "jobs run"),
        ("MIXED+DRAIN", OURS, True, "", "jobs run"),
        ("IDLE+POWERED_DOWN", "", True, "", "POWERED_DOWN"),
        ("IDLE+RESERVED", "", True, "", "reservation"),
    ],
)
def test_which_nodes_are_tested(
    slurm: FakeSlurm, state: str, reason: str, undrain: bool, prefix: str, refusal: str | None
) -> None:
    states, flags = {"node1": (state, reason)}, Flags(undrain=undrain)
    if refusal is None:
        candidates(slurm, "node1", flags=flags, states=states, prefix=prefix)
    else:
        with pytest.raises(SeatrialError, match=f"nothing was changed: node1 is .*{refusal}"):
            candidates(slurm, "node1", flags=flags, states=states, prefix=prefix)
    assert all(" show " in command for command in slurm.commands)


def test_unknown_node(slurm: FakeSlurm) -> None:
    with pytest.raises(UsageError, match="no node node9"):
        candidates(slurm, "node9")


def test_partners_are_idle_and_those_accepted_before_come_first(slurm: FakeSlurm) -> None:
    comments = {"node3": "seatrial r: ACCEPTED"}
    chosen = candidates(slurm, "node1", comments=comments).partners()
    assert [partner.node for partner in chosen] == ["node3", "node0", "node2"]
    assert "seatrial r: ACCEPTED" in chosen[0].why
    states = {"node0": ("MIXED", ""), "node2": ("IDLE+DRAIN", OTHERS)}
    assert [each.node for each in candidates(slurm, "node1", states=states).partners()] == ["node3"]
    rejected = {"node3": "seatrial r: REJECTED: slow"}
    assert [each.node for each in candidates(slurm, "node1", comments=rejected).partners()] == ["node0", "node2"]


@pytest.mark.parametrize(
    ("partner", "why"),
    [("node1", "candidate"), ("node9", "no such"), ("node2", "IDLE.DRAIN: fan broken"), ("node3", "differ")],
)
def test_a_given_partner_that_cannot_be_one(slurm: FakeSlurm, partner: str, why: str) -> None:
    text = nodes_text({"node2": ("IDLE+DRAIN", OTHERS)})
    head, node3 = text.split("NodeName=node3")
    slurm.replies[NODES] = success(f"{head}NodeName=node3{node3.replace('gpu:fake:2', 'gpu:fake:1')}")
    with pytest.raises(UsageError, match=why):
        SlurmCandidates(["node1"], ALL, "r").partners([partner])
    with pytest.raises(UsageError, match="readmit nodes of each kind"):
        SlurmCandidates(["node1", "node3"], ALL, "r")


def test_a_drained_node_is_reserved_before_it_is_resumed(slurm: FakeSlurm) -> None:
    drained = candidates(slurm, "node1", states={"node1": ("IDLE+DRAIN", OURS)})
    reserve, resume = (change.command for change in drained.before_test(["node0", "node2"]))
    assert reserve[:4] == ("scontrol", "create", "reservation", RESERVATION)
    assert {"Nodes=node1,node0,node2", "Duration=UNLIMITED", "Flags=MAINT,FLEX"} < {*reserve}
    assert resume == ("scontrol", "update", "NodeName=node1", "State=RESUME")
    settings = {key: value for _, key, value in drained.settings(["node1", "node0", "node2"])}
    assert settings == {
        "launcher": "slurm",
        "slurm.nodelist": "node1,node0,node2",
        "slurm.partition": "gpu",
        "slurm.reservation": "seatrial-run_1",
    }
    with pytest.raises(UsageError, match="reservation"):
        candidates(slurm, "node1", states={"node1": ("IDLE+DRAIN", OURS)}, reservation="ops")


def commands(subject: SlurmCandidates, decision: DecisionValue) -> list[str]:
    return [" ".join(change.command[1:]) for change in subject.after_test(results(decision, "node1"))]


DELETE = f"delete {RESERVATION}"
REJECTED = "seatrial run/1: REJECTED: slow link"


@pytest.mark.parametrize(
    ("flags", "decision", "expected"),
    [
        (Flags(undrain=True), DecisionValue.ACCEPTED, [DELETE]),
        (ALL, DecisionValue.ACCEPTED, ["update NodeName=node1 Comment=seatrial run/1: ACCEPTED", DELETE]),
        # without --drain the old reason is restored, so is it after a test without a result
        (Flags(undrain=True), DecisionValue.REJECTED, [f"update NodeName=node1 State=DRAIN Reason={OURS}", DELETE]),
        (
            Flags(undrain=True, drain=True),
            DecisionValue.REJECTED,
            [f"update NodeName=node1 State=DRAIN Reason={REJECTED}", DELETE],
        ),
        (
            Flags(undrain=True, drain=True),
            DecisionValue.INCOMPLETE,
            [f"update NodeName=node1 State=DRAIN Reason={OURS}", DELETE],
        ),
    ],
)
def test_changes_of_a_drained_node(
    slurm: FakeSlurm, flags: Flags, decision: DecisionValue, expected: list[str]
) -> None:
    subject = candidates(slurm, "node1", flags=flags, states={"node1": ("IDLE+DRAIN", OURS)})
    assert commands(subject, decision) == expected


@pytest.mark.parametrize(
    ("flags", "decision", "expected"),
    [
        (Flags(), DecisionValue.REJECTED, []),
        (Flags(undrain=True), DecisionValue.ACCEPTED, []),
        (Flags(drain=True), DecisionValue.REJECTED, [f"update NodeName=node1 State=DRAIN Reason={REJECTED}"]),
        (Flags(drain=True), DecisionValue.INCOMPLETE, []),
        (Flags(comment=True), DecisionValue.REJECTED, [f"update NodeName=node1 Comment={REJECTED}"]),
    ],
)
def test_changes_of_a_node_in_service(
    slurm: FakeSlurm, flags: Flags, decision: DecisionValue, expected: list[str]
) -> None:
    subject = candidates(slurm, "node1", flags=flags)
    assert subject.before_test(["node0"]) == []
    assert commands(subject, decision) == expected


def test_a_node_that_someone_drained_during_the_test_keeps_that_reason(slurm: FakeSlurm) -> None:
    subject = candidates(slurm, "node1", states={"node1": ("IDLE+DRAIN", OURS)}, flags=Flags(undrain=True, drain=True))
    (block,) = [text for text in nodes_text({"node1": ("IDLE+DRAIN", OTHERS)}).split("\n\n") if "=node1 " in text]
    slurm.replies["scontrol show node node1"] = success(block)
    assert subject.changed_meanwhile() == {"node1": f"IDLE+DRAIN: {OTHERS}"}
    assert commands(subject, DecisionValue.REJECTED) == [DELETE]


def test_a_node_that_went_down_during_the_test_is_drained_again(slurm: FakeSlurm) -> None:
    subject = candidates(slurm, "node1", states={"node1": ("IDLE+DRAIN", OURS)}, flags=Flags(undrain=True))
    (block,) = [text for text in nodes_text({"node1": ("DOWN*", "Not responding")}).split("\n\n") if "=node1 " in text]
    slurm.replies["scontrol show node node1"] = success(block)
    assert list(subject.changed_meanwhile()) == ["node1"]
    assert commands(subject, DecisionValue.INCOMPLETE) == [f"update NodeName=node1 State=DRAIN Reason={OURS}", DELETE]


def test_a_resumed_node_that_does_not_answer(slurm: FakeSlurm) -> None:
    subject = candidates(slurm, "node1", states={"node1": ("IDLE+DRAIN", OURS)})
    (block,) = [text for text in nodes_text({"node1": ("IDLE*", "")}).split("\n\n") if "=node1 " in text]
    slurm.replies["scontrol show node node1"] = success(block)
    with pytest.raises(SeatrialError, match="s after its resume"):
        subject.wait_until_testable()


def test_a_refused_command_is_an_error(slurm: FakeSlurm) -> None:
    subject = candidates(slurm, "node1", states={"node1": ("IDLE+DRAIN", OURS)})
    reserve = subject.before_test(["node0"])[0]
    slurm.replies["scontrol"] = failure("Error creating the reservation: Access/permission denied")
    with pytest.raises(SeatrialError, match="Access/permission denied"):
        subject.execute(reserve)
