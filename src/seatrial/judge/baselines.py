"""What a value is compared with: this site's own good runs, what is known of the hardware, the fleet's own median.

Facts of hardware are data/skus/*.yaml, every number with its source. Unknown is unknown, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from statistics import median

import yaml
from pydantic import JsonValue

from seatrial.model import Baseline, Expected, Frozen
from seatrial.statistics import spread

# Of two that differ nobody knows which is right; of three, two agree.
FLEET = 3
# Deviations from the fleet's median, in robust standard deviations, that chance hardly makes (Iglewicz and Hoaglin,
# How to Detect and Handle Outliers, 1993)
OUTLYING = 3.5


class Sku(Frozen):
    """One GPU model. ``nvml_names`` are matched exactly: a near miss is another GPU.

    ``peak`` is what the vendor states, by which a training's MFU is reckoned; it judges nobody.
    """

    name: str
    nvml_names: tuple[str, ...]
    peak: Mapping[str, Expected] = {}
    expected: Mapping[str, tuple[Expected, ...]]


@dataclass(frozen=True)
class Reference:
    """What a value is held against, and who says so. ``deviation``: how far the fleet is spread, if it judges."""

    value: float
    unit: str
    of: str
    source: str
    deviation: float | None = None


@dataclass(frozen=True)
class Fleet:
    """The values of one metric on all GPUs of one model in this trial."""

    model: str
    values: tuple[float, ...]

    @property
    def large_enough(self) -> bool:
        return len(self.values) >= FLEET

    @property
    def known(self) -> bool:
        """Whether it says what others of the model reach: of unnamed devices nobody knows that they are of one."""
        return bool(self.model) and self.large_enough and self.median > 0

    @cached_property
    def median(self) -> float:
        return median(self.values)

    @cached_property
    def spread(self) -> float:
        return spread(self.values)

    def outlying(self, value: float) -> bool:
        """Whether ``value`` is too far under the median for chance."""
        return self.large_enough and self.median - value > OUTLYING * self.spread


@cache
def skus() -> tuple[Sku, ...]:
    """Every SKU that ships with seatrial. Raises ValueError when two claim the same NVML name."""
    folder = resources.files("seatrial") / "data" / "skus"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".yaml")), key=lambda entry: entry.name)
    found = tuple(Sku.model_validate(yaml.safe_load(entry.read_text(encoding="utf-8"))) for entry in files)
    names = [name for sku in found for name in sku.nvml_names]
    if len(names) != len(set(names)):
        raise ValueError(f"two SKU files claim one NVML name: {sorted(names)}")
    return found


@dataclass(frozen=True)
class Known:
    """Everything there is to compare with, in the order of its rank."""

    site: Baseline | None = None
    skus: Sequence[Sku] = ()

    def find(self, key: str, facts: Mapping[str, JsonValue], fleet: Fleet, unit: str) -> Reference | str:
        """The reference for ``key`` on the GPU and shape that ``facts`` name, or a sentence on what is not known.

        The facts read are ``gpu`` (NVML name), ``world_size`` and ``nodes``, as the check recorded them.
        """
        published = self.published(key, facts)
        if isinstance(published, Reference):
            return published if published.unit == unit else _other_unit(published, unit)
        if not fleet.known:
            return published
        count = f"{len(fleet.values)} subjects on {fleet.model}"
        source = f"{published}, and the fleet's own median says who is slower than the rest, not whether all are slow"
        return Reference(fleet.median, unit, f"median of {count}", source, fleet.spread)

    def published(self, key: str, facts: Mapping[str, JsonValue]) -> Reference | str:
        """What the site or a SKU file says of ``key``, without regard to the fleet."""
        if self.site and (own := _fitting(self.site.expected.get(key, ()), facts, str(facts.get("gpu")))):
            return Reference(own.value, own.unit, f"site {self.site.name}", own.source)
        sku = next((sku for sku in self.skus if facts.get("gpu") in sku.nvml_names), None)
        if sku is None:
            return f"no SKU data for {facts.get('gpu') or 'an unnamed device'}"
        if expected := _fitting(sku.expected.get(key, ()), facts, ""):
            return Reference(expected.value, expected.unit, f"SKU {sku.name}", expected.source)
        return f"{sku.name} has no known {key} for {facts.get('world_size')} GPUs on {facts.get('nodes')} nodes"


NOTHING = Known()


def _other_unit(reference: Reference, unit: str) -> str:
    return f"{reference.of} has it in {reference.unit!r} ({reference.value:g}), which is not compared with {unit!r}"


def _fitting(values: Sequence[Expected], facts: Mapping[str, JsonValue], gpu: str) -> Expected | None:
    shape = (facts.get("world_size"), facts.get("nodes"), gpu)
    return next((one for one in values if (one.gpus, one.nodes, one.gpu) == shape), None)
