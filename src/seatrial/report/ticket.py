"""A ticket for the vendor of a bad part, as plain text: what it is, what was measured, and what was ruled out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from seatrial.model import Outcome, Trial, UsageError
from seatrial.report.figures import Figure
from seatrial.report.identity import NO_SERIAL, versions
from seatrial.report.parts import Part, parts, with_real_values
from seatrial.report.text import clean, single_line, utc
from seatrial.util.text import and_more

_MAX_LINES = 40  # lines of evidence of a figure
_MAX_NAMED = 40  # passed checks that are named
# What belongs to the site and not to the part: addresses, mail addresses, directories of users
_PRIVATE = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b[\w.+-]+@[\w-]+\.[\w.]+|/(?:home|Users|root)(?:/[^\s:,;'\")]*)?")


def render(trial: Trial, name: str = "", run_dir: Path | None = None) -> str:
    """The ticket on the part ``name``, by default the worst part. Raises UsageError if no such part is bad."""
    trial = with_real_values(trial, run_dir)
    bad = {part.name: part for part in parts(trial)}
    if not bad:
        raise UsageError(f"no part is bad: the decision is {trial.decision.value}, without FAIL, ERROR or WARN")
    if name and name not in bad:
        raise UsageError(f"{name} is not among the bad parts: expected {and_more(list(bad), 8)}")
    lines = _lines(trial, bad[name] if name else next(iter(bad.values())))
    return "".join(f"{_PRIVATE.sub('[removed]', clean(line))}\n" for line in lines)


def _lines(trial: Trial, part: Part) -> Iterator[str]:
    gpu, began = part.gpu, utc(trial.started, "%Y-%m-%d %H:%M UTC")
    what = part.figures[0].text if part.figures else part.cause
    yield single_line(f"{part.kind} {part.name}: {part.cause or what}")
    yield ""
    if part.kind == "GPU":
        fields = {"Model": gpu.model, "Serial": gpu.serial or NO_SERIAL, "UUID": gpu.uuid, "Slot (PCI)": gpu.slot}
        yield from _fields({**fields, "VBIOS": gpu.vbios, "Index": part.index})
    yield from _fields({"Node": part.node, "Tested": f"{began}, seatrial {trial.seatrial}, trial {trial.name}"})
    yield from _fields({version.name: version.value for version in versions(trial)})
    yield ""
    yield "Measured"
    for figure in part.figures:
        yield from _figure(figure)
    for finding in part.findings:
        yield ""
        yield f"Cause ({finding.confidence} confidence): {single_line(finding.title)}"
        yield f"  {single_line(finding.evidence)}"
        if finding.first_command:
            yield f"  command to run first: {finding.first_command}"
    yield ""
    yield f"Passed on {part.name}: {and_more(_passed(trial, part), _MAX_NAMED) or 'no other check'}"
    yield ""
    yield "The vendor will ask for"
    if part.kind == "GPU":
        yield "  nvidia-bug-report.log.gz: run `nvidia-bug-report.sh` as root on the node, before a reset or reboot"
        yield f"  nvidia-smi -q -i {part.index}; dmesg -T | grep -i -E 'xid|sxid|nvrm'"
    else:
        yield "  the serial number of the node or cable, and `dmesg -T` of the node, before a reboot"


def _fields(fields: dict[str, str]) -> Iterator[str]:
    yield from (f"{name + ':':<20}{single_line(value)}" for name, value in fields.items() if value)


def _figure(figure: Figure) -> Iterator[str]:
    """The figure against its limit and expected value, both measurements, and the output that shows it."""
    verdict = figure.verdict
    share = f" ({figure.share_text} of the expected {figure.expected_text})" if figure.share is not None else ""
    source = f"; {figure.source}" if figure.source else ""
    yield f"  {figure.outcome} {single_line(figure.text)}{share}{source}"
    if verdict and verdict.retry:
        values = (verdict.retry.first_value, verdict.retry.retry_value, verdict.retry.third_value)
        yield f"    measurements: {', '.join(f'{value:.4g}' for value in values if value is not None)} {verdict.unit}"
    if verdict and verdict.meaning:
        yield f"    {single_line(verdict.meaning)}"
    lines = verdict.evidence.strip().splitlines() if verdict else []
    yield from (f"    | {line}" for line in lines[:_MAX_LINES])


def _passed(trial: Trial, part: Part) -> list[str]:
    """The checks of which all verdicts on the part passed."""
    of_part = [verdict for verdict in trial.verdicts if verdict.subject == part.name]
    not_passed = {verdict.check for verdict in of_part if verdict.outcome is not Outcome.PASS}
    return list(dict.fromkeys(verdict.check for verdict in of_part if verdict.check not in not_passed))
