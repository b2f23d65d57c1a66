"""Renamed keys, checks, options and metrics: new names in error messages and migrated files."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest
import yaml

from seatrial.checks import catalog
from seatrial.config import renames
from seatrial.config.schema import Config
from seatrial.model import UsageError
from seatrial.train.train_config import TrainConfig

OLD_TRIAL = """\
# limits of our site
limits: {silence_s: 30}  # seconds
checks:
  collectives.path: {options: {sockets: true}}
  collectives.all_reduce:
    options: {modes: [parity, device], placement: usual}
    expect: {device_latency.1MiB: "< 30 us"}
  train.lora:
    options: {overrides: [settle_steps=3, max_steps=9]}
    expect: {"tokens_per_second_per_gpu.hf_alone": "> 1 tokens/s/GPU"}
  'train.toolcalls': {}
  collectives.gpu_pairs: {options: {retry: false}}
  collectives.pairs: {options: {retry: 2}}
"""
NEW_TRIAL = """\
# limits of our site
limits: {heartbeat_timeout_s: 30}  # seconds
checks:
  collectives.transport: {options: {sockets_expected: true}}
  collectives.all_reduce:
    options: {modes: [back_to_back, cuda_graph], in_place: default}
    expect: {cuda_graph_latency.1MiB: "< 30 us"}
  train.lora:
    options: {overrides: [untimed_steps=3, max_steps=9]}
    expect: {"tokens_per_second_per_gpu.hf_single_gpu": "> 1 tokens/s/GPU"}
  'train.function_calling': {}
  collectives.gpu_pairs: {options: {retry_slow_pairs: false}}
  collectives.pairs: {options: {max_retries: 2}}
"""

UNITS = {name: check.metrics for name, check in catalog().items()}


def test_migrated_trial_keeps_comments_and_quotes() -> None:
    text, changes = renames.migrated(OLD_TRIAL, "old.yaml", UNITS)
    assert text == NEW_TRIAL
    assert len(changes) == 13
    assert "line 2: silence_s -> heartbeat_timeout_s" in changes
    assert renames.migrated(NEW_TRIAL, "new.yaml", UNITS) == (NEW_TRIAL, [])


def test_thresholds_of_a_migrated_trial_have_units() -> None:
    trial = """\
checks:
  collectives.path:
  collectives.all_reduce:
    expect: {"busbw.1GiB": "> 350", device_latency.1MiB: "<30", wrong_elements: "== 0"}
"""
    text, changes = renames.migrated(trial, "old.yaml", UNITS)
    expect = yaml.safe_load(text)["checks"]["collectives.all_reduce"]["expect"]
    assert expect["busbw.1GiB"] == "> 350 GB/s"
    assert expect["cuda_graph_latency.1MiB"] == "<30 us"
    assert expect["wrong_elements"] == "== 0"
    assert "line 4: > 350 -> > 350 GB/s" in changes
    cnn = 'checks: {train.cnn: {expect: {accuracy: "> 0.95"}}}'
    assert renames.migrated(cnn, "old.yaml", UNITS) == (cnn, []), "a ratio or a percentage: the user must decide"


def test_migrated_training_config() -> None:
    old = (
        "run_name: x\nsettle_steps: 3\ndata: {layout: walks, unequal: true}\n"
        "learning_rate: {shape: cosine, floor: 0.1}\n"
    )
    new = (
        "run_name: x\nuntimed_steps: 3\ndata: {layout: markov_chain, variable_length: true}\n"
        "learning_rate: {schedule: cosine, min_ratio: 0.1}\n"
    )
    assert renames.migrated(old, "x", UNITS)[0] == new
    assert TrainConfig.model_validate({**yaml.safe_load(new), "model": {"name": "mistral-tiny"}}).untimed_steps == 3


def test_migrated_baseline() -> None:
    old = "name: s\nlearned_from: []\nexpected:\n  transfer.h2d_alone:\n  - {gpus: 1, floor: 20}\n"
    assert renames.migrated(old, "x", UNITS)[0] == old.replace("h2d_alone", "h2d_single").replace("floor", "required")


@pytest.mark.parametrize("text", ["", "[]", "a: 1", "a: &x 1\nb: *x", "{", "checks: {\0}", "[" * 5000])
def test_other_files_are_not_migrated(text: str) -> None:
    with pytest.raises(UsageError, match=r"mine\.yaml"):
        renames.migrated(text, "mine.yaml", UNITS)


def test_hint_has_the_new_name_of_an_old_name_only() -> None:
    assert "'limits.heartbeat_timeout_s'" in renames.hint("trial", "limits.silence_s")
    assert "'socket_despite_rdma'" in renames.hint("metrics", "past_rdma", "collectives.transport")
    assert "'write_single./data'" in renames.hint("metrics", "write_one./data", "filesystem.speed")
    assert renames.hint("metrics", "socket_despite_rdma", "collectives.transport") == ""
    assert renames.hint("options", "sizes", "collectives.all_reduce") == ""


def _new_names(section: str) -> list[tuple[str, str]]:
    """(check by its new name or pattern, new name) for all entries of a section."""
    return [
        (renames.new_check(check), new) for check, names in renames.table()[section].items() for new in names.values()
    ]


@pytest.mark.parametrize(("check", "name"), _new_names("metrics"))
def test_every_new_metric_is_declared(check: str, name: str) -> None:
    declared = {metric for entry in catalog().values() if fnmatchcase(entry.name, check) for metric in entry.metrics}
    member = name.replace("*", "x")
    assert any(fnmatchcase(member, pattern) or fnmatchcase(pattern, name) for pattern in declared)


@pytest.mark.parametrize(("check", "name"), _new_names("options"))
def test_every_new_option_is_declared(check: str, name: str) -> None:
    assert any(name in entry.options.model_fields for entry in catalog().values() if fnmatchcase(entry.name, check))


@pytest.mark.parametrize("name", renames.table()["checks"].values())
def test_every_new_check_exists(name: str) -> None:
    assert name in catalog()


@pytest.mark.parametrize(
    ("model", "key"),
    [
        *((Config, key) for key in renames.table()["trial"].values()),
        *((TrainConfig, key) for key in renames.table()["training"].values()),
    ],
)
def test_every_new_key_exists(model: Any, key: str) -> None:
    for part in key.split("."):
        assert part in model.model_fields
        model = model.model_fields[part].annotation


def test_every_new_reference_is_used_by_a_rule() -> None:
    used = {rule.reference for check in catalog().values() for rule in check.rules}
    assert set(renames.table()["references"].values()) - used <= {"transfer.bidirectional_single"}
