"""slurm.gres: compares the GPUs that Slurm has configured for a node with the GPUs that NVML reports on it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from seatrial.checks.check import Check, Context, Options, SkipIf
from seatrial.checks.declare import Answers, absent, fact, metric, value
from seatrial.checks.slurm._probe_jobs import NO_CLIENT, NO_CLUSTER
from seatrial.discover import gpu as discover
from seatrial.discover import slurm
from seatrial.discover.slurm_facts import SlurmNode
from seatrial.model import NotApplicable, Phase, Scope, SeatrialError


def measure(context: Context, _options: Options) -> Answers:
    """Yield the differences between the GPU counts of Slurm and NVML.

    Raises NotApplicable on a machine that is not a Slurm node, and SeatrialError in MIG mode or if the job has only a
    part of the node's GPUs.
    """
    try:
        node = _this_node(context, os.environ)
    except slurm.NotConfigured as error:
        raise NotApplicable(NO_CLUSTER) from error
    inventory = discover.read(context.root)
    configured, detected, expected = node.gpus, len(inventory.gpus), context.expected_gpus or 0
    if not configured and not inventory.installed_gpus and not expected:
        raise NotApplicable(f"{node.name} has no GPU in Slurm, none in NVML, and none is expected")
    yield fact("nvml_unavailable", inventory.nvml_unavailable)
    gres = [":".join(filter(None, (row.name, row.type, str(row.count)))) for row in node.gres]  # such as gpu:h100:8
    evidence = {
        "configured": f"{configured} GPUs by Slurm",
        "detected": f"{detected} GPUs by NVML",
        "gres": ",".join(gres),
        "models": sorted({gpu.name or "unreadable" for gpu in inventory.gpus}),
        "nvml_unavailable": inventory.nvml_unavailable,
        "gpus_lost": [*inventory.failed_gpus, *inventory.permission_denied],
    }
    if expected:
        yield value("gpus_below_expected", max(0, expected - configured), evidence=evidence)
    else:
        yield absent("gpus_below_expected", "cluster.gpus_per_node is not set")
    if any(gpu.mig_mode for gpu in inventory.gpus):
        raise SeatrialError("MIG enabled: Slurm counts MIG instances, NVML GPUs. Compare: slurmd -G; nvidia-smi -L")
    # NVML must report all configured GPUs, or those of the job if the job sees no others
    of_job = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    in_job = "SLURM_JOB_ID" in os.environ and not inventory.nvml_unavailable
    allocated = of_job if in_job and detected <= of_job < configured else configured
    yield value("gpus_missing", max(0, allocated - detected), evidence=evidence)
    yield value("gpus_not_configured", max(0, detected - configured), evidence=evidence)
    if allocated < configured:
        raise SeatrialError(
            f"this job has {allocated} of {configured} GPUs of the node; NVML does not show the others, and they were "
            f"not checked. Request all: --gpus-per-node {configured}"
        )


def _this_node(context: Context, env: Mapping[str, str]) -> SlurmNode:
    """Return Slurm's record of this node. Without one, raises SeatrialError in a job, else NotApplicable."""
    job, name = env.get("SLURM_JOB_ID"), env.get("SLURMD_NODENAME") or context.node.partition(".")[0]
    if not slurm.installed():
        if job:
            raise SeatrialError(
                f"job {job} on {name}: no Slurm client (sinfo) to read the configured GPUs. Next: command -v scontrol; "
                "in a container, mount the Slurm client, /etc/slurm and the munge socket"
            )
        raise NotApplicable(NO_CLIENT)
    node = slurm.node(name)
    if node:
        return node
    if job:
        raise SeatrialError(f"job {job}: Slurm has no node {name}. Next: scontrol show node {name}")
    raise NotApplicable(f"{name} is not a Slurm node, and this process is not in a Slurm job")


CHECK = Check(
    name="slurm.gres",
    title="GPUs configured in Slurm and detected on the node",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    measure=measure,
    limit_s=300,
    skip_if=(SkipIf.NO_SLURM, SkipIf.NO_GPU),
    declared=(
        metric(
            "gpus_missing",
            "== 0 GPUs",
            "Slurm allocates more GPUs than NVML reports on the node: jobs start and fail",
            "On the node: nvidia-smi -L; slurmd -G; dmesg | grep -iE 'xid|nvrm'. Until the repair: scontrol "
            "update nodename=NODE state=drain reason=gpu",
        ),
        metric(
            "gpus_not_configured",
            "== 0 GPUs",
            "the node has GPUs that Slurm has not configured: they are not allocated, and access is not restricted",
            "On the node: slurmd -G; nvidia-smi -L. Gres=gpu:N on the node's NodeName line, AutoDetect=nvml in "
            "gres.conf; restart slurmctld and the node's slurmd, then: sinfo -o '%N %G'",
        ),
        metric(
            "gpus_below_expected",
            "== 0 GPUs",
            "Slurm has fewer GPUs configured on this node than expected",
            "sinfo -o '%N %G'; scontrol show node NODE; Gres=gpu:N on the node's NodeName line, and gres.conf",
        ),
    ),
)
