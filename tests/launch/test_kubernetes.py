"""The Kubernetes launcher on a fake cluster: pods that do not start or end, refused requests, and what is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from seatrial.checks import catalog
from seatrial.config.schema import Config, Environment, Limits
from seatrial.launch import cancel_earlier_jobs, check_access, kubernetes_job, node_prefix
from seatrial.launch.kubernetes import KubernetesLauncher
from seatrial.launch.kubernetes_job import TOKEN, label_value
from seatrial.launch.watch import run_job
from seatrial.model import Job, JobResult, JobState, Preflight, UsageError
from tests.fakes.kubectl import Cluster
from tests.launch.scripted import RecordingListener
from tests.launch.test_pod_states import PODS, QUEUED, QUOTA

FORBIDDEN = (
    'Error from server (Forbidden): error when creating "objects.yaml": jobs.batch is forbidden: exceeded quota: jobs, '
    "requested: count/jobs.batch=1, used: count/jobs.batch=4, limited: count/jobs.batch=4"
)
NODES = [
    {"kind": "Node", "metadata": {"name": name}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}
    for name in ("node-a", "node-b")
]
NOTEBOOK = {
    "kind": "Pod",
    "metadata": {"name": "notebook-0", "namespace": "ml", "uid": "1"},
    "spec": {"nodeName": "node-b", "containers": [{"resources": {"requests": {"nvidia.com/gpu": "1"}}}]},
    "status": {"phase": "Running"},
}


def settings(gpus: int = 0, **kubernetes: Any) -> Config:
    return Config.model_validate(
        {
            "name": "trial",
            "launcher": "kubernetes",
            "cluster": {"nodes": 2, "gpus_per_node": gpus},
            "kubernetes": {"image": "registry.example/seatrial:9", "namespace": "ml", "queue_s": 0.5, **kubernetes},
            "checks": {"host.inventory": {}},
        }
    )


JOB = Job(
    name="nodes",
    placement="nodes",
    device="cpu",
    nodes=2,
    ranks_per_node=1,
    checks=("host.inventory",),
    options={},
    expected_gpus=None,
    limits={"host.inventory": 60.0},
    limit_s=60,
)


class Attempt:
    """One job on a fake cluster."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster, self.run_dir = Cluster(folder / "cluster"), folder / "run"
        self.listener, self.monkeypatch = RecordingListener(), monkeypatch
        for name in ("_POLL_S", "_EVENTS_AFTER_S", "_EVENTS_POLL_S", "_COLLECT_LIMIT_S"):
            monkeypatch.setattr(kubernetes_job, name, 0.0)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")

    def install(self, **scenario: Any) -> None:
        self.cluster.install(self.run_dir.parent / "bin", **scenario)
        self.cluster.call_in_process(self.monkeypatch)

    def run(self, config: Config | None = None, job: Job = JOB, **scenario: Any) -> JobResult:
        self.install(**scenario)
        launcher = KubernetesLauncher(config or settings())
        limits = Limits(startup_s=30)
        (result,) = run_job(launcher, job, self.run_dir, limits, catalog(), self.listener)
        assert self.cluster.left_behind() == []
        assert self.cluster.unexpected_calls == []
        return result


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempt]:
    created = Attempt(tmp_path, monkeypatch)
    yield created
    created.cluster.stop()


def both(pod: str) -> dict[str, Any]:
    fields = {"status": PODS[pod]["status"], "nodeName": PODS[pod]["spec"].get("nodeName", "")}
    return {"0": fields, "1": fields}


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ({"pods": both("taint")}, ["untolerated taint {gpu: }", "queue_s is 0.5 s", "Run first: kubectl get nodes"]),
        ({"pods": both("claim_not_bound")}, ["unbound immediate PersistentVolumeClaims", "kubectl describe pvc -n ml"]),
        ({"pods": both("image_missing")}, ["the registry has no such image", "waiting will not help", "on/seatrial:9"]),
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
    assert result.state is JobState.TIMEOUT
    for text in expected:
        assert text in result.cause.replace("registry.example", "on")
    assert [error[0] for error in attempt.listener.errors] == ["host.inventory"] * 2


def test_pending_job_names_the_node_whose_gpus_are_in_use(attempt: Attempt) -> None:
    result = attempt.run(settings(gpus=8), pods=both("gpus_in_use"), objects=[*NODES, NOTEBOOK])
    assert "2 Insufficient nvidia.com/gpu" in result.cause
    assert "node-b: 7 of 8 GPUs free, ml/notebook-0 uses 1" in result.cause
    assert any("waiting: Job seatrial-" in status for status in attempt.listener.statuses)
    assert NOTEBOOK in attempt.cluster.objects


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


def test_failed_preflight_of_the_pods_names_their_nodes(attempt: Attempt) -> None:
    config = settings(queue_s=60).model_copy(update={"environment": Environment(source="/nonexistent/env.sh")})
    preflight = Preflight(version="0", torch=False, gpus=0, hf_cache=False)
    attempt.monkeypatch.setattr(kubernetes_job, "_COLLECT_LIMIT_S", 60.0)
    result = attempt.run(config, job=JOB.model_copy(update={"preflight": preflight}))
    assert result.state is JobState.REFUSED
    assert result.failed_subject == "node-a, node-b"
    assert result.cause.startswith("environment.source /nonexistent/env.sh is not readable")


def test_refused_object_leaves_no_other(attempt: Attempt) -> None:
    result = attempt.run(create_errors={"Job": FORBIDDEN})
    assert "(Forbidden): jobs.batch is forbidden: exceeded quota: jobs" in result.cause
    assert any(call.endswith("--wait=false") and "delete jobs.batch,services" in call for call in attempt.cluster.calls)


def test_objects_of_others_with_the_same_name_stay(attempt: Attempt) -> None:
    service = next(yaml.safe_load_all(KubernetesLauncher(settings()).render(JOB, attempt.run_dir).text))
    other = {"kind": "Service", "metadata": {"name": service["metadata"]["name"], "uid": "1", "labels": {}}}
    result = attempt.run(objects=[other])
    assert "exists already and is not of this run; it is left unchanged" in result.cause
    assert attempt.cluster.objects == [other]


def test_api_server_that_does_not_answer_for_long_ends_the_job(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_job, "_OUTAGE_MESSAGE_S", 0.0)
    monkeypatch.setattr(kubernetes_job, "_OUTAGE_LIMIT_S", 0.3)
    monkeypatch.setattr(kubernetes_job, "_DELETE_LIMIT_S", 0.5)
    attempt.install(
        pods=both("creating"), unreachable="Unable to connect to the server: net/http: TLS handshake timeout"
    )
    launcher = KubernetesLauncher(settings())
    results = list(run_job(launcher, JOB, attempt.run_dir, Limits(), catalog(), attempt.listener))
    assert "TLS handshake timeout" in results[0].cause
    assert "still exists" in results[0].cause
    folder = attempt.run_dir / "jobs" / "nodes" / "attempt1"
    assert (folder / TOKEN).exists()  # a resumed run deletes what is left
    attempt.install(pods={}, objects=attempt.cluster.objects)
    assert list(cancel_earlier_jobs(settings(), attempt.run_dir))
    assert attempt.cluster.left_behind() == []
    assert not (folder / TOKEN).exists()
    assert list(cancel_earlier_jobs(settings(), attempt.run_dir)) == []


def test_token_is_in_objects_but_not_in_the_shown_command(attempt: Attempt) -> None:
    attempt.run(pods=both("image_missing"))
    folder = attempt.run_dir / "jobs" / "nodes" / "attempt1"
    objects = list(yaml.safe_load_all((folder / "objects.yaml").read_text()))
    (container,) = objects[1]["spec"]["template"]["spec"]["containers"]
    (token,) = [each["value"] for each in container["env"] if each["name"] == "SEATRIAL_TOKEN"]
    assert token not in (folder / "command.sh").read_text()
    assert (folder / "objects.yaml").stat().st_mode & 0o077 == 0
    for item in (*objects, objects[1]["spec"]["template"]):
        assert item["metadata"]["labels"]["seatrial.dev/token"] == label_value(token)
    assert "seatrial.dev/token" not in objects[0]["spec"]["selector"]


@pytest.mark.parametrize(
    ("scenario", "workload", "expected"),
    [
        ({"refused": ["create jobs.batch", "get pods/log"]}, "job", "may not create jobs.batch, get pods/log in names"),
        ({}, "jobset", "the cluster has no jobsets of jobset.x-k8s.io: install JobSet"),
        ({}, "trainjob", "install Kubeflow Trainer, or set kubernetes.workload to job"),
    ],
)
def test_missing_permissions_and_operators_are_found_before_the_first_job(
    attempt: Attempt, scenario: dict[str, Any], workload: str, expected: str
) -> None:
    attempt.install(**scenario)
    with pytest.raises(UsageError, match=expected):
        check_access(settings(workload=workload))


def test_no_kubectl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UsageError, match="command -v kubectl"):
        check_access(settings())


def test_command_on_a_node() -> None:
    prefix = node_prefix(settings(context="gpu"))
    assert prefix.startswith("kubectl --context=gpu --namespace=ml debug ")
    assert prefix.endswith(" node/{node} -- chroot /host")
