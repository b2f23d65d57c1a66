"""Reads count, model, health, link width and processes of all GPUs of a node from NVML, without load.

The PCIe link generation is recorded but not judged, as an idle GPU lowers it to save power; the width stays constant.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import JsonValue

from seatrial.checks.base import Check, Context, Options, RuleFact, SkipIf, facts, metric
from seatrial.discover import gpu as discover
from seatrial.discover import nvlinks
from seatrial.discover.gpu import Gpu, GpuFacts
from seatrial.model import (
    EXEMPT,
    GPUS_USED,
    Fact,
    Frozen,
    NotApplicable,
    Observation,
    Outcome,
    Phase,
    Rule,
    Scope,
    SeatrialError,
)

_HARDWARE_SLOWDOWN = {"hardware slowdown", "hardware thermal slowdown", "hardware power brake"}
# Fields of Gpu that a GPU must return if another GPU of its model does; otherwise readings_failed reports it as faulty.
_REQUIRED = re.compile(
    r"ecc_|rows_|pcie_width|nvlinks\[\d+]$|fabric|clocks_event_reasons|power_(limit|default)|memory_|processes"
)
# Fields of Gpu that some models do not support. If no GPU of the node supports a field, the rules on it do not apply.
_OPTIONAL = (
    *("ecc_mode", "ecc_uncorrected", "remap_pending", "retirement_pending", "pcie_width", "nvlinks"),
    *("clocks_event_reasons", "persistence_mode", "mig_mode", "power_default_w", "memory_total_bytes", "processes"),
)

RULE_FACTS = {
    "has_usable_gpu": RuleFact(reason="no usable GPU"),
    "has_memory_repair": RuleFact(reason="the GPUs support neither row remapping nor page retirement"),
    "has_fabric": RuleFact(reason="the GPUs have no fabric"),
    **{f"has_{field}": RuleFact(reason=f"the GPUs do not report {field.replace('_', ' ')}") for field in _OPTIONAL},
}
_NO_REASON = "no reason from NVML (for NVLinks: all links may be down, or no NVLink bridge is installed)"

METRICS = {  # name → unit
    "ecc_enabled": "bool",
    "ecc_uncorrected": "errors",
    "repair_pending": "bool",
    "remap_failed": "bool",
    "rows_remapped": "rows",
    "rows_remapped_uncorrectable": "rows",
    "pcie_width_lost": "lanes",
    **dict.fromkeys(("hardware_slowdown", "thermal_slowdown", "persistence", "mig_enabled"), "bool"),
    "power_limit_reduced": "W",
    "memory_used_bytes": "B",
    "gpus_missing": "GPUs",
    "gpus_hidden": "GPUs",
    "gpu_models": "models",
    **dict.fromkeys(("nvlinks_down", "nvlinks_missing"), "links"),
    "fabric_ready": "bool",
    "foreign_processes": "processes",
    "readings_failed": "readings",
}
_PER_GPU_METRICS = METRICS.keys() - {"gpus_missing", "gpus_hidden", "gpu_models"}

Values = dict[str, float | None]  # metric → value of one GPU; None: not readable or not supported


class ForeignProcess(Frozen):
    """A compute process on a GPU of this trial that seatrial did not start. ``memory`` in bytes."""

    gpu: int
    pid: int
    name: str
    memory: int | None


def measure(context: Context, _options: Options) -> Iterator[Observation]:
    """Yield GPU counts of the node, then the metrics of each GPU in use: all, or those in CUDA_VISIBLE_DEVICES.

    Raises NotApplicable without an installed or expected GPU, and UsageError for an invalid CUDA_VISIBLE_DEVICES.
    Raises SeatrialError if GPUs cannot be detected and their number is not configured. After all metrics, also raises
    SeatrialError if a metric with a rule has no value on a GPU that supports its field.
    """
    inventory = discover.read(context.root)
    usable, expected_gpus = len(inventory.gpus), context.expected_gpus or 0
    if inventory.detection_error and context.expected_gpus is None:
        raise SeatrialError(inventory.detection_error)
    if not inventory.gpus and not inventory.installed_gpus and not expected_gpus:
        reason = f" ({inventory.nvml_unavailable})" if inventory.nvml_unavailable else ""
        option_state = "is not set" if context.expected_gpus is None else "is 0"
        raise NotApplicable(f"no NVIDIA GPU on this machine, and --gpus-per-node {option_state}{reason}")
    yield from _inventory_facts(inventory)
    # If GPUs are expected, the PCI bus does not count: it also shows GPUs that the scheduler has not allocated.
    required = max(expected_gpus, usable + len(inventory.failed_gpus)) if expected_gpus else inventory.installed_gpus
    yield metric("gpus_missing", required - usable, "GPUs", context.node)
    used = discover.cuda_visible(inventory, os.environ)
    yield metric("gpus_hidden", max(0, min(expected_gpus, usable) - len(used)), "GPUs", context.node)
    yield Fact(name=GPUS_USED, value=[gpu.index for gpu in used])
    yield from facts({name: "yes" if supported else "no" for name, supported in _supported_features(used).items()})
    if used:
        yield metric("gpu_models", len({gpu.name for gpu in used}), "models", context.node)
    yield from _gpu_metrics(used, context.node)


def _gpu_metrics(used: Sequence[Gpu], node: str) -> Iterator[Observation]:
    """Yield the metrics of each GPU in use; then raise SeatrialError if a supported metric of a GPU has no value."""
    processes = _foreign_processes(used)
    yield Fact(name="foreign_processes", value=[process.model_dump() for process in processes])
    values_by_gpu = [(gpu, _metric_values(gpu, used, processes)) for gpu in used]
    gpus_by_missing_metric: dict[str, list[str]] = {}  # "METRIC: REASON" → GPUs without a value
    for gpu, values in values_by_gpu:
        for name, value in values.items():
            if value is not None:
                yield metric(name, value, METRICS[name], f"{node}/gpu{gpu.index}")
        if not values["readings_failed"]:  # otherwise the rule on readings_failed reports the missing values
            for name, reason in _missing_values(gpu, values).items():
                gpus_by_missing_metric.setdefault(f"{name}: {reason}", []).append(f"gpu{gpu.index}")
    if gpus_by_missing_metric:
        texts = [f"{', '.join(gpus)} {metric_text}" for metric_text, gpus in gpus_by_missing_metric.items()]
        raise SeatrialError(f"not measured: {'; '.join(texts)}")
    if exempt := {f"{node}/gpu{gpu.index}": reasons for gpu, reasons in _exempt_metrics(values_by_gpu)}:
        yield Fact(name=EXEMPT, value=exempt)


def _exempt_metrics(values_by_gpu: Sequence[tuple[Gpu, Values]]) -> Iterator[tuple[Gpu, JsonValue]]:
    """Yield each GPU that lacks metrics that another GPU has, and a mapping from these metrics to the reasons."""
    measured = {name for name in _PER_GPU_METRICS if any(values[name] is not None for _, values in values_by_gpu)}
    for gpu, values in values_by_gpu:
        read_errors = {
            name: f"reading failed on this GPU ({reason}), see readings_failed"
            for name, reason in _missing_values(gpu, values).items()
        }
        if missing := [name for name in sorted(measured) if values[name] is None]:
            yield gpu, {name: read_errors.get(name, "not supported by this GPU") for name in missing}


def _inventory_facts(inventory: GpuFacts) -> Iterator[Fact]:
    """Yield a fact per field of the inventory that is not empty; some state why GPUs are missing."""
    values: dict[str, JsonValue] = {
        "driver": inventory.driver,
        "cuda_driver": inventory.cuda_driver,
        "nvml_unavailable": inventory.nvml_unavailable,
        "gpus_lost": list(inventory.failed_gpus),
        "gpus_permission_denied": list(inventory.permission_denied),
        "pci_gpus": list(inventory.pci_devices),
        "pci_gpus_not_assigned": list(inventory.not_assigned),
        "pci_gpus_not_usable": list(inventory.unusable_pci_devices),
        "topology": [list(row) for row in inventory.topology],
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cuda_order": discover.cuda_order_warning(inventory, os.environ),
        "unreadable": dict(inventory.unreadable),
        "gpus": [gpu.model_dump(mode="json", exclude_none=True) for gpu in inventory.gpus],
    }
    return facts({name: value for name, value in values.items() if value not in (None, [], {})})


def _supported_features(gpus: Sequence[Gpu]) -> dict[str, bool]:
    """Return the ``has_*`` facts of the rules: name → whether at least one of ``gpus`` has the feature."""
    has_field = {f"has_{field}": any(field not in gpu.unsupported for gpu in gpus) for field in _OPTIONAL}
    has_fabric = any(nvlinks.expects_fabric(gpu, gpus) or "fabric" in _failed_readings(gpu) for gpu in gpus)
    has_memory_repair = has_field["has_remap_pending"] or has_field["has_retirement_pending"]
    return {**has_field, "has_usable_gpu": bool(gpus), "has_fabric": has_fabric, "has_memory_repair": has_memory_repair}


def _metric_values(gpu: Gpu, gpus: Sequence[Gpu], foreign_processes: Sequence[ForeignProcess]) -> Values:
    """Return metric → value of ``gpu``. ``gpus``: all GPUs in use, with which some metrics compare it."""
    same_model = [other for other in gpus if other.name == gpu.name]
    remapped_rows = (gpu.rows_remapped_correctable, gpu.rows_remapped_uncorrectable)
    reasons = None if gpu.clocks_event_reasons is None else set(gpu.clocks_event_reasons)
    # the enforced limit includes limits that are set by other tools
    power_limit = gpu.power_limit_w if gpu.power_enforced_w is None else gpu.power_enforced_w
    foreign = None if gpu.processes is None else sum(process.gpu == gpu.index for process in foreign_processes)
    return {
        "ecc_enabled": gpu.ecc_mode,
        "ecc_uncorrected": gpu.ecc_uncorrected,
        "repair_pending": gpu.retirement_pending if gpu.remap_pending is None else gpu.remap_pending,
        "remap_failed": gpu.remap_failed,
        "rows_remapped": None if None in remapped_rows else sum(filter(None, remapped_rows)),
        "rows_remapped_uncorrectable": gpu.rows_remapped_uncorrectable,
        "pcie_width_lost": _shortfall(gpu.pcie_width, gpu.pcie_width_max),
        "hardware_slowdown": None if reasons is None else bool(reasons & _HARDWARE_SLOWDOWN),
        "thermal_slowdown": None if reasons is None else "software thermal slowdown" in reasons,
        "persistence": gpu.persistence_mode,
        "mig_enabled": gpu.mig_mode,
        "power_limit_reduced": _shortfall(power_limit, gpu.power_default_w),
        "memory_used_bytes": gpu.memory_used_bytes,
        "nvlinks_down": nvlinks.links_down(gpu, same_model),
        "nvlinks_missing": nvlinks.links_missing(gpu, same_model),
        "fabric_ready": nvlinks.fabric_ready(gpu) if nvlinks.expects_fabric(gpu, gpus) else None,
        "readings_failed": sum(
            any(field not in other.unreadable for other in same_model) for field in _failed_readings(gpu)
        ),
        "foreign_processes": foreign,
    }


def _shortfall(value: float | None, maximum: float | None) -> float | None:
    return None if value is None or maximum is None else max(0, maximum - value)


def _missing_values(gpu: Gpu, values: Values) -> dict[str, str]:
    """Return the metrics with a rule that have no value on this GPU although it supports the field, with the reason."""
    reasons, has_feature = dict[str, str](), _supported_features([gpu])
    for rule in RULES:
        conditions = [name for name in rule.applies_if if name in has_feature]
        applies = rule.metric in _PER_GPU_METRICS and all(has_feature[name] for name in conditions)
        if applies and values.get(rule.metric) is None:
            # The last condition is has_FIELD, with the field of Gpu from which the metric is computed
            field = conditions[-1].removeprefix("has_").replace("memory_repair", "remap_pending")
            reasons[rule.metric] = next(
                (text for name, text in gpu.unreadable.items() if name.startswith(field)), _NO_REASON
            )
    return reasons


def _failed_readings(gpu: Gpu) -> set[str]:
    """Return the fields of _REQUIRED that could not be read although the GPU supports them."""
    return {field for field in gpu.unreadable if _REQUIRED.match(field) and field not in gpu.unsupported}


def _foreign_processes(gpus: Sequence[Gpu]) -> list[ForeignProcess]:
    """Return the compute processes on ``gpus`` that are neither this worker nor its children."""
    import psutil

    worker = psutil.Process()
    seatrial_pids = {worker.pid, *(child.pid for child in worker.children(recursive=True))}
    return [
        ForeignProcess(gpu=gpu.index, pid=process.pid, name=_process_name(process.pid), memory=process.memory)
        for gpu in gpus
        for process in gpu.processes or ()
        if process.kind == "compute" and process.pid not in seatrial_pids
    ]


def _process_name(pid: int) -> str:
    import psutil

    try:
        return psutil.Process(pid).name()
    except psutil.Error:  # in a container, NVML may return a PID of the host's namespace
        return "not visible: in another container, or ended"


def _rule(
    metric: str,
    expect: str,
    meaning: str,
    fix: str,
    *,
    feature: str = "has_usable_gpu",
    evidence_facts: tuple[str, ...] = (),
    outcome_if_violated: Literal[Outcome.FAIL, Outcome.WARN] = Outcome.FAIL,
) -> Rule:
    return Rule(
        metric=metric,
        expect=expect,
        meaning=meaning,
        fix=fix,
        applies_if={"has_usable_gpu": "yes", feature: "yes"},
        evidence_facts=evidence_facts,
        outcome_if_violated=outcome_if_violated,
    )


RULES = (
    Rule(
        metric="gpus_missing",
        evidence_facts=("nvml_unavailable", "gpus_lost", "pci_gpus_not_usable"),
        expect="== 0 GPUs",
        meaning="an expected GPU, or a GPU on the PCI bus, is not usable; the facts name the GPU and NVML's error",
        fix="nvidia-smi -L; lspci -d 10de:; dmesg | grep -iE 'NVRM|Xid'. Driver not loaded, or version mismatch: "
        "reinstall or reboot. Xid 79, lost or failed to start: power-cycle the node, then reseat or replace the GPU. "
        "In a container: start the container with --gpus all",
    ),
    Rule(
        metric="gpus_hidden",
        evidence_facts=("cuda_visible_devices",),
        expect="== 0 GPUs",
        meaning="CUDA_VISIBLE_DEVICES lists fewer GPUs than expected",
        fix="unset CUDA_VISIBLE_DEVICES, or set --gpus-per-node to the number of GPUs that it lists",
    ),
    _rule(
        "gpu_models",
        "<= 1 models",
        "different GPU models in one node: all ranks wait for the slowest model",
        "nvidia-smi -L; choose GPUs of one model with CUDA_VISIBLE_DEVICES (and CUDA_DEVICE_ORDER=PCI_BUS_ID)",
        outcome_if_violated=Outcome.WARN,
    ),
    _rule(
        "readings_failed",
        "== 0 readings",
        "NVML returns an error for this GPU and a value for another GPU of the same model: GPU or firmware fault",
        "nvidia-smi -q -i INDEX; dmesg | grep -i Xid; reset the idle GPU (nvidia-smi -r -i INDEX) or replace it",
    ),
    _rule(
        "ecc_uncorrected",
        "== 0 errors",
        "uncorrectable ECC errors since the driver was loaded: they terminate processes, and the memory is failing",
        "nvidia-smi -q -d ECC,ROW_REMAPPER -i INDEX; drain the node, reset the GPU, run dcgmi diag -r 3; if errors "
        "return, replace the GPU",
        feature="has_ecc_uncorrected",
    ),
    _rule(
        "ecc_enabled",
        "== 1 bool",
        "without ECC a flipped bit in GPU memory corrupts training silently",
        "nvidia-smi -i INDEX -e 1, then reset the GPU or reboot",
        feature="has_ecc_mode",
        outcome_if_violated=Outcome.WARN,
    ),
    _rule(
        "repair_pending",
        "== 0 bool",
        "a row remap or page retirement is pending until the next GPU reset (NVIDIA, GPU memory error management)",
        "drain the node, then nvidia-smi --gpu-reset -i INDEX, or reboot",
        feature="has_memory_repair",
    ),
    _rule(
        "remap_failed",
        "== 0 bool",
        "row remapping failed, no spare row left: an RMA criterion of NVIDIA",
        "nvidia-smi -q -d ROW_REMAPPER -i INDEX; replace the GPU",
        feature="has_remap_pending",
    ),
    _rule(
        "rows_remapped",
        "<= 10 rows",
        "83.3 % of nodes with more than 10 remapped rows had a performance regression later, 5.6 % of nodes with 1 to "
        "10 (SuperBench/Anubis, arXiv 2402.06194)",
        "nvidia-smi -q -d ROW_REMAPPER -i INDEX; run dcgmi diag -r 3; request a replacement from the vendor",
        feature="has_remap_pending",
    ),
    _rule(
        "rows_remapped_uncorrectable",
        "== 0 rows",
        "rows remapped because of uncorrectable errors; each such error terminates a job",
        "nvidia-smi -q -d ROW_REMAPPER -i INDEX; monitor the count; if it increases, replace the GPU",
        feature="has_remap_pending",
        outcome_if_violated=Outcome.WARN,
    ),
    _rule(
        "pcie_width_lost",
        "== 0 lanes",
        "the PCIe link trained with fewer lanes than GPU and slot support: host copies are slower by the same ratio",
        "nvidia-smi -q -i INDEX | grep -A4 'Link Width'; lspci -vv -s PCI | grep LnkSta; reseat the card or riser",
        feature="has_pcie_width",
    ),
    _rule(
        "nvlinks_down",
        "== 0 links",
        "NVLinks of this GPU are inactive: NCCL has less bandwidth, or falls back to PCIe",
        "nvidia-smi nvlink -s -i INDEX; dmesg | grep -E 'Xid.*(74|144|145|149)|SXid'; restart nvidia-fabricmanager, "
        "reset the GPUs; otherwise check the baseboard or NVLink bridge",
        feature="has_nvlinks",
    ),
    _rule(
        "nvlinks_missing",
        "== 0 links",
        "this GPU has fewer active NVLinks than another GPU of the same model in this node",
        "nvidia-smi nvlink -s; nvidia-smi topo -m; compare the NVLink bridges or the NVSwitch logs",
        feature="has_nvlinks",
        outcome_if_violated=Outcome.WARN,
    ),
    _rule(
        "fabric_ready",
        "== 1 bool",
        "the GPU is not registered in the NVSwitch fabric: CUDA fails to initialize, or has no peer access",
        "nvidia-smi -q -i INDEX | grep -A6 Fabric; systemctl status nvidia-fabricmanager (same version as the driver?)",
        feature="has_fabric",
    ),
    _rule(
        "hardware_slowdown",
        "== 0 bool",
        "hardware reduces the clocks of an idle GPU: over-temperature or power brake",
        "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i INDEX; check fans, coolant, power supplies and cables",
        feature="has_clocks_event_reasons",
    ),
    _rule(
        "thermal_slowdown",
        "== 0 bool",
        "the driver reduces the clocks because of temperature before any load",
        "nvidia-smi -q -d TEMPERATURE -i INDEX; check cooling and air flow",
        feature="has_clocks_event_reasons",
        outcome_if_violated=Outcome.WARN,
    ),
    _rule(
        "persistence",
        "== 1 bool",
        "persistence mode is off: the driver unloads GPU state between processes; slow starts, settings get lost",
        "systemctl enable --now nvidia-persistenced (or nvidia-smi -pm 1)",
        feature="has_persistence_mode",
        outcome_if_violated=Outcome.WARN,
    ),
    _rule(
        "mig_enabled",
        "== 0 bool",
        "MIG enabled: MIG instances have no NVLink and only a part of the GPU",
        "nvidia-smi -i INDEX -mig 0, then reset the GPU",
        feature="has_mig_mode",
        outcome_if_violated=Outcome.WARN,
    ),
    _rule(
        "power_limit_reduced",
        "== 0 W",
        "power limit below the factory default: this GPU is slower than others of its model",
        "nvidia-smi -q -d POWER -i INDEX; nvidia-smi -i INDEX -pl DEFAULT_WATTS, unless the site limits power",
        feature="has_power_default_w",
        outcome_if_violated=Outcome.WARN,
    ),
    _rule(
        "foreign_processes",
        "== 0 processes",
        "other processes compute on this GPU (another job, or a leftover of one): measurements are not reliable",
        "fact foreign_processes lists the PIDs; nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv; "
        "terminate leftover processes, or remove the GPU from CUDA_VISIBLE_DEVICES",
        feature="has_processes",
        evidence_facts=("foreign_processes",),
    ),
    _rule(
        "memory_used_bytes",
        "<= 1 GiB",
        "GPU memory in use before the trial starts, possibly by a process in another container",
        "on the host: nvidia-smi -i INDEX; fuser -v /dev/nvidiaN",
        feature="has_memory_total_bytes",
        outcome_if_violated=Outcome.WARN,
    ),
)

CHECK = Check(
    name="gpu.inventory",
    title="GPU inventory: count, models, health, processes",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    metrics=METRICS,
    rules=RULES,
    rule_facts=RULE_FACTS,
    measure=measure,
    required_per=dict.fromkeys(sorted(_PER_GPU_METRICS), "gpu"),
    fact_roles={"gpus": "gpus"},
    limit_s=120.0,  # without persistence mode, NVML initializes GPUs one by one, several seconds each
    skip_if=(SkipIf.NO_GPU,),
)
