"""kubernetes.pods: start, devices, limits and name resolution of a pod on each node, from one probe pod per node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from seatrial.checks.cause import Cause
from seatrial.checks.check import Check, Context, SkipIf, facts
from seatrial.checks.declare import Answers, absent, fact, metric, unreadable, value, warning
from seatrial.checks.kubernetes._cluster import requested_devices
from seatrial.checks.kubernetes._probe_pods import ProbeOptions, ProbePods, open_probe_pods
from seatrial.config.kubernetes import GPU_RESOURCE
from seatrial.config.kubernetes_pod import container_name, image
from seatrial.discover.kubernetes_messages import Place, job_failures
from seatrial.model import JOB_FAILURES, Fact, JobFailure, Phase, Scope, SeatrialError
from seatrial.util.grouping import grouped
from seatrial.util.text import and_more

if TYPE_CHECKING:
    from seatrial.discover.kubernetes import Event, Pod
    from seatrial.discover.pod_probe import Container

    ProbeResult = tuple[Pod, Container]  # a probe pod that has started, and what its probe read

_MAX_WARNINGS = 8  # shown as evidence
_SHORT_PULL_S = 30.0  # shorter pulls count as this long: their durations vary with the load of the registry


def measure(context: Context, options: ProbeOptions) -> Answers:
    """Yield the metrics of each probe pod, by node.

    Raises NotApplicable with another launcher, KubectlError if the pods cannot be created.
    """
    from seatrial.discover.kubectl import KubectlError

    settings = options.settings()
    devices = requested_devices(context, settings)
    place = Place(settings.namespace or "", settings.context, image(settings))
    try:
        yield from _probe_metrics(context, options, devices, place)
    except KubectlError as error:
        if failures := job_failures({str(error): ()}, place):
            yield _failures_fact(failures)
        raise


def _probe_metrics(context: Context, options: ProbeOptions, devices: Mapping[str, int], place: Place) -> Answers:
    """Create the probe pods, yield their metrics and delete them.

    Raises SeatrialError if the probe of a started pod gave no result.
    """
    with open_probe_pods(context, options) as probes:
        pods = probes.wait_for_start()
        started = [pod for pod in pods if pod.started]
        yield from _start_metrics(probes, pods, place)
        yield from _image_metrics(pods, container_name(options.settings()))
        containers, errors = probes.wait_for_results(len(started)) if started else ({}, {})
        results = [(pod, containers[pod.name]) for pod in started if pod.name in containers]
        yield from _gpu_metrics(results, context.expected_gpus)
        yield from _limit_metrics(results, any(name != GPU_RESOURCE for name in devices))
        yield from _name_metrics(results, probes.count)
        if not started:
            yield unreadable("*", "no probe pod has started")
    node_by_pod = {pod.name: pod.node for pod in started if pod.name not in containers}
    if node_by_pod:
        unread = {errors[name]: [(name, node)] for name, node in node_by_pod.items() if name in errors}
        if failures := job_failures(unread, place):
            yield _failures_fact(failures)
        pods_text = and_more([f"{name} on {node}" for name, node in node_by_pod.items()], 4)
        reason = and_more([*unread], 4, "; ") or "Check that the image has sh and df"
        raise SeatrialError(f"no result of {len(node_by_pod)} probe pods: {pods_text}. {reason}")


def _start_metrics(probes: ProbePods, pods: Sequence[Pod], place: Place) -> Answers:
    """Yield which pods have started, the seconds from scheduling to start of a pod, and the seconds of image pulls."""
    started_count = sum(pod.started for pod in pods)
    node_by_pod = {pod.name: pod.node for pod in pods}
    events, events_error = _events(probes)
    not_started = {pod.name: str(pod) for pod in pods if not pod.started}
    warnings = dict.fromkeys(event.message for event in events if event.type == "Warning")
    namespace = place.namespace or next((pod.namespace for pod in pods if pod.namespace), "")
    place = place._replace(namespace=namespace)
    messages = {message: [(pod_name, node_by_pod[pod_name])] for pod_name, message in not_started.items()}
    failures: tuple[JobFailure, ...] = ()
    if started_count < probes.count:
        # Events count only if no pod states a reason, since an event may report a failure that a later attempt overcame
        failures = job_failures(messages, place) or job_failures(dict.fromkeys(warnings, ()), place)
    yield from facts({"nodes": node_by_pod, "events_unreadable": events_error})
    yield _failures_fact(failures)
    shown = {"not_started": not_started, "warnings": [*warnings][:_MAX_WARNINGS]}
    yield value("pods_missing", max(0, probes.count - started_count), evidence=shown)
    for pod in pods:
        if node := pod.node:
            why = None if pod.started else {**shown, "not_started": str(pod)}
            yield value("started", pod.started, node, evidence=why)
            if pod.start_s is not None:
                yield value("start_seconds", pod.start_s, node)
    # A node that already has the image has no event of a pull
    pull_s_by_node = {
        node_by_pod[event.about]: event.pull_s
        for event in events
        if event.pull_s is not None and event.about in node_by_pod
    }
    yield from _pull_metrics(pull_s_by_node)


def _failures_fact(failures: Sequence[JobFailure]) -> Fact:
    return fact(JOB_FAILURES, [failure.model_dump(mode="json") for failure in failures])


def _pull_metrics(pull_s_by_node: Mapping[str, float]) -> Answers:
    """Yield the seconds of the image pull by node, and their ratio to the median of the other nodes."""
    if len(pull_s_by_node) < 2:
        yield absent("image_pull_ratio", f"{'one' if pull_s_by_node else 'no'} node pulled the image")
    for node, pull_s in pull_s_by_node.items():
        yield value("image_pull_seconds", pull_s, node)
        if others := [seconds for name, seconds in pull_s_by_node.items() if name != node]:
            others_s = median(others)
            ratio = max(pull_s, _SHORT_PULL_S) / max(others_s, _SHORT_PULL_S)
            evidence = f"{pull_s:g} s, median of the other nodes {others_s:g} s"
            yield value("image_pull_ratio", ratio, node, evidence=evidence)


def _image_metrics(pods: Sequence[Pod], container: str) -> Answers:
    """Yield the number of different images, by digest, that the pods run."""
    digests = ((pod.image_digest(container), pod.node) for pod in pods if pod.started)
    nodes_by_digest = grouped((digest, node) for digest, node in digests if digest)
    if sum(map(len, nodes_by_digest.values())) > 1:
        yield value("image_digests", len(nodes_by_digest), evidence=nodes_by_digest)
    else:
        yield absent("image_digests", "fewer than two pods report the digest of their image")


def _events(probes: ProbePods) -> tuple[tuple[Event, ...], str]:
    """Return the events of the pods, and the error if the user may not read events."""
    from seatrial.discover.kubectl import KubectlError

    try:
        return probes.events(), ""
    except KubectlError as error:
        if error.reason != "Forbidden":
            raise
        return (), str(error)


def _gpu_metrics(results: Sequence[ProbeResult], expected: int | None) -> Answers:
    """Yield for each pod the number of GPUs that it lacks of ``expected``."""
    if not expected:
        yield absent("gpus_missing", "cluster.gpus_per_node is 0 or not set")
        return
    for pod, container in results:
        missing = max(0, expected - (container.gpus or 0))
        yield value("gpus_missing", missing, pod.node, evidence=container.gpu_error)


def _limit_metrics(results: Sequence[ProbeResult], devices_requested: bool) -> Answers:
    """Yield /dev/shm, the limit of locked memory and the missing RDMA devices of each pod."""
    device_counts = [len(container.rdma_devices) for _, container in results]
    has_rdma = devices_requested or any(device_counts)
    if not has_rdma:
        reason = "no pod has an RDMA device, and kubernetes.overlay.resources requests none"
        yield absent(("memlock_unlimited", "rdma_devices_missing"), reason)
    expected = max((1, *(count for count, _ in Counter(device_counts).most_common(1))))
    for pod, container in results:
        node, devices = pod.node, [*container.rdma_devices]
        yield value("shm_bytes", container.shm_bytes, node)
        if has_rdma:
            yield value("memlock_unlimited", container.memlock_unlimited, node)
            yield value("rdma_devices_missing", max(0, expected - len(devices)), node, evidence=devices)


def _name_metrics(results: Sequence[ProbeResult], count: int) -> Answers:
    """Yield for each pod the number of names of other pods that it does not resolve.

    Only the names of started pods count: a pod that has not started has no DNS record. ``count``: pods of the Job.
    """
    from seatrial.discover.pod_probe import peers

    dns_errors = [container.dns_error for _, container in results if container.dns_error]
    if dns_errors or len(results) < 2:
        yield absent("names_unresolved", dns_errors[0] if dns_errors else "fewer than two pods with results")
        return
    started_hosts = {_host_name(pod) for pod, _ in results}
    for pod, container in results:
        job_name, _, index = _host_name(pod).rpartition("-")
        expected = {f"{job_name}-{peer}" for peer in peers(int(index), count)}
        unresolved = sorted((expected & started_hosts) - {*container.resolved})
        yield value("names_unresolved", len(unresolved), pod.node, evidence=unresolved)


def _host_name(pod: Pod) -> str:
    """Return the host name of a pod of an Indexed Job: NAME-INDEX; pods are named NAME-INDEX-abcde."""
    return pod.name.rpartition("-")[0]


CHECK = Check(
    name="kubernetes.pods",
    title="Pods on each node: start, GPUs, /dev/shm, locked memory, RDMA devices, names of other pods",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    fact_roles={"job_failures": JOB_FAILURES},
    measure=measure,
    limit_s=1800,
    options=ProbeOptions,
    skip_if=(SkipIf.NO_KUBERNETES,),
    declared=(
        metric(
            "pods_missing",
            "== 0 pods",
            "fewer probe pods than expected nodes have started: no job of the trial can run on all nodes",
            "kubectl get pods -o wide; kubectl get events --field-selector type=Warning; the messages of the scheduler "
            "name the missing resource, taint or quota",
            cause=Cause(
                id="kubernetes_pods_missing",
                place="cluster",
                first_command="kubectl get events -A --field-selector type=Warning --sort-by=.lastTimestamp | tail -20",
                action="fix-config",
                wrong_results=True,
                explained_by_job_failure=True,
                consequence_of=(
                    "kubernetes_node_not_ready",
                    "kubernetes_node_excluded",
                    "kubernetes_operator_pods",
                    "kubernetes_gpus_shared",
                    "kubernetes_gpus_unhealthy",
                    "kubernetes_devices_missing",
                    "kubernetes_pod_not_started",
                ),
                explains=("kubernetes.pods", "nodes.*", "collectives.*", "train.*"),
            ),
        ),
        metric(
            "started",
            "yes",
            "a pod with the trial's image, devices and volumes was assigned to this node, but does not start",
            "kubectl get events --field-selector type=Warning names the image, the volume or the device; compare with "
            "a node where the pod starts. On the node: crictl pull IMAGE; journalctl -u kubelet",
            cause=Cause(
                id="kubernetes_pod_not_started",
                place="node",
                first_command="kubectl get events -A --field-selector type=Warning --sort-by=.lastTimestamp | tail -20",
                action="fix-config",
                wrong_results=True,
                explained_by_job_failure=True,
                consequence_of=("kubernetes_node_not_ready", "kubernetes_operator_pods"),
                explains=("kubernetes.pods", "nodes.*", "collectives.*", "train.*"),
                signatures=(
                    "kubernetes.image_pull",
                    "kubernetes.create_container",
                    "kubernetes.sandbox",
                    "kubernetes.volume_mount",
                    "kubernetes.devices_unavailable",
                    "containers.nvidia_runtime_missing",
                    "kubernetes.dra_prepare",
                ),
            ),
        ),
        metric(
            "start_seconds",
            unit="s",
            meaning="time from the choice of a node to the start of the container, with the pull of the image",
        ),
        metric("image_pull_seconds", unit="s", meaning="time of the image pull, if the node did not have the image"),
        warning(
            "image_pull_ratio",
            "<= 3 ratio",
            "the pull of the image takes far longer than the median of the other nodes (pulls below 30 s count as "
            "30 s): a job of all nodes waits for it",
            "on the node: crictl pull IMAGE; df -h /var/lib/containerd; compare disk, network and registry mirror "
            "(/etc/containerd/certs.d) of the node with those of another node",
        ),
        metric(
            "image_digests",
            "== 1 digests",
            "nodes run different images under the same name: one has an old copy of a tag that was pushed again, "
            "or another mirror",
            "set kubernetes.image to NAME@sha256:DIGEST, or push under a new tag; on the node with the old copy: "
            "crictl rmi IMAGE",
        ),
        metric(
            "gpus_missing",
            "== 0 GPUs",
            "nvidia-smi in the pod lists fewer GPUs than the pod requests: the container runtime does not pass "
            "all GPUs on, or a GPU is lost",
            "kubectl exec POD -- nvidia-smi -L; on the node: nvidia-smi -L; nvidia-ctk cdi list. Repair "
            "nvidia-container-toolkit there, or with a runtime class: --set kubernetes.overlay.runtime_class=nvidia",
            cause=Cause(
                id="kubernetes_gpus_not_in_pod",
                place="node",
                first_command="kubectl get pods -A -o wide --field-selector spec.nodeName={node} | grep -E "
                "'toolkit|driver|validator'",
                action="fix-config",
                wrong_results=True,
                consequence_of=(
                    "kubernetes_node_not_ready",
                    "kubernetes_gpus_shared",
                    "kubernetes_gpus_unhealthy",
                    "kubernetes_operator_pods",
                ),
                explains=("gpu.*", "device.*", "transfer.*", "collectives.*", "train.*"),
                signatures=("containers.*",),
            ),
        ),
        metric(
            "shm_bytes",
            ">= 1GiB",
            "/dev/shm of the pod is too small for NCCL and data loaders: 'Bus error', 'No space left on device'",
            "--set kubernetes.shm_size=16Gi; an admission policy may replace the volume: kubectl get pod POD -o yaml",
        ),
        metric(
            "memlock_unlimited",
            "yes",
            "locked memory is limited in the pod: RDMA cannot register its buffers (ibv_reg_mr fails)",
            "kubernetes.overlay: {capabilities: [IPC_LOCK], run_as_user: 0}; or on the nodes LimitMEMLOCK=infinity in "
            "a drop-in of containerd.service",
        ),
        metric(
            "rdma_devices_missing",
            "== 0 devices",
            "the pod can open fewer RDMA devices than most other pods, or none although the trial requests some",
            "kubectl exec POD -- ls -l /dev/infiniband; kubectl get node NODE -o jsonpath='{.status.allocatable}'; the "
            "log of the RDMA device plugin on this node",
        ),
        metric(
            "names_unresolved",
            "== 0 names",
            "the pod does not resolve the names of other pods of its Service: torchrun cannot find the first rank",
            "kubectl get pods -n kube-system -l k8s-app=kube-dns -o wide; kubectl exec POD -- cat /etc/resolv.conf; "
            "network policies of the namespace must allow DNS (port 53): kubectl get networkpolicies. Restart the DNS "
            "and CNI pods of the node",
            cause=Cause(
                id="kubernetes_dns",
                place="node",
                first_command="kubectl get pods -n kube-system -l k8s-app=kube-dns -o wide",
                action="restart-service",
                wrong_results=True,
                explains=("nodes.*", "collectives.*", "train.*"),
            ),
        ),
    ),
)
