from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.config.layers import ResolvedTrial, load_as, parse_assignment, resolve, trial_names
from seatrial.config.schema import Config
from seatrial.hardware.references import skus
from seatrial.model import Threshold, UsageError
from seatrial.util import data_files

SCHEMAS = catalog()


def resolve_trial(
    trial: str | Path, *overrides: tuple[str, str, Any], environ: Mapping[str, str] | None = None
) -> ResolvedTrial:
    return resolve(str(trial), overrides=overrides, environ=environ or {}, schemas=SCHEMAS)


def trial_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", trial_names())
def test_shipped_trials_resolve(name: str) -> None:
    assert resolve_trial(name).config.name == name


@pytest.mark.parametrize("name", trial_names())
def test_shipped_trials_have_no_yaml_that_is_rejected_in_a_users_file(name: str, tmp_path: Path) -> None:
    """A faster parser reads them, which accepts duplicate keys."""
    copy = tmp_path / f"{name}.yaml"
    copy.write_text(data_files.text(f"trials/{name}.yaml"))
    assert resolve_trial(copy).config == resolve_trial(name).config


def test_names_of_the_shipped_trials() -> None:
    assert trial_names() == ["acceptance", "burn-in", "hook", "quick", "readmit", "training"]


def test_acceptance_has_its_thresholds() -> None:
    checks = resolve_trial("acceptance").config.checks
    assert checks["nodes.reachable"].required
    assert checks["collectives.all_reduce"].required  # its threshold is a reference value of the GPU model
    for sku in (sku for sku in skus() if sku.name in ("NVIDIA H100 SXM", "NVIDIA H200 SXM")):
        references = [reference for reference in sku.expected["all_reduce.busbw.8GiB"] if reference.gpus in (8, 16)]
        assert {reference.required for reference in references} <= {350, None}
        assert [reference.required for reference in references].count(350) == 2
    assert checks["train.ddp"].expect["tokens_per_second_per_gpu"] == Threshold.parse("> 500 tokens/s/GPU")
    assert checks["train.cnn"].expect["accuracy"] == Threshold.parse("> 95 %")
    assert checks["train.cnn"].expect["seconds"] == Threshold.parse("< 180 s")


def test_a_missing_required_option_is_an_error(tmp_path: Path) -> None:
    path = trial_file(tmp_path, "checks: {train.failing_job: }\n")
    with pytest.raises(UsageError, match=re.escape(f"{path}: checks.train.failing_job.options.fault: required")):
        resolve_trial(path)


def test_priority_of_sources_and_origin_of_values(tmp_path: Path) -> None:
    path = trial_file(tmp_path, "cluster: {nodes: 2}\nlimits: {heartbeat_timeout_s: 5}\nchecks: {host.inventory: }\n")
    result = resolve_trial(
        path,
        ("--set", "limits.heartbeat_timeout_s", 9),
        ("--nodes", "cluster.nodes", 4),
        environ={"SEATRIAL_SET_CLUSTER__NODES": "3", "SEATRIAL_SET_LIMITS__STARTUP_S": "11", "PATH": "/bin"},
    )
    assert (result.config.cluster.nodes, result.config.limits.heartbeat_timeout_s) == (4, 9)
    assert result.config.limits.startup_s == 11
    assert result.origins["cluster.nodes"] == "--nodes"
    assert result.origins["limits.heartbeat_timeout_s"] == "--set"
    assert result.origins["limits.startup_s"] == "$SEATRIAL_SET_LIMITS__STARTUP_S"
    assert result.origins["launcher"] == "default"
    assert result.origins["checks.host.inventory"] == str(path)


def test_slurms_number_of_gpus_is_the_default() -> None:
    inside_slurm = {"SLURM_GPUS_ON_NODE": "4"}
    result = resolve_trial("quick", environ=inside_slurm)
    assert result.config.cluster.gpus_per_node == 4
    assert result.origins["cluster.gpus_per_node"] == "$SLURM_GPUS_ON_NODE"
    assert resolve_trial(
        "quick", ("--gpus-per-node", "cluster.gpus_per_node", 8), environ=inside_slurm
    ).config.cluster == (resolve_trial("quick", ("x", "cluster.gpus_per_node", 8)).config.cluster)


def test_slurm_allocation_without_gpus_selects_no_cpu_only_run() -> None:
    assert resolve_trial("quick", environ={"SLURM_GPUS_ON_NODE": "0"}).config.cluster.gpus_per_node is None


def test_slurms_number_of_gpus_does_not_replace_the_trials(tmp_path: Path) -> None:
    path = tmp_path / "eight.yaml"
    path.write_text("cluster: {gpus_per_node: 8}\nchecks: {host.inventory: }\n")
    assert resolve_trial(str(path), environ={"SLURM_GPUS_ON_NODE": "4"}).config.cluster.gpus_per_node == 8


def test_sbatch_variables_override_the_options_of_a_job_script() -> None:
    result = resolve_trial("quick", ("--set", "slurm.partition", "cpu"), environ={"SBATCH_PARTITION": "gpu"})
    assert result.config.slurm.partition == "gpu"
    assert result.origins["slurm.partition"] == "$SBATCH_PARTITION"


def test_set_with_dots_in_check_and_metric_names() -> None:
    result = resolve_trial(
        "quick",
        ("--set", "checks.collectives.all_reduce.options.sizes", ["1MiB"]),
        ("--set", "checks.collectives.all_reduce.expect.busbw.1MiB", "> 1 GB/s"),
    )
    check = result.config.checks["collectives.all_reduce"]
    assert check.options == {"sizes": ["1MiB"]}
    assert check.expect == {"busbw.1MiB": Threshold.parse("> 1 GB/s")}
    assert result.origins["checks.collectives.all_reduce.expect.busbw.1MiB"] == "--set"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("checks: {host.inventry: }", ["unknown check 'host.inventry'", "did you mean 'host.inventory'"]),
        ("lanucher: local\nchecks: {host.inventory: }", ["unknown key 'lanucher'", "did you mean 'launcher'"]),
        ("cluster: {node: 2}\nchecks: {host.inventory: }", ["'cluster.node'", "did you mean 'nodes'"]),
        ("checks: {host.inventory: {requird: no}}", ["'checks.host.inventory.requird'", "did you mean 'required'"]),
        ("checks: {train.cnn: {options: {epoch: 2}}}", ["options.epoch", "did you mean 'epochs'"]),
        ("checks: {train.cnn: {options: {epochs: many}}}", ["options.epochs", "many"]),
        ("checks: {train.cnn: {expect: {acuracy: '> 95 %'}}}", ["did you mean 'accuracy'", "did you mean 'accuracy'"]),
        ("checks: {train.cnn: {expect: {seconds: '< 180 ms'}}}", ["'ms'", "'ms'"]),
        ("checks: {train.cnn: {expect: {accuracy: high}}}", ["not a threshold"]),
        ("checks: {train.cnn: {expect: {accuracy: 95}}}", ["accuracy", "95 is not a threshold"]),
        ("checks: {train.cnn: {expect: {accuracy: }}}", ["None is not a threshold"]),
        ("checks: {collectives.all_reduce: {options: {sizes: [8GB]}}}", ["8GB", "is not a size"]),
        ("cluster: {nodes: 0}\nchecks: {host.inventory: }", ["cluster.nodes", "greater than or equal to 1"]),
        ("checks: {}", ["at least one check"]),
        ("name: x", ["at least one check"]),
        ("checks: {host.inventory: , train.cnn: }\nchecks: {host.inventory: }", ["duplicate key 'checks'"]),
        ("checks: {train.cnn: {expect: {accuracy: '> 95 %'}, expect: {}}}", ["duplicate key 'expect'"]),
        ("just words", ["expected a mapping"]),
        ("checks: [", ["not valid YAML"]),
        ("", ["is empty", "expected a mapping"]),
        ("# only a comment\n", ["is empty"]),
        ("launcher: teleport\nchecks: {host.inventory: }", ["launcher", "teleport"]),
        ("checks: {train.cnn: false}", ["checks.train.cnn must be a mapping", "or empty (got False)"]),
        ("checks: {train.cnn: 5}", ["checks.train.cnn must be a mapping", "(got 5)"]),
        ("checks: {train.cnn: ''}", ["checks.train.cnn must be a mapping"]),
        ("checks: {train.cnn: []}", ["checks.train.cnn must be a mapping"]),
    ],
)
def test_error_names_the_trial_file_and_the_expected_value(tmp_path: Path, text: str, messages: list[str]) -> None:
    path = trial_file(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        resolve_trial(path)
    for message in [str(path), *messages]:
        assert message in str(caught.value)


HOST = "checks: {host.inventory: }\n"
BILLION_LAUGHS = "a: &a [x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghij"))


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("checks: " + "[" * 10_000, ["nested deeper than 32 levels"]),
        ("checks:\n" + "- " * 10_000 + "x", ["nested deeper than 32 levels"]),
        ("checks: {train.cnn: {options: " + "{a: " * 40 + "1" + "}" * 42, ["nested deeper than 32 levels"]),
        ("checks: &a [*a]", ["anchors and aliases", "line 1, column 9"]),
        ("checks: *a", ["anchors and aliases"]),
        (BILLION_LAUGHS, ["anchors and aliases"]),
        ("<<: {cluster: {nodes: 2}}\n" + HOST, ["merge key '<<' is not supported"]),
        ("1: 2\n" + HOST, ["key '1' is not a string in YAML 1.1", "quote it"]),
        ("null: x\n" + HOST, ["key 'null' is not a string", "quote it"]),
        ("? [a]\n: x\n" + HOST, ["a list or mapping cannot be a key"]),
        ("x" * 2**20 + ": 1\n" + HOST, ["1048576"]),
        ("slurm: {time_min: " + "9" * 5_000 + "}\n" + HOST, ["not valid YAML", "digits"]),
        ("cluster: {nodes: 0x" + "f" * 5_000 + "}\n" + HOST, ["cluster.nodes", "20000 bits"]),
        ("cluster: {nodes: 2000000}\n" + HOST, ["cluster.nodes", "less than or equal to 1000000"]),
        ("description: 2026-13-45\n" + HOST, ["not valid YAML", "month must be in 1..12"]),
        ('name: "\\U00110000"\n' + HOST, ["not valid YAML"]),
        ("limits: {heartbeat_timeout_s: .inf}\n" + HOST, ["limits.heartbeat_timeout_s", "finite number (got inf)"]),
        ("limits: {heartbeat_timeout_s: .nan}\n" + HOST, ["limits.heartbeat_timeout_s", "finite number (got nan)"]),
        (
            "limits: {heartbeat_timeout_s: 1e300}\n" + HOST,
            ["limits.heartbeat_timeout_s", "less than or equal to 2678400"],
        ),
        (
            "limits: {heartbeat_timeout_s: 1.0e+300}\n" + HOST,
            ["limits.heartbeat_timeout_s", "less than or equal to 2678400"],
        ),
        ("checks: {slurm.jobs: {options: {wait_s: .inf}}}", ["checks.slurm.jobs.options.wait_s", "finite"]),
        ("checks: {slurm.jobs: {options: {wait_s: inf}}}", ["checks.slurm.jobs.options.wait_s", "finite"]),
        ("limits: {heartbeat_timeout_s: nan}\n" + HOST, ["limits.heartbeat_timeout_s", "nan"]),
        ("checks: {collectives.all_reduce: {options: {sizes: [.nan]}}}", ["all_reduce.options.sizes", "finite"]),
        ("checks: {collectives.all_reduce: {options: {sizes: [" + "9" * 400 + "TiB]}}}", ["options", "too large"]),
        ("checks: {host.inventory: {limit_s: .inf}}", ["checks.host.inventory.limit_s", "finite"]),
        ('name: "a\\0b"\n' + HOST, ["name: control characters", r"'a\x00b'"]),
        ('name: "a\\nb"\n' + HOST, ["name: control characters"]),
        ('name: "\\udcff"\n' + HOST, ["name: control characters"]),
        ("name: /../../etc\n" + HOST, ["name: ", "without '/'", "got '/../../etc'"]),
        ("name: ''\n" + HOST, ["name: ", "expected 1 to 200 bytes"]),
        ("name: " + "ä" * 101 + "\n" + HOST, ["name: ", "expected 1 to 200 bytes"]),
        ('environment: {venv: "/a\\0b"}\n' + HOST, ["environment.venv: control characters"]),
        ('slurm: {extra: ["--a\\nrm -rf /"]}\n' + HOST, ["slurm.extra: control characters"]),
        ('env: {A: "1\\n2"}\n' + HOST, ["env.A: control characters"]),
        ('env: {"A\\0": x}\n' + HOST, ["env: control characters"]),
        ("env: {'A=B': x}\n" + HOST, ["env.A=B", "environment variable"]),
        ("env: {'': x}\n" + HOST, ["env.", "environment variable"]),
        ("env: {A B: x}\n" + HOST, ["env.A B", "environment variable"]),
        ("env: {1A: x}\n" + HOST, ["env.1A", "environment variable"]),
    ],
)
def test_hostile_trial_file_gives_one_message(tmp_path: Path, text: str, messages: list[str]) -> None:
    test_error_names_the_trial_file_and_the_expected_value(tmp_path, text, messages)


def test_trial_name_from_a_file_name_with_special_characters(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"my\xff\ntrial (2).yaml")
    path.write_text("description: |\n  several\n  lines\n" + HOST)
    config = resolve_trial(path).config
    assert config.name == "my\ufffd\ufffdtrial (2)"
    assert config.description == "several\nlines\n"


ALL_REDUCE = "checks: {collectives.all_reduce: {options: %s, expect: {%s: '%s'}}}"
SPEED = "checks: {filesystem.speed: {options: %s, expect: {%s: '%s'}}}"
CNN = "checks: {train.cnn: {expect: {accuracy: '%s'}}}"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (ALL_REDUCE % ("{}", "busbw.8GB", "> 1 GB/s"), ["expect.busbw.8GB", "'8GB' is not a size"]),
        (ALL_REDUCE % ("{}", "busbw.8gib", "> 1 GB/s"), ["expect.busbw.8gib", "'8gib' is not a size"]),
        (ALL_REDUCE % ("{}", "busbw.8192MiB", "> 1 GB/s"), ["spells '8192MiB' as '8GiB'"]),
        (ALL_REDUCE % ("{}", "busbw.1.5KiB", "> 1 GB/s"), ["'1536B'"]),
        (ALL_REDUCE % ("{}", "'busbw.*'", "> 1 GB/s"), ["expect.busbw.*", "one of busbw.*, such as busbw.1GiB"]),
        (ALL_REDUCE % ("{sizes: [2MiB]}", "'busbw.*'", "> 1 GB/s"), ["such as busbw.2MiB"]),
        (ALL_REDUCE % ("{}", "busbw.", "> 1 GB/s"), ["one of busbw.*"]),
        (ALL_REDUCE % ("{}", "busbw", "> 1 GB/s"), ["one of busbw.*"]),
        (ALL_REDUCE % ("{sizes: [1MiB, 1536]}", "busbw.8GiB", "> 1 GB/s"), ["'8GiB' is not", "1MiB, 1536B"]),
        (ALL_REDUCE % ("{}", "bus.8GiB", "> 1 GB/s"), ["unknown metric"]),
        (ALL_REDUCE % ("{sizes: {from: 8B, to: 2B}}", "busbw.8B", "> 1 GB/s"), ["options.sizes", "from 8 B to 2 B"]),
        (ALL_REDUCE % ("{sizes: {from: 8B, to: 32B}}", "busbw.64B", "> 1 GB/s"), ["8B, 16B, 32B"]),
        (
            ALL_REDUCE % ("{cuda_graph_sizes: [1KiB]}", "cuda_graph_latency.8B", "< 1 us"),
            ["'8B' is not measured", "1KiB"],
        ),
        (ALL_REDUCE % ("{percentile_sizes: [4MiB]}", "p99.1GiB", "< 1 us"), ["'1GiB' is not measured", "4MiB"]),
        (SPEED % ("{}", "read_single./data", "> 1 GB/s"), ["'/data' is not measured", "run_directory"]),
        (SPEED % ("{paths: [/data]}", "read_single.run_directory", "> 1 GB/s"), ["is not measured", "/data"]),
        (CNN % "> 0.9 %", ["did you mean 90 %?"]),
        (CNN % "> 0.9", ["has no unit", "'%'"]),
        (ALL_REDUCE % ("{}", "busbw.8GiB", "> 1"), ["has no unit", "'GB/s'"]),
        (CNN % "> 195 %", ["195 % is not between 0 and 100 %"]),
        (CNN % "> -1 %", ["-1 % is not between 0 and 100 %"]),
        (CNN % "> 95 %%", ["'%%'", "'%'"]),
        (CNN % "> 95 s", ["'s'", "'%'"]),
    ],
)
def test_threshold_of_a_metric_that_is_not_measured_is_refused(tmp_path: Path, text: str, messages: list[str]) -> None:
    test_error_names_the_trial_file_and_the_expected_value(tmp_path, text, messages)


@pytest.mark.parametrize(
    "text",
    [
        ALL_REDUCE % ("{}", "busbw.8GiB", "> 1 GB/s"),
        ALL_REDUCE % ("{sizes: [1MiB, 1536]}", "latency.1536B", "< 9 us"),
        ALL_REDUCE % ("{}", "wrong_elements", "== 0"),
        ALL_REDUCE % ("{sizes: {from: 8B, to: 1GiB, factor: 2}}", "busbw.512MiB", "> 1 GB/s"),
        ALL_REDUCE % ("{sizes: [1MiB], cuda_graph_sizes: [8B]}", "cuda_graph_latency.8B", "< 30 us"),
        ALL_REDUCE % ("{sizes: [1MiB], modes: [back_to_back, percentiles]}", "p95.1GiB", "< 9 us"),
        SPEED % ("{}", "read_single.run_directory", "> 1 GB/s"),
        SPEED % ("{paths: [/data/a.b]}", "create_concurrent./data/a.b", "> 100 files/s"),
        CNN % "> 95 %",
        "checks: {train.cnn: {expect: {reload_accuracy_difference: '< 0.1 %'}}}",
    ],
)
def test_threshold_of_a_measured_metric_is_accepted(tmp_path: Path, text: str) -> None:
    assert resolve_trial(trial_file(tmp_path, text)).config.checks


def test_worker_variable_keeps_its_case_and_is_text(tmp_path: Path) -> None:
    result = resolve_trial(
        trial_file(tmp_path, HOST),
        ("--set", *parse_assignment("env.Both_Cases=on")),
        ("--set", *parse_assignment("env.QUOTED='1'")),
        environ={"SEATRIAL_SET_ENV__NCCL_DEBUG": "INFO", "SEATRIAL_SET_env__A__b": "010"},
    )
    assert result.config.env == {"NCCL_DEBUG": "INFO", "A__b": "010", "Both_Cases": "on", "QUOTED": "1"}
    assert result.origins["env.NCCL_DEBUG"] == "$SEATRIAL_SET_ENV__NCCL_DEBUG"


def test_threshold_from_an_environment_variable() -> None:
    variable = "SEATRIAL_SET_CHECKS__TRAIN.CNN__EXPECT__ACCURACY"
    expect = resolve_trial("acceptance", environ={variable: "> 97 %"}).config.checks["train.cnn"].expect
    assert expect["accuracy"] == Threshold.parse("> 97 %")


def test_unknown_trial_and_missing_file() -> None:
    with pytest.raises(UsageError, match="did you mean 'acceptance'"):
        resolve_trial("aceptance")
    for name in ("nosuch.yaml", "no\0such.yaml", f"{'x' * 999}.yaml"):
        with pytest.raises(UsageError, match=f"cannot read {re.escape(name)}"):
            resolve_trial(name)


def test_file_that_is_not_yaml_is_refused_by_its_name() -> None:
    with pytest.raises(UsageError, match=r"config\.json: expected a \.yaml file"):
        load_as(Config, "config.json")


def test_bounds_of_two_sources_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    path = trial_file(tmp_path, 'checks: {train.cnn: {expect: {seconds: "< 180 s"}}}\n')
    key = "checks.train.cnn.expect.seconds"
    with pytest.raises(UsageError) as refused:
        resolve_trial(path, ("--set", key, "> 200 s"))
    for text in ("--set", key, "> 200 s", "< 180 s", str(path)):
        assert text in str(refused.value)
    for value in ("< 60 s", "> 60 s", "== 200 s"):
        expect = resolve_trial(path, ("--set", key, value)).config.checks["train.cnn"].expect
        assert expect["seconds"] == Threshold.parse(value)


def test_override_needs_a_threshold_and_is_set_by_its_key(tmp_path: Path) -> None:
    key = "checks.train.cnn.override"
    path = trial_file(tmp_path, 'checks: {train.cnn: {expect: {seconds: "< 600 s"}}}\n')
    assert resolve_trial(path, ("--set", key, True)).config.checks["train.cnn"].override
    with pytest.raises(UsageError, match="expect"):
        resolve_trial("quick", ("--set", key, True))


def test_set_without_equals_sign_or_with_an_unknown_check() -> None:
    with pytest.raises(UsageError, match="expected key=value"):
        parse_assignment("launcher")
    with pytest.raises(UsageError, match=r"--set cluster\.nodes=: empty value"):  # cluster.nodes=$UNSET
        parse_assignment("cluster.nodes=")
    assert parse_assignment("env.EMPTY=") == ("env.EMPTY", "")
    assert parse_assignment("cluster.nodes=null") == ("cluster.nodes", None)
    with pytest.raises(UsageError, match=r"did you mean 'train\.cnn'"):
        resolve_trial("quick", ("--set", "checks.train.cn.required", False))
    with pytest.raises(UsageError, match="is a value"):
        resolve_trial("quick", ("--set", "name.first", "x"))


def test_set_reads_yaml() -> None:
    assert parse_assignment("a.b=[1, 2]") == ("a.b", [1, 2])
    assert parse_assignment("a= > 3 GB/s ") == ("a", "> 3 GB/s")


@pytest.mark.parametrize(
    ("override", "environ", "message"),
    [
        (("--set", "slurm.partitoin", "x"), {}, "--set: unknown key 'slurm.partitoin'"),
        (("--nodes", "cluster.nodes", 0), {}, "--nodes: expected"),
        (
            ("--set", "kubernetes.image_pull_secrets", "x"),
            {},
            "--set: kubernetes.image_pull_secrets: expected a list, such as [a, b] (got 'x')",
        ),
        (("--set", "checks.train.ddp.limit_s", -1), {}, "--set: checks.train.ddp.limit_s: "),
        (("--set", "checks.collectives.all_reduce.options.sizes", ["x"]), {}, "--set: checks.collectives.all_reduce"),
        (
            ("--set", "slurm.mem", "1"),
            {"SEATRIAL_SET_LIMITS__STARTUP_S": "-4"},
            "$SEATRIAL_SET_LIMITS__STARTUP_S: lim",
        ),
    ],
)
def test_error_names_the_origin_of_the_value(
    override: tuple[str, str, Any], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError) as error:
        resolve_trial("quick", override, environ=environ)
    assert str(error.value).startswith(message)


def test_error_in_the_file_names_the_file_despite_overrides(tmp_path: Path) -> None:
    path = trial_file(tmp_path, "slurm: {time_min: soon}\nchecks: {host.inventory: }\n")
    with pytest.raises(UsageError, match=rf"^{re.escape(str(path))}: slurm.time_min"):
        resolve_trial(path, ("--set", "slurm.mem", "1"))


def test_fabric_from_the_command_line() -> None:
    kind = ("--set", *parse_assignment("cluster.fabric.kind=tcp"))
    rate = ("--set", *parse_assignment("cluster.fabric.rate=100 Gb/s"))
    fabric = resolve_trial("quick", kind, rate).config.cluster.fabric
    assert fabric
    assert (fabric.kind, fabric.rate) == ("tcp", 100.0)
    with pytest.raises(UsageError, match=r"cluster\.fabric\.kind"):
        resolve_trial("quick", rate)
    with pytest.raises(UsageError, match=r"cluster\.fabric\.speed"):
        resolve_trial("quick", kind, ("--set", "cluster.fabric.speed", 1))


def test_error_of_an_option_names_its_key_once(tmp_path: Path) -> None:
    path = trial_file(tmp_path, HOST)
    with pytest.raises(UsageError, match=r"^--nodes: expected greater than or equal to 1"):
        resolve_trial(path, ("--nodes", "cluster.nodes", 0))
    with pytest.raises(UsageError, match=r"^--set: cluster\.nodes: expected"):
        resolve_trial(path, ("--set", "cluster.nodes", 0))


def test_directory_instead_of_a_trial(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is a directory: give a trial, .* --resume"):
        resolve_trial(str(tmp_path))
