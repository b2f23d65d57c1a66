"""The declaration of a drill: the fault, the trial that it is injected into, and the expected report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pydantic import JsonValue

from seatrial.model import Frozen, Outcome
from seatrial.model.trial import Action

if TYPE_CHECKING:
    from seatrial.drill.injection import Injection

Machine = Literal["cpu", "cluster", "gpu"]
BAD_OUTCOMES = (Outcome.FAIL, Outcome.WARN, Outcome.ERROR)
ONLY_FAIL, ONLY_ERROR = (Outcome.FAIL,), (Outcome.ERROR,)


@dataclass(frozen=True)
class Needs:
    """The requirements of a drill. ``gpus``, ``cpus``: the smallest number on this host.

    ``nodes``: if more than 1, the smallest number of usable nodes of Slurm. ``programs``: executables in PATH.
    ``device_files``: special files such as /dev/fuse that the user may read and write. ``other``: a function that
    returns another reason why the drill cannot run; empty if there is none.
    """

    root: bool = False
    gpus: int = 0
    nodes: int = 1
    cpus: int = 1
    programs: tuple[str, ...] = ()
    device_files: tuple[str, ...] = ()
    other: Callable[[], str] | None = None


@dataclass(frozen=True)
class Expected:
    """What the trial must report: verdicts, each on one metric of a check, and findings, each with a diagnosed cause.

    ``check`` and ``metric`` are patterns of fnmatch; ``place``, ``command`` and ``refusal`` are regular expressions;
    ``cause`` is compared as text.

    A drill whose trial runs to its end:

    - seen: a verdict that matches ``check`` and ``metric`` has one of ``outcomes``. ``check``: empty for the first one
      of the trial. ``metric``: "*" for any verdict of the check, empty for a verdict on the check itself.
    - located: ``place`` occurs in subject, title or evidence of the first finding, or in subject, detail or evidence of
      a verdict of "seen".
    - explained: ``cause`` is the id of the first finding's cause or signature.
    - first command right: ``command`` occurs in the first command of the first finding.
    - action right: the first finding has ``action``; not evaluated if ``action`` is None.

    A drill with ``refusal``, whose trial must not start or must end early. Its message is the standard error and the
    reason for an early end:

    - seen: ``refusal`` occurs in the message, and the decision is not ACCEPTED.
    - located, explained: ``place`` and the text ``cause`` occur in the message.
    - first command right: ``command`` occurs in the first command of the first finding, or without one in the message.
    """

    cause: str
    place: str
    command: str
    check: str = ""
    metric: str = "*"
    outcomes: tuple[Outcome, ...] = BAD_OUTCOMES
    action: Action | None = None
    refusal: str = ""


def _do_nothing(_injection: Injection) -> None:
    """The default of ``prepare`` and ``act``."""


@dataclass(frozen=True)
class Drill:
    """One fault and its trial. ``prepare`` is called before the trial starts, ``act`` while the trial runs.

    ``title``: the injected fault. ``checks``: check → its options. ``thresholds``: check → metric → its threshold.
    ``settings``: more keys of the trial file, such as ``limits``. ``launcher``: slurm for drills on several nodes.
    ``fault``: a module in ``faults`` that changes the Python processes of the trial. ``limit_s``: seconds in which the
    trial must end, from the end of ``act``.
    """

    name: str
    title: str
    machine: Machine
    checks: Mapping[str, Mapping[str, JsonValue]]
    expected: Expected
    thresholds: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    launcher: Literal["local", "slurm"] = "local"
    needs: Needs = Needs()
    prepare: Callable[[Injection], None] = _do_nothing
    act: Callable[[Injection], None] = _do_nothing
    fault: str = ""
    limit_s: float = 300.0

    @property
    def expected_check(self) -> str:
        """The check of which a verdict must show the fault; "*" for a refusal, which has no verdict."""
        return self.expected.check or ("*" if self.expected.refusal else next(iter(self.checks)))


class DrillResult(Frozen):
    """The result of one drill. ``could_not_run``: why it could not run here; then only name, title and machine are set.

    ``seconds``: from the injection, or from the start of a trial with a fault from the start, to the end of the trial.
    ``seen`` to ``action_right``: the parts of Expected; ``action_right`` is None if no action is expected.
    ``decision``, ``finding``, ``place``, ``first_command``: what the trial reported.
    ``problems``: the expected and the reported value of each part that does not hold, or why the drill failed.
    """

    name: str
    title: str
    machine: Machine
    could_not_run: str = ""
    seen: bool = False
    located: bool = False
    explained: bool = False
    command_right: bool = False
    action_right: bool | None = False
    seconds: float = 0.0
    decision: str = ""
    finding: str = ""
    place: str = ""
    first_command: str = ""
    problems: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the drill ran and every part holds."""
        parts = (self.seen, self.located, self.explained, self.command_right, self.action_right)
        return not self.could_not_run and False not in parts
