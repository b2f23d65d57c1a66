"""Causes of bad verdicts: other bad verdicts and environment variables that explain them, from data/causes. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal

from seatrial.checks.base import Check
from seatrial.hardware.links import role_facts
from seatrial.judge.retry import PerformanceMetrics
from seatrial.model import CLUSTER, Explained, Finding, Frozen, Measurement, Outcome, Reason, Verdict
from seatrial.model.trial import Action, Confidence
from seatrial.util import data_files
from seatrial.util.text import and_more

VARIABLES_SOURCE = "data/environment_variables.yaml"
_CONFIDENCE_ORDER: tuple[Confidence, ...] = ("high", "medium", "low")
_MAX_NAMED = 6
# Set by seatrial itself, which says so behind the value
_SET_BY_SEATRIAL = "(set by seatrial)"
_SPEED_CHECKS = ("device.*", "transfer.*", "collectives.*", "fabric.*", "train.*")


class Cause(Frozen):
    """A cause that shows itself as a FAIL or WARN on a metric in ``evidence``.

    ``evidence``: check, or a pattern, → metrics. ``explains``: patterns of checks whose bad verdicts at the same place
    follow from it. ``wrong_results``: it explains any bad verdict, such as damaged data, and not only low speed.
    ``report_warning``: it is reported for a WARN that explains no other bad verdict, too.
    """

    id: str
    title: str
    evidence: Mapping[str, tuple[str, ...]]
    place: Literal["gpu", "port", "node", "cluster"]
    explains: tuple[str, ...]
    wrong_results: bool = False
    report_warning: bool = False
    first_command: str
    fix: str
    action: Action

    def is_evidence(self, verdict: Verdict) -> bool:
        """Whether ``verdict``, a FAIL or WARN, shows this cause."""
        return any(
            verdict.metric in metrics and fnmatchcase(verdict.check, check) for check, metrics in self.evidence.items()
        )


class Variable(Frozen):
    """An environment variable: its default, and the effect of other values than those that ``harmless`` matches.

    ``large``: the effect alone can make collectives several times slower.
    """

    default: str
    harmless: str = r"(?!)"
    effect: str
    explains: tuple[str, ...]
    large: bool = False
    source: str


@cache
def causes() -> tuple[Cause, ...]:
    """All causes that ship with seatrial."""
    return tuple(Cause.model_validate(row) for rows in data_files.read_all("causes") for row in rows)


@cache
def variables() -> Mapping[str, Variable]:
    """All environment variables of which the effect is known."""
    rows = data_files.read("environment_variables.yaml")
    return {name: Variable.model_validate(row) for name, row in rows.items()}


@dataclass(frozen=True)
class _Suspect:
    """A cause at one place, before it is known which verdicts it explains."""

    finding: Finding
    place: str  # a subject
    explains: tuple[str, ...]
    wrong_results: bool
    evidence_verdicts: tuple[Verdict, ...] = ()  # the verdicts that are its evidence
    only_here: bool = False  # it explains verdicts on subjects of the place only, not on the cluster
    report_warning: bool = False  # see Cause
    variable: str = ""


_FaultPlaces = dict[tuple[str, str], dict[str, list[str]]]  # see _fault_places


def cause_findings(
    verdicts: Sequence[Verdict],
    measurements: Sequence[Measurement],
    checks: Mapping[str, Check],
    node_prefix: str = "",
) -> list[Finding]:
    """The causes of bad verdicts, most certain and most local first, each with the verdicts that it explains.

    A cause is left out if it explains nothing, or only what a more certain one explains; a FAIL explains itself.
    ``node_prefix``: how a command starts on another node, such as ``srun --nodelist={node}``; empty for this host.
    """
    bad = [verdict for verdict in verdicts if _is_bad(verdict)]
    if not bad:
        return []
    performance = {name: PerformanceMetrics(check) for name, check in checks.items()}
    places = _fault_places(measurements, checks)
    by_variable = list(_suspects_by_variable(bad, places, measurements, checks, node_prefix))
    suspects = [
        *_suspects_by_verdict(bad, places, node_prefix),
        *by_variable,
        *_suspects_by_difference(bad, places, by_variable, measurements, checks, node_prefix),
    ]
    bad_by_node: dict[str, list[Verdict]] = {}  # with CLUSTER, for thousands of suspects
    for verdict in bad:
        for node in {end.partition("/")[0] for end in _ends(verdict.subject)}:
            bad_by_node.setdefault(node, []).append(verdict)
    explained = []
    for suspect in suspects:
        node = suspect.place.partition("/")[0]
        near = bad if node == CLUSTER else [*bad_by_node.get(node, ()), *bad_by_node.get(CLUSTER, ())]
        explained.append((suspect, [verdict for verdict in near if _is_explained(verdict, suspect, performance)]))
    explained.sort(key=lambda pair: (_CONFIDENCE_ORDER.index(pair[0].finding.confidence), _extent(pair[0].place)))
    findings: list[Finding] = []
    best: dict[Explained, int] = {}  # verdict → confidence of the most certain cause that explains it
    for suspect, consequences in explained:
        rank = _CONFIDENCE_ORDER.index(suspect.finding.confidence)
        keys = [Explained.of(verdict) for verdict in consequences]
        is_needed = any(best.get(key, rank) >= rank for key in keys)
        is_shown = suspect.report_warning and suspect.evidence_verdicts
        if is_needed or is_shown or any(verdict.outcome is Outcome.FAIL for verdict in suspect.evidence_verdicts):
            all_keys = dict.fromkeys([*map(Explained.of, suspect.evidence_verdicts), *keys])
            for key in all_keys:
                best.setdefault(key, rank)
            findings.append(suspect.finding.model_copy(update={"explains": tuple(all_keys)}))
    return findings


def _is_bad(verdict: Verdict) -> bool:
    is_inconclusive = verdict.outcome is Outcome.UNJUDGED and Reason.INCONCLUSIVE in verdict.reasons
    return is_inconclusive or verdict.outcome in (Outcome.FAIL, Outcome.WARN, Outcome.ERROR)


def _is_explained(verdict: Verdict, suspect: _Suspect, performance: Mapping[str, PerformanceMetrics]) -> bool:
    """Whether the verdict is a consequence of the suspect: of its checks, at its place, and of the right kind."""
    if verdict in suspect.evidence_verdicts or not any(
        fnmatchcase(verdict.check, pattern) for pattern in suspect.explains
    ):
        return False
    is_slow = verdict.check in performance and performance[verdict.check][verdict.metric]
    if suspect.only_here and verdict.subject == CLUSTER:
        return False
    return (suspect.wrong_results or is_slow) and _overlap(suspect.place, verdict.subject)


def _overlap(place: str, subject: str) -> bool:
    """Whether a fault at ``place`` can show at ``subject``: cluster and node include their GPUs, a pair its ends."""
    if CLUSTER in (place, subject):
        return True
    return any(
        end == other or other.startswith(f"{end}/") or end.startswith(f"{other}/")
        for end in _ends(subject)
        for other in _ends(place)
    )


def _ends(subject: str) -> tuple[str, ...]:
    """Both ends of a pair: ``n/gpu0->gpu1`` gives n/gpu0 and n/gpu1; a subject that is no pair gives itself."""
    first, arrow, second = subject.partition("->")
    if not arrow:
        return (subject,)
    node, slash, _ = first.partition("/")
    return first, second if "/" in second or not slash else f"{node}/{second}"


def _extent(place: str) -> int:
    """0 for a GPU or port, 1 for a node or pair, 2 for the cluster."""
    return 2 if place == CLUSTER else 0 if "/" in place else 1


def _fault_places(measurements: Sequence[Measurement], checks: Mapping[str, Check]) -> _FaultPlaces:
    """(check, metric) → place → the names there, from the facts of checks that locate a verdict on the cluster."""
    places: _FaultPlaces = {}
    for measurement, by_metric in role_facts("fault_places", measurements, checks):
        for name, by_place in by_metric.items() if isinstance(by_metric, Mapping) else ():
            if isinstance(by_place, Mapping):
                names = {place: [str(item) for item in items] for place, items in by_place.items()}
                places.setdefault((measurement.check, name), {}).update(names)
    return places


def _verdicts_at(bad: Sequence[Verdict], places: _FaultPlaces, node: str, names: Container[str]) -> tuple[Verdict, ...]:
    """The verdicts on the cluster that a check locates at ``node`` with one of ``names``."""
    located = (
        (verdict, places.get((verdict.check, verdict.metric), {})) for verdict in bad if verdict.subject == CLUSTER
    )
    return tuple(verdict for verdict, by_place in located if any(name in names for name in by_place.get(node, ())))


def _suspects_by_verdict(bad: Sequence[Verdict], places: _FaultPlaces, node_prefix: str) -> Iterator[_Suspect]:
    for cause in causes():
        by_place: dict[str, list[Verdict]] = {}
        names: dict[str, str] = {}
        for verdict in bad:
            if verdict.outcome in (Outcome.FAIL, Outcome.WARN) and cause.is_evidence(verdict):
                node = verdict.subject.partition("/")[0]
                place = {"node": node, "cluster": CLUSTER}.get(cause.place, verdict.subject)
                located = places.get((verdict.check, verdict.metric)) if place == CLUSTER else None
                for fault_place in located or (place,):
                    by_place.setdefault(fault_place, []).append(verdict)
                    names |= {fault_place: " ".join(located[fault_place])} if located else {}
        for place, evidence_verdicts in by_place.items():
            has_failed = any(verdict.outcome is Outcome.FAIL for verdict in evidence_verdicts)
            finding = Finding(
                cause=cause.id,
                title=cause.title,
                subject=place,
                confidence="high" if has_failed else "medium",
                evidence=and_more([verdict.evidence or verdict.summary for verdict in evidence_verdicts], _MAX_NAMED),
                first_command=_command(cause.first_command, place, node_prefix, names.get(place, "")),
                fix=_filled(cause.fix, place, names.get(place, "")),
                action=cause.action,
                source=and_more(
                    list(dict.fromkeys(f"{verdict.metric} of {verdict.check}" for verdict in evidence_verdicts)),
                    _MAX_NAMED,
                ),
            )
            yield _Suspect(
                finding,
                place,
                cause.explains,
                cause.wrong_results,
                tuple(evidence_verdicts),
                report_warning=cause.report_warning,
            )


def _suspects_by_variable(
    bad: Sequence[Verdict],
    places: _FaultPlaces,
    measurements: Sequence[Measurement],
    checks: Mapping[str, Check],
    node_prefix: str,
) -> Iterator[_Suspect]:
    """One suspect for each environment variable with another value than its default, on all nodes that have it.

    The evidence of a variable that is set on one node only is the verdict that settings differ.
    """
    settings = list(_settings_of_nodes(measurements, checks))
    all_nodes = {node for node, _, _ in settings if node != CLUSTER}
    nodes_by_value: dict[tuple[str, str], dict[str, str]] = {}  # (name, value) → node, or CLUSTER → check
    for node, check, values in settings:
        for name, value in values.items():
            text, variable = str(value), variables().get(name)
            if variable and not text.endswith(_SET_BY_SEATRIAL) and not re.fullmatch(variable.harmless, text):
                nodes_by_value.setdefault((name, text), {}).setdefault(node, check)
    for (name, text), check_by_node in nodes_by_value.items():
        variable, nodes = variables()[name], [node for node in check_by_node if node != CLUSTER]
        is_on_some = 0 < len(nodes) < len(all_nodes)
        place = nodes[0] if is_on_some and len(nodes) == 1 else CLUSTER
        where = f" on {and_more(nodes, _MAX_NAMED)} only" if is_on_some else ""
        files = "/etc/nccl.conf ~/.nccl.conf /etc/environment /etc/profile.d ~/.bashrc ~/.profile"
        command = f"env | grep ^{name}; grep -rn {name} {files} 2>/dev/null"
        finding = Finding(
            cause="environment_variable",
            title=f"{name}={text} is set{where}",
            subject=place,
            confidence="high" if variable.large else "medium" if is_on_some else "low",
            evidence=f"{name}={text}{where}, in the environment of the ranks or in nccl.conf. Default: "
            f"{variable.default}. Effect of other values: {variable.effect}.",
            first_command=_command(command, nodes[0] if nodes else CLUSTER, node_prefix),
            fix=f"Unset {name} where it is set, or remove it from the trial's env, and run the trial again.",
            action="fix-environment",
            source=f"{VARIABLES_SOURCE} ({variable.source}); {next(iter(check_by_node.values()))}",
        )
        differences = _verdicts_at(bad, places, place, (name,))
        yield _Suspect(
            finding,
            place,
            variable.explains,
            wrong_results=False,
            evidence_verdicts=differences,
            report_warning=True,
            variable=name,
        )


def _settings_of_nodes(
    measurements: Sequence[Measurement], checks: Mapping[str, Check]
) -> Iterator[tuple[str, str, Mapping[str, object]]]:
    """Node, check and settings, for all facts with settings; CLUSTER for a fact that stands for all ranks."""
    for measurement, by_node in role_facts("node_settings", measurements, checks):
        for node, values in by_node.items() if isinstance(by_node, Mapping) else ():
            if isinstance(values, Mapping):
                yield node, measurement.check, values
    for measurement, values in role_facts("variables", measurements, checks):
        if isinstance(values, Mapping):
            yield CLUSTER, measurement.check, values


def _suspects_by_difference(
    bad: Sequence[Verdict],
    places: _FaultPlaces,
    by_variable: Sequence[_Suspect],
    measurements: Sequence[Measurement],
    checks: Mapping[str, Check],
    node_prefix: str,
) -> Iterator[_Suspect]:
    """One suspect for each node whose versions or settings differ from those of most nodes.

    Without the variables that are suspects themselves.
    """
    variables_at = {(suspect.place, suspect.variable) for suspect in by_variable}
    differences: dict[str, dict[str, str]] = {}
    sources: dict[str, None] = {}
    for role in ("setting_differences", "version_differences"):
        for measurement, by_node in role_facts(role, measurements, checks):
            for node, values in by_node.items() if isinstance(by_node, Mapping) else ():
                others = values if isinstance(values, Mapping) else {}
                if others := {name: text for name, text in others.items() if (node, name) not in variables_at}:
                    differences.setdefault(node, {}).update(others)
                    sources[measurement.check] = None
    for node, values in differences.items():
        listed = and_more([f"{name}: {value}" for name, value in values.items()], _MAX_NAMED)
        finding = Finding(
            cause="node_differs",
            title=f"{node} has other versions or settings than most nodes",
            subject=node,
            confidence="medium",
            evidence=f"on {node} {listed}",
            first_command=_command(_command_for_differences(values), node, node_prefix),
            fix="Give all nodes the same image: driver, kernel, libraries and settings. Then run the trial again.",
            action="fix-config",
            source=f"facts of {and_more(list(sources), _MAX_NAMED)}",
        )
        yield _Suspect(
            finding,
            node,
            _SPEED_CHECKS,
            wrong_results=False,
            evidence_verdicts=_verdicts_at(bad, places, node, values),
            only_here=True,
            report_warning=True,
        )


def _command_for_differences(names: Collection[str]) -> str:
    """A command that shows variables, network interface and versions, as far as ``names`` has such settings."""
    variable_names = [name for name in names if re.fullmatch(r"[A-Z]+(_[A-Z0-9]+)+", name)]
    commands = [f"env | grep -E '^({'|'.join(variable_names)})='"] if variable_names else []
    commands += ["ip -d link"] if any(name in names for name in ("MTU", "speed")) else []
    has_versions = any(name not in (*variable_names, "MTU", "speed") for name in names)
    return "; ".join([*commands, *(["python3 -m torch.utils.collect_env"] if has_versions else [])])


def _command(template: str, place: str, node_prefix: str, names: str = "") -> str:
    """The command for ``place``, on its node if that is another host."""
    command, node = _filled(template, place, names), place.partition("/")[0].partition("->")[0]
    if not node_prefix or node == CLUSTER:
        return command
    shell = f"sh -c {shlex.quote(command)}" if set(command) & set(";|$&>") else command
    return f"{node_prefix.format(node=node)} {shell}"


def _filled(template: str, place: str, names: str = "") -> str:
    """``{names}``: the names that a check located at ``place``; this host's own if there are none."""
    node, _, device = place.partition("/")
    template = template.replace("{names}", names or '"$(hostname)"')
    return template.replace("{gpu}", device.removeprefix("gpu")).replace("{port}", device).replace("{node}", node)
