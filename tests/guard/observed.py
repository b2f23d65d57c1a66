"""What the judge says of one record, as a flat mapping of texts: what is observed → its value.

Only fields are observed, no sentences, except the reason of the decision. A value on verdicts starts with the worst
outcome. Numbers have six significant digits, so that the order of a multiplication does not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.cli.options import EXIT_CODES, EXIT_CODES_OF_OUTCOMES
from seatrial.config.schema import Config
from seatrial.judge import checks_to_retry
from seatrial.model import WORST_FIRST, Basis, BasisKind, Decision, Finding, Insight, Trial, UsageError, Verdict
from seatrial.model.benchmark import BenchmarkJudgement
from seatrial.operate.readmit import nodes_at_fault
from seatrial.pipeline.rejudge import rejudge

Observed = dict[str, str]


def observe(trial: Trial) -> Observed:
    """What the judge of this version says of a record: also which checks it would measure again, and nodes at fault."""
    try:
        judged = rejudge(trial)
    except UsageError:
        return {"refused": "UsageError"}
    nodes = sorted({each.subject.partition("/")[0] for each in trial.measurements if each.rank is not None})
    at_fault = {"nodes at fault": " ".join(sorted(nodes_at_fault(judged, nodes)))} if len(nodes) > 1 else {}
    return {
        **verdicts(judged.verdicts),
        **_decision(judged.decision),
        **_findings(judged.findings),
        **_insights(judged.insights),
        **_measured_again(trial),
        **at_fault,
    }


def judgement(judged: BenchmarkJudgement) -> Observed:
    """What `seatrial judge` says of the output of another benchmark."""
    observed = {"outcome": judged.outcome.value, "exit code": str(EXIT_CODES_OF_OUTCOMES[judged.outcome])}
    for number, result in enumerate(judged.results):
        bound = f" bound {_number(result.bound.value)} {result.bound.unit}" if result.bound else ""
        observed[f"result {number}"] = f"{result.outcome.value} {result.name} {result.check}{bound}"
        of_result = verdicts((*result.verdicts, *result.other_sizes))
        observed |= {f"result {number} {name}": value for name, value in of_result.items()}
    return observed


def verdicts(given: Iterable[Verdict]) -> Observed:
    """Outcome, basis and limit of each check, subject and metric; a trial's threshold adds a second verdict."""
    by_key: dict[str, set[tuple[int, str]]] = {}
    for verdict in given:
        text = f"{verdict.outcome.value}{_basis(verdict.basis)}"
        key = f"verdict {verdict.check} {verdict.subject} {verdict.metric}".rstrip()
        by_key.setdefault(key, set()).add((WORST_FIRST.index(verdict.outcome), text))
    return {key: "; ".join(text for _, text in sorted(texts)) for key, texts in by_key.items()}


def _basis(basis: Basis | None) -> str:
    """The kind and the name of the basis, and the limits; the name of a peer group is a sentence."""
    if basis is None:
        return ""
    name = "" if basis.kind is BasisKind.PEERS else f" {basis.name}"
    limits = []
    if basis.expected is not None and basis.op:
        limits.append(f"{basis.op} {_number(basis.expected)}")
    for word, share in (("fail", basis.fail_below), ("warn", basis.warn_below)):
        if share is not None:
            limits.append(f"{word} < {_number(share * (1.0 if basis.expected is None else basis.expected))}")
    limits += [f"asymmetry < {basis.asymmetry_limit}"] if basis.asymmetry_limit else []
    marks = "".join(f", {mark}" for mark, text in (("lax", basis.lax_reason), ("exceeds", basis.exceeds)) if text)
    return f", {basis.kind.value}{name.rstrip()}: {' '.join([', '.join(limits), basis.unit]).strip()}{marks}"


def _decision(decision: Decision) -> Observed:
    observed = {
        "decision": decision.value.value,
        "exit code": str(EXIT_CODES[decision.value]),
        "reason": decision.reason,
        "reason code": decision.reason_code or "",
        "CPU only": str(decision.cpu_only),
        "unknown GPUs": ", ".join(decision.unknown_gpus),
    }
    without = decision.metrics_without_threshold.items()
    return observed | {f"without threshold {check}": ", ".join(metrics) for check, metrics in without}


def _findings(findings: Iterable[Finding]) -> Observed:
    """Cause, place and action of each finding in order, and the verdicts that it explains by check and metric."""
    observed = {}
    for number, finding in enumerate(findings):
        cause = finding.cause or finding.signature or finding.source
        observed[f"finding {number}"] = f"{cause} at {finding.subject}: {finding.action}"
        explained: dict[str, list[str]] = {}
        for key in finding.explains:
            explained.setdefault(f"{key.check} {key.metric}".rstrip(), []).append(key.subject)
        texts = (f"{name}: {' '.join(sorted(subjects))}" for name, subjects in sorted(explained.items()))
        observed[f"finding {number} explains"] = "; ".join(texts)
    return observed


def _insights(insights: Iterable[Insight]) -> Observed:
    observed: Observed = {}
    for insight in insights:
        key = f"insight {insight.check} {insight.title}"
        values = json.dumps(_rounded(insight.values), ensure_ascii=False, sort_keys=True)
        observed[key] = f"{observed[key]}; {values}" if key in observed else values
    return observed


def _measured_again(trial: Trial) -> Observed:
    """The checks that the pipeline would measure a second time, and a third time after the recorded second one."""
    config, observed = Config.model_validate(trial.config), {}
    for number in range(1, 3 if trial.retries else 2):
        earlier = [each for each in trial.retries if each.retry < number]
        again = checks_to_retry(config, trial.measurements, earlier, catalog(), number, trial.baseline)
        observed[f"measured again {number}"] = " ".join(again)
    return observed


def _rounded(value: JsonValue) -> JsonValue:
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _number(value: float) -> str:
    return f"{value:.6g}"
