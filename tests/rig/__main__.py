"""``python -m tests.rig --nodes 4 -- COMMAND…``: run a command with a cluster, and return its exit code."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.rig.cluster import Cluster


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rig", description=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gpus-per-node", type=int, default=0, help="fake ones")
    parser.add_argument("command", nargs="+")
    said = parser.parse_args(arguments)
    if reason := Cluster.reason_unavailable():
        parser.exit(1, f"no Slurm cluster here: {reason}\n")
    with (
        tempfile.TemporaryDirectory(prefix="rig") as folder,
        Cluster(nodes=said.nodes, gpus_per_node=said.gpus_per_node, folder=Path(folder)) as cluster,
    ):
        return _run(said.command, cluster.env)


def _run(argv: list[str], env: dict[str, str]) -> int:
    """The command's exit code, 128 + N for signal N as shells have it. It ends with us, and has time to tidy up."""
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
