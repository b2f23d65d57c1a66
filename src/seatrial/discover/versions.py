"""Installed versions of components with security advisories: driver, container tools, DCGM, NIC firmware, kernel."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from seatrial.discover import fabric, software
from seatrial.discover.file_readers import read_line, read_text
from seatrial.util import processes
from seatrial.util.text import error_text, printable

_TIMEOUT_S = 10.0  # each of these programs prints its version at once
# Component → a command that prints its version, and a pattern whose group is the version
_COMMANDS = {
    "container_toolkit": (("nvidia-ctk", "--version"), r"NVIDIA Container Toolkit CLI version (\S+)"),
    "runc": (("runc", "--version"), r"^runc version (\S+)"),
    "dcgm": (("dcgmi", "--version"), r"^dcgmi\s+version: (\S+)"),
}


class InstalledVersion(NamedTuple):
    """``place``: the device with this version, empty if the component is no device; ``model``: model of the device."""

    version: str
    place: str = ""
    model: str = ""

    def __str__(self) -> str:
        return f"{self.place} {self.model} {self.version}".strip()


InstalledVersions = list[InstalledVersion] | str  # of a component, or the reason why none is known


def read(root: Path = Path("/")) -> dict[str, InstalledVersions]:
    """Component → its versions, from files under ``root`` and from the programs in PATH."""
    return {
        "driver": _versions(lambda: _driver(root)),
        **{name: _versions(partial(_program, *command)) for name, command in _COMMANDS.items()},
        "nic_firmware": _versions(lambda: _firmware(root)),
        "kernel": _versions(lambda: _kernel(root)),
    }


def _versions(read_versions: Callable[[], list[InstalledVersion]]) -> InstalledVersions:
    try:
        return read_versions()
    except (OSError, ValueError) as error:
        return error_text(error)


def _driver(root: Path) -> list[InstalledVersion]:
    return [InstalledVersion(software.driver_version(read_text(root / "proc/driver/nvidia/version")))]


def _program(command: Sequence[str], pattern: str) -> list[InstalledVersion]:
    """The version that a program prints. Raises ValueError if it is missing, fails or prints something else."""
    if not shutil.which(command[0]):
        raise ValueError(f"{command[0]} is not in PATH")
    result = processes.run_command(command, _TIMEOUT_S)
    match = re.search(pattern, result.out, re.MULTILINE)
    if result.code != 0 or not match:
        state = f"no answer within {_TIMEOUT_S:g} s" if result.code is None else f"exit code {result.code}"
        output = printable((result.out or result.err).strip()[:60])
        raise ValueError(f"{' '.join(command)}: {state}, expected a version, read {output!r}")
    return [InstalledVersion(printable(match[1]))]


def _firmware(root: Path) -> list[InstalledVersion]:
    """The firmware version of each RDMA device. Raises ValueError if there is none."""
    devices = fabric.read_rdma(root).devices
    installed = [
        InstalledVersion(device.firmware, device.name, device.model or "") for device in devices if device.firmware
    ]
    if not installed:
        raise ValueError("the firmware of the RDMA devices is not readable" if devices else "no RDMA device")
    return installed


def _kernel(root: Path) -> list[InstalledVersion]:
    """The kernel without flavour: ``6.8.0-137``. Raises ValueError for kernels other than Ubuntu's generic one.

    A distribution fixes vulnerabilities without a new upstream version. The fix shows only in the build number, and
    each distribution has its own build numbers. seatrial knows those of Ubuntu.
    """
    release = read_line(root / "proc/sys/kernel/osrelease")
    match = re.fullmatch(r"(\d+\.\d+\.\d+-\d+)-generic", release)
    if not match or not re.search(r"^ID=ubuntu$", read_text(root / "etc/os-release"), re.MULTILINE):
        raise ValueError(f"kernel {release}: only generic kernels of Ubuntu have a minimum version")
    return [InstalledVersion(match[1])]
