"""The status of a running job as text."""

from __future__ import annotations

import time
from collections.abc import Iterator

from seatrial.model.job_status import GpuUse, JobStatus, TrainingSpeed
from seatrial.report.progress import duration_text
from seatrial.report.text import clean, single_line
from seatrial.util.text import and_more, plural

_GIB = 2**30
_MAX_NODES, _MAX_GPUS, _MAX_STATUSES = 8, 64, 6  # listed nodes, GPUs, and statuses of ranks
_STALE_S = 5.0  # an older value is shown with its age


def status_lines(status: JobStatus) -> Iterator[str]:
    """Yield the lines of text on a job; terminal sequences in the texts of the job are removed."""
    yield _line(_heading(status))
    if status.training:
        yield _line(f"training  {_training(status.training)}")
    for rank_status, count in list(status.ranks.items())[:_MAX_STATUSES]:
        yield _line(f"ranks     {count:>4}  {rank_status}")
    if status.gpus:
        width = max(len(use.node) for use in status.gpus)
        yield "gpus"
        for use in status.gpus[:_MAX_GPUS]:
            yield f"  {_gpu(use, width)}"
        if len(status.gpus) > _MAX_GPUS:
            yield f"  and {len(status.gpus) - _MAX_GPUS} more (all with --json)"
    for note in status.notes:
        yield _line(f"note      {note}")
    if status.log:
        yield _line(f"log       {status.log}")
        for line in status.log_lines:
            yield f"  | {clean(line).expandtabs()}"


def _line(text: str) -> str:
    return clean(text).replace("\n", " ")


def _heading(status: JobStatus) -> str:
    text = f"{status.title}: {status.state}"
    if status.reason:
        text += f" ({single_line(status.reason)})"
    if status.nodes:
        text += f" on {and_more(status.nodes, _MAX_NODES)}"
    if status.start is not None and not status.ended:
        seconds = time.time() - status.start
        start = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.start))
        text += f", for {duration_text(seconds)}" if seconds >= 0 else f", expected start {start}"
    if status.time_limit_s is not None and not status.ended:
        text += f", time limit {duration_text(status.time_limit_s)}"
    return text


def _training(speed: TrainingSpeed) -> str:
    of_steps = f" of {speed.max_steps}" if speed.max_steps is not None else ""
    parts = [f"step {speed.step}{of_steps}", "" if speed.loss is None else f"loss {speed.loss:.4f}"]
    parts.append(f"{speed.steps_per_second:.3g} steps/s")
    parts.append("" if speed.tokens_per_second is None else f"{speed.tokens_per_second:,.0f} tokens/s")
    last = f"last step {duration_text(speed.age_s)} ago"
    return f"{', '.join(filter(None, parts))} over {plural(speed.steps, 'step')}, {last}: {speed.folder}"


def _gpu(use: GpuUse, width: int) -> str:
    used, total = use.memory_used_bytes, use.memory_total_bytes
    memory = "-"
    if used is not None:
        of_total = "" if total is None else f" of {total / _GIB:.1f}"
        memory = f"{used / _GIB:.1f}{of_total} GiB"
    values = (
        _value(use.utilization, "%", 5),
        f"{memory:>18}",
        _value(use.power_w, "W", 7),
        _value(use.temperature_c, "°C", 6),
        _value(use.sm_clock_mhz, "MHz", 9),
    )
    age = f"  {duration_text(use.age_s)} ago" if use.age_s is not None and use.age_s > _STALE_S else ""
    return f"{clean(use.node):<{width}}  {clean(use.gpu):<5} {' '.join(values)}{age}"


def _value(value: float | None, unit: str, width: int) -> str:
    return f"{'-' if value is None else f'{value:,.0f} {unit}':>{width}}"
