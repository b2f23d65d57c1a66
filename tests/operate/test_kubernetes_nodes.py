"""Candidates and partners by the nodes of Kubernetes, and changes of condition and taint through the fake kubectl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.config.kubernetes import Kubernetes
from seatrial.model import DecisionValue, SeatrialError, UsageError
from seatrial.operate.kubernetes_nodes import CONDITION_TYPE, READINESS_TAINTS, TAINT, KubernetesCandidates
from seatrial.operate.node_changes import Flags, NodeResult
from tests.fakes.kubectl import Cluster

ACCEPTED, REJECTED, INCOMPLETE = DecisionValue.ACCEPTED, DecisionValue.REJECTED, DecisionValue.INCOMPLETE
ALL = Flags(drain=True, undrain=True, condition=True)
OUR_TAINT = {"key": TAINT, "effect": "NoSchedule"}
SINCE = "2026-11-01T00:00:00Z"


def node(
    name: str, *taints: dict[str, str], accepted: str = "", gpus: int = 8, ready: str = "True", **spec: Any
) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready, "reason": "KubeletReady"}]
    if accepted:
        conditions.append({"type": CONDITION_TYPE, "status": accepted, "lastTransitionTime": SINCE})
    status = {"conditions": conditions, "nodeInfo": {"kubeletVersion": "v1.34.1"}}
    resources = {"nvidia.com/gpu": str(gpus)}
    return {
        "kind": "Node",
        "metadata": {"name": name, "uid": name},
        "spec": {"taints": list(taints), **spec},
        "status": {**status, "capacity": resources, "allocatable": resources},
    }


class Site:
    """A fake cluster, and the candidates of a readmission in it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch, self.cluster = folder, monkeypatch, Cluster(folder / "cluster")

    def candidates(self, *nodes: dict[str, Any], flags: Flags = ALL, **scenario: Any) -> KubernetesCandidates:
        """Return ``new`` as candidate."""
        self.cluster.install(self.folder / "bin", objects=list(nodes), **scenario)
        self.cluster.call_in_process(self.monkeypatch)
        return KubernetesCandidates(["new"], flags, "run-1", Kubernetes(namespace="ml", context="lab"))

    def change(self, candidates: KubernetesCandidates, decision: DecisionValue, reason: str = "slow") -> dict[str, Any]:
        """Make the changes for this decision, and return the node."""
        results = {"new": NodeResult(node="new", decision=decision, reason=reason)}
        for change in candidates.after_test(results):
            candidates.execute(change)
        assert self.cluster.unexpected_calls == []
        return next(each for each in self.cluster.objects if each["metadata"]["name"] == "new")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def condition(changed: dict[str, Any]) -> dict[str, str] | None:
    return next((each for each in changed["status"]["conditions"] if each["type"] == CONDITION_TYPE), None)


@pytest.mark.parametrize(
    ("decision", "status", "message"),
    [
        (ACCEPTED, "True", "seatrial run-1: ACCEPTED"),
        (REJECTED, "False", "seatrial run-1: REJECTED: slow"),
        (INCOMPLETE, "Unknown", "seatrial run-1: INCOMPLETE: slow"),
    ],
)
def test_the_condition_has_decision_and_run(site: Site, decision: DecisionValue, status: str, message: str) -> None:
    changed = condition(site.change(site.candidates(node("new")), decision))
    assert changed is not None
    assert (changed["status"], changed["reason"], changed["message"]) == (status, decision.capitalize(), message)


def test_the_time_of_the_transition_changes_with_the_status_only(site: Site) -> None:
    for decision, same in ((ACCEPTED, True), (REJECTED, False)):
        changed = condition(site.change(site.candidates(node("new", accepted="True")), decision))
        assert changed is not None
        assert (changed["lastTransitionTime"] == SINCE) == same
        assert changed["lastHeartbeatTime"] > SINCE


@pytest.mark.parametrize(
    ("flags", "decision", "before", "after"),
    [
        (ALL, ACCEPTED, True, False),
        (ALL, REJECTED, True, True),
        (ALL, REJECTED, False, True),
        (ALL, INCOMPLETE, True, True),
        (ALL, INCOMPLETE, False, False),
        (Flags(condition=True), ACCEPTED, True, True),
        (Flags(undrain=True), REJECTED, False, False),
    ],
)
def test_the_taint_changes_only_by_its_flag(
    site: Site, flags: Flags, decision: DecisionValue, before: bool, after: bool
) -> None:
    """The taint of others and a cordon stay."""
    other = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    taints = [other, *([OUR_TAINT] if before else [])]
    changed = site.change(site.candidates(node("new", *taints, unschedulable=True), flags=flags), decision)
    assert changed["spec"]["taints"] == [other, *([OUR_TAINT] if after else [])]
    assert changed["spec"]["unschedulable"]
    assert (condition(changed) is not None) == flags.condition


def test_partners_have_the_condition_or_are_given(site: Site) -> None:
    others = [
        node("good", accepted="True"),
        node("fresh"),
        node("bad", accepted="False"),
        node("small", accepted="True", gpus=4),
        node("cordoned", accepted="True", unschedulable=True),
        node("gone", accepted="True", ready="Unknown"),
        node("tainted", {"key": READINESS_TAINTS[1], "effect": "NoSchedule"}, accepted="True"),
        node("reserved", {"key": "team", "effect": "NoSchedule"}, accepted="True"),
    ]
    candidates = site.candidates(node("new", OUR_TAINT), *others)
    assert [partner.node for partner in candidates.partners()] == ["good"]
    assert [partner.node for partner in candidates.partners(["fresh"])] == ["fresh"]
    assert candidates.cluster_node_count == len(others) + 1
    for name, why in (("new", "candidate"), ("none", "no such"), ("small", "GPUs"), ("cordoned", "cordoned")):
        with pytest.raises(UsageError, match=why):
            candidates.partners([name])


def test_pods_run_on_exactly_these_nodes_and_tolerate_the_taint(site: Site) -> None:
    candidates = site.candidates(node("new", OUR_TAINT))
    settings = {key: value for _, key, value in candidates.settings(["new", "good"])}
    config = Kubernetes.model_validate(
        {key.removeprefix("kubernetes."): value for key, value in settings.items() if key.startswith("kubernetes.")}
    )
    assert config.nodes == ("new", "good")
    keys = [each.key for each in config.tolerations]
    assert keys == ["nvidia.com/gpu", TAINT, "node.kubernetes.io/unschedulable", *READINESS_TAINTS]
    assert (settings["launcher"], settings["cluster.nodes"]) == ("kubernetes", 2)
    assert (candidates.before_test(["good"]), candidates.changed_meanwhile()) == ([], {})


def test_a_node_that_no_pod_can_start_on(site: Site) -> None:
    with pytest.raises(SeatrialError, match="nothing was changed: new: Ready=False"):
        site.candidates(node("new", ready="False"))
    with pytest.raises(SeatrialError, match="untolerated taint team:NoSchedule"):
        site.candidates(node("new", {"key": "team", "effect": "NoSchedule"}))
    instances = node("new")
    instances["metadata"]["labels"] = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"}
    with pytest.raises(SeatrialError, match="nothing was changed: new: MIG enabled"):
        site.candidates(instances)
    with pytest.raises(UsageError, match="no node new"):
        site.candidates(node("other"))


@pytest.mark.parametrize("verb", ["get", "patch"])
def test_a_refused_patch_is_an_error(site: Site, verb: str) -> None:
    with pytest.raises(SeatrialError, match=f"Forbidden.*cannot {verb} resource") as error:
        site.change(site.candidates(node("new"), refused=[f"{verb} nodes/status"]), ACCEPTED)
    assert str(error.value).endswith("Run first: kubectl --context=lab --namespace=ml auth can-i --list")
