"""Error counters of RDMA ports (InfiniBand, RoCE, EFA) from /sys/class/infiniband.

Linux Documentation/ABI/stable/sysfs-class-infiniband describes the files; data/counters.yaml lists the error counters.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from seatrial.discover.file_readers import read_line
from seatrial.hardware.error_counters import counter_definitions
from seatrial.util.text import printable

_FOLDERS = ("counters", "hw_counters")
# (port, counter), such as (mlx5_0/1, symbol_error). ``unavailable`` also has (port, "counters") for a port without a
# known counter, and ("ports",) for a machine without ports.
CounterKey = tuple[str, ...]
NO_RDMA_PORT = "no RDMA port in /sys/class/infiniband"


class PortErrorCounters:
    """The error counters of all RDMA ports at ``begin`` (``before``) and at ``end`` (``after``).

    ``unavailable``: the errors of counters that cannot be read at ``begin``. Either they are not supported (the files
    of a virtual function contain "N/A"), or this user may not read them (then they are also in ``permission_denied``).
    ``read_errors``: the errors of counters that can be read at ``begin``, but not at ``end``.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        folders = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
        self.ports = {f"{folder.parent.parent.name}/{folder.name}": folder for folder in folders}
        self._files: dict[CounterKey, Path] = {
            (port, counter): file for port, folder in self.ports.items() for counter, file in _counter_files(folder)
        }
        self.before: dict[CounterKey, int] = {}
        self.after: dict[CounterKey, int] = {}
        without_counters = sorted(self.ports.keys() - {port for port, *_ in self._files})
        self.unavailable: dict[CounterKey, str] = {
            (port, "counters"): "no known error counter" for port in without_counters
        }
        if not self.ports:
            self.unavailable[("ports",)] = NO_RDMA_PORT
        self.permission_denied: set[CounterKey] = set()
        self.read_errors: dict[CounterKey, str] = {}

    def begin(self) -> None:
        """Read all counters."""
        for key, file in self._files.items():
            try:
                self.before[key] = _read_count(file)
            except (OSError, ValueError) as error:
                self.unavailable[key] = _error_text(error)
                self.permission_denied |= {key} if isinstance(error, PermissionError) else set()

    def end(self) -> None:
        """Read the counters again that were readable at ``begin``."""
        for key in self.before:
            try:
                self.after[key] = _read_count(self._files[key])
            except (OSError, ValueError) as error:
                self.read_errors[key] = _error_text(error)


def _counter_files(port: Path) -> Iterator[tuple[str, Path]]:
    for counter in counter_definitions().port:
        for folder in _FOLDERS:
            file = port / folder / counter
            if file.exists():
                yield counter, file


def _read_count(file: Path) -> int:
    text = read_line(file)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the file contains {text[:60]!r}, expected a number") from None


def _error_text(error: Exception) -> str:
    """The text of an error without the path, so that it is the same for all ports."""
    return printable((isinstance(error, OSError) and error.strerror) or str(error))
