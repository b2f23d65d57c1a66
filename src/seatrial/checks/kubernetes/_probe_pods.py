"""Probe pods: an Indexed Job with one small pod on each node, which a check creates and deletes.

The pods have the image, devices, volumes and limits of the trial's pods. A Service makes their names resolvable; it
belongs to the Job. Kubernetes deletes the Job after a time limit, so that nothing remains if seatrial is killed. If an
earlier attempt was killed, the check first deletes the Job of that attempt, whose pods may still have the GPUs.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from seatrial.checks.check import Context
from seatrial.checks.kubernetes._cluster import KubernetesOptions, kubectl
from seatrial.config.kubernetes import Kubernetes
from seatrial.config.kubernetes_pod import container, literal_argument, pod_annotations, pod_spec
from seatrial.model import SeatrialError
from seatrial.util.files import atomic_write

if TYPE_CHECKING:
    from seatrial.discover.kubectl import Kubectl
    from seatrial.discover.kubernetes import Event, Pod
    from seatrial.discover.pod_probe import Container

POLL_S = 2.0
PROBE_S = 60  # limit for a pod to read its devices; nvidia-smi takes seconds
RESOLVE_S = 60  # limit for the names of other pods to resolve; a DNS server may cache a missing name for 30 s
_PROBE_LABEL = "seatrial.dev/probe"
_DELETE_TIMEOUT_S = 90
_NAME_FILE = "probe-job"  # file in the artifacts with the Job's name; exists until the Job is deleted
_JOB_TTL_S = 60  # Kubernetes deletes a Job this long after its end


class ProbeOptions(KubernetesOptions):
    """The cluster of the trial, and the time that pods may take to start."""

    wait_s: float = Field(
        default=600, gt=0, description="maximum seconds until a pod starts, with the pull of its image"
    )


@dataclass(frozen=True)
class ProbePods:
    """Follows the probe pods of one check: ``count`` pods of the Job ``name``, which is also their unique label.

    ``wait_s``: maximum seconds until all pods have started. ``progress``: shows a line of progress.
    """

    kubectl: Kubectl
    name: str
    count: int
    wait_s: float
    progress: Callable[[str], None]

    @property
    def selector(self) -> str:
        return f"--selector={_PROBE_LABEL}={self.name}"

    def wait_for_start(self) -> tuple[Pod, ...]:
        """Return the pods when all of them have started, or after ``wait_s``. Raises KubectlError."""
        deadline = time.monotonic() + self.wait_s
        while True:
            pods = self.query()
            started = sum(pod.started for pod in pods)
            if started >= self.count or time.monotonic() > deadline:
                return pods
            waiting = next((f": {pod}" for pod in pods if not pod.started), "")
            self.progress(f"{started} of {self.count} probe pods have started{waiting}")
            time.sleep(POLL_S)

    def query(self) -> tuple[Pod, ...]:
        """Return the current state of the pods. Raises KubectlError."""
        from seatrial.discover.kubernetes import Pod, parse

        return parse(self.kubectl.get("pods", self.selector), Pod)

    def wait_for_results(self, count: int) -> tuple[dict[str, Container], dict[str, str]]:
        """Return pod → what its probe read, when the probes of ``count`` pods have ended, or after a time limit.

        Also return pod → why its log cannot be read. Raises KubectlError, and SeatrialError if a probe printed a value
        in an unexpected form.
        """
        from seatrial.discover.kubectl import pod_log_error
        from seatrial.discover.pod_probe import parse_logs

        deadline = time.monotonic() + PROBE_S + RESOLVE_S
        while True:
            # without --ignore-errors, one pod whose log cannot be read hides the logs of the others
            text = self.kubectl.run("logs", self.selector, "--prefix", "--tail=-1", "--ignore-errors")
            containers = parse_logs(text)
            ended = sum(container.ended for container in containers.values())
            if ended >= count or time.monotonic() > deadline:
                return containers, dict(filter(None, map(pod_log_error, text.splitlines())))
            self.progress(f"{ended} of {count} probes have ended")
            time.sleep(POLL_S)

    def events(self) -> tuple[Event, ...]:
        """Return the events of the pods and their Job. Raises KubectlError."""
        from seatrial.discover.kubernetes import Event, parse

        events = parse(self.kubectl.get("events"), Event)
        return tuple(event for event in events if event.about.startswith(self.name))

    def delete(self) -> None:
        """Delete the Job, and wait until its pods have ended, since they have the GPUs. Raises KubectlError.

        This method polls: `kubectl delete` would wait by a watch, for which the user needs a further right.
        """
        from seatrial.discover.kubectl import KubectlError

        command = self.kubectl.command_text("delete", "jobs", self.selector)
        try:
            self.kubectl.run("delete", "jobs", self.selector, "--cascade=foreground", "--wait=false")
            deadline = time.monotonic() + _DELETE_TIMEOUT_S
            while remaining := self.kubectl.get("jobs,pods", self.selector):
                if time.monotonic() > deadline:
                    raise KubectlError(
                        f"{len(remaining)} objects still exist {_DELETE_TIMEOUT_S} s after their deletion"
                    )
                time.sleep(POLL_S)
        except KubectlError as error:
            raise KubectlError(f"probe pods may still use GPUs. Run first: {command}. {error}", error.reason) from None


@contextmanager
def open_probe_pods(context: Context, options: ProbeOptions) -> Iterator[ProbePods]:
    """Create one probe pod for each expected node, yield the pods, and delete them on exit.

    Raises KubectlError, and SeatrialError if kubectl prints an object in an unexpected form.
    """
    from seatrial.discover.kubectl import ApiUnavailable, KubectlError

    settings, name_file = options.settings(), context.artifacts_dir / _NAME_FILE
    name = f"seatrial-probe-{uuid.uuid4().hex[:8]}"
    pods = ProbePods(kubectl(settings), name, context.expected_nodes, options.wait_s, context.progress)
    if name_file.exists():  # an earlier attempt was killed, or could not delete its Job
        replace(pods, name=name_file.read_text(encoding="utf-8")).delete()
    atomic_write(name_file, name.encode())
    manifest = probe_job(settings, name, context.expected_nodes, context.expected_gpus, options.wait_s)
    is_refused = False
    try:
        try:
            job = _create(pods.kubectl, manifest, context.artifacts_dir)
        except KubectlError as error:
            # After a refusal no Job exists; without an answer of the API server it may exist
            is_refused = bool(error.reason) and not isinstance(error, ApiUnavailable)
            raise
        _create(pods.kubectl, _service(settings, name, job["metadata"]["uid"]), context.artifacts_dir)
        yield pods
    finally:
        if not is_refused:
            pods.delete()
        name_file.unlink()


def _create(kubectl: Kubectl, manifest: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Create an object and return it as the API server stored it. ``folder``: for the file with ``manifest``."""
    file = folder / f"{manifest['kind'].lower()}.json"
    file.write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    output = kubectl.run("create", f"--filename={file}", "--output=json")
    try:
        created: dict[str, Any] = json.loads(output)
        created["metadata"]["uid"]
    except (ValueError, KeyError, TypeError) as error:
        raise SeatrialError(f"kubectl create printed no object with metadata.uid: {output[:80]!r}") from error
    return created


def probe_job(settings: Kubernetes, name: str, nodes: int, gpus: int | None, wait_s: float) -> dict[str, Any]:
    """Return the Indexed Job with one probe pod on each of ``nodes`` nodes.

    ``gpus``: requested by each pod; None if not configured. ``wait_s``: maximum seconds until a pod starts.
    """
    from seatrial.discover.pod_probe import SCRIPT

    labels = {"app.kubernetes.io/name": "seatrial", _PROBE_LABEL: name}
    lifetime_s = int(wait_s) + PROBE_S + RESOLVE_S
    arguments = [name, str(nodes), str(gpus or 0), str(lifetime_s)]
    spec = pod_spec(
        settings,
        {**container(settings, gpus), "command": ["sh", "-c"], "args": [literal_argument(SCRIPT), "sh", *arguments]},
    )
    one_per_node = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {_PROBE_LABEL: name}}}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [one_per_node]}}
    # The last command of the script is sleep, which ignores SIGTERM: Kubernetes kills it after this period
    spec |= {"subdomain": name, "affinity": affinity, "terminationGracePeriodSeconds": 1}
    queue = {"kueue.x-k8s.io/queue-name": settings.kueue.queue} if settings.kueue else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {**labels, **queue}},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 0,
            "activeDeadlineSeconds": 2 * lifetime_s,
            "ttlSecondsAfterFinished": _JOB_TTL_S,
            "template": {"metadata": {"labels": labels, "annotations": pod_annotations(settings)}, "spec": spec},
        },
    }


def _service(settings: Kubernetes, name: str, job_uid: str) -> dict[str, Any]:
    """Return the headless Service that makes the pods' names resolvable; Kubernetes deletes it with the Job."""
    labels = {"app.kubernetes.io/name": "seatrial", _PROBE_LABEL: name}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job_uid}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {_PROBE_LABEL: name}},
    }
