"""What a value is compared with: this site's own good runs, what is known of the hardware, the fleet's own median.

Facts of hardware are data/skus/*.yaml, every number with its source. Unknown is unknown, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from statistics import NormalDist, median

from pydantic import Field, FiniteFloat, JsonValue

from seatrial.hardware.links import Links
from seatrial.model import Baseline, BasisKind, Frozen, ReferenceValue
from seatrial.util import data_files
from seatrial.util.quantiles import spread

# Of two that differ nobody knows which is right; of three, two agree.
MIN_PEERS = 3
# Deviations from the fleet's median, in robust standard deviations, that chance hardly makes (Iglewicz and Hoaglin,
# How to Detect and Handle Outliers, 1993)
OUTLIER_DEVIATIONS = 3.5
# The chance that a good fleet, however large, has even one that is flagged: what decides beyond some forty subjects
FALSE_ALARM_PROBABILITY = 0.01
MODEL_SEPARATOR = " + "  # joins the names of unlike GPUs (bench.rank.describe_devices)
_SLICE = " MIG "  # in the name that the driver gives to a slice: NVIDIA A100-SXM4-80GB MIG 1g.10gb


class Spec(Frozen):
    """What the vendor says that the hardware can do at most, and where."""

    value: FiniteFloat = Field(gt=0)
    unit: str
    source: str = Field(min_length=1)


class Sku(Frozen):
    """One GPU model. ``nvml_names`` are matched exactly: a near miss is another GPU.

    ``spec`` has what of these is known: TFLOP/s without sparsity by type (bf16, fp16, tf32, fp8; fp32 without tensor
    cores), and GB/s of ``hbm`` (read and write together), ``nvlink`` (one way, all links), ``nvlink_nccl`` (what NCCL
    plans with of that) and ``pcie`` (one way). ``nvlinks`` is how many links there are.

    ``nvls``: whether their switches sum (NVLink SHARP). ``across_nodes``: NVLink may join GPUs of several nodes.
    ``bridged``: how many GPUs a bridge may join at most.
    """

    name: str
    nvml_names: tuple[str, ...]
    spec: Mapping[str, Spec] = {}
    nvlinks: int | None = None
    nvls: bool = False
    across_nodes: bool = False
    bridged: int = 1
    expected: Mapping[str, tuple[ReferenceValue, ...]] = {}


@dataclass(frozen=True)
class Reference:
    """What a value is held against, and who says so. ``deviation``: how far the fleet is spread, if it judges."""

    value: float
    unit: str
    kind: BasisKind
    name: str
    source: str
    peer_spread: float | None = None
    required: float | None = None

    @property
    def label(self) -> str:
        """Who says so, as text to show."""
        return f"{'median of' if self.kind is BasisKind.PEERS else self.kind} {self.name}"


@dataclass(frozen=True)
class PeerGroup:
    """The values of one metric on all GPUs of one model in this trial, or in one node of it."""

    model: str
    values: tuple[float, ...]
    node: str = ""

    @cached_property
    def is_comparable(self) -> bool:
        """Whether its members can be told from each other: unlike models are never compared."""
        return len(self.values) >= MIN_PEERS and MODEL_SEPARATOR not in self.model

    @property
    def gives_reference(self) -> bool:
        """Whether it says what others of the model reach: of unnamed devices nobody knows that they are of one."""
        return bool(self.model) and self.is_comparable and self.median > 0

    @cached_property
    def median(self) -> float:
        return median(self.values)

    @cached_property
    def spread(self) -> float:
        return spread(self.values)

    @cached_property
    def outlier_distance(self) -> float:
        """How far under the median chance may take a good one: the more there are, the farther it takes the last."""
        return (
            max(OUTLIER_DEVIATIONS, NormalDist().inv_cdf(1 - FALSE_ALARM_PROBABILITY / len(self.values))) * self.spread
        )

    def is_low_outlier(self, value: float) -> bool:
        """Whether ``value`` is too far under the median for chance."""
        return self.is_comparable and self.median - value > self.outlier_distance


@cache
def skus() -> tuple[Sku, ...]:
    """Every SKU that ships with seatrial. Raises ValueError when two claim the same NVML name."""
    found = tuple(Sku.model_validate(sku) for sku in data_files.read_all("skus"))
    names = [name for sku in found for name in sku.nvml_names]
    if len(names) != len(set(names)):
        raise ValueError(f"two SKU files claim one NVML name: {sorted(names)}")
    return found


@dataclass(frozen=True)
class References:
    """Everything there is to compare with, in the order of its rank, and what of the cluster decides what fits it.

    ``fabric`` is the class of the network between nodes, empty where it is not known; ``sliced`` the models of GPUs
    that MIG has cut into parts.
    """

    site: Baseline | None = None
    skus: Sequence[Sku] = ()
    fabric: str = ""
    mig_models: frozenset[str] = frozenset()
    _said: dict[tuple[object, ...], Reference | str] = field(default_factory=dict, compare=False, repr=False)

    def find(self, key: str, facts: Mapping[str, JsonValue], fleet: PeerGroup, unit: str) -> Reference | str:
        """The reference for ``key`` on the GPU and shape that ``facts`` name, or a sentence on what is not known.

        The facts read are ``gpu`` (NVML name), ``world_size`` and ``nodes``, as the check recorded them.
        """
        published = self.site_or_sku_reference(key, facts)
        if isinstance(published, Reference):
            return published if published.unit == unit else _other_unit(published, unit)
        if not fleet.gives_reference:
            return published
        count = f"{len(fleet.values)} subjects on {fleet.model}" + (f" in {fleet.node}" if fleet.node else "")
        source = f"{published}, and the fleet's own median says who is slower than the rest, not whether all are slow"
        return Reference(fleet.median, unit, BasisKind.PEERS, count, source, fleet.spread)

    def site_or_sku_reference(self, key: str, facts: Mapping[str, JsonValue]) -> Reference | str:
        """What the site or SKU files say of ``key``, without regard to the fleet.

        Where models are mixed, the one of which least is expected sets the pace, if it is known of all of them.
        """
        gpu, ranks, nodes = facts.get("gpu"), facts.get("world_size"), facts.get("nodes")
        plain = type(gpu) is str and type(ranks) is int and type(nodes) is int
        asked = (key, gpu, ranks, nodes) if plain else (key, repr(gpu), repr(ranks), repr(nodes))
        if (said := self._said.get(asked)) is None:  # thousands of GPUs ask the same
            said = self._said[asked] = self._published(key, facts)
        return said

    @cached_property
    def without_site(self) -> References:
        """The same without the site: what is known of its hardware."""
        return replace(self, site=None, _said={})

    def _published(self, key: str, facts: Mapping[str, JsonValue]) -> Reference | str:
        gpu = str(facts.get("gpu") or "")
        if self.site and (own := _of_site(self.site.expected.get(key, ()), facts, gpu, self.fabric)):
            return Reference(own.value, own.unit, BasisKind.SITE, self.site.name, own.source, required=own.required)
        found = [self._of_model(key, facts, name) for name in gpu.split(MODEL_SEPARATOR)]
        references = [one for one in found if isinstance(one, Reference)]
        if len(references) < len(found) or len({one.unit for one in references}) > 1:
            unknown = next((one for one in found if isinstance(one, str)), "their figures are in different units")
            return f"{gpu} are mixed models, and {unknown}" if len(found) > 1 else unknown
        slowest = min(references, key=lambda one: one.value)
        return replace(slowest, name=f"{slowest.name}, the slowest of {gpu}") if len(found) > 1 else slowest

    def sku(self, gpu: str) -> Sku | str:
        """What is known of a model by its NVML name, or why nothing is."""
        if _SLICE in gpu or gpu in self.mig_models:
            return f"{gpu} is cut into MIG slices: what is known of the whole GPU does not apply to a part of it"
        found = next((sku for sku in self.skus if gpu in sku.nvml_names), None)
        return found or f"no SKU data for {gpu or 'an unnamed device'}"

    def _of_model(self, key: str, facts: Mapping[str, JsonValue], gpu: str) -> Reference | str:
        sku = self.sku(gpu)
        if isinstance(sku, str):
            return sku
        if expected := _fitting(sku.expected.get(key, ()), facts, "", self.fabric):
            value, unit, source = expected.value, expected.unit, expected.source
            return Reference(value, unit, BasisKind.SKU, sku.name, source, required=expected.required)
        nodes = facts.get("nodes")
        fabric = f" over {self.fabric or 'a network of unknown class'}" if isinstance(nodes, int) and nodes > 1 else ""
        return f"{sku.name} has no known {key} for {facts.get('world_size')} GPUs on {nodes} nodes{fabric}"


NO_REFERENCES = References()


def references_for(links: Links, site: Baseline | None) -> References:
    """The site's baseline and the SKU files, for a cluster with these links."""
    return References(site, skus(), links.fabric, links.mig_models)


def _other_unit(reference: Reference, unit: str) -> str:
    return f"{reference.label} has it in {reference.unit!r} ({reference.value:g}), which is not compared with {unit!r}"


def _of_site(
    values: Sequence[ReferenceValue], facts: Mapping[str, JsonValue], gpu: str, fabric: str
) -> ReferenceValue | None:
    """As ``_fitting``; a figure across nodes is of the very network that it was learned on, or of an unknown one."""
    return _fitting([one for one in values if one.nodes == 1 or one.fabric], facts, gpu, fabric)


def _fitting(
    values: Sequence[ReferenceValue], facts: Mapping[str, JsonValue], gpu: str, fabric: str
) -> ReferenceValue | None:
    shape = (facts.get("world_size"), facts.get("nodes"), gpu)
    fits = (one for one in values if (one.gpus, one.nodes, one.gpu) == shape and one.fabric in ("", fabric))
    return next(fits, None)
