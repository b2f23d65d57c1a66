"""The Job of the probe pods: its pods, its end, and its deletion."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import kubernetes_validate
import pytest

from seatrial.checks.kubernetes._probe_pods import probe_job
from seatrial.checks.kubernetes.pods import CHECK
from seatrial.config.kubernetes import Kubernetes
from seatrial.discover.pod_probe import SCRIPT
from seatrial.util.processes import CommandResult
from tests.checks.kubernetes.fake_cluster import KubernetesRunner


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KubernetesRunner:
    runner = KubernetesRunner(CHECK, monkeypatch, tmp_path)
    runner.use_clock(monkeypatch)
    return runner


def test_the_job_has_the_pods_of_the_trial_and_ends_by_itself() -> None:
    settings = Kubernetes.model_validate(
        {
            "image": "registry.example/seatrial:1",
            "node_selector": {"pool": "h100"},
            "overlay": {"resources": {"rdma/ib": 1}, "capabilities": ["IPC_LOCK"], "run_as_user": 0},
            "kueue": {"queue": "team"},
        }
    )
    job = probe_job(settings, "seatrial-probe-1", 4, 8, 600)
    pod = job["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "h100"}
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8", "rdma/ib": "1"}
    assert pod["containers"][0]["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert "seatrial.dev/run" not in job["spec"]["template"]["metadata"]["labels"]  # a trial deletes by this label
    assert (job["spec"]["completions"], job["spec"]["backoffLimit"]) == (4, 0)
    assert job["spec"]["activeDeadlineSeconds"] > 600
    assert job["spec"]["ttlSecondsAfterFinished"] > 0
    for version in ("1.28", "1.37"):
        assert kubernetes_validate.validate(job, version, strict=True) == version
    script = pod["containers"][0]["args"][0]
    assert re.sub(r"\$\$", "$", script) == SCRIPT  # what Kubernetes makes of it
    assert not re.search(r"(?<!\$)(\$\$)*\$\(", script)


def test_probe_pods_use_the_mirror_of_the_trial() -> None:
    settings = Kubernetes(image="registry.example/seatrial:1", registry="mirror.example:5000/cache")
    (container,) = probe_job(settings, "seatrial-probe-1", 4, 8, 600)["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "mirror.example:5000/cache/seatrial:1"


def test_objects_are_deleted(runner: KubernetesRunner) -> None:
    runner.measure()
    job, service = runner.cluster.created
    assert runner.cluster.deleted == [f"seatrial.dev/probe={job['metadata']['name']}"]
    assert service["metadata"]["ownerReferences"] == [
        {"apiVersion": "batch/v1", "kind": "Job", "name": job["metadata"]["name"], "uid": "u1"}
    ]


def test_objects_are_deleted_after_an_error(runner: KubernetesRunner) -> None:
    runner.cluster.probe_pods = lambda _job: [{"metadata": {}}]
    assert "invalid Pod" in (runner.measure().error or "")
    assert runner.cluster.deleted


def test_the_job_of_a_killed_attempt_is_deleted_first(
    runner: KubernetesRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, answers = runner.cluster.run_command, [CommandResult(1, "", "Unable to connect to the server: EOF")]
    deleted: list[str] = []

    def run_command(argv: Sequence[str], timeout_s: float) -> CommandResult:
        if "delete" in argv:
            deleted.extend(option.partition("probe=")[2] for option in argv if option.startswith("--selector="))
            return answers.pop() if answers else CommandResult(0, "", "")
        return answer(argv, timeout_s)

    monkeypatch.setattr(runner.cluster, "run_command", run_command)
    error = runner.measure().error or ""
    assert "kubectl --namespace=team delete jobs --selector=seatrial.dev/probe=seatrial-probe-" in error
    first = runner.cluster.created[0]["metadata"]["name"]
    runner.measure()
    assert deleted == [first, first, runner.cluster.created[0]["metadata"]["name"]]
    runner.measure()
    assert len(deleted) == 4


def test_pods_that_never_start_are_given_up(runner: KubernetesRunner) -> None:
    measurement = runner.measure(wait_s=100)
    assert 100 < runner.cluster.now < 110
    assert {metric.name: metric.value for metric in measurement.metrics} == {"pods_missing": 4}


def test_pods_that_do_not_end_are_an_error_with_the_command_that_deletes_them(
    runner: KubernetesRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = runner.cluster.run_command

    def run_command(argv: Sequence[str], timeout_s: float) -> CommandResult:
        runner.cluster.terminating = 9
        return answer(argv, timeout_s)

    monkeypatch.setattr(runner.cluster, "run_command", run_command)
    error = runner.measure(wait_s=1).error or ""
    assert "probe pods may still use GPUs. Run first: kubectl --namespace=team delete jobs --selector=" in error
    assert runner.cluster.now == pytest.approx(1 + 90, abs=5)


def test_garbage_from_kubectl_create(runner: KubernetesRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = runner.cluster.run_command
    monkeypatch.setattr(
        runner.cluster,
        "run_command",
        lambda argv, timeout_s: (
            CommandResult(0, "[]", "") if "create" in argv and answer(argv, timeout_s) else answer(argv, timeout_s)
        ),
    )
    assert "no object with metadata.uid" in (runner.measure().error or "")
    assert runner.cluster.deleted
