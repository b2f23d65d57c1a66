"""Changes of the nodes of the test cluster, each with its undo.

The test cluster is a Slurm cluster on one machine: ``python -m tests.rig`` starts it, writes a file that describes its
nodes, and sets CLUSTER_VARIABLE to the path of that file. Drills on several nodes need it.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from pydantic import JsonValue, ValidationError

from seatrial.discover import slurm
from seatrial.drill.base import Drill, Needs
from seatrial.drill.injection import Injection
from seatrial.model import Frozen, SeatrialError

CLUSTER_VARIABLE = "SEATRIAL_DRILL_CLUSTER"
NODE = "node1"  # the node at fault. Jobs start on node0; drills of three nodes compare NODE with the other two
_IDLE_LIMIT_S = 60.0


class NodeAccess(Frozen):
    """Access to one node of the test cluster.

    ``enter``: prefix of a command that runs on the node without Slurm. ``link``: name of the network interface on this
    host at the other end of the node's virtual link.
    """

    enter: tuple[str, ...]
    link: str


class TestCluster(Frozen):
    """``folder``: files of the cluster; a script ``folder``/environment/NODE runs before each task on that node."""

    folder: Path
    nodes: Mapping[str, NodeAccess]


def test_cluster() -> TestCluster:
    """The cluster that CLUSTER_VARIABLE describes. Raises SeatrialError if it is not set, or its file is invalid."""
    if not (path := os.environ.get(CLUSTER_VARIABLE)):
        raise SeatrialError("needs the test cluster: python -m tests.rig --nodes 3 -- seatrial drill cluster")
    try:
        return TestCluster.model_validate_json(Path(path).read_bytes())
    except (OSError, ValidationError) as error:
        raise SeatrialError(f"{CLUSTER_VARIABLE}={path}: {error}") from error


def missing_cluster() -> str:
    """Why this process has no test cluster; empty if it has one."""
    try:
        test_cluster()
    except SeatrialError as error:
        return str(error)
    return ""


def on_nodes(nodes: int, *programs: str, other: Callable[[], str] = missing_cluster) -> partial[Drill]:
    """A drill on the first ``nodes`` nodes of the test cluster, with short limits and without telemetry.

    ``programs``: in PATH. ``other``: as in Needs.
    """
    settings: dict[str, JsonValue] = {
        "limits": {"heartbeat_timeout_s": 10, "startup_s": 120},
        "telemetry": {"enabled": False},
        "slurm": {"queue_s": 40, "nodelist": f"node[0-{nodes - 1}]"},
    }
    needs = Needs(root=True, nodes=nodes, programs=("nsenter", *programs), other=other)
    return partial(Drill, machine="cluster", launcher="slurm", settings=settings, needs=needs)


def run_on(injection: Injection, node: str, command: str) -> str:
    """Run a shell command on a node and return its output. Raises SeatrialError if it fails."""
    return injection.run_command([*test_cluster().nodes[node].enter, "sh", "-c", command])


def change_node(injection: Injection, command: str, undo: str) -> None:
    """Run ``command`` on NODE, and ``undo`` there at the end."""
    run_on(injection, NODE, command)
    injection.at_end(run_on, injection, NODE, undo)


def shape_link(injection: Injection, discipline: str) -> None:
    """Give both ends of the link of NODE a queueing discipline of tc(8)."""
    link = test_cluster().nodes[NODE].link
    injection.run_command(["tc", "qdisc", "replace", "dev", link, "root", *discipline.split()])
    injection.at_end(injection.run_command, ["tc", "qdisc", "del", "dev", link, "root"])
    change_node(injection, f"tc qdisc replace dev eth0 root {discipline}", "tc qdisc del dev eth0 root")


def run_before_tasks(injection: Injection, script: str) -> None:
    """Run ``script`` before each task on NODE; a line ``export NAME=VALUE`` that it prints sets a variable."""
    file = test_cluster().folder / "environment" / NODE
    file.parent.mkdir(exist_ok=True)
    file.write_text(script, encoding="utf-8")
    injection.at_end(file.unlink)


def set_variables(injection: Injection, **values: str) -> None:
    """Set environment variables for the tasks on NODE only."""
    lines = [f"echo {shlex.quote(f'export {name}={value}')}\n" for name, value in values.items()]
    run_before_tasks(injection, "".join(lines))


def start_slurmd(injection: Injection, prefix: str = "") -> None:
    """Start slurmd on NODE, with ``prefix`` before the command, and wait until the node is idle."""
    run_on(injection, NODE, f'{prefix} slurmd -f "$SLURM_CONF" -N {NODE}')
    wait_until_idle()


def kill_slurmd(injection: Injection) -> None:
    """Kill slurmd on NODE."""
    run_on(injection, NODE, f"kill -KILL $(cat {test_cluster().folder}/run/slurmd-{NODE}.pid)")


def wait_until_idle() -> None:
    """Wait until Slurm shows NODE as IDLE and usable. Raises SeatrialError after a minute."""
    deadline = time.monotonic() + _IDLE_LIMIT_S
    while not ((node := slurm.node(NODE)) and node.usable and node.state == "IDLE"):
        if time.monotonic() > deadline:
            raise SeatrialError(f"{NODE} is {node}, expected IDLE")
        time.sleep(0.5)
