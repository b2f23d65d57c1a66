"""Upgrades trial records of schema version 1, and of earlier versions of schema version 2. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from seatrial.checks.fabric import gpu_pairs, pairs, ports, transport
from seatrial.checks.gpu import burn, inventory
from seatrial.checks.host import filesystem_shared
from seatrial.checks.host import inventory as host_inventory
from seatrial.checks.training import ddp, fsdp, parity, throughput
from seatrial.config import renames
from seatrial.hardware.pair_rates import PAIR_RATES
from seatrial.model import ERROR_COUNTERS

Record = dict[str, Any]
# New names of the fields of each record: version 1 -> version 2
_TRIAL = {"left_out": "excluded_checks", "stopped": "stop_reason", "trouble": "gpu_error", "repeats": "retries"}
_SESSION = {"stopped": "stop_reason"}
_JOB = {"promised_gpus": "expected_gpus", "promised_nodes": "expected_nodes", "again": "retry"}
_RESULT = {"culprit": "failed_subject", "nodes": "nodelist"}
_MEASUREMENT = {"again": "retry"}
_DECISION = {"recorded_only": "metrics_without_threshold", "scope": "tested_hardware"}
_FINDING = {"what": "title", "where": "subject", "why": "evidence", "remedy": "fix"}
_VERDICT = {"remedy": "fix", "reason": "detail", "why": "meaning", "share": "ratio", "opposite": "opposite_value"}
_REFERENCE = {"floor": "required"}
_TELEMETRY = {
    "not_looked_at": "unsampled_gpus",
    "least_looks_hz": "min_sample_rate_hz",
    "most_looks_hz": "max_sample_rate_hz",
    "cpu_share": "sampler_cpu_share",
    "absent": "unreadable_gauges",
    "complaints": "warnings",
}
_LOAD = {"throttled": "throttled_share"}
# Checks whose facts or options were renamed within version 2
_CHECKS_WITH_RENAMED_FACTS = (burn.CHECK.name, filesystem_shared.CHECK.name, ports.CHECK.name)
_CHECKS_WITH_RENAMED_OPTIONS = (gpu_pairs.CHECK.name, pairs.CHECK.name)
_INVENTORIES = (inventory.CHECK.name, host_inventory.CHECK.name)
_OPERATIONS = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter", "send_receive")
_COLLECTIVES = tuple(f"collectives.{operation}" for operation in _OPERATIONS)
_ROLES = {"least": "min", "greatest": "max"}
_COUNTERS = {
    "read": "counters_read",
    "denied": "permission_denied",
    "lacks": "not_supported",
    "unread": "unreadable",
    "grew": "increased",
}


def upgrade(document: object) -> object:
    """Return a record of schema version 1 or 2 with the present names; any other or damaged document unchanged.

    ``document`` itself may be changed. A verdict of version 1 keeps its text as ``detail``, without the fields of
    version 2; ``seatrial judge`` makes new verdicts.
    """
    if not isinstance(document, dict) or document.get("schema_version") not in ("1", "2"):
        return document
    try:
        return _upgraded(document) if document["schema_version"] == "1" else _with_present_names(document)
    except (AttributeError, TypeError, KeyError):
        return document  # damaged: Trial.model_validate names the first error


def upgrade_changes(text: str) -> list[str]:
    """Return the changes that ``upgrade`` makes in the record with this JSON text, as lines; empty if it makes none."""
    old: Any = json.loads(text)
    new: Any = upgrade(json.loads(text))  # a second copy, since upgrade may change its argument
    if old == new:
        return []
    if old["schema_version"] == "1":
        return [f"schema version 1 -> {new['schema_version']}"]
    old_names = {name for mapping in _mappings(old) for name in mapping}
    new_names = {name for mapping in _mappings(new) for name in mapping}
    changes = []
    if unused_names := old_names - new_names:
        changes.append(f"no longer used: {', '.join(sorted(unused_names))}")
    if added_names := new_names - old_names:
        changes.append(f"added: {', '.join(sorted(added_names))}")
    return changes or ["old names"]


def _with_present_names(document: Record) -> Record:
    """Return a record of version 2 with present names, and with the facts that rules added later require."""
    for measurement in (*document.get("measurements", ()), *document.get("retries", ())):
        if (check := measurement["check"]) in _CHECKS_WITH_RENAMED_FACTS:
            facts = measurement.get("facts", {})
            measurement["facts"] = {renames.new_fact(check, name): value for name, value in facts.items()}
        _rename_counters(measurement.get("facts", {}))
    for measurement in (*document.get("measurements", ()), *document.get("localization", ())):
        facts = measurement.get("facts", {})
        if PAIR_RATES in facts:
            facts[PAIR_RATES] = [_rename_fields(rate, {"one_way": "unidirectional"}) for rate in facts[PAIR_RATES]]
    options_by_check = [job.get("options", {}) for job in document.get("jobs", ())]
    checks = (document.get("config") or {}).get("checks", {})
    options_by_check += [{name: settings["options"]} for name, settings in checks.items() if settings.get("options")]
    for options in options_by_check:
        _rename_pair_options(options)
    _rename_speeds(document)
    _add_stages(document)
    _add_p99_ratio_measured(document)
    _add_facts_of_new_metrics(document)
    return document


def _upgraded(document: Record) -> Record:
    """Return a record of version 1 as a record of version 2 with present names."""
    trial = _rename_fields(document, _TRIAL)
    trial["schema_version"] = "2"
    _change_each(trial, "sessions", lambda session: _rename_fields(session, _SESSION))
    _change_each(trial, "results", lambda result: _rename_fields(result, _RESULT))
    for key, change in (("jobs", _job), ("measurements", _measurement), ("retries", _measurement)):
        _change_each(trial, key, change)
    _rename_speeds(trial)
    _add_retried(trial)
    _add_stages(trial)
    _add_p99_ratio_measured(trial)
    _add_facts_of_new_metrics(trial)
    _change_each(trial, "verdicts", _verdict)
    _change_each(trial, "findings", lambda finding: _without_field(_rename_fields(finding, _FINDING), "judged_by"))
    trial["insights"] = [
        {**insight, "check": renames.new_check(insight["check"])}
        for insight in trial.get("insights", ())
        if insight.get("title") != "HARDLY A TEST"
    ]
    _change_each(trial, "timings", lambda timing: {**timing, "name": renames.new_check(timing["name"])})
    if "excluded_checks" in trial:
        trial["excluded_checks"] = {
            renames.new_check(check): option for check, option in trial["excluded_checks"].items()
        }
    if trial.get("decision") is not None:
        trial["decision"] = _decision(trial["decision"])
    if trial.get("config") is not None:
        trial["config"] = _config(trial["config"])
    if trial.get("baseline") is not None:
        trial["baseline"] = _baseline(trial["baseline"])
    if trial.get("telemetry") is not None:
        trial["telemetry"] = _telemetry(trial["telemetry"])
    return trial


def _job(job: Record) -> Record:
    job = _rename_fields(job, _JOB)
    job["checks"] = [renames.new_check(check) for check in job["checks"]]
    job["options"] = {renames.new_check(check): _options(check, options) for check, options in job["options"].items()}
    job["limits"] = {renames.new_check(check): limit for check, limit in job["limits"].items()}
    return job


def _options(check: str, options: Mapping[str, Any]) -> Record:
    renamed = {renames.new_option(check, name): value for name, value in options.items()}
    return {name: renames.new_option_value(check, name, value) for name, value in renamed.items()}


def _measurement(measurement: Record) -> Record:
    measurement = _rename_fields(measurement, _MEASUREMENT)
    check = measurement["check"]
    measurement["check"] = renames.new_check(check)
    for key, new_name in (("metrics", renames.new_metric), ("series", renames.new_series)):
        measurement[key] = [{**item, "name": new_name(check, item["name"])} for item in measurement.get(key, ())]
    facts = {renames.new_fact(check, name): value for name, value in measurement.get("facts", {}).items()}
    _rename_counters(facts)
    measurement["facts"] = facts
    return measurement


def _rename_pair_options(options_by_check: Record) -> None:
    """Rename, in place, options that were renamed within version 2."""
    for check in _CHECKS_WITH_RENAMED_OPTIONS:
        for option in [*options_by_check.get(check, ())]:
            options_by_check[check][renames.new_option(check, option)] = options_by_check[check].pop(option)


def _rename_counters(facts: Record) -> None:
    if isinstance(counters := facts.get(ERROR_COUNTERS), dict):
        facts[ERROR_COUNTERS] = _rename_fields(counters, _COUNTERS)


def _rename_speeds(trial: Record) -> None:
    """Rename ``speed_mbps`` in the inventories to ``speed_mbit_s``; for NVLinks, convert MB/s to ``speed_gb_s``."""
    measurements = (*trial.get("measurements", ()), *trial.get("retries", ()))
    facts = [measurement.get("facts", {}) for measurement in measurements if measurement["check"] in _INVENTORIES]
    for mapping in _mappings([*facts, trial.get("environment")]):
        if "link" in mapping and "speed_mbps" in mapping:
            speed = mapping.pop("speed_mbps")
            mapping["speed_gb_s"] = speed / 1e3 if isinstance(speed, int) else speed
        for name in [name for name in mapping if name.rpartition(".")[2] == "speed_mbps"]:
            mapping[f"{name.removesuffix('speed_mbps')}speed_mbit_s"] = mapping.pop(name)


def _add_retried(trial: Record) -> None:
    """Add the fact ``retried`` of collectives.gpu_pairs, which the first versions did not record.

    Where these versions measured ``shared_links``, they measured slow pairs again, except if ``retry_slow_pairs`` was
    false.
    """
    check = "collectives.gpu_pairs"
    options = [job["options"].get(check, {}) for job in trial.get("jobs", ())]
    retried = "no" if any(values.get("retry_slow_pairs") is False for values in options) else "yes"
    for measurement in (*trial.get("measurements", ()), *trial.get("retries", ())):
        if measurement["check"] == check and any(item["name"] == "shared_links" for item in measurement["metrics"]):
            measurement["facts"].setdefault("retried", retried)


def _add_stages(trial: Record) -> None:
    """Add the facts about the stages of train.throughput, which the first versions did not record."""
    for measurement in (*trial.get("measurements", ()), *trial.get("retries", ())):
        facts = measurement.get("facts", {})
        ranks, nodes = facts.get("world_size"), facts.get("nodes")
        if measurement["check"] == throughput.CHECK.name and isinstance(ranks, int) and isinstance(nodes, int):
            measurement["facts"] = {**throughput.stage_facts(ranks, nodes), **facts}


def _add_p99_ratio_measured(trial: Record) -> None:
    """Add the fact ``p99_ratio_measured`` to collectives of earlier versions, which have no metric p99_ratio."""
    for measurement in (*trial.get("measurements", ()), *trial.get("retries", ())):
        # only rank 0 records the fact backend
        is_rank_0 = measurement["check"] in _COLLECTIVES and "backend" in measurement.get("facts", {})
        if is_rank_0 and not any(item["name"].startswith("p99_ratio.") for item in measurement["metrics"]):
            measurement["facts"].setdefault("p99_ratio_measured", "no: recorded by a version without this metric")


def _add_facts_of_new_metrics(trial: Record) -> None:
    """Add the facts that rules on later metrics require, with the value "no": the record lacks these metrics."""
    facts_by_check = {
        **dict.fromkeys(
            (ddp.CHECK.name, fsdp.CHECK.name, throughput.CHECK.name), ("ranks_compared", "data_wait_timed")
        ),
        transport.CHECK.name: ("nvls_expected",),
        parity.CHECK.name: ("fsdp2_variants",),
        "kubernetes.pods": ("pulls_compared", "digests_compared"),
    }
    for measurement in (*trial.get("measurements", ()), *trial.get("retries", ())):
        # only measurements that report facts: rank 0 has device or backend, kubernetes.pods has not_started
        if not measurement.get("facts", {}).keys().isdisjoint(("device", "backend", "not_started")):
            for fact in facts_by_check.get(measurement["check"], ()):
                measurement["facts"].setdefault(fact, "no: recorded by a version without this metric")


def _verdict(verdict: Record) -> Record:
    verdict = _without_field(_rename_fields(verdict, _VERDICT), "judged_by")
    check = verdict["check"]
    if verdict.get("metric"):
        verdict["metric"] = renames.new_metric(check, verdict["metric"])
    return {**verdict, "check": renames.new_check(check)}


def _decision(decision: Record) -> Record:
    decision = _without_field(_rename_fields(decision, _DECISION), "unjudged")
    decision["cpu_only"] = str(decision.get("tested_hardware") or "").startswith("REHEARSAL")
    return decision


def _config(config: Record) -> Record:
    config = dict(config)
    for old, new in renames.table()["trial"].items():
        group, key = old.split(".")
        if key in config.get(group, {}):
            config[group] = _rename_fields(config[group], {key: new.rpartition(".")[2]})
    config["checks"] = {
        renames.new_check(check): {
            **settings,
            "options": _options(check, settings.get("options", {})),
            "expect": {
                renames.new_metric(check, metric): limit for metric, limit in settings.get("expect", {}).items()
            },
        }
        for check, settings in config["checks"].items()
    }
    return config


def _baseline(baseline: Record) -> Record:
    references = renames.table()["references"]
    expected = {
        references.get(key, key): [_rename_fields(value, _REFERENCE) for value in values]
        for key, values in baseline["expected"].items()
    }
    return {**baseline, "expected": expected}


def _telemetry(telemetry: Record) -> Record:
    telemetry = _rename_fields(telemetry, _TELEMETRY)
    _change_each(telemetry, "loads", lambda load: _rename_fields(load, _LOAD))
    _change_each(telemetry, "loads", lambda load: {**load, "check": renames.new_check(load["check"])})
    for dashboard in telemetry.get("dashboards", ()):
        for record in _mappings(dashboard):
            if record.get("role") in _ROLES:
                record["role"] = _ROLES[record["role"]]
            if "check" in record:
                record["check"] = renames.new_check(record["check"])
    counts = telemetry.get("unsampled_gpus") or {}
    telemetry["unsampled_gpus"] = {renames.new_check(check): count for check, count in counts.items()}
    return telemetry


def _mappings(value: Any) -> list[Record]:
    """Return every mapping in ``value``, at any depth."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    nested = [mapping for child in children for mapping in _mappings(child)]
    return [value, *nested] if isinstance(value, dict) else nested


def _change_each(record: Record, key: str, change: Callable[[Record], Record]) -> None:
    if key in record:
        if not isinstance(record[key], list):
            raise TypeError(f"{key} is not a list")
        record[key] = [change(item) for item in record[key]]


def _rename_fields(record: Mapping[str, Any], renamed: Mapping[str, str]) -> Record:
    return {renamed.get(name, name): value for name, value in record.items()}


def _without_field(record: Record, field: str) -> Record:
    return {name: value for name, value in record.items() if name != field}
