"""Reads count, model, health, link width and processes of all GPUs of a node from NVML, without load.

The PCIe link generation is recorded but not judged, as an idle GPU lowers it to save power; the width stays constant.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

from pydantic import JsonValue

from seatrial.checks.cause import Cause
from seatrial.checks.check import Check, Context, Options, SkipIf, facts
from seatrial.checks.declare import Answers, absent, fact, metric, unreadable, value, warning
from seatrial.discover import gpu as discover
from seatrial.discover import nvlinks
from seatrial.discover.gpu import GpuFacts
from seatrial.discover.nvml import Gpu
from seatrial.model import GPUS_USED, NotApplicable, Phase, Scope, SeatrialError

_HARDWARE_SLOWDOWN = {"hardware slowdown", "hardware thermal slowdown", "hardware power brake"}
# Fields of Gpu that a GPU must return if another GPU of its model does; otherwise readings_failed reports it as faulty.
_REQUIRED = re.compile(
    r"ecc_|rows_|pcie_width|nvlinks\[\d+]$|fabric|clocks_event_reasons|power_(limit|default)|memory_|processes"
)
# Field of GpuFacts → fact, where their names differ
_FACT_NAMES = {
    "failed_gpus": "gpus_lost",
    "permission_denied": "gpus_permission_denied",
    "pci_devices": "pci_gpus",
    "not_assigned": "pci_gpus_not_assigned",
}
_NO_REASON = "no reason from NVML (for NVLinks: all links may be down, or no NVLink bridge is installed)"


def measure(context: Context, _options: Options) -> Answers:
    """Yield GPU counts of the node, then the metrics of each GPU in use: all, or those in CUDA_VISIBLE_DEVICES.

    Raises NotApplicable without an installed or expected GPU, and UsageError for an invalid CUDA_VISIBLE_DEVICES.
    Raises SeatrialError if GPUs cannot be detected and their number is not configured.
    """
    inventory = discover.read(context.root)
    usable, expected_gpus = len(inventory.gpus), context.expected_gpus or 0
    if inventory.detection_error and context.expected_gpus is None:
        raise SeatrialError(inventory.detection_error)
    if not inventory.gpus and not inventory.installed_gpus and not expected_gpus:
        reason = f" ({inventory.nvml_unavailable})" if inventory.nvml_unavailable else ""
        option_state = "is not set" if context.expected_gpus is None else "is 0"
        raise NotApplicable(f"no NVIDIA GPU on this machine, and --gpus-per-node {option_state}{reason}")
    known = _inventory_facts(inventory)
    yield from facts(known)
    # If GPUs are expected, the PCI bus does not count: it also shows GPUs that the scheduler has not allocated.
    required = max(expected_gpus, usable + len(inventory.failed_gpus)) if expected_gpus else inventory.installed_gpus
    evidence = {name: known.get(name) for name in ("nvml_unavailable", "gpus_lost", "pci_gpus_not_usable")}
    yield value("gpus_missing", required - usable, evidence=evidence)
    used = discover.cuda_visible(inventory, os.environ)
    evidence = {"cuda_visible_devices": known.get("cuda_visible_devices")}
    yield value("gpus_hidden", max(0, min(expected_gpus, usable) - len(used)), evidence=evidence)
    yield fact(GPUS_USED, [gpu.index for gpu in used])
    processes = _foreign_processes(used)
    yield fact("foreign_processes", [*chain.from_iterable(processes.values())])
    if not used:
        yield absent("*", "no usable GPU")
        return
    yield value("gpu_models", len({gpu.name for gpu in used}))
    for gpu in used:
        yield from _gpu_metrics(gpu, used, processes[gpu.index], f"{context.node}/gpu{gpu.index}")


def _inventory_facts(inventory: GpuFacts) -> dict[str, Any]:
    recorded = inventory.model_dump(mode="json", exclude_none=True)
    values = {_FACT_NAMES.get(field, field): value for field, value in recorded.items()} | {
        "pci_gpus_not_usable": list(inventory.unusable_pci_devices),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cuda_order": discover.cuda_order_warning(inventory, os.environ),
    }
    return {name: value for name, value in values.items() if value not in (None, [], {})}


def _gpu_metrics(gpu: Gpu, gpus: Sequence[Gpu], foreign: list[JsonValue], subject: str) -> Answers:
    """Yield the value of each metric of ``gpu``, or why it has none.

    ``gpus``: all GPUs in use, with which some metrics compare it. ``foreign``: foreign processes on ``gpu``.
    """
    same_model = [other for other in gpus if other.name == gpu.name]
    required = {field for field in gpu.unreadable if _REQUIRED.match(field) and field not in gpu.unsupported}
    failed = sum(any(field not in other.unreadable for other in same_model) for field in required)
    yield value("readings_failed", failed, subject)
    has_fabric = nvlinks.expects_fabric(gpu, gpus)
    unsupported = {*gpu.unsupported} if has_fabric or "fabric" in required else {*gpu.unsupported, "fabric"}
    readings = _readings(gpu, same_model) | {
        "fabric_ready": ("fabric", nvlinks.fabric_ready(gpu) if has_fabric else None),
        "foreign_processes": ("processes", None if gpu.processes is None else len(foreign)),
    }
    for name, (field, reading) in readings.items():
        error = next((text for key, text in gpu.unreadable.items() if key.startswith(field)), _NO_REASON)
        if reading is not None:
            yield value(name, reading, subject, evidence=foreign if name == "foreign_processes" else None)
        elif field in unsupported:
            yield absent(name, f"the GPU does not report {field.replace('_', ' ')}", subject)
        elif failed:
            yield absent(name, f"reading failed on this GPU ({error}), see readings_failed", subject)
        else:
            yield unreadable(name, error, subject)


def _readings(gpu: Gpu, same_model: Sequence[Gpu]) -> dict[str, tuple[str, float | None]]:
    """Metric → the field of ``gpu`` that it needs, and its value; None: not readable or not supported."""
    remapped_rows = (gpu.rows_remapped_correctable, gpu.rows_remapped_uncorrectable)
    repair = "retirement_pending" if "remap_pending" in gpu.unsupported else "remap_pending"
    reasons = gpu.clocks_event_reasons
    # the enforced limit includes limits that are set by other tools
    power_limit = gpu.power_limit_w if gpu.power_enforced_w is None else gpu.power_enforced_w
    return {
        "ecc_enabled": ("ecc_mode", gpu.ecc_mode),
        "ecc_uncorrected": ("ecc_uncorrected", gpu.ecc_uncorrected),
        "repair_pending": (repair, gpu.retirement_pending if gpu.remap_pending is None else gpu.remap_pending),
        "remap_failed": ("remap_pending", gpu.remap_failed),
        "rows_remapped": ("remap_pending", None if None in remapped_rows else sum(filter(None, remapped_rows))),
        "rows_remapped_uncorrectable": ("remap_pending", gpu.rows_remapped_uncorrectable),
        "pcie_width_lost": ("pcie_width", _shortfall(gpu.pcie_width, gpu.pcie_width_max)),
        "hardware_slowdown": (
            "clocks_event_reasons",
            None if reasons is None else not _HARDWARE_SLOWDOWN.isdisjoint(reasons),
        ),
        "thermal_slowdown": (
            "clocks_event_reasons",
            None if reasons is None else "software thermal slowdown" in reasons,
        ),
        "persistence": ("persistence_mode", gpu.persistence_mode),
        "mig_enabled": ("mig_mode", gpu.mig_mode),
        "power_limit_reduced": ("power_default_w", _shortfall(power_limit, gpu.power_default_w)),
        "memory_used_bytes": ("memory_total_bytes", gpu.memory_used_bytes),
        "nvlinks_down": ("nvlinks", nvlinks.links_down(gpu, same_model)),
        "nvlinks_missing": ("nvlinks", nvlinks.links_missing(gpu, same_model)),
    }


def _shortfall(value: float | None, maximum: float | None) -> float | None:
    return None if value is None or maximum is None else max(0, maximum - value)


def _foreign_processes(gpus: Sequence[Gpu]) -> dict[int, list[JsonValue]]:
    """GPU → its compute processes that are neither this worker nor its children; ``memory`` in bytes."""
    import psutil

    worker = psutil.Process()
    seatrial_pids = {worker.pid, *(child.pid for child in worker.children(recursive=True))}
    names = {process.pid: process.info["name"] for process in psutil.process_iter(["name"])}
    hidden = "not visible: in another container, or ended"  # NVML may return a PID of the host's namespace
    return {
        gpu.index: [
            {"gpu": gpu.index, "pid": each.pid, "name": names.get(each.pid, hidden), "memory": each.memory}
            for each in gpu.processes or ()
            if each.kind == "compute" and each.pid not in seatrial_pids
        ]
        for gpu in gpus
    }


_gpu_metric, _gpu_warning = partial(metric, per="gpu"), partial(warning, per="gpu")
_ALL_GPU_CHECKS = ("device.*", "transfer.*", "collectives.*", "train.*")
_QUERY_PROCESSES = "nvidia-smi --id={gpu} --query-compute-apps=pid,process_name,used_memory --format=csv"
_LIST_PROCESSES = "ps -o pid,user,lstart,args -p {pids}"

CHECK = Check(
    name="gpu.inventory",
    title="GPU inventory: count, models, health, processes",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    measure=measure,
    declared=(
        metric(
            "gpus_missing",
            "== 0 GPUs",
            "an expected GPU, or a GPU on the PCI bus, is not usable; the facts name the GPU and NVML's error",
            "nvidia-smi -L; lspci -d 10de:; dmesg | grep -iE 'NVRM|Xid'. Driver not loaded, or version mismatch: "
            "reinstall or reboot. Xid 79, lost or failed to start: power-cycle the node, then reseat or replace the "
            "GPU. In a container: start the container with --gpus all",
        ),
        metric(
            "gpus_hidden",
            "== 0 GPUs",
            "CUDA_VISIBLE_DEVICES lists fewer GPUs than expected",
            "unset CUDA_VISIBLE_DEVICES where seatrial starts, or set --gpus-per-node to the number of GPUs that it "
            "lists",
            cause=Cause(
                id="gpus_hidden",
                place="node",
                explains=_ALL_GPU_CHECKS,
                wrong_results=True,
                first_command="env | grep CUDA_VISIBLE_DEVICES",
                action="fix-environment",
            ),
        ),
        warning(
            "gpu_models",
            "<= 1 models",
            "different GPU models in one node: all ranks wait for the slowest model",
            "nvidia-smi -L; choose GPUs of one model with CUDA_VISIBLE_DEVICES (and CUDA_DEVICE_ORDER=PCI_BUS_ID)",
        ),
        _gpu_metric(
            "readings_failed",
            "== 0 readings",
            "NVML returns an error for this GPU and a value for another GPU of the same model: GPU or firmware fault",
            "nvidia-smi -q -i INDEX; dmesg | grep -i Xid; reset the idle GPU (nvidia-smi -r -i INDEX) or replace it",
        ),
        _gpu_metric(
            "ecc_uncorrected",
            "== 0 errors",
            "uncorrectable ECC errors since the driver was loaded: they terminate processes, and the memory is failing",
            "nvidia-smi -q -d ECC,ROW_REMAPPER -i INDEX; drain the node, reset the GPU, run dcgmi diag -r 3; if "
            "errors return, replace the GPU",
        ),
        _gpu_warning(
            "ecc_enabled",
            "yes",
            "without ECC a flipped bit in GPU memory corrupts training silently",
            "nvidia-smi -i INDEX -e 1, then reset the GPU or reboot",
        ),
        _gpu_metric(
            "repair_pending",
            "no",
            "a row remap or page retirement is pending until the next GPU reset (NVIDIA, GPU memory error management)",
            "drain the node, then nvidia-smi --gpu-reset -i INDEX, or reboot",
        ),
        _gpu_metric(
            "remap_failed",
            "no",
            "row remapping failed, no spare row left: an RMA criterion of NVIDIA",
            "nvidia-smi -q -d ROW_REMAPPER -i INDEX; replace the GPU",
        ),
        _gpu_metric(
            "rows_remapped",
            "<= 10 rows",
            "83.3 % of nodes with more than 10 remapped rows had a performance regression later, 5.6 % of nodes with 1 "
            "to 10 (SuperBench/Anubis, arXiv 2402.06194)",
            "nvidia-smi -q -d ROW_REMAPPER -i INDEX; run dcgmi diag -r 3; request a replacement from the vendor",
        ),
        _gpu_warning(
            "rows_remapped_uncorrectable",
            "== 0 rows",
            "rows remapped because of uncorrectable errors; each such error terminates a job",
            "nvidia-smi -q -d ROW_REMAPPER -i INDEX; monitor the count; if it increases, replace the GPU",
        ),
        _gpu_metric(
            "pcie_width_lost",
            "== 0 lanes",
            "the PCIe link trained with fewer lanes than GPU and slot support: host copies are slower by the same "
            "ratio",
            "nvidia-smi -q -i INDEX | grep -A4 'Link Width'; lspci -vv -s PCI | grep LnkSta; reseat the card, riser or "
            "baseboard, and clean the contacts. If the width stays, replace the riser, then the card",
            cause=Cause(
                id="pcie_width_lost",
                title="the GPU's PCIe link has fewer lanes than card and slot support",
                place="gpu",
                explains=("transfer.host", "collectives.*", "train.*"),
                first_command="nvidia-smi --id={gpu} -q | grep -A 12 'GPU Link Info'",
                action="replace-hardware",
            ),
        ),
        _gpu_metric(
            "nvlinks_down",
            "== 0 links",
            "NVLinks of this GPU are inactive: NCCL has less bandwidth, or falls back to PCIe",
            "nvidia-smi nvlink -s -i INDEX; dmesg | grep -E 'Xid.*(74|144|145|149)|SXid'; restart "
            "nvidia-fabricmanager, reset the GPUs; otherwise check the baseboard or NVLink bridge",
        ),
        _gpu_warning(
            "nvlinks_missing",
            "== 0 links",
            "this GPU has fewer active NVLinks than another GPU of the same model in this node",
            "nvidia-smi nvlink -s; nvidia-smi topo -m; compare the NVLink bridges or the NVSwitch logs",
        ),
        _gpu_metric(
            "fabric_ready",
            "yes",
            "the GPU is not registered in the NVSwitch fabric: CUDA fails to initialize, or has no peer access",
            "nvidia-smi -q -i INDEX | grep -A6 Fabric; systemctl status nvidia-fabricmanager; install "
            "nvidia-fabricmanager in exactly the version of the driver, start it, and reset the GPUs",
            cause=Cause(
                id="fabric_not_ready",
                title="the GPU has not joined the NVLink fabric",
                place="gpu",
                explains=("transfer.peers", "device.*", "collectives.*", "train.*"),
                wrong_results=True,
                signatures=("fabricmanager.*", "nvlink.fabric_in_progress"),
                first_command="systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A 4 -i fabric",
                action="restart-service",
            ),
        ),
        _gpu_metric(
            "hardware_slowdown",
            "no",
            "hardware reduces the clocks of an idle GPU: over-temperature or power brake",
            "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i INDEX; check power supplies, their cables and the log "
            "of the BMC, then fans and coolant",
            cause=Cause(
                id="hardware_slowdown",
                title="the GPU reports a hardware slowdown",
                place="gpu",
                explains=("device.*", "collectives.*", "train.*"),
                signatures=("thermal.power_brake", "thermal.bmc_power_supply"),
                first_command="nvidia-smi --id={gpu} -q -d POWER,PERFORMANCE,TEMPERATURE",
                action="replace-hardware",
            ),
        ),
        _gpu_warning(
            "thermal_slowdown",
            "no",
            "the driver reduces the clocks because of temperature before any load",
            "nvidia-smi -q -d TEMPERATURE -i INDEX; check cooling and air flow",
        ),
        _gpu_warning(
            "persistence",
            "yes",
            "persistence mode is off: the driver unloads GPU state between processes; slow starts, settings get lost",
            "systemctl enable --now nvidia-persistenced (or nvidia-smi -pm 1)",
        ),
        _gpu_warning(
            "mig_enabled",
            "no",
            "MIG enabled: MIG instances have no NVLink and only a part of the GPU",
            "nvidia-smi -i INDEX -mig 0, then reset the GPU",
            cause=Cause(
                id="mig_enabled",
                title="MIG mode is enabled",
                place="gpu",
                explains=_ALL_GPU_CHECKS,
                first_command="nvidia-smi --id={gpu} mig -lgi",
                fix="Delete the MIG instances and turn MIG off (nvidia-smi --id={gpu} --multi-instance-gpu=0), then "
                "reset the GPU.",
                action="fix-config",
            ),
        ),
        _gpu_warning(
            "power_limit_reduced",
            "== 0 W",
            "power limit below the factory default: this GPU is slower than others of its model",
            "nvidia-smi -q -d POWER -i INDEX; nvidia-smi -i INDEX -pl DEFAULT_WATTS, unless the site limits power",
            cause=Cause(
                id="power_limit_reduced",
                title="the power limit of the GPU is below its default",
                place="gpu",
                explains=("device.gemm", "device.burn", "train.*"),
                first_command="nvidia-smi --id={gpu} -q -d POWER",
                fix="Unless the limit is intended: nvidia-smi --id={gpu} --power-limit=WATTS, with the Default Power "
                "Limit that the first command prints.",
                action="fix-config",
            ),
        ),
        _gpu_metric(
            "foreign_processes",
            "== 0 processes",
            "other processes compute on this GPU (another job, or a leftover of one): measurements are not reliable",
            "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv; ask the owner to end the process, or "
            "end its job (scancel), or remove the GPU from CUDA_VISIBLE_DEVICES; then run the trial again",
            cause=Cause(
                id="foreign_processes",
                title="another program uses the GPU",
                place="gpu",
                explains=_ALL_GPU_CHECKS,
                processes_fact="foreign_processes",
                first_command=_QUERY_PROCESSES,
                process_command=_LIST_PROCESSES,
                action="fix-environment",
            ),
        ),
        _gpu_warning(
            "memory_used_bytes",
            "<= 1 GiB",
            "GPU memory in use before the trial starts, possibly by a process in another container",
            "on the host: nvidia-smi -i INDEX; fuser -v /dev/nvidiaN",
            cause=Cause(
                id="leftover_memory",
                title="GPU memory is in use although no program of this trial runs",
                place="gpu",
                explains=("device.memory", "train.*"),
                consequence_of=("foreign_processes", "leftover_processes"),
                processes_fact="foreign_processes",
                first_command=f"{_QUERY_PROCESSES}; fuser -v /dev/nvidia{{gpu}}",
                process_command=_LIST_PROCESSES,
                fix="End the processes that fuser shows. If it shows none, reset the GPU while it is idle (nvidia-smi "
                "--gpu-reset --id={gpu}).",
                action="fix-environment",
            ),
        ),
    ),
    fact_roles={"gpus": "gpus", "gpu_processes": "foreign_processes"},
    limit_s=120.0,  # without persistence mode, NVML initializes GPUs one by one, several seconds each
    skip_if=(SkipIf.NO_GPU,),
)
