"""The GPUs of this machine according to the driver, the PCI bus and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seatrial.discover import pcie
from seatrial.discover.file_readers import FieldReader, FileFacts, read_text
from seatrial.discover.nvml import Gpu, NvmlReader, NvmlUnavailableError, error_kind, nvml_session, read_gpu
from seatrial.model import UsageError
from seatrial.util import processes

# NVML's level of the common ancestor of two GPUs -> its name in nvidia-smi topo -m
_ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# Without persistence mode the driver initialises every GPU when NVML opens it, which takes seconds per GPU
_DRIVER_TIMEOUT_S = 120.0
_NO_GPU = ("", "-1", "NoDevFiles")  # NoDevFiles: set by Slurm for a job without GPUs


class GpuFacts(FileFacts):
    """GPUs from NVML and from the PCI bus.

    ``gpus``: the usable ones. ``failed_gpus``: index and error of GPUs that are lost or that the driver cannot open.
    ``permission_denied``: index and error of GPUs that this user may not open.
    ``pci_devices``: addresses of all GPUs on the PCI bus. ``not_assigned``: the addresses of GPUs that belong to a
    virtual machine or to other containers.
    ``topology``: the connection of each pair of ``gpus``, by the names of nvidia-smi topo -m; ``X`` for a GPU and
    itself, ``?`` if unreadable.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda_driver: str | None = None  # the newest CUDA version that the driver supports
    nvml_unavailable: str | None = None
    failed_gpus: tuple[str, ...] = ()
    permission_denied: tuple[str, ...] = ()
    pci_devices: tuple[str, ...] = ()
    not_assigned: tuple[str, ...] = ()
    topology: tuple[tuple[str, ...], ...] = ()

    @property
    def installed_gpus(self) -> int:
        """The number of GPUs that should be usable: the larger of the counts of the driver and of the PCI bus.

        If permission is denied for some GPUs, only the driver counts: the PCI bus also lists GPUs of other jobs.
        """
        on_pci_bus = 0 if self.permission_denied else len(self.pci_devices) - len(self.not_assigned)
        return max(on_pci_bus, len(self.gpus) + len(self.failed_gpus))

    @property
    def detection_error(self) -> str | None:
        """Why GPUs could not be detected; None if the driver could be read, or without a driver the PCI bus.

        If the driver hangs, an empty PCI bus does not show that there is no GPU: some virtual machines have none.
        """
        errors = [self.unreadable[name] for name in ("nvml", "pci_devices") if name in self.unreadable]
        if not self.nvml_unavailable or not errors:
            return None
        return f"GPUs could not be detected: {'; '.join(dict.fromkeys([self.nvml_unavailable, *errors]))}"

    @property
    def unusable_pci_devices(self) -> tuple[str, ...]:
        """PCI addresses of GPUs that should be usable but are not in ``gpus``."""
        usable = {gpu.pci_bus_id for gpu in self.gpus}
        return tuple(device for device in self.pci_devices if device not in self.not_assigned and device not in usable)


def read(root: Path = Path("/")) -> GpuFacts:
    """GPU facts from the driver and from the PCI bus under ``root``; errors are recorded, not raised."""
    return _with_pci_devices(root, _read_driver())


def read_with_timeout(timeout_s: float = _DRIVER_TIMEOUT_S) -> GpuFacts:
    """GPU facts as from ``read``, but a separate process reads NVML, for at most ``timeout_s`` seconds.

    If it fails or is late, ``nvml_unavailable`` is set. A thread stuck in the kernel would keep this process alive.
    """
    root = Path("/")
    result = processes.run_command([sys.executable, "-P", "-m", "seatrial.discover.gpu"], timeout_s)
    if result.code == 0:
        return _with_pci_devices(root, GpuFacts.model_validate_json(result.out))
    if result.code is None:
        error = f"NVML did not respond within {timeout_s:g} s"
    else:
        last_line = (result.err.strip().splitlines() or ["no output on stderr"])[-1]
        error = f"the process that reads NVML failed (exit code {result.code}): {last_line}"
    return _with_pci_devices(root, GpuFacts(nvml_unavailable=error, unreadable={"nvml": error}))


def _read_driver() -> GpuFacts:
    try:
        with nvml_session() as nvml:
            return _driver_facts(nvml)
    except NvmlUnavailableError as error:
        return GpuFacts(nvml_unavailable=str(error))


def _driver_facts(nvml: Any) -> GpuFacts:
    driver_reader = NvmlReader(nvml)
    driver = driver_reader.query("driver", "nvmlSystemGetDriverVersion")
    cuda = driver_reader.query("cuda_driver", "nvmlSystemGetCudaDriverVersion_v2")
    gpus: list[Gpu] = []
    handles: list[Any] = []
    failed: list[str] = []
    permission_denied: list[str] = []
    for index in range(driver_reader.query("gpus", "nvmlDeviceGetCount") or 0):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            errors = permission_denied if error_kind(error) == "NoPermission" else failed
            errors.append(f"gpu{index}: {error}")
            continue
        reader = NvmlReader(nvml)
        gpu = read_gpu(reader, index, handle)
        if reader.gpu_lost:
            uuid, address = gpu.uuid or "UUID unreadable", gpu.pci_bus_id or "address unreadable"
            failed.append(f"gpu{index} ({uuid}, PCI {address}): {reader.gpu_lost}")
            continue
        gpus.append(gpu)
        handles.append(handle)
    return GpuFacts(
        gpus=tuple(gpus),
        driver=driver,
        cuda_driver=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        nvml_unavailable=driver_reader.unreadable.get("gpus"),
        failed_gpus=tuple(failed),
        permission_denied=tuple(permission_denied),
        topology=_topology(driver_reader, gpus, handles),
        unreadable=driver_reader.unreadable,
    )


def _topology(reader: NvmlReader, gpus: Sequence[Gpu], handles: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    """The connection of each pair of GPUs with the names of nvidia-smi topo -m, as a matrix."""

    def connection(i: int, j: int) -> str:
        if i == j:
            return "X"
        direct = sum(link.remote == "gpu" and link.remote_pci == gpus[j].pci_bus_id for link in gpus[i].nvlinks)
        to_switches = min(sum(link.remote == "switch" for link in gpu.nvlinks) for gpu in (gpus[i], gpus[j]))
        if links := direct + to_switches:
            return f"NV{links}"
        field = f"topology gpu{gpus[i].index}-gpu{gpus[j].index}"
        level = reader.query(field, "nvmlDeviceGetTopologyCommonAncestor", handles[i], handles[j])
        return _ANCESTORS.get(level, "?")

    return tuple(tuple(connection(i, j) for j in range(len(gpus))) for i in range(len(gpus)))


def _with_pci_devices(root: Path, facts: GpuFacts) -> GpuFacts:
    reader = FieldReader()
    devices = reader("pci_devices", lambda: pcie.gpus(root)) or []
    usable = {gpu.pci_bus_id for gpu in facts.gpus}
    update = {
        "pci_devices": tuple(device.name for device in devices),
        "not_assigned": tuple(
            device.name
            for device in devices
            if device.name not in usable and _is_not_assigned(root, device, nvml_works=not facts.nvml_unavailable)
        ),
        "unreadable": facts.unreadable | reader.unreadable,
    }
    return facts.model_copy(update=update)


def _is_not_assigned(root: Path, device: Path, *, nvml_works: bool) -> bool:
    """Whether a GPU on the bus belongs to a virtual machine or to another container.

    A container sees the whole PCI bus of its host, but only the device nodes of its own GPUs. If NVML does not work, a
    missing device node is no evidence, since the driver creates the device nodes.
    """
    driver = (device / "driver").resolve().name
    return driver == "vfio-pci" or (nvml_works and driver == "nvidia" and not _has_device_node(root, device.name))


def _has_device_node(root: Path, address: str) -> bool:
    """Whether this container has the file /dev/nvidiaN of the GPU; True if that is unknown."""
    try:
        information = read_text(root / "proc/driver/nvidia/gpus" / address / "information")
    except FileNotFoundError:  # some container runtimes hide the entries of other containers' GPUs
        return False
    except OSError:
        return True
    minor = re.search(r"^Device Minor:\s*(\d+)", information, re.MULTILINE)
    return minor is None or (root / f"dev/nvidia{minor[1]}").exists()


def cuda_visible(facts: GpuFacts, env: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that CUDA uses according to ``CUDA_VISIBLE_DEVICES``, in that order.

    An index in the variable is taken as NVML's index; see ``cuda_order_warning``. Raises UsageError on an entry that
    matches no usable GPU, and on a GPU that is listed twice: CUDA silently ignores such an entry and all entries after
    it, or uses no GPU.
    """
    value = env.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return facts.gpus
    if value.strip() in _NO_GPU:
        return ()
    entries = [entry.strip() for entry in value.split(",")]
    gpus = [_matching_gpu(facts, entry, value) for entry in entries]
    for index, count in Counter(gpu.index for gpu in gpus).items():
        if count > 1:
            raise _entry_error(facts, value, f"lists GPU {index} {count} times")
    return tuple(gpus)


def _matching_gpu(facts: GpuFacts, entry: str, value: str) -> Gpu:
    """The GPU that ``entry`` of CUDA_VISIBLE_DEVICES (whole: ``value``) names. Raises UsageError if there is none."""
    if entry.startswith("MIG-"):
        raise _entry_error(facts, value, f"lists the MIG instance {entry}; MIG instances are not supported")
    if re.fullmatch(r"\d+", entry):
        matching = [gpu for gpu in facts.gpus if gpu.index == int(entry)]
    else:
        matching = [gpu for gpu in facts.gpus if entry.startswith("GPU-") and (gpu.uuid or "").startswith(entry)]
    if len(matching) > 1:
        raise _entry_error(facts, value, f"lists {entry!r}, which matches {len(matching)} UUIDs")
    if not matching:
        raise _entry_error(facts, value, f"lists {entry!r}, which matches no usable GPU")
    return matching[0]


def _entry_error(facts: GpuFacts, value: str, problem: str) -> UsageError:
    usable = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in facts.gpus) or facts.nvml_unavailable or "none"
    failed = f"; not usable: {'; '.join(facts.failed_gpus)}" if facts.failed_gpus else ""
    return UsageError(
        f"CUDA_VISIBLE_DEVICES={value} {problem}; CUDA would silently use fewer GPUs or none. List each GPU once, by "
        f"index or UUID, or unset the variable to use all GPUs. Usable GPUs: {usable}{failed}"
    )


def cuda_order_warning(facts: GpuFacts, env: Mapping[str, str]) -> str | None:
    """A warning if CUDA's indices can differ from NVML's on this machine, else None."""
    models = sorted({gpu.name or "unknown" for gpu in facts.gpus})
    if len(models) < 2 or env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return None
    return (
        f"mixed GPU models ({' and '.join(models)}): CUDA enumerates the fastest first, NVML in PCI order, so an index "
        "can refer to different GPUs; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    )


if __name__ == "__main__":
    print(_read_driver().model_dump_json())
