"""Reads the switches and racks of nodes, from a YAML file of seatrial or from Slurm.

Slurm's formats: topology.conf(5), topology.yaml(5) and the output of `scontrol show topology`, with the plugins
topology/tree and topology/block. A block counts as a leaf switch, an aggregated block as a switch above its blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationError

from seatrial.config.strict_yaml import parse_yaml
from seatrial.model import Frozen, Topology, UsageError, first_validation_error
from seatrial.util import hostlist
from seatrial.util.input_files import MAX_CONFIG_BYTES, read_text
from seatrial.util.text import and_more

_MAX_NAMED = 8
# Keys of topology.conf and of `scontrol show topology`, in lower case
_NAME_KEYS = ("switchname", "blockname", "aggregatedblock")
_IGNORED_KEYS = {"level", "linkspeed", "blockindex", "blocksize", "blocksizes"}


@dataclass(frozen=True)
class _Switch:
    """A switch with the nodes and switches below it; ``nodes`` may include the nodes of the switches below it."""

    name: str
    nodes: tuple[str, ...] = ()
    children: tuple[str, ...] = ()


def _expand(text: object) -> tuple[str, ...]:
    if not isinstance(text, str):
        raise ValueError("expected a list of hosts as text, such as n[1-4,7]")
    return tuple(hostlist.expand(text)) if text else ()


_Hosts = Annotated[tuple[str, ...], BeforeValidator(_expand)]


class _SwitchEntry(Frozen):
    """The value of a switch in a YAML file. Each field is a hostlist.

    With ``rails`` the entry stands for several leaf switches, one per rail: their names in the order of the GPUs.
    """

    nodes: _Hosts = ()
    switches: _Hosts = ()
    rails: _Hosts = ()


class _File(Frozen):
    """A YAML file of racks and switches. ``racks``: name → nodes, as one of Slurm's hostlists."""

    switches: dict[str, _SwitchEntry] = {}
    racks: dict[str, _Hosts] = {}


def read_file(path: str) -> Topology:
    """Return the topology in a file: YAML if its suffix is .yaml or .yml, else topology.conf.

    Raises UsageError if the file cannot be read or is invalid.
    """
    try:
        text = read_text(Path(path), MAX_CONFIG_BYTES)
        return _parse_yaml(text, path) if path.endswith((".yaml", ".yml")) else parse_conf(text, path)
    except OSError as error:
        raise UsageError(f"cannot read the topology {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"topology {path}: {error}") from error


def parse_conf(text: str, source: str) -> Topology:
    """Return the topology in ``topology.conf`` or in the output of ``scontrol show topology``. Raises ValueError."""
    switches = []
    lines = text.replace("\\\n", " ").splitlines()
    for number, line in enumerate(lines, 1):
        fields = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        pairs = {key.lower(): value for key, _, value in (field.partition("=") for field in fields)}
        name_key = next((key for key in pairs if key in _NAME_KEYS), "")
        unknown = [key for key in pairs if key not in {*_IGNORED_KEYS, "nodes", "switches", name_key}]
        if unknown or (pairs and not name_key and not pairs.keys() <= _IGNORED_KEYS):
            expected = "SwitchName= with Nodes= or Switches=, or BlockName= with Nodes="
            raise ValueError(f"line {number}: {line.strip()[:80]!r}: expected {expected}")
        if name_key:
            # an aggregated block is named after its blocks, which are below it
            children = pairs[name_key] if name_key == "aggregatedblock" else pairs.get("switches", "")
            switches.append(_Switch(pairs[name_key], _expand(pairs.get("nodes", "")), _expand(children)))
    return _topology(switches, source)


def _parse_yaml(text: str, source: str) -> Topology:
    document = parse_yaml(text, source)
    if isinstance(document, list):
        return _topology(_slurm_switches(document), source)
    try:
        file = _File.model_validate(document)
    except ValidationError as error:
        raise ValueError(first_validation_error(error)) from error
    switches = [_Switch(name, entry.nodes, entry.switches) for name, entry in file.switches.items()]
    rails = {name: entry.rails for name, entry in file.switches.items() if entry.rails}
    return _topology(switches, source, file.racks, rails)


def _slurm_switches(topologies: list[Any]) -> Iterable[_Switch]:
    """Return the switches of the default topology in topology.yaml, else of its first one with a tree or blocks."""
    supported = [each for each in topologies if isinstance(each, Mapping) and ("tree" in each or "block" in each)]
    if not supported:
        raise ValueError("no topology with the key tree or block")
    selected = next((each for each in supported if each.get("cluster_default") is True), supported[0])
    if "tree" in selected:
        plugin, list_key, name_key = selected["tree"], "switches", "switch"
    else:
        plugin, list_key, name_key = selected["block"], "blocks", "block"
    entries = plugin.get(list_key) if isinstance(plugin, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and entry.get(name_key) for entry in entries):
        raise ValueError(f"topology {selected.get('topology')}: expected a list of entries with the key {name_key}")
    hosts = {key: [_expand(str(entry.get(key) or "")) for entry in entries] for key in ("nodes", "children")}
    names = [str(entry[name_key]) for entry in entries]
    return list(map(_Switch, names, hosts["nodes"], hosts["children"]))


def _topology(
    switches: Iterable[_Switch],
    source: str,
    racks: Mapping[str, Iterable[str]] | None = None,
    rails: Mapping[str, tuple[str, ...]] | None = None,
) -> Topology:
    """Return the topology of ``switches``.

    Raises ValueError for a node on two leaf switches, in two racks, or in a rack but on no switch.
    """
    switches = list(switches)
    ancestors = _ancestors(switches)
    leaf_by_node: dict[str, str] = {}
    for switch in switches:
        lower_switches = [other for other in switches if switch.name in ancestors[other.name]]
        below = {node for lower in lower_switches for node in lower.nodes}
        for node in switch.nodes:
            if node in below:  # scontrol lists all nodes below a switch
                continue
            if node in leaf_by_node:
                hint = "expected one; the key rails of a switch lists one switch per rail"
                raise ValueError(f"node {node} is on two leaf switches, {leaf_by_node[node]} and {switch.name}: {hint}")
            leaf_by_node[node] = switch.name
    rack_by_node: dict[str, str] = {}
    for rack, nodes in (racks or {}).items():
        for node in nodes:
            if node in rack_by_node:
                raise ValueError(f"node {node} is in two racks, {rack_by_node[node]} and {rack}")
            rack_by_node[node] = rack
    if unconnected := [node for node in rack_by_node if leaf_by_node and node not in leaf_by_node]:
        raise ValueError(f"no switch for {and_more(unconnected, _MAX_NAMED)}, which a rack contains")
    if not leaf_by_node and not rack_by_node:
        raise ValueError("no node: expected switches with nodes, or racks")
    paths = {node: (leaf, *ancestors[leaf]) for node, leaf in leaf_by_node.items()}
    return Topology(source=source, switches=paths, racks=rack_by_node, rails=dict(rails or {}))


def _ancestors(switches: Sequence[_Switch]) -> dict[str, tuple[str, ...]]:
    """Return switch → the switches above it, nearest first. Raises ValueError for duplicates, unknown names, cycles."""
    parents: dict[str, list[str]] = {}
    for switch in switches:
        if switch.name in parents:
            raise ValueError(f"two switches are named {switch.name}")
        parents[switch.name] = []
    for switch in switches:
        for child in switch.children:
            if child not in parents:
                raise ValueError(f"switch {switch.name} is above {child}, which is no switch of this topology")
            parents[child].append(switch.name)
    return {switch.name: _above(switch.name, parents) for switch in switches}


def _above(name: str, parents: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the switches above ``name``, nearest first. Raises ValueError for a cycle."""
    above: dict[str, None] = {}
    level = [name]
    while level:
        next_level = [parent for child in level for parent in parents[child]]
        level = [switch for switch in next_level if switch not in above]
        if name in level:
            raise ValueError(f"the switches form a cycle: {' → '.join([name, *above, name])}")
        above |= dict.fromkeys(level)
    return tuple(above)
