"""Why pods are pending and how they ended, from objects with the statuses of real clusters."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from seatrial.discover.kubernetes import GpuUser, KubernetesNode
from seatrial.discover.kubernetes_messages import Place
from seatrial.launch import pod_states
from tests.paths import FIXTURES

PODS: dict[str, Any] = yaml.safe_load((FIXTURES / "kubernetes" / "pods.yaml").read_text())
JOB = {"kind": "Job", "metadata": {"name": "seatrial-1", "uid": "1"}, "spec": {}, "status": {}}
# https://github.com/kubernetes/kubernetes/issues/88718
QUOTA = {
    "kind": "Event",
    "type": "Warning",
    "reason": "FailedCreate",
    "involvedObject": {"kind": "Job", "name": "seatrial-1"},
    "lastTimestamp": "2026-11-20T10:00:00Z",
    "message": 'Error creating: pods "seatrial-1-0-9zfnl" is forbidden: exceeded quota: gpus, requested: '
    "requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu=8",
}
# https://github.com/ray-project/kuberay/issues/4846
QUEUED = {
    "kind": "Workload",
    "status": {
        "conditions": [
            {
                "type": "QuotaReserved",
                "status": "False",
                "reason": "Pending",
                "message": "couldn't assign flavors to pod set main: insufficient quota for nvidia.com/gpu in flavor a",
            }
        ]
    },
}


@pytest.mark.parametrize(
    ("pod", "meaning", "permanent"),
    [
        ("gpus_in_use", "too few free GPUs", False),
        ("taint", "taint of the nodes is not tolerated", False),
        ("claim_not_bound", "volume claim is not bound", False),
        ("image_missing", "the image cannot be pulled, since the registry does not have it", True),
        ("creating", "starting on node-a", False),
    ],
)
def test_reason_of_a_pending_pod(pod: str, meaning: str, permanent: bool) -> None:
    pending = pod_states.pending([PODS[pod], PODS["succeeded"]], 2, JOB, place=Place("ml"))
    assert meaning in pending.reason
    assert "seatrial-1-0-aaaaa" in pending.reason
    assert pending.permanent is permanent
    assert "{" not in pending.first_command.replace("{gpu: }", "")


def test_reason_of_pods_that_do_not_exist() -> None:
    quota = pod_states.pending([], 2, JOB, [QUOTA])
    assert quota.reason.startswith("the namespace's quota does not allow the pods. 2 pods: Error creating")
    assert not quota.permanent
    suspended = JOB | {"spec": {"suspend": True}}
    kueue = pod_states.pending([], 2, suspended, [QUOTA], [QUEUED])
    assert "insufficient quota for nvidia.com/gpu in flavor a" in kueue.reason
    assert "Kueue" in pod_states.pending([], 2, suspended).reason
    assert "not created yet" in pod_states.pending([], 2, JOB).reason


def test_a_pod_that_waits_for_a_mount_has_the_reason_of_its_last_event() -> None:
    mount = QUOTA | {
        "reason": "FailedMount",
        "involvedObject": {"name": "seatrial-1-0-aaaaa"},
        "message": 'MountVolume.SetUp failed for volume "results": timed out',
    }
    assert "FailedMount: MountVolume" in pod_states.pending([PODS["creating"]], 1, JOB, [QUOTA, mount]).reason


@pytest.mark.parametrize(
    ("pod", "code", "expected"),
    [
        ("evicted", 137, "Evicted: The node was low on resource: ephemeral-storage"),
        ("node_lost", None, "DeletionByTaintManager: Taint manager: deleting due to NoExecute taint"),
        ("out_of_memory", 137, "killed by SIGKILL (OOMKilled)"),
        ("restarted", 3, "exit code 3"),
        ("succeeded", 0, ""),
    ],
)
def test_end_of_a_pod(pod: str, code: int | None, expected: str) -> None:
    assert pod_states.exit_code(PODS[pod]) == code
    assert expected in pod_states.pod_end(PODS[pod])
    assert bool(pod_states.pod_end(PODS[pod])) is bool(expected)


def test_partial_completion_and_deadline_name_pods_and_nodes() -> None:
    failed = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "Job was active longer"}
    job = JOB | {"status": {"conditions": [failed]}}
    reason = pod_states.end_reason([PODS["evicted"], PODS["succeeded"]], 2, job)
    assert reason.startswith(
        "DeadlineExceeded: Job was active longer. 1 of 2 pods succeeded. pod seatrial-1-0-aaaaa on"
    )
    assert "on node-a: Evicted" in reason


def test_gpu_use_names_free_gpus_and_users() -> None:
    status = {"allocatable": {"nvidia.com/gpu": "8"}, "nodeInfo": {"kubeletVersion": "v1.34.1"}}
    nodes = [KubernetesNode.model_validate({"metadata": {"name": f"node-{name}"}, "status": status}) for name in "ab"]
    users = [GpuUser("ml/notebook-0", "node-b", 1)]
    assert pod_states.gpu_use(nodes, users) == ["node-b: 7 of 8 GPUs free, ml/notebook-0 uses 1"]
    labels = {"nvidia.com/mig.strategy": "single", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"}
    instances = KubernetesNode.model_validate({"metadata": {"name": "node-b", "labels": labels}, "status": status})
    assert pod_states.gpu_use([instances], users) == [f"node-b: {instances.mig_error}"]


def test_node_state() -> None:
    ready = {"type": "Ready", "status": "Unknown", "message": "Kubelet stopped posting node status."}
    node = {"spec": {"unschedulable": True, "taints": [{"key": "node.kubernetes.io/unreachable"}]}}
    state = pod_states.node_state(node | {"status": {"conditions": [ready]}})
    assert state.startswith("NotReady (Kubelet stopped posting node status.), SchedulingDisabled, taint node.kubern")


def test_message_of_the_script_is_shown_without_the_token() -> None:
    log = f"{'f' * 32} 1 0 .all 2\nmkdir: Permission denied\nseatrial: user 65532 cannot write to /seatrial\n"
    terminated = {"exitCode": 1, "reason": "Error", "message": log}
    pod = {"status": {"containerStatuses": [{"state": {"terminated": terminated}}]}}
    assert pod_states.pod_end(pod) == "exit code 1; user 65532 cannot write to /seatrial"


def test_images_of_pods() -> None:
    pods = [{"status": {"containerStatuses": [{"imageID": image}]}} for image in ("a@sha256:2", "a@sha256:1", "")]
    assert pod_states.images([*pods, {"status": {}}]) == ("a@sha256:1", "a@sha256:2")
