"""A workload of Kubernetes from its creation until all its objects are deleted.

The API server is queried every two seconds. While it does not answer, for example during an upgrade, the job runs on.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from seatrial.config.kubernetes import GPU_RESOURCE
from seatrial.config.kubernetes_pod import image
from seatrial.config.schema import Config
from seatrial.discover.kubectl import Kubectl, KubectlError
from seatrial.discover.kubernetes_messages import Place, job_failures
from seatrial.launch import pod_states
from seatrial.launch.base import TOKEN, Allocation, ScheduledJob, WaitState, token_files
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
_DELETE_LIMIT_S, _LOST_NODE_LIMIT_S = 90.0, 20.0
# Seconds until the events of a pending job are queried, and between two queries
_EVENTS_AFTER_S, _EVENTS_POLL_S = 3.0, 10.0
_GPUS_POLL_S = 60.0  # kubectl reads all nodes and pods of the cluster


def selector(token: str) -> str:
    """Return the label selector of everything that the attempt with this token creates."""
    return f"{TOKEN_LABEL}={label_value(token)}"


def label_value(token: str) -> str:
    """Return the label's value for a token: labels are visible to others, the token is not."""
    return hashlib.sha256(token.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Identity:
    """The workload of one attempt. ``container``: the container's name in each pod; ``pods``: the number of pods."""

    kind: str
    name: str
    container: str
    pods: int
    token: str


@dataclass
class KubernetesJob(ScheduledJob):
    """A created workload. ``folder``: the attempt's folder."""

    poll_s = 2.0
    identity: Identity
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
        self.kubectl = kubectl(self.settings)
        identity = self.identity
        self.selector = selector(identity.token)
        transport = LogTransport(self.kubectl, self.selector, identity.container, identity.token, identity.pods)
        self.collector = Collector(transport, NODE_DIR, self.folder, limit_bytes=POD_LIMIT_BYTES * identity.pods)

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
            return failure_code if self._was_restarted else 0
        return failure_code if pod_states.condition(workload, "Failed", "FailureTarget") else None

    @property
    def _was_restarted(self) -> bool:
        """Whether a controller started a pod or its container again, which hides a fault."""
        ends = [pod_states.exit_code(pod) for pod in self._pods.values()]
        return self._started_pods > self.identity.pods or any(ends)

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
            command = self.kubectl.command_text("describe", RESOURCES[self.identity.kind], self.identity.name)
            return WaitState(reason=f"{reason}. Run first: {command}", permanent=True) if suspended else None
        return self._pending()

    def _pending(self) -> WaitState:
        waited_s, queue_s = time.monotonic() - self.created, self.settings.kubernetes.queue_s
        self._query_events(waited_s)
        pods = [pod for name, pod in self._pods.items() if name in self._present]
        place = job_place(self.settings, [*pods, *([self._workload] if self._workload else [])])
        pending = pod_states.pending(
            pods, self.identity.pods, self._workload, self._events, self._kueue_workloads, place
        )
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
        names = (self.identity.name, *self._pods)
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
        return Allocation(id=self.identity.name, nodes=",".join(sorted(nodes)), images=images, failures=failures)

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
            reason = pod_states.end_reason(self._pods.values(), self.identity.pods, self._workload)
            if self._started_pods > self.identity.pods:
                restarted = f"{self._started_pods} pods ran, not {self.identity.pods}: a controller started some again"
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
        limit_s, deleted = (_LOST_NODE_LIMIT_S if node_lost else _DELETE_LIMIT_S), False
        while True:
            elapsed_s = time.monotonic() - started
            try:
                if not deleted:
                    delete(self.kubectl, self.selector, self.identity.kind, force=node_lost)
                    deleted = True
                self._query(now=True)
                left = remaining(self.kubectl, self.selector, self.identity.kind)
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
        command = delete_command(self.kubectl, self.selector, self.identity.kind)
        return f"{and_more(left, 8)}: may still exist {limit_s:g} s after the deletion. Run first: {command}"

    @property
    def _kind_and_name(self) -> str:
        return f"{self.identity.kind} {self.identity.name}"

    def _read_state(self) -> None:
        objects = self.kubectl.get(f"{RESOURCES[self.identity.kind]},pods", f"--selector={self.selector}")
        self._answered = True
        pods = {pod_states.name(each): each for each in objects if each.get("kind") == "Pod"}
        self._present = set(pods)
        self._pods |= pods
        workloads = [each for each in objects if each.get("kind") == self.identity.kind]
        self._workload = next((each for each in workloads if pod_states.name(each) == self.identity.name), None)
        self._has_started = self._has_started or self._started_pods >= self.identity.pods

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


def delete(client: Kubectl, labels: str, kind: str, *, force: bool = False) -> None:
    """Delete the objects with these labels, without waiting for their end. Raises KubectlError.

    ``force``: delete also pods whose node does not respond.
    """
    options = (f"--selector={labels}", "--ignore-not-found", "--wait=false")
    client.run("delete", f"{RESOURCES[kind]},services", *options)
    if force:
        with contextlib.suppress(KubectlError):  # a user who may not delete pods; the lost node's pods remain
            client.run("delete", "pods", *options, "--force", "--grace-period=0")


def delete_command(client: Kubectl, labels: str, kind: str) -> str:
    """Return the command by which a user deletes the objects with these labels."""
    return client.command_text("delete", f"{RESOURCES[kind]},services,pods", f"--selector={labels}")


def remaining(client: Kubectl, labels: str, kind: str) -> list[str]:
    """Return the objects that have these labels, as text: ``Pod a-0-x7k2p on node-b``. Raises KubectlError."""
    texts = []
    for each in client.get(f"{RESOURCES[kind]},services,pods", f"--selector={labels}"):
        node = pod_states.node(each)  # empty for objects other than pods
        texts.append(f"{each.get('kind')} {pod_states.name(each)}" + (f" on {node}" if node else ""))
    return texts


def delete_remaining_jobs(run_dir: Path, settings: Config) -> Iterator[str]:
    """Delete the objects that a killed run left, and wait until they are gone.

    Yields a message before the objects of each attempt are deleted. Only objects with the token of one of the run's
    attempts are deleted. Raises SeatrialError if the API server cannot be queried or a pod does not end, since the
    results of a new attempt would be mixed with those of the old attempt.
    """
    client, kind = kubectl(settings), workload_kind(settings)
    for path in [*token_files(run_dir)]:
        labels = selector(path.read_text(encoding="utf-8"))
        if left := remaining(client, labels, kind):
            yield f"{and_more(left, 4)} of an earlier run in {run_dir} has not ended: deleting it"
            delete(client, labels, kind)
            deadline = time.monotonic() + _DELETE_LIMIT_S
            while left := remaining(client, labels, kind):
                if time.monotonic() > deadline:
                    raise SeatrialError(
                        f"an earlier run may still use nodes: {and_more(left, 8)} still exists. "
                        f"Run first: {delete_command(client, labels, kind)}"
                    )
                time.sleep(0.2)
        path.unlink()


def workload_kind(settings: Config) -> str:
    """Return the Kubernetes kind of the trial's workload."""
    return {"job": "Job", "jobset": "JobSet", "trainjob": "TrainJob"}[settings.kubernetes.workload]
