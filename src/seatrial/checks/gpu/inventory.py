"""Are all GPUs of a node there, alike, healthy, at full width and free? Read through NVML, without any load.

The PCIe generation is recorded and not judged here: an idle GPU lowers it to save power. Its width it keeps.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import JsonValue

from seatrial.checks.base import Check, Context, Options, facts, metric
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
# A GPU that refuses one of these for a fault, where another of its model answers, is itself the finding.
_VITAL = re.compile(
    r"ecc_|rows_|pcie_width|nvlinks\[\d+]$|fabric|clocks_event_reasons|power_(limit|default)|memory_|processes"
)
# Fields that not every kind of GPU has. Where none of a node has one, the rules on it do not apply.
_OPTIONAL = (
    *("ecc_mode", "ecc_uncorrected", "remap_pending", "retirement_pending", "pcie_width", "nvlinks"),
    *("clocks_event_reasons", "persistence_mode", "mig_mode", "power_default_w", "memory_total_bytes", "processes"),
)

_NO_REASON = "nothing here tells (of NVLinks: whether all are down, or a bridge was never there)"

METRICS = {
    "ecc_enabled": "bool",
    "ecc_uncorrected": "errors",
    "repair_pending": "bool",
    "remap_failed": "bool",
    "rows_remapped": "rows",
    "rows_remapped_uncorrectable": "rows",
    "pcie_width_lost": "lanes",
    "hardware_slowdown": "bool",
    "thermal_slowdown": "bool",
    "persistence": "bool",
    "mig_enabled": "bool",
    "power_limit_reduced": "W",
    "memory_used_bytes": "B",
    "gpus_missing": "GPUs",
    "gpus_hidden": "GPUs",
    "gpu_models": "models",
    "nvlinks_down": "links",
    "nvlinks_missing": "links",
    "fabric_ready": "bool",
    "foreign_processes": "processes",
    "readings_failed": "readings",
}
_OF_EACH_GPU = METRICS.keys() - {"gpus_missing", "gpus_hidden", "gpu_models"}

Values = dict[str, float | None]  # of one GPU, by metric; None is not known, or not to be had


class Stranger(Frozen):
    """A compute process on one of our GPUs that is not ours."""

    gpu: int
    pid: int
    name: str
    memory: int | None


def measure(context: Context, _options: Options) -> Iterator[Observation]:
    """Yield the node's counts, then the figures of each GPU that CUDA may use.

    Raises NotApplicable where there is no GPU and none was promised, UsageError on a bad CUDA_VISIBLE_DEVICES, and at
    the end SeatrialError where something that is judged here is not known of a GPU: others' figures are no stand-in.
    """
    found = discover.read(context.root)
    promised = context.expected_gpus or 0
    if found.detection_error and context.expected_gpus is None:
        raise SeatrialError(found.detection_error)
    if not found.gpus and not found.installed_gpus and not promised:
        reason = f" ({found.nvml_unavailable})" if found.nvml_unavailable else ""
        raise NotApplicable(f"no NVIDIA GPU on this machine and none promised{reason}")
    yield from _machine(found)
    # A scheduler may hand out fewer GPUs than the bus shows: then its word counts, and what the driver lists.
    expected = max(promised, len(found.gpus) + len(found.lost)) if promised else found.installed_gpus
    yield metric("gpus_missing", expected - len(found.gpus), "GPUs", context.node)
    used = discover.cuda_visible(found, os.environ)
    yield metric("gpus_hidden", max(0, min(promised, len(found.gpus)) - len(used)), "GPUs", context.node)
    yield Fact(name=GPUS_USED, value=[gpu.index for gpu in used])
    yield from facts({name: "yes" if present else "no" for name, present in _features(used).items()})
    if used:
        yield metric("gpu_models", len({gpu.name for gpu in used}), "models", context.node)
    yield from _of_each(used, context.node)


def _of_each(used: Sequence[Gpu], node: str) -> Iterator[Observation]:
    strangers = _strangers(used)
    yield Fact(name="foreign_processes", value=[stranger.model_dump() for stranger in strangers])
    every = [(gpu, _values_of(gpu, used, strangers)) for gpu in used]
    unknown: dict[str, list[str]] = {}
    for gpu, values in every:
        for name, value in values.items():
            if value is not None:
                yield metric(name, value, METRICS[name], f"{node}/gpu{gpu.index}")
        reasons = {} if values["readings_failed"] else _unknown(gpu, values)  # told already, as the fault of this GPU
        for name, reason in reasons.items():
            unknown.setdefault(f"{name}: {reason}", []).append(f"gpu{gpu.index}")
    if unknown:
        texts = [f"{', '.join(gpus)} {reason}" for reason, gpus in unknown.items()]
        raise SeatrialError(f"not measured: {'; '.join(texts)}")
    if excused := {f"{node}/gpu{gpu.index}": why for gpu, why in _excused(every)}:
        yield Fact(name=EXEMPT, value=excused)


def _excused(found: Sequence[tuple[Gpu, Values]]) -> Iterator[tuple[Gpu, JsonValue]]:
    """Metrics of other GPUs here that one has not, and why: it refuses them, or else says that it has none."""
    given = sorted({name for _, values in found for name, value in values.items() if value is not None})
    for gpu, values in found:
        reasons = _unknown(gpu, values)
        refused = {name: f"this GPU refuses it ({why}), which readings_failed judges" for name, why in reasons.items()}
        if lacking := [name for name in given if values.get(name) is None]:
            yield gpu, {name: refused.get(name, "this GPU has none") for name in lacking}


def _machine(found: GpuFacts) -> Iterator[Fact]:
    """What was found, as evidence: above all, why a GPU is missing."""
    values: dict[str, JsonValue] = {
        "driver": found.driver,
        "cuda_driver": found.cuda_driver,
        "nvml_unavailable": found.nvml_unavailable,
        "gpus_lost": list(found.lost),
        "gpus_permission_denied": list(found.permission_denied),
        "pci_gpus": list(found.pci_devices),
        "pci_gpus_not_assigned": list(found.not_assigned),
        "pci_gpus_not_usable": list(found.not_usable),
        "topology": [list(row) for row in found.topology],
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cuda_order": discover.cuda_order_warning(found, os.environ),
        "unread": dict(found.unreadable),
        "gpus": [gpu.model_dump(mode="json", exclude_none=True) for gpu in found.gpus],
    }
    return facts({name: value for name, value in values.items() if value not in (None, [], {})})


def _features(gpus: Sequence[Gpu]) -> dict[str, bool]:
    """What the rules' ``where`` asks. A field is absent only where every GPU says that its kind does not have it."""
    fields = {f"has_{field}": any(field not in gpu.unsupported for gpu in gpus) for field in _OPTIONAL}
    fabric = any(nvlinks.expects_fabric(gpu, gpus) or "fabric" in _refusals(gpu) for gpu in gpus)
    repair = fields["has_remap_pending"] or fields["has_retirement_pending"]
    return {**fields, "has_usable_gpu": bool(gpus), "has_fabric": fabric, "has_memory_repair": repair}


def _values_of(gpu: Gpu, gpus: Sequence[Gpu], strangers: Sequence[Stranger]) -> Values:
    twins = [other for other in gpus if other.name == gpu.name]
    remapped = (gpu.rows_remapped_correctable, gpu.rows_remapped_uncorrectable)
    reasons = None if gpu.clocks_event_reasons is None else set(gpu.clocks_event_reasons)
    # the enforced limit counts limits set elsewhere too
    power_limit = gpu.power_limit_w if gpu.power_enforced_w is None else gpu.power_enforced_w
    foreign = None if gpu.processes is None else sum(stranger.gpu == gpu.index for stranger in strangers)
    return {
        "ecc_enabled": gpu.ecc_mode,
        "ecc_uncorrected": gpu.ecc_uncorrected,
        "repair_pending": gpu.retirement_pending if gpu.remap_pending is None else gpu.remap_pending,
        "remap_failed": gpu.remap_failed,
        "rows_remapped": None if None in remapped else sum(filter(None, remapped)),
        "rows_remapped_uncorrectable": gpu.rows_remapped_uncorrectable,
        "pcie_width_lost": _shortfall(gpu.pcie_width, gpu.pcie_width_max),
        "hardware_slowdown": None if reasons is None else bool(reasons & _HARDWARE_SLOWDOWN),
        "thermal_slowdown": None if reasons is None else "software thermal slowdown" in reasons,
        "persistence": gpu.persistence_mode,
        "mig_enabled": gpu.mig_mode,
        "power_limit_reduced": _shortfall(power_limit, gpu.power_default_w),
        "memory_used_bytes": gpu.memory_used_bytes,
        "nvlinks_down": nvlinks.links_down(gpu, twins),
        "nvlinks_missing": nvlinks.links_missing(gpu, twins),
        "fabric_ready": nvlinks.fabric_ready(gpu) if nvlinks.expects_fabric(gpu, gpus) else None,
        "readings_failed": sum(any(field not in twin.unreadable for twin in twins) for field in _refusals(gpu)),
        "foreign_processes": foreign,
    }


def _shortfall(value: float | None, full: float | None) -> float | None:
    return None if value is None or full is None else max(0, full - value)


def _unknown(gpu: Gpu, values: Values) -> dict[str, str]:
    """Metrics that have a rule and no value although this GPU has what they are of, each with the reason."""
    found, features = dict[str, str](), _features([gpu])
    for rule in RULES:
        wants = [name for name in rule.applies_if if name in features]
        if rule.metric in _OF_EACH_GPU and values.get(rule.metric) is None and all(features[name] for name in wants):
            field = wants[-1].removeprefix("has_").replace("memory_repair", "remap_pending")
            found[rule.metric] = next(
                (text for name, text in gpu.unreadable.items() if name.startswith(field)), _NO_REASON
            )
    return found


def _refusals(gpu: Gpu) -> set[str]:
    """Vital fields that the GPU refused although its kind has them."""
    return {field for field in gpu.unreadable if _VITAL.match(field) and field not in gpu.unsupported}


def _strangers(gpus: Sequence[Gpu]) -> list[Stranger]:
    import psutil

    me = psutil.Process()
    ours = {me.pid, *(child.pid for child in me.children(recursive=True))}
    return [
        Stranger(gpu=gpu.index, pid=process.pid, name=_name_of(process.pid), memory=process.memory)
        for gpu in gpus
        for process in gpu.processes or ()
        if process.kind == "compute" and process.pid not in ours
    ]


def _name_of(pid: int) -> str:
    import psutil

    try:
        return psutil.Process(pid).name()
    except psutil.Error:  # inside a container NVML may give the host's number
        return "not visible from here: in another container, or ended"


def _rule(
    metric: str,
    expect: str,
    why: str,
    fix: str,
    *,
    where: str = "has_usable_gpu",
    shows: tuple[str, ...] = (),
    breach: Literal[Outcome.FAIL, Outcome.WARN] = Outcome.FAIL,
) -> Rule:
    needed = {"has_usable_gpu": "yes", where: "yes"}
    return Rule(
        metric=metric,
        expect=expect,
        meaning=why,
        fix=fix,
        applies_if=needed,
        evidence_facts=shows,
        outcome_if_violated=breach,
    )


RULES = (
    Rule(
        metric="gpus_missing",
        evidence_facts=("nvml_unavailable", "gpus_lost", "pci_gpus_not_usable"),
        expect="== 0 GPUs",
        meaning="a GPU that was promised, or is on the PCI bus, cannot be used; the facts say which, and what NVML said",
        fix="nvidia-smi -L; lspci -d 10de:; dmesg | grep -iE 'NVRM|Xid'. Driver not loaded or of two versions: "
        "reinstall or reboot. Xid 79, lost or failed to start: power-cycle the node, then reseat or replace the GPU. "
        "In a container: start it with --gpus all",
    ),
    Rule(
        metric="gpus_hidden",
        evidence_facts=("cuda_visible_devices",),
        expect="== 0 GPUs",
        meaning="CUDA_VISIBLE_DEVICES leaves CUDA fewer GPUs than were promised",
        fix="unset CUDA_VISIBLE_DEVICES, or promise what it leaves: --gpus-per-node",
    ),
    _rule(
        "gpu_models",
        "<= 1 models",
        "ranks on unlike GPUs wait for the slowest",
        "nvidia-smi -L; choose GPUs of one model with CUDA_VISIBLE_DEVICES (and CUDA_DEVICE_ORDER=PCI_BUS_ID)",
        breach=Outcome.WARN,
    ),
    _rule(
        "readings_failed",
        "== 0 readings",
        "this GPU answers with an error where another of its model gives the value: it or its firmware is at fault",
        "nvidia-smi -q -i INDEX; dmesg | grep -i Xid; reset the idle GPU (nvidia-smi -r -i INDEX) or replace it",
    ),
    _rule(
        "ecc_uncorrected",
        "== 0 errors",
        "uncorrectable memory errors since the driver was loaded: they end processes, and the memory is failing",
        "nvidia-smi -q -d ECC,ROW_REMAPPER -i INDEX; drain the node, reset the GPU, run dcgmi diag -r 3, replace it if "
        "they return",
        where="has_ecc_uncorrected",
    ),
    _rule(
        "ecc_enabled",
        "== 1 bool",
        "without ECC a flipped bit in GPU memory corrupts training silently",
        "nvidia-smi -i INDEX -e 1, then reset the GPU or reboot",
        where="has_ecc_mode",
        breach=Outcome.WARN,
    ),
    _rule(
        "repair_pending",
        "== 0 bool",
        "bad memory was found and its repair waits for a reset (NVIDIA, GPU memory error management)",
        "drain the node, then nvidia-smi --gpu-reset -i INDEX, or reboot",
        where="has_memory_repair",
    ),
    _rule(
        "remap_failed",
        "== 0 bool",
        "a bad memory row could not be replaced by a spare: NVIDIA's ground for replacement",
        "nvidia-smi -q -d ROW_REMAPPER -i INDEX; replace the GPU",
        where="has_remap_pending",
    ),
    _rule(
        "rows_remapped",
        "<= 10 rows",
        "of nodes with more than 10 remapped rows 83.3 % later lost performance, with 1 to 10 rows 5.6 % "
        "(SuperBench/Anubis, arXiv 2402.06194)",
        "nvidia-smi -q -d ROW_REMAPPER -i INDEX; run dcgmi diag -r 3 and ask the vendor for replacement",
        where="has_remap_pending",
    ),
    _rule(
        "rows_remapped_uncorrectable",
        "== 0 rows",
        "uncorrectable errors have cost this GPU memory rows already: one more lost job each",
        "nvidia-smi -q -d ROW_REMAPPER -i INDEX; watch the count, and replace the GPU if it grows",
        where="has_remap_pending",
        breach=Outcome.WARN,
    ),
    _rule(
        "pcie_width_lost",
        "== 0 lanes",
        "the PCIe link trained with fewer lanes than card and slot have: every host copy is slower by that share",
        "nvidia-smi -q -i INDEX | grep -A4 'Link Width'; lspci -vv -s PCI | grep LnkSta; reseat the card or riser",
        where="has_pcie_width",
    ),
    _rule(
        "nvlinks_down",
        "== 0 links",
        "NVLinks that this GPU has are inactive: NCCL then has less bandwidth, or falls back to PCIe",
        "nvidia-smi nvlink -s -i INDEX; dmesg | grep -E 'Xid.*(74|144|145|149)|SXid'; restart nvidia-fabricmanager, "
        "reset the GPUs, else check the baseboard or bridge",
        where="has_nvlinks",
    ),
    _rule(
        "nvlinks_missing",
        "== 0 links",
        "this GPU has fewer active NVLinks than another of its model in this node",
        "nvidia-smi nvlink -s; nvidia-smi topo -m; compare the bridges, or the switches' log",
        where="has_nvlinks",
        breach=Outcome.WARN,
    ),
    _rule(
        "fabric_ready",
        "== 1 bool",
        "the GPU has not joined the NVSwitch fabric: CUDA will not start, or work without peers",
        "nvidia-smi -q -i INDEX | grep -A6 Fabric; systemctl status nvidia-fabricmanager (same version as the driver?)",
        where="has_fabric",
    ),
    _rule(
        "hardware_slowdown",
        "== 0 bool",
        "the hardware holds the clocks down, idle as it is: too hot, or the power supply pulls its brake",
        "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i INDEX; check fans, coolant, power supplies and cables",
        where="has_clocks_event_reasons",
    ),
    _rule(
        "thermal_slowdown",
        "== 0 bool",
        "the driver lowers the clocks for the temperature already before any load",
        "nvidia-smi -q -d TEMPERATURE -i INDEX; check cooling and air flow",
        where="has_clocks_event_reasons",
        breach=Outcome.WARN,
    ),
    _rule(
        "persistence",
        "== 1 bool",
        "without persistence the driver unloads the GPU's state between processes: slow starts, and settings are lost",
        "systemctl enable --now nvidia-persistenced (or nvidia-smi -pm 1)",
        where="has_persistence_mode",
        breach=Outcome.WARN,
    ),
    _rule(
        "mig_enabled",
        "== 0 bool",
        "a GPU in MIG mode is cut into slices: no NVLink between them, and no full-size training",
        "nvidia-smi -i INDEX -mig 0, then reset the GPU",
        where="has_mig_mode",
        breach=Outcome.WARN,
    ),
    _rule(
        "power_limit_reduced",
        "== 0 W",
        "the power limit is below the factory's: this GPU computes slower than others of its model",
        "nvidia-smi -q -d POWER -i INDEX; nvidia-smi -i INDEX -pl DEFAULT_WATTS, unless the site means it so",
        where="has_power_default_w",
        breach=Outcome.WARN,
    ),
    _rule(
        "foreign_processes",
        "== 0 processes",
        "others compute on this GPU, or a dead job left a process: nothing measured beside it can be trusted",
        "the fact foreign_processes lists PIDs; nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv; end "
        "leftovers, or take the GPU out of CUDA_VISIBLE_DEVICES",
        where="has_processes",
        shows=("foreign_processes",),
    ),
    _rule(
        "memory_used_bytes",
        "<= 1 GiB",
        "memory is taken before the trial starts, perhaps by a process of another container that is not visible here",
        "nvidia-smi -i INDEX, on the host; fuser -v /dev/nvidiaN",
        where="has_memory_total_bytes",
        breach=Outcome.WARN,
    ),
)

CHECK = Check(
    name="gpu.inventory",
    title="GPUs: present, alike, healthy and free",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    metrics=METRICS,
    rules=RULES,
    measure=measure,
    required_per=dict.fromkeys(sorted(_OF_EACH_GPU), "gpu"),
    fact_roles={"gpus": "gpus"},
    limit_s=120.0,  # NVML starts GPUs that sleep one by one, some seconds each without persistence
)
