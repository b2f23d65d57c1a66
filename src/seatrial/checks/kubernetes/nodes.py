"""kubernetes.nodes: the nodes of the trial's pool, compared with the expected cluster and with each other."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from seatrial.checks.cause import Cause
from seatrial.checks.check import Check, Context, SkipIf
from seatrial.checks.declare import Answers, absent, fact, metric, value, warning
from seatrial.checks.kubernetes._cluster import (
    KubernetesOptions,
    kubectl,
    missing_counts,
    missing_names,
    nodes_differing,
    requested_devices,
    trial_nodes,
)
from seatrial.config.kubernetes import GPU_RESOURCE, Kubernetes, Toleration
from seatrial.model import Phase, Scope, SeatrialError
from seatrial.util.grouping import grouped

if TYPE_CHECKING:
    from seatrial.discover.kubernetes import KubernetesNode, Pod

_NO_LABEL = "no label"


def measure(context: Context, options: KubernetesOptions) -> Answers:
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
    missing_count = max(0, context.expected_nodes - len(nodes) + len(unusable))
    yield value("nodes", len(nodes))
    yield value("nodes_missing", missing_count, evidence=unusable)
    if not nodes:
        raise SeatrialError(_no_nodes_text(context, settings))
    yield from _state_metrics(nodes, settings.tolerations)
    yield from _gpu_metrics(nodes, context.expected_gpus)
    yield from _device_metrics(nodes, devices)
    if len(nodes) > 1:
        yield from _topology_metrics(nodes)
        yield from _version_metrics(nodes)
    else:
        yield absent(("topology_labels_missing", "*_differs", "operator_pods_missing"), "single node")
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
    cordoned = ["cordoned"] if node.unschedulable else []
    return cordoned + [f"taint {taint}" for taint in node.untolerated_taints(tolerations)]


def _state_metrics(nodes: Sequence[KubernetesNode], tolerations: Sequence[Toleration]) -> Answers:
    """Yield for each node whether it is ready and schedulable, and its problem conditions."""
    unknown = {node.name: [*map(str, node.unknown_conditions)] for node in nodes if node.unknown_conditions}
    yield fact("unknown_conditions", unknown)
    for node in nodes:
        is_ready, barriers = node.ready_condition.status == "True", _barriers(node, tolerations)
        yield value("ready", is_ready, node.name, evidence=None if is_ready else str(node.ready_condition))
        yield value("schedulable", not barriers, node.name, evidence=barriers or None)
        problems = [*map(str, node.problems)]
        yield value("problem_conditions", len(problems), node.name, evidence=problems or None)


def _gpu_metrics(nodes: Sequence[KubernetesNode], expected: int | None) -> Answers:
    """Yield for each node its unhealthy and missing GPUs, and whether GPUs are shared."""
    if not expected:
        yield absent("gpus_below_expected", "cluster.gpus_per_node is 0 or not set")
    for node in nodes:
        allocatable, capacity = node.allocatable(GPU_RESOURCE), node.capacity(GPU_RESOURCE)
        evidence = f"{allocatable} of {capacity} allocatable"
        evidence += f"; divided or shared: {node.shared_gpus}" if node.shared_gpus else ""
        yield value("gpus_unhealthy", max(0, capacity - allocatable), node.name, evidence=evidence)
        yield value("gpus_shared", bool(node.shared_gpus), node.name, evidence=evidence)
        if expected:
            yield value("gpus_below_expected", max(0, expected - capacity), node.name, evidence=evidence)


def _device_metrics(nodes: Sequence[KubernetesNode], devices: Mapping[str, int]) -> Answers:
    """Yield the number of device resources that are missing on each node, other than GPUs.

    A resource is missing if a pod of the trial requests more devices than the node has. It is also missing if more than
    half of the other nodes have it, and this node does not.
    """
    present = {node.name: {name for name in node.extended_resources if node.allocatable(name)} for node in nodes}
    missing_vs_peers = missing_names(present)
    for node in nodes:
        too_few = {name for name, count in devices.items() if node.allocatable(name) < count}
        missing = sorted({*too_few, *missing_vs_peers.get(node.name, ())} - {GPU_RESOURCE})
        yield value("resources_missing", len(missing), node.name, evidence=missing or None)


def _topology_metrics(nodes: Sequence[KubernetesNode]) -> Answers:
    """Yield for each node the topology labels that it lacks, and the NVLink cliques."""
    from seatrial.discover.kubernetes import CLIQUE_LABEL

    cliques = grouped((node.labels.get(CLIQUE_LABEL), node.name) for node in nodes)
    yield fact("topology_labels", {node.name: node.topology for node in nodes})
    yield fact("cliques", {clique: names for clique, names in cliques.items() if clique})
    yield from missing_counts("topology_labels_missing", {node.name: set(node.topology) for node in nodes})


def _version_metrics(nodes: Sequence[KubernetesNode]) -> Answers:
    """Yield for each node whether kubelet, driver or GPU model differ from those of most nodes."""
    value_by_node = {
        "kubelet_version": {node.name: node.kubelet_version for node in nodes},
        "driver_version": {node.name: node.driver_version or _NO_LABEL for node in nodes},
        "gpu_model": {node.name: node.labels.get("nvidia.com/gpu.product", _NO_LABEL) for node in nodes},
    }
    for name, values in value_by_node.items():
        if set(values.values()) == {_NO_LABEL}:
            yield absent(f"{name}_differs", "no node has the labels of GPU Feature Discovery")
            continue
        majority_by_node = nodes_differing(values)
        for node, version in values.items():
            majority = majority_by_node.get(node)
            evidence = {"node": version, "most other nodes": majority} if majority else None
            yield value(f"{name}_differs", majority is not None, node, evidence=evidence)


def _operator_metrics(nodes: Sequence[KubernetesNode], settings: Kubernetes) -> Answers:
    """Yield for each node the number of operator pods that are not ready, and of DaemonSets without a pod there."""
    from seatrial.discover.kubernetes import kubernetes_data

    pods, refused = _operator_pods(settings)
    daemon_sets_by_node: dict[str, set[str]] = {node.name: set() for node in nodes}
    not_ready_by_node: dict[str, list[str]] = {node.name: [] for node in nodes}
    for pod in pods:
        if pod.daemon_set and pod.node in daemon_sets_by_node:
            daemon_sets_by_node[pod.node].add(f"{pod.namespace}/{pod.daemon_set}")
            if not pod.ready:
                not_ready_by_node[pod.node].append(f"{pod.namespace}/{pod}")
    yield fact("namespaces_refused", refused)
    if not any(daemon_sets_by_node.values()):
        # the API server answers Forbidden for a namespace that does not exist, too
        namespaces = ", ".join(kubernetes_data().operator_namespaces)
        no_pods = f"no DaemonSet of an operator has pods on the nodes (namespaces {namespaces})"
        yield absent("operator_pods_*", refused[0] if refused else no_pods)
        return
    for name, not_ready in not_ready_by_node.items():
        yield value("operator_pods_not_ready", len(not_ready), name, evidence=not_ready or None)
    if len(nodes) > 1:
        yield from missing_counts("operator_pods_missing", daemon_sets_by_node)


def _operator_pods(settings: Kubernetes) -> tuple[list[Pod], list[str]]:
    """Return the pods in the namespaces of the operators, and the errors for namespaces that the user may not read.

    A namespace that does not exist has no pods. Raises KubectlError for any other error.
    """
    from seatrial.discover.kubectl import Kubectl, KubectlError
    from seatrial.discover.kubernetes import Pod, kubernetes_data, parse

    pods: list[Pod] = []
    refused = []
    for namespace, pattern in kubernetes_data().operator_namespaces.items():
        try:
            listed = parse(Kubectl(namespace, settings.context).get("pods"), Pod)
        except KubectlError as error:
            if error.reason != "Forbidden":
                raise
            refused.append(str(error))
        else:
            pods += [pod for pod in listed if re.search(pattern, pod.name)]
    return pods, refused


CHECK = Check(
    name="kubernetes.nodes",
    title="Kubernetes nodes: ready, schedulable, GPUs, device plugins, labels, versions",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    measure=measure,
    limit_s=600,
    options=KubernetesOptions,
    skip_if=(SkipIf.NO_KUBERNETES,),
    declared=(
        metric("nodes", unit="nodes", meaning="nodes that match the trial's node selector and have GPUs"),
        metric(
            "nodes_missing",
            "== 0 nodes",
            "fewer usable nodes than expected",
            "kubectl describe node NODE shows conditions, taints and devices; after the repair: kubectl uncordon NODE",
        ),
        # Metrics of one node only WARN, as the trial can run on other nodes; nodes_missing FAILs if too few are left
        warning(
            "ready",
            "yes",
            "the node is not Ready: its kubelet, its container runtime or its network plug-in does not work",
            "kubectl describe node NODE; on the node: systemctl status kubelet containerd; journalctl -u kubelet -n "
            "50; replace the node if it stays NotReady",
            cause=Cause(
                id="kubernetes_node_not_ready",
                place="node",
                first_command="kubectl describe node {node}",
                action="restart-service",
                report_warning=True,
                wrong_results=True,
                explains=("kubernetes.*", "nodes.*", "collectives.*", "train.*"),
                signatures=("kubernetes.node_not_ready",),
            ),
        ),
        warning(
            "schedulable",
            "yes",
            "the node is cordoned or has a taint that the trial's pods do not tolerate: it gets no pods",
            "kubectl describe node NODE; then kubectl uncordon NODE, kubectl taint nodes NODE KEY-, or add the "
            "toleration to kubernetes.tolerations",
            cause=Cause(
                id="kubernetes_node_excluded",
                place="node",
                first_command="kubectl describe node {node}",
                action="fix-config",
                wrong_results=True,
                consequence_of=("kubernetes_node_not_ready",),
                explains=("kubernetes.*", "nodes.*"),
                signatures=("kubernetes.unschedulable",),
            ),
        ),
        warning(
            "problem_conditions",
            "== 0 conditions",
            "a condition of the node reports a problem of the kubelet, the kernel, a GPU or the cloud's machine",
            "kubectl describe node NODE; the reason of the condition names the component",
        ),
        warning(
            "gpus_unhealthy",
            "== 0 GPUs",
            "GPUs in the node's capacity are not allocatable: the device plugin marks them unhealthy, for example "
            "after an Xid error, or it has lost its connection to the kubelet",
            "kubectl logs -n gpu-operator -l app=nvidia-device-plugin-daemonset; on the node: nvidia-smi -L; dmesg | "
            "grep -i xid. Until the repair: kubectl cordon NODE",
        ),
        warning(
            "gpus_below_expected",
            "== 0 GPUs",
            "the node's capacity has fewer GPUs than expected: a GPU is lost, or the device plugin does not run",
            "kubectl get pods -A -o wide --field-selector spec.nodeName=NODE | grep nvidia; on the node: "
            "nvidia-smi -L; lspci | grep -i nvidia",
        ),
        warning(
            "gpus_shared",
            "no",
            "GPUs are divided by MIG, or several pods share one by time-slicing or MPS; nvidia.com/gpu then counts "
            "parts of GPUs, which are not measured",
            "kubectl get node NODE --show-labels | tr , '\\n' | grep -E 'mig|sharing|product'; kubectl label node NODE "
            "nvidia.com/mig.config=all-disabled --overwrite; remove `sharing` from the device plugin's configuration",
            cause=Cause(
                id="kubernetes_gpus_shared",
                place="node",
                first_command="kubectl describe node {node} | grep -E 'mig|sharing|product'",
                action="fix-config",
                report_warning=True,
                wrong_results=True,
                explains=("kubernetes.*", "gpu.inventory", "device.*", "transfer.*", "collectives.*", "train.*"),
            ),
        ),
        warning(
            "resources_missing",
            "== 0 resources",
            "the node lacks devices that the trial's pods request or that most other nodes have, such as rdma/…: "
            "the device plugin does not run, or finds no NIC",
            "kubectl get node NODE -o jsonpath='{.status.allocatable}'; kubectl get pods -A -o wide --field-selector "
            "spec.nodeName=NODE | grep -iE 'rdma|sriov|mofed|device-plugin'; on the node: ibstat; lspci | grep -i "
            "mellanox",
        ),
        warning(
            "topology_labels_missing",
            "== 0 labels",
            "the node lacks a topology label that most other nodes have: schedulers cannot place it near its "
            "peers. A node of an NVL72 without the label nvidia.com/gpu.clique has no initialised NVLink fabric",
            "kubectl get nodes --show-labels; nvidia.com/gpu.clique: on the node nvidia-smi -q | grep -A4 Fabric; "
            "other labels: the logs of the pod that writes them, such as Topograph",
        ),
        warning(
            "kubelet_version_differs",
            "no",
            "the node's kubelet has another version than most other nodes: an upgrade did not complete",
            "kubectl get nodes -o wide; upgrade the node group",
        ),
        warning(
            "driver_version_differs",
            "no",
            "the node's GPU driver has another version than most other nodes, or no version label: NCCL and CUDA "
            "may behave differently there",
            "kubectl get nodes -L nvidia.com/cuda.driver-version.full,nvidia.com/gpu-driver-upgrade-state; kubectl get "
            "pods -A -o wide -l app.kubernetes.io/component=nvidia-driver",
        ),
        warning(
            "gpu_model_differs",
            "no",
            "the node has another GPU model than most other nodes: a job on both is as slow as the slower one",
            "kubectl get nodes -L nvidia.com/gpu.product; select one pool: --set kubernetes.node_selector=…",
        ),
        warning(
            "operator_pods_not_ready",
            "== 0 pods",
            "a pod of GPU Operator, Network Operator or a device plugin is not ready on the node",
            "kubectl describe pod -n NAMESPACE POD; kubectl logs -n NAMESPACE POD --all-containers --tail=50",
        ),
        warning(
            "operator_pods_missing",
            "== 0 pods",
            "a DaemonSet of GPU Operator, Network Operator or a device plugin has a pod on most other nodes, but "
            "not on this one: a label nvidia.com/gpu.deploy.* or a taint excludes it",
            "kubectl get daemonsets -A; kubectl get node NODE --show-labels | tr , '\\n' | grep deploy",
        ),
    ),
)
