"""Prolog and Epilog of a real Slurm: a good node runs jobs, a bad one is drained, a second bad one is not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import call, until
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with hooks for four nodes without GPUs, of which one may be taken out within an hour."""
    options = ("--gpus-per-node", "0", "--nodes", "4", "--drain-share", "0.25", "--time-limit", "30")
    paths = ("--state-dir", tmp_path, "--records", tmp_path / "hook.jsonl")
    assert call("hook", "install", tmp_path / "hooks", *options, *paths)[0] == 0
    return tmp_path


def records(site: Path, **expected: Any) -> list[dict[str, Any]]:
    path = site / "hook.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if all(line[key] == value for key, value in expected.items())]


def reason(cluster: Cluster, node: str) -> str:
    return cluster.run(["sinfo", "--noheader", "--nodes", node, "--format", "%T %E"]).stdout.strip()


def test_a_bad_node_is_drained_with_a_reason_and_a_second_one_is_not(
    site: Path, make_cluster: Callable[..., Cluster]
) -> None:
    lines = [f"Prolog={site}/hooks/prolog.sh", f"Epilog={site}/hooks/epilog.sh", "PrologFlags=Alloc"]
    cluster = make_cluster(nodes=4, extra="\n".join([*lines, "PrologEpilogTimeout=60"]))
    assert cluster.run(["srun", "-N4", "hostname"], timeout=120).returncode == 0
    until(lambda: len(records(site, result="passed", kind="epilog")) == 4)
    assert {line["node"] for line in records(site, result="passed", kind="prolog")} == set(cluster.nodes)

    for node in ("node1", "node2"):
        assert cluster.run_on(node, ["mount", "-o", "remount,size=64m", "/dev/shm"]).returncode == 0
    assert cluster.run(["sbatch", "-w", "node1", "-o", "/dev/null", "--wrap", "true"]).returncode == 0
    cluster.wait_for(["node1"], "drained", "draining", seconds=120)
    assert "Prolog error" in reason(cluster, "node1"), "all that Slurm says"
    (entry,) = [json.loads(path.read_text()) for path in (site / "drains").iterdir()]
    assert entry["node"] == "node1"
    assert entry["reason"].startswith(f"seatrial {entry['run_id']}: node1 shm_bytes is 64 MiB, expected >= 1 GiB")

    ran = cluster.run(["srun", "-w", "node2", "hostname"], timeout=120)
    assert ran.stdout == "node2\n", "at most one of four nodes is taken out"
    assert "drain" not in reason(cluster, "node2")
    (limited,) = records(site, node="node2", kind="prolog", result="limited")
    assert "node1" in limited["limit"]
    assert limited["failures"][0]["metric"] == "shm_bytes"

    cluster.stop_controller()
    started = time.monotonic()
    done = cluster.run_on("node0", [f"{site}/hooks/health.sh"])
    assert (done.returncode, done.stdout.split()[0]) == (0, "PASSED"), "without a controller"
    assert time.monotonic() - started < 30
