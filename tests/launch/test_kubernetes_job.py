"""A workload on a fake cluster: pods that do not start, that fail, and an API server that does not answer."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.config.schema import Environment, Limits
from seatrial.discover.kubectl import Kubectl
from seatrial.launch import base, kubernetes_job, trial_launcher
from seatrial.launch.base import TOKEN
from seatrial.launch.kubernetes import KubernetesLauncher
from seatrial.launch.kubernetes_job import KubernetesJob
from seatrial.launch.watch import run_job
from seatrial.model import JobState, Preflight
from tests.launch.on_fake_cluster import JOB, NODES, NOTEBOOK, Attempt, both, settings
from tests.launch.test_pod_states import PODS, QUEUED, QUOTA


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ({"pods": both("taint")}, ["untolerated taint {gpu: }", "queue_s is 0.5 s", "Run first: kubectl get nodes"]),
        ({"pods": both("claim_not_bound")}, ["unbound immediate PersistentVolumeClaims", "kubectl describe pvc -n ml"]),
        ({"pods": both("image_missing")}, ["the registry does not have it", "Waiting will not help", "on/seatrial:9"]),
        (
            {"no_pods": True, "events": [QUOTA]},
            ["the namespace's quota does not allow", "used: requests.nvidia.com/gpu=8"],
        ),
        (
            {"suspend": True, "kinds": ["Workload"], "queued": QUEUED},
            ["Kueue has not admitted", "insufficient quota for nv"],
        ),
    ],
    ids=["taint", "claim", "image", "quota", "kueue"],
)
def test_pending_job_ends_with_its_reason(attempt: Attempt, scenario: dict[str, Any], expected: list[str]) -> None:
    result = attempt.run(**scenario)
    assert result.state is JobState.REJECTED
    for text in expected:
        assert text in result.cause.replace("registry.example", "on")
    assert attempt.listener.measurements == []


def test_pending_job_names_the_node_whose_gpus_are_in_use(attempt: Attempt) -> None:
    def monotonic() -> float:  # queue_s is over once a status was shown
        return time.monotonic() + (2000 if attempt.listener.statuses else 0)

    attempt.monkeypatch.setattr(kubernetes_job, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    result = attempt.run(settings(gpus=8, queue_s=1000), pods=both("gpus_in_use"), objects=[*NODES, NOTEBOOK])
    assert "2 Insufficient nvidia.com/gpu" in result.cause
    assert "node-b: 7 of 8 GPUs free, ml/notebook-0 uses 1" in result.cause
    assert any("waiting: Job seatrial-" in status for status in attempt.listener.statuses)
    assert NOTEBOOK in attempt.cluster.objects


def test_names_of_pods_are_in_the_order_of_their_indices(attempt: Attempt) -> None:
    """The collector names the pod of an index; sorted by name, pod 10 would come before pod 2."""
    attempt.install(pods={str(index): both("succeeded")["0"] for index in range(12)})
    launcher = KubernetesLauncher(settings())
    attempt.run_dir.mkdir(parents=True)
    job = launcher.start(launcher.render(JOB.model_copy(update={"nodes": 12}), attempt.run_dir), attempt.run_dir)
    job.poll()
    names = job.collector.transport.nodes.split(",")
    assert [name.split("-")[-2] for name in names] == [str(index) for index in range(12)]
    assert job.cancel() == ""


def test_state_of_a_node_that_is_ready_has_the_error_of_its_log(attempt: Attempt) -> None:
    """Its ranks are silent since the kubelet cannot be reached; those of a node that is not ready, since it is lost."""
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    nodes = [{**NODES[0], "status": {}}, {**NODES[1], "status": ready}]
    ended = {str(index): {**both("succeeded")["0"], "nodeName": f"node-{'ab'[index]}"} for index in range(2)}
    attempt.install(pods=ended, objects=nodes)
    launcher = KubernetesLauncher(settings())
    attempt.run_dir.mkdir(parents=True)
    job = launcher.start(launcher.render(JOB, attempt.run_dir), attempt.run_dir)
    job.poll()
    for index, node in enumerate(("node-a", "node-b")):
        pod = next(each for each in attempt.cluster.objects if each.get("spec", {}).get("nodeName") == node)
        error = f'Get "https://10.0.0.5:10250/containerLogs/ml/{pod["metadata"]["name"]}/seatrial": i/o timeout'
        job.collector.transport.payload(f"error: {error}\n".encode())
        assert (index in job.unreadable_nodes, error in job.node_state(node)[1]) == (True, node == "node-b")
    assert job.cancel() == ""


@pytest.mark.parametrize(
    ("pods", "scenario", "expected"),
    [
        ({"0": "evicted", "1": "succeeded"}, {}, ["1 of 2 pods succeeded", "on node-a: Evicted: The node was low on"]),
        ({"0": "out_of_memory", "1": "creating"}, {}, ["BackoffLimitExceeded", "killed by SIGKILL (OOMKilled)"]),
        ({"0": "creating", "1": "creating"}, {"deadline_s": 0}, ["DeadlineExceeded: Job was active longer"]),
    ],
    ids=["evicted", "memory", "deadline"],
)
def test_failed_job_names_pods_nodes_and_reasons(
    attempt: Attempt, pods: dict[str, str], scenario: dict[str, Any], expected: list[str]
) -> None:
    result = attempt.run(pods={index: both(name)["0"] for index, name in pods.items()}, **scenario)
    assert result.state is JobState.FAILED
    for text in expected:
        assert text in result.cause
    assert result.scheduler_id.startswith("seatrial-")


@pytest.mark.parametrize(
    ("ends", "expected"),
    [({"a": 1, "b": 0}, "exit code 1"), ({"c": 0, "d": 0}, "4 pods ran, not 2: a controller started some again")],
    ids=["failed", "deleted"],
)
def test_job_that_completes_after_a_restart_of_its_pods_fails(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, ends: dict[str, int], expected: str
) -> None:
    objects = [{"kind": "Job", "metadata": {"name": "x"}}, ended_pod("a", 0), ended_pod("b", 0)]
    monkeypatch.setattr(Kubectl, "get", lambda *_: objects)
    job = KubernetesJob("x", 2, "token", settings(), attempt.run_dir)
    assert job.wait_state() is None
    assert job.completing_code() is None
    complete = {"conditions": [{"type": "Complete", "status": "True"}]}
    objects[:] = [{**objects[0], "status": complete}, *(ended_pod(name, code) for name, code in ends.items())]
    assert job.wait_state() is None
    assert job.completing_code() == 1
    assert expected in job.exit_reason()
    assert job.allocation().images == ("a@sha256:1",)


def test_pods_that_were_replaced_before_their_start_are_no_restart(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = [{"kind": "Job", "metadata": {"name": "x"}}, PODS["creating"]]
    monkeypatch.setattr(Kubectl, "get", lambda *_: objects)
    job = KubernetesJob("x", 1, "token", settings(), attempt.run_dir)
    assert job.wait_state()
    complete = {"conditions": [{"type": "Complete", "status": "True"}]}
    objects[:] = [{**objects[0], "status": complete}, ended_pod("a", 0)]
    assert job.wait_state() is None
    assert job.completing_code() == 0


def ended_pod(name: str, code: int) -> dict[str, Any]:
    status = {"containerStatuses": [{"state": {"terminated": {"exitCode": code}}, "imageID": "a@sha256:1"}]}
    return {"kind": "Pod", "metadata": {"name": name}, "spec": {"nodeName": f"node-{name}"}, "status": status}


def test_failed_preflight_of_the_pods_names_their_nodes(attempt: Attempt) -> None:
    config = settings(queue_s=60).model_copy(update={"environment": Environment(source="/nonexistent/env.sh")})
    preflight = Preflight(version="0", torch=False, gpus=0, hf_cache=False)
    attempt.monkeypatch.setattr(kubernetes_job, "_COLLECT_LIMIT_S", 60.0)
    result = attempt.run(config, job=JOB.model_copy(update={"preflight": preflight}))
    assert result.state is JobState.REFUSED
    assert result.failed_subject == "node-a, node-b"
    assert result.cause.startswith("environment.source /nonexistent/env.sh is not readable")


def test_api_server_that_does_not_answer_for_long_ends_the_job(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "OUTAGE_MESSAGE_S", 0.0)
    monkeypatch.setattr(base, "OUTAGE_LIMIT_S", 0.3)
    monkeypatch.setattr(kubernetes_job, "DELETE_LIMIT_S", 0.5)
    attempt.install(
        pods=both("creating"), unreachable="Unable to connect to the server: net/http: TLS handshake timeout"
    )
    launcher = KubernetesLauncher(settings())
    results = list(run_job(launcher, JOB, attempt.run_dir, Limits(), catalog(), attempt.listener))
    assert "TLS handshake timeout" in results[0].cause
    assert "may still exist" in results[0].cause
    assert "kubectl --namespace=ml delete jobs.batch,services,pods --selector=seatrial.dev/token=" in results[0].cause
    folder = attempt.run_dir / "jobs" / "nodes" / "attempt1"
    assert (folder / TOKEN).exists()  # a resumed run deletes what is left
    attempt.install(pods={}, objects=attempt.cluster.objects)
    assert list(trial_launcher(settings()).cancel_earlier_jobs(attempt.run_dir))
    assert attempt.cluster.left_behind() == []
    assert not (folder / TOKEN).exists()
    assert list(trial_launcher(settings()).cancel_earlier_jobs(attempt.run_dir)) == []
