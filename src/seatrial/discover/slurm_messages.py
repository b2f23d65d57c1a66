"""Meaning of Slurm's messages and the first command to run, from data/slurm_messages.yaml."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from pydantic import Field

from seatrial.model import Frozen
from seatrial.util import data_files


class SlurmMessage(Frozen):
    """A message of Slurm, by its pattern. ``controller``: whether it means that the controller does not respond.

    ``transient``: whether Slurm may accept the same request a little later.
    """

    pattern: str = Field(min_length=1)
    meaning: str = ""
    first_command: str = Field(min_length=1)
    controller: bool = False
    transient: bool = False
    source: str = Field(min_length=1)
    example: str = Field(min_length=1)


class PermanentReasons(Frozen):
    """Patterns of pending reasons with which a job never starts."""

    reasons: tuple[str, ...]
    source: str = Field(min_length=1)


class SlurmMessages(Frozen):
    """The lists of data/slurm_messages.yaml; in each list the first pattern that matches is used.

    ``unreachable``: stderr of a command that does not reach the controller. ``refused``: output of a command whose
    request Slurm refused. ``reasons``: Slurm's reasons why a job is pending or has ended.
    """

    unreachable: tuple[SlurmMessage, ...]
    refused: tuple[SlurmMessage, ...]
    permanent_pending_reasons: PermanentReasons
    reasons: tuple[SlurmMessage, ...]


@cache
def messages() -> SlurmMessages:
    return SlurmMessages.model_validate(data_files.read("slurm_messages.yaml"))


def first_match(candidates: Sequence[SlurmMessage], text: str) -> SlurmMessage | None:
    """The first of ``candidates`` whose pattern occurs in ``text``; None if there is none."""
    return next((message for message in candidates if re.search(message.pattern, text)), None)


def is_permanent_pending_reason(reason: str) -> bool:
    """Whether a job that is pending for this reason never starts."""
    patterns = messages().permanent_pending_reasons.reasons
    return bool(re.fullmatch("|".join(patterns), reason.partition(",")[0]))


def first_commands(job_id: str, reason: str) -> str:
    """The first commands to run for a job with this reason, separated by semicolons."""
    message = first_match(messages().reasons, reason)
    return "; ".join([f"scontrol show job {job_id}", *([message.first_command.format(id=job_id)] if message else [])])
