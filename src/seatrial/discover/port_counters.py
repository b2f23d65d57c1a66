"""The errors that RDMA ports count: InfiniBand, RoCE and EFA, from /sys/class/infiniband.

Linux Documentation/ABI/stable/sysfs-class-infiniband; which of the counters there tell of errors: data/counters.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from seatrial.discover.file_readers import path_under, printable, read_line
from seatrial.hardware.error_counters import counter_definitions

_FOLDERS = ("counters", "hw_counters")
CounterKey = tuple[str, ...]  # port, as mlx5_0/1, and counter
NO_RDMA_PORT = "no RDMA port in /sys/class/infiniband"


class PortErrorCounters:
    """What the ports counted at ``begin`` and at ``end``, with the same fields as a GPU's Counters.

    A counter that cannot be read at first is one that this driver lacks, or this user may not read: a virtual function
    has files that answer "N/A". One that stops answering is a fault.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        folders = sorted(path_under(root, "/sys/class/infiniband").glob("*/ports/*"))
        self.ports = {f"{folder.parent.parent.name}/{folder.name}": folder for folder in folders}
        self._files: dict[CounterKey, Path] = {
            (port, name): file for port, folder in self.ports.items() for name, file in _files(folder)
        }
        self.before: dict[CounterKey, int] = {}
        self.after: dict[CounterKey, int] = {}
        uncounted = sorted(self.ports.keys() - {port for port, *_ in self._files})
        self.unavailable: dict[CounterKey, str] = {
            (port, "counters"): "none of them is known here" for port in uncounted
        }
        if not self.ports:
            self.unavailable[("ports",)] = NO_RDMA_PORT
        self.permission_denied: set[CounterKey] = set()
        self.read_errors: dict[CounterKey, str] = {}

    def begin(self) -> None:
        for name, file in self._files.items():
            try:
                self.before[name] = _number(file)
            except (OSError, ValueError) as error:
                self.unavailable[name] = _why(error)
                if isinstance(error, PermissionError):
                    self.permission_denied.add(name)

    def end(self) -> None:
        for name in self.before:
            try:
                self.after[name] = _number(self._files[name])
            except (OSError, ValueError) as error:
                self.read_errors[name] = _why(error)


def _files(port: Path) -> Iterator[tuple[str, Path]]:
    for counter in counter_definitions().port:
        yield from ((counter, file) for folder in _FOLDERS if (file := port / folder / counter).exists())


def _number(file: Path) -> int:
    text = read_line(file)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"it reads {text[:60]!r}") from None


def _why(error: Exception) -> str:
    """Without the path, so that many ports give one reason."""
    return printable((isinstance(error, OSError) and error.strerror) or str(error))
