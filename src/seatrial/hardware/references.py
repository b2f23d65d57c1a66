"""Reference values: the site's baseline and the SKU data, else a bound of the network or the peers' median.

A SKU is one GPU model. SKU data are data/skus/*.yaml; each number has a source. A value that is not listed is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from statistics import NormalDist, median
from typing import TYPE_CHECKING

from pydantic import Field, FiniteFloat, JsonValue

from seatrial.config.schema import Fabric
from seatrial.hardware.fabric_model import key_parts, model_value
from seatrial.hardware.links import HIERARCHICAL_ALGORITHMS, Links, RdmaPorts, network_to_busbw_ratio
from seatrial.hardware.network_bounds import EACH_GPU
from seatrial.model import Baseline, BasisKind, Frozen, ReferenceValue, format_value
from seatrial.util import data_files
from seatrial.util.quantiles import spread
from seatrial.util.text import plural

if TYPE_CHECKING:
    from seatrial.model.benchmark import Bound

# Published values of the same configuration differ by at most 2 %: 345 to 349 GB/s on two H200, 473 to 482 on eight
REFERENCE_TOLERANCE = 1.05
MIN_PEERS = 3  # two different values do not show which one is wrong; of three, the majority is right
# Limit for outliers, in robust standard deviations below the median (Iglewicz and Hoaglin, How to Detect and Handle
# Outliers, 1993)
OUTLIER_DEVIATIONS = 3.5
# Probability that a large healthy peer group has an outlier. It raises the limit above OUTLIER_DEVIATIONS for groups of
# more than about 40 subjects, in which such a distance is reached by chance. In smaller groups the deviation is
# estimated from few values, and the probability is higher: of normally distributed values, about 14 % of groups of 3,
# 8 % of groups of 8 and 5 % of groups of 40 have an outlier; fewer if the spread is below MIN_RELATIVE_SPREAD
# (util/quantiles.py). So the outcome is WARN
FALSE_ALARM_PROBABILITY = 0.01
MODEL_SEPARATOR = " + "  # joins the names of different GPU models (bench.rank.describe_devices)
MIG_INSTANCE = " MIG "  # part of the driver's name of a MIG instance: NVIDIA A100-SXM4-80GB MIG 1g.10gb


class Spec(Frozen):
    """A peak value from the vendor's specification."""

    value: FiniteFloat = Field(gt=0)
    unit: str
    source: str = Field(min_length=1)


class Sku(Frozen):
    """One GPU model, identified by an exact match of ``nvml_names``.

    Keys of ``spec``: bf16, fp16, tf32, fp8 (TFLOP/s without sparsity) and fp32 (TFLOP/s without tensor cores);
    ``hbm`` (GB/s, reads plus writes), ``nvlink`` (GB/s unidirectional over all links), ``nvlink_nccl`` (as nvlink, but
    the lower value that NCCL's topology search assumes) and ``pcie`` (GB/s unidirectional). ``nvlinks``: the number of
    links.

    ``nvls``: the NVSwitches can reduce (NVLink SHARP). ``across_nodes``: NVLink can connect GPUs of several nodes.
    ``gpus_per_bridge``: the largest number of GPUs that an NVLink bridge connects. ``trained``: seatrial's trainings
    were measured on healthy GPUs of this model, so that their share of the GEMM rate is known (judge/limits.py).
    """

    name: str
    nvml_names: tuple[str, ...]
    spec: Mapping[str, Spec] = {}
    nvlinks: int | None = None
    nvls: bool = False
    across_nodes: bool = False
    gpus_per_bridge: int = 1
    trained: bool = False
    expected: Mapping[str, tuple[ReferenceValue, ...]] = {}


@dataclass(frozen=True)
class Reference:
    """A reference value and its origin. ``required``: a published minimum, one more limit besides ``fail_below``.

    If the value is a bound of the network, ``fail_below`` and ``warn_below`` replace the shares of the rule, and
    ``arithmetic`` is the computation of the bound as text.
    """

    value: float
    unit: str
    kind: BasisKind
    name: str
    source: str
    required: float | None = None
    warns_only: bool = False  # see ReferenceValue
    runs: int = 0  # number of runs from which a value of the site's baseline was learned
    fail_below: float | None = None
    warn_below: float | None = None
    arithmetic: str = ""
    highest: float | None = None  # the largest plausible value between nodes; None: unknown

    @property
    def label(self) -> str:
        """The origin as text, such as ``SKU NVIDIA H200 SXM`` or ``median of 8 subjects on NVIDIA H200``."""
        kinds = {BasisKind.PEERS: "median of", BasisKind.FABRIC_MODEL: "bound of"}
        return f"{kinds.get(self.kind, self.kind)} {self.name}"

    def reaches(self, other: Reference) -> bool:
        """Whether ``other`` is not above this bound, but for what published values of a configuration differ by."""
        return other.value <= REFERENCE_TOLERANCE * self.value

    def required_value(self, fail_below: float) -> float:
        """The value below which a metric fails; ``fail_below`` is the share that its rule requires."""
        return max(self.value * (fail_below if self.fail_below is None else self.fail_below), self.required or 0.0)


@dataclass(frozen=True)
class PeerGroup:
    """The values of one metric on all devices of one model in this trial, or on one node if ``node`` is set."""

    model: str
    values: tuple[float, ...]
    node: str = ""

    @cached_property
    def is_comparable(self) -> bool:
        """Whether the group is large enough to find outliers and has one GPU model only."""
        return len(self.values) >= MIN_PEERS and MODEL_SEPARATOR not in self.model

    @property
    def gives_reference(self) -> bool:
        """Whether the median is usable as a reference value. Devices without a name may be of different models."""
        return bool(self.model) and self.is_comparable and self.median > 0

    @cached_property
    def median(self) -> float:
        """The median of the values."""
        return median(self.values)

    @cached_property
    def healthy(self) -> float:
        """The value that a good device reaches; of two the higher one, since a fault only lowers a value; else 0."""
        if not self.model or MODEL_SEPARATOR in self.model or len(self.values) < 2:
            return 0.0
        return max(self.values) if len(self.values) == 2 else self.median

    @cached_property
    def spread(self) -> float:
        """The robust standard deviation of the values, at least 1 % of the median."""
        return spread(self.values)

    @cached_property
    def outlier_distance(self) -> float:
        """The distance below the median from which a value is an outlier; it increases with the size of the group."""
        by_chance = NormalDist().inv_cdf(1 - FALSE_ALARM_PROBABILITY / len(self.values))
        return max(OUTLIER_DEVIATIONS, by_chance) * self.spread

    def is_low_outlier(self, value: float) -> bool:
        return self.is_comparable and self.median - value > self.outlier_distance


NO_PEERS = PeerGroup("", ())


@cache
def skus() -> tuple[Sku, ...]:
    """All SKUs that ship with seatrial. Raises ValueError if two of them have the same NVML name."""
    loaded = tuple(Sku.model_validate(sku) for sku in data_files.read_all("skus"))
    names = [name for sku in loaded for name in sku.nvml_names]
    if len(names) != len(set(names)):
        raise ValueError(f"data/skus: duplicate NVML name in {sorted(names)}")
    return loaded


@dataclass(frozen=True)
class References:
    """All reference values, and the properties of the cluster that select among them.

    ``site_includes_run``: the site's baseline was learned from the run that is judged. ``cpu_only``: the trial asks for
    no GPU; judge/limits.py then does not judge the windows of a measurement, since the limits of windows are known for
    GPU nodes only. ``tcp``: the TCP network that the trial configures, if any. ``gemm_rates``: data type, such as bf16
    → GPU → TFLOP/s that this run measured. ``all_reduce``: its highest busbw of all GPUs in GB/s. ``gpu_bounds``: GPU
    model → key of a SKU's spec → bound by NVML's facts.
    """

    site: Baseline | None = None
    skus: Sequence[Sku] = ()
    site_includes_run: bool = False
    cpu_only: bool = False
    links: Links = field(default_factory=Links)
    tcp: Fabric | None = None
    gemm_rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    all_reduce: float | None = None
    gpu_bounds: Mapping[str, Mapping[str, Bound]] = field(default_factory=dict)

    def find(self, key: str, facts: Mapping[str, JsonValue], peers: PeerGroup, unit: str) -> Reference | str:
        """The reference value for ``key`` on the hardware in ``facts``, or the reason why there is none.

        Reads the facts ``gpu`` (NVML name), ``world_size`` and ``nodes``, as the check recorded them. For copies
        between two GPUs also ``node_gpus``, the number of GPUs of their node.
        """
        reference = self.site_or_sku_reference(key, facts)
        if _nodes(facts) > 1:
            reference = self._between_nodes(key, facts, reference)
        if isinstance(reference, Reference) or not peers.gives_reference:
            return reference
        name = f"{len(peers.values)} subjects on {peers.model}" + (f" in {peers.node}" if peers.node else "")
        source = f"{reference}; a comparison with peers can show that single subjects are slow, but not that all are"
        return Reference(peers.median, unit, BasisKind.PEERS, name, source)

    def site_or_sku_reference(self, key: str, facts: Mapping[str, JsonValue]) -> Reference | str:
        """The value of the site's baseline or of the SKU data, or the reason why there is none.

        With several GPU models: the site's value for exactly these models, else the lowest of their SKU values, if each
        model has one. Results are cached, since thousands of GPUs share a value.
        """
        names = ("gpu", "world_size", "nodes", "node_gpus")
        cache_key = (key, self._algorithm(key, facts), repr([facts.get(name) for name in names]))  # not always hashable
        if (reference := self._cache.get(cache_key)) is None:
            reference = self._cache[cache_key] = self._site_or_sku_reference(key, facts)
        return reference

    def applicable(self, key: str, facts: Mapping[str, JsonValue]) -> tuple[Reference, ...]:
        """The values that a metric must meet: the site's and the SKU's, or only the site's if its baseline overrides.

        For several nodes, the bound of the network replaces a value of the SKU that is missing or does not apply.
        """
        reference = self.find(key, facts, NO_PEERS, "")
        if isinstance(reference, str):
            return ()
        if reference.kind is not BasisKind.SITE or (self.site and self.site.override):
            return (reference,)
        published = self.without_site.find(key, facts, NO_PEERS, "")
        if isinstance(published, Reference) and published.unit == reference.unit:
            return (reference, published)
        return (reference,)

    @cached_property
    def _cache(self) -> dict[tuple[str, str, str], Reference | str]:
        return {}

    @cached_property
    def without_site(self) -> References:
        return replace(self, site=None)

    def with_ring(self, key: str, facts: Mapping[str, JsonValue], published: Reference) -> Reference | None:
        """The reference of an all-reduce if NCCL used Ring, for a run whose algorithm or ports are unknown; else None.

        Unknown ports are assumed to have the lowest rate at which an algorithm reaches ``published``, that of SHARP.
        """
        links, (operation, _, size), algorithm = self.links, key_parts(key), self._algorithm(key, facts)
        is_known = algorithm not in ("", "Ring") or (algorithm and (links.ports or _nodes(facts) < 2))
        from_site_or_peers = published.kind not in (BasisKind.SKU, BasisKind.FABRIC_MODEL)
        if operation != "all_reduce" or is_known or from_site_or_peers:
            return None
        if _nodes(facts) < 2:
            links = replace(links, network="", unknown_network="")  # the algorithm is that of one node
        if links.network == "efa" and not links.ports and isinstance(ranks := facts.get("world_size"), int):
            ratio = network_to_busbw_ratio(operation, "NVLS", ranks, _nodes(facts)) or 1.0
            links = replace(links, ports=RdmaPorts("efa", 1, published.value * ratio * 8))
        links = links.with_algorithm(operation, size, "Ring")
        reference = replace(self, site=None, links=links).find(key, facts, NO_PEERS, "")
        return reference if isinstance(reference, Reference) else None

    def _between_nodes(self, key: str, facts: Mapping[str, JsonValue], reference: Reference | str) -> Reference | str:
        """The reference of a metric on several nodes: ``reference``, or the bound of the network.

        The bound replaces a missing value, and a published one that is above it and that another algorithm reaches.
        Where one document has the value, the bound decides on FAIL, and the value on WARN.
        """
        if isinstance(reference, str):
            return self._network_reference(key, facts, reference)
        operation, _, size = key_parts(key)
        bound = self._network_reference(key, facts, "") if reference.kind is BasisKind.SKU else ""
        if isinstance(bound, str):
            return reference
        is_logged = (operation, size) in self.links.algorithms
        for algorithm in HIERARCHICAL_ALGORITHMS if is_logged and not bound.reaches(reference) else ():
            links = self.links.with_algorithm(operation, size, algorithm)
            other = replace(self, links=links)._network_reference(key, facts, "")
            if isinstance(other, Reference) and other.reaches(reference):
                value = format_value(reference.value, reference.unit)
                source = f"{bound.source}; the {value} of {reference.label} are above this bound and do not apply"
                # a published minimum that the algorithm in use can reach still applies if it is the stricter one
                minimum = reference.required or 0.0
                stricter = bound.required_value(0.0) < minimum <= bound.value
                return replace(bound, source=source, required=minimum if stricter else None)
        if reference.warns_only:
            minimum = max(reference.required or 0.0, bound.required_value(0.0))
            reference = replace(reference, fail_below=0.0, required=minimum, arithmetic=bound.arithmetic)
        return replace(reference, highest=bound.highest)

    def _network_reference(self, key: str, facts: Mapping[str, JsonValue], sku_reason: str) -> Reference | str:
        """The bound of the network as a reference; if there is none, ``sku_reason`` and why there is no bound.

        If a GPU model is unknown: ``sku_reason`` alone, which names the model.
        """
        models = self.skus_of(facts)
        matching = [sku for sku in models if isinstance(sku, Sku)]
        if len(matching) < len(models) and key_parts(key)[0] not in EACH_GPU:  # a port's rate needs no GPU model
            return sku_reason
        network = model_value(key, facts, matching, self.links, self.tcp)
        if isinstance(network, str):
            return f"{sku_reason}; {network}"
        return Reference(
            network.bound.value,
            "GB/s",
            BasisKind.FABRIC_MODEL,
            network.name,
            network.source,
            fail_below=network.limit.fail_below,
            warn_below=network.limit.warn_below,
            arithmetic=network.bound.arithmetic,
            highest=network.highest,
        )

    def _site_or_sku_reference(self, key: str, facts: Mapping[str, JsonValue]) -> Reference | str:
        gpu = str(facts.get("gpu") or "")
        learned = self.site.expected.get(key, ()) if self.site else ()
        # values for several nodes that name no fabric are ignored
        usable = [value for value in learned if value.nodes == 1 or value.fabric]
        if self.site and (value := _matching_value(usable, facts, gpu, self.links.fabric)):
            runs = min(value.runs, len(self.site.learned_from))
            kind, name, source = BasisKind.SITE, self.site.name, value.source
            return Reference(value.value, value.unit, kind, name, source, required=value.required, runs=runs)
        by_model = [self._sku_reference(key, facts, name) for name in gpu.split(MODEL_SEPARATOR)]
        references = [reference for reference in by_model if isinstance(reference, Reference)]
        if len(references) < len(by_model) or len({reference.unit for reference in references}) > 1:
            reasons = [reason for reason in by_model if isinstance(reason, str)]
            reason = reasons[0] if reasons else "their reference values have different units"
            return f"mixed models ({gpu}): {reason}" if len(by_model) > 1 else reason
        lowest = min(references, key=lambda reference: reference.value)
        return replace(lowest, name=f"{lowest.name}, slowest of {gpu}") if len(by_model) > 1 else lowest

    def skus_of(self, facts: Mapping[str, JsonValue]) -> list[Sku | str]:
        """The SKU of each GPU model in the fact ``gpu``, or the reason why there is none."""
        return [self.sku(name) for name in str(facts.get("gpu") or "").split(MODEL_SEPARATOR)]

    def sku(self, gpu: str) -> Sku | str:
        """The SKU with this NVML name, or the reason why there is none."""
        if MIG_INSTANCE in gpu or gpu in self.links.mig_models:
            return f"MIG enabled on {gpu}: reference values of the whole GPU do not apply to MIG instances"
        return self._sku_by_name.get(gpu) or f"no SKU data for {gpu or 'an unnamed device'}"

    @cached_property
    def _sku_by_name(self) -> dict[str, Sku]:
        return {name: sku for sku in reversed(self.skus) for name in sku.nvml_names}

    def _sku_reference(self, key: str, facts: Mapping[str, JsonValue], gpu: str) -> Reference | str:
        sku = self.sku(gpu)
        if isinstance(sku, str):
            return sku
        algorithm, node_gpus = self._algorithm(key, facts), facts.get("node_gpus")
        if key.startswith("transfer.peer_") and isinstance(node_gpus, int) and 1 < sku.gpus_per_bridge < node_gpus:
            return f"an NVLink bridge connects {sku.gpus_per_bridge} {sku.name}, others of the {node_gpus} by PCIe"
        if value := _matching_value(sku.expected.get(key, ()), facts, "", self.links.fabric, algorithm):
            reference = Reference(value.value, value.unit, BasisKind.SKU, sku.name, value.source)
            return replace(reference, required=value.required, warns_only=value.warns_only)
        nodes = facts.get("nodes")
        fabric = f" over {self.links.fabric or 'an unknown network'}" if isinstance(nodes, int) and nodes > 1 else ""
        size = f"{_count_text(facts.get('world_size'), 'GPU')} on {_count_text(nodes, 'node')}"
        return f"{sku.name} has no reference value {key} for {size}{fabric}{f' with {algorithm}' if algorithm else ''}"

    def _algorithm(self, key: str, facts: Mapping[str, JsonValue]) -> str:
        """NCCL's algorithm for the metric, empty if unknown.

        The log of several nodes has the algorithms between nodes. Inside a node, the all-reduce of all its GPUs uses
        NVLS if NCCL has channels for it, else Ring.
        """
        operation, _, size = key_parts(key)
        is_of_log = _nodes(facts) > 1 or not (self.links.network or self.links.unknown_network)
        if is_of_log and (logged := self.links.algorithms.get((operation, size))):
            return logged
        if operation != "all_reduce" or _nodes(facts) != 1:
            return ""
        environment = facts.get("backend_environment")
        if isinstance(environment, dict) and environment.get("NCCL_NVLS_ENABLE") == "0":
            return "Ring"
        return {True: "NVLS", False: "Ring", None: ""}[self.links.nvls]


NO_REFERENCES = References()


def _nodes(facts: Mapping[str, JsonValue]) -> int:
    nodes = facts.get("nodes")
    return nodes if type(nodes) is int else 0


def _count_text(count: JsonValue, noun: str) -> str:
    """A number with its noun. Facts are not validated here: a value that is not an integer is shown as it is."""
    return plural(count, noun) if type(count) is int else f"{count} {noun}s"


def _matching_value(
    values: Sequence[ReferenceValue], facts: Mapping[str, JsonValue], gpu: str, fabric: str, algorithm: str = ""
) -> ReferenceValue | None:
    """The first value for this number of ranks and nodes, GPU model, fabric and algorithm (empty: the first of any)."""
    hardware = (facts.get("world_size"), facts.get("nodes"), gpu)
    matching = (
        value
        for value in values
        if (value.gpus, value.nodes, value.gpu) == hardware
        and value.fabric in ("", fabric)
        and (not algorithm or value.algorithm in ("", algorithm))
    )
    return next(matching, None)
