"""The hardware and software of a record: serial numbers, versions, environment variables, hosts that differ."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from seatrial.checks import catalog
from seatrial.diagnose.causes import SET_BY_SEATRIAL, variable_values
from seatrial.discover.environment_variables import variables
from seatrial.model import CLUSTER, Trial, node_of
from seatrial.report.formatting import natural_key
from seatrial.util.text import and_more

NO_SERIAL = "no serial number recorded"
_GPU_FIELDS = ("name", "serial", "uuid", "pci_bus_id", "vbios")  # NVML's keys of the fields of Gpu
_MAX_NAMED = 3  # hosts with another version or variable that are named


@dataclass(frozen=True, slots=True)
class Gpu:
    """What NVML reports of a GPU; an empty field was not recorded, as in many virtual machines."""

    model: str = ""
    serial: str = ""
    uuid: str = ""
    slot: str = ""  # PCI address
    vbios: str = ""

    @property
    def text(self) -> str:
        """The serial number, UUID and slot on one line."""
        serial = f"serial {self.serial}" if self.serial else NO_SERIAL
        return ", ".join(filter(None, (serial, self.uuid, self.slot and f"slot {self.slot}")))


@dataclass(frozen=True)
class Version:
    """A property of the hosts, its most frequent value, and the hosts with another value as text."""

    name: str
    value: str
    differing: str


def gpus_of(trial: Trial) -> dict[str, Gpu]:
    """Subject → identity of each GPU in the record, from the facts ``gpus``."""
    return {
        subject: Gpu(*(fields[name] if isinstance(fields.get(name), str) else "" for name in _GPU_FIELDS))
        for subject, fields in gpu_fields(trial).items()
    }


def gpu_fields(trial: Trial) -> dict[str, Mapping[str, Any]]:
    """Subject → what NVML reports of each GPU in the record."""
    return {
        f"{node}/gpu{fields['index']}": fields
        for node, facts in _recorded(trial)
        for fields in _objects(facts.get("gpus"))
        if "index" in fields and "uuid" in fields
    }


def serial_digest(gpus: Mapping[str, Gpu]) -> str:
    """The SHA-256 of the sorted serial numbers, each on a line of its own; empty if there is none."""
    lines = "".join(f"{serial}\n" for serial in sorted(gpu.serial for gpu in gpus.values() if gpu.serial))
    return hashlib.sha256(lines.encode(errors="replace")).hexdigest() if lines else ""


def versions(trial: Trial) -> list[Version]:
    """GPU model, driver, CUDA, NCCL, torch, kernel and network of all hosts, as far as they are in the record."""
    by_name, found = facts_by_host(trial), []
    for name in _NAMES:
        if not (hosts := by_name.get(name)):
            continue
        value = Counter(hosts.values()).most_common(1)[0][0]
        others = sorted((host for host in hosts if hosts[host] != value), key=natural_key)
        found.append(Version(name, value, and_more([f"{host} {hosts[host]}" for host in others], _MAX_NAMED)))
    return found


def facts_by_host(trial: Trial) -> dict[str, dict[str, str]]:
    """Name → host → value of each property of the hosts that can change the speed."""
    by_name: dict[str, dict[str, str]] = {}
    for host, facts in _recorded(trial):
        for name, value in _versions(facts):
            if isinstance(value, str) and value:
                by_name.setdefault(name, {})[host] = value
    return by_name


_NAMES = (
    "driver",
    "CUDA of the driver",
    "CUDA of torch",
    "NCCL of torch",
    "NCCL of the system",
    "torch",
    "kernel",
    "NVLinks per GPU",
    "NCCL's network",
)


def _versions(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of each property in the facts of one measurement; a page shows those in _NAMES."""
    software, system, cpu, rdma = (_mapping(facts, name) for name in ("software", "os", "cpu", "rdma"))
    yield "driver", facts.get("driver") or software.get("driver")
    yield "CUDA of the driver", facts.get("cuda_driver")
    yield "CUDA of torch", software.get("cuda")
    yield "torch", software.get("torch")
    yield "kernel", system.get("kernel")
    yield "operating system", system.get("name")
    yield "CPU", cpu and f"{cpu.get('model')}, usable threads: {cpu.get('usable_threads')}"
    yield "NCCL's network", facts.get("network")
    yield "NCCL's transports", ", ".join(sorted(_mapping(facts, "transports")))
    firmware = {port.get("firmware") for port in _objects(rdma.get("devices"))}
    yield "firmware of RDMA devices", ", ".join(sorted(filter(None, firmware)))
    links = [gpu.get("nvlinks") for gpu in _objects(facts.get("gpus"))]
    active = {sum(link.get("active") is True for link in of_gpu) for of_gpu in links if isinstance(of_gpu, list)}
    if active:
        yield "NVLinks per GPU", ", ".join(map(str, sorted(active)))
    for source, version in _mapping(software, "nccl").items():
        yield "NCCL of the system" if source.startswith("/") else "NCCL of torch", version


def _mapping(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = facts.get(name)
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def variable_lines(trial: Trial) -> list[str]:
    """One line for each variable with a known effect that is set: value, nodes, effect, and who set it if known."""
    of_trial = trial.config.get("env")
    lines = []
    for name, text, nodes, is_on_some, _ in sorted(variable_values(trial.measurements, catalog())):
        value = text.removesuffix(SET_BY_SEATRIAL).rstrip()
        effect, default = variables()[name].effect, variables()[name].default
        line = f"{name}={value}" + (f" on {and_more(nodes, _MAX_NAMED)} only" if is_on_some else "")
        line += f": {effect if variables()[name].has_effect(value) else 'no effect'} (default: {default})"
        if value != text:
            line += ", set by seatrial"
        elif isinstance(of_trial, Mapping) and of_trial.get(name) == value:
            line += f", set by env of the trial ({trial.origins.get(f'env.{name}', 'origin not recorded')})"
        lines.append(line)
    return lines


def _recorded(trial: Trial) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(host, facts) of the host that runs seatrial, if it is the only one, and of each measurement."""
    nodes = {node_of(each.subject) for each in trial.measurements} - {CLUSTER}
    if nodes == {trial.host} and all(job.nodes == 1 for job in trial.jobs):
        environment = [trial.environment.get(name) for name in ("host", "gpu")]
        yield from ((trial.host, facts) for facts in environment if isinstance(facts, dict))
    for measurement in trial.measurements:
        if measurement.facts:
            yield node_of(measurement.subject), measurement.facts
