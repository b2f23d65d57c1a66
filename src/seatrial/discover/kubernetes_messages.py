"""Finds known causes in messages of Kubernetes about pods that do not start, by data/causes/kubernetes_jobs.yaml."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from pydantic import Field

from seatrial.model import Frozen, JobFailure
from seatrial.util import data_files
from seatrial.util.grouping import grouped

_FILE = "causes/kubernetes_jobs.yaml"
_MAX_TEXT = 4096  # characters of a message that are searched and kept; the longest messages of Kubernetes have 2,000
# Kubernetes 1.36: "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient nvidia.com/gpu. no new
# claims to deallocate, preemption: 0/3 nodes are available: …". Older versions name the taint: "taint {KEY: }"
_UNSCHEDULABLE = re.compile(r"(?P<start>\d+/\d+ nodes are available: )(?P<reasons>.*?)(?:\. |$)")
_NODES_WITH_REASON = re.compile(r"(?:^|, )(\d+) (.+?)(?=, \d+ |$)")


class Message(Frozen):
    """A message of Kubernetes. ``pattern``: regular expression that finds it.

    ``name``: regular expression whose first group is the object that the message names. ``permanent``: whether the pod
    never starts, however long seatrial waits. ``source``: where the message is documented or was seen.
    """

    pattern: str = Field(min_length=1)
    name: str = ""
    permanent: bool = False
    source: str = Field(min_length=1)
    example: str = Field(min_length=1)


class StartCause(NamedTuple):
    """Why pods do not start: the id and title of the cause, its message, and the first command with {placeholders}."""

    id: str
    title: str
    message: Message
    first_command: str


@cache
def start_causes() -> tuple[StartCause, ...]:
    """The causes that ship with seatrial, in the order in which their patterns are tried."""
    rows: list[dict[str, Any]] = data_files.read(_FILE)
    return tuple(
        StartCause(row["id"], row["title"], Message.model_validate(row["message"]), row["first_command"])
        for row in rows
    )


def find_start_cause(text: str) -> StartCause | None:
    """The first cause whose message is in the first _MAX_TEXT characters of ``text``; None if there is none.

    Of a message of the scheduler, only the reasons of most nodes count: the taint of the control plane is in most.
    """
    text = text[:_MAX_TEXT]
    if match := _UNSCHEDULABLE.search(text):
        reasons = [(int(count), reason) for count, reason in _NODES_WITH_REASON.findall(match["reasons"])]
        most = max((count for count, _ in reasons), default=0)
        text = match["start"] + (", ".join(reason for count, reason in reasons if count == most) or match["reasons"])
    return next((each for each in start_causes() if re.search(each.message.pattern, text)), None)


class Place(NamedTuple):
    """Where pods are created, and their image.

    Empty ``namespace``: the namespace of the context. ``context`` None: the current context of the kubeconfig.
    """

    namespace: str
    context: str | None = None
    image: str = ""

    def filled(self, command: str, pod: str) -> str:
        """``command`` with {namespace} and {pod} filled in; kubectl gets the context as an option."""
        kubectl = f"kubectl --context={shlex.quote(self.context)} " if self.context else "kubectl "
        namespace_option = f" -n {self.namespace}" if self.namespace else ""
        filled = command.replace(" -n {namespace}", namespace_option).replace("{pod}", pod)
        return filled.replace("kubectl ", kubectl)


def job_failures(pods_by_message: Mapping[str, Sequence[tuple[str, str]]], place: Place) -> tuple[JobFailure, ...]:
    """One failure for each known cause that a message shows.

    ``pods_by_message``: message → (name, node) of the pods with this message; the node is empty if the pod has none.
    """
    causes = ((find_start_cause(message), (message[:_MAX_TEXT], pods)) for message, pods in pods_by_message.items())
    return tuple(_failure(cause, messages, place) for cause, messages in grouped(causes).items() if cause)


def _failure(cause: StartCause, messages: Sequence[tuple[str, Sequence[tuple[str, str]]]], place: Place) -> JobFailure:
    text, pods = messages[0]
    # Not every message about an image names the image. The appended image of ``place`` is the match in this case.
    name = re.search(cause.message.name, f'{text} image "{place.image}"') if cause.message.name else None
    return JobFailure(
        cause=cause.id,
        name=name[1] if name else "",
        message=text,
        nodes=tuple(dict.fromkeys(node for _, pods in messages for _, node in pods if node)),
        first_command=place.filled(cause.first_command, pods[0][0] if pods else "POD"),
    )
