"""Why the pods of a job do not start, and how they ended, from the objects that ``kubectl get`` prints. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from seatrial.config.kubernetes import GPU_RESOURCE
from seatrial.discover.kubernetes_messages import Place, find_start_cause, job_failures
from seatrial.model import JobFailure
from seatrial.util.failures import exit_reason
from seatrial.util.grouping import grouped
from seatrial.util.text import and_more, plural

if TYPE_CHECKING:
    from seatrial.discover.kubernetes import GpuUser, KubernetesNode

Object = Mapping[str, Any]  # an object of Kubernetes, as JSON

_STARTING = ("ContainerCreating", "PodInitializing")  # normal for some seconds; events say why a pod stays in them
_MAX_NAMED = 4
_CONTEXT_NAMESPACE = Place("")  # the namespace of kubectl's context
_DESCRIBE = "kubectl describe pod -n {namespace} {pod}"
_SCRIPT_PREFIX = "seatrial: "  # starts each message of the pod's script


class Pending(NamedTuple):
    """Why pods do not start: the text to show, whether waiting will not help, and the first command to run.

    ``failures``: the known causes.
    """

    reason: str
    permanent: bool
    first_command: str
    failures: tuple[JobFailure, ...]


def name(item: Object) -> str:
    """Return the name of an object."""
    return str(item.get("metadata", {}).get("name", ""))


def index(pod: Object) -> int:
    """Return the index of a pod of an Indexed Job: that of its node in the job; -1 for another pod."""
    annotations = pod.get("metadata", {}).get("annotations") or {}
    return int(annotations.get("batch.kubernetes.io/job-completion-index", -1))


def node(pod: Object) -> str:
    """Return the node of a pod; empty if it is not scheduled."""
    return str(pod.get("spec", {}).get("nodeName", ""))


def has_started(pod: Object) -> bool:
    """Return whether the current state of a pod's container is running or terminated."""
    states = [status.get("state", {}) for status in _container_statuses(pod)]
    return any("running" in state or "terminated" in state for state in states)


def exit_code(pod: Object) -> int | None:
    """Return the exit code of a pod's container; None if the pod has not ended.

    An ended pod without an exit code counts as 137 (SIGKILL) if it failed, as 0 if it succeeded.
    """
    if codes := [int(each.get("exitCode", 1)) for each in _terminations(pod)]:
        return max(codes)
    return {"Failed": 137, "Succeeded": 0}.get(pod.get("status", {}).get("phase", ""))


def condition(item: Object, *types: str) -> Object | None:
    """Return the first condition of these types that is True; None if none is."""
    return next((each for each in _conditions(item, *types) if each.get("status") == "True"), None)


def pending(
    pods: Sequence[Object],
    expected: int,
    workload: Object | None,
    events: Iterable[Object] = (),
    kueue_workloads: Iterable[Object] = (),
    place: Place = _CONTEXT_NAMESPACE,
) -> Pending:
    """Return why fewer than ``expected`` pods have started.

    ``workload``: the job. ``events``: those of the job and its pods. ``kueue_workloads``: Kueue's objects of the job.
    """
    events = list(events)
    waiting = [pod for pod in pods if not has_started(pod)]
    # text → (pod, its node) of each pod with this text
    reasons = grouped((_pod_reason(pod, events), (name(pod), node(pod))) for pod in waiting)
    if len(pods) < expected:
        reasons.setdefault(_reason_without_pods(workload, events, kueue_workloads), [])
    texts = sorted(reasons, key=lambda text: not find_start_cause(text))  # those with a known cause first
    causes = [cause for cause in map(find_start_cause, texts) if cause]
    parts = [f"{_subject([pod for pod, _ in reasons[text]], expected - len(pods))}: {text}" for text in texts]
    failures = job_failures({text: reasons[text] for text in texts}, place)
    first_pod = name(waiting[0]) if waiting else "POD"
    return Pending(
        reason=(f"{causes[0].title}. " if causes else "") + "; ".join(parts),
        permanent=any(cause.message.permanent for cause in causes),
        first_command=failures[0].first_command if failures else place.filled(_DESCRIBE, first_pod),
        failures=failures,
    )


def end_reason(pods: Iterable[Object], expected: int, workload: Object | None) -> str:
    """Return the workload's reason and how the pods of a failed job ended, as sentences; empty if unknown."""
    pods = list(pods)
    sentences = [_failure(workload)]
    ends = [f"pod {name(pod)} on {node(pod) or 'no node'}: {text}" for pod in pods if (text := pod_end(pod))]
    succeeded = sum(1 for pod in pods if exit_code(pod) == 0)
    if 0 < succeeded < expected:
        sentences.append(f"{succeeded} of {expected} pods succeeded")
    return ". ".join(filter(None, [*sentences, and_more(ends, _MAX_NAMED, "; ")]))


def end_failures(pods: Iterable[Object], workload: Object | None, place: Place) -> tuple[JobFailure, ...]:
    """Return the known causes why a job failed: those of its pods; if there are none, those of the workload."""
    pods_by_text = grouped((text, (name(pod), node(pod))) for pod in pods if (text := pod_end(pod)))
    return job_failures(pods_by_text, place) or job_failures({_failure(workload): ()}, place)


def _failure(workload: Object | None) -> str:
    """Return the reason and message of a failed workload; empty for another one."""
    failed = condition(workload, "Failed", "FailureTarget") if workload else None
    return _reason_and_message(failed) if failed else ""


def _reason_and_message(item: Object) -> str:
    return f"{item.get('reason', '')}: {item.get('message', '')}".strip(" :")


def pod_end(pod: Object) -> str:
    """Return why a pod failed, with the last message of its script; empty if it did not fail."""
    disruption, status = condition(pod, "DisruptionTarget") or {}, pod.get("status", {})
    known = {key: status.get(key) or disruption.get(key, "") for key in ("reason", "message")}
    texts = [_reason_and_message(known)] if known["reason"] else []
    for termination in _terminations(pod):
        code = int(termination.get("exitCode", 1))
        kubelet_reason = termination.get("reason", "")  # such as OOMKilled; Error says nothing
        if code:
            text = exit_reason(128 - code if 128 < code <= 128 + 64 else code)  # 137 is 128 + SIGKILL
            texts.append(text + (f" ({kubelet_reason})" if kubelet_reason and kubelet_reason != "Error" else ""))
            # the message is the end of the log: other lines may contain the token and are not quoted
            lines = str(termination.get("message", "")).splitlines()
            texts += [line.removeprefix(_SCRIPT_PREFIX) for line in lines if line.startswith(_SCRIPT_PREFIX)][-1:]
    return "; ".join(filter(None, texts))


def images(pods: Iterable[Object]) -> tuple[str, ...]:
    """Return the images that the pods ran, by digest, as the container runtime reports them."""
    ids = {str(status.get("imageID", "")) for pod in pods for status in _container_statuses(pod)}
    return tuple(sorted(ids - {""}))


def gpu_use(nodes: Iterable[KubernetesNode], users: Iterable[GpuUser]) -> list[str]:
    """Return a line for each node with MIG or GPUs in use: ``node-b: 7 of 8 GPUs free, ml/notebook-0 uses 1``.

    Raises SeatrialError for an invalid number of GPUs.
    """
    users_by_node = grouped((user.node, user) for user in users)
    lines = []
    for item in nodes:
        total = item.allocatable(GPU_RESOURCE)
        users_here = users_by_node.get(item.name, [])
        if item.mig_error:
            lines.append(f"{item.name}: {item.mig_error}")
        elif total and users_here:
            free = total - sum(user.gpus for user in users_here)
            uses = and_more([f"{user.pod} uses {user.gpus}" for user in users_here], _MAX_NAMED)
            lines.append(f"{item.name}: {free} of {total} GPUs free, {uses}")
    return lines


def node_state(item: Object) -> str:
    """Return the state of a node: ``Ready``, ``NotReady (Kubelet stopped posting node status.)``, with its taints."""
    ready = next(_conditions(item, "Ready"), {})
    text = "Ready" if ready.get("status") == "True" else f"NotReady ({ready.get('message', 'no condition Ready')})"
    taints = [str(taint.get("key", "")) for taint in item.get("spec", {}).get("taints") or []]
    cordoned = ["SchedulingDisabled"] if item.get("spec", {}).get("unschedulable") else []
    return ", ".join([text, *cordoned, *(f"taint {taint}" for taint in taints)])


def _pod_reason(pod: Object, events: Sequence[Object]) -> str:
    """Return why a pod has not started: its scheduling, its container's state, or its last warning."""
    if not_scheduled := _unmet(pod, "PodScheduled"):
        return not_scheduled
    for status in _container_statuses(pod):
        waiting = status.get("state", {}).get("waiting", {})
        if waiting.get("reason") and waiting["reason"] not in _STARTING:
            return _reason_and_message(waiting)
    if end := pod_end(pod):
        return end
    if warnings := _warnings(events, name(pod)):
        return warnings[-1]
    return f"starting on {node(pod)}" if node(pod) else "waiting for the scheduler"


def _reason_without_pods(workload: Object | None, events: Sequence[Object], kueue_workloads: Iterable[Object]) -> str:
    """Return why pods of a workload do not exist yet."""
    if workload and workload.get("spec", {}).get("suspend"):
        messages = filter(None, (_unmet(item, "QuotaReserved") for item in kueue_workloads))
        return next(messages, "suspended: Kueue or another controller has not admitted it")
    warnings = [text for text in _warnings(events, "") if text.startswith("FailedCreate")]
    return warnings[-1].removeprefix("FailedCreate: ") if warnings else "not created yet"


def _unmet(item: Object, type_: str) -> str:
    """Return the message of a condition that is False; empty if it is not, or has no message."""
    unmet = [each for each in _conditions(item, type_) if each.get("status") == "False"]
    return next((str(each["message"]) for each in unmet if each.get("message")), "")


def _conditions(item: Object, *types: str) -> Iterator[Object]:
    """Yield the conditions of these types."""
    yield from (each for each in item.get("status", {}).get("conditions") or [] if each.get("type") in types)


def _warnings(events: Sequence[Object], prefix: str) -> list[str]:
    """Return the warnings about objects whose name starts with ``prefix``, the newest last."""
    warnings = [
        event
        for event in events
        if event.get("type") == "Warning" and str(event.get("involvedObject", {}).get("name", "")).startswith(prefix)
    ]
    warnings.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    return [_reason_and_message(event) for event in warnings]


def _subject(pods: Sequence[str], missing: int) -> str:
    """Return the names of the pods; without any, the number of pods that do not exist yet."""
    return and_more(list(pods), _MAX_NAMED) if pods else plural(missing, "pod")


def _container_statuses(pod: Object) -> list[Object]:
    return list(pod.get("status", {}).get("containerStatuses") or [])


def _terminations(pod: Object) -> list[Object]:
    """Return how the containers of a pod ended: the previous termination, if the container restarted."""
    terminations = []
    for status in _container_statuses(pod):
        previous, current = status.get("lastState", {}), status.get("state", {})
        terminations.append(previous.get("terminated") or current.get("terminated"))
    return [termination for termination in terminations if termination]
