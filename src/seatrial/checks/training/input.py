"""Share of a training step spent waiting for data that is read from the shared filesystem, not from the page cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field

from seatrial.checks.check import Check, Context
from seatrial.checks.declare import Answers, absent, fact, forbidden, metric, rule
from seatrial.checks.host.filesystem_shared import AbsolutePath, read_volume
from seatrial.checks.training import _ranks, _results, _workload
from seatrial.checks.training._results import Stage
from seatrial.checks.training._workload import TrainingResult, WorkloadOptions
from seatrial.model import Phase, Scope, SeatrialError

CONFIG, PREFIX = "ddp", "seatrial-input-"
OVERRIDES = ("max_steps=30", "untimed_steps=5", "data.cold=true")
# 0.5 GB of data. A rank reads 64 sequences in each of 30 steps. More than 136 ranks read more than 2^18 sequences: then
# several ranks read the same sequence, mostly on different nodes, so that it is rarely in the page cache of the node
MAX_SEQUENCES = 2**18
MAX_CACHED = 10  # percent; with more of the data in the page cache, the filesystem was not measured
# Device → percent of the step time. MLPerf Storage requires 90 % accelerator utilization for 3D U-Net and ResNet-50.
# A GPU computes while the host reads the next batch; a CPU reads first, then computes.
MAX_DATA_WAIT: Mapping[str, int] = {"cuda": 10, "cpu": 30}


class InputOptions(WorkloadOptions):
    """Options of train.input."""

    path: AbsolutePath | None = Field(default=None, description="directory for the data; default: the run directory")


def measure(context: Context, options: InputOptions) -> Answers:
    """Train from data outside of the page cache; rank 0 yields the data waits of all ranks.

    Raises SeatrialError if the folder for the data cannot be used.
    """
    from seatrial.bench import one_rank_per_node, rank, storage
    from seatrial.train import train_config

    subjects = rank.gather(context.subject)
    config, overrides = _workload.config_and_overrides(context, options, CONFIG, OVERRIDES)
    settings = train_config.load(config, overrides)
    sequences = settings.bsz * settings.grad_accum * settings.max_steps * context.world_size
    method = (
        f"on all ranks; {sequences} reads of a sequence ({4 * (settings.seq_len + 1)} bytes), each with one request, "
        "after the data was dropped from the page cache of each node"
    )
    path = options.path or str(context.artifacts_dir)
    participants = one_rank_per_node.select_participants(context.node)
    try:
        with storage.temporary_folder(path, participants, PREFIX) as folder:
            data = (f"data.samples={min(sequences, MAX_SEQUENCES)}", f"data.cache={folder.path}")
            stage = Stage(overrides=(*OVERRIDES, *data, *options.overrides))
            results = yield from _results.run_stages(context, config, [stage], options.limit_s, method)
            shared = storage.is_shared(folder)
    except one_rank_per_node.ParticipantError as error:
        raise SeatrialError(f"cannot use {path}: {error}") from error
    (result,) = results[stage.name]
    if context.rank:
        return
    filesystem = read_volume(context.root, path).mount
    yield fact("filesystem", filesystem)
    yield fact("data_shared", "yes" if shared else "no")
    yield from data_wait(result, subjects, filesystem)


def data_wait(result: TrainingResult, subjects: Sequence[str], filesystem: str) -> Answers:
    """The data wait of each rank, if the data came from the filesystem and not from memory."""
    cached = result.value("data_cached_share")
    if cached is None:
        reason = "the share in the page cache was not measured (the training failed, or data.cold is false)"
        yield from (absent(_ranks.DATA_WAIT, reason, subject) for subject in subjects)
    elif 100 * cached > MAX_CACHED:
        reason = f"{cached:.0%} of the data stayed in the page cache, as on tmpfs"
        yield from (forbidden(_ranks.DATA_WAIT, reason, subject) for subject in subjects)
    else:
        evidence = {"filesystem": filesystem, "data in the page cache": f"{cached:.0%}"}
        yield from _ranks.data_wait(_ranks.times_by_subject([result], subjects), evidence)


CHECK = Check(
    name="train.input",
    title="Wait for training data from the shared filesystem",
    phase=Phase.DISTRIBUTED,
    scope=Scope.CLUSTER,
    declared=(
        *_results.DECLARED,
        *_results.speed(""),
        *_results.ONE_TRAINING,
        metric(
            _ranks.DATA_WAIT,
            f"<= {MAX_DATA_WAIT['cuda']} %",
            "The device of the rank is idle while its next batch is read from the filesystem; all ranks wait for it.",
            "Look at the results of filesystem.speed and filesystem.metadata for this path, and at its mount options "
            "in filesystem.client. If they are good, use data loader workers, or copy the data to a local disk.",
            when="device == cuda",
            also=(rule(f"<= {MAX_DATA_WAIT['cpu']} %", when="device == cpu"),),
            per="rank",
            speed=True,
        ),
    ),
    measure=measure,
    facts_from_options=lambda options: _results.facts_from_options(options, CONFIG),
    options=InputOptions,
    child_tasks=("all",),  # each rank has one child process; together they run one training
    limit_s=700.0,
)
