"""The errors that RDMA ports count: InfiniBand, RoCE and EFA, from /sys/class/infiniband.

Linux Documentation/ABI/stable/sysfs-class-infiniband; which of the counters there tell of errors: data/counters.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from seatrial.discover.reading import line, printable, under
from seatrial.hardware.error_counters import known

_FOLDERS = ("counters", "hw_counters")
Name = tuple[str, ...]  # port, as mlx5_0/1, and counter
NO_PORT = "no RDMA port in /sys/class/infiniband"


class PortCounters:
    """What the ports counted at ``begin`` and at ``end``, with the same fields as a GPU's Counters.

    A counter that cannot be read at first is one that this driver lacks, or this user may not read: a virtual function
    has files that answer "N/A". One that stops answering is a fault.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        folders = sorted(under(root, "/sys/class/infiniband").glob("*/ports/*"))
        self.ports = {f"{folder.parent.parent.name}/{folder.name}": folder for folder in folders}
        self._files: dict[Name, Path] = {
            (port, name): file for port, folder in self.ports.items() for name, file in _files(folder)
        }
        self.before: dict[Name, int] = {}
        self.after: dict[Name, int] = {}
        uncounted = sorted(self.ports.keys() - {port for port, *_ in self._files})
        self.lacks: dict[Name, str] = {(port, "counters"): "none of them is known here" for port in uncounted}
        if not self.ports:
            self.lacks[("ports",)] = NO_PORT
        self.denied: set[Name] = set()
        self.faults: dict[Name, str] = {}

    def begin(self) -> None:
        for name, file in self._files.items():
            try:
                self.before[name] = _number(file)
            except (OSError, ValueError) as error:
                self.lacks[name] = _why(error)
                if isinstance(error, PermissionError):
                    self.denied.add(name)

    def end(self) -> None:
        for name in self.before:
            try:
                self.after[name] = _number(self._files[name])
            except (OSError, ValueError) as error:
                self.faults[name] = _why(error)


def _files(port: Path) -> Iterator[tuple[str, Path]]:
    for counter in known().port:
        yield from ((counter, file) for folder in _FOLDERS if (file := port / folder / counter).exists())


def _number(file: Path) -> int:
    text = line(file)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"it reads {text[:60]!r}") from None


def _why(error: Exception) -> str:
    """Without the path, so that many ports give one reason."""
    return printable((isinstance(error, OSError) and error.strerror) or str(error))
