"""Judges what another tool measured, as a measurement of the check that measures the same."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.checks.check import Check
from seatrial.checks.declare import metric
from seatrial.config.schema import CheckSettings, Cluster, Config, Fabric
from seatrial.hardware import links
from seatrial.hardware.bounds import MetricLookup, hardware_bound
from seatrial.hardware.references import MIG_INSTANCE, MODEL_SEPARATOR, References, Sku, skus
from seatrial.judge import judge
from seatrial.model import Baseline, Job, Measurement, Metric, Outcome, Phase, Reason, Verdict
from seatrial.model.benchmark import Bound
from seatrial.pipeline.benchmark_hardware import FABRICS, known_models

NODE = "node"  # the node's name in verdicts, since most tools do not print it
_TOO_HIGH = frozenset({Reason.IMPLAUSIBLY_HIGH, Reason.MEASUREMENT_ERROR})
_LINK_FACTS: Mapping[links.FactRole, str] = {
    "transports": "transports",
    "stated_ports": "stated_ports",
    "socket_interfaces": "socket_interfaces",
    "algorithms": "algorithms",
}
_PORTS_STEP = "give the network ports of a node: --nics PORTSxGb/s, such as --nics 8x400"
_ALGORITHM_STEP = (
    "give --algorithm: Ring if NCCL_ALGO was set to it, else NVLSTree or Tree; or run again with NCCL_DEBUG=INFO "
    "NCCL_DEBUG_SUBSYS=INIT,NET,ENV,TUNING"
)
_FABRICS = ", ".join(FABRICS)
_BASELINE_STEP = "give --baseline FILE, learned from good runs of `seatrial run`"


MeasuredBy = tuple[Check, tuple[metric, ...]]  # a check, and those of its metrics that another tool measures too


@cache
def measured_by(tool: str) -> Mapping[str, MeasuredBy]:
    """Test of another tool → the check that measures the same, and its metrics."""
    found: dict[str, MeasuredBy] = {}
    for check in catalog().values():
        for declared in check.declared:
            for name, _, test in (text.partition(" ") for text in declared.also_measured_by):
                if name == tool:
                    found[test] = check, (*found.get(test, (check, ()))[1], declared)
    return found


@dataclass(frozen=True, kw_only=True)
class BenchmarkRun:
    """A run of another tool as a job of ``check``. ``facts``: what the check and the roles in _LINK_FACTS record.

    ``fabric``: of nodes that are connected by TCP. ``site``: the baseline of the option --baseline.
    """

    check: Check
    facts: Mapping[str, JsonValue]
    nodes: int = 1
    gpus_per_node: int = 1
    fabric: Fabric | None = None
    site: Baseline | None = None

    def verdicts(self, declared: Sequence[metric], metrics: Sequence[Metric]) -> tuple[Verdict, ...]:
        """The verdicts on ``metrics``, which ``declared`` declares."""
        check = replace(
            self.check,
            declared=tuple(declared),
            fact_roles=_LINK_FACTS,
            phase=Phase.ENVIRONMENT,  # no other tool reads error counters before and after its run
        )
        nodes = [f"{NODE}{number}" for number in range(self.nodes)] if self.nodes > 1 else [NODE]
        subjects = [f"{node}/gpu{index}" for node in nodes for index in range(self.gpus_per_node)]
        first = Measurement(
            check=check.name, subject=subjects[0], rank=0, metrics=tuple(metrics), facts=dict(self.facts)
        )
        others = (
            Measurement(check=check.name, subject=subject, rank=rank)
            for rank, subject in enumerate(subjects[1:], start=1)
        )
        job = Job(
            name=check.name,
            placement="ranks",
            device="cuda",
            nodes=self.nodes,
            ranks_per_node=self.gpus_per_node,
            checks=(check.name,),
            options={},
            expected_gpus=None,
            expected_nodes=self.nodes,
            limit_s=check.limit_s,
        )
        cluster = Cluster(nodes=self.nodes, fabric=self.fabric)
        config = Config(name="benchmark", cluster=cluster, checks={check.name: CheckSettings()})
        return judge(config, [job], [first, *others], {check.name: check}, {}, self.site, None)

    @cached_property
    def references(self) -> References:
        """The reference values that the judge uses."""
        measurement = Measurement(check=self.check.name, subject=NODE, facts=dict(self.facts))
        known = links.read([measurement], {self.check.name: replace(self.check, fact_roles=_LINK_FACTS)})
        return References(self.site, skus(), links=known, tcp=self.fabric)

    def bound(self, reference_key: str, bounded_by: str) -> Bound | None:
        """The largest value that the links of a node allow; None if unknown."""
        lookup = MetricLookup(reference_key, bounded_by=bounded_by, operation=self.check.operation)
        return hardware_bound(lookup, self.facts, self.references)

    def with_next_step(self, verdict: Verdict, sizes: Sequence[str] = (), *, needs_ports: bool = False) -> Verdict:
        """The verdict; without a comparison, its ``fix`` is the next step that fits the reason.

        ``sizes``: the sizes with a reference value on this hardware, such as 8GiB. ``needs_ports``: a reference value
        depends on the network ports, which are unknown.
        """
        reasons = frozenset(verdict.reasons)
        if Reason.ALGORITHM_UNKNOWN in reasons:
            step = f"{_PORTS_STEP}, and {_ALGORITHM_STEP}" if needs_ports else _ALGORITHM_STEP
        elif reasons & _TOO_HIGH:
            step = "check the options on the hardware, and run the benchmark again"
        elif verdict.outcome is Outcome.UNJUDGED and Reason.NO_REFERENCE in reasons:
            step = self._model_step or self._network_step or self._size_step(sizes, needs_ports)
        else:
            return verdict
        return replace(verdict, fix=step)

    @property
    def _model_step(self) -> str:
        """The next step for GPUs whose model is the reason that there is no reference value; empty if it is not."""
        names = str(self.facts.get("gpu")).split(MODEL_SEPARATOR)
        if mig := next((name for name in names if MIG_INSTANCE in name), ""):
            return f"disable MIG ({mig}) with `nvidia-smi -i INDEX -mig 0`, reset the GPU, and run again"
        if vendor := next((name.split()[0] for name in names if name.startswith(("AMD ", "Intel "))), ""):
            return f"none: seatrial has data of NVIDIA GPUs only. Compare with the figures of {vendor} for this model"
        if len(names) > 1:
            return f"run again on GPUs of one model: {' and '.join(names)} have different limits"
        if isinstance(self.references.sku(names[0]), Sku):
            return ""
        return f"no reference values of this GPU model are known ({known_models()}): {_BASELINE_STEP}"

    @property
    def _network_step(self) -> str:
        """The next step for a network of which there are no data; empty if there are, or if its name is unknown."""
        known = self.references.links
        name = known.unknown_network or (known.network if known.network in ("tcpx", "tcpxo") else "")
        return name and f"no data of the network {name}: give --fabric if it is {_FABRICS}, or {_BASELINE_STEP}"

    def _size_step(self, sizes: Sequence[str], needs_ports: bool) -> str:
        names = [sku.name.removeprefix("NVIDIA ") for sku in skus() if self.facts.get("gpu") in sku.nvml_names]
        command = f"`seatrial show skus {shlex.quote(names[0])}`"
        step = f"{command} lists the sizes and numbers of GPUs with a reference value: run again with one of them"
        if sizes:
            options = " or ".join(f"-e {size.removesuffix('iB')}" for size in sizes)
            step = f"the reference values are for {', '.join(sizes)}: run again with {options}; {command} lists them"
        return f"{_PORTS_STEP}. Else {step}, or {_BASELINE_STEP}" if needs_ports else f"{step}, or {_BASELINE_STEP}"
