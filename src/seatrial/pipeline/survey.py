"""What discover found on this machine, and what follows for a trial: its devices, its identity, its obstacles."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from seatrial import __version__
from seatrial.config.schema import Config
from seatrial.discover import gpu, host, slurm
from seatrial.launch import runs_remotely, uses_slurm
from seatrial.model import Machine, UsageError
from seatrial.pipeline.plan import Devices, Plan


@dataclass(frozen=True)
class Survey:
    """What discover found on this machine."""

    facts: dict[str, Any]
    gpus: gpu.GpuFacts

    def devices(self, settings: Config) -> Devices:
        """What the planner may use. GPUs that should be there and cannot be used are trouble, never a CPU run."""
        promised = settings.cluster.gpus_per_node
        if uses_slurm(settings):
            offered = slurm.gpus_per_node(settings.slurm.partition) if promised is None else promised
            return Devices(offered, promised=offered)
        if runs_remotely(settings):
            if promised is None:
                raise UsageError("nobody but you knows how many GPUs a node has: say so with --gpus-per-node")
            return Devices(promised, promised=promised)
        if promised == 0:
            return Devices(0)
        visible = self.visible(settings)
        usable = len(visible)
        if sliced := [f"gpu{one.index}" for one in visible[:promised] if one.mig_mode]:
            why = "in MIG mode: CUDA gives a process one slice, whatever there is, and slices are not measured"
            mend = "nvidia-smi -i INDEX -mig 0 and a reset undo it; CUDA_VISIBLE_DEVICES leaves such GPUs out"
            return Devices(usable, f"{', '.join(sliced)} {why}. {mend}")
        if promised is not None and usable < promised:
            return Devices(
                usable,
                f"{promised} GPUs promised, {usable} usable: {self.gpus.nvml_unavailable or 'see gpu.inventory'}",
            )
        if not usable and (self.gpus.gpus or self.gpus.pci_devices):
            why = self.gpus.nvml_unavailable or "CUDA_VISIBLE_DEVICES hides them all"
            return Devices(0, f"{len(self.gpus.pci_devices)} NVIDIA GPUs on the PCI bus, none usable: {why}")
        if not usable and self.gpus.detection_error:
            return Devices(0, f"{self.gpus.detection_error}; --gpus-per-node 0 says that there are none")
        return Devices(usable)

    def machine(self, settings: Config) -> Machine:
        """Whose figures these will be. Where jobs run elsewhere, each measurement names its node itself."""
        if runs_remotely(settings):
            return Machine(host="", gpus=())
        gpus = tuple(one.uuid or f"gpu{one.index}" for one in self.visible(settings))
        return Machine(host=socket.gethostname(), gpus=gpus, versions=self._system())

    def visible(self, settings: Config) -> tuple[gpu.Gpu, ...]:
        """The GPUs that the workers may use: the trial's own variables reach them too."""
        return gpu.cuda_visible(self.gpus, {**os.environ, **settings.env})

    def models(self, settings: Config) -> tuple[str, ...]:
        """NVML's names of the GPUs that will be measured, one for each; none where jobs run elsewhere, or unnamed."""
        names = [] if runs_remotely(settings) else [one.name for one in self.visible(settings)]
        used = names[: settings.cluster.gpus_per_node] if settings.cluster.gpus_per_node is not None else names
        return tuple(name for name in used if name) if all(used) else ()

    def gpu_error(self, settings: Config) -> str:
        """Why not every GPU is used that nobody set aside; empty where all are. Fewer GPUs skip what needs several."""
        devices = self.devices(settings)
        if devices.trouble:
            return devices.trouble
        chosen = settings.cluster.gpus_per_node is not None or "CUDA_VISIBLE_DEVICES" in {*os.environ, *settings.env}
        if chosen or runs_remotely(settings) or self.gpus.installed_gpus <= devices.usable_gpus:
            return ""
        why = "; ".join([*self.gpus.lost, *self.gpus.not_usable])
        return f"{devices.usable_gpus} of the {self.gpus.installed_gpus} GPUs of this machine can be used: {why}"

    def _system(self) -> tuple[str, ...]:
        """What else makes another machine of one with this name, or with these GPUs."""
        found = self.facts.get("host", {})
        told = {
            "kernel": found.get("os", {}).get("kernel"),
            # a GPU's UUID says it better, and a container that is made anew may have another one
            "machine": None if self.gpus.gpus else found.get("os", {}).get("machine_id"),
            "driver": self.gpus.driver,
            "torch": found.get("software", {}).get("torch"),
            "seatrial": __version__,
        }
        return tuple(f"{name} {version}" for name, version in told.items() if version)


def discover() -> Survey:
    """Read-only facts of this machine."""
    gpus = gpu.read_with_timeout()
    facts = {"host": host.read().model_dump(mode="json"), "gpu": gpus.model_dump(mode="json")}
    return Survey(facts, gpus)


def cpu_only(settings: Config, survey: Survey) -> bool:
    """Whether no GPU has a part in the trial, and none is missing."""
    devices = survey.devices(settings)
    return not devices.trouble and not devices.usable_gpus


def scope_of(settings: Config, plan: Plan, survey: Survey) -> str:
    """Of what the decision speaks, and of what it does not."""
    nodes = f"{settings.cluster.nodes} node" + ("s" if settings.cluster.nodes > 1 else "")
    devices = survey.devices(settings)
    if devices.trouble:
        return f"{nodes}; {devices.trouble}"
    if not devices.usable_gpus:
        there = (
            f"no GPU used, though there are {survey.gpus.installed_gpus}" if survey.gpus.installed_gpus else "no GPU"
        )
        return f"REHEARSAL: {nodes}, {there}; this says nothing about GPUs or a fabric"
    used = next((job.ranks_per_node for job in plan.jobs if job.placement == "ranks"), 0)
    if not used:
        return f"{nodes}; no check of this trial computes on a GPU"
    if uses_slurm(settings):
        return f"{nodes} of a Slurm cluster, {used} GPUs each"
    if runs_remotely(settings):
        return f"{nodes} of a person's choice, {used} GPUs each"
    visible = survey.visible(settings)
    models = " + ".join(sorted({one.name or "unknown GPU" for one in visible[:used]}))
    rest = f" of {len(visible)}" if used < len(visible) else ""
    unpromised = "" if settings.cluster.gpus_per_node else "; nobody said how many were promised (--gpus-per-node)"
    return f"{nodes}, {used} × {models}{rest}{unpromised}"
