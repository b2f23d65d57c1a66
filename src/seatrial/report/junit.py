"""JUnit XML for CI systems: one suite per check, one case per subject; of many subjects, one per subject not passed.

FAIL is a failure; ERROR and UNJUDGED are errors with different types; SKIP is skipped; WARN passes, with its text in
system-out. If the trial has causes, the text of each verdict has its cause, or "unexplained". No check is omitted: an
excluded check is skipped, and a check without verdicts is an error. If a trial used no GPU although the option
--gpus-per-node 0 was not set, the suite ``decision`` has an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from xml.etree import ElementTree as ET

from seatrial.model import CLUSTER, WORST_FIRST, Outcome, Trial, Verdict, VerdictKey, worst
from seatrial.model.verdict_text import LAX_THRESHOLD
from seatrial.report.formatting import natural_key
from seatrial.report.identity import Gpu, gpus_of
from seatrial.report.text import UNKNOWN_TIME, clean, single_line, utc
from seatrial.report.view import CheckView, check_views, lax_thresholds
from seatrial.util.grouping import grouped

MAX_SUBJECTS = 64  # of a check with more subjects, those that passed are one case
_PASSED = (Outcome.PASS, Outcome.SKIP)
_TAGS = {Outcome.FAIL: "failure", Outcome.ERROR: "error", Outcome.UNJUDGED: "error", Outcome.SKIP: "skipped"}


def render(trial: Trial) -> str:
    """The trial as one well-formed ``testsuites`` document."""
    name = f"seatrial {trial.name}" + (" (CPU ONLY)" if trial.decision.cpu_only else "")
    root = ET.Element("testsuites", name=name, time=_seconds(trial.seconds))
    if (started := utc(trial.started, "%Y-%m-%dT%H:%M:%S")) != UNKNOWN_TIME:
        root.set("timestamp", started)
    if code := trial.decision.reason_code:  # a reason that is not in any verdict
        _single(root, "decision", "error", message=single_line(trial.decision.reason), type=str(code))
    text_of = partial(_verdict_text, causes=_causes(trial), gpus=gpus_of(trial))
    root.extend(_suite(check, trial.decision.tested_hardware, text_of) for check in check_views(trial))
    for check, reason in trial.excluded_checks.items():
        _single(root, check, "skipped", message=f"excluded: {single_line(reason)}")
    _set_totals(root)
    for element in root.iter():
        element.text = element.text and clean(element.text)
        for name, value in element.items():
            element.set(name, clean(value))
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _causes(trial: Trial) -> dict[VerdictKey, str]:
    """Verdict → title, place and confidence of the first cause that explains it, as text; only explained verdicts."""
    return {
        key: f"{finding.title} on {finding.subject} ({finding.confidence} confidence)"
        for finding in reversed(trial.findings)
        for key in finding.explains
    }


def _suite(check: CheckView, tested_hardware: str, text_of: Callable[[Verdict], str]) -> ET.Element:
    suite = ET.Element("testsuite", name=check.name, time=_seconds(check.seconds))
    texts = [("phase", check.phase), ("title", check.title), ("tested", tested_hardware)]
    if check.key_figure and check.key_figure.limit is not None:
        texts.append(("headline", check.key_figure.text))
    texts += [(insight.title, insight.text) for insight in check.insights]
    texts += [(LAX_THRESHOLD, text) for _, text in lax_thresholds(check.verdicts)]
    properties = ET.SubElement(suite, "properties")
    for name, text in texts:
        ET.SubElement(properties, "property", name=name, value=single_line(text))
    no_verdict = Verdict(check.name, CLUSTER, Outcome.UNJUDGED, detail="no verdict was recorded")
    by_subject = grouped((verdict.subject, verdict) for verdict in check.verdicts or (no_verdict,))
    seconds = {measurement.subject: measurement.seconds for measurement in check.measurements}
    passed = [subject for subject, verdicts in by_subject.items() if all(v.outcome in _PASSED for v in verdicts)]
    if len(by_subject) > MAX_SUBJECTS and passed:
        name = f"{len(passed)} subjects without a problem"
        ET.SubElement(suite, "testcase", classname=check.name, name=name, time=_seconds(0))
        by_subject = {subject: by_subject[subject] for subject in by_subject.keys() - passed}
    for subject in sorted(by_subject, key=natural_key):
        suite.append(_case(check.name, subject, by_subject[subject], seconds.get(subject, 0.0), text_of))
    _set_totals(suite)
    return suite


def _case(
    check: str, subject: str, verdicts: list[Verdict], seconds: float, text_of: Callable[[Verdict], str]
) -> ET.Element:
    case = ET.Element("testcase", classname=check, name=subject, time=_seconds(seconds))
    outcome = worst(verdict.outcome for verdict in verdicts)
    verdicts = sorted(verdicts, key=lambda verdict: WORST_FIRST.index(verdict.outcome))
    not_passed = [verdict for verdict in verdicts if verdict.outcome is not Outcome.PASS]
    text = "\n\n".join(map(text_of, not_passed))
    if tag := _TAGS.get(outcome):
        element = ET.SubElement(case, tag, message=single_line(verdicts[0].message))
        if outcome is not Outcome.SKIP:
            element.set("type", outcome)
        element.text = text
    elif text:  # the worst outcome is WARN or PASS
        ET.SubElement(case, "system-out").text = text
    return case


def _verdict_text(verdict: Verdict, causes: Mapping[VerdictKey, str], gpus: Mapping[str, Gpu]) -> str:
    """The verdict and its GPU, one field per line; if the trial has causes, also its cause or ``unexplained``."""
    head = f"{verdict.outcome} {verdict.metric}".rstrip()
    fields = {"part": gpus[verdict.subject].text} if verdict.subject in gpus else {}
    fields |= {"evidence": verdict.evidence, "threshold": verdict.basis_text, "fix": verdict.fix}
    if causes and verdict.outcome is not Outcome.SKIP:
        fields["cause"] = causes.get(verdict.key, "unexplained")
    return "\n".join([f"{head}: {verdict.message}", *(f"{name}: {text}" for name, text in fields.items() if text)])


def _single(root: ET.Element, name: str, tag: str, **attributes: str) -> None:
    """Add a suite with one case, which has the element ``tag``."""
    suite = ET.SubElement(root, "testsuite", name=name, time=_seconds(0))
    case = ET.SubElement(suite, "testcase", classname=name, name=CLUSTER, time=_seconds(0))
    ET.SubElement(case, tag, attributes)
    _set_totals(suite)


def _set_totals(element: ET.Element) -> None:
    """Set the numbers of tests, failures, errors and skipped tests of a suite or of the document."""
    cases = list(element.iter("testcase"))
    element.set("tests", str(len(cases)))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        element.set(attribute, str(sum(case.find(tag) is not None for case in cases)))


def _seconds(value: float) -> str:
    return f"{value:.3f}"
