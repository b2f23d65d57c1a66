"""The collector with a fake srun that runs steps on this host, as one node."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from seatrial.config.schema import JobPlacement
from seatrial.launch import collect
from seatrial.launch.collect import END_SCRIPT, Collector, Unpacked, unpack
from seatrial.launch.collect_srun import SrunTransport
from tests.processes import until

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
[ ! -e "$(dirname "$0")/broken" ] || { echo "srun: error: no route" >&2; exit 1; }
export SLURM_NODEID=0 SLURM_NNODES=1
exec "$@"
"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run directory on a node, with one attempt."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(collect, "FIRST_FETCH_S", 0.0)
    monkeypatch.setattr(collect, "RESTART_S", 0.2)
    (tmp_path / "scratch" / "jobs" / "ranks" / "attempt1" / "logs").mkdir(parents=True)
    return tmp_path / "scratch"


@pytest.fixture
def collector(node: Path, tmp_path: Path) -> Collector:
    folder = tmp_path / "run" / "jobs" / "ranks" / "attempt1"
    folder.mkdir(parents=True)
    return Collector(SrunTransport("7", JobPlacement()), str(node), folder)


def fetch_until(collector: Collector, condition: Callable[[], object]) -> None:
    def fetch_and_test() -> object:
        collector.fetch("node0")
        return condition()

    until(fetch_and_test)


def wait_for(collector: Collector, path: Path, text: str) -> None:
    fetch_until(collector, lambda: path.exists() and path.read_text() == text)


def finish(collector: Collector, node: Path) -> None:
    (node / "ended").touch()
    fetch_until(collector, lambda: collector.finished)


def test_changed_files_arrive_during_the_job_and_all_at_its_end(collector: Collector, node: Path) -> None:
    node_folder, local_folder = node / "jobs" / "ranks" / "attempt1", collector.folder
    (node_folder / "rank0.heartbeat.json").write_text("1")
    (node_folder / "logs" / "big.log").write_bytes(os.urandom(300_000))
    wait_for(collector, local_folder / "rank0.heartbeat.json", "1")
    (node_folder / "rank0.heartbeat.json").write_text("2")
    wait_for(collector, local_folder / "rank0.heartbeat.json", "2")
    assert not (local_folder / "logs" / "big.log").exists()
    (node / "artifacts").mkdir()
    (node / "artifacts" / "metrics.json").write_text("{}")
    finish(collector, node)
    assert (local_folder / "logs" / "big.log").stat().st_size == 300_000
    assert (local_folder.parents[2] / "artifacts" / "metrics.json").read_text() == "{}"
    assert (node / "collected").exists()
    assert sorted(path.name for path in local_folder.iterdir()) == ["logs", "rank0.heartbeat.json"]


def test_files_over_the_limit_are_dropped_after_journals_and_logged(collector: Collector, node: Path) -> None:
    collector.limit_bytes = 100_000
    node_folder = node / "jobs" / "ranks" / "attempt1"
    (node_folder / "a.log").write_bytes(os.urandom(300_000))
    (node_folder / "rank0.jsonl").write_text("{}\n")
    finish(collector, node)
    assert (collector.folder / "rank0.jsonl").read_text() == "{}\n"
    assert not (collector.folder / "a.log").exists()
    assert "limit of 100000 bytes" in (collector.folder / "launcher.err").read_text()


def test_stopping_early_fetches_files_and_kills_ranks(collector: Collector, node: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    rank = subprocess.Popen([*command, f"{node}/jobs/ranks/job.json"])
    other = subprocess.Popen([*command, f"{node}2/jobs/ranks/job.json"])
    log = node / "jobs" / "ranks" / "attempt1" / "logs" / "0.log"
    log.write_text("1")
    wait_for(collector, collector.folder / "logs" / "0.log", "1")
    log.write_text("2")
    collector.stop_ranks("node0")
    assert collector.finished
    assert (collector.folder / "logs" / "0.log").read_text() == "2"
    assert rank.wait(20) == -signal.SIGKILL
    assert (node / "collected").exists()
    assert other.poll() is None
    other.kill()
    other.wait()


def test_failed_step_is_restarted(collector: Collector, node: Path, tmp_path: Path) -> None:
    alive = node / "jobs" / "ranks" / "attempt1" / "rank0.heartbeat.json"
    alive.write_text("1")
    wait_for(collector, collector.folder / "rank0.heartbeat.json", "1")
    assert collector._step
    collector._step.process.kill()
    alive.write_text("2")
    wait_for(collector, collector.folder / "rank0.heartbeat.json", "2")
    finish(collector, node)


def test_failed_srun_is_reported_with_its_error(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "NO_DATA_TIMEOUT_S", 3.0)
    (tmp_path / "bin" / "broken").touch()
    fetch_until(collector, lambda: collector.problem() and "srun: error: no route" in collector.missing_files())
    assert "Run first" in collector.missing_files()


def test_pending_time_does_not_count_as_missing_data(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(collect, "time", SimpleNamespace(monotonic=lambda: now))
    now += 2 * collect.NO_DATA_TIMEOUT_S
    assert collector.problem() == ""
    collector.fetch("node0")
    assert collector.problem() == ""
    now += collect.NO_DATA_TIMEOUT_S
    assert "no data from any node" in collector.problem()
    collector.close()


def test_a_shared_directory_needs_no_step(collector: Collector, tmp_path: Path) -> None:
    (collector.folder / "shared").touch()
    (tmp_path / "bin" / "broken").touch()
    collector.fetch("node0")
    assert collector.finished
    assert collector.missing_files() == ""


@pytest.mark.parametrize(("nodes", "named"), [("gpu[07-09]", "gpu08"), ("gpu[07-08]", "node 1"), ("", "node 1")])
def test_node_whose_files_are_missing_is_named(collector: Collector, nodes: str, named: str) -> None:
    collector.transport.nodes, collector._node_count, collector._complete_nodes = nodes, 3, {"0", "2"}
    message = collector.missing_files()
    assert f"before all files arrived from {named}." in message
    assert message.startswith(nodes or "the nodes")


def test_job_without_output_names_its_log(collector: Collector, node: Path) -> None:
    assert f"{node}.log" in collector.missing_files()


def test_unpack_stays_inside_the_run_directory(tmp_path: Path) -> None:
    package = io.BytesIO()
    with tarfile.open(fileobj=package, mode="w:gz") as archive:
        for name in ("../outside", "jobs/../../outside", "jobs/inside"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    assert unpack(package.getvalue(), tmp_path / "run").complete
    assert [path.name for path in tmp_path.rglob("*side")] == ["inside"]


def packed(files: dict[str, bytes]) -> bytes:
    package = io.BytesIO()
    with tarfile.open(fileobj=package, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return package.getvalue()


def test_truncated_and_damaged_packages(tmp_path: Path) -> None:
    names = ["jobs/a", "jobs/b", "jobs/c"]
    files = dict(zip(names, (b"1", os.urandom(99_999), b""), strict=True))
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    manifest = "".join(f"{len(files[name])}  {name}\n{sums[name]}  {name}\n" for name in names).encode()
    contents = {"manifest": manifest, names[0]: files[names[0]], names[1]: files[names[1]]}
    assert unpack(packed(contents), tmp_path / "whole") == Unpacked(True, ("jobs/c",))
    assert unpack(packed(contents)[:50_000], tmp_path / "cut") == Unpacked(False, ("jobs/b", "jobs/c"))
    other = unpack(packed(contents | {names[0]: b"2"}), tmp_path / "changed")
    assert other == Unpacked(True, ("jobs/c",), ("jobs/a",))
    damaged = bytearray(packed(contents))
    damaged[50_000] ^= 1
    assert unpack(bytes(damaged), tmp_path / "damaged") == Unpacked(False, ())
    assert not (tmp_path / "damaged").exists()
    assert (tmp_path / "cut" / "jobs" / "a").read_bytes() == b"1"
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["jobs"]


def test_package_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "MAX_UNPACKED_BYTES", 2**22)
    bomb = packed({"jobs/rank0.jsonl": bytes(2**23)})
    assert len(bomb) < 2**14
    assert unpack(bomb, tmp_path / "run") == Unpacked(False, ())
    assert not (tmp_path / "run").exists()


def test_file_with_secrets_keeps_its_mode(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "job.json"
    job.parent.mkdir()
    job.touch(mode=0o600)
    assert unpack(packed({"jobs/job.json": b"{}"}), tmp_path).complete
    assert (job.read_bytes(), job.stat().st_mode & 0o777) == (b"{}", 0o600)


@pytest.mark.parametrize("line", ["0 .all x", "0 .all 0", "0 .part ", "\xff", "0 .all 1 2"])
def test_damaged_line_is_ignored(collector: Collector, line: str) -> None:
    collector._add_line(b"0 AAAA")
    collector._add_line(line.encode("latin-1"))
    assert not collector.finished


def test_damaged_package_is_sent_again(collector: Collector) -> None:
    package = base64.b64encode(packed({"manifest": b"jobs/a\n", "jobs/a": os.urandom(9_999)})).decode()
    for lines, complete in ((f"0 {package[:5_000]}\n0 .all 1", False), (f"0 {package}\n0 .all 1", True)):
        for line in lines.splitlines():
            collector._add_line(line.encode())
        assert (collector._complete_nodes == {"0"}) is complete
    assert len((collector.folder.parents[1] / "a").read_bytes()) == 9_999


@pytest.mark.parametrize("text", [SrunTransport("7", JobPlacement()).step("/tmp", 1)[-3], END_SCRIPT])
def test_shellcheck_finds_nothing(text: str, tmp_path: Path) -> None:
    script = tmp_path / "node.sh"
    script.write_text(f"#!/bin/bash\n{text}")
    shellcheck = Path(sys.executable).parent / "shellcheck"
    result = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
