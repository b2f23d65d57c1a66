"""Judges tables of nccl-tests by the rules and reference values of the checks of their operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import get_args

from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.checks.base import Check
from seatrial.discover.nccl_tests_output import NcclTestsOutput, Row, Table
from seatrial.hardware.bounds import hardware_bound
from seatrial.hardware.fabric_model import node_links
from seatrial.hardware.network_bounds import default_algorithm, network_bound
from seatrial.hardware.references import NO_PEERS, Reference, References, Sku, select_references
from seatrial.judge.limits import MAX_RATIO_OF_BOUND
from seatrial.judge.plausibility import metric_lookup
from seatrial.judge.rules import judge_check
from seatrial.model import (
    CLUSTER,
    Baseline,
    Measurement,
    Metric,
    Outcome,
    Reason,
    Rule,
    UsageError,
    Verdict,
    parse_bytes,
    worst,
)
from seatrial.model.benchmark import BenchmarkBound, BenchmarkHardware, BenchmarkJudgement, BenchmarkResult
from seatrial.model.rule import Condition
from seatrial.pipeline.benchmark_hardware import (
    HardwareOptions,
    TableHardware,
    all_reduce_algorithm,
    hardware_links,
    table_hardware,
)
from seatrial.pipeline.nccl_tests_table import (
    SATURATING_BYTES,
    Place,
    allows,
    busbw,
    measured_sizes,
    nominal_size_label,
    possible_operations,
    split_series,
    table_notes,
    table_problems,
    variant_text,
    wrong_elements,
)
from seatrial.pipeline.next_step import with_next_steps

_MAX_SETTINGS = 30  # environment variables that notes list
_NODE_SIZES = ("16GiB", "8GiB", "4GiB", "1GiB")  # sizes with reference values of one node in data/skus
# The fix of the check's rule on wrong elements names a fact that nccl-tests does not report
_WRONG_DATA_FIX = (
    "Do not train on these nodes. Run all_reduce_perf -c 1 on each node alone, then on pairs of nodes: the node, or "
    "the path between two nodes, with wrong elements is at fault"
)


@cache
def _checks() -> Mapping[str, Check]:
    """Operation → its check, for the operations that a program of nccl-tests measures too."""
    return {check.operation: check for check in catalog().values() if check.nccl_tests}


def judge_output(
    output: NcclTestsOutput,
    options: HardwareOptions,
    file: str,
    operation: str = "",
    baseline: Baseline | None = None,
) -> BenchmarkJudgement:
    """Return the verdicts on all tables. ``operation``: --operation, or empty. Raises UsageError if unknown."""
    if operation and operation not in _checks():
        raise UsageError(f"--operation {operation!r}: expected one of {', '.join(_checks())}")
    judged = [
        _judge_series(_Series(output, table, rows, options, baseline), operation)
        for table in output.tables
        for rows in split_series(table.rows) or [[]]
    ]
    results = [result for result, _ in judged]
    hardware_of_results = [hardware for _, hardware in judged]
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
        tool="nccl-tests",
        file=file,
        # a result without a check counts only if it is FAIL
        outcome=worst(result.outcome for result in results if result.check or result.outcome is Outcome.FAIL),
        hardware=hardware_of_results[-1].hardware if hardware_of_results else BenchmarkHardware(),
        contradictions=tuple(dict.fromkeys(text for each in hardware_of_results for text in each.contradictions)),
        notes=tuple(notes),
        results=tuple(results),
    )


@dataclass(frozen=True)
class _Series:
    """The rows of a table with one data type, reduction and root. ``rows`` is empty for a table without rows."""

    output: NcclTestsOutput
    table: Table
    rows: Sequence[Row]
    options: HardwareOptions
    baseline: Baseline | None

    def table_hardware(self, operation: str) -> TableHardware:
        """The hardware, if the table is of ``operation``."""
        return table_hardware(self.options, self.output, self.table, operation)

    @property
    def named_operation(self) -> str:
        """The operation of the program; empty if the output does not name the program, or no check exists for it."""
        return next((name for name, check in _checks().items() if check.nccl_tests == self.table.program), "")


@dataclass(frozen=True)
class _Candidate:
    """A series, read as measurements of one possible operation, with the hardware and reference values for it.

    ``algorithm``: NCCL's algorithm of an all-reduce, empty if unknown.
    """

    operation: str
    series: _Series
    table_hardware: TableHardware
    algorithm: str

    @property
    def rows(self) -> Sequence[Row]:
        return self.series.rows

    @property
    def hardware(self) -> BenchmarkHardware:
        return self.table_hardware.hardware

    @property
    def nodes(self) -> int:
        """The number of nodes; 1 if unknown."""
        return self.hardware.nodes or 1

    @property
    def check(self) -> Check:
        return _checks()[self.operation]

    @cached_property
    def references(self) -> References:
        labels = [nominal_size_label(row.size) for row in self.rows]
        links, tcp = hardware_links(self.hardware, self.series.output, self.algorithm, labels)
        return select_references(links, self.series.baseline, tcp=tcp)

    @cached_property
    def facts(self) -> dict[str, JsonValue]:
        """The facts that the check's rules and the reference values need, from the output and the options."""
        settings: Mapping[str, str] = self.series.output.nccl.settings | self.series.table.settings
        return {
            "gpu": self.hardware.gpu,
            "world_size": self.hardware.ranks,
            "nodes": self.hardware.nodes,
            "backend": "nccl",
            "backend_environment": dict(settings),
        }

    @cached_property
    def sku(self) -> Sku | None:
        sku = self.references.sku(self.hardware.gpu)
        return sku if isinstance(sku, Sku) else None

    def has_reference(self, label: str) -> bool:
        """Whether there is a reference value at a size on this hardware."""
        reference = self.references.find(f"{self.operation}.busbw.{label}", self.facts, NO_PEERS, "GB/s")
        return isinstance(reference, Reference)

    @cached_property
    def rule(self) -> Rule:
        """The check's rule on the bus bandwidth on this number of nodes."""
        rules = [rule for rule in self.check.rules if rule.metric.startswith("busbw.")]
        in_range = (rule for rule in rules if rule.when.includes(self.nodes))
        return next(in_range, rules[0])


def _judge_series(series: _Series, operation: str) -> tuple[BenchmarkResult, TableHardware]:
    """Return the result of one series, and its hardware.

    If neither the output nor --operation names the operation, it must be allowed by the columns and able to reach the
    measured bandwidth. If several operations meet these conditions, the result is UNJUDGED.
    """
    if not series.rows:
        return _without_rows(series, operation), series.table_hardware("")
    if not series.named_operation and series.table.program:
        text = f"{series.table.program}_perf has no check in seatrial, and no reference values"
        return _unjudged(series, series.table.program, "", [text]), series.table_hardware("")
    # --operation is used if the columns exclude the operation of the program that the output names
    names = filter(None, (series.named_operation, operation))
    named = next((name for name in names if allows(series.table, series.rows, name)), "")
    if operation and not named:
        last = series.rows[-1]
        text = f"the columns are not those of {operation}: {variant_text(last)}, count {last.count} at {last.size} B"
        return _unjudged(series, operation, operation, [text]), series.table_hardware(operation)
    possible = [named] if named else possible_operations(series.table, series.rows)
    if not possible:
        text = "no operation that seatrial measures has these columns: gather and scatter have no reference values"
        return _unjudged(series, "unknown operation", "", [text]), series.table_hardware("")
    algorithm = all_reduce_algorithm(series.options, series.output, series.table)
    candidates = [
        _Candidate(name, series, series.table_hardware(name), algorithm if name == "all_reduce" else "")
        for name in possible
    ]
    plausible = [candidate for candidate in candidates if not _exceeds_bound(candidate)] or candidates
    if len(plausible) > 1:
        text = f"the columns are those of {' or '.join(possible)}: give the operation with --operation"
        problems = [*plausible[0].table_hardware.problems, *table_problems(series.table, series.rows), text]
        return _unjudged(series, " or ".join(possible), possible[0], problems), plausible[0].table_hardware
    result = _judge(plausible[0])
    if not named:
        impossible = [name for name in possible if name != result.name]
        why = f", since {', '.join(impossible)} cannot reach this bandwidth" if impossible else ""
        note = f"the output does not name the program: {result.name} by its columns{why}"
        result = result.model_copy(update={"notes": (note, *result.notes)})
    return result, plausible[0].table_hardware


def _without_rows(series: _Series, operation: str) -> BenchmarkResult:
    table = series.table
    name = series.named_operation or operation or table.program or "unknown operation"
    reason = table.failure or (table.rejected[0] if table.rejected else "the run ended before its first result")
    return BenchmarkResult(
        name=name,
        outcome=Outcome.UNJUDGED,
        check=_checks()[name].name if name in _checks() else "",
        problems=(f"the table has no complete row: {reason}",),
    )


def _unjudged(series: _Series, name: str, operation: str, problems: Sequence[str]) -> BenchmarkResult:
    """Return the result of a series that is not compared with reference values: FAIL for wrong data, else UNJUDGED.

    ``operation``: seatrial's name of the operation; empty if the operation is unknown or has no check.
    """
    verdicts = _wrong_data_verdicts(series, operation or "all_reduce")
    is_wrong = any(verdict.outcome is Outcome.FAIL for verdict in verdicts)
    return BenchmarkResult(
        name=name,
        outcome=Outcome.FAIL if is_wrong else Outcome.UNJUDGED,
        variant=variant_text(series.rows[-1]),
        check=_checks()[operation].name if operation else "",
        measured=measured_sizes(series.rows),
        verdicts=verdicts if operation or is_wrong else (),
        problems=tuple(problems),
        notes=tuple(table_notes(series.table, series.rows)),
    )


def _judge(candidate: _Candidate) -> BenchmarkResult:
    hardware, series = candidate.hardware, candidate.series
    problems = [*candidate.table_hardware.problems]
    notes: list[str] = []
    needs_ports = candidate.nodes > 1 and not hardware.ports and hardware.fabric != "mnnvl"
    verdicts = _wrong_data_verdicts(series, candidate.operation)
    other_sizes: tuple[Verdict, ...] = ()
    label = ""  # the size whose bandwidth decides
    if not problems:
        if needs_ports:
            notes.append("the rate of the network ports is unknown: give --nics, such as --nics 8x400")
        label, reference_label = _deciding_size(candidate)
        if reference_label != label:
            notes.append(
                f"no reference value at {label}: that of {reference_label} is used, since the bandwidth inside a node "
                "does not decrease with the size"
            )
        verdicts += _bandwidth_verdicts(candidate, label, reference_label)
        other_sizes = _verdicts_on_other_sizes(candidate, label)
    problems += table_problems(series.table, series.rows)
    if not problems:
        undecided = (verdict for verdict in verdicts if verdict.outcome in (Outcome.UNJUDGED, Outcome.ERROR))
        problems += dict.fromkeys(verdict.detail or verdict.summary for verdict in undecided)
    return BenchmarkResult(
        name=candidate.operation,
        outcome=_outcome(verdicts, other_sizes, problems),
        variant=variant_text(candidate.rows[-1]),
        check=candidate.check.name,
        path=_path(candidate),
        measured=measured_sizes(candidate.rows),
        bound=_bound(candidate, label) if label else None,
        verdicts=with_next_steps(verdicts, hardware.gpu, candidate.operation, candidate.has_reference, needs_ports),
        other_sizes=other_sizes,
        problems=tuple(problems),
        notes=(*notes, *table_notes(series.table, series.rows)),
    )


def _outcome(verdicts: Sequence[Verdict], other_sizes: Sequence[Verdict], problems: Sequence[str]) -> Outcome:
    """Return FAIL if a verdict fails, else UNJUDGED if there is a problem, or a verdict is inconclusive or missing.

    Otherwise WARN if a verdict at another size (``other_sizes``) fails, or depends on the algorithm, which is unknown;
    else the worst outcome of the verdicts.
    """
    outcome = worst(verdict.outcome for verdict in verdicts if verdict.outcome is not Outcome.SKIP)
    if outcome is Outcome.FAIL:
        return outcome
    has_bandwidth = any(verdict.metric.startswith("busbw") for verdict in verdicts)
    if problems or not has_bandwidth or outcome in (Outcome.ERROR, Outcome.UNJUDGED):
        return Outcome.UNJUDGED
    is_low = any(each.outcome is Outcome.FAIL or Reason.ALGORITHM_UNKNOWN in each.reasons for each in other_sizes)
    return Outcome.WARN if is_low else outcome


def _deciding_size(candidate: _Candidate) -> tuple[str, str]:
    """Return the label of the size whose bandwidth decides, and the label of the size of its reference value.

    The size of the check's rule decides if it has a reference value, else the largest size that has one. Without any,
    the largest decides; inside one node it gets the value of the largest smaller size in _NODE_SIZES that has one.
    """
    sizes = sorted({row.size for row in candidate.rows}, reverse=True)
    labels = [nominal_size_label(size) for size in sizes]
    with_reference = [label for label in labels if candidate.has_reference(label)]
    check_size = candidate.rule.metric.partition(".")[2]
    if with_reference:
        label = check_size if check_size in with_reference else with_reference[0]
        return label, label
    if candidate.hardware.nodes == 1:
        for smaller in _NODE_SIZES:
            if sizes[0] >= parse_bytes(smaller) and candidate.has_reference(smaller):
                return labels[0], smaller
    return labels[0], labels[0]


def _verdicts_on_other_sizes(candidate: _Candidate, deciding: str) -> tuple[Verdict, ...]:
    labels = dict.fromkeys(nominal_size_label(row.size) for row in candidate.rows if row.size >= SATURATING_BYTES)
    return tuple(
        verdict
        for label in labels
        if label != deciding and candidate.has_reference(label)
        for verdict in _bandwidth_verdicts(candidate, label, label)
    )


def _bandwidth_verdicts(candidate: _Candidate, label: str, reference_label: str) -> tuple[Verdict, ...]:
    """Return the verdicts on the bus bandwidth at the size ``label``, out of place and in place."""
    rules, metrics = [], []
    place: Place
    for place in get_args(Place):
        # in place, the copies of these two operations overwrite each other's data
        is_valid = place == "out_of_place" or candidate.operation not in ("all_to_all", "send_receive")
        value = busbw(candidate.rows, label, place) if is_valid else None
        if value is None:
            continue
        name = f"busbw_{place}.{label}"
        metrics.append(Metric(name=name, value=value, unit="GB/s", subject=CLUSTER))
        update = {
            "metric": name,
            "reference": f"{candidate.operation}.busbw.{reference_label}",
            "when": Condition(facts=candidate.rule.when.facts),
        }
        rules.append(candidate.rule.model_copy(update=update))
    check = candidate.check
    measurement = Measurement(check=check.name, subject=CLUSTER, metrics=tuple(metrics), facts=candidate.facts)
    return tuple(judge_check(check, [measurement], {}, "", candidate.references, rules=rules)) if rules else ()


def _wrong_data_verdicts(series: _Series, operation: str) -> tuple[Verdict, ...]:
    """Return the verdict of the check's rule on wrong elements; none if the run did not check the data."""
    wrong = wrong_elements(series.table, series.rows)
    if wrong is None:
        return ()
    check = _checks()[operation]
    rules = tuple(rule for rule in check.rules if rule.metric == "wrong_elements")
    rules = tuple(rule.model_copy(update={"fix": _WRONG_DATA_FIX}) for rule in rules)
    metric = Metric(name="wrong_elements", value=float(max(round(wrong), wrong > 0)), unit="count", subject=CLUSTER)
    measurement = Measurement(check=check.name, subject=CLUSTER, metrics=(metric,))
    return tuple(judge_check(check, [measurement], {}, "", rules=rules))


def _has_nvls(candidate: _Candidate) -> bool:
    environment = candidate.facts["backend_environment"]
    disabled = isinstance(environment, dict) and environment.get("NCCL_NVLS_ENABLE") == "0"
    return bool(candidate.sku and candidate.sku.nvls and not disabled)


def _path(candidate: _Candidate) -> str:
    """Return the links that the data took, as text; empty if unknown."""
    hardware, sku = candidate.hardware, candidate.sku
    if not hardware.nodes or candidate.table_hardware.problems:
        return ""
    if hardware.nodes == 1:
        links = "an unknown link" if sku is None else "NVLink" if "nvlink" in sku.spec else "PCIe"
        return f"inside one node, over {links} only"
    if sku and sku.across_nodes:
        return f"between {hardware.nodes} nodes, over NVLink or the network"
    ports = f" {hardware.ports} x {hardware.port_gbps:g} Gb/s" if hardware.ports else ""
    return f"between {hardware.nodes} nodes, over the network ({hardware.fabric or 'unknown'}{ports})"


def _bound(candidate: _Candidate, label: str) -> BenchmarkBound | None:
    """Return the highest bandwidth that the links allow; None if unknown.

    On one node: the bound of the links inside the node, at the size ``label``; on several: the bound of the network.
    """
    if candidate.nodes == 1:
        lookup = metric_lookup(candidate.check, f"busbw.{label}", f"{candidate.operation}.busbw.{label}")
        bound = hardware_bound(lookup, candidate.facts, candidate.references)
        return BenchmarkBound(value=bound.value, unit=bound.unit, derivation=bound.derivation) if bound else None
    hardware, sku = candidate.hardware, candidate.sku
    if not (sku and hardware.gpus_per_node and hardware.ports and hardware.port_gbps) or sku.across_nodes:
        return None
    ports = f"network ports ({hardware.fabric})"
    node = node_links(sku, hardware.gpus_per_node, hardware.ports, hardware.port_gbps, ports)
    usual_algorithm = default_algorithm(candidate.operation, candidate.nodes, nvls=_has_nvls(candidate))
    network = network_bound(candidate.operation, candidate.algorithm or usual_algorithm, candidate.nodes, node)
    return BenchmarkBound(value=network.value, unit="GB/s", derivation=network.arithmetic) if network else None


def _exceeds_bound(candidate: _Candidate) -> bool:
    """Return whether the bandwidth between nodes is above the bound, so that the operation must be another one."""
    bound = _bound(candidate, "") if candidate.nodes > 1 and not candidate.table_hardware.problems else None
    bandwidths = [max(size.out_of_place or 0, size.in_place or 0) for size in measured_sizes(candidate.rows)]
    return bool(bound and max(bandwidths) > MAX_RATIO_OF_BOUND * bound.value)
