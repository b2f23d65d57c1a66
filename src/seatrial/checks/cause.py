"""A cause of bad verdicts: what shows it, what follows from it, and what to do about it."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

from seatrial.discover.kubernetes_messages import Message
from seatrial.model import Finding, Frozen, Verdict
from seatrial.model.trial import Action, Confidence


class Cause(Frozen):
    """A cause of bad verdicts. The evidence of a cause is a FAIL or WARN on a metric in ``evidence``.

    ``evidence``: check → metrics, each a name or a pattern. A cause in the declaration of a metric has this metric, and
    its meaning and fix as title and fix unless it has others. ``explains``: patterns of checks whose bad verdicts at
    the same place are consequences of the cause. ``wrong_results``: bad verdicts of any kind, such as damaged data, are
    consequences, and not only low speed. ``consequence_of``: causes and environment variables that explain the evidence
    of this cause at the same place; if they explain all of it, this cause is not reported.
    ``with_fact``, ``without_fact``: a verdict is evidence only if its check has, or has not, this fact on the node. An
    ERROR of any check that quotes the text of ``with_fact`` is a consequence.
    ``report_warning``: the cause is also reported for a WARN that explains no other bad verdict.
    ``place``: where the cause is. For "rank" it is the rank of the verdict, or its node if the node has several
    ranks and all are bad, or the cluster if there are several nodes and all ranks are bad.

    ``first_command`` may have {gpu}, {port}, {node}, {paths} of the fact ``paths_fact``, and {names}: the names in
    the fact ``fault_places`` of a check for the place, else the host's name. ``rank_command`` replaces it for a rank
    without a GPU. ``processes_fact``: the fact with processes that the title names; ``process_command`` with their
    {pids} is then added to the first command. ``signatures``: patterns of signatures of logs that show the same cause.
    ``message``: a message of Kubernetes about a pod that does not start; such a cause has no ``evidence``.
    ``explained_by_job_failure``: if pods of a check fail with a known message, that cause explains the evidence of this
    cause at the same place.
    """

    id: str
    title: str = ""
    evidence: Mapping[str, tuple[str, ...]] = {}
    message: Message | None = None
    explained_by_job_failure: bool = False
    place: Literal["gpu", "port", "node", "rank", "cluster"]
    explains: tuple[str, ...] = ()
    wrong_results: bool = False
    report_warning: bool = False
    with_fact: str = ""
    without_fact: str = ""
    consequence_of: tuple[str, ...] = ()
    first_command: str
    rank_command: str = ""
    paths_fact: str = ""
    processes_fact: str = ""
    process_command: str = ""
    signatures: tuple[str, ...] = ()
    fix: str = ""
    action: Action

    def is_evidence(self, verdict: Verdict) -> bool:
        """Whether ``verdict``, a FAIL or WARN, is on a metric in ``evidence``."""
        return any(
            fnmatchcase(verdict.check, check) and any(fnmatchcase(verdict.metric, metric) for metric in metrics)
            for check, metrics in self.evidence.items()
        )

    def finding(
        self, place: str, confidence: Confidence, evidence: str, first_command: str, source: str, names: str = ""
    ) -> Finding:
        """The finding of the cause at ``place``; ``names``: what the title names after a colon."""
        title = filled(self.title, place)
        return Finding(
            cause=self.id,
            title=f"{title}: {names}" if names else title,
            subject=place,
            confidence=confidence,
            evidence=evidence,
            first_command=first_command,
            fix=filled(self.fix, place),
            action=self.action,
            source=source,
        )


def filled(template: str, place: str) -> str:
    """A title, command or fix with {gpu}, {port} and {node} of ``place``."""
    node, _, device = place.partition("/")
    return template.replace("{gpu}", device.removeprefix("gpu")).replace("{port}", device).replace("{node}", node)
