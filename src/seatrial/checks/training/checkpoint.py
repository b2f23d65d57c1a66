"""Compares a training that is killed, resumed and resharded with an uninterrupted one.

Also injects a bit flip into a checkpoint and a NaN gradient: both must stop the training with an error. All these runs
train a small model, since a small checkpoint shows the same faults. Bandwidth is measured with a large one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import Field

from seatrial.checks.base import Check, Context, Options, RuleFact
from seatrial.checks.host.filesystem_shared import read_volume
from seatrial.checks.training import _results, _workload
from seatrial.model import CLUSTER, Artifact, Fact, Metric, Observation, Phase, Rule, Scope, UsageError
from seatrial.train import compare, train_config
from seatrial.train.train_config import TrainConfig

if TYPE_CHECKING:
    from seatrial.train.variants import Variant

_CHECKPOINTS, STRATEGIES = "checkpoints", ("fsdp2", "ddp")
TIMED, TIMED_RESUMED = "timed", "timed-resumed"  # the runs of rate_config
METRICS = {
    "resumed_steps_differing": "count",
    "resumed_files_differing": "count",
    "repeated_files_differing": "count",
    "checkpoints_kept_after_kill": "bool",
    "bit_flip_detected": "bool",
    "nan_detected": "bool",
    "reshard_difference.*": "ratio",
    "save_rate": "GB/s",
    "async_save_rate": "GB/s",
    "load_rate": "GB/s",
    "save_blocked": "s",
    "async_save_blocked": "s",
}
RATE_DEFINITION = (
    "Bytes of all ranks over the time from the first start to the last end. Save: copy from the GPU, write with fsync, "
    "SHA-256 of each file, rename. Load: SHA-256 of each file, read. New files are in the page cache of the node that "
    "wrote them: loads and the SHA-256 of a save may not access the filesystem. See filesystem.speed for the "
    "filesystem alone."
)


class CheckpointOptions(Options):
    """Options of train.checkpoint. The last value of a key in ``overrides`` wins."""

    config: str = Field(default="checkpoint", description="another config: name of a shipped config, or a .yaml file")
    overrides: tuple[str, ...] = Field(default=(), description="KEY=VALUE, as for seatrial train --set")
    rate_config: str = Field(
        default="checkpoint-rate", description="another config of which the saves and loads are timed"
    )
    rate_overrides: tuple[str, ...] = Field(default=(), description="KEY=VALUE for rate_config")
    limit_s: float = Field(
        default=600.0, gt=0, allow_inf_nan=False, description="time limit for each of three starts, seconds"
    )


@dataclass(frozen=True)
class CheckpointPlan:
    """The reference run takes ``steps`` steps and saves at ``saved_step``, half of them, and at the end.

    ``rate_config``: the config whose saves and loads are timed; it saves after every step.
    """

    config: TrainConfig
    rate_config: TrainConfig
    folder: Path
    ranks: int

    @property
    def steps(self) -> int:
        return self.config.max_steps

    @property
    def saved_step(self) -> int:
        return self.config.checkpoint.every

    @property
    def fewer_ranks(self) -> int:
        """The largest proper divisor of the number of ranks; 0 with one rank."""
        return max((count for count in range(1, self.ranks) if self.ranks % count == 0), default=0)

    @property
    def handover_step(self) -> int:
        """The last step that the fewer ranks train; then all ranks resume."""
        return self.saved_step + 1

    def run_folder(self, name: str) -> Path:
        return self.folder / name

    def run_config(
        self, steps: int, every: int, *, ranks: int = 0, strategy: str = "fsdp2", **checkpoint: bool
    ) -> TrainConfig:
        """The config up to step ``steps``, saving every ``every`` steps, with the same global batch on ``ranks`` ranks.

        ``checkpoint``: more fields of the config's ``checkpoint``.
        """
        config = self.config
        changes = {
            "max_steps": steps,
            "checkpoint": config.checkpoint.model_copy(update={"every": every, "keep": self.steps, **checkpoint}),
            "parallel": config.parallel.model_copy(update={"strategy": strategy}),
            "grad_accum": config.grad_accum * self.ranks // (ranks or self.ranks),
        }
        return config.model_copy(update=changes)


def measure(context: Context, options: CheckpointOptions) -> Iterator[Observation]:
    from seatrial.train import variants

    facts = _results.device_facts(context)
    config = train_config.load(_workload.config_for_device(context, options.config), options.overrides)
    rate_config = train_config.load(_workload.config_for_device(context, options.rate_config), options.rate_overrides)
    folder = variants.create_folder(context.artifacts_dir, shared=True)
    plan = checkpoint_plan(config, rate_config, folder, context.world_size)
    is_rank0 = context.rank == 0
    if is_rank0:
        yield from facts
        yield Fact(name="training", value=_training_fact(plan))
        yield Fact(name="timed_model", value=_model_text(plan.rate_config))
        yield Fact(name="filesystem", value=read_volume(context.root, str(plan.folder)).mount)
    try:
        for observation in _observe(context, plan, options.limit_s):
            if is_rank0:
                yield observation
    finally:
        files, size = _remove_checkpoints(plan.folder) if is_rank0 else (0, 0)
    if is_rank0:
        yield Fact(name="removed_files", value=f"{files} checkpoint files, {size / 1e9:.2f} GB; manifests are kept")
        for path in sorted(plan.folder.glob("*/metrics.json")):
            yield Artifact(path=str(path.relative_to(context.run_dir)), title=f"metrics of the run {path.parent.name}")


def checkpoint_plan(config: TrainConfig, rate_config: TrainConfig, folder: Path, ranks: int) -> CheckpointPlan:
    """The plan for two configs in ``folder``.

    Raises UsageError if ``config`` does not save at half of its steps, or ``rate_config`` not at every step.
    """
    if config.stack != "native" or 2 * config.checkpoint.every != config.max_steps or config.max_steps < 6:
        raise UsageError(
            f"train.checkpoint: stack {config.stack}, max_steps {config.max_steps}, "
            f"checkpoint.every {config.checkpoint.every}; "
            "expected stack native, max_steps >= 6, checkpoint.every = max_steps / 2"
        )
    if rate_config.stack != "native" or rate_config.checkpoint.every != 1 or rate_config.max_steps % 2:
        raise UsageError(
            f"train.checkpoint, rate_config: stack {rate_config.stack}, max_steps {rate_config.max_steps}, "
            f"checkpoint.every {rate_config.checkpoint.every}; "
            "expected stack native, an even max_steps, checkpoint.every = 1"
        )
    return CheckpointPlan(
        _with_data(config, ranks, folder / "data"), _with_data(rate_config, ranks, folder / "data-rate"), folder, ranks
    )


def _with_data(config: TrainConfig, ranks: int, cache: Path) -> TrainConfig:
    """``config`` with its data in ``cache``: generated data is as long as the training."""
    samples = config.data.samples or config.max_steps * config.bsz * config.grad_accum * ranks
    data = config.data.model_copy(update={"samples": samples, "cache": str(cache)})
    return config.model_copy(update={"data": data})


def _observe(context: Context, plan: CheckpointPlan, limit_s: float) -> Iterator[Observation]:
    """Start the ranks three times and yield observations on rank 0. All ranks must call this.

    1. An uninterrupted run, and the same run until it is killed.
    2. A run on fewer ranks from the checkpoint of all ranks.
    3. Resumed runs, two runs that must fail, and the two runs whose saves and loads are timed.
    """
    from seatrial.train import variants

    placement = variants.RankPlacement(context.device, context.local_rank, limit_s)
    is_rank0 = context.rank == 0
    context.progress("uninterrupted run; run that is killed while saving")
    variants.run_variants(
        _uninterrupted_and_killed(plan), placement, plan.run_folder("start1"), killed_rank=plan.ranks - 1
    )
    if is_rank0:
        yield from killed_run_state(plan)
        _link_checkpoints(plan)
    if plan.fewer_ranks:
        context.progress(f"{plan.fewer_ranks} of {plan.ranks} ranks")
        variants.run_variants(
            _on_fewer_ranks(plan), placement, plan.run_folder("start2"), groups=[range(plan.fewer_ranks)]
        )
    flipped_file = (
        _flip_a_bit(plan.run_folder("uninterrupted") / _CHECKPOINTS / _checkpoint_name(plan.steps)) if is_rank0 else ""
    )
    context.progress("resumed runs; bit flip and NaN; bandwidth")
    resumed, (bit_flip, nan) = _resumed(plan), _faulty(plan)
    messages = variants.run_variants([*resumed, bit_flip, nan, *_timed(plan)], placement, plan.run_folder("start3"))
    bit_flip_message, nan_message = messages[len(resumed) : len(resumed) + 2]
    if is_rank0:
        yield from compare_runs(plan)
        yield from fault_detection(plan, flipped_file, bit_flip_message, nan_message)
        yield from save_and_load_rates(plan)


def _uninterrupted_and_killed(plan: CheckpointPlan) -> list[Variant]:
    from seatrial.train.variants import InjectedFault, Variant

    config = plan.run_config(plan.steps, plan.saved_step)
    kill = InjectedFault(kind="kill_in_save", rank=plan.ranks - 1, step=plan.steps)
    return [
        Variant(settings=config, out=plan.run_folder("uninterrupted")),
        Variant(settings=config, out=plan.run_folder("killed"), fault=kill),
    ]


def _on_fewer_ranks(plan: CheckpointPlan) -> list[Variant]:
    from seatrial.train.variants import Variant

    config = plan.run_config(plan.handover_step, plan.handover_step, ranks=plan.fewer_ranks, resume=True)
    return [Variant(settings=config, out=plan.run_folder("fewer"))]


def _resumed(plan: CheckpointPlan) -> list[Variant]:
    from seatrial.train.variants import Variant

    resumed = plan.run_config(plan.steps, plan.handover_step, resume=True, asynchronous=True)
    resharded = [
        plan.run_config(plan.steps, 0, strategy=strategy, resume=True) for strategy in STRATEGIES if plan.fewer_ranks
    ]
    return [
        Variant(settings=resumed, out=plan.run_folder("killed")),
        *(Variant(settings=config, out=plan.run_folder(config.parallel.strategy)) for config in resharded),
    ]


def _faulty(plan: CheckpointPlan) -> tuple[Variant, Variant]:
    """A run that resumes from the checkpoint with a flipped bit, and a run with a NaN gradient."""
    from seatrial.train.variants import InjectedFault, Variant

    from_flipped_file = plan.run_config(plan.steps + 1, 0, resume=True)
    nan = InjectedFault(kind="nan", rank=plan.ranks - 1, step=plan.saved_step)
    return (
        Variant(settings=from_flipped_file, out=plan.run_folder("uninterrupted"), expect_error=True),
        Variant(settings=plan.run_config(plan.steps, 0), out=plan.run_folder("nan"), fault=nan, expect_error=True),
    )


def _timed(plan: CheckpointPlan) -> list[Variant]:
    """A run that saves after every step, and its continuation, which loads once and saves asynchronously.

    Two asynchronous saves at least: the first one allocates the host memory.
    """
    from seatrial.train.variants import Variant

    config = plan.rate_config
    resumed = config.checkpoint.model_copy(update={"resume": True, "asynchronous": True})
    configs = {
        TIMED: config.model_copy(update={"max_steps": config.max_steps // 2}),
        TIMED_RESUMED: config.model_copy(update={"checkpoint": resumed}),
    }
    return [Variant(settings=settings, out=plan.run_folder(name)) for name, settings in configs.items()]


def killed_run_state(plan: CheckpointPlan) -> Iterator[Observation]:
    """Checkpoints of the killed run before it is resumed, and their differences from the uninterrupted run."""
    from seatrial.train import checkpoint

    entries = sorted(path.name for path in (plan.run_folder("killed") / _CHECKPOINTS).iterdir())
    complete = [path.name for path in checkpoint.complete_checkpoints(plan.run_folder("killed"))]
    yield Fact(name="checkpoints_after_kill", value=entries)
    yield _metric("checkpoints_kept_after_kill", complete == [_checkpoint_name(plan.saved_step)])
    yield from _file_differences("repeated", plan, plan.saved_step)


def compare_runs(plan: CheckpointPlan) -> Iterator[Observation]:
    """Differences of the resumed and resharded runs from the uninterrupted run."""
    reference = compare.read_steps(plan.run_folder("uninterrupted"), 0, plan.steps)
    resumed = compare.read_steps(plan.run_folder("killed"), plan.saved_step, plan.steps)
    differing = compare.differing_steps(resumed, reference[plan.saved_step :])
    yield _metric("resumed_steps_differing", len(differing))
    yield Fact(name="resumed_steps", value=f"different in steps {differing}" if differing else "bitwise identical")
    yield from _file_differences("resumed", plan, plan.steps)
    yield Fact(name="resharded", value="yes" if plan.fewer_ranks else "no: one rank")
    if plan.fewer_ranks:
        step_ranges = {
            "fewer": (plan.saved_step, plan.handover_step),
            **dict.fromkeys(STRATEGIES, (plan.handover_step, plan.steps)),
        }
        for name, (after, last) in step_ranges.items():
            steps = compare.read_steps(plan.run_folder(name), after, last)
            difference = compare.max_relative_difference(steps, reference[after:last], "loss")
            yield _metric(f"reshard_difference.{name}", difference.value)
            yield Fact(name=f"max_difference.{name}", value=f"step {difference.step}: {difference.value:.2e}")


def _file_differences(metric_prefix: str, plan: CheckpointPlan, step: int) -> Iterator[Observation]:
    """Number and names of the files of weights and Adam state that differ at ``step``."""
    from seatrial.train import checkpoint

    reference, killed = (
        checkpoint.file_hashes(checkpoint.step_folder(plan.run_folder(name), step))
        for name in ("uninterrupted", "killed")
    )
    names = sorted(name for name in reference.keys() | killed.keys() if reference.get(name) != killed.get(name))
    yield _metric(f"{metric_prefix}_files_differing", len(names))
    value = f"different: {names}" if names else f"{len(reference)} files bitwise identical"
    yield Fact(name=f"{metric_prefix}_files", value=value)


def fault_detection(
    plan: CheckpointPlan, flipped_file: str, bit_flip_message: str, nan_message: str
) -> Iterator[Observation]:
    """Whether the error messages name the file with the flipped bit and only the rank with the NaN gradient."""
    yield Fact(name="bit_flip_message", value=bit_flip_message or "none: the checkpoint was loaded")
    yield _metric("bit_flip_detected", flipped_file in bit_flip_message and "SHA-256" in bit_flip_message)
    yield Fact(name="nan_message", value=nan_message or "none: the training continued")
    yield _metric("nan_detected", re.findall(r"rank (\d+) \(", nan_message) == [str(plan.ranks - 1)])


def save_and_load_rates(plan: CheckpointPlan) -> Iterator[Observation]:
    """Bandwidth of saves and loads in GB/s and blocked time of saves in seconds, from the timed runs' metrics.json."""
    timings = [timing for name in (TIMED, TIMED_RESUMED) for timing in _read_timings(plan.run_folder(name))]
    yield Fact(name="checkpoint_bytes", value=timings[0]["bytes"])
    yield Fact(name="rate_definition", value=RATE_DEFINITION)
    for kind, name in (("save", "save"), ("async save", "async_save"), ("load", "load")):
        kind_timings = [timing for timing in timings if timing["kind"] == kind]
        rates = tuple(timing["mb_per_s"] / 1e3 for timing in kind_timings)
        yield _metric(f"{name}_rate", median(rates), rates)
        if name != "load":
            blocked = tuple(timing["blocked_s"] for timing in kind_timings)
            # the first asynchronous save allocates the host memory that later ones reuse
            yield _metric(f"{name}_blocked", blocked[-1] if name == "async_save" else median(blocked), blocked)


def _read_timings(out: Path) -> list[dict[str, Any]]:
    timings: list[dict[str, Any]] = json.loads((out / "metrics.json").read_text(encoding="utf-8"))["checkpoints"]
    return timings


def _link_checkpoints(plan: CheckpointPlan) -> None:
    """Link the checkpoint of all ranks for the fewer ranks, and the checkpoint of the fewer ranks for all ranks.

    Also the checkpoints of the timed run, for its continuation: each run has its own metrics.json.
    """
    saved = Path(_CHECKPOINTS, _checkpoint_name(plan.saved_step))
    links = {
        plan.run_folder("fewer") / saved: plan.run_folder("uninterrupted") / saved,
        plan.run_folder(TIMED_RESUMED) / _CHECKPOINTS: plan.run_folder(TIMED) / _CHECKPOINTS,
    }
    links |= {
        plan.run_folder(strategy) / _CHECKPOINTS: plan.run_folder("fewer") / _CHECKPOINTS for strategy in STRATEGIES
    }
    for link, target in links.items():
        link.parent.mkdir(parents=True)
        link.symlink_to(target)


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
    """Remove the checkpoint files and links below ``folder``; the number of files and their bytes."""
    for link in [*folder.glob(f"*/{_CHECKPOINTS}/*"), *folder.glob(f"*/{_CHECKPOINTS}")]:
        if link.is_symlink():
            link.unlink()
    files = list(folder.glob(f"*/{_CHECKPOINTS}/*/*.distcp"))
    size = sum(path.stat().st_size for path in files)
    for path in files:
        path.unlink()
    return len(files), size


def _checkpoint_name(step: int) -> str:
    return f"step-{step:08}"


def _training_fact(plan: CheckpointPlan) -> dict[str, Any]:
    return {
        "model": _model_text(plan.config),
        "steps": f"{plan.steps}, saved after {plan.saved_step}",
        "ranks": f"{plan.ranks}; one step on {plan.fewer_ranks or plan.ranks}",
        "precision": "bf16" if plan.config.bf16 else "fp32 without TF32",
    }


def _model_text(config: TrainConfig) -> str:
    architecture = config.architecture()
    return f"{config.model.name}, {architecture.parameters:,} parameters, vocabulary {architecture.vocab_size}"


def _metric(name: str, value: float, samples: tuple[float, ...] = ()) -> Metric:
    unit = METRICS.get(name) or METRICS[f"{name.partition('.')[0]}.*"]
    return Metric(name=name, value=float(value), unit=unit, subject=CLUSTER, samples=samples)


# A checkpoint of the 7B model of train.fsdp has 87 GB: at this rate it takes half an hour
_MIN_RATE = ">= 0.05 GB/s"
_REPORT = "Compare torch's version on all nodes (host.inventory) and report this defect of seatrial with that version"
CHECK = Check(
    name="train.checkpoint",
    title="Checkpoint save, resume and resharding; bit flip and NaN detection",
    phase=Phase.DISTRIBUTED,
    scope=Scope.CLUSTER,
    metrics=METRICS,
    rules=(
        Rule(
            metric="repeated_files_differing",
            evidence_facts=("repeated_files",),
            expect="== 0",
            meaning="The same training on the same ranks, started twice, saved different bits.",
            fix="Run train.parity (repeated_steps_differing), then device.digests and device.burn: they name a GPU "
            "with intermittent errors",
        ),
        Rule(
            metric="checkpoints_kept_after_kill",
            evidence_facts=("checkpoints_after_kill",),
            expect="== 1 bool",
            meaning="A job killed while saving must leave the previous checkpoint complete and the new one incomplete.",
            fix="Check filesystem.shared (rename_failures): a rename completes a checkpoint after all files are "
            "written",
        ),
        Rule(
            metric="resumed_steps_differing",
            evidence_facts=("resumed_steps",),
            expect="== 0",
            meaning="The resumed run differs from the uninterrupted run: state is lost or read back wrongly.",
            fix="Compare steps.jsonl of the runs uninterrupted and killed (artifacts). Different from the first step: "
            f"weights or data. Different later: Adam's state. {_REPORT}",
        ),
        Rule(
            metric="resumed_files_differing",
            evidence_facts=("resumed_files",),
            expect="== 0",
            meaning="The last checkpoint of the resumed run (asynchronous save) differs from the uninterrupted run.",
            fix=f"If the losses are the same, check asynchronous saving and the filesystem. {_REPORT}",
        ),
        *(
            Rule(
                metric=f"reshard_difference.{name}",
                evidence_facts=(f"max_difference.{name}",),
                applies_if={"resharded": "yes"},
                expect="< 1e-5",  # as in train.parity
                meaning=f"Training resumed from the checkpoint, read by {readers}, gives different losses.",
                fix=f"If train.parity passes, a shard is read wrongly. {_REPORT}",
            )
            for name, readers in (
                ("fewer", "fewer ranks"),
                ("fsdp2", "all ranks (FSDP2) after fewer ranks saved it"),
                ("ddp", "all ranks unsharded (DDP)"),
            )
        ),
        Rule(
            metric="bit_flip_detected",
            evidence_facts=("bit_flip_message",),
            expect="== 1 bool",
            meaning="A checkpoint file had a flipped bit; the training must stop with an error that names the file.",
            fix="Report this defect of seatrial with the version. Until then keep SHA-256 sums of checkpoints "
            "(sha256sum)",
        ),
        Rule(
            metric="nan_detected",
            evidence_facts=("nan_message",),
            expect="== 1 bool",
            meaning="One rank's gradient was NaN; the training must stop with an error that names only that rank.",
            fix="Check collectives.all_reduce: loss and gradient norm of all ranks go through it. If it passes, report "
            "this defect of seatrial with the version",
        ),
        *(
            Rule(
                metric=metric,
                expect=_MIN_RATE,
                applies_if={"device": "cuda"},
                default_options=("rate_config", "rate_overrides"),
                meaning="Saving or loading a model takes so long that GPUs mostly wait for checkpoints.",
                fix="Compare filesystem.speed. The fact filesystem names the filesystem; on the nodes: nfsstat -m, "
                "df -h, dmesg",
            )
            for metric in ("save_rate", "async_save_rate", "load_rate")
        ),
    ),
    rule_facts={"resharded": RuleFact(), "device": RuleFact("cuda|cpu")},
    measure=measure,
    limit_s=2400.0,  # three starts of up to 600 s, and saves on a slow filesystem
    options=CheckpointOptions,
    performance_metrics=("*_rate", "*_blocked"),
)
