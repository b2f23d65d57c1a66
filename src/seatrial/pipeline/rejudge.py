"""Judges existing records by the rules of this version, and learns baselines from them, without measuring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from seatrial.checks import catalog
from seatrial.config import layers
from seatrial.config.schema import Config, Override
from seatrial.diagnose import refreshed_findings
from seatrial.diagnose.causes import Run
from seatrial.diagnose.slow_nodes import search_notes
from seatrial.judge import judge, plausibility, search_verdicts, site_baseline
from seatrial.judge.decision import decide, metrics_without_threshold
from seatrial.judge.insights import trial_insights
from seatrial.judge.remedies import unknown_gpus
from seatrial.launch import node_prefix
from seatrial.model import (
    CLUSTER,
    Baseline,
    BasisKind,
    Decision,
    Finding,
    Job,
    Measurement,
    MissingNode,
    Outcome,
    Trial,
    UsageError,
    Verdict,
    first_validation_error,
)
from seatrial.model.verdict_text import LAX_THRESHOLD
from seatrial.pipeline.run_directory import load_trial
from seatrial.pipeline.tested_hardware import cpu_only, device_conflict, tested_hardware
from seatrial.util.gc_pause import gc_paused
from seatrial.util.grouping import grouped
from seatrial.util.text import and_more

_SIZES = ("nodes", "gpus_per_node")  # keys of cluster that another trial may set, beside checks
_MAX_NAMED = 8  # nodes or checks listed in the text of a decision


@gc_paused()
def rejudge(
    trial: Trial,
    baseline_file: Path | None = None,
    other_trial: str = "",
    overrides: Sequence[Override] = (),
) -> Trial:
    """Return the trial judged by the rules of this version. ``baseline_file`` replaces the site baseline of the trial.

    ``other_trial``: name or file of a trial whose thresholds and required checks count; ``overrides``: settings that
    count instead of those of the trial: see ``_with_checks_of``.
    Raises UsageError if the config is not valid in this version, or if the new baseline cannot be read, exceeds
    physical limits or is of other GPU models.
    """
    settings = _settings(trial)
    other_options: tuple[Verdict, ...] = ()
    if other_trial or overrides:
        settings, other_options = _with_checks_of(other_trial, settings, overrides)
        config = settings.model_dump(mode="json")
        origins = {"checks": other_trial} if other_trial else dict(trial.origins)
        origins |= {key: origin for origin, key, _ in overrides}
        trial = trial.model_copy(update={"name": settings.name, "config": config, "origins": origins})
    baseline = site_baseline.load(baseline_file, catalog()) if baseline_file else trial.baseline
    if baseline_file and baseline:
        plausibility.validate_baseline(baseline, catalog())
        if mismatch := site_baseline.gpu_model_error(baseline, gpu_models(trial.measurements)):
            raise UsageError(mismatch)
    judged = with_verdicts(trial, settings, baseline, other_options)
    run = judged_run(judged, settings)
    return with_findings(judged, run, refreshed_findings(trial, run))


def with_verdicts(
    trial: Trial, settings: Config, baseline: Baseline | None, other_verdicts: tuple[Verdict, ...] = ()
) -> Trial:
    """Return the record with the verdicts on its measurements, its insights and its decision.

    ``settings``: the config of the record, validated. ``other_verdicts`` are added.
    """
    run = site_baseline.learned_run("", trial.host, trial.started, trial.measurements)
    verdicts = judge(
        settings,
        trial.jobs,
        trial.measurements,
        catalog(),
        trial.excluded_checks,
        baseline,
        retries=trial.retries,
        site_includes_run=bool(baseline and baseline.includes(run)),
    )
    verdicts += search_verdicts(trial.localization, catalog()) + other_verdicts
    insights = trial_insights(settings, trial.measurements, catalog(), baseline)
    decision = make_decision(trial, settings, verdicts, baseline)
    update = {"verdicts": verdicts, "insights": insights, "baseline": baseline, "decision": decision}
    return trial.model_copy(update=update)


def judged_run(trial: Trial, settings: Config) -> Run:
    """Return what diagnose reads of a judged record."""
    return Run(trial.verdicts, trial.measurements, catalog(), node_prefix(settings), trial.localization)


def with_findings(trial: Trial, run: Run, findings: tuple[Finding, ...]) -> Trial:
    """Return the judged record with these findings, and with notes on the search for slow nodes."""
    notes = search_notes(run, findings)
    return trial.model_copy(update={"findings": findings, "insights": (*trial.insights, *notes)})


def _with_checks_of(
    other_trial: str, recorded: Config, overrides: Sequence[Override]
) -> tuple[Config, tuple[Verdict, ...]]:
    """Return the recorded config with thresholds and required checks of another trial, and verdicts on other options.

    Without ``other_trial``, those of the record itself with ``overrides``.
    Checks that only the other trial has were not measured. Checks that only the record has keep their settings. A check
    that was measured with other options than the other trial sets is UNJUDGED.
    """
    for origin, key, _ in overrides:
        if not key.startswith("checks.") and key.removeprefix("cluster.") not in _SIZES:
            expected = " or ".join(["checks.NAME.KEY", *(f"cluster.{size}" for size in _SIZES)])
            raise UsageError(f"{origin} {key}: a finished run is not changed by this key; expected {expected}")
    base: str | dict[str, Any] = other_trial or recorded.model_dump(mode="json")
    resolved = layers.resolve(base, overrides=overrides, environ={}, schemas=catalog())
    other, checks, verdicts = resolved.config, dict(recorded.checks), []
    source = f"trial {other.name}" if other_trial else "--set"
    for name, settings in other.checks.items():
        measured = recorded.checks.get(name)
        options = measured.options if measured else settings.options
        checks[name] = settings.model_copy(update={"options": options})
        if differing := {key for key, value in settings.options.items() if options.get(key) != value}:
            text = ", ".join(f"{key}={options.get(key)!r}, not {settings.options[key]!r}" for key in sorted(differing))
            detail = f"measured with other options than {source} sets: {text}"
            fix = "run the trial with these options"
            verdicts.append(Verdict(name, CLUSTER, Outcome.UNJUDGED, detail=detail, fix=fix))
    sizes = {key: getattr(other.cluster, key) for key in _SIZES if resolved.origins[f"cluster.{key}"] != "default"}
    changes = {"name": other.name, "checks": checks, "cluster": recorded.cluster.model_copy(update=sizes)}
    return recorded.model_copy(update=changes), tuple(verdicts)


def _settings(trial: Trial) -> Config:
    try:
        return Config.model_validate(trial.config)
    except ValidationError as error:
        raise UsageError(
            f"this version of seatrial cannot judge the record: config.{first_validation_error(error)}"
        ) from error


def learn(name: str, paths: Sequence[Path]) -> str:
    """Return the content of the baseline file learned from these runs, judged by the rules of this version.

    Raises UsageError.
    """
    learned = site_baseline.learn(name, {str(path): rejudge(load_trial(path)) for path in paths}, catalog())
    plausibility.validate_baseline(learned, catalog())
    return site_baseline.dump(learned)


def load_baseline(settings: Config) -> Baseline | None:
    """Return the site baseline that the config names; None if it names none. Raises UsageError."""
    return site_baseline.load(Path(settings.baseline), catalog()) if settings.baseline else None


def make_decision(
    trial: Trial, settings: Config, verdicts: Sequence[Verdict], baseline: Baseline | None = None
) -> Decision:
    """Return the decision on these verdicts, with the tested hardware and the list of metrics without a threshold."""
    required = {name: check.required for name, check in settings.checks.items()}
    conflict = "" if trial.gpu_error else device_conflict(settings, trial.jobs, trial.environment)
    marks = [*_lax_thresholds(settings, verdicts, trial.origins)]
    marks += [*_weaker_than_shipped(settings, trial.origins.get("name", "")), *_own_values(verdicts)]
    notes = [*_smaller_sizes(trial.jobs)]
    if baseline:
        error = site_baseline.gpu_model_error(baseline, gpu_models(trial.measurements))
        notes.append(error or site_baseline.summary(baseline))
    return decide(
        required,
        verdicts,
        trial.excluded_checks,
        tested_hardware(settings, trial.jobs, trial.measurements, trial.environment, trial.gpu_error),
        blockers=(trial.stop_reason, trial.gpu_error, conflict),
        metrics_without_threshold=metrics_without_threshold(catalog(), trial.measurements, verdicts),
        cpu_only=cpu_only(trial.jobs),
        notes=notes,
        marks=marks,
        cpu_only_requested=settings.cluster.gpus_per_node == 0,
        unknown_gpus=unknown_gpus(trial.measurements),
        untested_nodes=_untested_nodes(settings, trial.jobs, trial.missing_nodes),
    )


def _untested_nodes(settings: Config, jobs: Sequence[Job], missing_nodes: Sequence[MissingNode]) -> str:
    """Return how many nodes of the trial were tested and which are missing; empty if all were tested."""
    tested = min((job.nodes for job in jobs if job.placement != "control"), default=settings.cluster.nodes)
    parts = [f"{tested} of {settings.cluster.nodes} nodes tested"] if tested < settings.cluster.nodes else []
    if missing_nodes:
        parts.append(f"missing nodes: {and_more([str(node) for node in missing_nodes], _MAX_NAMED)}")
    return ", ".join(parts)


def _lax_thresholds(settings: Config, verdicts: Sequence[Verdict], origins: Mapping[str, str]) -> Iterator[str]:
    """Yield a mark for each check with rules that the trial's thresholds replace, or with lax ones of the user."""
    shipped = ("", f"trial {settings.name}")
    lax = {
        (each.check, each.metric)
        for each in verdicts
        if each.basis and each.basis.lax_reason
        if origins.get(f"checks.{each.check}.expect.{each.metric}", "") not in shipped
    }
    for name, check_settings in settings.checks.items():
        check = catalog().get(name)
        metrics_with_rule = {rule.metric for rule in check.rules} if check and check_settings.override else set()
        if replaced := [metric for metric in check_settings.expect if metric in metrics_with_rule]:
            metrics = ", ".join(replaced)
            yield f"{LAX_THRESHOLD}: override: the trial's thresholds replace the rules of {name} on {metrics}"
        if others := sorted(metric for check, metric in lax if check == name and metric not in replaced):
            yield f"{LAX_THRESHOLD}: {name} on {', '.join(others)}"


def _weaker_than_shipped(settings: Config, origin: str) -> Iterator[str]:
    """Yield a mark if a trial with the name of a shipped one does not require all checks that this one requires.

    ``origin``: where the name of the trial comes from. A shipped trial of an earlier version may have fewer checks.
    """
    if settings.name not in layers.trial_names():
        return
    is_file, missing = origin not in ("", f"trial {settings.name}"), list[str]()
    for name in _required_checks(settings.name):
        if (own := settings.checks.get(name)) is None and is_file:
            missing.append(name)
        elif own and not own.required:
            missing.append(f"{name} (not required)")
    if missing:
        yield f"without checks of the shipped trial {settings.name}: {and_more(missing, _MAX_NAMED)}"


@cache
def _required_checks(trial: str) -> tuple[str, ...]:
    checks = layers.resolve(trial, environ={}, schemas=catalog()).config.checks
    return tuple(name for name, settings in checks.items() if settings.required)


def _own_values(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield how many verdicts have the site's baseline as their only limit."""
    good = [each for each in verdicts if each.outcome in (Outcome.PASS, Outcome.WARN) and each.basis]
    kinds = ({each.basis.kind, *(basis.kind for basis in each.other_limits)} for each in good if each.basis)
    if count := sum(each == {BasisKind.SITE} for each in kinds):
        verdict = "verdict rests" if count == 1 else "verdicts rest"
        yield f"no published reference and no bound: {count:,} {verdict} on your own runs"


def _smaller_sizes(jobs: Sequence[Job]) -> Iterator[str]:
    """Yield a note for each reason why checks were judged at a smaller size than their default."""
    reason_by_check = {name: job.left_out[name] for job in jobs for name in job.checks if name in job.left_out}
    for reason, checks in grouped((reason, check) for check, reason in reason_by_check.items()).items():
        yield f"judged at a smaller size: {and_more(checks, _MAX_NAMED)}, since {reason}"


def gpu_models(measurements: Sequence[Measurement]) -> set[str]:
    """Return the GPU models that the checks used."""
    return {gpu for measurement in measurements if isinstance(gpu := measurement.facts.get("gpu"), str) and gpu}
