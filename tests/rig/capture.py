"""Records the output of Slurm commands as test fixtures: ``python -m tests.rig.capture FOLDER``.

Each command has a file with its standard output (``.json`` or ``.txt``) and, if not empty, one with its standard error
(``.err``). ``commands.txt`` lists file, exit code, seconds and command.
"""

from __future__ import annotations

import platform
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.rig.cluster import Cluster

_EXTRA = """
PartitionName=short Nodes=node0,node1 MaxTime=5 MaxNodes=1 State=UP
PartitionName=closed Nodes=ALL State=DOWN
PartitionName=members Nodes=ALL AllowAccounts=members State=UP
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
"""
_BATCH = ["sbatch", "--parsable", "--wrap", "sleep 300"]
_QUEUE = ["squeue", "--all", "--states=all", "-o", "%i|%T|%r|%N"]


class Recorder:
    """Runs commands on the cluster and writes their output to files."""

    def __init__(self, cluster: Cluster, out: Path) -> None:
        self.cluster = cluster
        self._out = out
        self._index: list[str] = []

    def __call__(self, name: str, argv: Sequence[str], node: str | None = None, seconds: float = 60) -> None:
        start = time.monotonic()
        done = self.cluster.run_on(node, argv, seconds) if node else self.cluster.run(argv, seconds)
        stdout = f"{name}.json" if done.stdout.startswith("{") else f"{name}.txt"
        for file, text in ((stdout, done.stdout), (f"{name}.err", done.stderr)):
            if text or file == stdout:
                (self._out / file).write_text(self._anonymous(text))
        where = f"{node}: " if node else ""
        self._index.append(f"{stdout}\t{done.returncode}\t{time.monotonic() - start:.0f}\t{where}{shlex.join(argv)}\n")
        (self._out / "commands.txt").write_text("".join(sorted(self._index)))

    def _anonymous(self, text: str) -> str:
        """Returns ``text`` without paths and names of this machine."""
        folder = str(self.cluster.folder)
        for original, replacement in (
            (folder, "/rig"),
            (folder.replace("/", "\\/"), "\\/rig"),
            (platform.release(), "6.1.0"),
        ):
            text = text.replace(original, replacement)
        return re.sub(rf"\b{re.escape(platform.node())}\b", "login", text)

    def nodes(self, scenario: str) -> None:
        self(f"sinfo-{scenario}", ["sinfo", "--json"])
        self(f"sinfo-{scenario}-nodes", ["sinfo", "--all", "-N", "-o", "%N|%P|%T|%E|%G|%c|%m|%f"])
        self(f"sinfo-{scenario}-default", ["sinfo"])
        self(f"sinfo-{scenario}-reasons", ["sinfo", "-R", "-o", "%E|%u|%H|%N"])
        self(f"scontrol-show-nodes-{scenario}", ["scontrol", "show", "nodes"])
        self(f"scontrol-ping-{scenario}", ["scontrol", "ping"])

    def jobs(self, scenario: str) -> None:
        self(f"squeue-{scenario}", ["squeue", "--json"])
        self(f"squeue-{scenario}-fields", _QUEUE)
        self(f"scontrol-show-jobs-{scenario}", ["scontrol", "show", "jobs"])


def healthy(record: Recorder) -> None:
    record.nodes("healthy")
    record.jobs("healthy")
    record("scontrol-show-nodes-json", ["scontrol", "show", "nodes", "--json"])
    record("sinfo-version", ["sinfo", "--version"])
    record("scontrol-show-config", ["scontrol", "show", "config"])
    record("scontrol-show-partition", ["scontrol", "show", "partition"])
    record("scontrol-show-partition-unknown", ["scontrol", "show", "partition", "nosuch"])
    record("scontrol-show-job-unknown", ["scontrol", "show", "job", "999"])
    record("squeue-job-unknown", ["squeue", "-h", "-j", "999", "-o", "%T|%r"])
    record("scancel-job-unknown", ["scancel", "999"])
    record("scancel-job-invalid", ["scancel", "x"])
    record("sacct-no-accounting", ["sacct", "-j", "1"])
    record("sacctmgr-no-accounting", ["sacctmgr", "-nP", "show", "cluster"])
    for name, options in _REFUSED.items():
        record(f"sbatch-{name}", [*_BATCH[:2], *options.split(), *_BATCH[2:]])
    record("sbatch-script-missing", ["sbatch", "nosuch.sh"])
    for name, command in _SRUN.items():
        record(f"srun-{name}", ["srun", *shlex.split(command)])


_REFUSED = {
    "partition-unknown": "--partition=nosuch",
    "partition-not-allowed": "--partition=members",
    "account-unknown": "--account=nosuch",
    "qos-unknown": "--qos=nosuch",
    "reservation-unknown": "--reservation=nosuch",
    "constraint-unknown": "--constraint=h200",
    "nodes-too-many": "--nodes=9",
    "node-unknown": "--nodelist=node9",
    "gpus-too-many": "--nodes=1 --gpus-per-node=8",
    "gres-unknown": "--gres=tpu:1",
    "memory-too-much": "--nodes=1 --mem=1T",
    "cpus-too-many": "--nodes=1 --cpus-per-task=64",
    "time-invalid": "--time=soon",
}
_SRUN = {
    "hostname": "--nodes=4 --label hostname",
    "exit-code": "--nodes=2 --label sh -c 'exit $((SLURM_PROCID * 3))'",
    "bad-exit-kills": "--nodes=2 --kill-on-bad-exit=1 sh -c 'test $SLURM_PROCID = 0 || exit 3; sleep 60'",
    "signal": "--nodes=1 sh -c 'kill -SEGV $$'",
    "command-missing": "--nodes=1 nosuch",
    "partition-unknown": "--partition=nosuch hostname",
    "immediate": "--immediate=1 --partition=closed hostname",
    "environment": "--nodes=2 --gpus-per-node=2 --label sh -c 'env | grep -E \"^(SLURM|CUDA)\" | sort'",
}


def waiting(record: Recorder) -> None:
    """Records jobs that sbatch accepts although they can never start."""
    cluster = record.cluster
    time.sleep(3)
    record.jobs("impossible")
    cluster.run(["scancel", "--user=root"])
    cluster.wait_for(cluster.nodes, "idle")


def busy(record: Recorder) -> None:
    """Records running jobs, and jobs that are pending for different reasons."""
    cluster = record.cluster
    options = ["--nodes=3 --exclusive", "--nodes=2", "--partition=short --nodes=2", "--partition=short --time=60"]
    options += ["--partition=closed", "--nodes=1 --begin=now+1hour", "--nodes=1 --hold", "--nodes=1 --time=600"]
    options += ["--nodes=1 --dependency=afterok:1"]
    cluster.drain("node3", "fan broken")
    for option in [*options, "--nodes=4"]:
        cluster.run([*_BATCH[:2], *option.split(), *_BATCH[2:]])
    time.sleep(3)
    record.nodes("busy")
    record.jobs("busy")
    record("scontrol-show-hostnames", ["scontrol", "show", "hostnames", "node[0-1,3]"])
    cluster.run(["scancel", "--user=root"])
    cluster.undrain("node3")
    cluster.wait_for(cluster.nodes, "idle")


def ended(record: Recorder) -> None:
    """Records jobs with all end states."""
    cluster = record.cluster
    for name, (options, script) in _ENDS.items():
        cluster.run(["sbatch", f"--job-name={name}", "--output=%x.out", *options.split(), "--wrap", script])
    time.sleep(2)
    cluster.run(["scancel", "--name=cancelled"])
    cluster.kill_slurmd("node1")
    cluster.wait_for(["node1"], "down", "down*", seconds=60)
    record("srun-time-limit", ["srun", "--nodes=1", "--time=1", "sleep", "300"], seconds=180)
    record.nodes("ended")
    record.jobs("ended")
    cluster.start_slurmd("node1")
    cluster.wait_for(["node1"], "idle")
    for name in _ENDS:
        record(f"job-output-{name}", ["cat", f"{name}.out"])


_ENDS = {
    "completed": ("--nodes=1", "hostname"),
    "exit-code": ("--nodes=1", "exit 3"),
    "signal": ("--nodes=1", "kill -SEGV $$"),
    "step-exit-code": ("--nodes=2", "srun --kill-on-bad-exit=1 --label sh -c 'exit $SLURM_PROCID'"),
    "cancelled": ("--nodes=1 --nodelist=node0", "srun sleep 300"),
    "time-limit": ("--nodes=1 --nodelist=node0 --time=1", "srun sleep 300"),
    "over-memory": ("--nodes=1 --nodelist=node0 --mem=100", "head -c 400M /dev/zero | tail | wc -c"),
    "node-fail": ("--nodes=2 --nodelist=node1,node2 --no-requeue", "srun sleep 300"),
    "node-fail-requeued": ("--nodes=1 --nodelist=node1 --requeue", "srun sleep 300"),
}


def troubled(record: Recorder) -> None:
    """Records a cluster with a node that does not answer and a drained node."""
    cluster = record.cluster
    cluster.run(["scancel", "--user=root"])
    cluster.kill_slurmd("node1")
    cluster.drain("node2", "fan broken")
    cluster.wait_for(["node1"], "down", "down*", seconds=60)
    record.nodes("troubled")
    record("sbatch-node-down", [*_BATCH[:2], "--nodelist=node1", *_BATCH[2:]])
    record("sbatch-node-drained", [*_BATCH[:2], "--nodelist=node2", *_BATCH[2:]])
    record("sbatch-nodes-not-available", [*_BATCH[:2], "--nodes=4", *_BATCH[2:]])
    time.sleep(3)
    record("squeue-node-not-available-fields", _QUEUE)
    record("scontrol-show-jobs-node-not-available", ["scontrol", "show", "jobs"])


_CLIENTS = {
    "sinfo": ["sinfo"],
    "sinfo-json": ["sinfo", "--json"],
    "squeue": ["squeue"],
    "sbatch": _BATCH,
    "srun": ["srun", "hostname"],
    "scancel": ["scancel", "1"],
    "scontrol-ping": ["scontrol", "ping"],
    "scontrol-show-config": ["scontrol", "show", "config"],
    "scontrol-show-nodes": ["scontrol", "show", "nodes"],
}


def refused(record: Recorder) -> None:
    """Records clients that get no answer."""
    cluster = record.cluster
    cluster.wrong_munge_key("node3")
    for name, argv in _CLIENTS.items():
        record(f"{name}-munge-key-wrong", argv, "node3")
    cluster.stop_munge()
    for name, argv in _CLIENTS.items():
        record(f"{name}-munge-down", argv)
    cluster.start_munge()
    cluster.stop_controller()
    for name, argv in _CLIENTS.items():
        record(f"{name}-controller-down", argv)
    (cluster.folder / "slurm.conf").unlink()
    record("sinfo-no-configuration", ["sinfo"], seconds=120)


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(nodes=4, gpus_per_node=2, folder=Path(folder), extra=_EXTRA) as cluster,
    ):
        record = Recorder(cluster, out)
        for scenario in (healthy, waiting, busy, ended, troubled, refused):
            scenario(record)
            print(scenario.__name__, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
