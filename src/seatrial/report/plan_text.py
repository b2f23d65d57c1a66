"""Text before a run: expected duration and GPU-hours, rights that checks need, and excluded checks and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from seatrial.checks.check import Checks
from seatrial.model import TIME_LIMIT, Job
from seatrial.util.text import plural


def plan_lines(
    jobs: Sequence[Job],
    excluded_checks: Mapping[str, str],
    checks: Checks,
    not_run: Sequence[str] = (),
    *,
    as_root: bool = False,
) -> Iterator[str]:
    """Yield lines of text: the cost of ``jobs``, sizes that are not timed, rights that checks need, excluded checks.

    ``not_run``: the checks of the trial that no job can run. ``as_root``: the jobs are known to run as root.
    """
    names = [name for job in jobs for name in job.checks]
    seconds = sum(job.expected_s for job in jobs)
    gpus = max((job.process_count for job in jobs if job.placement == "ranks" and job.device == "cuda"), default=0)
    hours = gpus * seconds / 3600
    cost = f" on {plural(gpus, 'GPU')}: {hours:.{2 if hours < 1 else 1}f} GPU-hours" if gpus else ""
    count = plural(len(names) + len(not_run), "check")
    skipped = f" ({len(not_run)} of them cannot run here)" if not_run else ""
    yield f"{count}{skipped}, about {plural(max(1, round(seconds / 60)), 'minute')}{cost}"
    unknown_duration = [
        f"{name} ({job.limits[name]:g} s)" for job in jobs for name in job.limits if name not in job.typical
    ]
    if unknown_duration:
        yield f"of unknown duration, counted with the time limit: {', '.join(unknown_duration)}"
    too_slow_sizes = {name: reason for job in jobs for name, reason in job.left_out.items()}
    for name, reason in too_slow_sizes.items():
        option = f"to measure the larger size too: --set checks.{name}.options.sizes=[1GiB, 8GiB]"
        yield f"{name} is judged at a smaller size, since {reason}; {option}"
    rights = [f"{name}: {checks[name].rights}" for name in names if name in checks and checks[name].rights]
    if not rights:
        yield "no check needs root or other special rights"
    elif not as_root:
        yield f"needs more rights: {'; '.join(rights)}"
    if excluded := [name for name, option in excluded_checks.items() if option == TIME_LIMIT]:
        yield (
            f"excluded by {TIME_LIMIT}, so that the decision is INCOMPLETE (first the checks that are not required, "
            f"then from the end of the trial): {', '.join(excluded)}"
        )
