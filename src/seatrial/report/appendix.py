"""The appendix of the page, as tables of text: serial numbers, time, jobs, load of GPUs, settings and facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from seatrial.model import Outcome, Trial
from seatrial.model.telemetry import Telemetry
from seatrial.report.identity import Gpu
from seatrial.report.tables import Table, fact_tables, settings
from seatrial.util.grouping import grouped
from seatrial.util.text import plural

MEANINGS: Mapping[str, str] = {
    Outcome.PASS: "measured; meets the threshold",
    Outcome.WARN: "measured; usable, but needs attention. The trial can be accepted",
    Outcome.FAIL: "measured; violates the threshold: the trial is rejected",
    Outcome.ERROR: "could not be measured: the trial cannot be accepted, if the check is required",
    Outcome.UNJUDGED: "no reference value, or inconclusive: the trial cannot be accepted, if the check is required",
    Outcome.SKIP: "not applicable; the reason is shown",
}


def appendix(trial: Trial, gpus: Mapping[str, Gpu]) -> list[tuple[str, str, list[Table]]]:
    """(anchor, title, tables) of each section."""
    in_checks = sum(timing.seconds for timing in trial.timings if timing.kind == "check")
    overhead = max(trial.seconds - in_checks, 0.0)
    title = f"Time: {in_checks:.1f} s in checks, {overhead:.1f} s overhead"
    title += f" ({overhead / trial.seconds:.1%} of the total)" if trial.seconds else ""
    config = Table("", list(settings(trial.config, trial.origins)), ("name", "value", "origin"))
    serials = [(name, gpu.model, gpu.serial or "none", gpu.uuid, gpu.slot, gpu.vbios) for name, gpu in gpus.items()]
    of_gpus = Table("", serials, ("GPU", "model", "serial number", "UUID", "slot", "VBIOS"))
    return [
        *([("serials", f"Serial numbers of {plural(len(gpus), 'GPU')}", [of_gpus])] if gpus else []),
        ("time", title, [_time(trial)]),
        ("jobs", "Jobs", list(_jobs(trial))),
        *([("loads", "Load of each GPU during each check", [_loads(trial)])] if trial.telemetry else []),
        ("config", f"Configuration: {plural(len(config.rows), 'setting')}", [config]),
        ("discovered", "Discovered before the run", list(fact_tables(trial.environment))),
        ("outcomes", "Outcomes", [Table("", [*MEANINGS.items()])]),
    ]


def _time(trial: Trial) -> Table:
    """The seconds of each check and overhead; a resumed trial has several timings of one name."""
    by_name = grouped(((timing.kind, timing.name), timing.seconds) for timing in trial.timings)
    seconds = {(str(kind), name): sum(values) for (kind, name), values in by_name.items()}
    seconds["overhead", "not accounted for"] = max(trial.seconds - sum(seconds.values()), 0.0)
    ordered = sorted(seconds.items(), key=lambda each: (each[0][0], -each[1]))
    return Table("", [(kind, name, f"{value:.2f} s") for (kind, name), value in ordered], ("kind", "name", "duration"))


def _jobs(trial: Trial) -> Iterator[Table]:
    """The planned jobs, the results of all attempts, and the cause of each failure."""
    planned = [
        (job.name, f"{job.nodes} × {job.ranks_per_node}", job.device, f"{job.limit_s:.0f} s", ", ".join(job.checks))
        for job in trial.jobs
    ]
    yield Table("planned", planned, ("job", "nodes × processes", "device", "limit", "checks"))
    results = [
        (
            *(each.job, f"{each.attempt}", each.launcher, each.state),
            *(f"{each.startup_s:.1f} s", f"{each.seconds:.1f} s", each.failed_subject),
        )
        for each in trial.results
    ]
    yield Table("run", results, ("job", "attempt", "launcher", "state", "start-up", "duration", "first failure"))
    for result in trial.results:
        if result.cause:
            lines = [(line,) for line in result.cause.strip().splitlines()]
            yield Table(f"{result.job}, attempt {result.attempt}, {result.state}", lines)


def _loads(trial: Trial) -> Table:
    rows = []
    for load in trial.telemetry.loads if trial.telemetry else ():
        values = (
            (load.sm_util_mean, "%"),
            (load.power_w_mean, "W"),
            (load.power_w_max, "W"),
            (load.temperature_c_max, "°C"),
            (load.sm_clock_mhz_min, "MHz"),
        )
        texts = ["–" if value is None else f"{value:.0f} {unit}" for value, unit in values]
        throttled = ", ".join(f"{reason} {share:.0%}" for reason, share in load.throttled_share.items())
        rows.append([load.check, load.gpu, str(load.samples), *texts, throttled])
    header = ("check", "GPU", "samples", "utilisation", "mean power", "highest power", "highest temperature")
    return Table("", rows, (*header, "lowest SM clock when busy", "throttled share of samples"))


def telemetry_notes(telemetry: Telemetry) -> Iterator[str]:
    """The sample rate, the load of the samplers, and what could not be sampled."""
    low, high = telemetry.min_sample_rate_hz, telemetry.max_sample_rate_hz
    if low is not None and high is not None:
        yield f"Samples per second and GPU: {low:.2g} to {high:.2g}."
    if telemetry.sampler_cpu_share is not None:
        above = ": above the limit of 1 % at one sample per second" if telemetry.exceeds_cpu_limit else ""
        yield f"Highest CPU use of a sampler: {telemetry.sampler_cpu_share:.2%} of one core{above}."
    yield from telemetry.warnings
    if telemetry.unreadable_gauges:
        yield f"Not readable: {'; '.join(f'{name}: {why}' for name, why in telemetry.unreadable_gauges.items())}"
    if counts := telemetry.unsampled_gpus:
        names = ", ".join(f"{check} ({plural(count, 'GPU')})" for check, count in counts.items())
        yield (
            "GPUs without samples after the first second of the check, in which NVML still reports earlier load: "
            f"{names}."
        )
