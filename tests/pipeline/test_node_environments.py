"""The environment that was asked for is used and recorded, or the run ends before any check."""

from __future__ import annotations

import json
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from seatrial.config.schema import Container
from seatrial.model import DecisionValue, JobState, Outcome, Reason, Trial
from seatrial.pipeline.node_environments import node_environments
from seatrial.pipeline.plan import NodeGpus
from tests.fakes import container_runtime
from tests.paths import ROOT
from tests.processes import CPU_ONLY, HOST_ONLY, call, load

NODES_AND_RANKS = CPU_ONLY + "checks: {host.inventory: , nodes.reachable: , train.cnn: }\n"
PACKAGES = f"{sysconfig.get_path('purelib')}\n{ROOT / 'src'}\n"  # of this process, as a .pth file of a venv


def run_trial(folder: Path, trial: str, *settings: str, env: dict[str, str] | None = None) -> tuple[int, Trial, str]:
    (folder / "t.yaml").write_text(trial)
    options = [word for setting in settings for word in ("--set", setting)]
    code, _, err = call("run", folder / "t.yaml", "--out", folder / "run", *options, env=env)
    return code, load(folder / "run"), err


def refusal(folder: Path, trial: str, *settings: str, env: dict[str, str] | None = None) -> str:
    """Run a trial that ends before any check, with one finding; return the reason of the decision."""
    code, record, err = run_trial(folder, trial, *settings, env=env)
    assert (code, record.decision.value) == (3, DecisionValue.INCOMPLETE), err
    assert "could not be written" not in err, "all reports"
    assert [result.state for result in record.results] == [JobState.REFUSED]
    assert record.measurements == ()
    assert {reason for verdict in record.verdicts for reason in verdict.reasons} == {Reason.NOT_MEASURED}
    (finding,) = record.findings
    assert finding.subject == record.results[0].failed_subject == record.host
    assert finding.first_command
    assert record.decision.reason.startswith(f"preflight failed on {record.host}: {record.results[0].cause}")
    return record.decision.reason


@pytest.mark.parametrize("runtime", ["apptainer", "docker"])
def test_checks_run_in_the_container(runtime: str, tmp_path: Path) -> None:
    image = tmp_path / "torch.sif" if runtime == "apptainer" else "my/image:1"
    (tmp_path / "torch.sif").touch()
    container_runtime.install(tmp_path / "bin", runtime, str(image))
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    settings = (f"container.runtime={runtime}", f"container.image={image}", "env.NOTE=x")
    code, record, err = run_trial(tmp_path, HOST_ONLY, *settings, env={"PATH": path, "HOME": str(tmp_path)})
    assert code == 0, err
    nodes: Any = record.environment["nodes"]
    assert [(node["nodes"], node["runtime"], node["image"]) for node in nodes] == [([record.host], runtime, str(image))]
    assert nodes[0]["prefix"] == sys.prefix
    assert nodes[0]["image_id"] == (None if runtime == "apptainer" else "sha256:0123")
    if runtime == "apptainer":
        assert nodes[0]["in_container"] is True
        assert f"APPTAINER_CONTAINER={image}" in nodes[0]["evidence"]


def test_runtime_that_rejects_the_command(tmp_path: Path) -> None:
    """Such as one without GPUs or of an old version: its message is the reason."""
    container_runtime.install(tmp_path / "bin", "podman", "my/image", python="/nowhere/python3")
    env = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path)}
    reason = refusal(tmp_path, HOST_ONLY, "container.runtime=podman", "container.image=my/image", env=env)
    assert "cannot run seatrial with podman run --rm --entrypoint=python3 my/image: FileNotFoundError" in reason


def test_runtime_missing(tmp_path: Path) -> None:
    settings = ("container.runtime=podman", "container.image=my/image")
    reason = refusal(tmp_path, HOST_ONLY, *settings, env={"PATH": "/usr/bin:/bin"})
    assert "podman is not installed" in reason


def test_image_and_venv_that_do_not_exist(tmp_path: Path) -> None:
    container_runtime.install(tmp_path / "bin", "apptainer", "x")
    env = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    settings = ("container.runtime=apptainer", "container.image=/nowhere/torch.sif")
    assert "/nowhere/torch.sif does not exist" in refusal(tmp_path, HOST_ONLY, *settings, env=env)


def test_container_and_venv_contradict_each_other(tmp_path: Path) -> None:
    settings = ("container.runtime=docker", "container.image=i", "environment.venv=/v")
    (tmp_path / "t.yaml").write_text(HOST_ONLY)
    options = [word for setting in settings for word in ("--set", setting)]
    code, _, err = call("run", tmp_path / "t.yaml", "--out", tmp_path / "run", *options)
    assert (code, "environment.venv /v" in err) == (2, True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("has_seatrial", [False, True])
def test_venv_without_seatrial_or_torch(has_seatrial: bool, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    env = {"PYTHONPATH": str(ROOT / "src")} if has_seatrial else None
    reason = refusal(tmp_path, NODES_AND_RANKS, f"environment.venv={tmp_path / 'bare'}", env=env)
    named = f"{python} cannot import torch" if has_seatrial else f"cannot run seatrial with {python}"
    assert named in reason
    assert reason.endswith("no required check was measured"), "not one reason a check"


def test_venv_is_used_and_environment_is_sourced(tmp_path: Path) -> None:
    venv.create(tmp_path / "own", with_pip=False)
    (site,) = (tmp_path / "own").glob("lib/python3*/site-packages")
    (site / "installed.pth").write_text(PACKAGES)
    (tmp_path / "env.sh").write_text("export HF_HOME=/nowhere\n")
    settings = (f"environment.venv={tmp_path / 'own'}", f"environment.source={tmp_path / 'env.sh'}")
    code, record, err = run_trial(tmp_path, HOST_ONLY, *settings, f"environment.hf_home={tmp_path}")
    assert code == 0, err
    nodes: Any = record.environment["nodes"]
    assert (nodes[0]["prefix"], nodes[0]["runtime"]) == (str(tmp_path / "own"), "none")
    assert {verdict.outcome for verdict in record.verdicts} <= {Outcome.PASS, Outcome.WARN, Outcome.SKIP}


def test_torch_that_cannot_use_the_promised_gpus(tmp_path: Path) -> None:
    """The host has a GPU by its facts, and torch is a CPU build: one reason, no check with a traceback."""
    with patch("seatrial.pipeline.this_host.ThisHost.node_gpus", lambda *_: NodeGpus(1)):
        reason = refusal(tmp_path, "checks: {host.inventory: , device.gemm: , train.cnn: }", "cluster.gpus_per_node=1")
    assert "1 GPU per node expected" in reason


def test_a_run_that_was_refused_can_be_resumed(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    refusal(tmp_path, HOST_ONLY, f"environment.venv={tmp_path / 'bare'}")
    (site,) = (tmp_path / "bare").glob("lib/python3*/site-packages")
    (site / "installed.pth").write_text(PACKAGES)
    code, _, err = call("run", "--resume", tmp_path / "run")
    assert code == 0, err
    assert load(tmp_path / "run").findings == ()


def test_equal_nodes_share_an_entry(tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "nodes" / "attempt1" / "preflight"
    folder.mkdir(parents=True)
    for node, python in {"n0": "3.11.7", "n1": "3.11.7", "n2": "3.12.0"}.items():
        (folder / f"{node}.json").write_text(json.dumps({"node": node, "python": python, "evidence": ["/.dockerenv"]}))
    (folder / "n3.json").write_text('{"node": ')
    entries: Any = node_environments(tmp_path, Container(runtime="docker", image="i"))
    assert [(entry["nodes"], entry["python"], entry["in_container"]) for entry in entries] == [
        (["n0", "n1"], "3.11.7", True),
        (["n2"], "3.12.0", True),
    ]
