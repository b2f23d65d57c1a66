"""Tables of nccl-tests as measurements of the checks of their operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from pydantic import JsonValue

from seatrial.checks.declare import declaration, metric
from seatrial.config.schema import Fabric
from seatrial.discover.nccl_tests_output import NcclTestsOutput
from seatrial.hardware.fabric_model import node_links
from seatrial.hardware.links import NCCL_ALGO_NAMES
from seatrial.hardware.network_bounds import NodeLinks, default_algorithm, network_bound
from seatrial.hardware.references import NO_PEERS, Reference, Sku
from seatrial.judge.limits import MAX_RATIO_OF_BOUND
from seatrial.model import CLUSTER, Baseline, Metric, Outcome, Reason, UsageError, Verdict, parse_bytes, worst
from seatrial.model.benchmark import (
    BenchmarkHardware,
    BenchmarkJudgement,
    BenchmarkResult,
    Bound,
    MeasuredSize,
)
from seatrial.model.rule import BOUND, Condition
from seatrial.pipeline.benchmark_hardware import ALGORITHMS, HardwareOptions, TableHardware, table_hardware
from seatrial.pipeline.benchmark_verdicts import NODE, BenchmarkRun, MeasuredBy, measured_by
from seatrial.pipeline.nccl_tests_table import SATURATING_BYTES, Series, split_series

_TOOL = "nccl-tests"
_MAX_SETTINGS = 30  # environment variables that notes list
_MAX_JUDGED_SIZES = 256  # the largest; a sweep has fewer than 100
# The fix of the check's rule on wrong elements names evidence that nccl-tests does not print
_WRONG_DATA_FIX = (
    "Do not train on these nodes. Run all_reduce_perf -c 1 on each node alone, then on pairs of nodes: the node, or "
    "the path between two nodes, with wrong elements is at fault"
)


@cache
def _checks() -> Mapping[str, MeasuredBy]:
    """Operation → its check and metrics, for the operations that a program of nccl-tests measures too."""
    return {check.operation: (check, declared) for check, declared in measured_by(_TOOL).values()}


def judge_output(
    output: NcclTestsOutput,
    options: HardwareOptions,
    file: str,
    operation: str = "",
    site: Baseline | None = None,
) -> BenchmarkJudgement:
    """The verdicts on all tables. ``operation``: --operation, or empty. Raises UsageError if it is unknown."""
    if operation and operation not in _checks():
        raise UsageError(f"--operation {operation!r}: expected one of {', '.join(_checks())}")
    judged = [
        _judged(_Candidate(output, series, options, site), operation)
        for table in output.tables
        for series in split_series(table) or [Series(table, ())]
    ]
    notes = list(options.notes)
    if not output.tables:
        notes.append(f"no table of results{f': {output.failure}' if output.failure else ''}")
    if output.nccl.version:
        notes.append(f"NCCL {output.nccl.version}")
    settings = dict(output.nccl.settings)
    for table in output.tables:
        settings |= table.settings
    notes += [f"set for this run: {name}={value}" for name, value in sorted(settings.items())[:_MAX_SETTINGS]]
    return BenchmarkJudgement(
        tool=_TOOL,
        file=file,
        # a result without a check counts only if it is FAIL
        outcome=worst(result.outcome for result, _ in judged if result.check or result.outcome is Outcome.FAIL),
        hardware=judged[-1][1].hardware if judged else BenchmarkHardware(),
        contradictions=tuple(dict.fromkeys(text for _, hardware in judged for text in hardware.contradictions)),
        notes=tuple(notes),
        results=tuple(result for result, _ in judged),
    )


def _judged(unnamed: _Candidate, option: str) -> tuple[BenchmarkResult, TableHardware]:
    """The result of one series, and its hardware. ``option``: --operation.

    If neither the output nor --operation names the operation, it must be allowed by the columns and able to reach the
    measured bandwidth. If several operations meet these conditions, the result is UNJUDGED.
    """
    name, possible, problem = _operations(unnamed.series, option)
    candidates = [replace(unnamed, operation=each) for each in possible or ("",)]
    plausible = [candidate for candidate in candidates if problem or not candidate.is_too_fast] or candidates
    first = plausible[0]
    if problem:
        return first.unjudged(name, [problem]), first.table_hardware
    if len(plausible) > 1:
        names = " or ".join(possible)
        text = f"the columns are those of {names}: give the operation with --operation"
        return first.unjudged(names, [*first.problems, text]), first.table_hardware
    result = first.judged()
    if not name:
        impossible = [other for other in possible if other != result.name]
        why = f", since {', '.join(impossible)} cannot reach this bandwidth" if impossible else ""
        note = f"the output does not name the program: {result.name} by its columns{why}"
        result = result.model_copy(update={"notes": (note, *result.notes)})
    return result, first.table_hardware


def _operations(series: Series, option: str) -> tuple[str, Sequence[str], str]:
    """The name of the operation, the operations of checks that it can be, and why it is not judged.

    ``option`` is used if the columns exclude the operation of the program. The name is empty if only the columns show
    the operation.
    """
    table, rows = series.table, series.rows
    program = measured_by(_TOOL).get(table.program)
    of_program = program[0].operation if program else ""
    if not rows:
        reason = table.failure or (table.rejected[0] if table.rejected else "the run ended before its first result")
        name = of_program or option or table.program or "unknown operation"
        return name, [name] if name in _checks() else [], f"the table has no complete row: {reason}"
    if table.program and not of_program:
        return table.program, [], f"{table.program}_perf has no check in seatrial, and no reference values"
    if named := next((name for name in (of_program, option) if name and series.allows(name)), ""):
        return named, [named], ""
    if option:
        last = f"{series.variant}, count {rows[-1].count} at {rows[-1].size} B"
        return option, [option], f"the columns are not those of {option}: {last}"
    if series.possible_operations:
        return "", series.possible_operations, ""
    text = "no operation that seatrial measures has these columns: gather and scatter have no reference values"
    return "unknown operation", [], text


@dataclass(frozen=True)
class _Candidate:
    """A series as measurements of ``operation``, which is empty if no check measures the operation."""

    output: NcclTestsOutput
    series: Series
    options: HardwareOptions
    site: Baseline | None
    operation: str = ""

    @cached_property
    def table_hardware(self) -> TableHardware:
        return table_hardware(self.options, self.output, self.series.table, self.operation)

    @property
    def hardware(self) -> BenchmarkHardware:
        return self.table_hardware.hardware

    @property
    def nodes(self) -> int:
        """The number of nodes; 1 if unknown."""
        return self.hardware.nodes or 1

    @property
    def problems(self) -> list[str]:
        """Why the series cannot be judged."""
        return [*self.table_hardware.problems, *self.series.problems]

    @cached_property
    def declared(self) -> metric:
        """The check's bus bandwidth on this number of nodes."""
        _, declared = _checks()[self.operation]
        return next((each for each in declared if each.rules[0].when.includes(self.nodes)), declared[0])

    @property
    def sizes(self) -> tuple[MeasuredSize, ...]:
        """The sizes to judge, in order of size."""
        return self.series.sizes[-_MAX_JUDGED_SIZES:]

    @property
    def settings(self) -> dict[str, JsonValue]:
        """The environment variables of NCCL in its log and in the command."""
        return {**self.output.nccl.settings, **self.series.table.settings}

    @cached_property
    def algorithm(self) -> str:
        """NCCL's algorithm of an all-reduce, by its name in NCCL's log; empty if unknown.

        It is that of --algorithm, else NCCL_ALGO, else of the largest size in NCCL's log.
        """
        if self.operation != "all_reduce":
            return ""
        choices = [choice for choice in self.output.nccl.choices if choice.operation == "AllReduce"]
        logged = max(choices, key=lambda choice: choice.size).algorithm if choices else ""
        forced = ALGORITHMS.get(str(self.settings.get("NCCL_ALGO", "")).casefold())
        return self.options.algorithm or forced or (logged if logged in ALGORITHMS.values() else "")

    @cached_property
    def run(self) -> BenchmarkRun:
        """The run as a job of the check, with what the output and the options say of the hardware."""
        hardware = self.hardware
        gbps = hardware.ports * hardware.port_gbps if hardware.ports and hardware.port_gbps else None
        facts: dict[str, JsonValue] = {
            "gpu": hardware.gpu,
            "world_size": hardware.ranks,
            "nodes": hardware.nodes,
            "backend": "nccl",
            "backend_environment": self.settings,
            "transports": dict.fromkeys(self.table_hardware.transports, 1),
            "socket_interfaces": {NODE: [*self.output.nccl.socket_interfaces]},
        }
        if gbps and hardware.fabric != "tcp":
            kind = hardware.fabric
            facts["stated_ports"] = {"kind": kind, "count": hardware.ports, "gbps": hardware.port_gbps}
        if self.algorithm:
            by_size: dict[str, JsonValue] = {size.label: {"algorithm": self.algorithm} for size in self.sizes}
            facts["algorithms"] = {self.operation: {"by_size": by_size}}
        return BenchmarkRun(
            check=_checks()[self.operation][0],
            facts=facts,
            nodes=self.nodes,
            gpus_per_node=(hardware.ranks or 1) // self.nodes,
            fabric=Fabric(kind="tcp", rate=gbps and f"{gbps} Gb/s") if hardware.fabric == "tcp" else None,
            site=self.site,
        )

    @cached_property
    def sku(self) -> Sku | None:
        sku = self.run.references.sku(self.hardware.gpu)
        return sku if isinstance(sku, Sku) else None

    @cached_property
    def reference_sizes(self) -> list[str]:
        """The sizes with a reference value on this hardware, such as 8GiB, in order of size."""
        run, prefix, keys = self.run, f"{self.operation}.busbw.", {*(self.site.expected if self.site else ())}
        found = (
            key.removeprefix(prefix)
            for key in keys.union(self.sku.expected if self.sku else ())
            if key.startswith(prefix) and isinstance(run.references.find(key, run.facts, NO_PEERS, "GB/s"), Reference)
        )
        return sorted(found, key=parse_bytes)

    @property
    def wrong_data(self) -> tuple[Verdict, ...]:
        """The verdict of the check's rule on wrong elements; none if the run did not check the data."""
        wrong = self.series.wrong_elements
        if wrong is None:
            return ()
        check = _checks()[self.operation or "all_reduce"][0]
        declared = declaration(check.declared, "wrong_elements", check.name)
        value = float(max(round(wrong), wrong > 0))
        measured = Metric(name=declared.name, value=value, unit=declared.unit, subject=CLUSTER)
        return BenchmarkRun(check=check, facts={}).verdicts([replace(declared, fix=_WRONG_DATA_FIX)], [measured])

    @property
    def is_too_fast(self) -> bool:
        """Whether the network does not allow the measured bandwidth, so that the operation must be another one."""
        bound = self._bound("") if self.nodes > 1 and not self.table_hardware.problems else None
        best = max(max(size.out_of_place or 0, size.in_place or 0) for size in self.sizes)
        return bool(bound and best > MAX_RATIO_OF_BOUND * bound.value)

    def unjudged(self, name: str, problems: Sequence[str]) -> BenchmarkResult:
        """The result of a series whose bandwidth is not compared: FAIL for wrong data, else UNJUDGED."""
        rows, verdicts, notes = self.series.rows, self.wrong_data, []
        is_wrong = any(verdict.outcome is Outcome.FAIL for verdict in verdicts)
        if rows and not verdicts:
            notes.append("the data was not checked (option -c 0)")
        if rows and not self.series.table.footer_count:
            notes.append("no summary below the table: an excerpt, or the run did not end")
        return BenchmarkResult(
            name=name,
            outcome=Outcome.FAIL if is_wrong else Outcome.UNJUDGED,
            variant=self.series.variant,
            check=_checks()[self.operation][0].name if self.operation else "",
            measured=self.series.sizes,
            verdicts=verdicts if self.operation or is_wrong else (),
            problems=tuple(problems),
            notes=tuple(notes),
        )

    def judged(self) -> BenchmarkResult:
        """The result of a series whose operation is known.

        If no size on one node has a reference value, the largest gets that of the next smaller size from 1 GiB on that
        has one, since inside a node the bandwidth does not decrease with the size.
        """
        problems, largest, smaller = self.problems, self.sizes[-1], ""
        bandwidths: tuple[Verdict, ...] = ()
        if not self.table_hardware.problems:
            sizes = {size.label: size.label for size in self.sizes}
            if self.nodes == 1 and sizes.keys().isdisjoint(self.reference_sizes):
                known = [size for size in self.reference_sizes if 2**30 <= parse_bytes(size) <= largest.size]
                smaller = known[-1] if known else ""
            bandwidths = self._bandwidths({largest.label: smaller} if smaller else sizes)
        result = self.unjudged(self.operation, problems)
        # the size of the check's rule decides if it has a reference value, else the largest that has one
        compared = [_size(verdict) for verdict in bandwidths if verdict.basis]
        size_of_check = self.declared.name.partition(".")[2]
        label = size_of_check if size_of_check in compared else [largest.label, *compared][-1]
        deciding = [verdict for verdict in bandwidths if not verdict.metric or _size(verdict) == label]
        saturated = {size.label for size in self.sizes if size.size >= SATURATING_BYTES} - {label}
        others = [verdict for verdict in bandwidths if verdict.basis and _size(verdict) in saturated]
        verdicts, notes = [*result.verdicts, *deciding], []
        if not problems:
            undecided = (verdict for verdict in verdicts if verdict.outcome in (Outcome.UNJUDGED, Outcome.ERROR))
            problems += dict.fromkeys(verdict.detail or verdict.summary for verdict in undecided)
        if bandwidths and self.nodes > 1 and not self.hardware.ports:
            notes.append("the rate of the network ports is unknown: give --nics, such as --nics 8x400")
        if smaller:
            text = "since the bandwidth inside a node does not decrease with the size"
            notes.append(f"no reference value at {label}: that of {smaller} is used, {text}")
        return result.model_copy(
            update={
                "outcome": _outcome(verdicts, others, problems),
                "path": self._path(),
                "bound": self._bound(label) if bandwidths else None,
                "verdicts": tuple(map(self._with_next_step, verdicts)),
                "other_sizes": tuple(map(self._with_next_step, others)),
                "problems": tuple(problems),
                "notes": (*notes, *result.notes),
            }
        )

    def _bandwidths(self, reference_sizes: Mapping[str, str]) -> tuple[Verdict, ...]:
        """The verdicts on the bus bandwidth, out of place and in place.

        ``reference_sizes``: measured size → size of its reference value.
        """
        declared, metrics = [], []
        when = str(Condition(facts=self.declared.rules[0].when.facts))
        # in place, the copies of these two operations overwrite each other's data
        is_valid_in_place = self.operation not in ("all_to_all", "send_receive")
        for size in (each for each in self.sizes if each.label in reference_sizes):
            # a share of the links' rate is a limit for sizes that saturate them
            is_large = size.size >= SATURATING_BYTES
            text = tuple(each for each in self.declared.text if is_large or not each.endswith(BOUND))
            in_place = size.in_place if is_valid_in_place else None
            for place, value in (("out_of_place", size.out_of_place), ("in_place", in_place)):
                if value is None:
                    continue
                name, key = f"busbw_{place}.{size.label}", f"{self.operation}.busbw.{reference_sizes[size.label]}"
                metrics.append(Metric(name=name, value=value, unit="GB/s", subject=CLUSTER))
                of_size = replace(self.declared, name=name, text=text, reference=key, when=when)
                declared.append(replace(of_size, reference_optional=False, per=None))
        return self.run.verdicts(declared, metrics) if declared else ()

    def _with_next_step(self, verdict: Verdict) -> Verdict:
        """The verdict; without a comparison, its ``fix`` is the next step, such as a size with a reference value."""
        needs_ports = self.nodes > 1 and not self.hardware.ports
        return self.run.with_next_step(verdict, self.reference_sizes, needs_ports=needs_ports)

    def _path(self) -> str:
        """The links that the data took, as text; empty if unknown."""
        hardware, sku = self.hardware, self.sku
        if not hardware.nodes or self.table_hardware.problems:
            return ""
        if hardware.nodes == 1:
            links = "an unknown link" if sku is None else "NVLink" if "nvlink" in sku.spec else "PCIe"
            return f"inside one node, over {links} only"
        if sku and sku.across_nodes:
            return f"between {hardware.nodes} nodes, over NVLink or the network"
        ports = f" {hardware.ports} x {hardware.port_gbps:g} Gb/s" if hardware.ports else ""
        return f"between {hardware.nodes} nodes, over the network ({hardware.fabric or 'unknown'}{ports})"

    def _bound(self, label: str) -> Bound | None:
        """The highest bandwidth that the links allow; None if unknown.

        On one node: the bound of the links inside the node, at the size ``label``; on several: that of the network.
        """
        if self.nodes == 1:
            return self.run.bound(f"{self.operation}.busbw.{label}", self.declared.bound)
        hardware, sku = self.hardware, self.sku
        if not (sku and hardware.gpus_per_node and hardware.ports and hardware.port_gbps) or sku.across_nodes:
            return None
        text = f"network ports ({hardware.fabric})"
        node = node_links(sku, NodeLinks(hardware.gpus_per_node, hardware.ports, hardware.port_gbps, text))
        nvls = sku.nvls and self.settings.get("NCCL_NVLS_ENABLE") != "0"
        usual = default_algorithm(self.operation, self.nodes, nvls=nvls)
        algorithm = NCCL_ALGO_NAMES.get(self.algorithm, self.algorithm) or usual
        network = network_bound(self.operation, algorithm, self.nodes, node)
        return Bound(network.value, "GB/s", network.arithmetic) if network else None


def _size(verdict: Verdict) -> str:
    return verdict.metric.partition(".")[2]


def _outcome(verdicts: Sequence[Verdict], other_sizes: Sequence[Verdict], problems: Sequence[str]) -> Outcome:
    """FAIL if a verdict fails, else UNJUDGED if there is a problem, or no verdict on the bandwidth.

    Otherwise WARN if a verdict at another size (``other_sizes``) fails, or depends on the algorithm, which is unknown;
    else the worst outcome of the verdicts.
    """
    outcome = worst(verdict.outcome for verdict in verdicts if verdict.outcome is not Outcome.SKIP)
    if outcome is Outcome.FAIL:
        return outcome
    if problems or not any(verdict.metric.startswith("busbw") for verdict in verdicts):
        return Outcome.UNJUDGED
    is_low = any(each.outcome is Outcome.FAIL or Reason.ALGORITHM_UNKNOWN in each.reasons for each in other_sizes)
    return Outcome.WARN if is_low else outcome
