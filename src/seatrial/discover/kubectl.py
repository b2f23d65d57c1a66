"""Runs kubectl with a namespace, context and timeout, and reports each of its errors in one sentence.

No other module runs kubectl.

seatrial stores no credentials: kubectl reads the user's kubeconfig. Every request has a timeout, since by default
kubectl waits without a limit for an API server that does not answer.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import Any

from seatrial.model import SeatrialError
from seatrial.util import processes
from seatrial.util.processes import CommandResult

COMMAND_TIMEOUT_S = 60.0
_REQUEST_TIMEOUT_S = 20
# kubectl 1.32: "Error from server (Forbidden): pods is forbidden: ..."; "(Forbidden): error when creating FILE: ..."
_REFUSED = re.compile(
    r"^Error from server \((?P<reason>\w+)\): (?:error when \w+ \S+: )?(?P<message>.+)$", re.MULTILINE
)
_LOG_LINE = re.compile(r"^[EIW]\d{4} ")  # of klog; kubectl prints a failed request several times before its error
# localhost:8080 is kubectl's default without a kubeconfig or without a current context
_NO_CLUSTER = re.compile(
    r'server localhost:8080 was refused|context was not found|context "[^"]*" does not exist|error loading config file'
)
# kubectl logs --ignore-errors prints the error of a pod as a line of standard output, between the logs of the others:
# `error: Get "https://10.0.0.5:10250/containerLogs/ml/x-1-abcde/seatrial": dial tcp ...` (kubectl 1.27 to 1.33)
_LOG_ERROR = re.compile(r"error: (?P<error>.*[/ \"](?P<pod>[a-z0-9.-]{1,250}-\d{1,6}-[a-z0-9]{5})(?=[/\" )]).*)")
_MAX_LINE = 4096  # characters
_UNREACHABLE = ("Unable to connect to the server", "The connection to the server", "no route to host", "i/o timeout")


class KubectlError(SeatrialError):
    """kubectl failed; the message has its error and the first command to run.

    ``reason``: the API server's reason to refuse the request, such as Forbidden, NotFound or AlreadyExists; empty for
    other errors.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class ApiUnavailable(KubectlError):
    """The API server did not answer, or is overloaded: a later request may succeed."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl with a namespace and a context. None: the current one of the kubeconfig."""

    namespace: str | None = None
    context: str | None = None

    def command(self, *args: str) -> list[str]:
        options = [f"--context={self.context}"] if self.context else []
        options += [f"--namespace={self.namespace}"] if self.namespace else []
        return ["kubectl", *options, *args]

    def command_text(self, *args: str) -> str:
        """The command line for ``args`` as a user types it, for "Run first"."""
        return shlex.join(self.command(*args))

    def run(self, *args: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """The standard output of ``kubectl ARGS``. Raises KubectlError if it fails or takes too long."""
        result = self.result(*args, timeout_s=timeout_s)
        if result.code != 0:
            raise self._error(args, result)
        return result.out

    def result(self, *args: str, timeout_s: float = COMMAND_TIMEOUT_S) -> CommandResult:
        """Code and output of ``kubectl ARGS``. Raises KubectlError if it does not start or takes too long."""
        argv = self.command(*args)
        try:
            result = processes.run_command(argv, timeout_s)
        except OSError as error:
            raise KubectlError(f"kubectl: {error.strerror}. Install it; run first: command -v kubectl") from None
        if result.code is None:
            raise ApiUnavailable(
                f"{shlex.join(argv)} took longer than {timeout_s:g} s. Run first: {self.command_text('version')}"
            )
        return result

    def get(self, *args: str) -> list[dict[str, Any]]:
        """The objects of ``kubectl get ARGS``: the items of a list, or one object.

        Raises KubectlError if it fails, or if its output is not a list of objects.
        """
        arguments = ("get", *args, "--output=json", f"--request-timeout={_REQUEST_TIMEOUT_S}s")
        output = self.run(*arguments)
        try:
            document = json.loads(output)  # kubectl prints an empty list as a document too
            objects = document.get("items", [document])
            if not all(map(_is_object, objects)):
                raise ValueError("items are not objects of Kubernetes")
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            command = self.command_text("get", *args, "--output=json")
            raise KubectlError(f"kubectl printed no JSON list of objects ({error}). Run first: {command}") from None
        return list(objects)

    def refusals(self, *permissions: tuple[str, str]) -> list[str]:
        """Those of ``permissions`` (verb, resource) that the user does not have, as ``create jobs.batch``.

        Raises KubectlError if the API server cannot be asked.
        """
        return [f"{verb} {resource}" for verb, resource in permissions if not self._may(verb, resource)]

    def _may(self, verb: str, resource: str) -> bool:
        name, _, subresource = resource.partition("/")
        args = ("auth", "can-i", verb, name, *([f"--subresource={subresource}"] if subresource else []))
        result = self.result(*args)
        answer = (result.out.strip().splitlines() or [""])[-1]
        if answer != "yes" and not answer.startswith("no"):  # "no", or "no - no RBAC policy matched"; exit code 1
            raise self._error(args, result)
        return answer == "yes"

    def _error(self, args: tuple[str, ...], result: CommandResult) -> KubectlError:
        text = result.err.strip() or result.out.strip()
        lines = [line.strip() for line in text.splitlines() if line.strip() and not _LOG_LINE.match(line)]
        output = "; ".join(dict.fromkeys(lines)) or f"exit code {result.code}, no output"  # each line once
        command_name = " ".join(args[:2]) if args[0] == "auth" else args[0]
        if _NO_CLUSTER.search(text):
            contexts = "kubectl config get-contexts"
            return KubectlError(f"kubectl has no cluster to connect to ({output}). Run first: {contexts}")
        if any(part in text for part in _UNREACHABLE):
            return ApiUnavailable(
                f"the API server does not answer ({output}). Run first: {self.command_text('version')}"
            )
        if refused := _REFUSED.search(text):
            reason, message = refused["reason"], refused["message"]
            error = f"the API server refused `kubectl {command_name}` ({reason}): {message}"
            error_type = (
                ApiUnavailable if reason in ("ServiceUnavailable", "Timeout", "TooManyRequests") else KubectlError
            )
            command = args
            # do not suggest a change: objects that a user creates are deleted by no run
            if args[0] in ("create", "patch", "taint"):
                is_over_quota = "exceeded quota" in message
                command = ("describe", "resourcequotas") if is_over_quota else ("auth", "can-i", "--list")
            return error_type(f"{error}. Run first: {self.command_text(*command)}", reason)
        return KubectlError(f"kubectl {command_name} failed: {output}. Run first: {self.command_text(*args)}")


def pod_log_error(line: str) -> tuple[str, str] | None:
    """(pod, error) if a line of `kubectl logs --ignore-errors` is the error of a pod of an Indexed Job."""
    match = _LOG_ERROR.fullmatch(line[:_MAX_LINE])
    return (match["pod"], match["error"]) if match else None


def _is_object(item: Any) -> bool:
    """Whether ``item`` is a JSON object, and so are its metadata, spec and status if it has them."""
    parts = ("metadata", "spec", "status")
    return isinstance(item, dict) and all(isinstance(item.get(part, {}), dict) for part in parts)
