"""Judges existing records by the rules of this version, and learns baselines from them, without measuring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from seatrial.analysis import trial_insights
from seatrial.checks import catalog
from seatrial.config.schema import Config
from seatrial.diagnose import refreshed_findings
from seatrial.judge import judge, plausibility, site_baseline
from seatrial.judge.decision import decide, metrics_without_threshold
from seatrial.judge.remedies import unknown_gpus
from seatrial.model import Baseline, Decision, Measurement, Trial, UsageError, Verdict, first_validation_error
from seatrial.pipeline.run_directory import load_trial


def rejudge(trial: Trial, baseline_file: Path | None = None) -> Trial:
    """Return the trial judged by the rules of this version. ``baseline_file`` replaces the site baseline of the trial.

    Raises UsageError if the config is not valid in this version or the new baseline exceeds physical limits.
    """
    try:
        settings = Config.model_validate(trial.config)
    except ValidationError as error:
        raise UsageError(
            f"this version of seatrial cannot judge the record: config.{first_validation_error(error)}"
        ) from error
    baseline = site_baseline.load(baseline_file, catalog()) if baseline_file else trial.baseline
    if baseline_file and baseline:
        plausibility.validate_baseline(baseline, catalog())
    verdicts = judge(
        settings, trial.jobs, trial.measurements, catalog(), trial.excluded_checks, baseline, retries=trial.retries
    )
    decision = make_decision(
        settings,
        trial.measurements,
        verdicts,
        trial.excluded_checks,
        (trial.stop_reason, trial.gpu_error),
        tested_hardware=trial.decision.tested_hardware,
        cpu_only=trial.decision.cpu_only,
    )
    insights = trial_insights(settings, trial.measurements, catalog(), baseline)
    findings = refreshed_findings(trial, verdicts, catalog())
    return trial.model_copy(
        update={
            "verdicts": verdicts,
            "decision": decision,
            "baseline": baseline,
            "insights": insights,
            "findings": findings,
        }
    )


def learn(name: str, paths: Sequence[Path]) -> str:
    """Return the text of a baseline file that is learned from these runs, rejudged first. Raises UsageError."""
    learned = site_baseline.learn(name, {str(path): rejudge(load_trial(path)) for path in paths}, catalog())
    plausibility.validate_baseline(learned, catalog())
    return site_baseline.dump(learned)


def load_baseline(settings: Config) -> Baseline | None:
    """Return the site baseline that the config names; None if it names none. Raises UsageError."""
    return site_baseline.load(Path(settings.baseline), catalog()) if settings.baseline else None


def make_decision(
    settings: Config,
    measurements: Sequence[Measurement],
    verdicts: Sequence[Verdict],
    excluded_checks: Mapping[str, str],
    blockers: Sequence[str],
    *,
    tested_hardware: str,
    cpu_only: bool,
) -> Decision:
    """Return the decision. ``blockers``: why it cannot be ACCEPTED; empty strings do not count."""
    required = {name: check.required for name, check in settings.checks.items()}
    without_threshold = metrics_without_threshold(catalog(), measurements, verdicts)
    return decide(
        required,
        verdicts,
        excluded_checks,
        tested_hardware,
        blockers,
        without_threshold,
        cpu_only,
        cpu_only_requested=settings.cluster.gpus_per_node == 0,
        unknown_gpus=unknown_gpus(measurements, verdicts),
    )
