"""Facts of a Slurm cluster from the output of its commands.

Parses text output, since ``scontrol show`` has the same keys in all versions. The option ``--json`` needs plugins that
some sites do not install, and has a different layout in each version.
Only ``accounts`` needs Slurm's database (slurmdbd). Most functions query the controller: call them at most once a
second (sinfo(1), PERFORMANCE).
A function that runs a command raises SlurmUnavailable or SlurmRefused if the command fails.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
from collections.abc import Sequence

from seatrial.config.topology import parse_conf
from seatrial.discover import slurm_output
from seatrial.discover.slurm_facts import UNKNOWN, AllocatedResources, JobRecord, Partition, Ping, Settings, SlurmNode
from seatrial.discover.slurm_messages import first_match, messages
from seatrial.model import SeatrialError, Topology, UsageError
from seatrial.util import processes
from seatrial.util.processes import CommandResult

# Slurm's clients give up earlier. If the controller does not respond, they give up after a few times MessageTimeout
# (10 s by default); if they find no slurm.conf, after a minute.
COMMAND_TIMEOUT_S = 90.0
SLURMD_RUNS = "slurmd runs"  # end of the text from ``slurmd_answer`` if slurmd accepts connections
_SLURMD_TIMEOUT_S = 3.0  # Linux repeats a lost SYN after 1 s
_CONFIGURATION_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JOB_ID")
# The default paths of packages and of the source, and the copies that a configless slurmd makes. A client that was
# built with another --sysconfdir does not find these files although they exist.
_CONFIGURATION_FILES = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/usr/local/etc/slurm.conf",
    "/opt/slurm/etc/slurm.conf",
    "/run/slurm/conf",
    "/var/spool/slurmd/conf-cache",
)
_DAEMONS = {"slurmd", "slurmctld", "sackd"}
# Errors which show that DNS has no record of a controller (hstrerror of HOST_NOT_FOUND and NO_DATA). After other errors
# it is unknown whether there is a record.
_NO_SRV_RECORD = {"Unknown host", "No address associated with name"}


class SlurmUnavailable(SeatrialError):
    """Slurm's client cannot work on this machine; the message has the reason and the first command to run."""


class NotConfigured(SlurmUnavailable, UsageError):
    """This machine belongs to no Slurm cluster: it has Slurm's client, but no configuration and no daemon of Slurm."""


class ControllerDown(SlurmUnavailable):
    """The controller does not respond; the client on this machine works."""


class SlurmRefused(SeatrialError):
    """Slurm refused a request, such as an unknown partition; the message has the first command to run."""


class TemporarilyRefused(SlurmRefused):
    """Slurm refused a request that it may accept a little later, such as a job above a submit limit."""


def installed() -> bool:
    return shutil.which("sinfo") is not None


def ping() -> tuple[Ping, ...]:
    argv = ["scontrol", "ping"]
    result = run_command(argv, COMMAND_TIMEOUT_S)
    pings = slurm_output.parse_pings(result.out)
    # Exit code 1 without an error on stderr means that a controller is DOWN. With an error on stderr, the client could
    # not send the request.
    if not pings or first_match(messages().unreachable, result.err):
        raise command_error(argv, result)
    return pings


def settings() -> Settings:
    return slurm_output.parse_settings(command_output(["scontrol", "show", "config"]))


def nodes() -> tuple[SlurmNode, ...]:
    """All nodes except those in state FUTURE. Raises ValueError on unexpected output."""
    every_node = slurm_output.parse_nodes(command_output(["scontrol", "--all", "show", "nodes"]))
    return tuple(node for node in every_node if node.state != "FUTURE")


def node(name: str) -> SlurmNode | None:
    """One node; None if Slurm has no node of that name. Raises ValueError on unexpected output."""
    argv = ["scontrol", "show", "node", name]
    result = run_command(argv, COMMAND_TIMEOUT_S)
    if re.search(rf"Node {re.escape(name)} not found", result.out + result.err):
        return None
    if result.code != 0:
        raise command_error(argv, result)
    return next((node for node in slurm_output.parse_nodes(result.out) if node.name == name), None)


def slurmd_answer(name: str) -> str:
    """Whether the slurmd of a node accepts a TCP connection from this machine, as a text without a full stop.

    A slurmd that accepts connections, but does not respond to its controller, cannot authenticate the controller's
    messages.
    """
    if (found := node(name)) is None:
        raise SlurmRefused(f"Slurm has no node {name}. Run first: sinfo --Node")
    port = found.port or settings().slurmd_port
    if port is None:
        raise SlurmUnavailable("scontrol show config lists no SlurmdPort. Run first: scontrol show config")
    place = f"port {port} of {name}"
    try:
        socket.create_connection((found.address or name, port), timeout=_SLURMD_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return f"{place} refuses connections: slurmd does not run"
    except TimeoutError:
        return f"{place} does not answer within {_SLURMD_TIMEOUT_S:g} s"
    except OSError as error:
        return f"no connection to {place}: {error.strerror or error}"
    return f"{place} accepts connections: {SLURMD_RUNS}"


def hostnames(hostlist: str) -> list[str]:
    """The nodes of a hostlist: ``node[0-1]`` → node0, node1."""
    return command_output(["scontrol", "show", "hostnames", hostlist]).split()


def allocations(job_id: str | int) -> dict[str, AllocatedResources]:
    """The resources of a running job, by node name. Raises ValueError on unexpected output."""
    output = command_output(["scontrol", "--details", "show", "job", str(job_id)])
    parsed = slurm_output.parse_allocations(output)
    return {name: allocation for allocation in parsed for name in hostnames(allocation.nodes)}


def partitions() -> tuple[Partition, ...]:
    """All partitions. Raises ValueError on unexpected output."""
    return slurm_output.parse_partitions(command_output(["scontrol", "--all", "show", "partitions"]))


def topology() -> Topology | None:
    """The switches or blocks of Slurm's nodes; None without Slurm or switches, or if the switches form no tree.

    Also None if the command fails: the topology only helps to choose pairs of nodes, and no run depends on it.
    """
    argv = ["scontrol", "show", "topology"]
    try:
        output = run_command(argv, COMMAND_TIMEOUT_S).out if installed() else ""
        return parse_conf(output, shlex.join(argv)).model_copy(update={"is_file": False})
    except (SeatrialError, ValueError):
        return None


def partition_of_jobs(name: str | None) -> Partition | None:
    """The partition ``name``, or without a name the default partition; None if there is no such partition.

    Raises ValueError on unexpected output.
    """
    for partition in partitions():
        is_selected = partition.name == name if name else partition.default
        if is_selected:
            return partition
    return None


def submit(argv: Sequence[str]) -> str:
    """The id of the job that ``sbatch --parsable`` submits."""
    output = command_output(argv)
    job_ids = re.findall(r"^(\d+)(?:;\S+)?$", output, re.MULTILINE)  # 7 or 7;cluster; skips a wrapper's output
    if not job_ids:
        error = f"could not parse a job id from sbatch's output: {output[:200]!r}"
        raise SeatrialError(f"{error}. Run first: type -a sbatch; squeue --me")
    return str(job_ids[-1])


def queued_jobs(name: str) -> list[str]:
    """The ids of the pending and running jobs with this job name."""
    return command_output(["squeue", "--all", "--noheader", f"--name={name}", "--format=%A"]).split()


def accounts(user: str, cluster: str | None, partition: str | None) -> tuple[str, ...]:
    """The accounts in which ``user`` may submit to ``partition`` (None: to any partition), sorted.

    Raises SlurmRefused if Slurm has no database of accounts, or for unexpected output.
    """
    filters = [f"user={user}", *([f"cluster={cluster}"] if cluster else [])]
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "associations", *filters, "format=Account,Partition"]
    rows = [line.strip().split("|") for line in command_output(argv).splitlines() if line.strip()]
    if any(len(row) != 2 for row in rows):
        raise SlurmRefused(f"unexpected output of sacctmgr: {rows[0]}. Run first: {shlex.join(argv)}")
    # An association without a partition is valid in all partitions
    valid_accounts = {
        account
        for account, only_partition in rows
        if account and (not only_partition or partition in (None, only_partition))
    }
    return tuple(sorted(valid_accounts))


def job(job_id: str | int) -> JobRecord:
    """Slurm's record of a job; its state is UNKNOWN if Slurm has no record.

    The controller drops jobs ``MinJobAge`` seconds after their end; after that only accounting has them, if enabled.
    Raises ValueError on unexpected output.
    """
    try:
        jobs = slurm_output.parse_jobs(command_output(["scontrol", "show", "job", str(job_id)]))
    except SlurmRefused as error:
        if "Invalid job id" not in str(error):
            raise
        jobs = ()
    return jobs[0] if jobs else _job_from_accounting(str(job_id))


def _job_from_accounting(job_id: str) -> JobRecord:
    slurm_settings = settings()
    if not slurm_settings.accounting_enabled:
        reason = (
            f"Slurm drops jobs {slurm_settings.min_job_age_s} s after their end (MinJobAge), and accounting is disabled"
        )
        return JobRecord(id=job_id, state=UNKNOWN, reason=reason)
    fields = ",".join(slurm_output.SACCT_FIELDS)
    argv = ["sacct", "--jobs", job_id, "--allocations", "--noheader", "--parsable2", "--format", fields]
    jobs = slurm_output.parse_sacct(command_output(argv))
    return jobs[0] if jobs else JobRecord(id=job_id, state=UNKNOWN, reason="no record in the controller or in sacct")


def queued_job_scripts() -> dict[str, str]:
    """The batch script and arguments of each pending or running job of the user, by job id."""
    argv = ["squeue", "--all", "--noheader", f"--user={os.getuid()}", "--format=%A %o"]
    rows = [line.strip().partition(" ") for line in command_output(argv).splitlines()]
    return {job_id: command for job_id, _, command in rows if job_id}


def env_prefix_outside_job() -> list[str]:
    """An env(1) prefix that unsets the SLURM_* variables of the job in which seatrial runs; empty outside of a job."""
    names = [name for name in os.environ if name.startswith("SLURM_") and "CONF" not in name]  # keeps SLURM_CONF
    return ["env", *(f"--unset={name}" for name in names)] if "SLURM_JOB_ID" in os.environ else []


def command_output(argv: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    result = run_command(argv, timeout_s)
    if result.code != 0:
        raise command_error(argv, result)
    return result.out


def run_command(argv: Sequence[str], timeout_s: float) -> CommandResult:
    """Run a Slurm command; its exit code is not checked. Raises SlurmUnavailable if it does not start or times out."""
    try:
        result = processes.run_command(argv, timeout_s)
    except OSError as error:
        first_command = "command -v sinfo; apt-get install slurm-client, or: module load slurm"
        raise SlurmUnavailable(f"{argv[0]}: {error.strerror}. Run first: {first_command}") from None
    if result.code is None:
        first_command = "scontrol ping; munge -n | unmunge"
        raise SlurmUnavailable(f"{shlex.join(argv)} timed out after {timeout_s:g} s. Run first: {first_command}")
    return result


def command_error(argv: Sequence[str], result: CommandResult) -> SeatrialError:
    """The error for a failed command, with its meaning, its output and the first command to run."""
    lines = [line.strip() for line in (result.err.strip() or result.out).splitlines() if line.strip()]
    output = "; ".join(dict.fromkeys(lines)) or f"exit code {result.code}, no output"
    if message := first_match(messages().unreachable, result.err):
        error_type = ControllerDown if message.controller else SlurmUnavailable
        if _is_not_configured(result.err):
            error_type = NotConfigured
        return error_type(f"{message.meaning} ({output}). Run first: {message.first_command}")
    if message := first_match(messages().refused, output):
        refusal = TemporarilyRefused if message.transient else SlurmRefused
        return refusal(f"{message.meaning} ({output}). Run first: {message.first_command}")
    return SlurmRefused(f"Slurm refused the request ({output}). Run first: {shlex.join(argv)}")


def _is_not_configured(stderr: str) -> bool:
    """Whether the client searched all sources of a configuration, and nothing else on this machine belongs to Slurm."""
    import psutil  # takes 6 ms

    dns_errors = re.findall(r"res_nsearch error: ([^\n]+)", stderr)
    return (
        "Could not establish a configuration source" in stderr
        and bool(dns_errors)
        and _NO_SRV_RECORD.issuperset(map(str.strip, dns_errors))
        and not any(name in os.environ for name in _CONFIGURATION_VARIABLES)
        and not any(map(os.path.lexists, _CONFIGURATION_FILES))
        and _DAEMONS.isdisjoint(process.info["name"] for process in psutil.process_iter(["name"]))
    )
