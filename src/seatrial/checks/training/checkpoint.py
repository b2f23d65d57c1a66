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

from seatrial.checks.base import Check, Options, Place
from seatrial.checks.host.filesystem_shared import volume
from seatrial.checks.training import _results as workload_figures
from seatrial.checks.training import _workload
from seatrial.model import CLUSTER, Artifact, Fact, Metric, Observation, Phase, Rule, Scope, UsageError
from seatrial.train import compare, train_config
from seatrial.train.train_config import TrainConfig

if TYPE_CHECKING:
    from seatrial.train.variants import Act

_CHECKPOINTS, STRATEGIES = "checkpoints", ("fsdp2", "ddp")
METRICS = {
    "resumed_steps_differing": "count",
    "resumed_files_differing": "count",
    "repeated_files_differing": "count",
    "kept_after_kill": "bool",
    "flipped_bit_named": "bool",
    "nan_named": "bool",
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
class Plan:
    """The run to compare with takes ``steps``, and saves at half of them, ``saved``, and at the end."""

    wanted: TrainConfig
    folder: Path
    ranks: int

    @property
    def steps(self) -> int:
        return self.wanted.max_steps

    @property
    def saved(self) -> int:
        return self.wanted.checkpoint.every

    @property
    def fewer(self) -> int:
        """The largest number of ranks that shares their batch evenly; 0 where there is only one rank."""
        return max((count for count in range(1, self.ranks) if self.ranks % count == 0), default=0)

    @property
    def handed(self) -> int:
        """Up to which step fewer ranks train, until all of them go on."""
        return self.saved + 1

    def out(self, name: str) -> Path:
        return self.folder / name

    def run(self, steps: int, every: int, *, ranks: int = 0, strategy: str = "fsdp2", **kept: bool) -> TrainConfig:
        """To step ``steps``, on ``ranks`` of our global batch, saving ``every`` so many; ``kept`` as of Checkpoint."""
        wanted = self.wanted
        saves = wanted.checkpoint.model_copy(update={"every": every, "keep": self.steps, **kept})
        parallel = wanted.parallel.model_copy(update={"strategy": strategy})
        accumulated = wanted.grad_accum * self.ranks // (ranks or self.ranks)
        changes = {"max_steps": steps, "checkpoint": saves, "parallel": parallel, "grad_accum": accumulated}
        return wanted.model_copy(update=changes)


def measure(place: Place, options: CheckpointOptions) -> Iterator[Observation]:
    from seatrial.train import variants

    facts = workload_figures.here(place)
    wanted = train_config.load(_workload.config_for(place, options.config), options.overrides)
    plan = planned(wanted, variants.new_folder(place.out, shared=True), place.world_size)
    leads = place.rank == 0
    if leads:
        yield from facts
        yield Fact(name="training", value=_described(plan))
        yield Fact(name="filesystem", value=volume(place.root, str(plan.folder)).mount)
    try:
        for observation in _observe(place, plan, options.limit_s):
            if leads:
                yield observation
    finally:
        files, size = _remove(plan.folder) if leads else (0, 0)
    if leads:
        yield Fact(name="removed", value=f"{files} files of checkpoints, {size / 1e9:.2f} GB; manifests were kept")
        for path in sorted(plan.folder.glob("*/metrics.json")):
            yield Artifact(path=str(path.relative_to(place.run_dir)), title=f"metrics of the run {path.parent.name}")


def planned(wanted: TrainConfig, folder: Path, ranks: int) -> Plan:
    """Raises UsageError for a config that is not saved when half of its steps are taken, with two before and behind."""
    if wanted.stack != "native" or 2 * wanted.checkpoint.every != wanted.max_steps or wanted.max_steps < 6:
        raise UsageError("train.checkpoint needs stack native, max_steps of 6 or more, checkpoint.every half of them")
    samples = wanted.data.samples or wanted.max_steps * wanted.bsz * wanted.grad_accum * ranks
    data = wanted.data.model_copy(update={"samples": samples, "cache": str(folder / "data")})
    return Plan(wanted.model_copy(update={"data": data}), folder, ranks)


def _observe(place: Place, plan: Plan, limit_s: float) -> Iterator[Observation]:
    """Three starts: a run to its end, and again until it is killed; fewer ranks; what goes on, and what is refused.

    All ranks go through it together; what the first one says of the files counts.
    """
    from seatrial.train import variants

    seat, leads = variants.Seat(place.device, place.local_rank, limit_s), place.rank == 0
    place.note("a run to its end; the same again, killed while it saves")
    variants.perform(_whole_and_killed(plan), seat, plan.out("start1"), killed=plan.ranks - 1)
    if leads:
        yield from after_kill(plan)
        _link_checkpoints(plan)
    if plan.fewer:
        place.note(f"{plan.fewer} of {plan.ranks} ranks")
        variants.perform(_on_fewer(plan), seat, plan.out("start2"), groups=[range(plan.fewer)])
    damaged = _flip_a_bit(plan.out("whole") / _CHECKPOINTS / _name(plan.steps)) if leads else ""
    place.note("what goes on, and what is refused")
    *_, of_bit, of_nan = variants.perform(_resumed_and_refused(plan), seat, plan.out("start3"))
    if leads:
        yield from compared(plan)
        yield from refused(plan, damaged, of_bit, of_nan)
        yield from speeds(plan)


def _whole_and_killed(plan: Plan) -> list[Act]:
    from seatrial.train.variants import Act, Fault

    run, fault = plan.run(plan.steps, plan.saved), Fault(kind="kill_in_save", rank=plan.ranks - 1, step=plan.steps)
    return [Act(settings=run, out=plan.out("whole")), Act(settings=run, out=plan.out("killed"), fault=fault)]


def _on_fewer(plan: Plan) -> list[Act]:
    from seatrial.train.variants import Act

    run = plan.run(plan.handed, plan.handed, ranks=plan.fewer, resume=True)
    return [Act(settings=run, out=plan.out("fewer"))]


def _resumed_and_refused(plan: Plan) -> list[Act]:
    from seatrial.train.variants import Act, Fault

    resumed = plan.run(plan.steps, plan.handed, resume=True, asynchronous=True)  # two saves: the first takes the memory
    spread = [plan.run(plan.steps, 0, strategy=strategy, resume=True) for strategy in STRATEGIES if plan.fewer]
    nan = Fault(kind="nan", rank=plan.ranks - 1, step=plan.saved)
    return [
        Act(settings=resumed, out=plan.out("killed")),
        *(Act(settings=run, out=plan.out(run.parallel.strategy)) for run in spread),
        Act(settings=plan.run(plan.steps + 1, 0, resume=True), out=plan.out("whole"), refused=True),
        Act(settings=plan.run(plan.steps, 0), out=plan.out("nan"), fault=nan, refused=True),
    ]


def after_kill(plan: Plan) -> Iterator[Observation]:
    """What the killed run left, before anything goes on from it; and whether its bits are those of the whole one."""
    from seatrial.train import checkpoint

    left = sorted(path.name for path in (plan.out("killed") / _CHECKPOINTS).iterdir())
    whole = [path.name for path in checkpoint.finished(plan.out("killed"))]
    yield Fact(name="left_by_kill", value=left)
    yield _metric("kept_after_kill", whole == [_name(plan.saved)])
    yield from _differing("repeated", plan, plan.saved)


def compared(plan: Plan) -> Iterator[Observation]:
    """What went on from a checkpoint, beside the run that was never interrupted."""
    whole = compare.steps(plan.out("whole"), 0, plan.steps)
    resumed = compare.steps(plan.out("killed"), plan.saved, plan.steps)
    steps = compare.differing(resumed, whole[plan.saved :])
    yield _metric("resumed_steps_differing", len(steps))
    yield Fact(name="resumed_steps", value=f"not the same: {steps}" if steps else "the same bits in each")
    yield from _differing("resumed", plan, plan.steps)
    yield Fact(name="resharded", value="yes" if plan.fewer else "no: there is one rank")
    if plan.fewer:
        parts = {"fewer": (plan.saved, plan.handed), **dict.fromkeys(STRATEGIES, (plan.handed, plan.steps))}
        for name, (after, last) in parts.items():
            gap = compare.gap(compare.steps(plan.out(name), after, last), whole[after:last], "loss")
            yield _metric(f"reshard_difference.{name}", gap.value)
            yield Fact(name=f"widest.{name}", value=f"step {gap.step}: {gap.value:.2e}")


def _differing(what: str, plan: Plan, step: int) -> Iterator[Observation]:
    """How many files of weights and moments the two runs wrote otherwise at ``step``."""
    from seatrial.train import checkpoint

    whole, other = (checkpoint.state(checkpoint.folder(plan.out(name), step)) for name in ("whole", "killed"))
    names = sorted(name for name in whole.keys() | other.keys() if whole.get(name) != other.get(name))
    yield _metric(f"{what}_files_differing", len(names))
    yield Fact(name=f"{what}_files", value=f"not the same: {names}" if names else f"the same bits in {len(whole)}")


def refused(plan: Plan, damaged: str, of_bit: str, of_nan: str) -> Iterator[Observation]:
    """What was said of the file that a bit was flipped in, and of the rank whose gradient was no number. Pure."""
    yield Fact(name="said_of_bit", value=of_bit or "nothing: it was taken for whole")
    yield _metric("flipped_bit_named", f"{damaged} is not what was written (SHA-256)" in of_bit)
    yield Fact(name="said_of_nan", value=of_nan or "nothing: training went on")
    yield _metric("nan_named", re.findall(r"rank (\d+) \(", of_nan) == [str(plan.ranks - 1)])


def speeds(plan: Plan) -> Iterator[Observation]:
    """Bandwidths and pauses, as the runs' metrics.json have them."""
    found = [one for name in ("whole", "killed") for one in _results(plan.out(name))]
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


def _link_checkpoints(plan: Plan) -> None:
    """Fewer ranks go on from what all have saved, and all of them from what fewer have: nothing is copied."""
    saved = Path(_CHECKPOINTS, _name(plan.saved))
    links = {plan.out("fewer") / saved: plan.out("whole") / saved}
    links |= {plan.out(strategy) / _CHECKPOINTS: plan.out("fewer") / _CHECKPOINTS for strategy in STRATEGIES}
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


def _described(plan: Plan) -> dict[str, Any]:
    shape = plan.wanted.architecture()
    return {
        "model": f"{plan.wanted.model.name}, {shape.parameters:,} parameters, {shape.vocab_size} words",
        "steps": f"{plan.steps}, saved after {plan.saved}",
        "ranks": f"{plan.ranks}, for one step {plan.fewer or plan.ranks}",
        "precision": "bf16" if plan.wanted.bf16 else "fp32 without TF32",
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
            shows=("repeated_files",),
            expect="== 0",
            why="the same training, twice from its start on the same ranks, saved other bits",
            fix="Run train.parity (repeated_steps_differing); then device.digests and device.burn, which name a GPU "
            "that computes wrongly now and then",
        ),
        Rule(
            metric="kept_after_kill",
            shows=("left_by_kill",),
            expect="== 1 bool",
            why="a job that is killed while it saves must leave the checkpoint before it, and nothing that looks whole",
            fix="Look at filesystem.shared (rename_faults): a rename names a checkpoint, when all is written",
        ),
        Rule(
            metric="resumed_steps_differing",
            shows=("resumed_steps",),
            expect="== 0",
            why="what was resumed is not the run it would have been: state was lost, or read back wrongly",
            fix="Compare steps.jsonl of the runs whole and killed (artifacts). From the first step on: weights or "
            f"data. Later only: Adam's state. {SOFTWARE}",
        ),
        Rule(
            metric="resumed_files_differing",
            shows=("resumed_files",),
            expect="== 0",
            why="the last checkpoint of the resumed run, written in the background, is not that of the whole run",
            fix=f"Its losses are the same? Then async saving is at fault, or the filesystem. {SOFTWARE}",
        ),
        *(
            Rule(
                metric=f"reshard_difference.{name}",
                shows=(f"widest.{name}",),
                where={"resharded": "yes"},
                expect="< 1e-5",  # as in train.parity
                why=f"read by {who}, the checkpoint is not the training that it was",
                fix=f"Is train.parity clean? Then a share was read wrongly. {SOFTWARE}",
            )
            for name, who in (
                ("fewer", "fewer ranks"),
                ("fsdp2", "all ranks again, from what fewer had saved"),
                ("ddp", "all ranks, each of them the whole of it (DDP)"),
            )
        ),
        Rule(
            metric="flipped_bit_named",
            shows=("said_of_bit",),
            expect="== 1 bool",
            why="a bit was flipped in a checkpoint, and training did not refuse it by the file's name",
            fix="Nothing of yours: report it, with the version. Keep checkpoints' digests until then (sha256sum)",
        ),
        Rule(
            metric="nan_named",
            shows=("said_of_nan",),
            expect="== 1 bool",
            why="one rank's gradient was no number, and training did not stop by naming that rank alone",
            fix="Look at collectives.all_reduce: the finding travels by it. Is it clean, report it with the version",
        ),
    ),
    measure=measure,
    limit_s=2400.0,  # a slow filesystem is slow, and not hung
    options=CheckpointOptions,
    performance=("*_rate", "*_blocked"),
)
