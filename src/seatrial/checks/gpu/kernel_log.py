"""Counts the Xids in the kernel log for which NVIDIA asks to reset or repair the GPU or the node."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from seatrial.checks.base import NOT_SUPPORTED, PERMISSION_DENIED, Check, Context, Options, RuleFact, facts, metric
from seatrial.model import Observation, Outcome, Phase, Rule, Scope
from seatrial.util import data_files

# Values of ``immediate`` in xid_catalog.yaml (NVIDIA's Xid catalog) that ask to reset or repair the GPU or the node
_HARDWARE_ACTIONS = (
    *("RESET_GPU", "RESTART_BM", "RESTART_VM", "CHECK_MECHANICALS"),
    *("WORKFLOW_NVLINK_ERR", "WORKFLOW_NVLINK5_ERR", "WORKFLOW_XID_48"),
)
_MAX_LISTED = 20  # Xids in the fact xids_of_hardware


def measure(context: Context, _options: Options) -> Iterator[Observation]:
    """Yield the number of hardware Xids, and the most recent 20 of them as a fact; no number without a readable log.

    Raises OSError if reading the log fails for another reason than permission or a missing file.
    """
    from seatrial.discover import kernel_log, settings

    context.progress("reading the kernel log")
    yield from facts({"gpu_node": "yes" if settings.is_gpu_node(context.root) else "no"})
    try:
        log = kernel_log.read(context.root)
    except PermissionError as error:
        yield from facts({"log_status": f"{PERMISSION_DENIED}: {error}"})
        return
    except FileNotFoundError as error:  # usual in a container: no /dev/kmsg
        yield from facts({"log_status": f"{NOT_SUPPORTED}: {error}"})
        return
    hardware_xids = [xid for xid in log.xids if xid.number in _hardware_xids()]
    yield from facts(
        {
            "log_status": "readable",
            "log_from_s": log.from_s,  # time of the oldest message since boot; earlier messages are overwritten
            "xids": len(log.xids),
            "xids_of_hardware": [
                f"{xid.seconds:.0f} s after boot, PCI {xid.address}: Xid {xid.number} ({_hardware_xids()[xid.number]})"
                for xid in hardware_xids[-_MAX_LISTED:]
            ],
        }
    )
    yield metric("hardware_xids", len(hardware_xids), "Xids", context.node)


@cache
def _hardware_xids() -> dict[int, str]:
    """Return the meaning of each hardware Xid by its number."""
    catalog = data_files.read("xid_catalog.yaml")["xids"]
    return {xid["xid"]: xid["meaning"] for xid in catalog if xid["immediate"] in _HARDWARE_ACTIONS}


CHECK = Check(
    name="gpu.kernel_log",
    title="Hardware Xids in the kernel log",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    rights="root, to read the kernel log",
    metrics={"hardware_xids": "Xids"},
    rules=(
        Rule(
            metric="hardware_xids",
            expect="== 0 Xids",
            # WARN: the log keeps an Xid until the node boots, even after a reset that repaired the GPU. Lasting faults,
            # such as a lost GPU or a pending row remap, fail in gpu.inventory.
            outcome_if_violated=Outcome.WARN,
            applies_if={"gpu_node": "yes", "log_status": "readable"},
            evidence_facts=("xids_of_hardware",),
            meaning="Since the node booted the driver has reported errors for which NVIDIA asks to reset or repair the "
            "GPU or the node.",
            fix="dmesg -T | grep Xid | seatrial explain - (explains each Xid). If the GPU was not reset since, drain "
            "the node and reset it: nvidia-smi --gpu-reset -i INDEX",
        ),
    ),
    rule_facts={
        "gpu_node": RuleFact(reason="no NVIDIA GPU on this machine"),
        "log_status": RuleFact(values="readable", permission_denied=Outcome.SKIP),
    },
    measure=measure,
    limit_s=60,
)
