"""An old record judged by the rules of this version; baselines learned from such records. Nothing is measured."""

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
from seatrial.model import Baseline, Decision, Measurement, Trial, UsageError, Verdict, first_validation_error
from seatrial.pipeline.run_directory import load_trial


def rejudge(trial: Trial, baseline: Path | None = None) -> Trial:
    """An old record with the rules of today, and another site baseline if one is given: nothing is measured again.

    Raises UsageError when its config is not one of this version, or the baseline asks for what no hardware can do.
    """
    try:
        settings = Config.model_validate(trial.config)
    except ValidationError as error:
        raise UsageError(
            f"the record is not to be judged by this version: config.{first_validation_error(error)}"
        ) from error
    known = site_baseline.load(baseline, catalog()) if baseline else trial.baseline
    if baseline and known:
        plausibility.validate_baseline(known, catalog())
    verdicts = judge(
        settings, trial.jobs, trial.measurements, catalog(), trial.excluded_checks, known, retries=trial.retries
    )
    obstacles = (trial.stop_reason, trial.gpu_error)
    old = trial.decision
    decision = decision_of(
        settings,
        trial.measurements,
        verdicts,
        trial.excluded_checks,
        obstacles,
        scope=old.tested_hardware,
        cpu_only=old.cpu_only,
    )
    insights = trial_insights(settings, trial.measurements, catalog(), known)
    findings = refreshed_findings(trial, verdicts, catalog())
    return trial.model_copy(
        update={
            "verdicts": verdicts,
            "decision": decision,
            "baseline": known,
            "insights": insights,
            "findings": findings,
        }
    )


def learn(name: str, paths: Sequence[Path]) -> str:
    """The baseline of these runs, judged by the rules of today, as the text of its file. Raises UsageError."""
    learned = site_baseline.learn(name, {str(path): rejudge(load_trial(path)) for path in paths}, catalog())
    plausibility.validate_baseline(learned, catalog())
    return site_baseline.dump(learned)


def baseline_of(settings: Config) -> Baseline | None:
    """The site baseline that the trial names. Raises UsageError."""
    return site_baseline.load(Path(settings.baseline), catalog()) if settings.baseline else None


def decision_of(
    settings: Config,
    measurements: Sequence[Measurement],
    verdicts: Sequence[Verdict],
    left_out: Mapping[str, str],
    obstacles: Sequence[str],
    *,
    scope: str,
    cpu_only: bool,
) -> Decision:
    """The decision on these verdicts, with the figures that were recorded only."""
    required = {name: check.required for name, check in settings.checks.items()}
    recorded = metrics_without_threshold(catalog(), measurements, verdicts)
    return decide(required, verdicts, left_out, scope, obstacles, recorded, cpu_only)
