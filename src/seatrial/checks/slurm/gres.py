"""slurm.gres: does every node have the GPUs that Slurm hands out there? Slurm's word against NVML's, on the node."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from seatrial.checks.base import Check, Context, Options, facts, metrics
from seatrial.discover import gpu as discover
from seatrial.discover import slurm
from seatrial.discover.gpu import GpuFacts
from seatrial.discover.slurm_facts import Node
from seatrial.model import NotApplicable, Observation, Phase, Rule, Scope, SeatrialError

METRICS = {
    "gpus_configured": "GPUs",
    "gpus_detected": "GPUs",
    "gpus_missing": "GPUs",
    "gpus_not_configured": "GPUs",
    "gpus_below_expected": "GPUs",
}

RULES = (
    Rule(
        metric="gpus_missing",
        evidence_facts=("configured", "seen", "gres", "models", "nvml_unavailable", "gpus_lost"),
        expect="== 0 GPUs",
        meaning="Slurm hands out GPUs that are not on the node: jobs start there, and fail",
        fix="On the node: nvidia-smi -L; slurmd -G; dmesg | grep -iE 'xid|nvrm'. Until it is mended: scontrol "
        "update nodename=NODE state=drain reason=gpu",
    ),
    Rule(
        metric="gpus_not_configured",
        evidence_facts=("configured", "seen", "gres", "models"),
        expect="== 0 GPUs",
        meaning="the node has GPUs that Slurm does not know of: it hands them to nobody, and keeps nobody off them",
        fix="On the node: slurmd -G; nvidia-smi -L. Gres=gpu:N on its NodeName line, AutoDetect=nvml in gres.conf; "
        "restart slurmctld and its slurmd, then: sinfo -o '%N %G'",
    ),
    Rule(
        metric="gpus_below_expected",
        evidence_facts=("configured", "gres"),
        expect="== 0 GPUs",
        applies_if={"gpus_expected": "yes"},
        meaning="Slurm hands out fewer GPUs of this node than were promised",
        fix="sinfo -o '%N %G'; scontrol show node NODE; Gres=gpu:N on its NodeName line and gres.conf",
    ),
)


def measure(context: Context, _options: Options) -> Iterator[Observation]:
    """Raises NotApplicable off the cluster's nodes, SeatrialError where NVML is shown a part of the node."""
    node = _this_node(context, os.environ)
    found = discover.read(context.root)
    configured, seen, promised = node.gpus, len(found.gpus), context.expected_gpus or 0
    if not configured and not found.installed_gpus and not promised:
        raise NotApplicable(f"Slurm has no GPU on {node.name}, none was found there, and none was promised")
    gres = [f"{one.name}:{one.type}:{one.count}" if one.type else f"{one.name}:{one.count}" for one in node.gres]
    yield from facts(
        {
            "gres": ",".join(gres),
            "configured": f"{node.gpus} GPUs by Slurm",
            "seen": f"{seen} GPUs by NVML",
            "models": sorted({gpu.name or "unread" for gpu in found.gpus}),
            "nvml_unavailable": found.nvml_unavailable,
            "gpus_lost": [*found.lost, *found.permission_denied],
            "gpus_expected": "yes" if promised else "no",
        }
    )
    unmet = max(0, promised - configured)
    counts = {"gpus_configured": configured, "gpus_detected": seen, "gpus_below_expected": unmet}
    yield from metrics(METRICS, counts, context.node)
    if any(gpu.mig_mode for gpu in found.gpus):
        raise SeatrialError("MIG is on: Slurm counts slices, and NVML GPUs. Compare: slurmd -G; nvidia-smi -L")
    handed = _handed(configured, found, os.environ)
    differences = {"gpus_missing": max(0, handed - seen), "gpus_not_configured": max(0, seen - configured)}
    yield from metrics(METRICS, differences, context.node)
    if handed < configured:
        raise SeatrialError(
            f"this job holds {handed} of the node's {configured} GPUs, and NVML shows no more in it: whether the "
            f"others are there is not known. Ask for all: --gpus-per-node {configured}"
        )


def _this_node(context: Context, env: Mapping[str, str]) -> Node:
    """This machine as Slurm knows it. Inside a job it must: then what is missing is no reason to skip."""
    job, name = env.get("SLURM_JOB_ID"), env.get("SLURMD_NODENAME") or context.node.partition(".")[0]
    if not slurm.installed():
        if job:
            raise SeatrialError(
                f"in job {job}, and no Slurm client (sinfo) here to ask what {name} should have. Run first: command -v "
                "scontrol; in a container: bind Slurm's client, /etc/slurm and munge's socket into it"
            )
        raise NotApplicable("no Slurm client (sinfo) on this machine")
    node = slurm.node(name)
    if node:
        return node
    if job:
        raise SeatrialError(f"in job {job}, and Slurm has no node {name}. Run first: scontrol show node {name}")
    raise NotApplicable(f"{name} is not a node of Slurm's, and this is no job of Slurm's")


def _handed(configured: int, facts: GpuFacts, env: Mapping[str, str]) -> int:
    """How many GPUs NVML can be held to: in a job that holds a part of the node's it may be shown that part alone."""
    handed = int(env.get("SLURM_GPUS_ON_NODE") or 0)
    partial = "SLURM_JOB_ID" in env and not facts.nvml_unavailable and len(facts.gpus) <= handed < configured
    return handed if partial else configured


CHECK = Check(
    name="slurm.gres",
    title="The GPUs that Slurm hands out are there",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    metrics=METRICS,
    rules=RULES,
    measure=measure,
    limit_s=300,
)
