"""Readmission: trials of repaired or new nodes with known-good partners, the decision on each node, and its state.

    trial of candidates and partners → ACCEPTED, or nodes at fault → trial without them → … → changes of node states

A candidate is a node to readmit; partners are known-good nodes. A candidate is ACCEPTED only by a trial that is
ACCEPTED as a whole. If a partner is at fault in a trial, another partner replaces it, and this trial rejects no
candidate.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from seatrial.model import CLUSTER, DecisionValue, Frozen, Outcome, SeatrialError, Trial, node_of
from seatrial.operate.drain_limit import DrainAnswer, DrainLimit, request_drain
from seatrial.operate.node_changes import TAKES_OUT, Candidates, ChangeOutcome, Flags, NodeChange, NodeResult, Partner
from seatrial.pipeline.planned_jobs import resolve
from seatrial.pipeline.preview import Preview, preview
from seatrial.pipeline.results import Display
from seatrial.pipeline.run import INTERRUPTED, run
from seatrial.pipeline.run_directory import Request, RunDir
from seatrial.util import secrets, signals
from seatrial.util.files import write_json
from seatrial.util.text import and_more
from seatrial.util.threads import start_in_thread

RECORD = "readmit.json"
_MAX_TRIALS = 3
_MAX_NAMED = 8  # nodes that a message lists
_DRAIN_ANSWER_LIMIT_S = 30.0  # a filesystem that hangs must not prevent the changes of other nodes
_INCOMPLETE = DecisionValue.INCOMPLETE
DisplayFactory = Callable[[], AbstractContextManager[Display]]


class Readmission(Frozen):
    """The record of a readmission: readmit.json. ``suspects``: partner at fault → its fault; ``trials``: folders."""

    schema_version: Literal["1"] = "1"
    run_id: str
    command: tuple[str, ...]
    started: float
    seconds: float
    trial: str
    candidates: tuple[str, ...]
    partners: tuple[Partner, ...]
    suspects: dict[str, str]
    trials: tuple[str, ...]
    results: tuple[NodeResult, ...]
    changes: tuple[NodeChange, ...]
    interrupted: bool = False

    @property
    def decision(self) -> DecisionValue:
        """REJECTED if a node is REJECTED; ACCEPTED if all nodes are ACCEPTED and every change was made or refused.

        Otherwise INCOMPLETE.
        """
        decisions = {result.decision for result in self.results}
        if DecisionValue.REJECTED in decisions:
            return DecisionValue.REJECTED
        failed = any(change.outcome in ("started", "failed") for change in self.changes)
        return DecisionValue.ACCEPTED if decisions == {DecisionValue.ACCEPTED} and not failed else _INCOMPLETE


@dataclass(frozen=True)
class Options:
    """The options of `seatrial readmit`. ``nodes``: to readmit; ``overrides``: (origin, key, value) of the trial.

    ``partners``: named by the user; empty: chosen by seatrial. ``state_dir``: folder that records drained nodes
    (node_state/drain_limit.py); ``flags.drain`` needs it. At most ``drain_share`` (0 to 1) of the cluster's nodes are
    taken out of service within ``drain_window_s``; one node is always allowed.
    """

    nodes: tuple[str, ...]
    partners: tuple[str, ...]
    trial: str
    overrides: tuple[tuple[str, str, Any], ...]
    flags: Flags
    state_dir: Path | None = None
    drain_share: float = 0.0
    drain_window_s: float = 3600.0

    @property
    def partners_needed(self) -> int:
        """The number of partners in a trial: at least two, and more than candidates.

        So most nodes of a trial are known to be good.
        """
        return max(2, len(self.nodes) + 1)

    def first_partners(self, pool: Sequence[Partner]) -> list[str]:
        """Return the names of the first nodes of ``pool``, as many as a trial needs."""
        return [partner.node for partner in pool[: self.partners_needed]]


def choose_partners(options: Options, candidates: Candidates[Any]) -> list[Partner]:
    """Return the partners that trials may use, preferred ones first. Raises SeatrialError if they are too few."""
    pool = candidates.partners(options.partners)
    if len(pool) < options.partners_needed:
        raise SeatrialError(f"no good partner left: {_missing_partners(pool, options)}; nothing was changed")
    return pool


def preview_trial(options: Options, candidates: Candidates[Any], pool: Sequence[Partner]) -> Preview:
    """Return the first trial without starting it. Raises UsageError if its file, settings or baseline are invalid."""
    return preview(_request(options, candidates, [*options.nodes, *options.first_partners(pool)]))


def planned_changes(
    options: Options, candidates: Candidates[Any], pool: Sequence[Partner]
) -> dict[DecisionValue, list[NodeChange]]:
    """Return decision → the changes before and after the test if all nodes get this decision: ACCEPTED or REJECTED.

    A change that the drain limit refuses now has the outcome ``refused``. Each node is compared with the limit as if it
    were the only one, since a preview does not record the drained nodes.
    """
    planned = {}
    for value in (DecisionValue.ACCEPTED, DecisionValue.REJECTED):
        results = {name: NodeResult(node=name, decision=value, reason="CAUSE") for name in options.nodes}
        changes = [*candidates.before_test(options.first_partners(pool)), *candidates.after_test(results)]
        planned[value] = [_as_limited(change, options, candidates) for change in changes]
    return planned


def _as_limited(change: NodeChange, options: Options, candidates: Candidates[Any]) -> NodeChange:
    """Return the change, with the outcome ``refused`` if the drain limit refuses it now.

    RUN and CAUSE stand for the run and the reason, which are not known before the test.
    """
    if change.action not in TAKES_OUT:
        return change
    refusal = _drain_refusal(options, candidates.cluster_node_count, change.nodes[0], "RUN", "CAUSE", dry_run=True)
    return change.model_copy(update={"outcome": "refused", "detail": refusal}) if refusal else change


def _drain_refusal(
    options: Options, cluster_node_count: int, node: str, run_id: str, reason: str, *, dry_run: bool = False
) -> str:
    """Return why the drain limit does not let ``node`` be taken out of service; empty if it does."""
    if (folder := options.state_dir) is None:
        return "no directory that records drained nodes: set --state-dir"
    limit = DrainLimit(options.drain_share, options.drain_window_s, cluster_node_count)

    def ask() -> DrainAnswer:
        return request_drain(folder, node, run_id, reason, limit, time.time(), dry_run=dry_run)

    try:
        return start_in_thread(ask).result(_DRAIN_ANSWER_LIMIT_S).reason
    except TimeoutError:
        return f"{folder} did not answer within {_DRAIN_ANSWER_LIMIT_S:.0f} s"


@dataclass
class Session:
    """One readmission: runs its trials in ``folder``, changes node states, and records both.

    ``pool``: the nodes that can be partners.
    """

    options: Options
    candidates: Candidates[Any]
    folder: Path
    pool: Sequence[Partner]
    display: DisplayFactory
    note: Callable[[str], None]
    started: float = field(default_factory=time.time)
    results: dict[str, NodeResult] = field(default_factory=dict)
    suspects: dict[str, str] = field(default_factory=dict)
    used: dict[str, Partner] = field(default_factory=dict)  # node → partner of at least one trial
    trials: list[str] = field(default_factory=list)
    changes: list[NodeChange] = field(default_factory=list)
    interrupted: bool = False

    def run(self) -> Readmission:
        """Test the candidates, then change their states.

        If the test ends with an error or is interrupted, the states are still changed, provided that a trial was
        started or an earlier change succeeded.
        """
        try:
            for change in self.candidates.before_test(self.options.first_partners(self.pool)):
                self._execute(change)
            self.candidates.wait_until_testable()
            self._test()
        except KeyboardInterrupt:
            self.interrupted = True
        except (SeatrialError, OSError, ValueError) as error:
            self._add_results(self._untested, _INCOMPLETE, str(error))
        finally:
            with signals.stop_signals_ignored():
                self._add_results(self._untested, _INCOMPLETE, INTERRUPTED if self.interrupted else "not tested")
                if self.trials or any(change.outcome != "failed" for change in self.changes):
                    self._change_states()
        return self._save()

    @property
    def _untested(self) -> list[str]:
        return [name for name in self.options.nodes if name not in self.results]

    def _test(self) -> None:
        """Run up to _MAX_TRIALS trials, until each candidate has a result."""
        for number in range(1, _MAX_TRIALS + 1):
            good_partners = [partner for partner in self.pool if partner.node not in self.suspects]
            if len(good_partners) < self.options.partners_needed:
                reason = f"no good partner left: {_missing_partners(good_partners, self.options, self.suspects)}"
                return self._add_results(self._untested, _INCOMPLETE, reason)
            partners = self.options.first_partners(good_partners)
            self.used |= {partner.node: partner for partner in good_partners if partner.node in partners}
            trial = self._run_trial(number, partners)
            if trial.decision.value is DecisionValue.ACCEPTED:
                return self._add_results(self._untested, trial.decision.value, trial.decision.reason)
            if trial.stop_reason == INTERRUPTED:
                self.interrupted = True
                return None
            at_fault = nodes_at_fault(trial, [*self._untested, *partners])
            bad_partners = {name: at_fault[name] for name in partners if name in at_fault}
            self.suspects |= bad_partners
            for name, cause in bad_partners.items():
                self.note(f"partner {name} is at fault ({cause}): replaced; this trial rejects no node")
            rejected = [] if bad_partners else [name for name in self._untested if name in at_fault]
            for name in rejected:
                self._add_results([name], DecisionValue.REJECTED, at_fault[name])
            if not self._untested:
                return None
            if not at_fault:
                return self._add_results(self._untested, _INCOMPLETE, trial.decision.reason)
        return self._add_results(self._untested, _INCOMPLETE, f"a node was at fault in each of {_MAX_TRIALS} trials")

    def _run_trial(self, number: int, partners: Sequence[str]) -> Trial:
        folder = self.folder / f"trial{number}"
        candidates, named_partners = and_more(self._untested, _MAX_NAMED), and_more(list(partners), _MAX_NAMED)
        self.note(f"trial {number}: {candidates} with {named_partners} in {folder}")
        request = _request(self.options, self.candidates, [*self._untested, *partners])
        self.trials.append(str(folder))
        with self.display() as display:
            return run(RunDir.create(folder, request), display)

    def _add_results(self, names: Sequence[str], decision: DecisionValue, reason: str) -> None:
        trial = self.trials[-1] if self.trials else ""
        for name in names:
            self.results[name] = NodeResult(node=name, decision=decision, reason=reason, trial=trial)

    def _change_states(self) -> None:
        """Make the changes after the test. After a failed change, only the changes that depend on it are refused."""
        try:
            for name, state in self.candidates.changed_meanwhile().items():
                if self.results[name].decision is DecisionValue.ACCEPTED:
                    self._add_results(
                        [name], _INCOMPLETE, f"the trial accepted this node, but its state became {state} meanwhile"
                    )
        except (SeatrialError, ValueError) as error:
            self.note(f"node states could not be read after the test: {error}")
        for change in self.candidates.after_test(self.results):
            if refusal := self._refusal(change):
                self._record(change, "refused", refusal)
                continue
            with contextlib.suppress(SeatrialError):  # _execute has recorded the error
                self._execute(change)

    def _refusal(self, change: NodeChange) -> str:
        """Return why the change must not be made; empty if it may."""
        if failed := [each for each in self.changes if each.action in change.needs and each.outcome == "failed"]:
            return f"{failed[0].action} of {', '.join(failed[0].nodes)} failed; make that change by hand, then this one"
        if change.action not in TAKES_OUT:
            return ""
        (node,) = change.nodes
        reason = self.results[node].reason
        node_count = self.candidates.cluster_node_count
        return _drain_refusal(self.options, node_count, node, self.folder.name, reason)

    def _execute(self, change: NodeChange) -> None:
        """Make a change. Its start is recorded first, so that the record is complete even after a SIGKILL.

        Raises SeatrialError if the change fails; the failure is recorded first.
        """
        self._record(change, "started")
        try:
            self.candidates.execute(change)
        except SeatrialError as error:
            self.changes.pop()
            self._record(change, "failed", str(error))
            raise
        self.changes.pop()
        self._record(change, "done")

    def _record(self, change: NodeChange, outcome: ChangeOutcome, detail: str = "") -> None:
        self.changes.append(change.model_copy(update={"outcome": outcome, "detail": detail}))
        self._save()
        if outcome != "started":
            self.note(str(self.changes[-1]))

    def _save(self) -> Readmission:
        """Write the record so far, and return it. An error, such as a full disk, does not prevent further changes."""
        readmission = Readmission(
            run_id=self.folder.name,
            command=secrets.redacted(("seatrial", *sys.argv[1:]), secrets.secret_values()),
            started=self.started,
            seconds=time.time() - self.started,
            trial=self.options.trial,
            candidates=self.options.nodes,
            partners=tuple(self.used.values()),
            suspects=self.suspects,
            trials=tuple(self.trials),
            results=tuple(self.results[name] for name in self.options.nodes if name in self.results),
            changes=tuple(self.changes),
            interrupted=self.interrupted,
        )
        try:
            write_json(self.folder / RECORD, readmission.model_dump(mode="json"))
        except OSError as error:
            self.note(f"cannot write {self.folder / RECORD}: {error.strerror or error}")
        return readmission


def nodes_at_fault(trial: Trial, nodes: Sequence[str]) -> dict[str, str]:
    """Return node → cause for the nodes at fault among ``nodes``.

    For each FAIL, the nodes that its findings name are at fault. If they name none of ``nodes``, the node that is the
    subject of the FAIL is at fault; for a FAIL on a path between nodes or on the cluster, no node is.
    """
    at_fault: dict[str, str] = {}
    for verdict in (each for each in trial.verdicts if each.outcome is Outcome.FAIL):
        cause_by_node: dict[str, str] = {}
        for finding in trial.findings:
            if verdict.key in finding.explains:
                for subject in finding.subject.split(", "):
                    if node := _subject_node(subject, nodes):
                        cause_by_node.setdefault(node, finding.title)
        if not cause_by_node and (node := _subject_node(verdict.subject, nodes)):
            cause_by_node[node] = f"{verdict.check}: {verdict.summary}"
        for node, cause in cause_by_node.items():
            at_fault.setdefault(node, cause)
    return at_fault


def _subject_node(subject: str, nodes: Sequence[str]) -> str:
    """Return the node of a subject such as ``node1/gpu0``; empty for the cluster, a path, or another node."""
    if subject == CLUSTER or "->" in subject:
        return ""
    host = node_of(subject)
    return next((name for name in (host, host.partition(".")[0]) if name in nodes), "")


def _request(options: Options, candidates: Candidates[Any], nodes: Sequence[str]) -> Request:
    resolved = resolve(options.trial, [*options.overrides, *candidates.settings(nodes)])
    return Request(
        config=resolved.config,
        origins=resolved.origins,
        only=(),
        skip=(),
        command=("seatrial", *sys.argv[1:]),
        started=time.time(),
    )


def _missing_partners(partners: Sequence[Partner], options: Options, suspects: Mapping[str, str] | None = None) -> str:
    """Return which nodes can be partners, how many are needed, and which partners are at fault, as text."""
    count, needed = len(options.nodes), options.partners_needed
    faults = "".join(f"; partner {name} is at fault: {cause}" for name, cause in (suspects or {}).items())
    possible = and_more([partner.node for partner in partners], _MAX_NAMED) or "no node"
    needs = f"{count} {'node needs' if count == 1 else 'nodes need'} {needed}"
    return f"{possible} can be a partner of {and_more(list(options.nodes), _MAX_NAMED)}, but {needs}{faults}"
