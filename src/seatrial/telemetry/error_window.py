"""Error counters before and after a check: of one GPU, and of the node's RDMA ports. What grew becomes a fact.

    {"read": 13,                                             how many were read both times
     "grew": {"gpu3": {"ecc_corrected": [0, 2]}, "mlx5_0/1": {"symbol_error": [7, 9]}},
     "xids": [43],
     "unread": {"gpu3 pcie_replays": "Unknown Error"},       refused for a fault
     "denied": {"Insufficient Permissions": ["gpu3 xid"]},   may not be read
     "lacks": {"Not Supported": ["gpu3 nvlink_replays"]}}    is not there

What is empty is left out: at thousands of ranks the fact of a healthy one has to be small.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from seatrial.discover.gpu_counters import Counters
from seatrial.discover.nvml import NvmlUnavailableError, session
from seatrial.discover.port_counters import PortCounters
from seatrial.hardware.error_counters import grown, known
from seatrial.model import Metric

NO_PORT = "no RDMA port in /sys/class/infiniband"


class Window:
    """What was counted. Complete when the block of ``counted`` is left."""

    def __init__(self) -> None:
        self._read = 0
        self._grew: dict[str, dict[str, list[int]]] = {}
        self._xids: list[int] = []
        self._unread: dict[str, str] = {}
        self._denied: dict[str, list[str]] = {}
        self._lacks: dict[str, list[str]] = {}

    def fact(self) -> dict[str, Any]:
        parts = {
            "grew": self._grew,
            "xids": self._xids,
            "unread": self._unread,
            "denied": self._denied,
            "lacks": self._lacks,
        }
        return {"read": self._read, **{name: part for name, part in parts.items() if part}}

    def metrics(self, gpu: str, node: str) -> Iterator[Metric]:
        """By how much each counter that may tell of a fault grew: of the GPU that is the subject ``gpu``, and on all
        ports of ``node`` together."""
        sums: dict[tuple[str, str], int] = {}
        for place, counters in self._grew.items():
            kind, subject = (known().port, node) if "/" in place else (known().gpu, gpu)
            for counter, (before, after) in counters.items():
                if kind[counter].level != "told" and (new := grown(before, after)):
                    sums[counter, subject] = sums.get((counter, subject), 0) + new
        if xids := [xid for xid in self._xids if known().of_xid(xid).level != "told"]:
            sums["xid", gpu] = len(xids)
        for (counter, subject), new in sums.items():
            yield Metric(name=f"new_errors.{counter}", value=new, unit="errors", subject=subject)

    def fault(self, what: str, why: str) -> None:
        self._unread[what] = why

    def take_gpu(self, name: str, counters: Counters) -> None:
        for counter, before in counters.before.items():
            self._compare(name, counter, before, counters.after.get(counter))
        for counter, why in counters.lacks.items():
            self._lack(f"{name} {counter}", why, counter in counters.denied)
        self._unread |= {f"{name} {counter}": why for counter, why in counters.faults.items()}
        self._xids += counters.xids

    def take_ports(self, counters: PortCounters) -> None:
        if not counters.ports:
            self._lack("ports", NO_PORT, denied=False)
        for key, before in counters.before.items():
            self._compare(*key, before, counters.after.get(key))
        for key, why in counters.lacks.items():
            self._lack(" ".join(key), why, key in counters.denied)
        self._unread |= {" ".join(key): why for key, why in counters.faults.items()}

    def _compare(self, place: str, counter: str, before: int, after: int | None) -> None:
        if after is None or counter == "xid":  # those are told by their numbers
            self._read += after is not None
            return
        self._read += 1
        kept = known().port.get(counter)
        if after != before or (kept and after == kept.limit):  # one that stands at its limit does not show its growth
            self._grew.setdefault(place, {})[counter] = [before, after]

    def _lack(self, what: str, why: str, denied: bool) -> None:
        (self._denied if denied else self._lacks).setdefault(why, []).append(what)


@contextmanager
def counted(gpu: int | None, ports: bool, root: Path = Path("/")) -> Iterator[Window]:
    """Count while the block runs: NVML's GPU ``gpu``, and the RDMA ports under ``root`` if ``ports``.

    Never raises for what cannot be read: it is told in the window's fact.
    """
    window = Window()
    with ExitStack() as stack:
        counters = _begin(gpu, window, stack) if gpu is not None else None
        wires = PortCounters(root) if ports else None
        if wires:
            wires.begin()
        yield window
        if wires:
            wires.end()
            window.take_ports(wires)
        if counters:
            counters.end()
            window.take_gpu(f"gpu{gpu}", counters)


def _begin(gpu: int, window: Window, stack: ExitStack) -> Counters | None:
    try:
        nvml = stack.enter_context(session())
    except NvmlUnavailableError as error:
        window.fault(f"gpu{gpu}", str(error))
        return None
    try:
        counters = Counters(nvml, gpu)
    except nvml.NVMLError as error:
        window.fault(f"gpu{gpu}", f"NVML: {error}")
        return None
    counters.begin()
    return counters
