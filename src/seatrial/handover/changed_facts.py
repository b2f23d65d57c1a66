"""Facts that differ between two sides, and which of them changed where a speed was lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten

from seatrial.checks import catalog
from seatrial.diagnose.causes import SET_BY_SEATRIAL, variable_values
from seatrial.handover.side import Side
from seatrial.model import CLUSTER, ends, node_of
from seatrial.report.formatting import natural_key, subject_kind
from seatrial.report.identity import facts_by_host, gpu_fields
from seatrial.report.tables import fact_text, settings
from seatrial.util.text import and_more

# Keys of NVML's facts of a GPU that can change its speed → name
_GPU_FACTS = {
    "name": "GPU model",
    "vbios": "VBIOS",
    "power_limit_w": "power limit in W",
    "pcie_width": "PCIe lanes",
    "ecc_mode": "ECC",
    "mig_mode": "MIG",
    "persistence_mode": "persistence mode",
    "sm_clock_max_mhz": "highest SM clock in MHz",
    "memory_clock_max_mhz": "highest memory clock in MHz",
    "pci_bus_id": "slot",
}
_NOT_FACTS = {"name", "description", "checks"}  # settings of a trial; options of checks decide what is compared
_MAX_NAMED = 4  # places in a text
_MAX_CHARACTERS = 60  # of a value
_VARIABLE = "variable "  # prefix of the facts that are environment variables; those can be not set


@dataclass(frozen=True)
class FactChange:
    """A fact that differs between the sides on ``places``: hosts or GPUs of side B; none for the whole run."""

    name: str
    before: str
    after: str
    places: tuple[str, ...]
    of: int

    def concerns(self, part: str) -> bool:
        """Whether the fact changed on a part, its node, or an end of it; a fact of the run concerns all."""
        if not self.places or part == CLUSTER or subject_kind(part) == "rail":
            return True
        return any(end in self.places or node_of(end) in self.places for end in ends(part))

    @property
    def where(self) -> str:
        """The places as text."""
        if not self.places:
            return "the whole run"
        if len(self.places) == self.of > _MAX_NAMED:
            return f"all {self.of}"
        return and_more(sorted(self.places, key=natural_key), _MAX_NAMED)


def possible_causes(slower: Sequence[str], compared: Sequence[str], facts: Sequence[FactChange]) -> list[str]:
    """The facts that changed on parts that are slower, as text; those that did not change elsewhere come first."""
    causes = []
    for fact in facts:
        lost, total = sum(map(fact.concerns, slower)), sum(map(fact.concerns, compared))
        others_lost, others = len(slower) - lost, len(compared) - total
        text = f"{fact.name} {fact.before} → {fact.after}, {fact.where}: {lost} of {total} with this change lost speed"
        is_specific = others > 0 and lost * others > others_lost * total
        if lost:
            text += f", {others_lost} of {others} without it" if others else ""
            causes.append((not is_specific, total, text))
    return [text for _, _, text in sorted(causes)]


def changed_facts(a: Side, b: Side) -> Iterator[FactChange]:
    """Each fact with another value than before, once for all places with the same two values."""
    before, after = _facts(a), _facts(b)
    for name in dict.fromkeys((*after, *before)):
        old, new = before.get(name, {}), after.get(name, {})
        groups: dict[tuple[str, ...], list[str]] = {}
        for key in dict.fromkeys((*new, *old)):
            values = tuple(shorten(_value(each, key, name), _MAX_CHARACTERS, placeholder=" …") for each in (old, new))
            is_gone = key in a.gpus and key not in b.gpus
            if values[0] != values[1] and all(values) and not is_gone:
                groups.setdefault(values, []).append(b.places.get(key, key))
        for (earlier, value), places in groups.items():
            yield FactChange(name, earlier, value, tuple(sorted(filter(None, places))), len(new or old))


def _value(by_place: Mapping[str, str], place: str, name: str) -> str:
    """The value at a place; of a place that is not recorded, such as a new host, that of all others; else empty."""
    if place in by_place:
        return by_place[place]
    if name.startswith(_VARIABLE):
        return "not set"
    return next(iter(by_place.values())) if len(set(by_place.values())) == 1 else ""


def _facts(side: Side) -> dict[str, dict[str, str]]:
    """Name → host, key of a GPU, or "" for the whole run → value in the last record."""
    trial = side.trials[-1]
    found = facts_by_host(trial)
    for subject, fields in gpu_fields(trial).items():
        for field, name in _GPU_FACTS.items():
            if fields.get(field) is not None:
                found.setdefault(name, {})[side.keys[subject]] = fact_text(fields[field])
    for name, text, nodes, _, _ in variable_values(trial.measurements, catalog()):
        value = text.removesuffix(SET_BY_SEATRIAL).rstrip()
        found.setdefault(_VARIABLE + name, {}).update(dict.fromkeys(nodes or [""], value))
    for name, value, _ in settings({key: trial.config[key] for key in trial.config.keys() - _NOT_FACTS}, {}):
        found[f"setting {name}"] = {"": value}
    found["seatrial"] = {"": trial.seatrial}
    if trial.topology:
        found["topology of switches"] = {"": trial.topology.model_dump_json()}
    return found
