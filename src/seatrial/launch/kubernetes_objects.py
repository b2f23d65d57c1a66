"""The Kubernetes objects of a job: a headless Service and an Indexed Job, or a JobSet, or a TrainJob. Pure.

API versions: batch/v1 of Kubernetes 1.28 and newer, jobset.x-k8s.io/v1alpha2 (JobSet 0.12), labels and annotations of
Kueue 0.19, trainer.kubeflow.org/v1alpha1 with ``runtimePatches`` (Kubeflow Trainer 2.2 and newer).
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import yaml

from seatrial.config import kubernetes_pod
from seatrial.config.kubernetes import Kubernetes
from seatrial.config.kubernetes_pod import Object, without_empty
from seatrial.config.schema import Config
from seatrial.launch import script
from seatrial.launch.collect_logs import send_results
from seatrial.model import Job, UsageError

RUN_LABEL, JOB_LABEL, ATTEMPT_LABEL = "seatrial.dev/run", "seatrial.dev/job", "seatrial.dev/attempt"
# JobSet names pods NAME-node-0-INDEX-abcde, at most 63 characters: this leaves five digits for the index
_MAX_NAME = 44
_REPLICATED_JOB = "node"  # the runtimes of Kubeflow Trainer use this name, for their container too
_MAX_ARGUMENT_BYTES = 32 * 4096 - 1  # of one argument of a process (Linux: MAX_ARG_STRLEN), without the final zero


def kubernetes_objects(settings: Config, job: Job, run_dir: Path, attempt: int = 1) -> tuple[Object, ...]:
    """Return the objects of one attempt at a job, in the order in which they are created.

    Raises UsageError if the job file is too large for an argument of a process.
    """
    config, name = settings.kubernetes, object_name(run_dir, job.name, attempt)
    labels = {
        "app.kubernetes.io/name": "seatrial",
        RUN_LABEL: _digest(run_dir.name)[:8],
        JOB_LABEL: job.name,
        ATTEMPT_LABEL: str(attempt),
    }
    container = _container(settings, job, name, attempt)
    if config.workload == "trainjob":
        return (_train_job(settings, job, name, labels, container),)
    template = _pod_template(settings, job, labels, container)
    if config.workload == "jobset":
        return (_job_set(settings, job, name, labels, template),)
    template["spec"]["subdomain"] = name
    return _service(settings, name, labels), {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(settings, name, labels, queued=True),
        "spec": _job_spec(settings, job, template),
    }


def manifest(objects: tuple[Object, ...]) -> str:
    """Return objects as the YAML documents of one file for ``kubectl create -f``."""
    return yaml.dump_all(objects, Dumper=_Dumper, explicit_start=True, sort_keys=False, allow_unicode=True, width=120)


def object_name(run_dir: Path, job: str, attempt: int) -> str:
    """Return the name of the objects of one attempt: a DNS label, ``seatrial-4f2a91c0-ranks-1``."""
    start, end = f"seatrial-{_digest(run_dir.name)[:8]}-", f"-{attempt}"
    space = _MAX_NAME - len(start) - len(end)
    if len(job) > space:
        job = f"{job[: space - 5]}-{_digest(job)[:4]}"
    return f"{start}{job}{end}"


def _metadata(settings: Config, name: str, labels: dict[str, str], *, queued: bool = False) -> Object:
    """Return the metadata of an object; ``queued``: whether Kueue, if it is used, admits the object."""
    kueue = settings.kubernetes.kueue
    queue = {"kueue.x-k8s.io/queue-name": kueue.queue} if kueue and queued else {}
    return without_empty({"name": name, "namespace": settings.kubernetes.namespace, "labels": {**labels, **queue}})


def _service(settings: Config, name: str, labels: dict[str, str]) -> Object:
    """Return the Service that gives each pod a DNS name, even before the pod is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(settings, name, labels),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels},
    }


def _job_spec(settings: Config, job: Job, template: Object) -> Object:
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        # a second start would hide a fault
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "activeDeadlineSeconds": _deadline_s(settings, job),
        "template": template,
    }


def _deadline_s(settings: Config, job: Job) -> int:
    """Return the seconds after which Kubernetes ends the job; the time in which its pods are pending counts too."""
    return math.ceil(job.requested_s + settings.kubernetes.queue_s)


def _job_set(settings: Config, job: Job, name: str, labels: dict[str, str], template: Object) -> Object:
    replicated = {
        "name": _REPLICATED_JOB,
        "replicas": 1,
        "template": {"metadata": {"labels": labels}, "spec": _job_spec(settings, job, template)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(settings, name, labels, queued=True),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [replicated],
        },
    }


def _train_job(settings: Config, job: Job, name: str, labels: dict[str, str], container: Object) -> Object:
    """Return a TrainJob: its trainer has image, command and variables; a patch of the runtime has all other fields."""
    pod = _pod_template(settings, job, labels, {})
    # PodSpecPatch of Kubeflow Trainer; a pod has 30 s from SIGTERM to SIGKILL by default
    patchable = ("imagePullSecrets", "nodeSelector", "tolerations", "affinity", "securityContext", "volumes")
    spec = {key: pod["spec"][key] for key in patchable if key in pod["spec"]}
    if settings.kubernetes.service_account:
        spec["serviceAccountName"] = settings.kubernetes.service_account
    spec["containers"] = [{key: container[key] for key in ("name", "volumeMounts", "securityContext")}]
    replicated = {
        "name": _REPLICATED_JOB,
        "template": {"spec": {"template": {"metadata": pod["metadata"], "spec": spec}}},
    }
    trainer = {key: container[key] for key in ("image", "command", "args", "env")}
    if "resources" in container:
        trainer["resourcesPerNode"] = container["resources"]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(settings, name, labels, queued=True),
        "spec": {
            "runtimeRef": {"name": settings.kubernetes.runtime},
            "activeDeadlineSeconds": _deadline_s(settings, job),
            "trainer": {**trainer, "numNodes": job.nodes, "numProcPerNode": job.ranks_per_node},
            "runtimePatches": [
                {
                    "manager": "seatrial.dev/launcher",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
                }
            ],
        },
    }


def _pod_template(settings: Config, job: Job, labels: dict[str, str], container: Object) -> Object:
    spec = {
        **kubernetes_pod.pod_spec(settings.kubernetes, container),
        "affinity": _affinity(settings.kubernetes, job, labels),
    }
    metadata = {"labels": labels, "annotations": kubernetes_pod.pod_annotations(settings.kubernetes)}
    return {"metadata": without_empty(metadata), "spec": spec}


def _affinity(config: Kubernetes, job: Job, labels: dict[str, str]) -> Object:
    """Return the affinity: at most one pod of the run per node, on nodes that the trial or the job names, if any."""
    one_per_node = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {RUN_LABEL: labels[RUN_LABEL]}},
    }
    excluded = [_name_is("NotIn", node) for node in job.exclude.split(",") if node]
    # a node must match one of the terms, and all fields of this term; a field takes one name
    listed = config.nodes or [node for node in job.nodelist.split(",") if node]
    terms = [{"matchFields": [_name_is("In", node), *excluded]} for node in listed]
    if excluded and not terms:
        terms = [{"matchFields": excluded}]
    nodes = {"nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": terms}}} if terms else {}
    return {**nodes, "podAntiAffinity": {_REQUIRED: [one_per_node]}}


_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def _name_is(operator: str, node: str) -> Object:
    return {"key": "metadata.name", "operator": operator, "values": [node]}


def _container(settings: Config, job: Job, name: str, attempt: int) -> Object:
    config, job_file = settings.kubernetes, job.model_dump_json(indent=2)
    if (size := len(job_file.encode())) > _MAX_ARGUMENT_BYTES:
        raise UsageError(
            f"job {job.name}: its description has {size} bytes, but Linux passes at most {_MAX_ARGUMENT_BYTES} bytes "
            "to a container as one argument: run fewer checks (--only), or set cluster.topology to null"
        )
    return {
        **kubernetes_pod.container(config, job.expected_gpus),
        "command": ["bash", "-c"],
        "args": [
            kubernetes_pod.literal_argument(text)
            for text in (_pod_script(settings, job, name, attempt), "seatrial", job_file)
        ],
        "env": _env(config, name),
    }


def _pod_script(settings: Config, job: Job, name: str, attempt: int) -> str:
    return script.job_script(
        "pod.sh.j2",
        settings,
        job,
        attempt,
        image=kubernetes_pod.image(settings.kubernetes),
        mode="750" if settings.group else "700",
        port=rendezvous_port(name),
        rendezvous_key=_digest(name)[:16],
        rendezvous_s=math.ceil(settings.kubernetes.queue_s),
        # with the host network, a pod has the host name of its node
        dns_name="" if settings.kubernetes.overlay.host_network else _dns_name(settings.kubernetes, name),
        send_results=send_results(job.nodes),
    )


def rendezvous_port(name: str) -> int:
    """Return the rendezvous port of the job ``name``: a hash, since with host_network jobs share a node's ports."""
    return 20000 + int(_digest(name), 16) % 10000


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()


def _dns_name(config: Kubernetes, name: str, index: str = "$JOB_COMPLETION_INDEX") -> str:
    """Return the name of the pod ``index`` in cluster DNS, through the headless Service ``name``."""
    return f"{name}-{index}.{name}" if config.workload == "job" else f"{name}-{_REPLICATED_JOB}-0-{index}.{name}"


def _env(config: Kubernetes, name: str) -> list[Object]:
    """Return the variables of the container. The token is empty until the job is started."""
    values = {
        "SEATRIAL_TOKEN": "",
        "SEATRIAL_SCRATCH": kubernetes_pod.results_path(config),
        "SEATRIAL_MASTER": _dns_name(config, name, index="0"),
        # torch needs the user's home and name, which are missing for a user that the image does not know
        "HOME": "/tmp",
        "USER": "seatrial",
    }
    fields = {"SEATRIAL_NODE": "spec.nodeName", "SEATRIAL_POD": "metadata.name"}
    digest = kubernetes_pod.image(config).partition("@")[2]
    return [
        *({"name": key, "value": value} for key, value in values.items()),
        *({"name": key, "valueFrom": {"fieldRef": {"fieldPath": field}}} for key, field in fields.items()),
        *([{"name": "SEATRIAL_IMAGE_ID", "value": digest}] if digest else []),
    ]


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no anchors, which not every YAML parser supports."""

    def ignore_aliases(self, data: object) -> bool:
        del data
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
