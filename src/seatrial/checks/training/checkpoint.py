"""Is a training that was saved, killed, resumed or spread over other ranks the one it would have been without?

And is what no training should go on from refused: a checkpoint with a flipped bit, a gradient that is no number?
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

from seatrial.checks.base import Check, Context, Options
from seatrial.checks.host.filesystem_shared import read_volume
from seatrial.checks.training import _results as workload_figures
from seatrial.checks.training import _workload
from seatrial.model import CLUSTER, Artifact, Fact, Metric, Observation, Phase, Rule, Scope, UsageError
from seatrial.train import compare, train_config
from seatrial.train.train_config import TrainConfig

if TYPE_CHECKING:
    from seatrial.train.variants import Variant

_CHECKPOINTS, STRATEGIES = "checkpoints", ("fsdp2", "ddp")
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
RATES = (
    "Bytes of all ranks over the time from first to last: of a save, the copy from the GPU, writing with fsync, "
    "SHA-256 of each file and the rename; of a load, SHA-256 of each file, then reading. What was just written is in "
    "the page cache of the node that wrote it: loads, and the digests of a save, may not touch the filesystem. See "
    "filesystem.speed for the filesystem alone."
)


class CheckpointOptions(Options):
    """``overrides`` of the config, in rising priority; ``limit_s`` for each of three starts, in seconds."""

    config: str = Field(default="checkpoint", description="of another training: the name of one that ships, or a .yaml")
    overrides: tuple[str, ...] = Field(default=(), description="KEY=VALUE, as of seatrial train --set")
    limit_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)


@dataclass(frozen=True)
class CheckpointPlan:
    """The run to compare with takes ``steps``, and saves at half of them, ``saved``, and at the end."""

    config: TrainConfig
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
        """The largest number of ranks that shares their batch evenly; 0 where there is only one rank."""
        return max((count for count in range(1, self.ranks) if self.ranks % count == 0), default=0)

    @property
    def handover_step(self) -> int:
        """Up to which step fewer ranks train, until all of them go on."""
        return self.saved_step + 1

    def run_folder(self, name: str) -> Path:
        return self.folder / name

    def run_config(
        self, steps: int, every: int, *, ranks: int = 0, strategy: str = "fsdp2", **kept: bool
    ) -> TrainConfig:
        """To step ``steps``, on ``ranks`` of our global batch, saving ``every`` so many; ``kept`` as of Checkpoint."""
        wanted = self.config
        saves = wanted.checkpoint.model_copy(update={"every": every, "keep": self.steps, **kept})
        parallel = wanted.parallel.model_copy(update={"strategy": strategy})
        accumulated = wanted.grad_accum * self.ranks // (ranks or self.ranks)
        changes = {"max_steps": steps, "checkpoint": saves, "parallel": parallel, "grad_accum": accumulated}
        return wanted.model_copy(update=changes)


def measure(context: Context, options: CheckpointOptions) -> Iterator[Observation]:
    from seatrial.train import variants

    facts = workload_figures.device_facts(context)
    wanted = train_config.load(_workload.config_for_device(context, options.config), options.overrides)
    plan = checkpoint_plan(wanted, variants.create_folder(context.artifacts_dir, shared=True), context.world_size)
    leads = context.rank == 0
    if leads:
        yield from facts
        yield Fact(name="training", value=_described(plan))
        yield Fact(name="filesystem", value=read_volume(context.root, str(plan.folder)).mount)
    try:
        for observation in _observe(context, plan, options.limit_s):
            if leads:
                yield observation
    finally:
        files, size = _remove(plan.folder) if leads else (0, 0)
    if leads:
        yield Fact(name="removed", value=f"{files} files of checkpoints, {size / 1e9:.2f} GB; manifests were kept")
        for path in sorted(plan.folder.glob("*/metrics.json")):
            yield Artifact(path=str(path.relative_to(context.run_dir)), title=f"metrics of the run {path.parent.name}")


def checkpoint_plan(wanted: TrainConfig, folder: Path, ranks: int) -> CheckpointPlan:
    """Raises UsageError for a config that is not saved when half of its steps are taken, with two before and behind."""
    if wanted.stack != "native" or 2 * wanted.checkpoint.every != wanted.max_steps or wanted.max_steps < 6:
        raise UsageError("train.checkpoint needs stack native, max_steps of 6 or more, checkpoint.every half of them")
    samples = wanted.data.samples or wanted.max_steps * wanted.bsz * wanted.grad_accum * ranks
    data = wanted.data.model_copy(update={"samples": samples, "cache": str(folder / "data")})
    return CheckpointPlan(wanted.model_copy(update={"data": data}), folder, ranks)


def _observe(context: Context, plan: CheckpointPlan, limit_s: float) -> Iterator[Observation]:
    """Three starts: a run to its end, and again until it is killed; fewer ranks; what goes on, and what is refused.

    All ranks go through it together; what the first one says of the files counts.
    """
    from seatrial.train import variants

    seat, leads = variants.RankPlacement(context.device, context.local_rank, limit_s), context.rank == 0
    context.progress("a run to its end; the same again, killed while it saves")
    variants.run_variants(_whole_and_killed(plan), seat, plan.run_folder("start1"), killed_rank=plan.ranks - 1)
    if leads:
        yield from killed_run_state(plan)
        _link_checkpoints(plan)
    if plan.fewer_ranks:
        context.progress(f"{plan.fewer_ranks} of {plan.ranks} ranks")
        variants.run_variants(_on_fewer(plan), seat, plan.run_folder("start2"), groups=[range(plan.fewer_ranks)])
    damaged = _flip_a_bit(plan.run_folder("whole") / _CHECKPOINTS / _name(plan.steps)) if leads else ""
    context.progress("what goes on, and what is refused")
    *_, of_bit, of_nan = variants.run_variants(_resumed_and_refused(plan), seat, plan.run_folder("start3"))
    if leads:
        yield from compare_runs(plan)
        yield from fault_detection(plan, damaged, of_bit, of_nan)
        yield from save_and_load_rates(plan)


def _whole_and_killed(plan: CheckpointPlan) -> list[Variant]:
    from seatrial.train.variants import InjectedFault, Variant

    run, fault = (
        plan.run_config(plan.steps, plan.saved_step),
        InjectedFault(kind="kill_in_save", rank=plan.ranks - 1, step=plan.steps),
    )
    return [
        Variant(settings=run, out=plan.run_folder("whole")),
        Variant(settings=run, out=plan.run_folder("killed"), fault=fault),
    ]


def _on_fewer(plan: CheckpointPlan) -> list[Variant]:
    from seatrial.train.variants import Variant

    run = plan.run_config(plan.handover_step, plan.handover_step, ranks=plan.fewer_ranks, resume=True)
    return [Variant(settings=run, out=plan.run_folder("fewer"))]


def _resumed_and_refused(plan: CheckpointPlan) -> list[Variant]:
    from seatrial.train.variants import InjectedFault, Variant

    resumed = plan.run_config(
        plan.steps, plan.handover_step, resume=True, asynchronous=True
    )  # two saves: the first takes the memory
    spread = [
        plan.run_config(plan.steps, 0, strategy=strategy, resume=True) for strategy in STRATEGIES if plan.fewer_ranks
    ]
    nan = InjectedFault(kind="nan", rank=plan.ranks - 1, step=plan.saved_step)
    return [
        Variant(settings=resumed, out=plan.run_folder("killed")),
        *(Variant(settings=run, out=plan.run_folder(run.parallel.strategy)) for run in spread),
        Variant(
            settings=plan.run_config(plan.steps + 1, 0, resume=True), out=plan.run_folder("whole"), expect_error=True
        ),
        Variant(settings=plan.run_config(plan.steps, 0), out=plan.run_folder("nan"), fault=nan, expect_error=True),
    ]


def killed_run_state(plan: CheckpointPlan) -> Iterator[Observation]:
    """What the killed run left, before anything goes on from it; and whether its bits are those of the whole one."""
    from seatrial.train import checkpoint

    left = sorted(path.name for path in (plan.run_folder("killed") / _CHECKPOINTS).iterdir())
    whole = [path.name for path in checkpoint.complete_checkpoints(plan.run_folder("killed"))]
    yield Fact(name="checkpoints_after_kill", value=left)
    yield _metric("checkpoints_kept_after_kill", whole == [_name(plan.saved_step)])
    yield from _differing("repeated", plan, plan.saved_step)


def compare_runs(plan: CheckpointPlan) -> Iterator[Observation]:
    """What went on from a checkpoint, beside the run that was never interrupted."""
    whole = compare.read_steps(plan.run_folder("whole"), 0, plan.steps)
    resumed = compare.read_steps(plan.run_folder("killed"), plan.saved_step, plan.steps)
    steps = compare.differing_steps(resumed, whole[plan.saved_step :])
    yield _metric("resumed_steps_differing", len(steps))
    yield Fact(name="resumed_steps", value=f"not the same: {steps}" if steps else "the same bits in each")
    yield from _differing("resumed", plan, plan.steps)
    yield Fact(name="resharded", value="yes" if plan.fewer_ranks else "no: there is one rank")
    if plan.fewer_ranks:
        parts = {
            "fewer": (plan.saved_step, plan.handover_step),
            **dict.fromkeys(STRATEGIES, (plan.handover_step, plan.steps)),
        }
        for name, (after, last) in parts.items():
            gap = compare.max_relative_difference(
                compare.read_steps(plan.run_folder(name), after, last), whole[after:last], "loss"
            )
            yield _metric(f"reshard_difference.{name}", gap.value)
            yield Fact(name=f"widest.{name}", value=f"step {gap.step}: {gap.value:.2e}")


def _differing(what: str, plan: CheckpointPlan, step: int) -> Iterator[Observation]:
    """How many files of weights and moments the two runs wrote otherwise at ``step``."""
    from seatrial.train import checkpoint

    whole, other = (
        checkpoint.file_hashes(checkpoint.step_folder(plan.run_folder(name), step)) for name in ("whole", "killed")
    )
    names = sorted(name for name in whole.keys() | other.keys() if whole.get(name) != other.get(name))
    yield _metric(f"{what}_files_differing", len(names))
    yield Fact(name=f"{what}_files", value=f"not the same: {names}" if names else f"the same bits in {len(whole)}")


def fault_detection(plan: CheckpointPlan, damaged: str, of_bit: str, of_nan: str) -> Iterator[Observation]:
    """What was said of the file that a bit was flipped in, and of the rank whose gradient was no number. Pure."""
    yield Fact(name="bit_flip_message", value=of_bit or "nothing: it was taken for whole")
    yield _metric("bit_flip_detected", f"{damaged} is not what was written (SHA-256)" in of_bit)
    yield Fact(name="nan_message", value=of_nan or "nothing: training went on")
    yield _metric("nan_detected", re.findall(r"rank (\d+) \(", of_nan) == [str(plan.ranks - 1)])


def save_and_load_rates(plan: CheckpointPlan) -> Iterator[Observation]:
    """Bandwidths and pauses, as the runs' metrics.json have them."""
    found = [one for name in ("whole", "killed") for one in _results(plan.run_folder(name))]
    yield Fact(name="checkpoint_bytes", value=found[0]["bytes"])
    yield Fact(name="rates", value=RATES)
    for kind, name in (("save", "save"), ("async save", "async_save"), ("load", "load")):
        of_kind = [one for one in found if one["kind"] == kind]
        rates = tuple(one["mb_per_s"] / 1e3 for one in of_kind)
        yield _metric(f"{name}_rate", median(rates), rates)
        if name != "load":
            pauses = tuple(one["blocked_s"] for one in of_kind)
            # in the background the first save takes the memory that the others copy into
            yield _metric(f"{name}_blocked", pauses[-1] if name == "async_save" else median(pauses), pauses)


def _results(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / "metrics.json").read_text(encoding="utf-8"))["checkpoints"]
    return found


def _link_checkpoints(plan: CheckpointPlan) -> None:
    """Fewer ranks go on from what all have saved, and all of them from what fewer have: nothing is copied."""
    saved = Path(_CHECKPOINTS, _name(plan.saved_step))
    links = {plan.run_folder("fewer") / saved: plan.run_folder("whole") / saved}
    links |= {
        plan.run_folder(strategy) / _CHECKPOINTS: plan.run_folder("fewer") / _CHECKPOINTS for strategy in STRATEGIES
    }
    for link, target in links.items():
        link.parent.mkdir(parents=True)
        link.symlink_to(target)


def _flip_a_bit(place: Path) -> str:
    """In the middle of the largest file; its name."""
    path = max(place.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return path.name


def _remove(folder: Path) -> tuple[int, int]:
    """Files of checkpoints, which fill the disk, and links to them: how many files, and of how many bytes."""
    for link in [*folder.glob(f"*/{_CHECKPOINTS}/*"), *folder.glob(f"*/{_CHECKPOINTS}")]:
        if link.is_symlink():
            link.unlink()
    files = list(folder.glob(f"*/{_CHECKPOINTS}/*/*.distcp"))
    size = sum(path.stat().st_size for path in files)
    for path in files:
        path.unlink()
    return len(files), size


def _name(step: int) -> str:
    return f"step-{step:08}"


def _described(plan: CheckpointPlan) -> dict[str, Any]:
    shape = plan.config.architecture()
    return {
        "model": f"{plan.config.model.name}, {shape.parameters:,} parameters, {shape.vocab_size} words",
        "steps": f"{plan.steps}, saved after {plan.saved_step}",
        "ranks": f"{plan.ranks}, for one step {plan.fewer_ranks or plan.ranks}",
        "precision": "bf16" if plan.config.bf16 else "fp32 without TF32",
    }


def _metric(name: str, value: float, samples: tuple[float, ...] = ()) -> Metric:
    unit = METRICS.get(name) or METRICS[f"{name.partition('.')[0]}.*"]
    return Metric(name=name, value=float(value), unit=unit, subject=CLUSTER, samples=samples)


SOFTWARE = "Compare torch's version on all nodes (host.inventory), and report it with that"
CHECK = Check(
    name="train.checkpoint",
    title="Checkpoints: resumed bit by bit, on other ranks too; damage and NaN refused",
    phase=Phase.DISTRIBUTED,
    scope=Scope.CLUSTER,
    metrics=METRICS,
    rules=(
        Rule(
            metric="repeated_files_differing",
            evidence_facts=("repeated_files",),
            expect="== 0",
            meaning="the same training, twice from its start on the same ranks, saved other bits",
            fix="Run train.parity (repeated_steps_differing); then device.digests and device.burn, which name a GPU "
            "that computes wrongly now and then",
        ),
        Rule(
            metric="checkpoints_kept_after_kill",
            evidence_facts=("checkpoints_after_kill",),
            expect="== 1 bool",
            meaning="a job that is killed while it saves must leave the checkpoint before it, and nothing that looks whole",
            fix="Look at filesystem.shared (rename_failures): a rename names a checkpoint, when all is written",
        ),
        Rule(
            metric="resumed_steps_differing",
            evidence_facts=("resumed_steps",),
            expect="== 0",
            meaning="what was resumed is not the run it would have been: state was lost, or read back wrongly",
            fix="Compare steps.jsonl of the runs whole and killed (artifacts). From the first step on: weights or "
            f"data. Later only: Adam's state. {SOFTWARE}",
        ),
        Rule(
            metric="resumed_files_differing",
            evidence_facts=("resumed_files",),
            expect="== 0",
            meaning="the last checkpoint of the resumed run, written in the background, is not that of the whole run",
            fix=f"Its losses are the same? Then async saving is at fault, or the filesystem. {SOFTWARE}",
        ),
        *(
            Rule(
                metric=f"reshard_difference.{name}",
                evidence_facts=(f"widest.{name}",),
                applies_if={"resharded": "yes"},
                expect="< 1e-5",  # as in train.parity
                meaning=f"read by {who}, the checkpoint is not the training that it was",
                fix=f"Is train.parity clean? Then a share was read wrongly. {SOFTWARE}",
            )
            for name, who in (
                ("fewer", "fewer ranks"),
                ("fsdp2", "all ranks again, from what fewer had saved"),
                ("ddp", "all ranks, each of them the whole of it (DDP)"),
            )
        ),
        Rule(
            metric="bit_flip_detected",
            evidence_facts=("bit_flip_message",),
            expect="== 1 bool",
            meaning="a bit was flipped in a checkpoint, and training did not refuse it by the file's name",
            fix="Nothing of yours: report it, with the version. Keep checkpoints' digests until then (sha256sum)",
        ),
        Rule(
            metric="nan_detected",
            evidence_facts=("nan_message",),
            expect="== 1 bool",
            meaning="one rank's gradient was no number, and training did not stop by naming that rank alone",
            fix="Look at collectives.all_reduce: the finding travels by it. Is it clean, report it with the version",
        ),
    ),
    measure=measure,
    limit_s=2400.0,  # a slow filesystem is slow, and not hung
    options=CheckpointOptions,
    performance_metrics=("*_rate", "*_blocked"),
)
