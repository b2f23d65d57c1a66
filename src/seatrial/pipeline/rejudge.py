"""Judges existing records by the rules of this version, and learns baselines from them. Nothing is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue, ValidationError

from seatrial.analysis import trial_insights
from seatrial.checks import catalog
from seatrial.config.schema import Config
from seatrial.diagnose import refreshed_findings
from seatrial.judge import judge, plausibility, site_baseline
from seatrial.judge.decision import decide, metrics_without_threshold
from seatrial.model import Baseline, Decision, Job, Measurement, Trial, UsageError, Verdict, first_validation_error
from seatrial.pipeline.run_directory import load_trial
from seatrial.pipeline.tested_hardware import cpu_only, device_conflict, tested_hardware


def rejudge(trial: Trial, baseline: Path | None = None) -> Trial:
    """Return the trial judged by the rules of this version, with another site baseline if one is given.

    Raises UsageError if its config is not valid in this version or the baseline exceeds physical limits.
    """
    settings = _settings(trial)
    site = site_baseline.load(baseline, catalog()) if baseline else trial.baseline
    if baseline and site:
        plausibility.validate_baseline(site, catalog())
    verdicts = judge(
        settings, trial.jobs, trial.measurements, catalog(), trial.excluded_checks, site, retries=trial.retries
    )
    decision = make_decision(
        settings,
        trial.measurements,
        verdicts,
        trial.excluded_checks,
        jobs=trial.jobs,
        environment=trial.environment,
        stop_reason=trial.stop_reason,
        gpu_error=trial.gpu_error,
    )
    insights = trial_insights(settings, trial.measurements, catalog(), site)
    findings = refreshed_findings(trial, verdicts, catalog())
    return trial.model_copy(
        update={
            "verdicts": verdicts,
            "decision": decision,
            "baseline": site,
            "insights": insights,
            "findings": findings,
        }
    )


def with_derived_hardware(trial: Trial) -> Trial:
    """Return the trial with its decision, but with the tested hardware derived from jobs and measurements.

    Raises UsageError if its config is not valid in this version.
    """
    settings = _settings(trial)
    conflict = "" if trial.gpu_error else device_conflict(settings, trial.jobs, trial.environment)
    hardware = tested_hardware(settings, trial.jobs, trial.measurements, trial.environment, trial.gpu_error)
    derived = {"tested_hardware": conflict or hardware, "cpu_only": cpu_only(trial.jobs)}
    return trial.model_copy(update={"decision": trial.decision.model_copy(update=derived)})


def _settings(trial: Trial) -> Config:
    try:
        return Config.model_validate(trial.config)
    except ValidationError as error:
        raise UsageError(
            f"this version of seatrial cannot judge the record: config.{first_validation_error(error)}"
        ) from error


def learn(name: str, paths: Sequence[Path]) -> str:
    """Return the baseline file's text, learned from these runs judged by this version. Raises UsageError."""
    learned = site_baseline.learn(name, {str(path): rejudge(load_trial(path)) for path in paths}, catalog())
    plausibility.validate_baseline(learned, catalog())
    return site_baseline.dump(learned)


def load_baseline(settings: Config) -> Baseline | None:
    """Return the site baseline named in the trial, None if it names none. Raises UsageError."""
    return site_baseline.load(Path(settings.baseline), catalog()) if settings.baseline else None


def make_decision(
    settings: Config,
    measurements: Sequence[Measurement],
    verdicts: Sequence[Verdict],
    excluded_checks: Mapping[str, str],
    *,
    jobs: Sequence[Job],
    environment: Mapping[str, JsonValue],
    stop_reason: str,
    gpu_error: str,
) -> Decision:
    """Return the decision on these verdicts, with the tested hardware and the list of metrics without a threshold."""
    required = {name: check.required for name, check in settings.checks.items()}
    without_threshold = metrics_without_threshold(catalog(), measurements, verdicts)
    conflict = "" if gpu_error else device_conflict(settings, jobs, environment)
    return decide(
        required,
        verdicts,
        excluded_checks,
        tested_hardware(settings, jobs, measurements, environment, gpu_error),
        (stop_reason, gpu_error, conflict),
        without_threshold,
        cpu_only(jobs),
    )
