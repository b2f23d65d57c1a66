"""Compares a training that is killed, resumed and resharded with an uninterrupted one.

One more run loads a checkpoint with a flipped bit, another one gets a NaN gradient: both must stop with an error. All
these runs train a small model, since a small checkpoint shows the same faults. Two runs of a large model measure the
bandwidth of saves and loads.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.check import Check, Context, Needs, Seconds
from seatrial.checks.declare import Answers, absent, fact, metric, value
from seatrial.checks.host.filesystem_shared import read_volume
from seatrial.checks.training import _checkpoint_runs as _runs
from seatrial.checks.training import _results, _workload
from seatrial.checks.training._checkpoint_runs import (
    CHECKPOINTS,
    STRATEGIES,
    TIMED,
    TIMED_RESUMED,
    CheckpointPlan,
    checkpoint_plan,
)
from seatrial.model import Phase, Scope

if TYPE_CHECKING:
    from seatrial.train.variants import VariantError

RATE_DEFINITION = (
    "Bytes of all ranks over the time from the first start to the last end. Save: copy from the GPU, write with fsync, "
    "SHA-256 of each file, rename. Load: SHA-256 of each file, read. New files are in the page cache of the node that "
    "wrote them: loads and the SHA-256 of a save may not access the filesystem. See filesystem.speed for the "
    "filesystem alone."
)


class CheckpointOptions(_workload.WorkloadOptions):
    """Options of train.checkpoint."""

    config: str = Field(default="checkpoint", description="another config: name of a shipped config, or a .yaml file")
    rate_config: str = Field(default="checkpoint-rate", description="another config whose saves and loads are timed")
    rate_overrides: tuple[str, ...] = Field(default=(), description="KEY=VALUE for rate_config")
    limit_s: Seconds = Field(default=600.0, description="time limit for each of three starts, seconds")


def measure(context: Context, options: CheckpointOptions) -> Answers:
    """Yield the comparisons of the runs and the rates (GB/s) on rank 0; at the end the checkpoints are removed.

    Raises UsageError if a config does not meet the conditions of ``checkpoint_plan``.
    """
    from seatrial.train import train_config, variants

    facts = _results.device_facts(context)
    config = train_config.load(_workload.config_for_device(context, options.config), options.overrides)
    rate_config = train_config.load(_workload.config_for_device(context, options.rate_config), options.rate_overrides)
    folder = variants.create_folder(context.artifacts_dir, shared=True)
    plan = checkpoint_plan(config, rate_config, folder, context.world_size)
    is_rank_0 = context.rank == 0
    if is_rank_0:
        yield from facts
        own = {"saved_after": plan.saved_step, "ranks_of_one_step": plan.fewer_ranks or plan.ranks}
        yield fact("training", {**_results.training_fact(plan.config, plan.ranks), **own})
        yield fact("timed_training", _results.training_fact(plan.rate_config, plan.ranks))
        yield fact("filesystem", read_volume(context.root, str(plan.folder)).mount)
    try:
        for answer in _answers(context, plan, options.limit_s):
            if is_rank_0:
                yield answer
    finally:
        file_count, size_bytes = _remove_checkpoints(plan.folder) if is_rank_0 else (0, 0)
    if is_rank_0:
        removed = f"{file_count} checkpoint files, {size_bytes / 1e9:.2f} GB; manifests are kept"
        yield fact("removed_files", removed)
        for path in sorted(plan.folder.glob("*/metrics.json")):
            yield context.artifact(path, f"metrics of the run {path.parent.name}")


def _answers(context: Context, plan: CheckpointPlan, limit_s: float) -> Answers:
    """Start the child processes of all ranks three times; rank 0 yields the answers. All ranks must call this.

    1. An uninterrupted run, and the same run until it is killed.
    2. A run on fewer ranks, which resumes from the checkpoint that all ranks saved.
    3. Resumed runs, two runs that must fail, and the two runs whose saves and loads are timed.
    """
    from seatrial.train import checkpoint, variants

    start = partial(variants.start_variants, device=context.device, local_rank=context.local_rank, limit_s=limit_s)
    is_rank_0 = context.rank == 0
    resumed = _runs.resumed_runs(plan)
    bit_flip, nan = _runs.faulty_runs(plan)
    # All three start now, so that the later ones import torch while the first trains. Rates are measured in the third
    with (
        start(_runs.first_runs(plan), file_prefix=plan.folder / "start1", killed_rank=plan.ranks - 1) as first,
        _runs.run_on_fewer_ranks(plan, start) as second,
        start([*resumed, bit_flip, nan, *_runs.timed_runs(plan)], file_prefix=plan.folder / "start3") as third,
    ):
        context.progress("uninterrupted run; run that is killed while saving")
        first()
        if is_rank_0:
            yield from killed_run_state(plan)
            _runs.link_checkpoints(plan)
        if second:
            context.progress(f"{plan.fewer_ranks} of {plan.ranks} ranks")
            second()
        last_checkpoint = checkpoint.step_folder(plan.folder / "uninterrupted", plan.steps)
        flipped_file = _flip_a_bit(last_checkpoint) if is_rank_0 else ""
        context.progress("resumed runs; bit flip and NaN; bandwidth")
        errors = third()  # one per run
    bit_flip_error, nan_error = errors[len(resumed) : len(resumed) + 2]
    if is_rank_0:
        yield from compare_runs(plan)
        yield from fault_detection(plan, flipped_file, bit_flip_error, nan_error)
        yield from save_and_load_rates(plan)


def killed_run_state(plan: CheckpointPlan) -> Answers:
    """Checkpoints of the killed run before it is resumed, and their differences from the uninterrupted run."""
    from seatrial.train import checkpoint

    killed = plan.folder / "killed"
    found = [*sorted(path.name for path in (killed / CHECKPOINTS).iterdir())]
    kept = checkpoint.complete_checkpoints(killed) == [checkpoint.step_folder(killed, plan.saved_step)]
    yield value("checkpoints_kept_after_kill", kept, evidence={"found": found})
    yield from _file_differences("repeated", plan, plan.saved_step)


def compare_runs(plan: CheckpointPlan) -> Answers:
    """Differences of the resumed and resharded runs from the uninterrupted run."""
    from seatrial.train import compare

    reference = compare.read_steps(plan.folder / "uninterrupted", 0, plan.steps)
    resumed = compare.read_steps(plan.folder / "killed", plan.saved_step, plan.steps)
    differing = compare.differing_steps(resumed, reference[plan.saved_step :])
    yield value("resumed_steps_differing", len(differing), evidence=f"different in steps {differing}")
    yield from _file_differences("resumed", plan, plan.steps)
    if not plan.fewer_ranks:
        yield absent("reshard_difference.*", "one rank")
        return
    step_ranges = {  # run → its steps: after the first number, up to the second
        "fewer": (plan.saved_step, plan.handover_step),
        **dict.fromkeys(STRATEGIES, (plan.handover_step, plan.steps)),
    }
    for name, (after, last) in step_ranges.items():
        steps = compare.read_steps(plan.folder / name, after, last)
        difference = compare.max_relative_difference(steps, reference[after:last], "loss")
        evidence = f"step {difference.step}: {difference.value:.2e}"
        yield value(f"reshard_difference.{name}", difference.value, evidence=evidence)


def _file_differences(metric_prefix: str, plan: CheckpointPlan, step: int) -> Answers:
    """Number and names of the checkpoint files that differ at ``step`` between the killed and the uninterrupted run."""
    from seatrial.train import checkpoint

    reference, killed = (
        checkpoint.file_hashes(checkpoint.step_folder(plan.folder / name, step)) for name in ("uninterrupted", "killed")
    )
    names = sorted(name for name in reference.keys() | killed.keys() if reference.get(name) != killed.get(name))
    yield value(f"{metric_prefix}_files_differing", len(names), evidence=f"different: {', '.join(names)}")


def fault_detection(
    plan: CheckpointPlan, flipped_file: str, bit_flip: VariantError | None, nan: VariantError | None
) -> Answers:
    """Whether the first error names only the file with the flipped bit, the second only the rank with the NaN."""
    flip_detected = bit_flip is not None and bit_flip.damaged_files == (flipped_file,)
    evidence = bit_flip.message if bit_flip else "no error: the checkpoint was loaded"
    yield value("bit_flip_detected", flip_detected, evidence=evidence)
    nan_detected = nan is not None and nan.nonfinite_ranks == (plan.ranks - 1,)
    yield value("nan_detected", nan_detected, evidence=nan.message if nan else "no error: the training continued")


def save_and_load_rates(plan: CheckpointPlan) -> Answers:
    """Bandwidth of saves and loads in GB/s and blocked time of saves in seconds, from the timed runs' metrics.json."""
    reports = [json.loads((plan.folder / name / "metrics.json").read_text()) for name in (TIMED, TIMED_RESUMED)]
    timings = [timing for report in reports for timing in report["checkpoints"]]
    yield fact("checkpoint_bytes", timings[0]["bytes"])
    yield fact("rate_definition", RATE_DEFINITION)
    for kind, name in (("save", "save"), ("async save", "async_save"), ("load", "load")):
        kind_timings = [timing for timing in timings if timing["kind"] == kind]
        yield value(f"{name}_rate", [timing["bytes"] / timing["seconds"] / 1e9 for timing in kind_timings])
        if name != "load":
            blocked = [timing["blocked_s"] for timing in kind_timings]
            # asynchronous: the last save, since the first one also allocates the host memory that later ones reuse
            yield value(f"{name}_blocked", blocked[-1] if name == "async_save" else blocked)


def _flip_a_bit(folder: Path) -> str:
    """Flip one bit in the middle of the largest .distcp file and return its name."""
    path = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return path.name


def _remove_checkpoints(folder: Path) -> tuple[int, int]:
    """Remove the checkpoint files and links below ``folder``; return the number of files and their bytes."""
    for link in [*folder.glob(f"*/{CHECKPOINTS}/*"), *folder.glob(f"*/{CHECKPOINTS}")]:
        if link.is_symlink():
            link.unlink()
    files = list(folder.glob(f"*/{CHECKPOINTS}/*/*.distcp"))
    size = sum(path.stat().st_size for path in files)
    for path in files:
        path.unlink()
    return len(files), size


_REPORT_DEFECT = (
    "Compare torch's version on all nodes (host.inventory) and report this defect of seatrial with that version"
)
CHECK = Check(
    measure=measure,
    name="train.checkpoint",
    title="Checkpoint save, resume and resharding; bit flip and NaN detection",
    phase=Phase.DISTRIBUTED,
    needs=Needs(shared_folder=True),
    scope=Scope.CLUSTER,
    limit_s=2400.0,  # three starts of up to 600 s, and saves on a slow filesystem
    options=CheckpointOptions,
    child_tasks=("variants",) * 3,
    declared=(
        metric(
            "repeated_files_differing",
            "== 0 count",
            "The same training on the same ranks, started twice, saved different bits.",
            "Run train.parity (repeated_steps_differing), then device.digests and device.burn: they name a GPU with "
            "intermittent errors",
        ),
        metric(
            "checkpoints_kept_after_kill",
            "yes",
            "A job killed while saving must leave the previous checkpoint complete and the new one incomplete.",
            "Check filesystem.shared (rename_failures): a rename completes a checkpoint after all files are written",
        ),
        metric(
            "resumed_steps_differing",
            "== 0 count",
            "The resumed run differs from the uninterrupted run: state is lost or read back wrongly.",
            "Compare steps.jsonl of the runs uninterrupted and killed (artifacts). Different from the first step: "
            f"weights or data. Different later: Adam's state. {_REPORT_DEFECT}",
        ),
        metric(
            "resumed_files_differing",
            "== 0 count",
            "The last checkpoint of the resumed run (asynchronous save) differs from the uninterrupted run.",
            f"If the losses are the same, check asynchronous saving and the filesystem. {_REPORT_DEFECT}",
        ),
        *(
            metric(
                f"reshard_difference.{name}",
                "< 1e-5 ratio",  # as in train.parity
                f"Training resumed from the checkpoint, read by {readers}, gives different losses.",
                f"If train.parity passes, a shard is read wrongly. {_REPORT_DEFECT}",
            )
            for name, readers in (
                ("fewer", "fewer ranks"),
                ("fsdp2", "all ranks (FSDP2) after fewer ranks saved it"),
                ("ddp", "all ranks unsharded (DDP)"),
            )
        ),
        metric(
            "bit_flip_detected",
            "yes",
            "A checkpoint file had a flipped bit; the training must stop with an error that names the file.",
            "Report this defect of seatrial with the version. Until then keep SHA-256 sums of checkpoints (sha256sum)",
        ),
        metric(
            "nan_detected",
            "yes",
            "One rank's gradient was NaN; the training must stop with an error that names only that rank.",
            "Check collectives.all_reduce: loss and gradient norm of all ranks go through it. If that check passes, "
            "report this defect of seatrial with the version",
        ),
        *(
            metric(
                f"{kind}_rate",
                # a checkpoint of the 7B model of train.fsdp has 87 GB: at this rate a save each hour takes 10 % of the
                # time. Local disks of virtual machines reach 0.6 to 3.4 GB/s (18 runs, docs/results)
                ">= 0.24 GB/s",
                f"Bytes of all ranks ÷ duration of {operation}: it takes so long that GPUs mostly wait for it.",
                "Compare filesystem.speed. The fact filesystem names the filesystem; on the nodes: nfsstat -m, df -h, "
                "dmesg",
                when="device == cuda and rate_config is the default and rate_overrides is the default",
                speed=True,
            )
            for kind, operation in (("async_save", "an asynchronous save"), ("load", "a load"), ("save", "a save"))
        ),
        metric("async_save_blocked", unit="s", meaning="time that an asynchronous save stops the training", speed=True),
        metric("save_blocked", unit="s", meaning="time that a synchronous save stops the training", speed=True),
    ),
)
