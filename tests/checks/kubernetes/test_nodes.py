from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.kubernetes.nodes import CHECK
from seatrial.model import DecisionValue, Outcome, Why
from tests.checks.kubernetes.fake_cluster import DAEMON_SETS, KubernetesRunner, daemon_pod, node_list
from tests.fakes.kubectl import Cluster
from tests.fakes.slurm import judge, reasons, run_check
from tests.processes import Program, load

WARN, FAIL, ERROR = Outcome.WARN, Outcome.FAIL, Outcome.ERROR


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KubernetesRunner:
    return KubernetesRunner(CHECK, monkeypatch, tmp_path)


def evidence(runner: KubernetesRunner, name: str, subject: str = "cluster") -> Any:
    (found,) = (each.evidence for each in runner.measure().metrics if (each.name, each.subject) == (name, subject))
    return found


def test_a_healthy_cluster(runner: KubernetesRunner) -> None:
    assert runner.not_passed() == {}
    values = {(metric.name, metric.subject): metric.value for metric in runner.measure().metrics}
    assert values["nodes", "cluster"] == 4  # control0 has no GPU
    assert values["gpus_unhealthy", "gpu3"] == 0
    assert {name for name, _ in values} == set(CHECK.units)


def test_a_node_that_is_not_ready(runner: KubernetesRunner) -> None:
    """The conditions of a node whose kubelet stopped, and the taints that Kubernetes adds."""
    node = runner.cluster.node("gpu2")
    for condition in node["status"]["conditions"]:
        condition |= {
            "status": "Unknown",
            "reason": "NodeStatusUnknown",
            "message": "Kubelet stopped posting node status.",
        }
    node["spec"]["taints"] = [
        {"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"},
        {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"},
    ]
    warnings = {"ready gpu2": WARN, "schedulable gpu2": WARN}
    assert runner.not_passed(nodes=3) == warnings
    assert runner.not_passed(nodes=4) == {**warnings, "nodes_missing": FAIL}
    assert evidence(runner, "nodes_missing") == {
        "gpu2": "Ready=Unknown: NodeStatusUnknown: Kubelet stopped posting node status.; "
        "taint node.kubernetes.io/unreachable:NoSchedule; taint node.kubernetes.io/unreachable:NoExecute"
    }


def test_unhealthy_gpu(runner: KubernetesRunner) -> None:
    """The kubelet keeps an unhealthy GPU in the capacity of its node."""
    runner.cluster.node("gpu1")["status"]["allocatable"]["nvidia.com/gpu"] = "7"
    assert runner.not_passed() == {"gpus_unhealthy gpu1": WARN, "nodes_missing": FAIL}
    assert evidence(runner, "nodes_missing") == {"gpu1": "7 nvidia.com/gpu allocatable, 8 requested"}
    assert evidence(runner, "gpus_unhealthy", "gpu1") == "7 of 8 allocatable"


def test_allocatable_stuck_at_zero(runner: KubernetesRunner) -> None:
    runner.cluster.node("gpu0")["status"]["allocatable"]["nvidia.com/gpu"] = "0"
    metrics = {metric.name: metric.value for metric in runner.measure().metrics if metric.subject == "gpu0"}
    assert (metrics["gpus_unhealthy"], metrics["gpus_below_expected"]) == (8, 0)


def test_node_without_device_plugin(runner: KubernetesRunner) -> None:
    """Without a device plugin the kubelet reports no GPUs; the labels remain."""
    for part in ("capacity", "allocatable"):
        del runner.cluster.node("gpu3")["status"][part]["nvidia.com/gpu"]
    runner.cluster.pods["gpu-operator"] = [
        pod
        for pod in runner.cluster.pods["gpu-operator"]
        if (pod["spec"]["nodeName"], pod["metadata"]["ownerReferences"][0]["name"]) != ("gpu3", DAEMON_SETS[0])
    ]
    bad = runner.not_passed()
    assert bad == {"gpus_below_expected gpu3": WARN, "operator_pods_missing gpu3": WARN, "nodes_missing": FAIL}
    assert evidence(runner, "operator_pods_missing", "gpu3") == [f"gpu-operator/{DAEMON_SETS[0]}"]


@pytest.mark.parametrize(
    ("spec", "tolerations", "schedulable"),
    [
        (
            {"unschedulable": True, "taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]},
            [],
            False,
        ),
        ({"taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]}, None, True),
        ({"taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]}, [], False),
        ({"taints": [{"key": "team", "value": "a", "effect": "NoExecute"}]}, [{"key": "team", "value": "a"}], True),
        ({"taints": [{"key": "team", "value": "a", "effect": "NoExecute"}]}, [{"key": "team", "value": "b"}], False),
        ({"taints": [{"key": "team", "effect": "NoSchedule"}]}, [{"key": "team"}], True),
        ({"taints": [{"key": "team", "effect": "NoSchedule"}]}, [{"key": "team", "effect": "NoExecute"}], False),
        ({"taints": [{"key": "team", "effect": "PreferNoSchedule"}]}, [], True),
        ({"taints": [{"key": "team", "effect": "NoSchedule"}]}, [{"operator": "Exists"}], True),
    ],
)
def test_cordons_and_taints(
    runner: KubernetesRunner, spec: dict[str, object], tolerations: list[dict[str, str]] | None, schedulable: bool
) -> None:
    """Without a setting, pods tolerate the taint nvidia.com/gpu."""
    runner.cluster.node("gpu1")["spec"] = spec
    if tolerations is not None:
        runner.cluster.settings["tolerations"] = tolerations
    assert runner.not_passed(nodes=3) == ({} if schedulable else {"schedulable gpu1": WARN})


def test_problem_conditions(runner: KubernetesRunner) -> None:
    """Conditions of AKS, Nebius and EKS; a condition that seatrial does not know is recorded only."""
    rows = [
        ("GPUMissing", "True"),
        ("NebiusGPUError", "False"),
        ("AcceleratedHardwareReady", "False"),
        ("RackMoved", "True"),
    ]
    conditions = runner.cluster.node("gpu0")["status"]["conditions"]
    conditions += [{"type": kind, "status": status, "reason": "Test"} for kind, status in rows]
    assert runner.not_passed() == {"problem_conditions gpu0": WARN}
    conditions = ["GPUMissing=True: Test", "AcceleratedHardwareReady=False: Test"]
    assert evidence(runner, "problem_conditions", "gpu0") == conditions
    assert runner.measure().facts["unknown_conditions"] == {"gpu0": ["RackMoved=True: Test"]}


def test_requested_devices_are_missing(runner: KubernetesRunner) -> None:
    runner.cluster.settings["overlay"] = {"resources": {"rdma/ens34f0np0_roce": 1, "memory": "512Gi"}}
    assert runner.not_passed() == {}
    for part in ("capacity", "allocatable"):
        runner.cluster.node("gpu2")["status"][part]["rdma/ens34f0np0_roce"] = "0"
    assert runner.not_passed() == {"resources_missing gpu2": WARN, "nodes_missing": FAIL}
    assert evidence(runner, "resources_missing", "gpu2") == ["rdma/ens34f0np0_roce"]


def test_devices_that_other_nodes_have(runner: KubernetesRunner) -> None:
    """``1k`` is how the API writes 1000 devices."""
    for name, count in (("gpu0", "1k"), ("gpu1", "1k"), ("gpu2", "63"), ("gpu3", "0")):
        runner.cluster.node(name)["status"]["allocatable"]["rdma/rdma_shared_device_a"] = count
    assert runner.not_passed() == {"resources_missing gpu3": WARN}


def test_versions_and_models_differ(runner: KubernetesRunner) -> None:
    runner.cluster.node("gpu1")["status"]["nodeInfo"]["kubeletVersion"] = "v1.29.7"
    labels = runner.cluster.node("gpu2")["metadata"]["labels"]
    del labels["nvidia.com/cuda.driver-version.full"]
    labels["nvidia.com/cuda.driver.major"] = "570"  # the labels of older releases of GPU Feature Discovery
    runner.cluster.node("gpu3")["metadata"]["labels"]["nvidia.com/gpu.product"] = "NVIDIA-H100-80GB-HBM3"
    assert runner.not_passed() == {
        "kubelet_version_differs gpu1": WARN,
        "driver_version_differs gpu2": WARN,
        "gpu_model_differs gpu3": WARN,
    }
    differing = {"node": "570.65.06", "most other nodes": "580.65.06"}
    assert evidence(runner, "driver_version_differs", "gpu2") == differing
    assert evidence(runner, "driver_version_differs", "gpu0") is None


def test_a_single_node_is_not_compared(runner: KubernetesRunner) -> None:
    runner.cluster.nodes = runner.cluster.nodes[:1]
    measurement = runner.measure(nodes=1)
    assert runner.not_passed(nodes=1) == {}
    compared = {name for name in CHECK.units if name.endswith("_differs")}
    compared |= {"topology_labels_missing", "operator_pods_missing"}
    assert reasons(measurement, Why.DOES_NOT_APPLY) == dict.fromkeys(compared, "single node")
    skipped = {verdict.metric for verdict in judge(CHECK, measurement) if verdict.outcome is Outcome.SKIP}
    assert skipped == compared


def test_nodes_without_labels_are_not_compared(runner: KubernetesRunner) -> None:
    for node in runner.cluster.nodes:
        labels = node["metadata"]["labels"]
        for name in [name for name in labels if "driver" in name or name == "nvidia.com/gpu.product"]:
            del labels[name]
    assert reasons(runner.measure(), Why.DOES_NOT_APPLY) == dict.fromkeys(
        ("driver_version_differs", "gpu_model_differs"), "no node has the labels of GPU Feature Discovery"
    )


@pytest.mark.parametrize("gpus", [0, None])
def test_unexpected_gpus_are_not_counted(runner: KubernetesRunner, gpus: int | None) -> None:
    assert "gpus_below_expected" in reasons(runner.measure(gpus=gpus), Why.DOES_NOT_APPLY)


def test_two_nodes_that_differ_are_both_named(runner: KubernetesRunner) -> None:
    runner.cluster.nodes = runner.cluster.nodes[:2]
    runner.cluster.node("gpu0")["status"]["nodeInfo"]["kubeletVersion"] = "v1.29.7"
    assert runner.not_passed(nodes=2) == {"kubelet_version_differs gpu0": WARN, "kubelet_version_differs gpu1": WARN}


def test_nvl72_clique_labels(runner: KubernetesRunner) -> None:
    """Labels of GB300 nodes of OKE; on gpu3 the NVLink fabric is not complete, so that it has no clique."""
    for name in ("gpu0", "gpu1", "gpu2", "gpu3"):
        labels = runner.cluster.node(name)["metadata"]["labels"]
        labels["nvidia.com/gpu.clique"] = "a2221497-dbce-4964-8826-684c3694fd45.2478"
        labels["oci.oraclecloud.com/rdma.local_block_id"] = "3bf4jpavrba"
    assert runner.not_passed() == {}
    del runner.cluster.node("gpu3")["metadata"]["labels"]["nvidia.com/gpu.clique"]
    assert runner.not_passed() == {"topology_labels_missing gpu3": WARN}
    assert evidence(runner, "topology_labels_missing", "gpu3") == ["nvidia.com/gpu.clique"]
    assert runner.measure().facts["cliques"] == {"a2221497-dbce-4964-8826-684c3694fd45.2478": ["gpu0", "gpu1", "gpu2"]}


@pytest.mark.parametrize(("key", "value"), [("nvidia.com/gpu.sharing-strategy", "time-slicing"), ("", "")])
def test_gpus_that_are_shared_or_divided(runner: KubernetesRunner, key: str, value: str) -> None:
    node = runner.cluster.node("gpu0")
    node["status"]["capacity"]["nvidia.com/mig-2g.20gb"] = "0"
    assert runner.not_passed() == {}
    if key:
        node["metadata"]["labels"][key] = value
    else:
        node["status"]["capacity"]["nvidia.com/mig-1g.10gb"] = "7"
    assert runner.not_passed() == {"gpus_shared gpu0": WARN}


@pytest.mark.parametrize("profile", ["1g.10gb", "INVALID", ""])
def test_mig_instances_are_not_counted_as_gpus(runner: KubernetesRunner, profile: str) -> None:
    """Labels of GPU Operator with the MIG strategy single, with and without MIG instances."""
    node = runner.cluster.node("gpu1")
    labels = {"mig.capable": "true", "mig.strategy": "single", "gpu.product": "NVIDIA-H100-80GB-HBM3"}
    if profile:
        labels["gpu.product"] += f"-MIG-{profile}"
        for part in ("capacity", "allocatable"):
            node["status"][part]["nvidia.com/gpu"] = "0" if profile == "INVALID" else "56"
    node["metadata"]["labels"] |= {f"nvidia.com/{key}": value for key, value in labels.items()}
    measurement = runner.measure()
    bad = {verdict.metric for verdict in judge(CHECK, measurement) if verdict.outcome in (FAIL, WARN, ERROR)}
    unusable = evidence(runner, "nodes_missing")
    if profile:
        assert {"gpus_shared", "nodes_missing"} <= bad
        assert f"MIG enabled; MIG instances are not supported ({labels['gpu.product']})" in unusable["gpu1"]
    else:
        assert bad == {"gpu_model_differs"}
        assert unusable == {}


def test_operator_pods(runner: KubernetesRunner) -> None:
    """A device plugin in CrashLoopBackOff; a completed validator belongs to no DaemonSet."""
    pods = runner.cluster.pods["gpu-operator"]
    pods[0] = daemon_pod("gpu0", DAEMON_SETS[0], "CrashLoopBackOff")
    validator = daemon_pod("gpu0", "nvidia-cuda-validator", "Completed")
    del validator["metadata"]["ownerReferences"]
    pods.append(validator)
    assert runner.not_passed() == {"operator_pods_not_ready gpu0": WARN}
    not_ready = [f"gpu-operator/{DAEMON_SETS[0]}-5crlk: CrashLoopBackOff"]
    assert evidence(runner, "operator_pods_not_ready", "gpu0") == not_ready


def test_without_operator_pods_the_rules_do_not_apply(runner: KubernetesRunner) -> None:
    runner.cluster.pods = {"kube-system": [daemon_pod("gpu0", "kube-proxy", "CrashLoopBackOff")]}
    verdicts = {v.metric: v.outcome for v in judge(CHECK, runner.measure())}
    assert verdicts["operator_pods_not_ready"] is Outcome.SKIP


def test_pods_that_the_user_may_not_list(runner: KubernetesRunner) -> None:
    runner.cluster.forbidden = {"pods"}
    assert runner.not_passed() == {}
    verdicts = {v.metric: v for v in judge(CHECK, runner.measure())}
    for name in ("operator_pods_missing", "operator_pods_not_ready"):
        assert verdicts[name].outcome is Outcome.SKIP
        assert "Forbidden" in verdicts[name].detail


def test_namespaces_that_do_not_exist_are_forbidden_to_an_ordinary_user(runner: KubernetesRunner) -> None:
    runner.cluster.namespaces = {"kube-system"}
    assert runner.not_passed() == {}
    verdicts = {v.metric: v.outcome for v in judge(CHECK, runner.measure())}
    assert verdicts["operator_pods_missing"] is verdicts["operator_pods_not_ready"] is Outcome.SKIP
    runner.cluster.namespaces = {"gpu-operator"}
    assert len(runner.cluster.pods["gpu-operator"]) > 0
    verdicts = {v.metric: v.outcome for v in judge(CHECK, runner.measure())}
    assert verdicts["operator_pods_missing"] is verdicts["operator_pods_not_ready"] is Outcome.PASS


def test_nodes_that_the_user_may_not_list(runner: KubernetesRunner) -> None:
    runner.cluster.forbidden = {"nodes"}
    measurement = runner.measure()
    assert "Forbidden" in (measurement.error or "")
    assert set(runner.not_passed().values()) == {ERROR}


def test_no_node_of_the_pool(runner: KubernetesRunner) -> None:
    runner.cluster.settings["node_selector"] = {"pool": "h100"}
    bad = runner.not_passed()
    assert bad.pop("nodes_missing") is FAIL
    assert set(bad.values()) == {ERROR}
    error = runner.measure().error or ""
    assert "pool=h100" in error
    assert "nvidia.com/gpu" in error
    assert "nvidia.com/gpu" not in (runner.measure(gpus=0).error or "nvidia.com/gpu")


def test_a_trial_without_gpus_runs_on_nodes_without_taints(runner: KubernetesRunner) -> None:
    values = {metric.name: metric.value for metric in runner.measure(nodes=4, gpus=0).metrics}
    assert values["nodes"] == 4  # not control0, which has a taint
    runner.cluster.node("control0")["spec"] = {}
    assert {metric.name: metric.value for metric in runner.measure(nodes=5, gpus=0).metrics}["nodes"] == 5


@pytest.mark.parametrize("change", [{"allocatable": {"nvidia.com/gpu": "eight"}}, {"nodeInfo": None}])
def test_garbage_from_the_api_is_an_error(runner: KubernetesRunner, change: dict[str, object]) -> None:
    runner.cluster.node("gpu0")["status"] |= change
    measurement = runner.measure()
    assert measurement.error
    assert set(runner.not_passed().values()) <= {ERROR, FAIL}


def test_another_launcher(tmp_path: Path) -> None:
    assert run_check(CHECK, tmp_path).skipped == "the launcher is not kubernetes"


@pytest.mark.cluster  # a dozen short processes
def test_a_trial_names_the_unhealthy_node(tmp_path: Path) -> None:
    """A run of the program with the launcher kubernetes, through a fake kubectl: settings reach the check."""
    nodes = node_list()
    nodes[2]["status"]["allocatable"]["nvidia.com/gpu"] = "7"
    cluster = Cluster(tmp_path / "cluster")
    cluster.install(tmp_path / "bin", objects=nodes)
    trial = tmp_path / "trial.yaml"
    trial.write_text("checks: {kubernetes.nodes: }\n")
    arguments = ["run", str(trial), "--launcher", "kubernetes", "--nodes", "4", "--gpus-per-node", "8"]
    arguments += ["--set", "kubernetes.image=registry.example/seatrial:1", "--out", str(tmp_path / "run")]
    program = Program(*arguments, env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"})
    code, _out, err = program.finish()
    record = load(tmp_path / "run")
    assert (code, record.decision.value) == (1, DecisionValue.REJECTED), err
    assert [(finding.cause, finding.subject) for finding in record.findings] == [("kubernetes_gpus_unhealthy", "gpu2")]
    assert {row.metric for row in record.findings[0].explains} == {"gpus_unhealthy", "nodes_missing"}
    assert cluster.unexpected_calls == []
