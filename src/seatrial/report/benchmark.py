"""The verdicts on the output of a benchmark, as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from seatrial.model import CLUSTER, WORST_FIRST, BasisKind, Outcome, Verdict, format_value
from seatrial.model.benchmark import BenchmarkHardware, BenchmarkJudgement, BenchmarkResult
from seatrial.report.text import clean, single_line

_MAX_SIZES = 6  # rows of a table: the largest sizes
_MAX_SUBJECTS = 8  # GPUs or pairs that are listed


def lines(judgement: BenchmarkJudgement) -> list[str]:
    """The judgement as lines: the hardware, each operation with its values, bound and expectation, then the outcome."""
    texts = [f"{judgement.tool}: {judgement.file}", f"hardware: {_hardware(judgement.hardware)}"]
    texts += [f"CONTRADICTION: {contradiction}" for contradiction in judgement.contradictions]
    for result in judgement.results:
        texts += ["", *_result(result)]
    texts.append("")
    texts += [f"note: {note}" for note in judgement.notes]
    texts.append(f"Outcome: {judgement.outcome}")
    return [single_line(text) if not text.startswith("  ") else clean(text) for text in texts]


def _hardware(hardware: BenchmarkHardware) -> str:
    """``nodes: 2 (--nodes); GPUs per node: 8; model: NVIDIA H200 (output)``, then ranks and network if known."""
    sources = hardware.sources

    def with_source(value: object, field: str) -> str:
        source = sources.get(field)
        return f"{value} ({source})" if source else f"{value}"

    nodes = with_source(hardware.nodes or "unknown", "nodes")
    gpus = with_source(hardware.gpus_per_node or "unknown", "gpus_per_node")
    text = f"nodes: {nodes}; GPUs per node: {gpus}; model: {with_source(hardware.gpu or 'unknown', 'gpu')}"
    if hardware.ranks:
        text += f"; ranks: {with_source(hardware.ranks, 'ranks')}"
    if (hardware.nodes or 1) > 1:
        ports = f" {hardware.ports} x {hardware.port_gbps:g} Gb/s" if hardware.ports and hardware.port_gbps else ""
        origins = [
            f"{label}: {sources[name]}" for name, label in (("fabric", "kind"), ("ports", "ports")) if name in sources
        ]
        text += f"; network: {hardware.fabric or 'unknown'}{ports}" + (f" ({', '.join(origins)})" if origins else "")
    return text


def _result(result: BenchmarkResult) -> Iterator[str]:
    variant = f" ({result.variant})" if result.variant else ""
    path = f", {result.path}" if result.path else ""
    yield f"{result.outcome}  {result.name}{variant}{path}"
    yield from (f"  why: {problem}" for problem in result.problems)
    yield from _sizes(result)
    if result.bound:
        yield f"  bound: {format_value(result.bound.value, result.bound.unit)} = {single_line(result.bound.derivation)}"
    yield from _verdicts(result.verdicts)
    yield from _other_sizes(result.other_sizes)
    yield from (f"  note: {note}" for note in result.notes)


def _sizes(result: BenchmarkResult) -> Iterator[str]:
    """A table of the largest sizes: bus bandwidth out of place and in place, and the share of the bound."""
    if not result.measured:
        return
    shown = result.measured[-_MAX_SIZES:]
    if len(shown) < len(result.measured):
        yield f"  the {len(shown)} largest of {len(result.measured)} sizes:"
    yield f"  {'size':>10}  {'out of place':>12}  {'in place':>12}  {'of the bound':>12}  {'wrong':>7}"
    for size in shown:
        values = [f"{value:.2f} GB/s" if value is not None else "-" for value in (size.out_of_place, size.in_place)]
        best = max(filter(None, (size.out_of_place, size.in_place)), default=0.0)
        share = f"{best / result.bound.value:.1%}" if result.bound else "-"
        wrong = "-" if size.wrong is None else f"{size.wrong:g}"
        yield f"  {size.label:>10}  {values[0]:>12}  {values[1]:>12}  {share:>12}  {wrong:>7}"


def _verdicts(verdicts: tuple[Verdict, ...]) -> Iterator[str]:
    """Each verdict of ``_listed_verdicts`` with its expectation and source; if some are omitted, the range of all."""
    ordered = sorted(verdicts, key=lambda verdict: (WORST_FIRST.index(verdict.outcome), verdict.ratio or 0.0))
    last_basis = last_fix = ""
    shown = _listed_verdicts(ordered)
    for verdict in shown:
        subject = "" if verdict.subject == CLUSTER else f" {verdict.subject}"
        yield f"  {verdict.outcome}{subject}: {single_line(verdict.summary)}"
        if verdict.basis_text and verdict.basis_text != last_basis and verdict.basis:
            is_rule = verdict.basis.kind is BasisKind.RULE  # a fixed threshold: only wrong elements have one here
            yield f"    expected: {'no wrong elements' if is_rule else single_line(verdict.basis_text)}"
            last_basis = verdict.basis_text
        if verdict.fix and verdict.fix != last_fix and verdict.outcome is not Outcome.PASS:
            yield f"    next: {single_line(verdict.fix)}"
            last_fix = verdict.fix
    if len(shown) < len(ordered):
        values = [verdict.value for verdict in ordered if verdict.value is not None]
        low, high = "", ""
        if values:
            low, high = format_value(min(values), ordered[0].unit), format_value(max(values), ordered[0].unit)
        yield f"  {len(ordered)} values from {low} to {high}; {len(shown)} of them listed above"


def _listed_verdicts(ordered: list[Verdict]) -> list[Verdict]:
    """All verdicts if all are on the cluster; else the worst FAIL, ERROR and WARN, and one of each other outcome."""
    if all(verdict.subject == CLUSTER for verdict in ordered):
        return ordered
    bad = [verdict for verdict in ordered if verdict.outcome in (Outcome.FAIL, Outcome.ERROR, Outcome.WARN)]
    first_by_outcome = {verdict.outcome: verdict for verdict in reversed(ordered)}
    return [*bad[:_MAX_SUBJECTS], *(verdict for verdict in first_by_outcome.values() if verdict not in bad)]


def _other_sizes(verdicts: tuple[Verdict, ...]) -> Iterator[str]:
    """One line on the other sizes, which do not decide."""
    texts = [
        f"{verdict.metric.partition('.')[2]} {verdict.outcome}" + (f" {verdict.ratio:.1%}" if verdict.ratio else "")
        for verdict in verdicts
        if verdict.metric.startswith("busbw_out_of_place")
    ]
    if texts:
        yield f"  other sizes, out of place: {', '.join(texts)}"
