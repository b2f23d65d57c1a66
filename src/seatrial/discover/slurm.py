"""Facts of a Slurm cluster, read with its own commands.

All of them are read as text. ``scontrol show`` prints the same keys in every version, while ``--json`` came with 21.08
(sinfo) and 23.02 (scontrol), needs plugins that some sites do not install, and has another layout in each version.
Nothing here needs slurmdbd. Every call costs the controller one request: poll gently (sinfo(1), PERFORMANCE).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence

from seatrial.discover import slurm_output
from seatrial.discover.slurm_facts import UNKNOWN, Allocation, Job, Node, Partition, Ping, Settings
from seatrial.discover.slurm_messages import first_match, messages
from seatrial.model import SeatrialError, UsageError
from seatrial.util import processes
from seatrial.util.processes import CommandResult

# A client gives up by itself: on the controller after some MessageTimeouts (10 s each by default), on a missing
# slurm.conf after a minute.
COMMAND_TIMEOUT_S = 90.0


class SlurmUnavailable(SeatrialError):
    """Slurm could not be asked. The message says why, and what to run first."""


class ControllerDown(SlurmUnavailable):
    """The controller itself does not answer; this machine's side is in order, as far as can be seen."""


class SlurmRefused(SeatrialError):
    """Slurm was asked, and said no: an unknown partition, more than there is. The message says what to run first."""


def installed() -> bool:
    """Whether this machine has Slurm's client commands."""
    return shutil.which("sinfo") is not None


def ping() -> tuple[Ping, ...]:
    """Which controllers there are and whether they answer. Raises SlurmUnavailable when they could not be asked."""
    argv = ["scontrol", "ping"]
    answer = run_command(argv, COMMAND_TIMEOUT_S)
    found = slurm_output.parse_pings(answer.out)
    # Exit code 1 says that one is DOWN. Complaints beside it say that the client could not even ask.
    if not found or first_match(messages().unreachable, answer.err):
        raise command_error(argv, answer)
    return found


def settings() -> Settings:
    """The settings in force. Raises SlurmUnavailable."""
    return slurm_output.parse_settings(command_output(["scontrol", "show", "config"]))


def nodes() -> tuple[Node, ...]:
    """All nodes but those that are planned for the future. Raises SlurmUnavailable, or ValueError on other output."""
    found = slurm_output.parse_nodes(command_output(["scontrol", "--all", "--details", "show", "nodes"]))
    return tuple(node for node in found if node.state != "FUTURE")


def node(name: str) -> Node | None:
    """One node; None where Slurm has none of that name. Raises SlurmUnavailable, or ValueError on other output."""
    argv = ["scontrol", "show", "node", name]
    answer = run_command(argv, COMMAND_TIMEOUT_S)
    if re.search(rf"Node {re.escape(name)} not found", answer.out + answer.err):
        return None
    if answer.code != 0:
        raise command_error(argv, answer)
    return next((one for one in slurm_output.parse_nodes(answer.out) if one.name == name), None)


def hostnames(nodes: str) -> list[str]:
    """The nodes of a list expression: ``node[0-1]`` → node0, node1. Raises SlurmUnavailable."""
    return command_output(["scontrol", "show", "hostnames", nodes]).split()


def allocations(job_id: str | int) -> dict[str, Allocation]:
    """The resources of a running job on each of its nodes. Raises SlurmUnavailable."""
    found = slurm_output.parse_allocations(command_output(["scontrol", "--details", "show", "job", str(job_id)]))
    return {name: allocation for allocation in found for name in hostnames(allocation.nodes)}


def gpus_per_node(partition: str | None) -> int:
    """GPUs that Slurm offers on each node of a partition (of all nodes without one). Raises SlurmUnavailable.

    Raises UsageError where nodes differ: then only a person can say what was promised.
    """
    counts = {node.gpus for node in nodes() if partition is None or partition in node.partitions}
    if len(counts) > 1:
        raise UsageError(f"nodes offer different numbers of GPUs ({sorted(counts)}): say how many with --gpus-per-node")
    return counts.pop() if counts else 0


def partitions() -> tuple[Partition, ...]:
    """All partitions. Raises SlurmUnavailable, or ValueError on other output."""
    return slurm_output.parse_partitions(command_output(["scontrol", "--all", "show", "partitions"]))


def job(job_id: str | int) -> Job:
    """The state of a job. It is UNKNOWN when Slurm has forgotten the job, or never knew it.

    The controller forgets jobs ``MinJobAge`` seconds after their end; then only accounting knows, where there is any.
    Raises SlurmUnavailable, or ValueError on output of another form.
    """
    try:
        known = slurm_output.parse_jobs(command_output(["scontrol", "show", "job", str(job_id)]))
    except SlurmRefused as refusal:
        if "Invalid job id" not in str(refusal):
            raise
        known = ()
    return known[0] if known else _from_accounting(str(job_id))


def _from_accounting(job_id: str) -> Job:
    configured = settings()
    if not configured.accounting_enabled:
        why = f"Slurm forgets jobs {configured.min_job_age_s} s after their end (MinJobAge), and has no accounting"
        return Job(id=job_id, state=UNKNOWN, reason=why)
    fields = ",".join(slurm_output.SACCT_FIELDS)
    argv = ["sacct", "--jobs", job_id, "--allocations", "--noheader", "--parsable2", "--format", fields]
    known = slurm_output.parse_sacct(command_output(argv))
    return known[0] if known else Job(id=job_id, state=UNKNOWN, reason="neither the controller nor sacct knows it")


def queued_job_scripts() -> dict[str, str]:
    """The script of each of our own jobs in the queue, with its arguments, by the job's id. Raises SlurmUnavailable."""
    argv = ["squeue", "--all", "--noheader", f"--user={os.getuid()}", "--format=%A %o"]
    rows = [line.strip().partition(" ") for line in command_output(argv).splitlines()]
    return {job_id: command for job_id, _, command in rows if job_id}


def env_prefix_outside_job() -> list[str]:
    """Words before a command, for env(1): they hide a job that we may be in ourselves, whose settings it would take."""
    names = [name for name in os.environ if name.startswith("SLURM_") and "CONF" not in name]
    return ["env", *(f"--unset={name}" for name in names)] if "SLURM_JOB_ID" in os.environ else []


def command_output(argv: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """What one of Slurm's commands printed. Raises SlurmUnavailable or SlurmRefused when it failed."""
    answer = run_command(argv, timeout_s)
    if answer.code != 0:
        raise command_error(argv, answer)
    return answer.out


def run_command(argv: Sequence[str], timeout_s: float) -> CommandResult:
    """Run one of Slurm's commands, whatever its exit code. Raises SlurmUnavailable where it does not start or end."""
    try:
        answer = processes.run_command(argv, timeout_s)
    except OSError as failure:
        first = "command -v sinfo; apt-get install slurm-client, or: module load slurm"
        raise SlurmUnavailable(f"{argv[0]}: {failure.strerror}. Run first: {first}") from None
    if answer.code is None:
        first = "scontrol ping; munge -n | unmunge"
        raise SlurmUnavailable(f"no answer from {shlex.join(argv)} within {timeout_s:g} s. Run first: {first}")
    return answer


def command_error(argv: Sequence[str], answer: CommandResult) -> SeatrialError:
    """What a command's failure means: SlurmUnavailable or SlurmRefused, with what was said and what to run first."""
    lines = [line.strip() for line in (answer.err.strip() or answer.out).splitlines() if line.strip()]
    said = "; ".join(dict.fromkeys(lines)) or f"exit code {answer.code}, and no word"
    if message := first_match(messages().unreachable, answer.err):
        kind = ControllerDown if message.controller else SlurmUnavailable
        return kind(f"{message.meaning} ({said}). Run first: {message.first_command}")
    if message := first_match(messages().refused, said):
        return SlurmRefused(f"{message.meaning} ({said}). Run first: {message.first_command}")
    return SlurmRefused(f"Slurm refuses ({said}). Run first: {shlex.join(argv)}")
