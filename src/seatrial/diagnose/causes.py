"""Causes of bad verdicts: other bad verdicts and environment variables that explain them, from data/causes. Pure."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from seatrial.checks.cause import Cause, filled
from seatrial.checks.check import SLOWED_BY_PREFIX, Check
from seatrial.diagnose.cause_data import Details, causes
from seatrial.discover.environment_variables import variables
from seatrial.hardware.links import FactRole, role_facts
from seatrial.judge.retry import PerformanceMetrics
from seatrial.model import CLUSTER, Finding, Measurement, Outcome, Reason, Scope, Verdict, VerdictKey, ends, node_of
from seatrial.model.trial import Confidence
from seatrial.util.grouping import grouped
from seatrial.util.text import and_more

VARIABLES_SOURCE = "data/environment_variables.yaml"
_CONFIDENCE_ORDER: tuple[Confidence, ...] = ("high", "medium", "low")
_MAX_NAMED = 6
_CLIENT_PROGRAMS = ("kubectl ", "srun ", "scontrol ", "sinfo ", "squeue ", "sacct ")
_DIFFERENCE_ROLES: tuple[FactRole, ...] = ("setting_differences", "version_differences")
# The end of the recorded value of a variable that seatrial sets
SET_BY_SEATRIAL = "(set by seatrial)"
SPEED_CHECKS = ("device.*", "transfer.*", "collectives.*", "fabric.*", "train.*")
_NODE_DIFFERS = Cause(
    id="node_differs",
    title="{node} has other versions or settings than most nodes",
    place="node",
    explains=SPEED_CHECKS,
    report_warning=True,
    first_command="",
    fix="Give all nodes the same image: driver, kernel, libraries and settings. Then run the trial again.",
    action="fix-config",
)


@dataclass(frozen=True)
class _Suspect:
    """A possible cause at one place, the subject of its finding, before its consequences are known."""

    finding: Finding
    cause: Cause
    name: str  # the id of the cause, or the name of the environment variable
    evidence_verdicts: tuple[Verdict, ...]  # the verdicts that are its evidence
    only_here: bool = False  # explains verdicts on the place and its devices only, not on the cluster
    quotable_texts: frozenset[str] = frozenset()  # an ERROR that quotes one of them is a consequence

    @property
    def place(self) -> str:
        return self.finding.subject


@dataclass(frozen=True)
class Run:
    """The verdicts and measurements of a run.

    ``node_prefix``: the start of a command that runs on another node, such as ``srun --nodelist={node}``; empty for
    this host. ``searches``: measurements of the search for slow nodes after the trial's own checks.
    """

    verdicts: Sequence[Verdict]
    measurements: Sequence[Measurement]
    checks: Mapping[str, Check]
    node_prefix: str = ""
    searches: Sequence[Measurement] = ()

    @cached_property
    def bad(self) -> list[Verdict]:
        """The verdicts that need a cause: FAIL, WARN, ERROR, and inconclusive violations of a threshold."""
        return [
            each
            for each in self.verdicts
            if each.outcome in (Outcome.FAIL, Outcome.WARN, Outcome.ERROR)
            or (each.outcome is Outcome.UNJUDGED and Reason.INCONCLUSIVE in each.reasons)
        ]

    @cached_property
    def _performance(self) -> dict[str, PerformanceMetrics]:
        return {name: PerformanceMetrics(check) for name, check in self.checks.items()}

    @cached_property
    def _places(self) -> dict[tuple[str, str], dict[str, list[str]]]:
        """(check, metric) → place → names, from the facts of checks that locate a verdict on the cluster."""
        places: dict[tuple[str, str], dict[str, list[str]]] = {}
        for check, metric, by_place in _mappings("fault_places", self.measurements, self.checks):
            names = {place: [str(item) for item in items] for place, items in by_place.items()}
            places.setdefault((check, metric), {}).update(names)
        return places

    def is_speed(self, verdict: Verdict) -> bool:
        """Whether the verdict is on a performance metric."""
        return verdict.check in self._performance and self._performance[verdict.check][verdict.metric]

    def places_of(self, verdict: Verdict) -> dict[str, list[str]]:
        """Place → names there, which the check of a verdict on the cluster gives."""
        return self._places.get((verdict.check, verdict.metric), {})

    def verdicts_at(self, node: str, names: Container[str]) -> tuple[Verdict, ...]:
        """The verdicts on the cluster that a check locates at ``node`` with one of ``names``."""
        on_cluster = (verdict for verdict in self.bad if verdict.subject == CLUSTER)
        return tuple(each for each in on_cluster if any(name in names for name in self.places_of(each).get(node, ())))


def cause_findings(run: Run) -> list[Finding]:
    """The causes of bad verdicts, most certain and then most local first, each with the verdicts that it explains.

    A cause is omitted if other causes explain all of its evidence (``Cause.consequence_of``). It is also omitted if it
    has no consequences, or if all of them have a more certain cause. These two reasons do not count if the evidence has
    a FAIL, or a WARN that is reported (``Cause.report_warning``).
    """
    if not run.bad:
        return []
    by_variable = list(_suspects_by_variable(run))
    suspects = [*_suspects_by_verdict(run), *by_variable, *_suspects_by_difference(run, by_variable)]
    suspect_by_evidence = {
        verdict: suspect
        for suspect in suspects
        if suspect.cause.consequence_of
        for verdict in suspect.evidence_verdicts
    }
    # by node or CLUSTER; an index, since there may be thousands of suspects
    bad_by_node = grouped((node, verdict) for verdict in run.bad for node in set(map(node_of, ends(verdict.subject))))
    explained = []  # suspects with their consequences
    for suspect in suspects:
        nodes = list(map(node_of, ends(suspect.place)))
        # A dictionary, since a verdict on a pair of nodes is listed with both
        on_nodes = dict.fromkeys(verdict for node in [*nodes, CLUSTER] for verdict in bad_by_node.get(node, ()))
        candidates = run.bad if CLUSTER in nodes else list(on_nodes)
        shown = suspect_by_evidence.get
        consequences = [each for each in candidates if _is_explained(each, suspect, run, shown(each))]
        explained.append((suspect, consequences))
    explained.sort(key=lambda each: (_CONFIDENCE_ORDER.index(each[0].finding.confidence), _extent(each[0].place)))
    return _needed_findings(explained)


def _needed_findings(explained: Sequence[tuple[_Suspect, list[Verdict]]]) -> list[Finding]:
    """The findings of suspects with their consequences, the most certain first; see cause_findings for omitted ones."""
    explained_verdicts = {verdict for _, consequences in explained for verdict in consequences}
    findings = []
    # Verdict → index in _CONFIDENCE_ORDER of the most certain cause that explains the verdict
    best_index: dict[VerdictKey, int] = {}
    for suspect, consequences in explained:
        if suspect.cause.consequence_of and explained_verdicts.issuperset(suspect.evidence_verdicts):
            continue  # the causes of this cause have findings
        index = _CONFIDENCE_ORDER.index(suspect.finding.confidence)
        is_needed = any(best_index.get(verdict.key, index) >= index for verdict in consequences)
        is_warning = suspect.cause.report_warning and suspect.evidence_verdicts
        if is_needed or is_warning or any(v.outcome is Outcome.FAIL for v in suspect.evidence_verdicts):
            finding = suspect.finding.explaining([*suspect.evidence_verdicts, *consequences])
            for key in finding.explains:
                best_index.setdefault(key, index)
            findings.append(finding)
    return findings


def _is_explained(verdict: Verdict, suspect: _Suspect, run: Run, shown_cause: _Suspect | None) -> bool:
    """Whether the suspect explains the check and the kind of the verdict (slow or wrong), at the same place.

    ``shown_cause``: the suspect that has the verdict as evidence, if that suspect has ``consequence_of``; else None.
    """
    is_elsewhere = suspect.only_here and verdict.subject == CLUSTER
    if is_elsewhere or verdict in suspect.evidence_verdicts or not overlap(suspect.place, verdict.subject):
        return False
    if shown_cause is not None:
        return suspect.name in shown_cause.cause.consequence_of
    if verdict.outcome is Outcome.ERROR and any(text in verdict.detail for text in suspect.quotable_texts):
        return True
    if not any(fnmatchcase(verdict.check, pattern) for pattern in suspect.cause.explains):
        return False
    if Reason.METRIC_MISSING in verdict.reasons and verdict.detail:  # the check gives a reason, such as noise
        return run.is_speed(verdict) and not suspect.cause.wrong_results
    return suspect.cause.wrong_results or run.is_speed(verdict)


def overlap(place: str, subject: str) -> bool:
    """Whether a fault at ``place`` can show at ``subject``: the same, or one includes the other.

    The cluster includes everything, a node its GPUs, and a pair its ends.
    """
    if CLUSTER in (place, subject):
        return True
    return any(
        end == other or other.startswith(f"{end}/") or end.startswith(f"{other}/")
        for end in ends(subject)
        for other in ends(place)
    )


def _extent(place: str) -> int:
    """0 for a GPU or port, 1 for a node or pair, 2 for the cluster."""
    return 2 if place == CLUSTER else 0 if "/" in place else 1


def _mappings(
    role: FactRole, measurements: Sequence[Measurement], checks: Mapping[str, Check]
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(check, key, mapping) of each fact with this role, which maps nodes or metrics to mappings."""
    for measurement, by_key in role_facts(role, measurements, checks):
        for key, values in by_key.items() if isinstance(by_key, Mapping) else ():
            if isinstance(values, Mapping):
                yield measurement.check, key, values


def _suspects_by_verdict(run: Run) -> Iterator[_Suspect]:
    details = Details(run.measurements)
    for cause in causes():
        violations = [v for v in run.bad if v.outcome in (Outcome.FAIL, Outcome.WARN) and cause.is_evidence(v)]
        evidence = [verdict for verdict in violations if details.facts_allow(cause, verdict)]
        for place, evidence_verdicts in _by_place(cause, evidence, run).items():
            has_failed = any(verdict.outcome is Outcome.FAIL for verdict in evidence_verdicts)
            processes = details.process_names(cause, evidence_verdicts)
            names = [name for verdict in evidence_verdicts for name in run.places_of(verdict).get(place, ())]
            command = node_command(details.command(cause, evidence_verdicts, place), place, run.node_prefix, names)
            finding = cause.finding(
                place,
                "high" if has_failed else "medium",
                _listed(verdict.evidence or verdict.summary for verdict in evidence_verdicts),
                command,
                _listed(f"{verdict.metric} of {verdict.check}" for verdict in evidence_verdicts),
                _listed(processes),
            )
            texts = details.quotable_texts(cause, evidence_verdicts)
            yield _Suspect(finding, cause, cause.id, tuple(evidence_verdicts), quotable_texts=texts)


def _listed(texts: Iterable[str]) -> str:
    return and_more(list(dict.fromkeys(texts)), _MAX_NAMED)


def _by_place(cause: Cause, evidence: Sequence[Verdict], run: Run) -> dict[str, list[Verdict]]:
    """Place of the cause → the verdicts that are evidence of the cause there; see Cause for its place."""
    subjects = dict.fromkeys(verdict.subject for verdict in evidence)
    place_of = {each: {"node": node_of(each), "cluster": CLUSTER}.get(cause.place, each) for each in subjects}
    if cause.place == "rank" and evidence:
        good_nodes = {node_of(v.subject) for v in run.verdicts if v.subject not in place_of and cause.is_evidence(v)}
        bad_ranks = Counter(map(node_of, place_of))
        for subject in place_of:
            node = node_of(subject)
            if node not in good_nodes and bad_ranks[node] > 1:
                place_of[subject] = node
        if not good_nodes and len(bad_ranks) > 1:
            place_of = dict.fromkeys(place_of, CLUSTER)
    by_place: dict[str, list[Verdict]] = {}
    for verdict in evidence:
        place = place_of[verdict.subject]
        fault_places = run.places_of(verdict) if place == CLUSTER else {}
        for fault_place in fault_places or (place,):
            by_place.setdefault(fault_place, []).append(verdict)
    return by_place


def _suspects_by_variable(run: Run) -> Iterator[_Suspect]:
    """One suspect for each environment variable and each value of it that is not harmless.

    Its place is a node if only this node of several has the value, else the cluster. The evidence is the WARN on the
    variable, and for a node the verdict that settings differ.
    """
    for name, text, nodes, is_on_some, check in variable_values(run.measurements, run.checks):
        variable = variables()[name]
        if text.endswith(SET_BY_SEATRIAL) or not variable.has_effect(text):
            continue
        place = nodes[0] if is_on_some and len(nodes) == 1 else CLUSTER
        where = f" on {and_more(nodes, _MAX_NAMED)} only" if is_on_some else ""
        files = "/etc/nccl.conf ~/.nccl.conf /etc/environment /etc/profile.d ~/.bashrc ~/.profile"
        command = f"env | grep ^{name}; grep -rn {name} {files} 2>/dev/null"
        cause = Cause(
            id="environment_variable",
            title=f"{name}={text} is set{where}",
            place="node",
            explains=variable.explains,
            report_warning=True,
            first_command=command,
            fix=f"Unset {name} where it is set, or remove it from the trial's env, and run the trial again.",
            action="fix-environment",
        )
        finding = cause.finding(
            place,
            "high" if variable.large else "medium" if is_on_some else "low",
            f"{name}={text}{where}, in the environment of the ranks or in nccl.conf. Default: "
            f"{variable.default}. Effect of other values: {variable.effect}.",
            node_command(command, nodes[0] if nodes else CLUSTER, run.node_prefix),
            f"{VARIABLES_SOURCE} ({variable.source}); {check}",
        )
        warnings = (each for each in run.bad if each.metric == SLOWED_BY_PREFIX + name and overlap(place, each.subject))
        yield _Suspect(finding, cause, name, (*run.verdicts_at(place, (name,)), *warnings))


def variable_values(
    measurements: Sequence[Measurement], checks: Mapping[str, Check]
) -> Iterator[tuple[str, str, list[str], bool, str]]:
    """Each value of a variable with a known effect in the environment of the ranks or in NCCL's files.

    (name, text, nodes, whether only these nodes have it and not all ranks, the first check whose facts have it).
    """
    settings = [(node, check, values) for check, node, values in _mappings("node_settings", measurements, checks)]
    for measurement, facts in role_facts("variables", measurements, checks):
        if isinstance(facts, Mapping):
            is_of_all = checks[measurement.check].scope is Scope.CLUSTER
            node = CLUSTER if is_of_all else node_of(measurement.subject)
            settings.append((node, measurement.check, facts))
    all_nodes = {node for node, _, _ in settings if node != CLUSTER}
    nodes_by_value: dict[tuple[str, str], dict[str, str]] = {}  # (name, value) → node or CLUSTER → check with the fact
    for node, check, values in settings:
        for name, value in values.items():
            if name in variables():
                nodes_by_value.setdefault((name, str(value)), {}).setdefault(node, check)
    for (name, text), check_by_node in nodes_by_value.items():
        nodes = [node for node in check_by_node if node != CLUSTER]
        is_on_some = 0 < len(nodes) < len(all_nodes)
        yield name, text, nodes, is_on_some, next(iter(check_by_node.values()))


def _suspects_by_difference(run: Run, variable_suspects: Sequence[_Suspect]) -> Iterator[_Suspect]:
    """One suspect for each node whose versions or settings differ from those of most nodes.

    Variables that are suspects themselves do not count.
    """
    variables_at = {(suspect.place, suspect.name) for suspect in variable_suspects}
    facts = (fact for role in _DIFFERENCE_ROLES for fact in role_facts(role, run.measurements, run.checks))
    source = f"facts of {_listed(measurement.check for measurement, _ in facts)}"
    for node, differences in node_differences(run.measurements, run.checks).items():
        values = {name: text for name, text in differences.items() if (node, name) not in variables_at}
        if not values:
            continue
        listed = _listed(f"{name}: {value}" for name, value in values.items())
        finding = _NODE_DIFFERS.finding(
            node,
            "medium",
            f"on {node} {listed}",
            node_command(_command_for_differences(values), node, run.node_prefix),
            source,
        )
        yield _Suspect(finding, _NODE_DIFFERS, _NODE_DIFFERS.id, run.verdicts_at(node, values), only_here=True)


def _command_for_differences(names: Collection[str]) -> str:
    """A command that shows those of variables, network interfaces and versions that occur in ``names``."""
    variable_names = [name for name in names if re.fullmatch(r"[A-Z]+(_[A-Z0-9]+)+", name)]
    commands = [f"env | grep -E '^({'|'.join(variable_names)})='"] if variable_names else []
    commands += ["ip -d link"] if any(name in names for name in ("MTU", "speed")) else []
    has_versions = any(name not in (*variable_names, "MTU", "speed") for name in names)
    return "; ".join([*commands, *(["python3 -m torch.utils.collect_env"] if has_versions else [])])


def node_differences(measurements: Sequence[Measurement], checks: Mapping[str, Check]) -> dict[str, dict[str, str]]:
    """Node → name → value, for versions and settings that differ from those of most nodes."""
    differences: dict[str, dict[str, str]] = {}
    for role in _DIFFERENCE_ROLES:
        for _, node, values in _mappings(role, measurements, checks):
            differences.setdefault(node, {}).update({name: str(value) for name, value in values.items()})
    return differences


def node_command(template: str, place: str, node_prefix: str, names: Collection[str] = ()) -> str:
    """The command for ``place``, started on the node of ``place`` by ``node_prefix``.

    Commands of the scheduler's client, such as kubectl, run where seatrial does.
    {names} in ``template`` is replaced by ``names``; without names, by the name of the host that runs the command.
    """
    names_text = shlex.join(names) or '"$(hostname)"'
    command, node = filled(template, place).replace("{names}", names_text), node_of(place).partition("->")[0]
    if not node_prefix or node == CLUSTER or command.startswith(_CLIENT_PROGRAMS):
        return command
    shell = f"sh -c {shlex.quote(command)}" if set(command) & set(";|$&>") else command
    return f"{node_prefix.replace('{node}', node)} {shell}"
