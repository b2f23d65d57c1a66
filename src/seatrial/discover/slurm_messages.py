"""What Slurm's messages mean, and the command to run first: data/slurm_messages.yaml, with the source of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from pydantic import Field

from seatrial.model import Frozen
from seatrial.util import data_files


class Message(Frozen):
    """``controller``: it says that the controller itself does not answer, this machine's side being in order."""

    pattern: str = Field(min_length=1)
    meaning: str = ""
    first_command: str = Field(min_length=1)
    controller: bool = False
    source: str = Field(min_length=1)
    example: str = Field(min_length=1)


class NeverStarts(Frozen):
    reasons: tuple[str, ...]
    source: str = Field(min_length=1)


class Messages(Frozen):
    unreachable: tuple[Message, ...]
    refused: tuple[Message, ...]
    never_starts: NeverStarts
    reasons: tuple[Message, ...]


@cache
def messages() -> Messages:
    return Messages.model_validate(data_files.read("slurm_messages.yaml"))


def first_match(candidates: Sequence[Message], text: str) -> Message | None:
    return next((message for message in candidates if re.search(message.pattern, text)), None)


def is_permanent_pending_reason(reason: str) -> bool:
    """Whether a job that is pending for this reason does not start by waiting."""
    return bool(re.fullmatch("|".join(messages().never_starts.reasons), reason.partition(",")[0]))


def first_commands(job_id: str, reason: str) -> str:
    """What to run first for a job with this reason."""
    message = first_match(messages().reasons, reason)
    return "; ".join([f"scontrol show job {job_id}", *([message.first_command.format(id=job_id)] if message else [])])
