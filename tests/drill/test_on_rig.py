"""Drills on a real cluster: the two quickest ones, on the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cluster


def test_a_drained_node_and_a_wrong_interface_are_named() -> None:
    drill = [sys.executable, "-m", "seatrial", "drill", "node-drained", "wrong-interface", "--json"]
    rig = [sys.executable, "-m", "tests.rig", "--nodes", "2", "--", *drill]
    done = subprocess.run(rig, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout)
    assert [(result["name"], result["problems"]) for result in results] == [
        ("node-drained", []),
        ("wrong-interface", []),
    ]
