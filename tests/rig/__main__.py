"""``python -m tests.rig --nodes 4 -- COMMAND…``: runs a command with a test cluster and returns its exit code."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from seatrial.drill.cluster_nodes import CLUSTER_VARIABLE
from tests.rig.cluster import Cluster


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rig", description=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gpus-per-node", type=int, default=0, help="fake GPUs per node")
    parser.add_argument(
        "--real-gpus", action="store_true", help="node N has GPU N of this machine; with fewer GPUs, nodes share"
    )
    parser.add_argument(
        "--rate",
        action="append",
        default=[],
        help="rate of each node's link in both directions, such as 20gbit; NODE=RATE for one node, after that",
    )
    parser.add_argument(
        "--partition",
        action="append",
        default=[],
        type=_partition,
        metavar="NAME=NODES",
        help="such as gpu=node[1-3]; the first is the default",
    )
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    if reason := Cluster.reason_unavailable():
        parser.exit(1, f"cannot start a Slurm test cluster: {reason}\n")
    with (
        tempfile.TemporaryDirectory(prefix="rig") as folder,
        Cluster(
            nodes=options.nodes,
            gpus_per_node=options.gpus_per_node,
            folder=Path(folder),
            real_gpus=options.real_gpus,
            partitions=dict(options.partition),
        ) as cluster,
    ):
        for text in options.rate:
            node, _, rate = text.rpartition("=")
            for limited in [node] if node else cluster.nodes:
                cluster.slow_link(limited, rate, burst="64mbit")
        return _run(options.command, {**cluster.env, CLUSTER_VARIABLE: str(_access_file(cluster))})


def _partition(text: str) -> tuple[str, str]:
    name, _, nodes = text.partition("=")
    if not name or not nodes:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=NODES, such as gpu=node[1-3]")
    return name, nodes


def _access_file(cluster: Cluster) -> Path:
    """Writes the commands and links by which ``seatrial drill`` reaches the nodes to a file, and returns it."""
    nodes = {node: {"enter": cluster.enter(node), "link": cluster.link(node)} for node in cluster.nodes}
    path = cluster.folder / "access.json"
    path.write_text(json.dumps({"folder": str(cluster.folder), "nodes": nodes}))
    return path


def _run(argv: list[str], env: dict[str, str]) -> int:
    """Returns the command's exit code, or 128 + N after signal N; the command gets SIGTERM if this process ends."""
    command = subprocess.Popen(["setpriv", "--pdeathsig", "TERM", *argv], env=env)
    try:
        code = command.wait()
    except KeyboardInterrupt:
        command.terminate()
        command.wait()
        return 130
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
