"""The test cluster has the features that other tests need, and removes everything when it ends."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.processes import until
from tests.rig import __main__, host
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster

_REACH = "timeout 1 bash -c '</dev/tcp/node0/6818'"
_SLEEP_S = str(10**6 + os.getpid())  # unique to the sleep processes of this test


def srun(cluster: Cluster, *argv: str) -> str:
    done = cluster.run(["srun", *argv])
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass(frozen=True)
class Traces:
    """Processes, links, mounts, devices and /etc/hosts lines of one cluster on this host."""

    folder: Path
    slot: str

    @classmethod
    def of_folder(cls, folder: Path) -> Traces:
        match = re.search(r"^10\.77\.(\d+)\.1 ctl$", (folder / "hosts").read_text(), re.MULTILINE)
        assert match
        return cls(folder, match[1])

    def kinds(self) -> set[str]:
        return {trace.split()[0] for trace in self}

    def sleeping(self) -> int:
        return sum(bool(re.match(r"process \d+ \S*sleep ", trace)) for trace in self)

    def __iter__(self) -> Iterator[str]:
        mark = f"# seatrial rig {self.slot}"
        yield from (f"link {name}" for _, name in socket.if_nameindex() if name.startswith(f"seatrial{self.slot}"))
        yield from (f"host {line}" for line in _lines("/etc/hosts") if line.endswith(mark))
        yield from (f"mount {line}" for line in _lines("/proc/mounts") if str(self.folder) in line)
        yield from (f"device {path}" for path in self.folder.rglob("*") if path.is_char_device())
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if self._has(process):
                    yield f"process {process.pid} {shlex.join(process.cmdline())}"

    def _has(self, process: psutil.Process) -> bool:
        arguments = [*process.cmdline(), process.environ().get("SLURM_CONF", "")]
        return str(self.folder) in " ".join(arguments) or _SLEEP_S in arguments


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def cgroups() -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob("*/slurm_node*"))


def start_load(cluster: Cluster) -> None:
    """Starts a job on all nodes, and a detached process without environment, session and parent."""
    cluster.run(["sbatch", "-N2", "--wrap", f"srun sleep {_SLEEP_S}"])
    cluster.run_on("node1", ["env", "-i", "sh", "-c", f"setsid sleep {_SLEEP_S} >/dev/null 2>&1 &"])
    until(lambda: Traces.of_folder(cluster.folder).sleeping() == 3)


class TestJobs:
    def test_one_task_per_node(self, make_cluster: Callable[..., Cluster]) -> None:
        cluster = make_cluster(4, gpus_per_node=2)
        script = "echo $(hostname) $(ls /sys/class/net) $CUDA_VISIBLE_DEVICES $(ls /dev/shm | wc -l)"
        output = srun(cluster, "-N4", "--gpus-per-node=2", "sh", "-c", script)
        assert sorted(output.splitlines()) == [f"{node} eth0 lo 0,1 0" for node in cluster.nodes]

    def test_srun_in_sbatch_writes_to_the_shared_folder(self, make_cluster: Callable[..., Cluster]) -> None:
        cluster = make_cluster(2)
        cluster.run(["sbatch", "-N2", "-o", "%j.out", "--wrap", "srun -l hostname; echo done"])
        out = cluster.folder / "1.out"
        until(lambda: out.exists() and "done" in out.read_text())
        assert sorted(out.read_text().splitlines()) == ["0: node0", "1: node1", "done"]

    def test_node_names_resolve(self, cluster: Cluster) -> None:
        query = ["getent", "ahostsv4", "ctl", *cluster.nodes]
        (answer,) = {cluster.run_on(node, query).stdout for node in cluster.nodes}
        assert answer.count("STREAM") == 5
        # On the host, names of other rigs resolve too.
        assert set(answer.splitlines()) <= set(cluster.run(query).stdout.splitlines())

    def test_configured_memory_is_a_limit(self, make_cluster: Callable[..., Cluster]) -> None:
        done = make_cluster(1).run(["srun", "--mem=9000", "true"])
        assert "Memory specification can not be satisfied" in done.stderr


class TestFaults:
    def test_network_faults_and_recovery(self, make_cluster: Callable[..., Cluster]) -> None:
        cluster = make_cluster(2)

        def reaches() -> bool:
            return cluster.run_on("node1", ["sh", "-c", _REACH]).returncode == 0

        until(reaches)
        cluster.unplug("node0")
        assert not reaches()
        cluster.restore_link("node0")
        until(reaches)
        cluster.drop_packets("node0", 1.0)
        assert not reaches()
        cluster.restore_link("node0")
        until(reaches)

    def test_slow_link_in_both_directions(self, make_cluster: Callable[..., Cluster]) -> None:
        cluster = make_cluster(2)
        (cluster.folder / "data").write_bytes(bytes(2_000_000))

        def seconds(script: str) -> float:
            start = time.monotonic()
            assert cluster.run(["bash", "-c", script]).returncode == 0
            return time.monotonic() - start

        upload, download = "srun -w node0 cat data", "srun -w node0 cat <data"
        seconds(upload)  # the first job includes the wait for the scheduler
        cluster.slow_link("node0", "8mbit")  # 2 s for 2 MB
        assert min(seconds(upload), seconds(download)) > 1.5
        cluster.restore_link("node0")
        until(lambda: seconds(upload) < 1.5)
        until(lambda: seconds(download) < 1.5)

    def test_drained_node_gets_no_jobs(self, make_cluster: Callable[..., Cluster]) -> None:
        cluster = make_cluster(2)
        cluster.drain("node0", "fan broken")
        cluster.wait_for(["node0"], "drained")
        assert "fan broken" in cluster.run(["sinfo", "-R"]).stdout
        assert srun(cluster, "hostname") == "node1\n"
        cluster.undrain("node0")
        cluster.wait_for(["node0"], "idle")

    def test_killed_slurmd_is_down_until_restarted(self, make_cluster: Callable[..., Cluster]) -> None:
        cluster = make_cluster(2, extra="SlurmdTimeout=4")
        cluster.kill_slurmd("node1")
        cluster.wait_for(["node1"], "down*")
        cluster.start_slurmd("node1")
        cluster.wait_for(["node1"], "idle")
        assert srun(cluster, "-w", "node1", "hostname") == "node1\n"

    def test_wait_timeout_contains_logs(self, make_cluster: Callable[..., Cluster]) -> None:
        cluster = make_cluster(1)
        with pytest.raises(TimeoutError, match=r"(?s)node0 not \('down',\): idle.*slurmd version"):
            cluster.wait_for(["node0"], "down", seconds=0.1)

    def test_controller_and_munge_stop_and_start(self, make_cluster: Callable[..., Cluster]) -> None:
        cluster = make_cluster(1)
        cluster.stop_controller()
        assert "at ctl is DOWN" in cluster.run(["scontrol", "ping"]).stdout
        cluster.start_controller()
        cluster.wait_for(cluster.nodes, "idle")
        cluster.stop_munge()
        assert "Munge encode failed" in cluster.run(["sinfo"]).stderr
        cluster.start_munge()
        assert srun(cluster, "hostname") == "node0\n"

    def test_node_with_another_munge_key(self, make_cluster: Callable[..., Cluster]) -> None:
        cluster = make_cluster(2)
        cluster.wrong_munge_key("node1")
        assert cluster.run_on("node0", ["sinfo"]).returncode == 0
        assert cluster.run_on("node1", ["sinfo"]).returncode != 0
        assert "Invalid credential" in cluster.logs()

    def test_private_directory(self, make_cluster: Callable[..., Cluster]) -> None:
        cluster = make_cluster(2)
        (shared := cluster.folder / "shared").mkdir()
        write = ["-N2", "sh", "-c", f"hostname >{shared}/$(hostname)"]
        cluster.private_dir(shared, "node1")
        srun(cluster, *write)
        assert os.listdir(shared) == ["node0"]
        cluster.unmount_private_dir(shared, "node1")
        srun(cluster, *write)
        assert sorted(os.listdir(shared)) == ["node0", "node1"]

    @pytest.mark.parametrize(
        ("options", "message"), [("ro", "Read-only file system"), ("size=64k", "No space left on device")]
    )
    def test_read_only_and_full_private_directory(
        self, make_cluster: Callable[..., Cluster], options: str, message: str
    ) -> None:
        cluster = make_cluster(1)
        cluster.private_dir(cluster.folder / "spool", "node0", options)
        done = cluster.run_on("node0", ["dd", "if=/dev/zero", f"of={cluster.folder}/spool/file", "bs=64k", "count=2"])
        assert message in done.stderr


class TestCleanup:
    def test_normal_exit(self, tmp_path: Path) -> None:
        with Cluster(nodes=2, gpus_per_node=2, folder=tmp_path) as cluster:
            start_load(cluster)
            cluster.wrong_munge_key("node0")
            assert Traces.of_folder(tmp_path).kinds() == {"link", "host", "process"}
        assert list(Traces.of_folder(tmp_path)) == []

    def test_cgroups_are_removed(self, make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
        if reason := host.cgroups_unavailable():
            pytest.skip(reason)
        with Cluster(nodes=1, gpus_per_node=2, folder=tmp_path, confined=True) as cluster:
            assert srun(cluster, "--gpus-per-node=1", "sh", "-c", f"ls {tmp_path}/dev; cat /proc/self/cgroup")
            assert cgroups()
        with closing(host.lock_cgroups()):  # another rig may have created cgroups since
            assert cgroups() == []

    def test_exception_in_the_body(self, tmp_path: Path) -> None:
        def body() -> None:
            with Cluster(nodes=2, folder=tmp_path) as cluster:
                start_load(cluster)
                raise KeyError("test error")

        with pytest.raises(KeyError, match="test error"):
            body()
        assert list(Traces.of_folder(tmp_path)) == []

    def test_failed_start_has_the_reason(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match="Parsing error"), Cluster(nodes=2, folder=tmp_path, extra="Nonsense=1"):
            pass
        assert list(Traces.of_folder(tmp_path)) == []

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signal(self, number: signal.Signals) -> None:
        with running_rig() as (rig, traces):
            rig.send_signal(number)
            assert rig.wait(120) == 130
            assert list(traces) == []

    def test_next_cluster_cleans_up_after_sigkill(self, tmp_path: Path) -> None:
        with running_rig() as (rig, traces):
            rig.kill()
            rig.wait()
            assert traces.kinds() >= {"link", "host"}
            with Cluster(nodes=1, folder=tmp_path):
                until(lambda: not any(str(traces.folder) in trace for trace in traces))
            assert list(traces) == []

    def test_two_clusters_at_the_same_time(self, tmp_path: Path) -> None:
        with (
            Cluster(nodes=2, folder=tmp_path / "a") as a,
            Cluster(nodes=2, folder=tmp_path / "b") as b,
        ):
            for cluster in (a, b):
                query = ["getent", "hosts", "node0"]
                assert srun(cluster, "-N2", "--label", *query).count(cluster.run_on("node1", query).stdout) == 2
        assert [*Traces.of_folder(a.folder), *Traces.of_folder(b.folder)] == []


@contextmanager
def running_rig() -> Iterator[tuple[subprocess.Popen[str], Traces]]:
    """Starts ``python -m tests.rig`` with a command that starts a job and keeps running."""
    script = f"srun -N2 sleep {_SLEEP_S} & echo $SLURM_CONF; wait"
    argv = [sys.executable, "-m", "tests.rig", "--nodes", "2", "--", "sh", "-c", script]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as rig:
        assert rig.stdout
        traces = Traces.of_folder(Path(rig.stdout.readline().strip()).parent)
        try:
            until(lambda: traces.sleeping() == 2)
            yield rig, traces
        finally:
            rig.terminate()
            shutil.rmtree(traces.folder, ignore_errors=True)


class TestCommand:
    def test_returns_the_exit_code_of_the_command(self) -> None:
        argv = [sys.executable, "-m", "tests.rig", "--nodes", "2", "--", "sh", "-c", "srun -N2 hostname; exit 7"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert (done.returncode, sorted(done.stdout.split())) == (7, ["node0", "node1"])


class TestUnavailable:
    def test_missing_packages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        assert "slurmctld, slurmd" in (Cluster.reason_unavailable() or "")
        assert "apt-get install slurm-wlm munge" in (Cluster.reason_unavailable() or "")

    def test_needs_root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert "needs root" in (Cluster.reason_unavailable() or "")

    @pytest.mark.parametrize(("ci", "outcome"), [("", "1 skipped"), ("true", "1 error")])
    def test_unavailable_cluster_is_an_error_in_ci_and_a_skip_elsewhere(self, ci: str, outcome: str) -> None:
        test = f"{__file__}::TestJobs::test_node_names_resolve"
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
        done = subprocess.run(argv, env={"PATH": "/nowhere", "CI": ci}, capture_output=True, text=True, check=False)
        assert outcome in done.stdout
        assert "cannot start a Slurm test cluster: needs slurmctld" in done.stdout


@pytest.mark.parametrize("partition", ["gpu", "gpu=", "=node[1-3]"])
def test_an_invalid_partition_is_a_usage_error(partition: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        __main__.main(["--partition", partition, "--", "true"])
    assert end.value.code == 2
    assert "expected NAME=NODES" in capsys.readouterr().err
