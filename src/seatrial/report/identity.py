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
from seatrial.model import Trial
from seatrial.report.formatting import natural_key
from seatrial.util.text import and_more

NO_SERIAL = "no serial number recorded"
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
    gpus: dict[str, Gpu] = {}
    for node, facts in _recorded(trial):
        listed = facts.get("gpus")
        for fields in listed if isinstance(listed, list) else ():
            if isinstance(fields, dict) and "index" in fields and "uuid" in fields:
                gpus[f"{node}/gpu{fields['index']}"] = Gpu(
                    model=_text(fields, "name"),
                    serial=_text(fields, "serial"),
                    uuid=_text(fields, "uuid"),
                    slot=_text(fields, "pci_bus_id"),
                    vbios=_text(fields, "vbios"),
                )
    return gpus


def serial_digest(gpus: Mapping[str, Gpu]) -> str:
    """The SHA-256 of the sorted serial numbers, each on a line of its own; empty if there is none."""
    lines = "".join(f"{serial}\n" for serial in sorted(gpu.serial for gpu in gpus.values() if gpu.serial))
    return hashlib.sha256(lines.encode(errors="replace")).hexdigest() if lines else ""


def versions(trial: Trial) -> list[Version]:
    """GPU model, driver, CUDA, NCCL, torch, kernel and network of all hosts, as far as they are in the record."""
    by_name: dict[str, dict[str, str]] = {}  # name → host → value
    for host, facts in _recorded(trial):
        for name, value in _versions(facts):
            if isinstance(value, str) and value:
                by_name.setdefault(name, {})[host] = value
    found = []
    for name in _NAMES:
        if not (hosts := by_name.get(name)):
            continue
        value = Counter(hosts.values()).most_common(1)[0][0]
        others = sorted((host for host in hosts if hosts[host] != value), key=natural_key)
        found.append(Version(name, value, and_more([f"{host} {hosts[host]}" for host in others], _MAX_NAMED)))
    return found


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
    """(name in _NAMES, value) of each version in the facts of one measurement."""
    software, system = facts.get("software"), facts.get("os")
    software, system = (fields if isinstance(fields, dict) else {} for fields in (software, system))
    yield "driver", facts.get("driver") or software.get("driver")
    yield "CUDA of the driver", facts.get("cuda_driver")
    yield "CUDA of torch", software.get("cuda")
    yield "torch", software.get("torch")
    yield "kernel", system.get("kernel")
    yield "NCCL's network", facts.get("network")
    gpus = facts.get("gpus")
    links = [gpu.get("nvlinks") for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    active = {sum(link.get("active") is True for link in of_gpu) for of_gpu in links if isinstance(of_gpu, list)}
    if active:
        yield "NVLinks per GPU", ", ".join(map(str, sorted(active)))
    nccl = software.get("nccl")
    for source, version in nccl.items() if isinstance(nccl, dict) else ():
        yield "NCCL of the system" if source.startswith("/") else "NCCL of torch", version


def variable_lines(trial: Trial) -> list[str]:
    """One line for each variable with a known effect that is set: value, nodes, effect, and who set it if known."""
    of_trial = trial.config.get("env")
    lines = []
    for name, text, nodes, is_on_some, _ in sorted(variable_values(trial.measurements, catalog())):
        value = text.removesuffix(SET_BY_SEATRIAL).rstrip()
        effect, default = variables()[name].effect, variables()[name].default
        line = f"{name}={value}" + (f" on {and_more(nodes, _MAX_NAMED)} only" if is_on_some else "")
        line += f": {effect} (default: {default})" if variables()[name].has_effect(value) else ": like the default"
        if value != text:
            line += ", set by seatrial"
        elif isinstance(of_trial, Mapping) and of_trial.get(name) == value:
            line += f", set by env of the trial ({trial.origins.get(f'env.{name}', 'origin not recorded')})"
        lines.append(line)
    return lines


def _recorded(trial: Trial) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(host, facts) of the host that runs seatrial, if it is the only one, and of each measurement."""
    if all(measurement.subject.partition("/")[0] == trial.host for measurement in trial.measurements):
        environment = [trial.environment.get(name) for name in ("host", "gpu")]
        yield from ((trial.host, facts) for facts in environment if isinstance(facts, dict))
    for measurement in trial.measurements:
        if measurement.facts:
            yield measurement.subject.partition("/")[0], measurement.facts


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""
