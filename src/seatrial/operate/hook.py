"""One run of a hook: check the node, request its drain if it fails, write the record. It ends within its time limit."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from seatrial.model import SeatrialError
from seatrial.operate import drain_limit
from seatrial.operate import hook_children as children
from seatrial.operate.drain_limit import DrainLimit
from seatrial.operate.hook_exit_codes import (
    EXIT_CODES,
    EXIT_FAILED,
    Caller,
    Kind,
    Result,
    changes_node_state,
    exit_code,
)
from seatrial.operate.hook_record import Problem, Record, append, reason_text
from seatrial.operate.node_checks import check_node
from seatrial.pipeline.planned_jobs import resolve
from seatrial.util import data_files
from seatrial.util.files import atomic_write
from seatrial.util.node_name import node_name
from seatrial.util.text import printable

RESERVED_S = 1.5  # part of the time limit that is kept for the verdicts, the drain limit and the record


@dataclass(frozen=True)
class Request:
    """The options of a hook."""

    kind: Kind
    caller: Caller
    started: float  # start of this process (time.monotonic), at which the time limit begins
    records: Path
    status: Path | None = None  # file for node-problem-detector
    site: str | None = None  # the site's trial file, from which the next three values are read where they are None
    gpus_per_node: int | None = None
    gpu_model: str | None = None
    nodes: int | None = None  # nodes of the cluster, of which drain_share is a share
    state_dir: Path | None = None  # shared folder that records drained nodes; None: a failure is only recorded
    drain_share: float = 0.1  # share of the cluster's nodes that may be drained within drain_window_s
    drain_window_s: float = 3600.0
    time_limit_s: float = 8.0
    fail_closed: bool = False  # INCOMPLETE has the exit code of FAILED
    dry_run: bool = False  # write nothing
    job: str = ""  # Slurm's job id


def run(request: Request) -> tuple[Record, str]:
    """Return the record, and the error of writing it; the error is empty on success."""
    deadline = request.started + request.time_limit_s
    expected, site_error = _expected(request, request.started + request.time_limit_s / 2)
    node = check_node(
        expected.gpus, expected.model, request.job if request.kind == "epilog" else "", deadline - RESERVED_S
    )
    not_measured = {**({"site": site_error} if site_error else {}), **node.not_measured}
    failures = tuple(map(Problem.of_verdict, node.failures))
    run_id = uuid.uuid4().hex[:8]
    reason = reason_text(run_id, failures, not_measured)
    result = Result.FAILED if failures else Result.INCOMPLETE if not_measured else Result.PASSED
    limit_answer = ""
    code = exit_code(request.caller, result, request.fail_closed)
    if code == EXIT_FAILED and changes_node_state(request.caller, request.kind):
        granted, limit_answer = _request_drain(request, run_id, reason, expected.nodes, deadline - RESERVED_S / 2)
        result = result if granted else Result.LIMITED
    record = Record(
        run_id=run_id,
        time=time.time(),
        node=node_name(),
        kind=request.kind,
        caller=request.caller,
        job=request.job,
        result=result,
        exit_code=exit_code(request.caller, result, request.fail_closed),
        reason=reason,
        seconds=round(time.monotonic() - request.started, 3),
        measured=dict(node.seconds_by_check),
        not_measured=not_measured,
        not_applicable=dict(node.not_applicable),
        not_judged=dict(node.not_judged),
        failures=failures,
        warnings=tuple(map(Problem.of_verdict, node.warnings)),
        limit=limit_answer,
    )
    return record, "" if request.dry_run else _write(request, record, deadline)


class Expected(NamedTuple):
    """The number of GPUs of a node, their model, and the number of nodes of the cluster; None if not known."""

    gpus: int | None
    model: str | None
    nodes: int | None

    def or_else(self, other: Expected) -> Expected:
        """Return these values; a value that is not known is taken from ``other``."""
        return Expected(
            other.gpus if self.gpus is None else self.gpus, self.model or other.model, self.nodes or other.nodes
        )


def _expected(request: Request, deadline: float) -> tuple[Expected, str]:
    """Return the expected hardware, and the error of reading the site's trial: empty if it was read or not needed."""
    expected = Expected(request.gpus_per_node, request.gpu_model, request.nodes)
    if request.site is None or None not in expected:
        return expected, ""
    values, error = call_until(lambda: read_site(str(request.site)), deadline, f"{request.site}: no answer")
    if error:
        return expected, error
    return expected.or_else(Expected(*values)), ""


def read_site(site: str) -> Expected:
    """Return the hardware that the trial of a site expects. Raises UsageError."""
    config = resolve(site, ()).config
    check, option = (data_files.read("hooks.yaml")["gpu_model"][name] for name in ("check", "option"))
    model = config.checks[check].options.get(option) if check in config.checks else None
    return Expected(config.cluster.gpus_per_node, None if model is None else str(model), config.cluster.nodes)


def _request_drain(request: Request, run_id: str, reason: str, nodes: int | None, deadline: float) -> tuple[bool, str]:
    """Return whether the drain limit allows to take the node out of service, and the answer as text.

    ``nodes``: the number of nodes of the cluster.
    """
    if request.state_dir is None:
        return False, "no --state-dir: a failure is only recorded"
    folder, limit = request.state_dir, DrainLimit(request.drain_share, request.drain_window_s, nodes or 1)

    def ask() -> list[Any]:
        answer = drain_limit.request_drain(
            folder, node_name(), run_id, reason, limit, time.time(), dry_run=request.dry_run
        )
        return [
            answer.granted,
            answer.reason or f"drain limit: granted, {len(answer.drains)} of at most {limit.max_nodes}",
        ]

    output, error = call_until(ask, deadline, f"the directory {folder} does not answer")
    return (False, error) if error else (output[0], output[1])


def _write(request: Request, record: Record, deadline: float) -> str:
    """Append the record and replace the status file; return the errors as text, empty if there are none."""
    error = call_until(lambda: append(request.records, record), deadline, f"{request.records}: no answer")[1]
    if request.status is None:
        return error
    status, text = request.status, f"{EXIT_CODES['npd'][record.result]}\n{record.reason}\n"
    status_error = call_until(
        lambda: atomic_write(status, text.encode(), mode=0o644), deadline, f"{status}: no answer"
    )[1]
    return "; ".join(filter(None, [error, status_error]))


def call_until(call: Callable[[], Any], deadline: float, no_answer: str) -> tuple[Any, str]:
    """Return (result, "") of a call that can hang with a filesystem, or (None, error).

    The result must be a JSON value. ``deadline``: as of time.monotonic; ``no_answer``: the error if the call has not
    returned at the deadline.
    """

    def call_in_child() -> bytes:
        try:
            return json.dumps([call(), ""]).encode()
        except (OSError, ValueError, SeatrialError) as error:
            return json.dumps([None, printable(str(error)) or type(error).__name__]).encode()

    output = children.run_all({"call": call_in_child}, deadline)["call"]
    if output is None:
        return None, no_answer
    if not output:
        return None, "a child process of the hook ended without a result: out of memory, or killed"
    result, error = json.loads(output)
    return result, error
