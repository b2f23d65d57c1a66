"""The hardware to which a decision applies, from the jobs, measurements and facts of the record alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pydantic import JsonValue

from seatrial.config.schema import Config
from seatrial.launch import runs_remotely
from seatrial.model import Job, Measurement
from seatrial.util.text import plural


def cpu_only(jobs: Sequence[Job]) -> bool:
    """Return whether jobs ran, and none of them on GPUs."""
    return bool(jobs) and all(job.device == "cpu" for job in jobs)


def device_conflict(settings: Config, jobs: Sequence[Job], environment: Mapping[str, JsonValue]) -> str:
    """Return why the record contradicts itself on the use of GPUs; empty if it does not.

    Compares jobs that ran on this host with the GPUs of this host in ``environment``; empty for jobs on other machines.
    The judge compares jobs with measurements.
    """
    if not jobs or runs_remotely(settings):
        return ""
    gpus = _host_gpus(environment)
    if gpus is None:
        return "environment.gpu.gpus of the record is not a list of GPUs, so the tested hardware is unknown"
    if cpu_only(jobs) and gpus and settings.cluster.gpus_per_node is None:
        listed = plural(len(gpus), "GPU")
        return f"all jobs ran on CPUs, but environment.gpu lists {listed} and cluster.gpus_per_node is not 0"
    if not cpu_only(jobs) and not gpus:
        return "jobs ran on GPUs, but environment.gpu lists none"
    return ""


def tested_hardware(
    settings: Config,
    jobs: Sequence[Job],
    measurements: Iterable[Measurement],
    environment: Mapping[str, JsonValue],
    gpu_error: str,
) -> str:
    """Return the tested nodes and GPUs as text, or why GPUs were not tested."""
    expected_nodes = settings.cluster.nodes
    tested_nodes = max((job.nodes for job in jobs if job.placement != "control"), default=expected_nodes)
    nodes = plural(expected_nodes, "node")
    if tested_nodes < expected_nodes:
        nodes = f"{tested_nodes} of {expected_nodes} nodes"
    if gpu_error:
        return f"{nodes}; {gpu_error}"
    host_gpus = _host_gpus(environment) or {}
    if cpu_only(jobs):
        unused = f"0 of {len(host_gpus)} GPUs used" if host_gpus else "no GPU"
        return f"CPU ONLY: {nodes}, {unused}; GPUs and fabric are not tested"
    gpus_used = next((job.ranks_per_node for job in jobs if job.placement == "ranks"), 0)  # per node
    if not gpus_used:
        users = sorted({each.check for each in measurements if each.facts.get("device") == "cuda"})
        used = f"GPUs are given only to {', '.join(users)}" if users else "no check of this trial uses a GPU"
        return f"{nodes}; {used}"
    if runs_remotely(settings):
        cluster = "Slurm" if settings.uses_slurm else "Kubernetes" if settings.launcher == "kubernetes" else ""
        origin = f"of a {cluster} cluster" if cluster else "started by the user"
        return f"{nodes} {origin}, {plural(gpus_used, 'GPU')} each"
    subjects = {measurement.subject.rpartition("/")[2] for measurement in measurements}
    models = sorted({name for index, name in host_gpus.items() if f"gpu{index}" in subjects}) or ["unknown GPU"]
    of_all = f" of {len(host_gpus)}" if gpus_used < len(host_gpus) else ""
    unset = "" if settings.cluster.gpus_per_node else "; expected number of GPUs not set (--gpus-per-node)"
    return f"{nodes}, {gpus_used} × {' + '.join(models)}{of_all}{unset}"


def _host_gpus(environment: Mapping[str, JsonValue]) -> dict[int, str] | None:
    """Return index → name of the GPUs of the host that runs seatrial; None if the record does not list them."""
    facts = environment.get("gpu")
    gpus = facts.get("gpus") if isinstance(facts, dict) else None
    if not isinstance(gpus, list):
        return None
    names: dict[int, str] = {}
    for gpu in gpus:
        if not isinstance(gpu, dict) or not isinstance(index := gpu.get("index"), int):
            return None
        names[index] = str(gpu.get("name") or "unknown GPU")
    return names
