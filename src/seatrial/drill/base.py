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


@dataclass(frozen=True)
class Needs:
    """The requirements of a drill. ``nodes`` above 1: this number of Slurm nodes. ``programs``: executables in PATH.

    ``device_files``: special files such as /dev/fuse. ``other``: a function that returns why the drill cannot run for
    another reason, or an empty string.
    """

    root: bool = False
    gpus: int = 0
    nodes: int = 1
    cpus: int = 1
    programs: tuple[str, ...] = ()
    device_files: tuple[str, ...] = ()
    other: Callable[[], str] | None = None


@dataclass(frozen=True)
class DrillTrial:
    """The trial of a drill: check → options; ``settings``: more keys of the trial file, such as ``limits``.

    ``arguments``: more arguments of ``seatrial run``. ``launcher``: slurm for drills on several nodes.
    """

    checks: Mapping[str, Mapping[str, JsonValue]]
    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    launcher: Literal["local", "slurm"] = "local"


@dataclass(frozen=True)
class Expected:
    """What the trial must report.

    ``check`` and ``metric`` are patterns of fnmatch; ``place``, ``command`` and ``refusal`` are regular expressions;
    ``cause`` is compared as text.

    - seen: a verdict on ``check`` and ``metric`` (empty: on the whole check) with one of ``outcomes``; or, if
      ``refusal`` is set, no ACCEPTED and a message that matches it (standard error, or why the trial ended early).
    - located: ``place`` occurs in subject, title or evidence of the first finding, or in subject, detail or evidence of
      a verdict that shows the fault; in the message of a refusal.
    - explained: the first finding has ``cause`` as the id of its cause or of its signature. A refusal is explained if
      its message has the text ``cause``.
    - first command right: ``command`` occurs in the first command of that finding, or in the refusal.
    - action right: the finding has ``action``; not evaluated for a refusal, nor if ``action`` is None.
    """

    cause: str
    place: str
    command: str
    check: str = "*"
    metric: str = "*"
    outcomes: tuple[Outcome, ...] = BAD_OUTCOMES
    action: Action | None = None
    refusal: str = ""


def _do_nothing(_injection: Injection) -> None:
    """The default of ``prepare`` and ``act``."""


@dataclass(frozen=True)
class Drill:
    """One fault. ``prepare`` is called before the trial starts, ``act`` while it runs.

    ``title``: the injected fault. ``fault``: a file in ``faults`` that changes the Python processes of the trial.
    ``limit_s``: time limit of the trial in seconds.
    """

    name: str
    title: str
    machine: Machine
    trial: DrillTrial
    expected: Expected
    needs: Needs = Needs()
    prepare: Callable[[Injection], None] = _do_nothing
    act: Callable[[Injection], None] = _do_nothing
    fault: str = ""
    limit_s: float = 300.0


class DrillResult(Frozen):
    """The result of one drill. ``could_not_run``: why it could not run here; then only name, title and machine are set.

    ``seconds``: from the injection to the end of the trial; without a later injection, the time of the whole trial.
    ``seen`` to ``action_right``: see Expected; ``action_right`` is None if the drill expects no action.
    ``decision``, ``finding``, ``place``, ``first_command``: what the trial reported.
    ``problems``: the expected and the reported value of each part that does not hold.
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
        parts = (self.seen, self.located, self.explained, self.command_right, self.action_right is not False)
        return not self.could_not_run and all(parts)
