"""Jobs whose pods do not start: one finding with the cause, which explains every check that was not measured."""

from __future__ import annotations

import re
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.config.schema import Limits
from seatrial.diagnose import diagnose
from seatrial.diagnose.causes import Run
from seatrial.judge import judge
from seatrial.launch.kubernetes import KubernetesLauncher
from seatrial.launch.watch import run_job
from seatrial.model import CLUSTER, Finding, JobResult, Outcome, Verdict
from tests.launch.on_fake_cluster import FORBIDDEN, JOB, NODES, NOTEBOOK, Attempt, both, settings
from tests.launch.test_pod_states import PODS, QUEUED, QUOTA

RANKS = JOB.model_copy(
    update={"name": "ranks", "placement": "ranks", "ranks_per_node": 2, "checks": ("nodes.connectivity",)}
).model_copy(update={"limits": {"nodes.connectivity": 60.0}})
NO_RIGHT = (
    'Error from server (Forbidden): error when creating "objects.yaml": jobs.batch is forbidden: User "ada" cannot '
    'create resource "jobs" in API group "batch" in the namespace "ml"'
)
NO_NAMESPACE = 'Error from server (NotFound): error when creating "objects.yaml": namespaces "ml" not found'
WEBHOOK = (
    'Error from server: error when creating "objects.yaml": admission webhook "validate.kyverno.svc-fail" denied the '
    "request: policy Job/ml/x for resource violation"
)


def unscheduled(message: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    fields = {"status": {"phase": "Pending", "conditions": [condition]}, "nodeName": ""}
    return {"0": fields, "1": fields}


def ended(**pods: str) -> dict[str, Any]:
    """Pods 0 and 1 with the ends of the fixture."""
    return {index.removeprefix("pod"): both(name)["0"] for index, name in pods.items()}


def findings(attempt: Attempt, gpus: int = 0, **scenario: Any) -> tuple[tuple[Finding, ...], tuple[Verdict, ...]]:
    """The findings and verdicts of a trial of two jobs, none of which starts."""
    config = settings(gpus=gpus)
    config = config.model_copy(
        update={"checks": {**config.checks, "nodes.connectivity": config.checks["host.inventory"]}}
    )
    attempt.install(**scenario)
    launcher = KubernetesLauncher(config)
    results: list[JobResult] = []
    for job in (JOB, RANKS):
        results += run_job(launcher, job, attempt.run_dir, Limits(startup_s=30), catalog(), attempt.listener)
        if results[-1].refused:  # ends a run
            break
    assert attempt.cluster.left_behind() == []
    measurements = attempt.listener.measurements
    verdicts = judge(config, [JOB, RANKS], measurements, catalog(), {})
    return diagnose(Run(verdicts, measurements, catalog()), results, (), attempt.run_dir), verdicts


@pytest.mark.parametrize(
    ("scenario", "cause", "title", "command"),
    [
        (
            {"pods": both("image_missing")},
            "kubernetes_image_missing",
            "the image cannot be pulled, since the registry does not have it: registry.example/seatrial:9",
            "kubectl describe pod -n ml seatrial-",
        ),
        ({"no_pods": True, "events": [QUOTA]}, "kubernetes_quota", ": gpus", "kubectl describe resourcequota -n ml"),
        ({"create_errors": {"Job": FORBIDDEN}}, "kubernetes_quota", ": jobs", "kubectl describe resourcequota -n ml"),
        ({"pods": both("taint")}, "kubernetes_taint", ": gpu", "kubectl get nodes -o custom-columns"),
        (
            {"pods": both("claim_not_bound")},
            "kubernetes_claim_pending",
            "claim is not bound",
            "kubectl describe pvc -n ml",
        ),
        (
            {"pods": unscheduled("0/2 nodes are available: 2 node(s) were unschedulable.")},
            "kubernetes_unschedulable",
            "no node can run the pods",
            "kubectl get nodes; kubectl describe pod -n ml seatrial-",
        ),
        (
            {"suspend": True, "kinds": ["Workload"], "queued": QUEUED},
            "kubernetes_kueue",
            "Kueue has not admitted the workload",
            "kubectl get workloads,localqueues -n ml",
        ),
        (
            {"create_errors": {"Job": NO_RIGHT}},
            "kubernetes_forbidden",
            "may not create",
            "kubectl auth can-i --list -n ml",
        ),
        ({"create_errors": {"Service": NO_NAMESPACE, "Job": NO_NAMESPACE}}, "kubernetes_namespace_missing", ": ml", ""),
        (
            {"create_errors": {"Job": WEBHOOK}},
            "kubernetes_admission",
            ": validate.kyverno.svc-fail",
            "kubectl get valid",
        ),
    ],
    ids=[
        "image",
        "quota",
        "quota-jobs",
        "taint",
        "claim",
        "unschedulable",
        "kueue",
        "forbidden",
        "namespace",
        "webhook",
    ],
)
def test_pods_that_do_not_start_are_one_finding(
    attempt: Attempt, scenario: dict[str, Any], cause: str, title: str, command: str
) -> None:
    (finding,), verdicts = findings(attempt, **scenario)
    assert (finding.cause, finding.confidence) == (cause, "high")
    assert title in finding.title
    assert finding.first_command.startswith(command or "kubectl ")
    assert not re.search("NAMESPACE|POD|[{}]", finding.first_command)
    assert finding.fix
    assert finding.action in ("fix-config", "fix-environment")
    assert {verdict.outcome for verdict in verdicts} == {Outcome.ERROR}
    assert {(each.check, each.subject) for each in finding.explains} == {
        (verdict.check, verdict.subject) for verdict in verdicts
    }


def test_finding_of_a_missing_image_names_nodes_and_the_message_of_the_kubelet(attempt: Attempt) -> None:
    status = PODS["image_missing"]["status"]
    (finding,), _ = findings(attempt, pods={str(i): {"status": status, "nodeName": f"node-{i}"} for i in (0, 1)})
    assert finding.subject == "node-0, node-1"
    assert status["containerStatuses"][0]["state"]["waiting"]["message"] in finding.evidence
    assert finding.source == "job nodes"


def test_older_kubelets_alternate_between_two_messages_of_one_cause(attempt: Attempt) -> None:
    """Before 1.32 the message of the back-off does not repeat the registry's error."""
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "registry.example/seatrial:9"'}
    back_off = {"phase": "Pending", "containerStatuses": [{"name": "seatrial", "state": {"waiting": waiting}}]}
    scenario = {"0": {"status": back_off, "nodeName": "node-b"}, "1": both("image_missing")["1"]}
    (finding,), _ = findings(attempt, pods=scenario)
    assert finding.cause == "kubernetes_image_missing"
    assert set(finding.subject.split(", ")) == {"node-a", "node-b"}
    assert "not found" in finding.evidence


@pytest.mark.parametrize(
    ("scenario", "cause", "nodes"),
    [
        ({"pods": ended(pod0="evicted", pod1="succeeded")}, "kubernetes_evicted", "node-a"),
        ({"pods": ended(pod0="out_of_memory", pod1="creating")}, "kubernetes_out_of_memory", "node-a"),
        ({"pods": ended(pod0="creating", pod1="creating"), "deadline_s": 0}, "kubernetes_deadline", CLUSTER),
    ],
    ids=["evicted", "memory", "deadline"],
)
def test_job_that_kubernetes_ends_is_one_finding(
    attempt: Attempt, scenario: dict[str, Any], cause: str, nodes: str
) -> None:
    (finding,), verdicts = findings(attempt, **scenario)
    assert (finding.cause, finding.subject) == (cause, nodes)
    assert "NAMESPACE" not in finding.first_command
    assert {(each.check, each.subject) for each in finding.explains} == {
        (verdict.check, verdict.subject) for verdict in verdicts
    }


def test_gpus_in_use_are_one_finding(attempt: Attempt) -> None:
    (finding,), _ = findings(attempt, gpus=8, pods=both("gpus_in_use"), objects=[*NODES, NOTEBOOK])
    assert finding.cause == "kubernetes_gpus_in_use"
