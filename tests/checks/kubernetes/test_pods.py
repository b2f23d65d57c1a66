from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.kubernetes import _probe_pods
from seatrial.checks.kubernetes.pods import CHECK
from seatrial.discover.pod_probe import peers
from seatrial.model import Outcome, Why
from seatrial.util.processes import CommandResult
from tests.checks.kubernetes.fake_cluster import KubernetesRunner, Object
from tests.fakes.slurm import judge, not_passed, reasons, run_check

FAIL, WARN, ERROR = Outcome.FAIL, Outcome.WARN, Outcome.ERROR
FINDINGS = {
    "gpus": "8",
    "shm_kib": "16777216",
    "memlock_kib": "unlimited",
    "memory_kib": "2113411308",
    "capabilities": "0000000000000000",
    "probed": "1",
}


class Probes(KubernetesRunner):
    """Four probe pods on gpu0 to gpu3; tests change what they find and their states, by node."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        super().__init__(CHECK, monkeypatch, folder)
        self.findings: dict[str, dict[str, str]] = {f"gpu{index}": dict(FINDINGS) for index in range(4)}
        self.rdma: dict[str, list[str]] = {}
        self.unresolved: dict[str, list[int]] = {}
        self.states: dict[str, Object] = {}  # containerStatuses[0].state
        self.unscheduled: set[str] = set()
        self.image_ids: dict[str, str] = {}
        self.kubelet_errors: dict[str, str] = {}
        self.cluster.probe_pods, self.cluster.log = self.pods, self.log
        self.use_clock(monkeypatch)

    def pods(self, job: Object) -> list[Object]:
        return [self._pod(job, index, node) for index, node in enumerate(self.findings)]

    def _pod(self, job: Object, index: int, node: str) -> Object:
        name, scheduled = f"{job['metadata']['name']}-{index}-x5crl", node not in self.unscheduled
        message = "" if scheduled else "0/5 nodes are available: 5 Insufficient nvidia.com/gpu."
        condition = {
            "type": "PodScheduled",
            "status": "True" if scheduled else "False",
            "reason": "" if scheduled else "Unschedulable",
            "message": message,
            "lastTransitionTime": "2026-11-20T09:20:53Z",
        }
        state = self.states.get(node, {"running": {"startedAt": "2026-11-20T09:21:23Z"}})
        statuses = [{"name": "seatrial", "imageID": self.image_ids.get(node, ""), "state": state}] if scheduled else []
        status = {"phase": "Running", "conditions": [condition], "containerStatuses": statuses}
        return {"metadata": {"name": name}, "spec": {"nodeName": node} if scheduled else {}, "status": status}

    def log(self, job: Object) -> str:
        lines = []
        for index, (node, findings) in enumerate(self.findings.items()):
            prefix = f"[pod/{job['metadata']['name']}-{index}-x5crl/seatrial] "
            if node in self.unscheduled or "running" not in self.states.get(node, {"running": {}}):
                lines.append("error: container is waiting to start")
                continue
            if error := self.kubelet_errors.get(node):
                path = f"containerLogs/team/{job['metadata']['name']}-{index}-x5crl/seatrial"
                lines.append(f'error: Get "https://10.0.0.5:10250/{path}": {error}')
                continue
            rows = [f"{key}={value}" for key, value in findings.items()]
            rows += [f"rdma={device}" for device in self.rdma.get(node, ())]
            resolved = [peer for peer in peers(index, len(self.findings)) if peer not in self.unresolved.get(node, ())]
            rows += [f"resolved={job['metadata']['name']}-{peer}" for peer in resolved]
            lines += [prefix + row for row in [*rows, *([] if self.unresolved.get(node) else ["end=1"])]]
        return "\n".join(lines)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Probes:
    return Probes(monkeypatch, tmp_path)


def fact(probes: Probes, name: str) -> Any:
    return probes.measure().facts[name]


def evidence(probes: Probes, name: str) -> dict[str, Any]:
    """Subject → the evidence of a metric."""
    return {metric.subject: metric.evidence for metric in probes.measure().metrics if metric.name == name}


def values(probes: Probes) -> dict[tuple[str, str], float]:
    return {(metric.name, metric.subject): metric.value for metric in probes.measure().metrics}


def test_healthy_pods(probes: Probes) -> None:
    assert probes.not_passed() == {}
    assert values(probes)["gpus_missing", "gpu2"] == 0
    assert values(probes)["start_seconds", "gpu2"] == 30


def test_a_kubelet_that_cannot_be_reached_is_the_cause(probes: Probes) -> None:
    """The results of the other pods are kept, and the image is not blamed."""
    probes.kubelet_errors["gpu2"] = "dial tcp 10.0.0.5:10250: connect: connection refused"
    measured = probes.measure()
    assert measured.error is not None
    assert "sh and df" not in measured.error
    assert {metric.subject for metric in measured.metrics if metric.name == "gpus_missing"} == {"gpu0", "gpu1", "gpu3"}
    failures: Any = measured.facts["job_failures"]
    (failure,) = failures
    assert (failure["cause"], failure["nodes"]) == ("kubernetes_kubelet_unreachable", ["gpu2"])
    assert failure["message"] in measured.error


def test_rules_of_rdma_do_not_apply_without_rdma(probes: Probes) -> None:
    measurement = probes.measure()
    not_applicable = reasons(measurement, Why.DOES_NOT_APPLY)
    assert {"rdma_devices_missing", "memlock_unlimited"} < not_applicable.keys()
    assert {v.metric for v in judge(CHECK, measurement) if v.outcome is Outcome.SKIP} == not_applicable.keys()


def test_gpus_of_one_pod_are_missing(probes: Probes) -> None:
    probes.findings["gpu1"]["gpus"] = "7"
    del probes.findings["gpu3"]["gpus"]
    probes.findings["gpu3"]["gpu_error"] = "Failed to initialize NVML: Unknown Error "
    assert probes.not_passed() == {"gpus_missing gpu1": FAIL, "gpus_missing gpu3": FAIL}
    assert values(probes)["gpus_missing", "gpu3"] == 8
    assert evidence(probes, "gpus_missing")["gpu3"] == "Failed to initialize NVML: Unknown Error"


@pytest.mark.parametrize("gpus", [0, None])
def test_unexpected_gpus_are_not_counted(probes: Probes, gpus: int | None) -> None:
    assert "gpus_missing" in reasons(probes.measure(gpus=gpus), Why.DOES_NOT_APPLY)


def test_shm_and_rdma(probes: Probes) -> None:
    """64 MiB is the default of container runtimes; the limit of locked memory is 8 MiB."""
    probes.rdma = {node: ["mlx5_0", "mlx5_1"] for node in probes.findings}
    probes.findings["gpu0"]["shm_kib"] = "65536"
    probes.findings["gpu1"]["memlock_kib"] = "8192"
    probes.findings["gpu2"] |= {"memlock_kib": "8192", "capabilities": "0000000000004000"}
    probes.rdma["gpu3"] = ["mlx5_0"]
    assert probes.not_passed() == {
        "shm_bytes gpu0": FAIL,
        "memlock_unlimited gpu1": FAIL,
        "rdma_devices_missing gpu3": FAIL,
    }


def test_requested_rdma_devices_are_nowhere(probes: Probes) -> None:
    probes.cluster.settings["overlay"] = {"resources": {"rdma/ib": 1}}
    assert probes.not_passed() == {f"rdma_devices_missing gpu{index}": FAIL for index in range(4)}


def test_a_name_that_does_not_resolve(probes: Probes) -> None:
    probes.unresolved = {"gpu2": [0, 1]}
    assert probes.not_passed() == {"names_unresolved gpu2": FAIL}
    assert probes.cluster.now == pytest.approx(_probe_pods.PROBE_S + _probe_pods.RESOLVE_S, abs=_probe_pods.POLL_S)
    names = evidence(probes, "names_unresolved")["gpu2"]
    assert [name.rpartition("-")[2] for name in names] == ["0", "1"]


def test_image_without_getent(probes: Probes) -> None:
    for findings in probes.findings.values():
        findings["dns_error"] = "the image has no getent"
    probes.unresolved = {node: [0, 1, 2, 3] for node in probes.findings}
    assert reasons(probes.measure(), Why.DOES_NOT_APPLY)["names_unresolved"] == "the image has no getent"
    assert probes.not_passed() == {}


def test_a_single_pod_has_nothing_to_compare(probes: Probes) -> None:
    probes.findings = {"gpu0": dict(FINDINGS)}
    measurement = probes.measure(nodes=1)
    assert not_passed(judge(CHECK, measurement)) == {}
    compared = {"names_unresolved", "image_digests", "image_pull_ratio"}
    assert compared < reasons(measurement, Why.DOES_NOT_APPLY).keys()


def test_image_that_one_node_cannot_pull(probes: Probes) -> None:
    message = 'Back-off pulling image "registry.example/seatrial:1"'
    probes.states["gpu1"] = {"waiting": {"reason": "ImagePullBackOff", "message": message}}
    assert probes.not_passed() == {"pods_missing": FAIL, "started gpu1": FAIL}
    assert evidence(probes, "started")["gpu1"]["not_started"].endswith(f"ImagePullBackOff: {message}")
    unresolved = evidence(probes, "names_unresolved")  # the pod that did not start has no name
    assert unresolved == {"gpu0": [], "gpu2": [], "gpu3": []}
    (failure,) = fact(probes, "job_failures")
    assert (failure["cause"], failure["nodes"]) == ("kubernetes_image_pull", ["gpu1"])
    assert failure["first_command"].startswith("kubectl describe pod -n team seatrial-probe-")


def test_pod_without_a_node(probes: Probes) -> None:
    probes.unscheduled = {"gpu3"}
    assert probes.not_passed() == {"pods_missing": FAIL}
    (state,) = evidence(probes, "pods_missing")["cluster"]["not_started"].values()
    assert state.endswith("Unschedulable: 0/5 nodes are available: 5 Insufficient nvidia.com/gpu.")


def test_command_that_does_not_start(probes: Probes) -> None:
    """The kubelet sets the time of such a start to 1970."""
    probes.states["gpu0"] = {"terminated": {"reason": "StartError", "startedAt": "1970-01-01T00:00:00Z"}}
    assert probes.not_passed() == {"pods_missing": FAIL, "started gpu0": FAIL}


def test_no_pod_at_all(probes: Probes) -> None:
    """A quota refuses the pods; only the event of the Job has the reason."""
    message = 'Error creating: pods "seatrial-probe-1-0-x" is forbidden: exceeded quota: team'
    probes.findings = {}
    probes.cluster.log = lambda _job: ""

    def events(job: Object) -> list[Object]:
        involved = {"kind": "Job", "name": job["metadata"]["name"]}
        probes.cluster.events = [
            {"involvedObject": involved, "type": "Warning", "reason": "FailedCreate", "message": message}
        ]
        return []

    probes.cluster.probe_pods = events
    bad = probes.not_passed()
    assert bad.pop("pods_missing") is FAIL
    unmeasured = {"started", "gpus_missing", "shm_bytes"}
    assert bad == {f"{name} login": ERROR for name in unmeasured}
    assert evidence(probes, "pods_missing")["cluster"]["warnings"] == [message]
    (failure,) = fact(probes, "job_failures")
    assert (failure["cause"], failure["name"], failure["nodes"]) == ("kubernetes_quota", "team", [])


def test_refused_probe_job_is_a_known_failure(probes: Probes, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = probes.cluster.run_command
    text = 'Error from server (Forbidden): jobs.batch is forbidden: User "ada" cannot create resource "jobs"'

    def run_command(argv: Sequence[str], timeout_s: float) -> CommandResult:
        return CommandResult(1, "", text) if "create" in argv else answer(argv, timeout_s)

    monkeypatch.setattr(probes.cluster, "run_command", run_command)
    (failure,) = fact(probes, "job_failures")
    assert failure["cause"] == "kubernetes_forbidden"
    assert failure["message"] in (probes.measure().error or "")
    assert probes.cluster.deleted == []  # nothing was created; the user may not delete either


def test_pull_time(probes: Probes) -> None:
    """gpu3 has the image already; the event of another pod does not count."""
    message = 'Successfully pulled image "registry.example/seatrial:1" in 27.88s (27.88s including waiting).'

    def with_events(job: Object) -> list[Object]:
        names = [f"{job['metadata']['name']}-2-x5crl", f"{job['metadata']['name']}-3-x5crl", "other-0-x"]
        messages = [message, 'Container image "registry.example/seatrial:1" already present on machine', message]
        probes.cluster.events = [
            {"involvedObject": {"name": name}, "type": "Normal", "reason": "Pulled", "message": text}
            for name, text in zip(names, messages, strict=True)
        ]
        return probes.pods(job)

    probes.cluster.probe_pods = with_events
    pulls = {subject: value for (name, subject), value in values(probes).items() if name == "image_pull_seconds"}
    assert pulls == {"gpu2": 27.88}


def test_pull_that_is_far_slower_than_on_other_nodes(probes: Probes) -> None:
    """22 s and 28 s count as equal; the ratio of gpu3 is to the median of the others."""

    def with_events(job: Object) -> list[Object]:
        probes.cluster.events = [
            {
                "involvedObject": {"name": f"{job['metadata']['name']}-{index}-x5crl"},
                "reason": "Pulled",
                "message": f'Successfully pulled image "registry.example/seatrial:1" in {duration}',
            }
            for index, duration in enumerate(["22s", "28s", "1m10s", "3m30s"])
        ]
        return probes.pods(job)

    probes.cluster.probe_pods = with_events
    assert probes.not_passed() == {"image_pull_ratio gpu3": WARN}
    ratios = {subject: value for (name, subject), value in values(probes).items() if name == "image_pull_ratio"}
    assert ratios == {"gpu0": 30 / 70, "gpu1": 30 / 70, "gpu2": 70 / 30, "gpu3": 7}


def test_one_tag_with_two_digests(probes: Probes) -> None:
    """An imported image has the digest of another document, and is not compared."""
    old, new = "0" * 64, "1" * 64
    ids = [f"registry.example/seatrial@sha256:{new}"] * 2 + [f"mirror.example/seatrial@sha256:{old}", f"sha256:{old}"]
    probes.image_ids = dict(zip(probes.findings, ids, strict=True))
    assert probes.not_passed() == {"image_digests": FAIL}
    assert evidence(probes, "image_digests")["cluster"] == {
        f"sha256:{new}": ["gpu0", "gpu1"],
        f"sha256:{old}": ["gpu2"],
    }
    probes.image_ids = dict.fromkeys(probes.findings, ids[0])
    assert probes.not_passed() == {}
    assert values(probes)["image_digests", "cluster"] == 1
    probes.image_ids = {}
    assert "image_digests" in reasons(probes.measure(), Why.DOES_NOT_APPLY)


def test_events_that_the_user_may_not_list(probes: Probes) -> None:
    probes.cluster.forbidden = {"events"}
    assert probes.not_passed() == {}


def test_pod_without_findings(probes: Probes) -> None:
    probes.findings["gpu0"] = {"gpus": "8"}
    measurement = probes.measure()
    assert "on gpu0" in (measurement.error or "")
    assert set(probes.not_passed().values()) == {ERROR}


def test_lines_of_others_in_a_log_are_ignored(probes: Probes) -> None:
    log = probes.log
    probes.cluster.log = lambda job: "gpus=0\n[pod/other-0-x/main] gpus=0\n[pod/x] \ud7ff\n" + log(job)
    assert probes.not_passed() == {}


def test_another_launcher(tmp_path: Path) -> None:
    assert run_check(CHECK, tmp_path).skipped == "the launcher is not kubernetes"
