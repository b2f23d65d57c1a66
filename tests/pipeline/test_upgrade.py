"""Records of schema version 1 become records of version 2 without a loss."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.hardware.pair_rates import PAIR_RATES, PairRate
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial
from seatrial.pipeline.upgrade import upgrade
from tests.paths import ROOT

RECORDS = sorted((ROOT / "docs" / "results").rglob("*trial.json"))
OLD = [path for path in RECORDS if json.loads(path.read_text())["schema_version"] == "1"]


def test_records_of_both_versions_are_shipped() -> None:
    assert OLD
    assert len(OLD) < len(RECORDS)


@pytest.mark.parametrize("path", OLD, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_metric_of_an_upgraded_record_is_declared_by_its_check(path: Path) -> None:
    trial = load_trial(path)
    undeclared = {
        (measurement.check, metric.name)
        for measurement in (*trial.measurements, *trial.retries)
        for metric in measurement.metrics
        if not any(fnmatchcase(metric.name, name) for name in catalog()[measurement.check].metrics)
    }
    assert undeclared == set()


@pytest.mark.parametrize("path", OLD, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_measured_is_lost(path: Path) -> None:
    old, trial = json.loads(path.read_text()), load_trial(path)
    for key, measurements in (("measurements", trial.measurements), ("repeats", trial.retries)):
        before, after = old.get(key, []), measurements
        assert len(before) == len(after)
        for first, second in zip(before, after, strict=True):
            assert [metric["value"] for metric in first["metrics"]] == [metric.value for metric in second.metrics]
            added = {"retried"} if "tried_again" not in first["facts"] else set()
            added |= {"node_stage", "cluster_stage", "p99_ratio_measured"}
            added |= {"ranks_compared", "data_wait_timed", "nvls_expected", "fsdp2_variants"}
            assert len(first["facts"]) == len(second.facts.keys() - added)
            assert len(first["series"]) == len(second.series)
    assert [list(job.checks) for job in trial.jobs] == [list(job.options) for job in trial.jobs]


@pytest.mark.parametrize(("option", "retried"), [({}, "yes"), ({"again": True}, "yes"), ({"again": False}, "no")])
def test_gpu_pairs_with_shared_links_have_the_fact_retried(option: dict[str, bool], retried: str) -> None:
    document = json.loads((ROOT / "docs/results/2026-11-22-4xh200/acceptance.trial.json").read_text())
    check = "collectives.gpu_pairs"
    for job in document["jobs"]:
        job["options"] |= {check: option} if check in job["checks"] else {}
    facts = [m["facts"] for m in upgrade(document)["measurements"] if m["check"] == check]  # type: ignore[index]
    assert [values.get("retried") for values in facts] == [retried, None, None, None]


def test_throughput_has_the_facts_about_its_stages() -> None:
    def measurement(**facts: Any) -> dict[str, Any]:
        return {"check": "train.throughput", "metrics": [], "facts": facts}

    recorded = [measurement(world_size=16, nodes=2), measurement(), measurement(world_size=1, nodes=1, node_stage="x")]
    document = upgrade({"schema_version": "2", "measurements": recorded})
    facts = [each["facts"] for each in document["measurements"]]  # type: ignore[index]
    assert facts[0] == {"world_size": 16, "nodes": 2, "node_stage": "yes", "cluster_stage": "yes"}
    assert facts[1] == {}
    assert facts[2]["node_stage"] == "x"


def test_the_fact_on_the_tail_is_added_only_without_its_metric() -> None:
    document = json.loads((ROOT / "docs/results/2026-11-23-2xh200/acceptance.trial.json").read_text())
    (measurement,) = (m for m in document["measurements"] if "percentiles" in m["facts"])
    assert measurement["check"] == "collectives.all_reduce"
    measurement["metrics"].append({"name": "p99_ratio.1GiB", "value": 1.01, "unit": "x", "subject": "cluster"})
    upgrade(document)
    values = {m["check"]: m["facts"].get("p99_ratio_measured", "") for m in document["measurements"] if m["rank"] == 0}
    assert values["collectives.all_reduce"] == values["collectives.gpu_pairs"] == ""
    assert values["collectives.all_gather"].startswith("no: ")


@pytest.mark.parametrize("document", [None, [], {}, {"schema_version": "2", "repeats": []}, {"schema_version": "3"}])
def test_other_documents_are_returned_unchanged(document: Any) -> None:
    assert upgrade(document) is document


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("jobs", 5),
        ("jobs", {}),
        ("jobs", [5]),
        ("measurements", [{}]),
        ("verdicts", [None]),
        ("config", {}),
        ("telemetry", 7),
    ],
)
def test_damaged_records_are_returned_unchanged(key: str, value: Any) -> None:
    document = {**json.loads(OLD[0].read_text()), key: value}
    assert upgrade(document) is document


def test_series_and_insights_of_an_upgraded_record_are_those_of_the_record() -> None:
    trial = load_trial(next(path for path in OLD if path.parent.name == "2026-11-22-4xh200" and "accept" in path.name))
    (measurement,) = (m for m in trial.measurements if m.check == "collectives.all_reduce" and m.rank == 0)
    assert [series.name for series in measurement.series] == [
        "busbw",
        "latency",
        "cuda_graph_busbw",
        "cuda_graph_latency",
    ]
    assert sum(insight.title == "latency" for insight in rejudge(trial).insights) == 7
    curves = {check: {s.name for m in trial.measurements if m.check == check for s in m.series} for check in catalog()}
    assert curves["train.ddp"] == {"loss.ddp", "loss.single_process"}
    assert curves["train.parity"] == {"loss.ddp", "loss.fsdp2", "loss.single_process"}


def test_record_of_version_2_has_the_present_facts_of_filesystem_shared() -> None:
    path = ROOT / "docs/results/2026-11-22-2xh200-restructured/final-quick.trial.json"
    (facts, *_) = [m.facts for m in load_trial(path).measurements if m.check == "filesystem.shared"]
    assert {"any_path_usable", "any_path_shared"} <= facts.keys()
    assert not {"usable", "examined"} & facts.keys()


@pytest.mark.parametrize(
    ("check", "facts", "added"),
    [
        ("train.ddp", {"device": "cpu"}, {"ranks_compared", "data_wait_timed"}),
        ("train.throughput", {"device": "cuda"}, {"ranks_compared", "data_wait_timed"}),
        ("collectives.transport", {"backend": "nccl"}, {"nvls_expected"}),
        ("collectives.transport", {}, set()),  # of another rank than 0
        ("train.fsdp", {"device": "cuda"}, {"ranks_compared", "data_wait_timed"}),
        ("train.parity", {"device": "cuda"}, {"fsdp2_variants"}),
        ("train.lora", {"device": "cuda"}, set()),
        ("kubernetes.pods", {"not_started": {}}, {"pulls_compared", "digests_compared"}),
        ("kubernetes.pods", {"gpus_expected": "yes"}, set()),  # no pod could be created
    ],
)
def test_rules_of_later_metrics_do_not_apply_to_earlier_records(
    check: str, facts: dict[str, Any], added: set[str]
) -> None:
    document = upgrade({"schema_version": "2", "measurements": [{"check": check, "metrics": [], "facts": {**facts}}]})
    upgraded = document["measurements"][0]["facts"]  # type: ignore[index]
    assert upgraded.keys() - facts.keys() == added
    assert all(str(upgraded[name]).startswith("no: ") for name in added)


def test_pair_rates_of_version_2_have_the_present_field_name() -> None:
    rate = {"stage": "directions", "first": "n0", "second": "n1", "gb_s": [1.0]}
    for section in ("measurements", "localization"):
        measurement = {"check": "collectives.localization", "facts": {PAIR_RATES: [{**rate, "one_way": True}]}}
        (upgraded,) = upgrade({"schema_version": "2", section: [measurement]})[section]  # type: ignore[index]
        assert PairRate.model_validate(upgraded["facts"][PAIR_RATES][0]).unidirectional


def test_names_that_changed_within_version_2() -> None:
    facts = {
        "gpu.inventory": {"gpus": [{"nvlinks": [{"link": 0, "speed_mbps": 26562}, {"link": 1, "speed_mbps": None}]}]},
        "host.inventory": {
            "nics": {"interfaces": [{"name": "eth0", "speed_mbps": 25000, "unreadable": {"speed_mbps": "-1"}}]},
            "unreadable": {"nics.interfaces.eth0.speed_mbps": "-1"},
        },
        "device.burn": {"reads_xid": "yes", "error_counters": {"read": 13}},
        "fabric.ports": {"three_ports": "no"},
    }
    document = {
        "schema_version": "2",
        "environment": {"host": {"nics": {"interfaces": [{"name": "eth0", "speed_mbps": 100}]}}},
        "config": {"checks": {"collectives.pairs": {"options": {"retry": 2, "size": 4}}, "device.burn": {}}},
        "jobs": [{"options": {"collectives.gpu_pairs": {"size": 8, "retry": False, "seconds": 1}}}],
        "measurements": [{"check": check, "metrics": [], "facts": values} for check, values in facts.items()],
    }
    new: Any = upgrade(document)
    assert {each["check"]: each["facts"] for each in new["measurements"]} == {
        "gpu.inventory": {"gpus": [{"nvlinks": [{"link": 0, "speed_gb_s": 26.562}, {"link": 1, "speed_gb_s": None}]}]},
        "host.inventory": {
            "nics": {"interfaces": [{"name": "eth0", "speed_mbit_s": 25000, "unreadable": {"speed_mbit_s": "-1"}}]},
            "unreadable": {"nics.interfaces.eth0.speed_mbit_s": "-1"},
        },
        "device.burn": {"xid_readable": "yes", "error_counters": {"counters_read": 13}},
        "fabric.ports": {"three_or_more_ports": "no"},
    }
    assert new["environment"]["host"]["nics"]["interfaces"] == [{"name": "eth0", "speed_mbit_s": 100}]
    assert new["config"]["checks"]["collectives.pairs"]["options"] == {"max_retries": 2, "size": 4}
    options = new["jobs"][0]["options"]["collectives.gpu_pairs"]
    assert list(options.items()) == [("size", 8), ("retry_slow_pairs", False), ("seconds", 1)]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_record_keeps_an_ambiguous_speed(path: Path) -> None:
    assert "speed_mbps" not in load_trial(path).model_dump_json()
