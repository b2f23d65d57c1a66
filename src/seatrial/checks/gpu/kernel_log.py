"""Counts the Xids in the kernel log for which NVIDIA asks to reset or repair the GPU or the node."""

from __future__ import annotations

from functools import cache

from seatrial.checks.check import Check, Context, Options, facts
from seatrial.checks.declare import Answers, absent, value, warning
from seatrial.model import Phase, Scope
from seatrial.util import data_files

# Values of ``immediate`` in xid_catalog.yaml (NVIDIA's Xid catalog) that ask to reset or repair the GPU or the node
_HARDWARE_ACTIONS = (
    *("RESET_GPU", "RESTART_BM", "RESTART_VM", "CHECK_MECHANICALS"),
    *("WORKFLOW_NVLINK_ERR", "WORKFLOW_NVLINK5_ERR", "WORKFLOW_XID_48"),
)
_MAX_LISTED = 20  # Xids in the evidence


def measure(context: Context, _options: Options) -> Answers:
    """Yield the number of hardware Xids, and the most recent 20 of them as evidence; no number without a readable log.

    Raises OSError if reading the log fails for another reason than permission or a missing file.
    """
    from seatrial.discover import kernel_log, settings

    if not settings.is_gpu_node(context.root):
        yield absent("hardware_xids", "no NVIDIA GPU on this machine")
        return
    context.progress("reading the kernel log")
    try:
        log = kernel_log.read(context.root)
    except (PermissionError, FileNotFoundError) as error:  # usual in a container: no /dev/kmsg
        yield absent("hardware_xids", str(error))
        return
    # log_from_s: time of the oldest message since boot; earlier messages are overwritten
    yield from facts({"log_from_s": log.from_s, "xids": len(log.xids)})
    hardware_xids = [
        f"{xid.seconds:.0f} s after boot, PCI {xid.address}: Xid {xid.number} ({_hardware_xids()[xid.number]})"
        for xid in log.xids
        if xid.number in _hardware_xids()
    ]
    yield value("hardware_xids", len(hardware_xids), evidence=hardware_xids[-_MAX_LISTED:] or None)


@cache
def _hardware_xids() -> dict[int, str]:
    catalog = data_files.read("xid_catalog.yaml")["xids"]
    return {xid["xid"]: xid["meaning"] for xid in catalog if xid["immediate"] in _HARDWARE_ACTIONS}


CHECK = Check(
    name="gpu.kernel_log",
    title="Hardware Xids in the kernel log",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    rights="root, to read the kernel log",
    measure=measure,
    declared=(
        warning(
            "hardware_xids",
            "== 0 Xids",
            "Since the node booted the driver has reported errors for which NVIDIA asks to reset or repair the GPU or "
            "the node.",
            "dmesg -T | grep Xid | seatrial explain - (explains each Xid). If the GPU was not reset since, drain the "
            "node and reset it: nvidia-smi --gpu-reset -i INDEX",
            # WARN: the log keeps an Xid until the node boots, even after a reset that repaired the GPU. Lasting faults,
            # such as a lost GPU or a pending row remap, fail in gpu.inventory.
        ),
    ),
    limit_s=60,
)
