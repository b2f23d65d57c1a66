"""The GPUs of this machine: what the driver offers, what the PCI bus has, and what CUDA would use of it."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from seatrial.discover import file_readers
from seatrial.discover.nvml import (
    Fabric,
    Gpu,
    GpuProcess,
    NvLink,
    NvmlReader,
    NvmlUnavailableError,
    error_kind,
    nvml_session,
    read_gpu,
)
from seatrial.model import Frozen, UsageError
from seatrial.util import processes

__all__ = [
    "Fabric",
    "Gpu",
    "GpuFacts",
    "GpuProcess",
    "NvLink",
    "cuda_order_warning",
    "cuda_visible",
    "read",
    "read_with_timeout",
]

_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers; NVSwitches and audio functions are other classes
# How nvidia-smi topo -m names the nearest thing that two GPUs share, by NVML's level.
_ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# Without persistence mode the driver wakes every GPU anew, which takes seconds for each.
_DRIVER_ANSWERS_S = 120.0
_NO_GPU = ("", "-1", "NoDevFiles")  # the last is what Slurm writes for a job without GPUs


class GpuFacts(Frozen):
    """The GPUs that NVML offers, and what stands between them and those on the PCI bus.

    ``gpus`` can be used; ``lost`` are there for the driver and cannot be used (a line each, why); ``denied`` are not
    for this user or job. ``withheld`` are PCI devices that were given to a virtual machine or another container.
    ``topology`` has a row and a column for each of ``gpus``: ``X`` itself, ``?`` unread, else as nvidia-smi topo -m.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda_driver: str | None = None  # the newest CUDA that the driver runs
    nvml_unavailable: str | None = None
    lost: tuple[str, ...] = ()
    permission_denied: tuple[str, ...] = ()
    pci_devices: tuple[str, ...] = ()
    not_assigned: tuple[str, ...] = ()
    topology: tuple[tuple[str, ...], ...] = ()
    unreadable: dict[str, str] = {}

    @property
    def installed_gpus(self) -> int:
        """How many GPUs should be usable here: by the driver's list or by the PCI bus, whichever has more.

        Where the driver denies some, a job was given a part of the machine, and the bus cannot tell which part.
        """
        on_the_bus = 0 if self.permission_denied else len(self.pci_devices) - len(self.not_assigned)
        return max(on_the_bus, len(self.gpus) + len(self.lost))

    @property
    def detection_error(self) -> str | None:
        """Why nobody can say whether there are GPUs; None where the driver or, without one, the bus has answered.

        An empty bus proves little where a driver hangs: a virtual machine may hand GPUs in by another way.
        """
        unseen = [self.unreadable[name] for name in ("nvml", "pci_devices") if name in self.unreadable]
        if not self.nvml_unavailable or not unseen:
            return None
        return f"whether there are GPUs is not known: {'; '.join(dict.fromkeys([self.nvml_unavailable, *unseen]))}"

    @property
    def not_usable(self) -> tuple[str, ...]:
        """PCI addresses of GPUs that should be usable here and are not among ``gpus``."""
        used = {gpu.pci_bus_id for gpu in self.gpus}
        return tuple(device for device in self.pci_devices if device not in self.not_assigned and device not in used)


def read(root: Path = Path("/")) -> GpuFacts:
    """Ask the driver, and look at the PCI bus under ``root``. Raises nothing: what cannot be read says why."""
    return _beside_the_bus(root, _of_driver())


def read_with_timeout(limit_s: float = _DRIVER_ANSWERS_S, root: Path = Path("/")) -> GpuFacts:
    """The same, but a driver that does not answer within ``limit_s`` seconds is told as unavailable.

    It is asked by a process of its own: a thread that is stuck in the kernel would keep our own process from ending.
    """
    answer = processes.run_command([sys.executable, "-P", "-m", "seatrial.discover.gpu"], limit_s)
    if answer.code == 0:
        return _beside_the_bus(root, GpuFacts.model_validate_json(answer.out))
    last = (answer.err.strip().splitlines() or ["no word"])[-1]
    how = f"did not answer within {limit_s:g} s" if answer.code is None else f"ended its reader ({answer.code}): {last}"
    return _beside_the_bus(root, GpuFacts(nvml_unavailable=f"NVML {how}", unreadable={"nvml": f"NVML {how}"}))


def _of_driver() -> GpuFacts:
    try:
        with nvml_session() as nvml:
            return _ask_driver(nvml)
    except NvmlUnavailableError as reason:
        return GpuFacts(nvml_unavailable=str(reason))


def _beside_the_bus(root: Path, facts: GpuFacts) -> GpuFacts:
    """What the driver said, and what the PCI bus has."""
    attempt = file_readers.FieldReader()
    devices = _pci_gpus(root, attempt)
    used = {gpu.pci_bus_id for gpu in facts.gpus}
    withheld = tuple(
        d for d in devices if d not in used and _is_withheld(root, d, nvml_works=not facts.nvml_unavailable)
    )
    unread = {**facts.unreadable, **attempt.unreadable}
    return facts.model_copy(update={"pci_devices": devices, "withheld": withheld, "unreadable": unread})


def cuda_visible(facts: GpuFacts, env: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that CUDA would use, in its order, by ``CUDA_VISIBLE_DEVICES``.

    Raises UsageError on an entry that names no usable GPU, or names one twice: CUDA would not complain, but use the
    entries before it, or none. An index is taken as NVML counts, in PCI order. CUDA counts the fastest first unless
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; between GPUs of one model that is the same (see ``order_caveat``).
    """
    value = env.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return facts.gpus
    if value.strip() in _NO_GPU:
        return ()
    entries = [entry.strip() for entry in value.split(",")]
    chosen = [_named(facts, entry, value) for entry in entries]
    for gpu, times in Counter(gpu.index for gpu in chosen).items():
        if times > 1:
            raise _bad_entry(facts, value, f"names GPU {gpu} {times} times")
    return tuple(chosen)


def cuda_order_warning(facts: GpuFacts, env: Mapping[str, str]) -> str | None:
    """Why CUDA's index of a GPU may differ from NVML's here; None where it cannot."""
    models = sorted({gpu.name or "unknown" for gpu in facts.gpus})
    if len(models) < 2 or env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return None
    return (
        f"this machine mixes {' and '.join(models)}: CUDA counts the fastest first, NVML in PCI order, so that one "
        "index may mean two GPUs; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    )


def _named(facts: GpuFacts, entry: str, value: str) -> Gpu:
    if entry.startswith("MIG-"):
        raise _bad_entry(facts, value, f"names the MIG slice {entry}, and MIG slices cannot be chosen by name yet")
    if re.fullmatch(r"\d+", entry):
        found = [gpu for gpu in facts.gpus if gpu.index == int(entry)]
    else:
        found = [gpu for gpu in facts.gpus if entry.startswith("GPU-") and (gpu.uuid or "").startswith(entry)]
    if len(found) > 1:
        raise _bad_entry(facts, value, f"names {entry!r}, with which {len(found)} UUIDs begin")
    if not found:
        raise _bad_entry(facts, value, f"names {entry!r}, and no usable GPU is called that")
    return found[0]


def _bad_entry(facts: GpuFacts, value: str, problem: str) -> UsageError:
    here = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in facts.gpus) or facts.nvml_unavailable or "none"
    lost = f"; not usable: {'; '.join(facts.lost)}" if facts.lost else ""
    return UsageError(
        f"CUDA_VISIBLE_DEVICES={value} {problem}. Usable GPUs: {here}{lost}. CUDA would silently use only the entries "
        "before it, or none: name each GPU once, by index or UUID, or unset the variable to use all"
    )


def _ask_driver(nvml: Any) -> GpuFacts:
    machine = NvmlReader(nvml)
    driver = machine.query("driver", "nvmlSystemGetDriverVersion")
    cuda = machine.query("cuda_driver", "nvmlSystemGetCudaDriverVersion_v2")
    gpus: list[Gpu] = []
    handles: list[Any] = []
    lost: list[str] = []
    denied: list[str] = []
    for index in range(machine.query("gpus", "nvmlDeviceGetCount") or 0):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            (denied if error_kind(error) == "NoPermission" else lost).append(f"gpu{index}: {error}")
            continue
        interview = NvmlReader(nvml)
        gpu = read_gpu(interview, index, handle)
        if interview.gpu_lost:
            lost.append(
                f"gpu{index} ({gpu.uuid or 'UUID unread'}, PCI {gpu.pci_bus_id or 'unread'}): {interview.gpu_lost}"
            )
            continue
        gpus.append(gpu)
        handles.append(handle)
    return GpuFacts(
        gpus=tuple(gpus),
        driver=driver,
        cuda_driver=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        nvml_unavailable=machine.unreadable.get("gpus"),
        lost=tuple(lost),
        permission_denied=tuple(denied),
        topology=_topology(machine, gpus, handles),
        unreadable=machine.unreadable,
    )


def _topology(machine: NvmlReader, gpus: Sequence[Gpu], handles: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    def between(a: int, b: int) -> str:
        if a == b:
            return "X"
        one, other = gpus[a], gpus[b]
        direct = sum(link.remote == "gpu" and link.remote_pci == other.pci_bus_id for link in one.nvlinks)
        to_switches = min(sum(link.remote == "switch" for link in gpu.nvlinks) for gpu in (one, other))
        if links := direct + to_switches:  # through switches there are as many as both have there
            return f"NV{links}"
        field = f"topology gpu{gpus[a].index}-gpu{gpus[b].index}"
        level = machine.query(field, "nvmlDeviceGetTopologyCommonAncestor", handles[a], handles[b])
        return _ANCESTORS.get(level, "?")

    return tuple(tuple(between(a, b) for b in range(len(gpus))) for a in range(len(gpus)))


def _pci_gpus(root: Path, attempt: file_readers.FieldReader) -> tuple[str, ...]:
    folder = file_readers.path_under(root, "/sys/bus/pci/devices")
    buses = folder.parent.parent
    if buses.is_dir() and not folder.parent.exists():  # a machine without PCI, not one that hides it
        return ()
    found = []
    for address in attempt("pci_devices", lambda: file_readers.list_names(folder)) or []:
        device = folder / address
        if attempt(f"{address} vendor", partial(file_readers.read_line, device / "vendor")) == _NVIDIA:
            kind = attempt(f"{address} class", partial(file_readers.read_line, device / "class"))
            found += [address] if (kind or "").startswith(_GPU_CLASSES) else []
    return tuple(found)


def _is_withheld(root: Path, address: str, *, nvml_works: bool) -> bool:
    """Whether a GPU on the bus is meant for others: for a virtual machine, or for other containers than this one.

    A container sees the whole bus of its host, but device nodes of its own GPUs alone. Where NVML does not work, a
    missing device node proves nothing: the driver itself has them made.
    """
    driver = file_readers.path_under(root, f"/sys/bus/pci/devices/{address}/driver")
    bound_to = driver.resolve().name if driver.is_symlink() else None
    if bound_to == "vfio-pci":
        return True
    return nvml_works and bound_to == "nvidia" and not _has_device_node(root, address)


def _has_device_node(root: Path, address: str) -> bool:
    try:
        information = file_readers.read_text(
            file_readers.path_under(root, f"/proc/driver/nvidia/gpus/{address}/information")
        )
    except FileNotFoundError:  # some container runtimes hide the GPUs of others here already
        return False
    except OSError:
        return True  # unknown: then it counts as ours
    minor = re.search(r"^Device Minor:\s*(\d+)", information, re.MULTILINE)
    return minor is None or file_readers.path_under(root, f"/dev/nvidia{minor[1]}").exists()


if __name__ == "__main__":
    print(_of_driver().model_dump_json())
