"""The command ``readmit``: options that do not fit together, and what it prints without a change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial.operate.drain_limit import prepare
from tests.fakes.slurm import NO_CONFIGURATION, NODES, FakeSlurm, cluster, failure, success
from tests.operate.test_slurm_nodes import OTHERS, OURS, nodes_text
from tests.processes import call


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> FakeSlurm:
    """The fake, with a PATH of nothing but an sbatch that refuses every call: no test of this file submits a job."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "sbatch").write_text('#!/bin/sh\necho "unexpected call: sbatch $*" >&2\nexit 1\n')
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return FakeSlurm(cluster()).install(monkeypatch)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--launcher", "torchrun"], "expected slurm or kubernetes"),
        (["--condition"], "for --launcher kubernetes"),
        (["--launcher", "kubernetes", "--comment"], "for Slurm"),
        (["--drain"], "--state-dir"),
        (["--reason-prefix", "fan"], "needs --undrain"),
        (["--undrain", "--reason-prefix", "  "], "blank"),
        (["n[1"], "not a list of hosts"),
        (["--launcher", "kubernetes"], "kubernetes.image is required"),
        (["--trial", "redmit"], "redmit"),
        (["--baseline", "absent.yaml"], "absent.yaml"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_done(
    options: list[str], error: str, slurm: FakeSlurm, tmp_path: Path
) -> None:
    code, out, err = call("readmit", "node1", "--gpus-per-node", "0", *options)
    assert (code, out) == (2, "")
    assert error in err
    assert all(" show " in command for command in slurm.commands)
    assert not list(tmp_path.glob("seatrial-runs/*"))


def test_dry_run_prints_partners_plan_and_changes(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.replies |= {
        NODES: success(nodes_text({"node1": ("IDLE+DRAIN", OURS)})),
        "scontrol show topology": success(""),
    }
    arguments = ("readmit", "node1", "--gpus-per-node", "0", "--undrain", "--dry-run")
    code, out, err = call(*arguments, "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert [partner["node"] for partner in plan["partners"]] == ["node0", "node2"]
    assert [change["outcome"] for change in plan["changes"]["ACCEPTED"]] == ["planned"] * 3
    assert plan["changes"]["REJECTED"][2]["command"][-1] == f"Reason={OURS}"
    code, text, _ = call(*arguments)
    assert (code, "partner node2: idle" in text) == (0, True)
    assert all(" show " in command for command in slurm.commands)
    assert list(tmp_path.iterdir()) == []


def test_dry_run_without_sbatch_is_refused(slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.replies |= {NODES: success(nodes_text({})), "scontrol show topology": success("")}
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, err = call("readmit", "node1", "--gpus-per-node", "0", "--dry-run")
    assert (code, out, "sbatch is not in PATH" in err) == (2, "", True)


def test_dry_run_asks_the_drain_limit_and_records_nothing(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.replies |= {NODES: success(nodes_text({})), "scontrol show topology": success("")}
    arguments = ("readmit", "node1", "--gpus-per-node", "0", "--drain", "--state-dir", tmp_path, "--dry-run")
    code, text, err = call(*arguments)
    assert (code, "  refused: drain: node1 (no drain record" in text) == (0, True), err
    prepare(tmp_path)
    _, text, _ = call(*arguments)
    assert "  planned: drain: node1" in text
    assert list((tmp_path / "drains").iterdir()) == []


@pytest.mark.parametrize(
    ("states", "error"),
    [
        ({"node1": ("IDLE+DRAIN", OTHERS)}, "someone else"),
        ({"node0": ("MIXED", ""), "node2": ("MIXED", "")}, "no good partner left: node3 can be a partner of node1"),
    ],
)
def test_a_node_that_cannot_be_tested_ends_incomplete(
    states: dict[str, tuple[str, str]], error: str, slurm: FakeSlurm, tmp_path: Path
) -> None:
    slurm.replies[NODES] = success(nodes_text(states))
    out = tmp_path / "out"
    code, _, err = call("readmit", "node1", "--gpus-per-node", "0", "--undrain", "--out", out)
    assert (code, error in err) == (3, True)
    assert not out.exists()
    assert all(" show " in command for command in slurm.commands)


def test_a_host_without_slurm_names_the_other_launcher(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("seatrial.discover.slurm._CONFIGURATION_FILES", ())
    monkeypatch.setattr("psutil.process_iter", lambda _fields: [])
    slurm.replies = {"scontrol": failure(NO_CONFIGURATION)}
    code, _, err = call("readmit", "node1", "--gpus-per-node", "0", "--dry-run")
    assert code == 2
    assert "--launcher kubernetes" in err
