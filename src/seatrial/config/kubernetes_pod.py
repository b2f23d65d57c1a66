"""The pod that the settings of the Kubernetes launcher describe, for jobs and for probes. Pure."""

from __future__ import annotations

import re
from typing import Any

from seatrial.config.kubernetes import GPU_RESOURCE, Kubernetes

# Seconds from SIGTERM to SIGKILL: the worker ends within 4 s, then its last results are sent
GRACE_S = 30
_RESULTS_PATH = "/seatrial"
Object = dict[str, Any]


def pod_spec(config: Kubernetes, container: Object) -> Object:
    """Return the spec of a pod with this container."""
    overlay = config.overlay
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # no variables for each Service of the namespace
        "serviceAccountName": config.service_account,
        "imagePullSecrets": [{"name": name} for name in config.image_pull_secrets],
        "hostNetwork": overlay.host_network or None,
        "dnsPolicy": "ClusterFirstWithHostNet" if overlay.host_network else None,
        "priorityClassName": overlay.priority_class,
        "runtimeClassName": overlay.runtime_class,
        "schedulerName": overlay.scheduler,
        "nodeSelector": config.node_selector,
        "tolerations": [toleration.model_dump(exclude_none=True) for toleration in config.tolerations],
        "securityContext": _pod_security(config),
        "containers": [container],
        "volumes": _volumes(config),
    }
    return without_empty(spec)


def pod_annotations(config: Kubernetes) -> dict[str, str]:
    """Return the annotations of a pod: those of the overlay, and the topology level for Kueue."""
    kueue = config.kueue
    topology = {
        "kueue.x-k8s.io/podset-required-topology": kueue.required_topology if kueue else None,
        "kueue.x-k8s.io/podset-preferred-topology": kueue.preferred_topology if kueue else None,
    }
    return without_empty({**topology, **config.overlay.annotations})


def container(config: Kubernetes, gpus: int | None) -> Object:
    """Return the container of a pod with this number of GPUs, without command and environment."""
    resources = dict(config.overlay.resources)
    if gpus:
        resources[GPU_RESOURCE] = str(gpus)
    fields = {
        "name": container_name(config),
        "image": image(config),
        "resources": {"requests": resources, "limits": resources} if resources else None,
        "securityContext": _container_security(config),
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "results", "mountPath": results_path(config)},
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return without_empty(fields)


def container_name(config: Kubernetes) -> str:
    """Return the name of the container; in a TrainJob it is that of Kubeflow Trainer's runtimes."""
    return "node" if config.workload == "trainjob" else "seatrial"


def image(config: Kubernetes) -> str:
    """Return the name of the image; with ``registry``, the name of its copy in this mirror."""
    name = config.image or ""
    if config.registry is None:
        return name
    prefix, slash, path = name.partition("/")
    if not slash:
        return f"{config.registry}/library/{name}"  # Docker Hub has images without a prefix in the folder library
    has_registry = "." in prefix or ":" in prefix or prefix == "localhost"
    return f"{config.registry}/{path if has_registry else name}"


def results_path(config: Kubernetes) -> str:
    """Return the folder of the container where results are written: on the claim, else on the node."""
    return config.claim.path if config.claim else _RESULTS_PATH


def literal_argument(text: str) -> str:
    """Return ``text`` escaped for a container's argument: Kubernetes expands ``$(NAME)``, and ``$$`` means ``$``."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _container_security(config: Kubernetes) -> Object:
    if config.overlay.privileged:
        return {"privileged": True}
    added = {"add": list(config.overlay.capabilities)} if config.overlay.capabilities else {}
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], **added}}


def _pod_security(config: Kubernetes) -> Object:
    user = config.overlay.run_as_user
    # the group makes the volume of a claim writable for the user
    group = {"fsGroup": user, "fsGroupChangePolicy": "OnRootMismatch"} if config.claim else {}
    seccomp = {} if config.overlay.privileged else {"seccompProfile": {"type": "RuntimeDefault"}}
    return {"runAsUser": user, "runAsNonRoot": user != 0, **group, **seccomp}


def _volumes(config: Kubernetes) -> list[Object]:
    claim = config.claim
    results: Object = {"persistentVolumeClaim": {"claimName": claim.name}} if claim else {"emptyDir": {}}
    memory = {"medium": "Memory", "sizeLimit": config.shm_size}
    return [{"name": "shm", "emptyDir": memory}, {"name": "results", **results}]


def without_empty(fields: Object) -> Object:
    """Return ``fields`` without those that are None, an empty list or an empty mapping."""
    return {key: value for key, value in fields.items() if value not in (None, [], {})}
