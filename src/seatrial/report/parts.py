"""The bad parts of a trial, once for all reports: what each is, its serial number and slot, its figures and its cause.

A verdict belongs to the place of the first cause that explains it, else to its subject. Problems are parts of one kind
with the same figures and the same causes.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from seatrial.model import CLUSTER, Finding, Outcome, Topology, Trial, Verdict, node_of, worst
from seatrial.report.figures import NOT_PASSED, Figure, figures, outcome_rank
from seatrial.report.formatting import DEVICE, natural_key, subject_kind
from seatrial.report.identity import Gpu, gpus_of
from seatrial.report.text import split_code
from seatrial.util.grouping import grouped
from seatrial.util.text import and_more, plural

# Kinds of parts, the most specific first: a bad GPU explains a slow cluster, not the reverse
KINDS = ("GPU", "node", "port", "link", "rail", "rank", CLUSTER)
_GPU = re.compile(r"(?P<node>[^/>]+)/gpu(?P<index>\d+)")
NEXT_STEPS = {  # outcome → the fix of a verdict that has none
    Outcome.FAIL: "read the evidence: `seatrial judge RUN -v`",
    Outcome.ERROR: "read the logs in RUN/jobs, then `seatrial run --resume RUN`",
    Outcome.UNJUDGED: "set a threshold in the trial: `seatrial show checks NAME` shows the rules of a check",
}
_DIGITS = re.compile(r"[0-9a-fA-F:.]*\d[0-9a-fA-F:.]*")  # indices and PCI addresses
_PLACEHOLDER = re.compile(r"(-i |-s |\bjudge |--resume |\bin )(INDEX|PCI|RUN)\b")
_COMMAND = re.compile(
    r"\b(?:nvidia-smi|dcgmi|lspci|dmesg|scontrol|sinfo|systemctl|ibstat|kubectl|timedatectl) (?:[^;:(,]|[:,](?=\S))+"
)
_PROSE = re.compile(r"(?: and| during| on| in|\.)(?: |$).*")  # what follows a command in a fix


@dataclass(frozen=True)
class Part:
    """A part of the cluster that did not pass, or a finding on it alone (``outcome`` is then None).

    ``name``: its subject, such as node3/gpu5. ``index``: of a GPU. ``switches``: of its path, as text. ``figures``:
    those that did not pass, worst first. ``findings``: causes of its worst verdicts, other findings at this place,
    causes of other verdicts. ``has_cause``: whether the first finding is a cause of the worst verdicts.
    """

    kind: str
    name: str
    node: str
    index: str
    gpu: Gpu
    switches: str
    figures: tuple[Figure, ...]
    findings: tuple[Finding, ...]
    has_cause: bool

    @property
    def outcome(self) -> Outcome | None:
        return worst(filter(None, (figure.outcome for figure in self.figures))) if self.figures else None

    @property
    def cause(self) -> str:
        return self.findings[0].title if self.has_cause else ""

    @property
    def identity(self) -> str:
        """Serial number, UUID and slot of a GPU, and the switches of a path, as far as they are known."""
        return ", ".join(filter(None, (self.gpu.text if self.kind == "GPU" else "", self.switches)))

    @cached_property
    def fixes(self) -> tuple[str, ...]:
        """The different fixes: that of the cause first, then those of the worst figures and of other findings."""
        of_findings = [finding.fix for finding in self.findings]
        bad = [figure.verdict.fix for figure in self.figures if figure.verdict and figure.outcome is self.outcome]
        return tuple(filter(None, dict.fromkeys([*of_findings, *bad] if self.has_cause else [*bad, *of_findings])))

    @property
    def first_command(self) -> str:
        """The first command of the cause, else the first command in a fix; empty if there is none."""
        commands = [finding.first_command for finding in self.findings] if self.has_cause else []
        for fix in self.fixes:
            commands += [text for text, is_code in split_code(fix) if is_code]
            commands += [_PROSE.sub("", match[0]).strip() for match in _COMMAND.finditer(fix)]
        return next(filter(None, commands), "")


@dataclass(frozen=True)
class Problem:
    """Parts of one kind with the same bad figures and causes; ``figures`` have the worst value of all these parts."""

    parts: tuple[Part, ...]
    figures: tuple[Figure, ...]

    @property
    def first(self) -> Part:
        return self.parts[0]

    @property
    def title(self) -> str:
        """The name of the part, or the number of parts."""
        return self.first.name if len(self.parts) == 1 else plural(len(self.parts), self.first.kind)

    def identity(self, limit: int) -> str:
        """Serial number, UUID and slot of the part; of several parts the names and serial numbers of the first ones."""
        if len(self.parts) == 1:
            return self.first.identity
        return and_more([p.name + (f" (serial {p.gpu.serial})" if p.gpu.serial else "") for p in self.parts], limit)

    @property
    def text(self) -> str:
        """The cause and the worst figure on one line, with the number of the other figures."""
        more = f" (and {plural(len(self.figures) - 1, 'more figure')})" if len(self.figures) > 1 else ""
        return "; ".join(filter(None, (self.first.cause, self.figures[0].text if self.figures else ""))) + more

    def details(self, max_parts: int, max_lines: int) -> Iterator[tuple[str, str]]:
        """(label, text) of parts, causes, figures with their evidence, and fixes; evidence can have several lines."""
        if len(self.parts) > 1:
            yield "parts", self.identity(max_parts)
        for finding in self.first.findings:
            yield "cause", f"{finding.title} on {finding.subject} ({finding.confidence} confidence)"
            yield "evidence", finding.evidence
            yield "run first", finding.first_command
        for figure in self.figures:
            message = figure.verdict.message if figure.verdict else ""
            of_all = f" (worst of {figure.n}: {figure.worst_part})" if figure.n > 1 else ""
            yield str(figure.outcome), f"{', '.join(figure.checks)} {figure.metric}".rstrip() + f": {message}{of_all}"
            lines = figure.verdict.evidence.strip().splitlines() if figure.verdict else []
            hidden = f"… {plural(len(lines) - max_lines, 'more line')} in the report"
            yield "", "\n".join(lines[:max_lines] + ([hidden] if len(lines) > max_lines else []))
        yield from (("fix", fix) for fix in self.first.fixes)


def parts(trial: Trial) -> list[Part]:
    """All parts that did not pass: by outcome, those with a cause first, then by kind and number of figures."""
    gpus, topology = gpus_of(trial), trial.topology
    verdicts: dict[str, list[Verdict]] = {}
    findings: dict[str, dict[int, int]] = {}  # place → position in trial.findings → rank of the worst verdict explained
    cause_of = {key: n for n, finding in reversed([*enumerate(trial.findings)]) for key in finding.explains}
    for verdict in trial.verdicts:
        if verdict.outcome in NOT_PASSED:
            cause = cause_of.get(verdict.key) if cause_of else None
            place = (trial.findings[cause].subject if cause is not None else "") or verdict.subject
            verdicts.setdefault(place, []).append(verdict)
            if cause is not None:
                ranks, rank = findings.setdefault(place, {}), outcome_rank(verdict.outcome)
                ranks[cause] = min(rank, ranks.get(cause, rank))
    for n, finding in enumerate(trial.findings):
        if not finding.explains:
            findings.setdefault(finding.subject or CLUSTER, {})[n] = -1
    bad = []
    for name in dict.fromkeys((*verdicts, *findings)):
        worst_rank = min((outcome_rank(verdict.outcome) for verdict in verdicts.get(name, ())), default=0)
        # a finding that explains no verdict counts like one that explains the worst; a cause of a warning is not the
        # cause of a failure
        of_part = {n: max(rank, worst_rank) for n, rank in findings.get(name, {}).items()}
        ordered = sorted(of_part, key=lambda n: (of_part[n], findings[name][n] < 0))
        bad.append(
            Part(
                kind=subject_kind(name),
                name=name,
                node="" if name == CLUSTER else node_of(name),
                index=match["index"] if (match := _GPU.fullmatch(name)) else "",
                gpu=gpus.get(name, Gpu()),
                switches=_switches(name, topology) if topology else "",
                figures=_worst_first(figures(verdicts.get(name, ()))),
                findings=tuple(trial.findings[n] for n in ordered),
                has_cause=bool(ordered) and of_part[ordered[0]] == worst_rank,
            )
        )
    return sorted(bad, key=_part_key)


def problems(bad_parts: Sequence[Part]) -> list[Problem]:
    """``parts`` grouped: one bad GPU is one problem, a setting that is wrong on 64 nodes too."""
    groups = grouped((_problem_key(part), part) for part in bad_parts)
    return [Problem(tuple(group), _merged(group)) for group in groups.values()]


def _problem_key(part: Part) -> tuple[object, ...]:
    names = tuple(sorted((str(figure.outcome), figure.name) for figure in part.figures))
    causes = tuple(finding.cause or finding.title for finding in part.findings)
    fixes = tuple(sorted({_DIGITS.sub("#", fix) for fix in part.fixes}))  # they name the index of each GPU
    return part.kind, names, causes, fixes


def failing_text(bad_parts: Sequence[Part]) -> str:
    """The number of parts with FAIL by kind: ``2 GPUs and 1 link fail``; empty if there are none."""
    failing = [part for part in bad_parts if part.outcome is Outcome.FAIL]
    counts = Counter(part.kind for part in failing if part.kind != CLUSTER)
    if failing and not counts:  # otherwise figures of the whole cluster follow from its parts
        count = sum(figure.outcome is Outcome.FAIL for part in failing for figure in part.figures)
        return f"{plural(count, 'figure')} of the cluster {'fails' if count == 1 else 'fail'}"
    texts = [plural(counts[kind], kind) for kind in KINDS if counts[kind]]
    verb = "fails" if counts.total() == 1 else "fail"
    return f"{', '.join(texts[:-1])}{' and ' if texts[1:] else ''}{texts[-1]} {verb}" if texts else ""


def with_real_values(trial: Trial, run_dir: Path | None) -> Trial:
    """The trial in which each bad verdict has a fix, with index and PCI address of the GPU and the run directory."""
    gpus, run = gpus_of(trial), run_values(run_dir)

    def values(subject: str) -> dict[str, str]:
        match = _GPU.match(subject)
        return run | {"INDEX": match["index"], "PCI": gpus.get(match[0], Gpu()).slot} if match else run

    return trial.model_copy(
        update={
            "verdicts": tuple(
                replace(
                    verdict, fix=filled(verdict.fix or NEXT_STEPS.get(verdict.outcome, ""), values(verdict.subject))
                )
                if verdict.outcome in NOT_PASSED
                else verdict
                for verdict in trial.verdicts
            ),
            "findings": tuple(
                finding.model_copy(update={"fix": filled(finding.fix, values(finding.subject))})
                for finding in trial.findings
            ),
        }
    )


def cause_text(bad_parts: Sequence[Part]) -> str:
    """The causes of parts with FAIL on one line, each with its place; at most three."""
    texts = []
    for part in bad_parts:
        if part.outcome is Outcome.FAIL and part.cause:
            place = "" if part.kind == CLUSTER or part.name in part.cause.split() else f" on {part.name}"
            texts.append(part.cause + place)
    return and_more(texts, 3, "; ")


def filled(text: str, values: Mapping[str, str]) -> str:
    """``text`` in which the placeholders INDEX, PCI and RUN of commands are replaced, if their value is known."""
    return _PLACEHOLDER.sub(lambda found: found[1] + (values.get(found[2]) or found[2]), text)


def run_values(run_dir: Path | None) -> dict[str, str]:
    """The value of the placeholder RUN, quoted for a shell."""
    return {"RUN": shlex.quote(str(run_dir))} if run_dir else {}


def _merged(group: Sequence[Part]) -> tuple[Figure, ...]:
    if len(group) == 1:
        return group[0].figures
    return _worst_first(figures([figure.verdict for part in group for figure in part.figures if figure.verdict]))


def _worst_first(unsorted: Sequence[Figure]) -> tuple[Figure, ...]:
    return tuple(sorted(unsorted, key=lambda figure: (outcome_rank(figure.outcome), figure.margin or 0.0)))


def _part_key(part: Part) -> tuple[object, ...]:
    # findings without a verdict come before warnings
    order = NOT_PASSED.index(part.outcome) if part.outcome else NOT_PASSED.index(Outcome.WARN) - 0.5
    return order, not part.has_cause, KINDS.index(part.kind), -len(part.figures), natural_key(part.name)


def _switches(subject: str, topology: Topology) -> str:
    """The switches of a pair of nodes from end to end; for a GPU the switch of its rail, else that of its node."""
    node, arrow, other_node = subject.partition("->")
    if arrow:
        path = topology.path(node, other_node)
        crossing = f" (crosses {path[len(path) // 2]})" if len(path) > 1 else ""
        return " – ".join(path) + crossing
    if match := DEVICE.fullmatch(subject):
        rail = topology.rail_switch(match["node"], int(match["index"]))
        return f"rail {match['index']}: {rail}" if rail else " – ".join(topology.switches_above(match["node"])[:1])
    return ""
