"""The folder of `seatrial init`: reads a site's settings from Slurm, and writes the folder completely or not at all."""

from __future__ import annotations

import os
import pwd
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from seatrial.discover import slurm
from seatrial.discover.slurm import SlurmRefused, SlurmUnavailable
from seatrial.discover.slurm_facts import Partition, SlurmNode
from seatrial.launch import site_folder
from seatrial.launch.site_folder import Site, SiteValue
from seatrial.model import UsageError
from seatrial.util.files import atomic_folder
from seatrial.util.text import and_more

# Characters that the path of a site's folder must not have: Slurm expands % and \ in names of log files, and lists of
# container mounts and PATH are split at : and ,
_UNUSABLE_CHARACTERS = re.compile("[%\\\\:,\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_MAX_NAMES = 10  # existing files listed in a message


def describe(folder: Path, options: dict[str, str | int | None]) -> Site:
    """Return the site with the values of ``options`` (keys: settings of Site); other settings are read from Slurm.

    Raises UsageError if Slurm does not list the partition, or for a value with characters that are not printable.
    """
    for key, value in options.items():
        if isinstance(value, str) and not value.isprintable():
            raise UsageError(f"--{key} {value!r}: expected one line of printable characters")
    from_options = {
        key: SiteValue(value, f"--{key.replace('_', '-')}") for key, value in options.items() if value is not None
    }
    settings = {"venv": _venv()}
    error = ""
    try:
        settings |= _from_slurm(from_options)
    except (SlurmUnavailable, SlurmRefused, ValueError) as problem:
        error = " ".join(str(problem).split())
        names = ("partition", "account", "nodes", "gpus_per_node", "max_minutes")
        settings |= dict.fromkeys(names, SiteValue(None, "Slurm could not be read"))
    return Site(folder=str(folder), slurm_error=error, **(settings | from_options))


def write(folder: Path, files: dict[str, str]) -> None:
    """Write ``files`` (content by path in ``folder``) to a temporary folder, and rename it to ``folder``.

    Raises UsageError if ``folder`` cannot be used (see ``require_new``) or written, or if another process created it.
    Existing files are not changed.
    """
    require_new(folder)
    try:
        with atomic_folder(folder) as staged:
            for name in site_folder.FOLDERS:
                (staged / name).mkdir()
            for name, text in files.items():
                (staged / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}; nothing was written") from error
    if not all((folder / name).is_file() for name in files):  # atomic_folder keeps a folder that appeared meanwhile
        raise UsageError(f"{folder}: another process created it meanwhile; choose another directory")


def require_new(folder: Path) -> None:
    """Raise UsageError if ``write`` cannot use ``folder``, an absolute path.

    ``folder`` must be absent, or an empty folder that is not the current directory. Its path may contain only
    characters that job scripts can use.
    """
    if character := _UNUSABLE_CHARACTERS.search(str(folder)):
        raise UsageError(
            f"{str(folder)!r} contains {character[0]!r}, which job scripts cannot use: choose another directory"
        )
    try:
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        is_current = folder.exists() and folder.samefile(Path.cwd())
    except OSError as error:  # a file, or a folder that this user may not read
        raise UsageError(f"cannot use {folder}: {error.strerror}; choose another directory") from error
    if names:
        shown = and_more(names, _MAX_NAMES)
        raise UsageError(f"{folder} is not empty ({shown}): nothing was changed; choose another directory")
    if is_current:  # ``write`` replaces the folder, and the shell would stay in the removed one
        raise UsageError(f"{folder} is the current directory: name a new one, such as {folder / 'site'}")


def _venv() -> SiteValue:
    if sys.prefix == sys.base_prefix:
        return SiteValue(None, "seatrial does not run in a virtual environment: name one that all nodes share (--venv)")
    return SiteValue(sys.prefix, "the environment that ran `seatrial init`; all nodes need it under this path")


def _from_slurm(from_options: Mapping[str, SiteValue]) -> dict[str, SiteValue]:
    """Return the values that Slurm has. Raises SlurmUnavailable, SlurmRefused, ValueError or UsageError."""
    partitions, nodes = slurm.partitions(), slurm.nodes()
    partition = from_options.get("partition")
    names = [listed.name for listed in partitions]
    if partition and partition.value not in names:
        raise UsageError(f"--partition {partition.value}: Slurm has {', '.join(names) or 'no partitions'}")
    partition = partition or _partition(partitions, nodes)
    account = from_options.get("account") or _account(partition.value)
    found = {"partition": partition, "account": account}
    if partition.value is None:
        unknown = SiteValue(None, "depends on the partition, which is not known")
        return found | dict.fromkeys(("nodes", "gpus_per_node", "max_minutes"), unknown)
    partition_nodes = [node for node in nodes if partition.value in node.partitions]
    place = f"partition {partition.value}"
    return found | {
        "max_minutes": _max_minutes(next(listed for listed in partitions if listed.name == partition.value)),
        "nodes": SiteValue(len(partition_nodes) or None, f"nodes of {place} in Slurm"),
        "gpus_per_node": _gpus(partition_nodes, place),
    }


def _partition(partitions: Sequence[Partition], nodes: Sequence[SlurmNode]) -> SiteValue:
    """Return Slurm's default partition, else the only one. If some partitions have GPUs, only these are considered."""
    with_gpus = {name for node in nodes if node.gpus for name in node.partitions}
    candidates = [partition for partition in partitions if not with_gpus or partition.name in with_gpus]
    kind = "partition with GPUs" if with_gpus else "partition"
    if default := next((partition for partition in candidates if partition.default), None):
        return SiteValue(default.name, "Slurm's default partition")
    if len(candidates) == 1:
        return SiteValue(candidates[0].name, f"Slurm's only {kind}")
    names = ", ".join(partition.name for partition in candidates)
    return SiteValue(None, f"several are possible ({names})" if names else "Slurm lists no partition")


def _account(partition: object) -> SiteValue:
    """Return the user's account if Slurm has exactly one; else no value, so that jobs use Slurm's default account."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
        names = slurm.accounts(user, slurm.settings().cluster_name, None if partition is None else str(partition))
    except (SlurmUnavailable, SlurmRefused, KeyError) as error:  # many sites have no database of accounts
        problem = " ".join(str(error).split()).partition(". Run first")[0]
        return SiteValue(None, f"jobs use Slurm's default account; yours could not be listed: {problem}")
    if len(names) == 1:
        return SiteValue(names[0], f"the only account of {user} in Slurm")
    note = f"{user} has several in Slurm ({', '.join(names)})" if names else f"Slurm lists none of {user}"
    return SiteValue(None, f"jobs use Slurm's default account; {note}, --account selects one")


def _max_minutes(partition: Partition) -> SiteValue:
    if isinstance(partition.max_time_s, int):
        return SiteValue(max(1, partition.max_time_s // 60), f"MaxTime of partition {partition.name}")
    return SiteValue(None, f"partition {partition.name} has no MaxTime")


def _gpus(nodes: Sequence[SlurmNode], place: str) -> SiteValue:
    counts = sorted({node.gpus for node in nodes})
    if len(counts) > 1:
        return SiteValue(
            None, f"nodes of {place} have different numbers of GPUs in Slurm: {', '.join(map(str, counts))}"
        )
    if not counts or counts[0] == 0:
        return SiteValue(None, f"Slurm lists no GPUs of {place} (Gres of its nodes); 0 asks for a CPU-only run")
    return SiteValue(counts[0], f"Gres of the nodes of {place}")
