"""Facts of this host, and values that a trial derives from them: usable GPUs, machine identity, GPU errors."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from seatrial import __version__
from seatrial.config import topology
from seatrial.config.schema import Config, JobPlacement
from seatrial.discover import gpu, slurm
from seatrial.discover.nvml import Gpu
from seatrial.discover.slurm_nodes import candidate_nodes, gpus_per_node
from seatrial.launch import runs_remotely
from seatrial.model import Machine, SeatrialError, Topology, UsageError
from seatrial.pipeline.plan import NodeGpus
from seatrial.util.text import and_more, plural

_MAX_NAMED = 8


@dataclass(frozen=True)
class ThisHost:
    """Discovered facts of this host."""

    facts: dict[str, Any]
    gpus: gpu.GpuFacts

    def node_gpus(self, settings: Config) -> NodeGpus:
        """Return the GPUs per node. Missing or unusable GPUs of this host give a ``gpu_error``, never a CPU-only run.

        Raises UsageError if the number of GPUs per node is unknown, SlurmUnavailable if Slurm cannot be queried for it.
        """
        expected = settings.cluster.gpus_per_node
        if settings.uses_slurm:
            configured = _slurm_gpus(settings.slurm) if expected is None else expected
            return NodeGpus(configured, expected_gpus=configured)
        if runs_remotely(settings):
            if expected is None:
                raise UsageError(f"--gpus-per-node is required with --launcher {settings.launcher}")
            return NodeGpus(expected, expected_gpus=expected)
        if expected == 0:
            return NodeGpus(0)
        visible = self.visible_gpus(settings)
        usable_count = len(visible)
        if mig_gpus := [f"gpu{device.index}" for device in visible[:expected] if device.mig_mode]:
            fix = "disable MIG (nvidia-smi -i INDEX -mig 0, then reset) or exclude them by CUDA_VISIBLE_DEVICES"
            return NodeGpus(usable_count, f"{', '.join(mig_gpus)}: MIG enabled; MIG instances are not supported; {fix}")
        if expected is not None and usable_count < expected:
            reason = self.gpus.nvml_unavailable or "see the GPU inventory in the report"
            return NodeGpus(usable_count, f"{plural(expected, 'GPU')} expected, {usable_count} usable: {reason}")
        if not usable_count and (self.gpus.gpus or self.gpus.pci_devices):
            reason = self.gpus.nvml_unavailable or "CUDA_VISIBLE_DEVICES excludes all of them"
            return NodeGpus(
                0, f"{plural(len(self.gpus.pci_devices), 'NVIDIA GPU')} on the PCI bus, none usable: {reason}"
            )
        if not usable_count and self.gpus.detection_error:
            return NodeGpus(0, f"{self.gpus.detection_error}; if this host has no GPU, set --gpus-per-node 0")
        return NodeGpus(usable_count)

    def topology(self, settings: Config) -> Topology | None:
        """Return the switches of the nodes: from ``cluster.topology``, else from Slurm; None if unknown.

        Slurm is not queried for one node. Raises UsageError if the file is invalid, names nodes that Slurm does not
        have, or lacks nodes of the trial's partition or node list.
        """
        file = settings.cluster.topology
        from_file = topology.read_file(file) if file else None
        if not settings.uses_slurm or settings.cluster.nodes == 1:
            return from_file
        if from_file is None:
            return slurm.topology()
        if not slurm.installed():  # `seatrial render` on another machine
            return from_file
        if unknown := sorted(from_file.nodes - {node.name for node in slurm.nodes()}):
            raise UsageError(f"topology {file}: Slurm has no node {and_more(unknown, _MAX_NAMED)}. Run first: sinfo -N")
        candidates = candidate_nodes(settings.slurm)
        if missing := [node.name for node in candidates.nodes if node.name not in from_file.nodes]:
            place = "--nodelist" if settings.slurm.nodelist else f"partition {candidates.partition}"
            raise UsageError(
                f"topology {file}: {and_more(missing, _MAX_NAMED)} of {place} missing: add them to the file"
            )
        return from_file

    def max_job_s(self, settings: Config) -> float | None:
        """Return the seconds that Slurm's partition allows a job; None without a limit, or if it cannot be read."""
        if not (settings.uses_slurm and slurm.installed()):
            return None
        try:
            partition = slurm.partition_of_jobs(settings.slurm.partition)
        except (SeatrialError, ValueError):
            return None  # sbatch will report the error
        limit_s = partition.max_time_s if partition else None
        return limit_s if isinstance(limit_s, int) else None

    def machine(self, settings: Config) -> Machine:
        """Return the identity of this machine; with empty fields if jobs run on other machines."""
        if runs_remotely(settings):
            return Machine(host="", gpus=())
        gpus = tuple(device.uuid or f"gpu{device.index}" for device in self.visible_gpus(settings))
        return Machine(host=socket.gethostname(), gpus=gpus, versions=self._versions())

    def visible_gpus(self, settings: Config) -> tuple[Gpu, ...]:
        """Return the GPUs that CUDA_VISIBLE_DEVICES of the trial's ``env``, else of this process, selects."""
        return gpu.cuda_visible(self.gpus, {**os.environ, **settings.env})

    def gpu_models(self, settings: Config) -> tuple[str, ...]:
        """Return the NVML name of each GPU under test; empty if jobs run on other machines, or a name is unknown."""
        names = [] if runs_remotely(settings) else [device.name for device in self.visible_gpus(settings)]
        used = names[: settings.cluster.gpus_per_node] if settings.cluster.gpus_per_node is not None else names
        return tuple(name for name in used if name) if all(used) else ()

    def gpu_error(self, settings: Config) -> str:
        """Return why some GPUs of this host are not tested; empty if all are, or if the user selected GPUs."""
        node_gpus = self.node_gpus(settings)
        if node_gpus.gpu_error:
            return node_gpus.gpu_error
        selected = settings.cluster.gpus_per_node is not None or "CUDA_VISIBLE_DEVICES" in {*os.environ, *settings.env}
        if selected or runs_remotely(settings) or self.gpus.installed_gpus <= node_gpus.usable_gpus:
            return ""
        unusable = [f"PCI {address}" for address in self.gpus.unusable_pci_devices]
        reason = "; ".join([*self.gpus.failed_gpus, *unusable])
        return f"{node_gpus.usable_gpus} of {self.gpus.installed_gpus} GPUs of this host are usable: {reason}"

    def _versions(self) -> tuple[str, ...]:
        """Return versions and the machine id, by which --resume detects another machine."""
        host_facts = self.facts.get("host", {})
        versions = {
            "kernel": host_facts.get("os", {}).get("kernel"),
            # only on CPU hosts: others are identified by GPU UUIDs, which stay the same in a new container
            "machine": None if self.gpus.gpus else host_facts.get("os", {}).get("machine_id"),
            "driver": self.gpus.driver,
            "torch": host_facts.get("software", {}).get("torch"),
            "seatrial": __version__,
        }
        return tuple(f"{name} {version}" for name, version in versions.items() if version)


def _slurm_gpus(placement: JobPlacement) -> int:
    """Return Slurm's number of GPUs per node. Raises UsageError, or SlurmUnavailable with the reason for the query."""
    try:
        return gpus_per_node(placement)
    except slurm.SlurmUnavailable as error:
        question = (
            "cluster.gpus_per_node (--gpus-per-node) is not set, and Slurm, which starts jobs on several nodes, "
            "cannot be queried for it"
        )
        raise type(error)(f"{question}: {error}") from error


def discover() -> ThisHost:
    """Return read-only facts of this host."""
    from seatrial.discover import host  # imported here: a preview of a run on other machines does not need it

    gpus = gpu.read_with_timeout()
    facts = {"host": host.read().model_dump(mode="json"), "gpu": gpus.model_dump(mode="json")}
    return ThisHost(facts, gpus)
