"""A workload of Kubernetes from its creation until all its objects are deleted.

The API server is queried every two seconds. While it does not answer, for example during an upgrade, the job runs on.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from seatrial.config.kubernetes import GPU_RESOURCE
from seatrial.config.kubernetes_pod import container_name, image
from seatrial.config.schema import Config
from seatrial.discover.kubectl import Kubectl, KubectlError
from seatrial.discover.kubernetes_messages import Place, job_failures
from seatrial.launch import pod_states
from seatrial.launch.base import TOKEN, Allocation, ScheduledJob, WaitState
from seatrial.launch.collect import STOP_TIMEOUT_S, Collector
from seatrial.launch.collect_logs import NODE_DIR, POD_LIMIT_BYTES, LogTransport
from seatrial.launch.pod_states import Object
from seatrial.model import JobFailure, SeatrialError
from seatrial.util.files import atomic_write
from seatrial.util.text import and_more

OBJECTS = "objects.yaml"  # file in an attempt's folder with the objects that the attempt creates
# Label of all objects that an attempt creates; its value is a hash of the token
TOKEN_LABEL = "seatrial.dev/token"
RESOURCES = {
    "Job": "jobs.batch",
    "JobSet": "jobsets.jobset.x-k8s.io",
    "TrainJob": "trainjobs.trainer.kubeflow.org",
}

_COLLECT_LIMIT_S = 60.0  # from the end of the workload until all files have arrived
# Seconds from the deletion until all pods must be gone, and the same if a node is lost. Pods have
# terminationGracePeriodSeconds to end, 30 s by default
DELETE_LIMIT_S, _LOST_NODE_LIMIT_S = 90.0, 20.0
# Seconds until the events of a pending job are queried, and between two queries
_EVENTS_AFTER_S, _EVENTS_POLL_S = 3.0, 10.0
_GPUS_POLL_S = 60.0  # kubectl reads all nodes and pods of the cluster


def label_value(token: str) -> str:
    """Return the label's value for a token: labels are visible to others, the token is not."""
    return hashlib.sha256(token.encode()).hexdigest()[:32]


@dataclass
class AttemptObjects:
    """All objects that the attempt with this token creates: they have its label."""

    settings: Config
    token: str

    def __post_init__(self) -> None:
        self.client, self.labels = kubectl(self.settings), f"{TOKEN_LABEL}={label_value(self.token)}"
        self.selector = f"--selector={self.labels}"
        self.resource = RESOURCES[workload_kind(self.settings)]  # of its workload

    def delete(self, *, force: bool = False) -> None:
        """Delete the objects, without waiting for their end. Raises KubectlError.

        ``force``: delete also pods whose node does not respond.
        """
        options = (self.selector, "--ignore-not-found", "--wait=false")
        self.client.run("delete", f"{self.resource},services", *options)
        if force:
            with contextlib.suppress(KubectlError):  # a user who may not delete pods; the lost node's pods remain
                self.client.run("delete", "pods", *options, "--force", "--grace-period=0")

    @property
    def delete_command(self) -> str:
        """The command by which a user deletes the objects."""
        return self.client.command_text("delete", f"{self.resource},services,pods", self.selector)

    def remaining(self) -> list[str]:
        """Return the objects that exist, as text: ``Pod a-0-x7k2p on node-b``. Raises KubectlError."""
        texts = []
        for each in self.client.get(f"{self.resource},services,pods", self.selector):
            node = pod_states.node(each)  # empty for objects other than pods
            texts.append(f"{each.get('kind')} {pod_states.name(each)}" + (f" on {node}" if node else ""))
        return texts


@dataclass
class KubernetesJob(ScheduledJob):
    """A created workload. ``folder``: the attempt's folder."""

    poll_s = 2.0
    name: str
    pods: int
    token: str
    settings: Config
    folder: Path
    created: float = field(default_factory=time.monotonic)
    _workload: Object | None = None
    _pods: dict[str, Object] = field(default_factory=dict)  # last state of each pod, including deleted pods
    _present: set[str] = field(default_factory=set)  # names of the pods in the last answer
    _answered: bool = False  # whether the API server has answered a query
    _has_started: bool = False  # whether all pods have started
    _ended: float | None = None  # when the end of the workload was first seen
    _failures: tuple[JobFailure, ...] | None = None  # known causes why the workload failed; None: it has not failed
    _events: list[Object] = field(default_factory=list)
    _kueue_workloads: list[Object] = field(default_factory=list)  # Workload objects of Kueue
    _gpu_use: list[str] = field(default_factory=list)  # a line for each node whose GPUs are in use
    _last_events_query: float = 0.0
    _last_gpus_query: float = -math.inf

    def __post_init__(self) -> None:
        self.objects, self.kind = AttemptObjects(self.settings, self.token), workload_kind(self.settings)
        self.kubectl, container = self.objects.client, container_name(self.settings.kubernetes)
        transport = LogTransport(self.kubectl, self.objects.labels, container, self.token, self.pods)
        self.collector = Collector(transport, NODE_DIR, self.folder, limit_bytes=POD_LIMIT_BYTES * self.pods)

    @property
    def show_node_command(self) -> str:
        return Kubectl(context=self.settings.kubernetes.context).command_text("describe", "node") + " {node}"

    def poll(self) -> int | None:
        self._query()
        code = self.completing_code()
        has_logs = any(pod_states.has_started(self._pods[name]) for name in self._present)
        if self._has_started or (code is not None and has_logs):
            self.collector.fetch(",".join(sorted(self._present, key=lambda name: pod_states.index(self._pods[name]))))
        if code is None:
            return 1 if self.collector.problem() else None
        waited_s = time.monotonic() - (self._ended or 0.0)
        if has_logs and not self.collector.finished and waited_s < _COLLECT_LIMIT_S:
            return None
        self._close_collector()
        return code if self.collector.finished else code or 1

    def completing_code(self) -> int | None:
        code = self._exit_code()
        if code is not None and self._ended is None:
            self._ended = time.monotonic()
            if code:  # the workload, which has the reason, is deleted at the end
                place = job_place(self.settings, [*self._pods.values()])
                self._failures = pod_states.end_failures(self._pods.values(), self._workload, place)
        return code

    def _exit_code(self) -> int | None:
        """Return the exit code of the ended workload; None while it runs. Not 0 if a pod was started again."""
        workload = self._workload
        if not self._answered:
            return None
        failure_code = max((pod_states.exit_code(pod) or 0 for pod in self._pods.values()), default=0) or 1
        if workload is None:
            return failure_code  # deleted by another user or controller
        if pod_states.condition(workload, "Complete", "Completed"):
            # a controller that started a pod or its container again hides a fault
            is_restarted = self._started_pods > self.pods or any(map(pod_states.exit_code, self._pods.values()))
            return failure_code if is_restarted else 0
        return failure_code if pod_states.condition(workload, "Failed", "FailureTarget") else None

    @property
    def _started_pods(self) -> int:
        """The number of pods that have started; pods that Kueue replaces before their start do not count."""
        return sum(map(pod_states.has_started, self._pods.values()))

    def wait_state(self) -> WaitState | None:
        self._query()
        if outage := self._outage(self._kind_and_name):
            return outage
        if self.completing_code() is not None:
            return None
        if self._has_started:
            suspended = self._workload is not None and self._workload.get("spec", {}).get("suspend")
            reason = f"{self._kind_and_name} was suspended after its start, so that its pods ended"
            command = self.kubectl.command_text("describe", self.objects.resource, self.name)
            return WaitState(reason=f"{reason}. Run first: {command}", permanent=True) if suspended else None
        return self._pending()

    def _pending(self) -> WaitState:
        waited_s, queue_s = time.monotonic() - self.created, self.settings.kubernetes.queue_s
        self._query_events(waited_s)
        pods = [pod for name, pod in self._pods.items() if name in self._present]
        place = job_place(self.settings, [*pods, *([self._workload] if self._workload else [])])
        pending = pod_states.pending(pods, self.pods, self._workload, self._events, self._kueue_workloads, place)
        reason = f"{self._kind_and_name} is pending ({pending.reason})"
        if self._gpu_use and GPU_RESOURCE in pending.reason:
            reason += f": {and_more(self._gpu_use, 4, '; ')}"
        if not pending.permanent and waited_s <= queue_s:
            return WaitState(reason=reason, permanent=False, seconds=waited_s)
        limit = f"pending {waited_s:.0f} s, kubernetes.queue_s is {queue_s:g} s"
        sentences = [
            reason,
            "Waiting will not help" if pending.permanent else limit,
            f"Run first: {pending.first_command}",
        ]
        reason, failures = ". ".join(sentences), pending.failures
        return WaitState(reason=reason, permanent=True, seconds=waited_s, pending=True, failures=failures)

    def _query_events(self, waited_s: float) -> None:
        """Query why pods wait, for a message: warning events, Kueue's Workload objects, and the GPUs in use."""
        now = time.monotonic()
        if waited_s < _EVENTS_AFTER_S or now - self._last_events_query < _EVENTS_POLL_S:
            return
        self._last_events_query = now
        names = (self.name, *self._pods)
        warnings = self._objects_if_readable("events", "--field-selector=type=Warning")
        self._events = [
            event for event in warnings if str(event.get("involvedObject", {}).get("name", "")).startswith(names)
        ]
        if self._workload and self._workload.get("spec", {}).get("suspend"):
            uid = self._workload.get("metadata", {}).get("uid", "")
            self._kueue_workloads = self._objects_if_readable(
                "workloads.kueue.x-k8s.io", f"--selector=kueue.x-k8s.io/job-uid={uid}"
            )
        if self.settings.cluster.gpus_per_node and now - self._last_gpus_query > _GPUS_POLL_S:
            self._last_gpus_query = now
            from seatrial.discover.kubernetes import read_gpu_users, read_nodes  # `seatrial render` needs no facts

            with contextlib.suppress(SeatrialError):  # such as a user who may not list nodes
                self._gpu_use = pod_states.gpu_use(read_nodes(self.kubectl), read_gpu_users(self.kubectl))

    def _objects_if_readable(self, *args: str) -> list[Object]:
        """Return objects whose absence only makes a message less precise; none if they cannot be read."""
        try:
            return [*self.kubectl.get(*args)]
        except KubectlError:  # such as a user who may not list events
            return []

    def allocation(self) -> Allocation:
        nodes = {pod_states.node(pod) for pod in self._pods.values()} - {""}
        images = pod_states.images(self._pods.values())
        failures = self._unread_log_failures() if self._failures is None else self._failures
        return Allocation(id=self.name, nodes=",".join(sorted(nodes)), images=images, failures=failures)

    @property
    def unreadable_nodes(self) -> Collection[int]:
        return self.collector.errors.keys()

    def _log_errors(self) -> dict[str, tuple[str, str]]:
        """Return node → (its pod, why the log of this pod cannot be read)."""
        errors = self.collector.errors
        unread = {pod_states.node(pod): pod for pod in self._pods.values() if pod_states.index(pod) in errors}
        return {node: (pod_states.name(pod), errors[pod_states.index(pod)]) for node, pod in unread.items()}

    def _unread_log_failures(self) -> tuple[JobFailure, ...]:
        messages = {error: [(pod, node)] for node, (pod, error) in self._log_errors().items()}
        return job_failures(messages, job_place(self.settings, [*self._pods.values()]))

    def exit_reason(self) -> str:
        errors = [
            f"the log of pod {pod} on {node} cannot be read: {error}"
            for node, (pod, error) in self._log_errors().items()
        ]
        commands = [f"Run first: {failure.first_command}" for failure in self._unread_log_failures()[:1]]
        sentences = [and_more(errors, 4, "; "), *commands] if errors else [self.collector.missing_files()]
        code = self._exit_code()
        if code:
            ended = (
                f"{self._kind_and_name} failed" if self._workload is not None else f"{self._kind_and_name} was deleted"
            )
            reason = pod_states.end_reason(self._pods.values(), self.pods, self._workload)
            if self._started_pods > self.pods:
                restarted = f"{self._started_pods} pods ran, not {self.pods}: a controller started some again"
                reason = ". ".join(filter(None, [restarted, reason]))
            command = self.kubectl.command_text("get", "events", "--sort-by=.lastTimestamp")
            sentences += [f"{ended}: {reason}" if reason else ended, f"Run first: {command}"]
        return ". ".join(filter(None, sentences))

    def node_state(self, host: str) -> tuple[str, str]:
        nodes = self._objects_if_readable("node", host)
        state, (_, error) = pod_states.node_state(nodes[0]) if nodes else "", self._log_errors().get(host, ("", ""))
        return host, f"{state}; its log cannot be read: {error}" if state.startswith("Ready") and error else state

    def node_is_free(self, name: str) -> bool:
        nodes = self._objects_if_readable("node", name)
        return bool(nodes) and pod_states.node_state(nodes[0]).startswith("Ready") and not self._present

    def cancel(self, *, node_lost: bool = False) -> str:
        started = time.monotonic()
        must_fetch = self._has_started and not node_lost and not self.collector.problem()
        limit_s, deleted = (_LOST_NODE_LIMIT_S if node_lost else DELETE_LIMIT_S), False
        while True:
            elapsed_s = time.monotonic() - started
            try:
                if not deleted:
                    self.objects.delete(force=node_lost)
                    deleted = True
                self._query(now=True)
                left = self.objects.remaining()
            except KubectlError as error:
                left = [str(error)]
            if must_fetch and elapsed_s < STOP_TIMEOUT_S:  # the pods send all files when they are terminated
                self.collector.fetch()
            if not left or elapsed_s > limit_s:
                break
            time.sleep(0.2)
        self._close_collector()
        if not left:
            (self.folder / TOKEN).unlink(missing_ok=True)  # nothing is left for a resumed run to delete
            return ""
        command = self.objects.delete_command
        return f"{and_more(left, 8)}: may still exist {limit_s:g} s after the deletion. Run first: {command}"

    @property
    def _kind_and_name(self) -> str:
        return f"{self.kind} {self.name}"

    def _read_state(self) -> None:
        objects = self.kubectl.get(f"{self.objects.resource},pods", self.objects.selector)
        self._answered = True
        pods = {pod_states.name(each): each for each in objects if each.get("kind") == "Pod"}
        self._present = set(pods)
        self._pods |= pods
        workloads = [each for each in objects if each.get("kind") == self.kind]
        self._workload = next((each for each in workloads if pod_states.name(each) == self.name), None)
        self._has_started = self._has_started or self._started_pods >= self.pods

    def _close_collector(self) -> None:
        """End the collector and merge the standard error of all pods into launcher.err, labelled as srun does."""
        self.collector.close()
        lines = []
        for path in sorted(self.folder.glob("node*.err"), key=lambda path: int(path.stem.removeprefix("node"))):
            text = path.read_text(encoding="utf-8", errors="replace")
            lines += [f"{path.stem.removeprefix('node')}: {line}" for line in text.splitlines()]
        log = self.folder / "launcher.err"
        old = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        new = [line for line in old.splitlines() if line.startswith("seatrial: ")] + lines
        atomic_write(log, "".join(f"{line}\n" for line in new).encode())


def kubectl(settings: Config) -> Kubectl:
    """Return kubectl with the trial's namespace and context."""
    return Kubectl(settings.kubernetes.namespace, settings.kubernetes.context)


def job_place(settings: Config, objects: Sequence[Object] = ()) -> Place:
    """Return where the pods of a trial are created; without kubernetes.namespace, where these objects are."""
    namespaces = (str(each.get("metadata", {}).get("namespace", "")) for each in objects)
    namespace = settings.kubernetes.namespace or next(filter(None, namespaces), "")
    return Place(namespace, settings.kubernetes.context, image(settings.kubernetes))


def workload_kind(settings: Config) -> str:
    """Return the Kubernetes kind of the trial's workload."""
    return {"job": "Job", "jobset": "JobSet", "trainjob": "TrainJob"}[settings.kubernetes.workload]
