"""Kubernetes launcher: one workload per job, one pod per node, results through the pods' logs.

seatrial creates, watches and deletes its own objects, which it finds by their label. It changes no other object.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from seatrial.discover.kubectl import ApiUnavailable, Kubectl, KubectlError
from seatrial.discover.kubernetes_messages import job_failures
from seatrial.launch.base import TOKEN, JobRefused, Launcher, RenderedJob, token_files
from seatrial.launch.kubernetes_job import (
    DELETE_LIMIT_S,
    OBJECTS,
    RESOURCES,
    TOKEN_LABEL,
    AttemptObjects,
    KubernetesJob,
    job_place,
    kubectl,
    label_value,
    workload_kind,
)
from seatrial.launch.kubernetes_objects import RUN_LABEL, kubernetes_objects, manifest
from seatrial.model import Job, SeatrialError, UsageError
from seatrial.util.files import atomic_write
from seatrial.util.secrets import PRIVATE
from seatrial.util.text import and_more

# Setting → the resource that it needs, the operator that brings it, and what else the user can do
_OPERATORS = {
    "kubernetes.workload is jobset": (RESOURCES["JobSet"], "JobSet", "set kubernetes.workload to job"),
    "kubernetes.workload is trainjob": (RESOURCES["TrainJob"], "Kubeflow Trainer", "set kubernetes.workload to job"),
    "kubernetes.kueue is set": ("workloads.kueue.x-k8s.io", "Kueue", "remove kubernetes.kueue"),
}
_TOKEN_VARIABLE = "SEATRIAL_TOKEN"


class KubernetesLauncher(Launcher):
    """Creates rendered objects and watches their pods."""

    name = "kubernetes"

    def unavailable_reason(self) -> str | None:
        return None  # `seatrial render` needs no cluster; require_access tests the access before the first job

    def require_access(self) -> None:
        settings = self._settings
        client, resource = kubectl(settings), RESOURCES[workload_kind(settings)]
        used_settings = [f"kubernetes.workload is {settings.kubernetes.workload}"]
        used_settings += ["kubernetes.kueue is set"] if settings.kubernetes.kueue else []
        try:
            for setting in used_settings:
                if setting in _OPERATORS:  # else Job, a part of Kubernetes itself
                    _require_operator(client, setting)
            actions = ("create", "list", "delete")
            permissions = [(action, resource) for action in actions] + [(action, "services") for action in actions]
            refused = client.refusals(*permissions, ("list", "pods"), ("get", "pods/log"))
        except KubectlError as error:
            raise UsageError(f"launcher kubernetes is not available: {error}") from None
        if refused:
            place = f"namespace {settings.kubernetes.namespace or 'of the context'}"
            raise UsageError(
                f"this user may not {', '.join(refused)} in {place}: a role with these permissions is in "
                f"deploy/kubernetes. Run first: {client.command_text('auth', 'can-i', '--list')}"
            )

    def cancel_earlier_jobs(self, folder: Path) -> Iterator[str]:
        """Only objects with the token of one of the run's attempts are deleted."""
        for path in [*token_files(folder)]:
            objects = AttemptObjects(self._settings, path.read_text(encoding="utf-8"))
            if left := objects.remaining():
                yield f"{and_more(left, 4)} of an earlier run in {folder} has not ended: deleting it"
                objects.delete()
                deadline = time.monotonic() + DELETE_LIMIT_S
                while left := objects.remaining():
                    if time.monotonic() > deadline:
                        raise SeatrialError(
                            f"an earlier run may still use nodes: {and_more(left, 8)} still exists. "
                            f"Run first: {objects.delete_command}"
                        )
                    time.sleep(0.2)
            path.unlink()

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> RenderedJob:
        text = manifest(kubernetes_objects(self._settings, job, run_dir, attempt))
        return RenderedJob(argv=(), text=text, nodes=job.nodes)

    def start(self, rendered: RenderedJob, folder: Path) -> KubernetesJob:
        client, token, objects_file = kubectl(self._settings), uuid.uuid4().hex, folder / OBJECTS
        objects = [_with_token(item, token) for item in yaml.safe_load_all(rendered.text)]
        workload = objects[-1]
        name = workload["metadata"]["name"]
        atomic_write(objects_file, manifest(tuple(objects)).encode(), mode=PRIVATE)
        atomic_write(folder / TOKEN, token.encode(), mode=PRIVATE)  # cancel_earlier_jobs finds the objects by it
        job = KubernetesJob(name, rendered.nodes, token, self._settings, folder)
        try:
            client.run("create", f"--filename={objects_file}")  # not `apply`, which would change objects of this name
        except BaseException as error:  # Ctrl-C, or some objects refused: the others may exist
            remaining = job.cancel()
            if isinstance(error, KubectlError) and error.reason == "AlreadyExists":
                command = client.command_text("get", RESOURCES[workload["kind"]], name, "--show-labels")
                raise SeatrialError(
                    f"{name} exists already and is not of this run; it is left unchanged: choose another "
                    f"--out. Run first: {command}"
                ) from None
            if isinstance(error, KubectlError):
                text = f"{error}; {remaining}" if remaining else str(error)
                failures = job_failures({str(error): ()}, job_place(self._settings))
                transient = isinstance(error, ApiUnavailable) and not remaining  # else the objects may exist
                raise JobRefused(text, failures, transient=transient) from None
            if remaining and isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(remaining) from None  # the pipeline shows this text
            raise
        return job


def _require_operator(client: Kubectl, setting: str) -> None:
    """Raise UsageError if the cluster lacks the resource that this setting needs."""
    needed_resource, operator, alternative = _OPERATORS[setting]
    plural, _, group = needed_resource.partition(".")
    if needed_resource not in client.run("api-resources", f"--api-group={group}", "--output=name").split():
        raise UsageError(
            f"{setting}, but the cluster has no {plural} of {group}: install {operator}, or {alternative}. "
            f"Run first: {client.command_text('api-resources', f'--api-group={group}')}"
        )


def _with_token(item: Any, token: str) -> Any:
    """Return an object with the token in the environment of its containers, and the token's label.

    The label is added wherever the object has the label of the run.
    """
    if isinstance(item, list):
        return [_with_token(each, token) for each in item]
    if not isinstance(item, dict):
        return item
    if item.get("name") == _TOKEN_VARIABLE:
        return {"name": _TOKEN_VARIABLE, "value": token}
    changed = {key: _with_token(value, token) for key, value in item.items()}
    if RUN_LABEL in (item.get("labels") or {}):
        changed["labels"][TOKEN_LABEL] = label_value(token)
    return changed
