"""Searches for slow nodes after the checks of a trial, if a multi-node metric violates a threshold.

The search runs as an additional job. Each slow node that it finds adds a FAIL (judge.search_verdicts); no other verdict
changes.
If the search ends early, the record says so at the check that was the reason for the search.
"""

from __future__ import annotations

from collections.abc import Callable

from seatrial.checks import catalog
from seatrial.diagnose.causes import Run
from seatrial.diagnose.slow_nodes import reasons_to_search
from seatrial.judge import judge
from seatrial.model import CLUSTER, Baseline, Job, Measurement
from seatrial.pipeline.plan import Plan, jobs_as_run, localization_job
from seatrial.pipeline.results import JobNotStarted, TrialResults
from seatrial.util.text import and_more

_MAX_NAMED = 2  # reasons in the line of the progress output


def localize(
    plan: Plan, results: TrialResults, baseline: Baseline | None, nodes: int, run_job: Callable[[Job], object]
) -> None:
    """Run the search with ``run_job`` if there is a reason for it; its measurements are in ``results.localization``.

    The result of an earlier session is kept if this session has run no job. ``nodes``: number of nodes of the plan.
    """
    jobs = jobs_as_run(plan.jobs, results.jobs)
    job = localization_job(results.settings, catalog(), jobs, results.run_dir.request.time_limit_s)
    if job is None or job.nodes > nodes - len(results.lost_nodes):
        return
    if results.localization and results.jobs:
        results.discard({measurement.check for measurement in results.localization})
    if results.localization:
        return
    verdicts = judge(
        results.settings, jobs, results.measurements, catalog(), plan.excluded_checks, baseline, retries=results.retries
    )
    reasons = reasons_to_search(Run(verdicts, results.measurements, catalog()), job.nodes)
    if not reasons:
        return
    listed = and_more([f"{check}: {reason}" for check, reason in reasons.items()], _MAX_NAMED, "; ")
    results.display.show_note(f"search for slow nodes, about {job.expected_s:.0f} s, since {listed}")
    try:
        run_job(job)
    except (KeyboardInterrupt, JobNotStarted) as stop:  # the run goes on, since the trial's checks are measured already
        error = str(stop) or "interrupted"
        results.add_measurement(Measurement(check=job.checks[0], subject=CLUSTER, error=error))
    for measurement in results.localization:
        if measurement.error:
            results.display.warn(f"search for slow nodes not completed: {measurement.error}")
