"""kubernetes.nodes: the nodes of the trial's pool, compared with the expected cluster and with each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from seatrial.checks.base import PERMISSION_DENIED, Check, Context, RuleFact, SkipIf, facts, metrics
from seatrial.checks.kubernetes._cluster import (
    KubernetesOptions,
    kubectl,
    missing_names,
    nodes_differing,
    requested_devices,
    trial_nodes,
)
from seatrial.config.kubernetes import GPU_RESOURCE, Kubernetes, Toleration
from seatrial.model import Observation, Outcome, Phase, Rule, Scope, SeatrialError

if TYPE_CHECKING:
    from seatrial.discover.kubernetes import KubernetesNode, Pod

METRICS = {
    "nodes": "nodes",
    "nodes_usable": "nodes",
    "nodes_missing": "nodes",
    "nvlink_cliques": "cliques",
    "ready": "bool",
    "schedulable": "bool",
    "problem_conditions": "conditions",
    "gpus_allocatable": "GPUs",
    "gpus_unhealthy": "GPUs",
    "gpus_below_expected": "GPUs",
    "gpus_shared": "bool",
    "resources_missing": "resources",
    "topology_labels_missing": "labels",
    "kubelet_version_differs": "bool",
    "driver_version_differs": "bool",
    "gpu_model_differs": "bool",
    "operator_pods_not_ready": "pods",
    "operator_pods_missing": "pods",
}

_SEVERAL_NODES = {"several_nodes": "yes"}

RULES = (
    Rule(
        metric="nodes_missing",
        evidence_facts=("unusable",),
        expect="== 0 nodes",
        meaning="fewer usable nodes than expected",
        fix="kubectl describe node NODE shows conditions, taints and devices; after the repair: kubectl uncordon NODE",
    ),
    # The rules on a single node only WARN, as the trial can run on other nodes. nodes_missing FAILs if too few are left
    Rule(
        metric="ready",
        evidence_facts=("not_ready",),
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="the node is not Ready: its kubelet, its container runtime or its network plug-in does not work",
        fix="kubectl describe node NODE; on the node: systemctl status kubelet containerd; journalctl -u kubelet -n 50",
    ),
    Rule(
        metric="schedulable",
        evidence_facts=("not_schedulable",),
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="the node is cordoned or has a taint that the trial's pods do not tolerate: it gets no pods",
        fix="kubectl describe node NODE; then kubectl uncordon NODE, kubectl taint nodes NODE KEY-, or add the "
        "toleration to kubernetes.tolerations",
    ),
    Rule(
        metric="problem_conditions",
        evidence_facts=("problem_conditions",),
        expect="== 0 conditions",
        outcome_if_violated=Outcome.WARN,
        meaning="a condition of the node reports a problem of the kubelet, the kernel, a GPU or the cloud's machine",
        fix="kubectl describe node NODE; the reason of the condition names the component",
    ),
    Rule(
        metric="gpus_unhealthy",
        evidence_facts=("gpus",),
        expect="== 0 GPUs",
        outcome_if_violated=Outcome.WARN,
        meaning="GPUs in the node's capacity are not allocatable: the device plugin marks them unhealthy, for example "
        "after an Xid error, or it has lost its connection to the kubelet",
        fix="kubectl logs -n gpu-operator -l app=nvidia-device-plugin-daemonset; on the node: nvidia-smi -L; dmesg | "
        "grep -i xid. Until the repair: kubectl cordon NODE",
    ),
    Rule(
        metric="gpus_below_expected",
        evidence_facts=("gpus",),
        expect="== 0 GPUs",
        outcome_if_violated=Outcome.WARN,
        applies_if={"gpus_expected": "yes"},
        meaning="the node's capacity has fewer GPUs than expected: a GPU is lost, or the device plugin does not run",
        fix="kubectl get pods -A -o wide --field-selector spec.nodeName=NODE | grep nvidia; on the node: "
        "nvidia-smi -L; lspci | grep -i nvidia",
    ),
    Rule(
        metric="gpus_shared",
        evidence_facts=("gpus",),
        expect="== 0 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="GPUs are divided by MIG, or several pods share one by time-slicing or MPS; nvidia.com/gpu then counts "
        "parts of GPUs, which are not measured",
        fix="kubectl get node NODE --show-labels | tr , '\\n' | grep -E 'mig|sharing|product'; kubectl label node NODE "
        "nvidia.com/mig.config=all-disabled --overwrite; remove `sharing` from the device plugin's configuration",
    ),
    Rule(
        metric="resources_missing",
        evidence_facts=("resources_missing",),
        expect="== 0 resources",
        outcome_if_violated=Outcome.WARN,
        meaning="the node lacks devices that the trial's pods request or that most other nodes have, such as rdma/…: "
        "the device plugin does not run, or finds no NIC",
        fix="kubectl get node NODE -o jsonpath='{.status.allocatable}'; kubectl get pods -A -o wide --field-selector "
        "spec.nodeName=NODE | grep -iE 'rdma|sriov|mofed|device-plugin'; on the node: ibstat; lspci | grep -i mellanox",
    ),
    Rule(
        metric="topology_labels_missing",
        evidence_facts=("topology_labels_missing", "cliques"),
        expect="== 0 labels",
        outcome_if_violated=Outcome.WARN,
        applies_if=_SEVERAL_NODES,
        meaning="the node lacks a topology label that most other nodes have: schedulers cannot place it near its "
        "peers. A node of an NVL72 without the label nvidia.com/gpu.clique has no initialised NVLink fabric",
        fix="kubectl get nodes --show-labels; nvidia.com/gpu.clique: on the node nvidia-smi -q | grep -A4 Fabric; "
        "other labels: the logs of the pod that writes them, such as Topograph",
    ),
    Rule(
        metric="kubelet_version_differs",
        evidence_facts=("kubelet_versions",),
        expect="== 0 bool",
        outcome_if_violated=Outcome.WARN,
        applies_if=_SEVERAL_NODES,
        meaning="the node's kubelet has another version than most other nodes: an upgrade did not complete",
        fix="kubectl get nodes -o wide; upgrade the node group",
    ),
    Rule(
        metric="driver_version_differs",
        evidence_facts=("driver_versions",),
        expect="== 0 bool",
        outcome_if_violated=Outcome.WARN,
        applies_if={**_SEVERAL_NODES, "driver_labels": "yes"},
        meaning="the node's GPU driver has another version than most other nodes, or no version label: NCCL and CUDA "
        "may behave differently there",
        fix="kubectl get nodes -L nvidia.com/cuda.driver-version.full,nvidia.com/gpu-driver-upgrade-state; kubectl get "
        "pods -A -o wide -l app.kubernetes.io/component=nvidia-driver",
    ),
    Rule(
        metric="gpu_model_differs",
        evidence_facts=("gpu_models",),
        expect="== 0 bool",
        outcome_if_violated=Outcome.WARN,
        applies_if={**_SEVERAL_NODES, "model_labels": "yes"},
        meaning="the node has another GPU model than most other nodes: a job on both is as slow as the slower one",
        fix="kubectl get nodes -L nvidia.com/gpu.product; select one pool: --set kubernetes.node_selector=…",
    ),
    Rule(
        metric="operator_pods_not_ready",
        evidence_facts=("operator_pods_not_ready",),
        expect="== 0 pods",
        outcome_if_violated=Outcome.WARN,
        applies_if={"operator_pods": "yes"},
        meaning="a pod of GPU Operator, Network Operator or a device plugin is not ready on the node",
        fix="kubectl describe pod -n NAMESPACE POD; kubectl logs -n NAMESPACE POD --all-containers --tail=50",
    ),
    Rule(
        metric="operator_pods_missing",
        evidence_facts=("operator_pods_missing",),
        expect="== 0 pods",
        outcome_if_violated=Outcome.WARN,
        applies_if={**_SEVERAL_NODES, "operator_pods": "yes"},
        meaning="a DaemonSet of GPU Operator, Network Operator or a device plugin has a pod on most other nodes, but "
        "not on this one: a label nvidia.com/gpu.deploy.* or a taint excludes it",
        fix="kubectl get daemonsets -A; kubectl get node NODE --show-labels | tr , '\\n' | grep deploy",
    ),
)


def measure(context: Context, options: KubernetesOptions) -> Iterator[Observation]:
    """Yield the node counts, and the state of each node.

    Raises NotApplicable with another launcher, KubectlError if nodes cannot be listed, and SeatrialError if
    ``trial_nodes`` finds none.
    """
    settings = options.settings()
    context.progress("kubectl get nodes")
    nodes = trial_nodes(context, settings)
    devices = requested_devices(context, settings)
    reasons_by_node = {node.name: _unusable_reasons(node, settings.tolerations, devices) for node in nodes}
    unusable = {name: "; ".join(reasons) for name, reasons in reasons_by_node.items() if reasons}
    usable_count = len(nodes) - len(unusable)
    yield from facts({"unusable": unusable, "several_nodes": "yes" if len(nodes) > 1 else "no"})
    missing_count = max(0, context.expected_nodes - usable_count)
    yield from metrics(METRICS, {"nodes": len(nodes), "nodes_usable": usable_count, "nodes_missing": missing_count})
    if not nodes:
        raise SeatrialError(_no_nodes_text(context, settings))
    yield from _state_metrics(nodes, settings.tolerations)
    yield from _gpu_metrics(nodes, context.expected_gpus)
    yield from _device_metrics(nodes, devices)
    yield from _topology_metrics(nodes)
    yield from _version_metrics(nodes)
    context.progress("kubectl get pods of GPU Operator and Network Operator")
    yield from _operator_metrics(nodes, settings)


def _no_nodes_text(context: Context, settings: Kubernetes) -> str:
    selector = ",".join(f"{key}={value}" for key, value in settings.node_selector.items())
    where = f" that match the node selector {selector}" if selector else ""
    required = f"have {GPU_RESOURCE} in their capacity or a label of GPU Operator or Node Feature Discovery"
    if context.expected_gpus == 0:
        required = "have only taints that kubernetes.tolerations tolerates"
    return f"no nodes{where} {required}. Run first: {kubectl(settings).command_text('get', 'nodes', '--show-labels')}"


def _unusable_reasons(node: KubernetesNode, tolerations: Sequence[Toleration], devices: Mapping[str, int]) -> list[str]:
    """Return why the trial's pods cannot run on the node; empty if they can."""
    reasons = [str(node.ready_condition)] if node.ready_condition.status != "True" else []
    reasons += _barriers(node, tolerations)
    reasons += [node.mig_error] if node.mig_error and devices.get(GPU_RESOURCE) else []
    return reasons + [
        f"{node.allocatable(resource)} {resource} allocatable, {count} requested"
        for resource, count in devices.items()
        if node.allocatable(resource) < count
    ]


def _barriers(node: KubernetesNode, tolerations: Sequence[Toleration]) -> list[str]:
    """Return why the scheduler places no pod of the trial on the node: cordoned, or its taints."""
    cordoned = ["cordoned"] if node.spec.unschedulable else []
    return cordoned + [f"taint {taint}" for taint in node.untolerated_taints(tolerations)]


def _state_metrics(nodes: Sequence[KubernetesNode], tolerations: Sequence[Toleration]) -> Iterator[Observation]:
    """Yield for each node whether it is ready and schedulable, and its problem conditions."""
    barriers_by_node = {node.name: _barriers(node, tolerations) for node in nodes}
    yield from facts(
        {
            "not_ready": {
                node.name: str(node.ready_condition) for node in nodes if node.ready_condition.status != "True"
            },
            "not_schedulable": {name: reasons for name, reasons in barriers_by_node.items() if reasons},
            "problem_conditions": {node.name: [*map(str, node.problems)] for node in nodes if node.problems},
            "unknown_conditions": {
                node.name: [*map(str, node.unknown_conditions)] for node in nodes if node.unknown_conditions
            },
        }
    )
    for node in nodes:
        values = {
            "ready": node.ready_condition.status == "True",
            "schedulable": not barriers_by_node[node.name],
            "problem_conditions": len(node.problems),
        }
        yield from metrics(METRICS, values, node.name)


def _gpu_metrics(nodes: Sequence[KubernetesNode], expected: int | None) -> Iterator[Observation]:
    """Yield for each node its allocatable, unhealthy and missing GPUs, and whether GPUs are shared."""
    yield from facts(
        {
            "gpus_expected": "yes" if expected else "no",
            "gpus": {
                node.name: f"{node.allocatable(GPU_RESOURCE)} of {node.capacity(GPU_RESOURCE)} allocatable"
                + (f"; divided or shared: {node.shared_gpus}" if node.shared_gpus else "")
                for node in nodes
            },
        }
    )
    for node in nodes:
        values = {
            "gpus_allocatable": 0 if node.mig_error else node.allocatable(GPU_RESOURCE),
            "gpus_unhealthy": max(0, node.capacity(GPU_RESOURCE) - node.allocatable(GPU_RESOURCE)),
            "gpus_below_expected": max(0, (expected or 0) - node.capacity(GPU_RESOURCE)),
            "gpus_shared": bool(node.shared_gpus),
        }
        yield from metrics(METRICS, values, node.name)


def _device_metrics(nodes: Sequence[KubernetesNode], devices: Mapping[str, int]) -> Iterator[Observation]:
    """Yield the number of device resources that are missing on each node, other than GPUs.

    A resource is missing if a pod of the trial requests more devices than the node has. It is also missing if more than
    half of the other nodes have it, and this node does not.
    """
    present = {node.name: {name for name in node.extended_resources if node.allocatable(name)} for node in nodes}
    missing_vs_peers = missing_names(present)
    missing_by_node = {}
    for node in nodes:
        too_few = {name for name, count in devices.items() if node.allocatable(name) < count}
        missing_by_node[node.name] = sorted({*too_few, *missing_vs_peers.get(node.name, ())} - {GPU_RESOURCE})
    yield from facts(
        {"resources_missing": {node: resources for node, resources in missing_by_node.items() if resources}}
    )
    for node_name, resources in missing_by_node.items():
        yield from metrics(METRICS, {"resources_missing": len(resources)}, node_name)


def _topology_metrics(nodes: Sequence[KubernetesNode]) -> Iterator[Observation]:
    """Yield the NVLink cliques, and for each node the topology labels that it lacks."""
    from seatrial.discover.kubernetes import CLIQUE_LABEL

    missing_by_node = missing_names({node.name: set(node.topology) for node in nodes})
    nodes_by_clique: dict[str, list[str]] = {}
    for node in nodes:
        if clique := node.labels.get(CLIQUE_LABEL):
            nodes_by_clique.setdefault(clique, []).append(node.name)
    labels = {node.name: node.topology for node in nodes}
    yield from facts(
        {"topology_labels": labels, "topology_labels_missing": missing_by_node, "cliques": nodes_by_clique}
    )
    if nodes_by_clique:
        yield from metrics(METRICS, {"nvlink_cliques": len(nodes_by_clique)})
    for node in nodes:
        missing_count = len(missing_by_node.get(node.name, ()))
        yield from metrics(METRICS, {"topology_labels_missing": missing_count}, node.name)


def _version_metrics(nodes: Sequence[KubernetesNode]) -> Iterator[Observation]:
    """Yield for each node whether kubelet, driver or GPU model differ from those of most nodes."""
    value_by_node = {
        "kubelet_version": {node.name: node.status.node_info.kubelet_version for node in nodes},
        "driver_version": {node.name: node.driver_version or "no label" for node in nodes},
        "gpu_model": {node.name: node.labels.get("nvidia.com/gpu.product", "no label") for node in nodes},
    }
    for name, values in value_by_node.items():
        yield from facts({f"{name}s": _nodes_by_value(values)})
        different = nodes_differing(values)
        for node in nodes:
            yield from metrics(METRICS, {f"{name}_differs": node.name in different}, node.name)
    for fact, name in (("driver_labels", "driver_version"), ("model_labels", "gpu_model")):
        labelled = set(value_by_node[name].values()) != {"no label"}
        yield from facts({fact: "yes" if labelled else "no: no node has the labels of GPU Feature Discovery"})


def _nodes_by_value(value_by_node: Mapping[str, str]) -> dict[str, list[str]]:
    """Return value → nodes, the value of most nodes first."""
    nodes_by_value: dict[str, list[str]] = {}
    for node, value in value_by_node.items():
        nodes_by_value.setdefault(value, []).append(node)
    return dict(sorted(nodes_by_value.items(), key=lambda item: -len(item[1])))


def _operator_metrics(nodes: Sequence[KubernetesNode], settings: Kubernetes) -> Iterator[Observation]:
    """Yield for each node the number of operator pods that are not ready, and of DaemonSets without a pod there."""
    from seatrial.discover.kubernetes import kubernetes_data

    pods, refused = _operator_pods(settings)
    daemon_sets_by_node: dict[str, set[str]] = {node.name: set() for node in nodes}
    not_ready_by_node: dict[str, list[str]] = {node.name: [] for node in nodes}
    for pod in pods:
        if pod.daemon_set and pod.spec.node_name in daemon_sets_by_node:
            daemon_sets_by_node[pod.spec.node_name].add(f"{pod.metadata.namespace}/{pod.daemon_set}")
            if not pod.ready:
                not_ready_by_node[pod.spec.node_name].append(f"{pod.metadata.namespace}/{pod}")
    if not any(daemon_sets_by_node.values()):
        namespaces = ", ".join(kubernetes_data().operator_namespaces)
        no_pods = f"no: no DaemonSet of an operator has pods on the nodes (namespaces {namespaces})"
        yield from facts({"operator_pods": f"{PERMISSION_DENIED}: {refused[0]}" if refused else no_pods})
        return
    missing_by_node = missing_names(daemon_sets_by_node)
    yield from facts(
        {
            "operator_pods": "yes",
            "operator_pods_not_ready": {name: texts for name, texts in not_ready_by_node.items() if texts},
            "operator_pods_missing": missing_by_node,
            "namespaces_refused": refused,
        }
    )
    for name, not_ready in not_ready_by_node.items():
        missing_count = len(missing_by_node.get(name, ()))
        values = {"operator_pods_not_ready": len(not_ready), "operator_pods_missing": missing_count}
        yield from metrics(METRICS, values, name)


def _operator_pods(settings: Kubernetes) -> tuple[list[Pod], list[str]]:
    """Return the pods in the namespaces of the operators, and the errors for namespaces that the user may not read.

    A namespace that does not exist has no pods. Raises KubectlError for any other error.
    """
    from seatrial.discover.kubectl import Kubectl, KubectlError
    from seatrial.discover.kubernetes import kubernetes_data, parse_pods

    pods: list[Pod] = []
    refused = []
    for namespace, pattern in kubernetes_data().operator_namespaces.items():
        try:
            listed = parse_pods(Kubectl(namespace, settings.context).get("pods"))
        except KubectlError as error:
            if error.reason != "Forbidden":
                raise
            refused.append(str(error))
        else:
            pods += [pod for pod in listed if re.search(pattern, pod.metadata.name)]
    return pods, refused


CHECK = Check(
    name="kubernetes.nodes",
    title="Kubernetes nodes: ready, schedulable, GPUs, device plugins, labels, versions",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    metrics=METRICS,
    rules=RULES,
    rule_facts={
        "gpus_expected": RuleFact(reason="cluster.gpus_per_node is 0 or not set"),
        "several_nodes": RuleFact(reason="single node"),
        "driver_labels": RuleFact(),
        "model_labels": RuleFact(),
        # the API server answers Forbidden for a namespace that does not exist, too
        "operator_pods": RuleFact(permission_denied=Outcome.SKIP),
    },
    measure=measure,
    limit_s=600,
    options=KubernetesOptions,
    skip_if=(SkipIf.NO_KUBERNETES,),
)
