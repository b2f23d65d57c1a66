"""The nodes that a trial selects: ``slurm.nodelist`` and ``slurm.exclude`` (--nodelist, --exclude)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seatrial.config.schema import Config
from seatrial.config.slurm_options import setting_of_option
from seatrial.model import UsageError
from seatrial.util import hostlist
from seatrial.util.text import and_more

_MAX_NAMED = 8


def node_count(tree: dict[str, Any]) -> int | None:
    """Return the number of nodes in ``slurm.nodelist`` of an unvalidated trial; None without a valid list."""
    slurm = tree.get("slurm")
    nodelist = slurm.get("nodelist") if isinstance(slurm, dict) else None
    try:
        return len(hostlist.expand(nodelist)) if isinstance(nodelist, str) else None
    except ValueError:
        return None  # ``validate`` reports it


def validate(config: Config, origin: Callable[[list[str]], str]) -> None:
    """Raise UsageError if nodes are selected without Slurm, by an invalid list, or in conflict with ``cluster.nodes``.

    Also for an option in ``slurm.extra`` that has a setting: checks would not know which nodes it selects. ``origin``
    returns the flag or file that set a key.
    """
    for option in config.slurm.extra:
        if setting := setting_of_option(option):
            source = origin(["slurm", "extra"])
            raise UsageError(f"{source}: slurm.extra has {option}: set slurm.{setting}, which checks use too")
    lists = {}
    for key in ("nodelist", "exclude"):
        if (text := getattr(config.slurm, key)) is None:
            continue
        source = origin(["slurm", key])
        if not config.uses_slurm:
            raise UsageError(
                f"{source}: slurm.{key} is {text}, but launcher {config.launcher} does not choose nodes: use "
                "--launcher slurm, or run the command on the nodes themselves"
            )
        try:
            lists[key] = hostlist.expand(text)
        except ValueError as error:
            raise UsageError(f"{source}: slurm.{key}: {error}") from error
    nodes, excluded, expected = lists.get("nodelist"), lists.get("exclude", []), config.cluster.nodes
    if nodes and len(nodes) != expected:
        raise UsageError(
            f"{origin(['slurm', 'nodelist'])}: slurm.nodelist has {len(nodes)} nodes ({and_more(nodes, _MAX_NAMED)}), "
            f"cluster.nodes of {origin(['cluster', 'nodes'])} is {expected}: expected the same number; without --nodes "
            "the trial uses all nodes of the list"
        )
    if both := [node for node in nodes or () if node in excluded]:
        source = origin(["slurm", "exclude"])
        raise UsageError(f"{source}: slurm.exclude and slurm.nodelist both name {and_more(both, _MAX_NAMED)}")
