"""kubernetes.pods: start, devices, limits and name resolution of a pod on each node, from one probe pod per node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from seatrial.checks.base import Check, Context, RuleFact, SkipIf, facts, metrics
from seatrial.checks.kubernetes._cluster import requested_devices
from seatrial.checks.kubernetes._probe_pods import ProbeOptions, ProbePods, open_probe_pods
from seatrial.config.kubernetes import GPU_RESOURCE
from seatrial.config.kubernetes_pod import container_name, image
from seatrial.discover.kubernetes_messages import Place, job_failures
from seatrial.model import JOB_FAILURES, JobFailure, Observation, Outcome, Phase, Rule, Scope, SeatrialError
from seatrial.util.text import and_more

if TYPE_CHECKING:
    from seatrial.discover.kubernetes import Event, Pod
    from seatrial.discover.pod_probe import Container

    ProbeResult = tuple[Pod, Container]  # a probe pod that has started, and what its probe read

_MAX_WARNINGS = 8  # in the fact warnings
_SHORT_PULL_S = 30.0  # shorter pulls count as this long: their durations vary with the load of the registry

METRICS = {
    "pods_started": "pods",
    "pods_missing": "pods",
    "started": "bool",
    "start_seconds": "s",
    "image_pull_seconds": "s",
    "image_pull_ratio": "ratio",
    "image_digests": "digests",
    "gpus_seen": "GPUs",
    "gpus_missing": "GPUs",
    "shm_bytes": "B",
    "memlock_unlimited": "bool",
    "rdma_devices": "devices",
    "rdma_devices_missing": "devices",
    "names_unresolved": "names",
}

RULES = (
    Rule(
        metric="pods_missing",
        evidence_facts=("not_started", "warnings"),
        expect="== 0 pods",
        meaning="fewer probe pods than expected nodes have started: no job of the trial can run on all nodes",
        fix="kubectl get pods -o wide; kubectl get events --field-selector type=Warning; the messages of the scheduler "
        "name the missing resource, taint or quota",
    ),
    Rule(
        metric="started",
        evidence_facts=("not_started", "warnings"),
        expect="== 1 bool",
        meaning="a pod with the trial's image, devices and volumes was assigned to this node, but does not start",
        fix="kubectl get events --field-selector type=Warning; on the node: crictl pull IMAGE; journalctl -u kubelet",
    ),
    Rule(
        metric="image_pull_ratio",
        evidence_facts=("image_pulls",),
        expect="<= 3 ratio",
        outcome_if_violated=Outcome.WARN,
        applies_if={"pulls_compared": "yes"},
        meaning="the pull of the image takes far longer than on the other nodes: a job of all nodes waits for it",
        fix="on the node: crictl pull IMAGE; df -h /var/lib/containerd; compare disk, network and registry mirror "
        "(/etc/containerd/certs.d) of the node with those of another node",
    ),
    Rule(
        metric="image_digests",
        evidence_facts=("images",),
        expect="== 1 digests",
        applies_if={"digests_compared": "yes"},
        meaning="nodes run different images under the same name: one has an old copy of a tag that was pushed again, "
        "or another mirror",
        fix="set kubernetes.image to NAME@sha256:DIGEST, or push under a new tag; on the node with the old copy: "
        "crictl rmi IMAGE",
    ),
    Rule(
        metric="gpus_missing",
        evidence_facts=("gpu_errors",),
        expect="== 0 GPUs",
        applies_if={"gpus_expected": "yes"},
        meaning="nvidia-smi in the pod lists fewer GPUs than the pod requests: the container runtime does not pass "
        "all GPUs on, or a GPU is lost",
        fix="kubectl exec POD -- nvidia-smi -L; on the node: nvidia-smi -L; nvidia-ctk cdi list. With a runtime class: "
        "--set kubernetes.overlay.runtime_class=nvidia",
    ),
    Rule(
        metric="shm_bytes",
        expect=">= 1GiB",
        meaning="/dev/shm of the pod is too small for NCCL and data loaders: 'Bus error', 'No space left on device'",
        fix="--set kubernetes.shm_size=16Gi; an admission policy may replace the volume: kubectl get pod POD -o yaml",
    ),
    Rule(
        metric="memlock_unlimited",
        expect="== 1 bool",
        applies_if={"rdma": "yes"},
        meaning="locked memory is limited in the pod: RDMA cannot register its buffers (ibv_reg_mr fails)",
        fix="kubernetes.overlay: {capabilities: [IPC_LOCK], run_as_user: 0}; or on the nodes LimitMEMLOCK=infinity in "
        "a drop-in of containerd.service",
    ),
    Rule(
        metric="rdma_devices_missing",
        evidence_facts=("rdma_devices",),
        expect="== 0 devices",
        applies_if={"rdma": "yes"},
        meaning="the pod can open fewer RDMA devices than most other pods, or none although the trial requests some",
        fix="kubectl exec POD -- ls -l /dev/infiniband; kubectl get node NODE -o jsonpath='{.status.allocatable}'; the "
        "log of the RDMA device plugin on this node",
    ),
    Rule(
        metric="names_unresolved",
        evidence_facts=("unresolved",),
        expect="== 0 names",
        applies_if={"several_pods": "yes"},
        meaning="the pod does not resolve the names of other pods of its Service: torchrun cannot find the first rank",
        fix="kubectl get pods -n kube-system -l k8s-app=kube-dns -o wide; kubectl exec POD -- cat /etc/resolv.conf; "
        "network policies of the namespace must allow DNS: kubectl get networkpolicies",
    ),
)


def measure(context: Context, options: ProbeOptions) -> Iterator[Observation]:
    """Yield the metrics of each probe pod, by node.

    Raises NotApplicable with another launcher, KubectlError if the pods cannot be created.
    """
    from seatrial.discover.kubectl import KubectlError

    settings = options.settings()
    devices = requested_devices(context, settings)
    place = Place(settings.namespace or "", settings.context, image(settings))
    yield from facts({"gpus_expected": "yes" if context.expected_gpus else "no"})
    try:
        yield from _probe_metrics(context, options, devices, place)
    except KubectlError as error:
        if failures := job_failures({str(error): ()}, place):
            yield from facts({JOB_FAILURES: [failure.model_dump(mode="json") for failure in failures]})
        raise


def _probe_metrics(
    context: Context, options: ProbeOptions, devices: Mapping[str, int], place: Place
) -> Iterator[Observation]:
    """Create the probe pods, yield their metrics and delete them.

    Raises SeatrialError if the probe of a started pod gave no result.
    """
    with open_probe_pods(context, options) as probes:
        pods = probes.wait_for_start()
        started = [pod for pod in pods if pod.started]
        yield from _start_metrics(probes, pods, place)
        yield from _image_metrics(pods, container_name(options.settings()))
        containers, errors = probes.wait_for_results(len(started)) if started else ({}, {})
        results = [(pod, containers[pod.metadata.name]) for pod in started if pod.metadata.name in containers]
        yield from _gpu_metrics(results, context.expected_gpus)
        yield from _limit_metrics(results, any(name != GPU_RESOURCE for name in devices))
        yield from _name_metrics(results, probes.count)
    node_by_pod = {pod.metadata.name: pod.spec.node_name for pod in started if pod.metadata.name not in containers}
    if node_by_pod:
        unread = {errors[name]: [(name, node)] for name, node in node_by_pod.items() if name in errors}
        if failures := job_failures(unread, place):
            yield from facts({JOB_FAILURES: [failure.model_dump(mode="json") for failure in failures]})
        pods_text = and_more([f"{name} on {node}" for name, node in node_by_pod.items()], 4)
        reason = and_more([*unread], 4, "; ") or "Check that the image has sh and df"
        raise SeatrialError(f"no result of {len(node_by_pod)} probe pods: {pods_text}. {reason}")


def _start_metrics(probes: ProbePods, pods: Sequence[Pod], place: Place) -> Iterator[Observation]:
    """Yield which pods have started, the seconds from scheduling to start of a pod, and the seconds of image pulls."""
    started_count = sum(pod.started for pod in pods)
    node_by_pod = {pod.metadata.name: pod.spec.node_name for pod in pods}
    events, events_error = _events(probes)
    not_started = {pod.metadata.name: str(pod) for pod in pods if not pod.started}
    warnings = dict.fromkeys(event.message for event in events if event.type == "Warning")
    namespace = place.namespace or next((pod.metadata.namespace for pod in pods if pod.metadata.namespace), "")
    place = place._replace(namespace=namespace)
    messages = {message: [(pod_name, node_by_pod[pod_name])] for pod_name, message in not_started.items()}
    failures: tuple[JobFailure, ...] = ()
    if started_count < probes.count:
        # Events count only if no pod states a reason, since an event may report a failure that a later attempt overcame
        failures = job_failures(messages, place) or job_failures(dict.fromkeys(warnings, ()), place)
    yield from facts(
        {
            "nodes": node_by_pod,
            "not_started": not_started,
            "warnings": [*warnings][:_MAX_WARNINGS],
            "events_unreadable": events_error,
            JOB_FAILURES: [failure.model_dump(mode="json") for failure in failures],
        }
    )
    yield from metrics(METRICS, {"pods_started": started_count, "pods_missing": max(0, probes.count - started_count)})
    for pod in pods:
        if not pod.spec.node_name:
            continue
        values: dict[str, float] = {"started": pod.started}
        if pod.start_s is not None:
            values["start_seconds"] = pod.start_s
        yield from metrics(METRICS, values, pod.spec.node_name)
    # A node that already has the image has no event of a pull
    pull_s_by_node = {
        node_by_pod[event.involved_object.name]: event.pull_s
        for event in events
        if event.pull_s is not None and event.involved_object.name in node_by_pod
    }
    yield from _pull_metrics(pull_s_by_node)


def _pull_metrics(pull_s_by_node: Mapping[str, float]) -> Iterator[Observation]:
    """Yield the seconds of the image pull by node, and their ratio to the median of the other nodes."""
    compared = len(pull_s_by_node) > 1
    reason = "one node pulled the image" if pull_s_by_node else "no node pulled the image"
    yield from facts({"image_pulls": pull_s_by_node, "pulls_compared": "yes" if compared else f"no: {reason}"})
    for node, pull_s in pull_s_by_node.items():
        yield from metrics(METRICS, {"image_pull_seconds": pull_s}, node)
        if compared:
            others_s = median(seconds for name, seconds in pull_s_by_node.items() if name != node)
            ratio = max(pull_s, _SHORT_PULL_S) / max(others_s, _SHORT_PULL_S)
            yield from metrics(METRICS, {"image_pull_ratio": ratio}, node)


def _image_metrics(pods: Sequence[Pod], container: str) -> Iterator[Observation]:
    """Yield the number of different images, by digest, that the pods run."""
    nodes_by_digest: dict[str, list[str]] = {}
    for pod in pods:
        if pod.started and (digest := pod.image_digest(container)):
            nodes_by_digest.setdefault(digest, []).append(pod.spec.node_name)
    compared = sum(map(len, nodes_by_digest.values())) > 1
    not_compared = "no: fewer than two pods report the digest of their image"
    yield from facts({"images": nodes_by_digest, "digests_compared": "yes" if compared else not_compared})
    if compared:
        yield from metrics(METRICS, {"image_digests": len(nodes_by_digest)})


def _events(probes: ProbePods) -> tuple[tuple[Event, ...], str]:
    """Return the events of the pods, and the error if the user may not read events."""
    from seatrial.discover.kubectl import KubectlError

    try:
        return probes.events(), ""
    except KubectlError as error:
        if error.reason != "Forbidden":
            raise
        return (), str(error)


def _gpu_metrics(results: Sequence[ProbeResult], expected: int | None) -> Iterator[Observation]:
    """Yield for each pod the number of GPUs that it sees and the number that it lacks of ``expected``."""
    errors = {pod.spec.node_name: container.gpu_error for pod, container in results if container.gpu_error}
    yield from facts({"gpu_errors": errors})
    if expected:
        for pod, container in results:
            seen = container.gpus or 0
            values = {"gpus_seen": seen, "gpus_missing": max(0, expected - seen)}
            yield from metrics(METRICS, values, pod.spec.node_name)


def _limit_metrics(results: Sequence[ProbeResult], devices_requested: bool) -> Iterator[Observation]:
    """Yield /dev/shm, the limit of locked memory and the RDMA devices of each pod."""
    device_counts = [len(container.rdma_devices) for _, container in results]
    rdma = devices_requested or any(device_counts)
    yield from facts(
        {
            "rdma": "yes" if rdma else "no: no pod has an RDMA device, and kubernetes.overlay.resources requests none",
            "rdma_devices": {pod.spec.node_name: [*container.rdma_devices] for pod, container in results},
        }
    )
    most_common_count = Counter(device_counts).most_common(1)[0][0] if device_counts else 0
    expected_count = max(most_common_count, 1 if rdma else 0)
    for pod, container in results:
        device_count = len(container.rdma_devices)
        values = {
            "shm_bytes": container.shm_bytes,
            "memlock_unlimited": container.memlock_unlimited,
            "rdma_devices": device_count,
            "rdma_devices_missing": max(0, expected_count - device_count),
        }
        yield from metrics(METRICS, values, pod.spec.node_name)


def _name_metrics(results: Sequence[ProbeResult], count: int) -> Iterator[Observation]:
    """Yield for each pod the number of names of other pods that it does not resolve.

    Only the names of started pods count: a pod that has not started has no DNS record. ``count``: pods of the Job.
    """
    from seatrial.discover.pod_probe import peers

    started_hosts = {_host_name(pod) for pod, _ in results}
    unresolved_by_node: dict[str, list[str]] = {}
    for pod, container in results:
        job_name, _, index = _host_name(pod).rpartition("-")
        expected = {f"{job_name}-{peer}" for peer in peers(int(index), count)}
        unresolved_by_node[pod.spec.node_name] = sorted((expected & started_hosts) - {*container.resolved})
    dns_errors = [container.dns_error for _, container in results if container.dns_error]
    if dns_errors:
        yield from facts({"several_pods": f"no: {dns_errors[0]}", "unresolved": {}})
        return
    not_empty = {node: names for node, names in unresolved_by_node.items() if names}
    yield from facts({"several_pods": "yes" if len(results) > 1 else "no", "unresolved": not_empty})
    for node, names in unresolved_by_node.items():
        yield from metrics(METRICS, {"names_unresolved": len(names)}, node)


def _host_name(pod: Pod) -> str:
    """Return the host name of a pod of an Indexed Job: NAME-INDEX; pods are named NAME-INDEX-abcde."""
    return pod.metadata.name.rpartition("-")[0]


CHECK = Check(
    name="kubernetes.pods",
    title="Pods on each node: start, GPUs, /dev/shm, locked memory, RDMA devices, names of other pods",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    metrics=METRICS,
    rules=RULES,
    fact_roles={"job_failures": JOB_FAILURES},
    rule_facts={
        "gpus_expected": RuleFact(reason="cluster.gpus_per_node is 0 or not set"),
        "pulls_compared": RuleFact(),
        "digests_compared": RuleFact(),
        "rdma": RuleFact(),
        "several_pods": RuleFact(reason="single pod"),
    },
    measure=measure,
    limit_s=1800,
    options=ProbeOptions,
    skip_if=(SkipIf.NO_KUBERNETES,),
)
