"""The status of a running job for ``seatrial watch``: a Slurm job, a training folder or a run directory. Read-only."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from seatrial.config.argument_paths import is_folder, path_exists
from seatrial.discover import slurm
from seatrial.discover.gpu_use import FIRST_ANSWER_S, GpuUseStep, gpu_use_step
from seatrial.discover.slurm_facts import UNKNOWN, JobRecord
from seatrial.launch.rank_status import read_ranks
from seatrial.model import Job, SeatrialError, UsageError
from seatrial.model.job_status import GpuUse, JobStatus, TrainingSpeed
from seatrial.telemetry.files import latest_samples
from seatrial.train.step_speed import CONFIG_FILE, INTERRUPTED, METRICS_FILE, STEPS_FILE, training_speed
from seatrial.util import hostlist
from seatrial.util.input_files import open_file, read_json, tail_lines
from seatrial.util.secrets import redacted, secret_values
from seatrial.util.text import error_text, plural

_JOB_ID = re.compile(r"\d+(_\d+)?(\+\d+)?")  # 7, in an array 7_3, in a heterogeneous job 7+1
_ID_IN_NAME = re.compile(r"-(\d+)$")  # the job scripts of `seatrial init` write to runs/NAME-JOBID
# The line of a log with the folder of results: train.sbatch.j2 and oumi.sbatch.j2 in launch/site/ print it
_RESULTS_IN = re.compile(r"^job \d+ on .*[,:] results in (.+)$", re.MULTILINE)
_ATTEMPT = re.compile(r"(.+)/jobs/[^/]+/attempt\d+/[^/]+")  # path of the script of a job of `seatrial run`
_LOG_TAIL_BYTES = 64 * 1024
_LOG_HEAD_BYTES = 16 * 1024
_MAX_LOGS = 2000  # logs of ranks whose modification times are compared
T = TypeVar("T")
_SILENT_S = 30.0  # a rank without a heartbeat for this long is silent: it writes one every second
# A training counts as silent if its last step is older than both _SILENT_S and the duration of this many steps. It may
# have ended without a message, for example by SIGKILL
_SILENT_STEPS = 5


class Watcher(ExitStack):
    """Reads the status of ``target``: a job ID of Slurm, a folder of `seatrial train run`, or a run directory.

    ``interval_s``: seconds between two reads of GPU use; 0 for one read. Use a Watcher as a context: the exit from the
    context ends the srun step that reads the GPU use.
    """

    def __init__(self, target: str, log_lines: int, interval_s: float) -> None:
        super().__init__()
        self.target, self.log_lines, self.interval_s = target, log_lines, interval_s
        self._step: GpuUseStep | None = None
        self._step_job = ""

    def status(self) -> JobStatus:
        """Return the present status. Raises UsageError for an unknown target, SlurmUnavailable if Slurm fails."""
        path = Path(self.target)
        if is_folder(path):
            if path_exists(path / "run.json"):
                return self._run_directory(path)
            return self._training(path)
        if _JOB_ID.fullmatch(self.target):
            return self._slurm_job(self.target)
        problem = "not a directory" if path.exists() else "no such directory"
        raise UsageError(f"{self.target}: {problem}, and not a job ID of Slurm. Run first: squeue --me")

    def _slurm_job(self, job_id: str) -> JobStatus:
        job = slurm.job(job_id)
        if not job.has_state:
            raise UsageError(f"job {job_id}: {job.reason}. Run first: squeue --me; sacct --jobs {job_id}")
        log = Path(job.stdout) if job.stdout else None
        attempt = _ATTEMPT.fullmatch(job.command)
        folder = Path(attempt[1]) if attempt else _results_folder(log, job)
        is_run, _ = _result_or_error(lambda: path_exists(folder / "run.json")) if folder else (False, "")
        if folder and is_run:
            status = self._run_directory(folder)
            gpus, note = (status.gpus, "") if status.gpus else self._gpus_of_job(job)
            notes = tuple(filter(None, [*status.notes, note]))
            return status.model_copy(update={**_job_fields(job), "target": self.target, "gpus": gpus, "notes": notes})
        return self._slurm_job_status(job, None if attempt else folder, log)

    def _training(self, folder: Path) -> JobStatus:
        match = _ID_IN_NAME.search(folder.resolve().name)
        job, note = (
            _job_of_folder(match[1]) if match else (None, "no Slurm job: the name of the directory has no job ID")
        )
        site = folder.resolve().parent.parent
        log = Path(job.stdout) if job and job.stdout else site / "logs" / f"{folder.resolve().name}.out"
        has_files = any((folder / name).exists() for name in (STEPS_FILE, CONFIG_FILE))
        if not has_files and any(folder.iterdir()):
            raise UsageError(
                f"{folder}: neither a run directory (run.json) nor a directory of seatrial train run ({CONFIG_FILE})"
            )
        if job:
            return self._slurm_job_status(job, folder, log)
        return self._training_status(folder, log if log.exists() else None, (note,))

    def _slurm_job_status(self, job: JobRecord, folder: Path | None, log: Path | None) -> JobStatus:
        """Return the status of a Slurm job; ``folder``: the results of its training, None if there is none."""
        gpus, note = self._gpus_of_job(job)
        status = self._training_status(folder, None if job.pending else log, (note,))
        return status.model_copy(update={**_job_fields(job), "gpus": gpus})

    def _training_status(self, folder: Path | None, log: Path | None, notes: tuple[str, ...]) -> JobStatus:
        """Return the status of a training from its files: the steps in ``folder``, and the log."""
        speed, speed_note = _result_or_error(lambda: training_speed(folder)) if folder else (None, "")
        if folder and speed is None and not speed_note:
            speed_note = f"no step in {folder / STEPS_FILE} yet"
        lines, log_note = _result_or_error(lambda: _last_lines(log, self.log_lines)) if log else (None, "")
        last_lines = lines
        # with --lines 0, the last line is read nevertheless: it tells whether the training was interrupted
        if log and not lines and not log_note:
            last_lines, _ = _result_or_error(lambda: _last_lines(log, 1))
        ended = bool(folder and speed and _modified(folder / METRICS_FILE) >= _modified(folder / STEPS_FILE))
        state = "no data yet" if speed is None else _training_state(speed, last_lines or ())
        return JobStatus(
            target=self.target,
            title=str(folder or self.target),
            state="ended" if ended else state,
            ended=ended,
            training=speed,
            log=str(log or ""),
            log_lines=tuple(lines or ()),
            notes=tuple(filter(None, [*notes, speed_note, log_note])),
        )

    def _run_directory(self, run_dir: Path) -> JobStatus:
        attempts = (path for path in run_dir.glob("jobs/*/attempt*") if path.is_dir())
        trial, attempt = run_dir / "trial.json", max(attempts, key=_modified, default=None)
        status = JobStatus(target=self.target, title=f"run {run_dir}", state="no data yet")
        if trial.exists() and (attempt is None or _modified(trial) >= _modified(attempt)):
            reason = f"its decision: seatrial judge {run_dir}"
            return status.model_copy(update={"state": "ended", "ended": True, "reason": reason})
        if attempt is None:
            return status.model_copy(update={"notes": ("no job has started yet",)})
        job, job_note = _result_or_error(lambda: Job.model_validate(read_json(attempt.parent / "job.json")))
        ranks, nodes, silent_ranks = _rank_statuses(attempt, job) if job else (Counter[str](), set[str](), 0)
        gpus = [use for path in sorted(attempt.glob("rank*.samples")) for use in _sampled_use(path)]
        notes = [
            job_note,
            "no rank has written a status yet" if job and not ranks else "",
            f"no heartbeat of {plural(silent_ranks, 'rank')} for {_SILENT_S:g} s" if silent_ranks else "",
            "" if gpus else "GPU use: the run directory has no telemetry of GPUs",
        ]
        steps = max(run_dir.glob(f"artifacts/*/**/{STEPS_FILE}"), key=_modified, default=None)
        speed, speed_note = _result_or_error(lambda: training_speed(steps.parent)) if steps else (None, "")
        log = max(_logs(attempt), key=_modified, default=None)
        lines, log_note = _result_or_error(lambda: _last_lines(log, self.log_lines)) if log else (None, "")
        changes = {
            "state": f"job {attempt.parent.name}, {attempt.name}",
            "nodes": tuple(sorted(nodes)),
            "ranks": dict(ranks.most_common()),
            "gpus": tuple(gpus),
            "training": speed if speed and speed.age_s < _SILENT_S else None,
            "log": str(log or ""),
            "log_lines": tuple(lines or ()),
            "notes": tuple(filter(None, [*notes, speed_note, log_note])),
        }
        return status.model_copy(update=changes)

    def _gpus_of_job(self, job: JobRecord) -> tuple[tuple[GpuUse, ...], str]:
        """Return the GPU use on the nodes of a running job, and a note if it is unknown."""
        if job.state != "RUNNING":
            return (), ""
        if self._step is None or self._step_job != job.id or self.interval_s == 0:
            try:
                step = gpu_use_step(job.id, job.node_count or 1, self.interval_s)
                self._step, self._step_job = self.enter_context(step), job.id
            except SeatrialError as error:
                return (), f"GPU use: {error}"
            wait_s = FIRST_ANSWER_S
        else:
            wait_s = 0.0
        gpus, note = self._step.read(wait_s)
        return gpus, f"GPU use: {note}" if note else ""


def _training_state(speed: TrainingSpeed, log_lines: Sequence[str]) -> str:
    """Return the state of a training without metrics.json: training, interrupted, or the time since its last step.

    A killed process records no end, so it cannot be distinguished from one that hangs.
    """
    if speed.age_s <= max(_SILENT_S, _SILENT_STEPS / speed.steps_per_second):
        return "training"
    if any(line.startswith(INTERRUPTED) for line in log_lines):
        return "interrupted"
    return f"no step for {speed.age_s:.0f} s"


def _job_fields(job: JobRecord) -> dict[str, Any]:
    """Return the fields of a status that come from Slurm."""
    nodes, _ = _result_or_error(lambda: hostlist.expand(job.nodes))
    limit_s = job.time_limit_s if isinstance(job.time_limit_s, int) else None
    pending_reason = job.reason if job.pending else ""
    return {
        "title": f"job {job.id}" + (f" {job.name}" if job.name else ""),
        "state": job.state,
        "ended": job.ended,
        "reason": _end_reason(job) if job.ended else pending_reason,
        "start": job.start,
        "time_limit_s": limit_s,
        "nodes": tuple(nodes or filter(None, [job.nodes])),
    }


def _end_reason(job: JobRecord) -> str:
    """Return how a job ended: ``NonZeroExitCode, exit code 7``."""
    code = "" if job.exit_code is None else f"exit code {job.exit_code}"
    return ", ".join(filter(None, [job.reason, code, f"signal {job.signal}" if job.signal else ""]))


def _job_of_folder(job_id: str) -> tuple[JobRecord | None, str]:
    """Return the Slurm job and a note. If the job is unknown, it is None, and the note has the reason."""
    if not slurm.installed():
        return None, f"state and GPU use of job {job_id}: this machine has no Slurm client"
    job, note = _result_or_error(lambda: slurm.job(job_id))
    if job is None:
        return None, f"state and GPU use of job {job_id}: {note.partition(' (')[0]}"
    if job.state == UNKNOWN:
        return None, f"job {job_id}: {job.reason}"
    return job, note


def _results_folder(log: Path | None, job: JobRecord) -> Path | None:
    """Return the folder of results that a job script of `seatrial init` prints into its log; None if there is none."""
    if log is None or job.pending:
        return None
    head, _ = _result_or_error(lambda: _head(log))
    match = _RESULTS_IN.search(head or "")
    return Path(match[1]) if match else None


def _head(log: Path) -> str:
    with open_file(log) as file:
        return file.read(_LOG_HEAD_BYTES).decode("utf-8", errors="replace")


def _last_lines(log: Path, count: int) -> list[str]:
    lines = tail_lines(log, count, _LOG_TAIL_BYTES)
    return str(redacted("\n".join(lines), secret_values())).split("\n") if lines else []


def _rank_statuses(attempt: Path, job: Job) -> tuple[Counter[str], set[str], int]:
    """Return the number of ranks by their status, the nodes, and the number of silent ranks."""
    statuses, nodes, silent_ranks, now = Counter[str](), set[str](), 0, time.time()
    for rank in read_ranks(attempt, job):
        rank.read()
        if rank.heartbeat is None:
            continue
        statuses["done" if rank.done else rank.last_status] += 1
        nodes.add(rank.heartbeat.node)
        if rank.heartbeat_expected and now - rank.heartbeat.time > _SILENT_S:
            silent_ranks += 1
    return statuses, nodes, silent_ranks


def _sampled_use(path: Path) -> Iterator[GpuUse]:
    """Yield the last GPU use in the file of a telemetry sampler."""
    by_node, _ = _result_or_error(lambda: latest_samples(path))
    for node, values in (by_node or {}).items():
        for device in sorted({name.partition(".")[0] for name in values if name.startswith("gpu")}):
            memory, sampled = values.get(f"{device}.memory_used_bytes"), values.get("time")
            yield GpuUse(
                node=node,
                gpu=device,
                utilization=values.get(f"{device}.sm_util"),
                memory_used_bytes=None if memory is None else round(memory),
                power_w=values.get(f"{device}.power_w"),
                temperature_c=values.get(f"{device}.temperature_c"),
                sm_clock_mhz=values.get(f"{device}.sm_clock_mhz"),
                age_s=None if sampled is None else max(0.0, time.time() - sampled),
            )


def _logs(attempt: Path) -> Iterator[Path]:
    """Return the logs of an attempt that are not empty."""
    logs = [attempt / "launcher.out", attempt / "launcher.err", *list(attempt.glob("logs/**/*.log"))[:_MAX_LOGS]]
    return (path for path in logs if path.is_file() and path.stat().st_size)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0


def _result_or_error(read: Callable[[], T]) -> tuple[T | None, str]:
    """Return (result of ``read``, ""), or (None, error).

    An error: a file is damaged or not yet written, or Slurm gives no answer.
    """
    try:
        return read(), ""
    except (OSError, ValidationError, ValueError, SeatrialError) as error:
        return None, error_text(error)
