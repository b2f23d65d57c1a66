"""The kind of a mounted filesystem and its client settings, from mount options and files; runs no command."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from seatrial.discover.file_readers import path_under, read_or_none, read_text
from seatrial.discover.filesystem import MountEntry
from seatrial.util import data_files
from seatrial.util.text import error_text, printable

# The client configuration of BeeGFS: the values in use, one folder per mounted filesystem. On some systems only root
# may read it.
_BEEGFS_CONFIGS = "proc/fs/beegfs/*/config"
_BEEGFS_FILE = "cfgFile="
_VAST_DRIVER = "sys/module/sunrpc/parameters/nfs_bundle_version"  # exists only with VAST's NFS driver


class FilesystemSetting(NamedTuple):
    """A client setting. ``effect``: what the setting does. ``source``: the documentation of the setting.

    ``advice``: what to set instead, if the value slows training down or breaks it; otherwise empty.
    """

    name: str
    value: str
    effect: str
    advice: str
    source: str


class FilesystemKind(NamedTuple):
    """The kind of a mounted filesystem. ``name``: such as ``Lustre``. ``evidence``: how the kind was recognized.

    ``network``: whether it is a network filesystem, None for an unknown type.
    ``quota_tool``: the argument ``tool`` of filesystem_quota.read_quota, empty if there is no such tool.
    ``unreadable``: file, or ``client configuration`` → why its settings could not be read.
    """

    name: str
    network: bool | None
    evidence: str
    quota_tool: str = ""
    settings: tuple[FilesystemSetting, ...] = ()
    unreadable: Mapping[str, str] = {}


def identify(entry: MountEntry, root: Path) -> FilesystemKind:
    """The kind of the filesystem that this host mounts with ``entry``; /proc and /sys are under ``root``."""
    options = entry.options.split(",")
    for name, row in table()["filesystems"].items():
        if entry.type not in row["types"]:
            continue
        evidence = f"type {entry.type}"
        if pattern := row.get("options"):
            matching_options = [option for option in options if re.fullmatch(pattern, option)]
            if not matching_options:
                continue
            evidence += f", options {' '.join(map(printable, matching_options))}"
        # The table has the rows with options, such as VAST's, before NFS: none of them matched
        elif entry.type.startswith("nfs") and (driver := _vast_driver(root)):
            evidence += f"; this host has VAST's NFS driver {driver}, but the mount has none of its options"
        unreadable: dict[str, str] = {}
        if name == "BeeGFS":
            options += _beegfs_options(options, root, unreadable)
        settings = tuple(_settings([*row.get("settings", ()), *table()["common"]], options))
        return FilesystemKind(name, row["network"], evidence, row.get("quota", ""), settings, unreadable)
    return FilesystemKind(f"unknown type {printable(entry.type)}", None, f"type {printable(entry.type)}")


@cache
def table() -> Any:
    return data_files.read("filesystems.yaml")


def _settings(rows: list[Mapping[str, str]], options: list[str]) -> Iterator[FilesystemSetting]:
    """The settings in ``rows`` (of data/filesystems.yaml) with their values in ``options``.

    A setting that is not in ``options`` has the value ``absent`` of its row; it is omitted if the row has none.
    """
    for row in rows:
        values = [match[1] for option in options if (match := re.fullmatch(row["match"], option))]
        if not values and "absent" in row:
            values = [row["absent"]]
        for value in dict.fromkeys(values):
            is_unwise = "unwise" in row and re.fullmatch(row["unwise"], value)
            advice = row["advice"] if is_unwise else ""
            yield FilesystemSetting(row["name"], printable(value), row["effect"], advice, row["source"])


def _vast_driver(root: Path) -> str:
    """The version of VAST's NFS driver; empty without it."""
    return printable((read_or_none(lambda: read_text(root / _VAST_DRIVER)) or "").strip())


def _beegfs_options(options: list[str], root: Path, unreadable: dict[str, str]) -> list[str]:
    """The client's configuration as NAME=VALUE: the values in use, else those of the file that the mount names.

    With several mounted BeeGFS filesystems only the file that the mount names is read, since the folders in /proc do
    not show to which mount they belong.
    If no configuration can be read, the errors are added to ``unreadable``.
    """
    active_configs = sorted(root.glob(_BEEGFS_CONFIGS))
    files = list(active_configs) if len(active_configs) == 1 else []
    files += [path_under(root, option.removeprefix(_BEEGFS_FILE)) for option in options if _BEEGFS_FILE in option]
    for path in files:
        try:
            lines = read_text(path).splitlines()
        except OSError as error:
            unreadable[f"/{path.relative_to(root)}"] = error_text(error)
            continue
        unreadable.clear()  # the error of an earlier file does not matter now
        pairs = (line.partition("=") for line in lines if not line.lstrip().startswith("#"))
        return [f"{name.strip()}={value.strip()}" for name, equals, value in pairs if equals]
    if not files:
        unreadable["client configuration"] = "no /proc/fs/beegfs/*/config, and the mount names no cfgFile"
    return []
