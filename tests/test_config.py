from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.config import CheckSchema, Resolved, parse_assignment, resolve, trial_names
from seatrial.model import Limit, UsageError

KNOWN = {name: CheckSchema(check.options, check.metrics) for name, check in catalog().items()}


def resolved(trial: str | Path, *overrides: tuple[str, str, Any], environ: Mapping[str, str] | None = None) -> Resolved:
    return resolve(str(trial), overrides=overrides, environ=environ or {}, known=KNOWN)


def trial_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", trial_names())
def test_shipped_trials_resolve(name: str) -> None:
    assert resolved(name).config.name == name


def test_there_are_the_three_trials() -> None:
    assert trial_names() == ["acceptance", "burn-in", "quick"]


def test_acceptance_holds_the_five_promised_thresholds() -> None:
    checks = resolved("acceptance").config.checks
    assert checks["nodes.reachable"].required
    assert checks["collectives.all_reduce"].expect["busbw.8GiB"] == Limit.parse("> 350 GB/s")
    assert checks["train.ddp"].expect["tokens_per_second_per_gpu"] == Limit.parse("> 500 tokens/s/GPU")
    assert checks["train.ddp"].expect["scaling_efficiency"] == Limit.parse("> 90 %")
    assert checks["train.cnn"].expect["accuracy"] == Limit.parse("> 95 %")
    assert checks["train.cnn"].expect["seconds"] == Limit.parse("< 180 s")


def test_later_layers_win_and_every_value_knows_its_origin(tmp_path: Path) -> None:
    path = trial_file(tmp_path, "cluster: {nodes: 2}\nlimits: {silence_s: 5}\nchecks: {host.inventory: }\n")
    result = resolved(
        path,
        ("--set", "limits.silence_s", 9),
        ("--nodes", "cluster.nodes", 4),
        environ={"SEATRIAL_SET_CLUSTER__NODES": "3", "SEATRIAL_SET_LIMITS__STARTUP_S": "11", "PATH": "/bin"},
    )
    assert (result.config.cluster.nodes, result.config.limits.silence_s) == (4, 9)
    assert result.config.limits.startup_s == 11
    assert result.origins["cluster.nodes"] == "--nodes"
    assert result.origins["limits.silence_s"] == "--set"
    assert result.origins["limits.startup_s"] == "$SEATRIAL_SET_LIMITS__STARTUP_S"
    assert result.origins["launcher"] == "default"
    assert result.origins["checks.host.inventory"] == str(path)


def test_a_scheduler_promises_gpus_unless_somebody_says_otherwise() -> None:
    inside_slurm = {"SLURM_GPUS_ON_NODE": "4"}
    result = resolved("quick", environ=inside_slurm)
    assert result.config.cluster.gpus_per_node == 4
    assert result.origins["cluster.gpus_per_node"] == "$SLURM_GPUS_ON_NODE"
    assert resolved("quick", ("--gpus-per-node", "cluster.gpus_per_node", 8), environ=inside_slurm).config.cluster == (
        resolved("quick", ("x", "cluster.gpus_per_node", 8)).config.cluster
    )


def test_a_scheduler_that_gave_less_than_the_trial_promises_does_not_lower_the_promise(tmp_path: Path) -> None:
    path = tmp_path / "eight.yaml"
    path.write_text("cluster: {gpus_per_node: 8}\nchecks: {host.inventory: }\n")
    assert resolved(str(path), environ={"SLURM_GPUS_ON_NODE": "4"}).config.cluster.gpus_per_node == 8


def test_set_reaches_into_check_and_metric_names_with_dots() -> None:
    result = resolved(
        "quick",
        ("--set", "checks.collectives.all_reduce.options.sizes", ["1MiB"]),
        ("--set", "checks.collectives.all_reduce.expect.busbw.1MiB", "> 1 GB/s"),
    )
    check = result.config.checks["collectives.all_reduce"]
    assert check.options == {"sizes": ["1MiB"]}
    assert check.expect == {"busbw.1MiB": Limit.parse("> 1 GB/s")}
    assert result.origins["checks.collectives.all_reduce.expect.busbw.1MiB"] == "--set"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("checks: {host.inventry: }", ["unknown check 'host.inventry'", "did you mean 'host.inventory'"]),
        ("lanucher: local\nchecks: {host.inventory: }", ["unknown key 'lanucher'", "did you mean 'launcher'"]),
        ("cluster: {node: 2}\nchecks: {host.inventory: }", ["'cluster.node'", "did you mean 'nodes'"]),
        ("checks: {host.inventory: {requird: no}}", ["'checks.host.inventory.requird'", "did you mean 'required'"]),
        ("checks: {train.cnn: {options: {epoch: 2}}}", ["options.epoch", "did you mean 'epochs'"]),
        ("checks: {train.cnn: {options: {epochs: many}}}", ["options.epochs", "many"]),
        ("checks: {train.cnn: {expect: {acuracy: '> 95 %'}}}", ["no such metric", "did you mean 'accuracy'"]),
        ("checks: {train.cnn: {expect: {seconds: '< 180 ms'}}}", ["'ms'", "measured in 's'"]),
        ("checks: {train.cnn: {expect: {accuracy: 95}}}", ["accuracy"]),
        ("checks: {train.cnn: {expect: {accuracy: high}}}", ["not a threshold"]),
        ("checks: {collectives.all_reduce: {options: {sizes: [8GB]}}}", ["8GB", "is not a size"]),
        ("cluster: {nodes: 0}\nchecks: {host.inventory: }", ["cluster.nodes", "greater than or equal to 1"]),
        ("checks: {}", ["at least one check"]),
        ("name: x", ["at least one check"]),
        ("checks: {host.inventory: , train.cnn: }\nchecks: {host.inventory: }", ["the key 'checks' stands twice"]),
        ("checks: {train.cnn: {expect: {accuracy: '> 95 %'}, expect: {}}}", ["the key 'expect' stands twice"]),
        ("just words", ["expected a mapping"]),
        ("checks: [", ["not valid YAML"]),
        ("", ["expected a mapping"]),
        ("launcher: teleport\nchecks: {host.inventory: }", ["launcher", "teleport"]),
    ],
)
def test_a_wrong_trial_file_is_named_with_what_was_expected(tmp_path: Path, text: str, words: list[str]) -> None:
    path = trial_file(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        resolved(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_a_trial_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="did you mean 'acceptance'"):
        resolved("aceptance")
    with pytest.raises(UsageError, match=r"cannot read the trial file nosuch\.yaml"):
        resolved("nosuch.yaml")


def test_set_without_equals_sign_or_with_an_unknown_check() -> None:
    with pytest.raises(UsageError, match="expected key=value"):
        parse_assignment("launcher")
    with pytest.raises(UsageError, match=r"did you mean 'train\.cnn'"):
        resolved("quick", ("--set", "checks.train.cn.required", False))
    with pytest.raises(UsageError, match="holds a value"):
        resolved("quick", ("--set", "name.first", "x"))


def test_set_reads_yaml() -> None:
    assert parse_assignment("a.b=[1, 2]") == ("a.b", [1, 2])
    assert parse_assignment("a= > 3 GB/s ") == ("a", "> 3 GB/s")
