"""Results through the logs of pods: what counts, what is ignored, and a stream that breaks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.discover.kubectl import Kubectl
from seatrial.launch import collect, collect_logs
from seatrial.launch.collect import Collector
from seatrial.launch.collect_logs import NODE_DIR, POD_LIMIT_BYTES, LogTransport, send_results
from tests.processes import until

TOKEN = "0123456789abcdef" * 2


def transport(pods: int = 2) -> LogTransport:
    created = LogTransport(Kubectl("ml"), "seatrial.dev/token=x", "seatrial", TOKEN, pods)
    created.step(NODE_DIR, 0)
    return created


def line(number: int, data: str, token: str = TOKEN, second: int = 0) -> bytes:
    return f"2026-11-23T10:00:{second:02}.123456789Z {token} {number} {data}\n".encode()


@pytest.mark.parametrize(
    "foreign",
    [
        b"Defaulted container, garbage \xff\x00\n",
        b"\n",
        line(1, "0 .all 2", token="f" * 32),  # our format without the token, such as the log of another run
        line(1, "9 .all 2"),  # a node that the job does not have
        line(1, "0"),
        b"2026-11-23T10:00:00Z " + TOKEN.encode() + b" x 0 AAAA\n",
    ],
)
def test_other_output_of_a_pod_is_ignored(foreign: bytes) -> None:
    assert transport().payload(foreign) is None


def test_output_without_a_line_end_does_not_hide_a_line() -> None:
    assert transport().payload(b"2026-11-23T10:00:00Z Segmentation fault" + line(1, "0 AAAA")[20:]) == b"0 AAAA"


def test_stream_is_read_again_from_the_last_complete_package_of_all_pods() -> None:
    logs = transport()
    assert logs.payload(line(1, "0 AAAA")) == b"0 AAAA"
    assert logs.payload(line(2, "0 .part 2", second=3)) == b"0 .part 2"
    assert not any(option.startswith("--since-time") for option in logs.step("", 0))  # nothing of pod 1 yet
    assert logs.payload(line(1, "1 .part 2", second=2)) == b"1 .part 2"
    assert logs.payload(line(3, "0 BBBB", second=4)) == b"0 BBBB"  # of a package that is not complete
    command = logs.step("", 0)
    assert "--since-time=2026-11-23T10:00:02.123456789Z" in command
    assert {"--tail=-1", "--follow", "--ignore-errors", "--max-log-requests=2", "--container=seatrial"} < set(command)
    assert [logs.payload(line(number, "0 x")) for number in (1, 2)] == [None, None]  # repeated
    assert logs.payload(line(3, "0 BBBB")) == b"0 BBBB"


def test_missing_line_restarts_the_stream_once() -> None:
    logs = transport(1)
    logs.payload(line(1, "0 .part 1"))
    assert logs.payload(line(3, "0 AAAA")) is None
    assert logs.needs_restart
    logs.step("", 0)
    assert logs.payload(line(3, "0 AAAA")) == b"0 AAAA"  # the log was rotated: the line does not come back
    assert not logs.needs_restart


def test_stream_of_a_pod_that_ends_silently_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    logs, now = transport(), time.monotonic()
    logs.payload(line(1, "0 .all 2"))
    monkeypatch.setattr(time, "monotonic", lambda: now + 30)
    logs.payload(line(1, "1 .part 2"))
    assert not logs.needs_restart
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    assert logs.needs_restart


# printed by kubectl 1.33 for a pod whose kubelet does not listen
KUBELET = (
    'Get "https://10.0.0.5:10250/containerLogs/ml/seatrial-x-1-abcde/seatrial?follow=true&timestamps=true": dial tcp '
    "10.0.0.5:10250: connect: connection refused"
)


@pytest.mark.parametrize(
    "error",
    [
        KUBELET,
        'container "seatrial" in pod "seatrial-x-1-abcde" is waiting to start: ContainerCreating',
        "the server has asked for the client to provide credentials ( pods/log seatrial-x-1-abcde)",
    ],
)
def test_error_of_one_pod_is_recorded_until_its_next_line(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logs, now = transport(), time.monotonic()
    assert logs.payload(f"error: {error}\n".encode()) is None
    assert logs.payload(line(1, "0 .part 2")) == b"0 .part 2"
    assert logs.errors == {1: error}
    logs.step("", 0)
    assert logs.errors == {1: error}  # it may take 30 s until kubectl prints the error again
    logs.payload(f"2026-11-23T10:00:00Z error: {error}\n".encode())  # output of a pod has a time
    logs.payload(line(1, "1 .part 2"))
    assert logs.errors == {}
    logs.payload(f"error: {error}\n".encode())
    logs.payload(line(2, "0 .all 2"))
    monkeypatch.setattr(time, "monotonic", lambda: now + collect_logs.SILENT_S + 1)
    assert logs.needs_restart  # the kubelet may answer again


def test_files_of_pods_have_no_place_to_look_at(tmp_path: Path) -> None:
    """The pods are deleted; the placeholder of their run directory means nothing to a user."""
    collector = Collector(transport(), NODE_DIR, tmp_path, limit_bytes=1)
    assert NODE_DIR not in collector.missing_files()
    collector._node_count = 2
    assert NODE_DIR not in collector.missing_files()


def test_stream_that_shows_only_errors_is_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kubectl ends with code 0 after the errors of all pods."""
    (tmp_path / "kubectl").write_text(f"#!/bin/sh\ncat <<'END'\nerror: {KUBELET}\nEND\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(collect, "RESTART_S", 0.1)
    monkeypatch.setattr(collect, "NO_DATA_TIMEOUT_S", 1.0)
    collector = Collector(transport(), NODE_DIR, tmp_path, limit_bytes=1)

    def problem() -> bool:
        collector.fetch()
        return KUBELET in collector.problem()

    until(problem)
    collector.close()


def test_first_line_of_a_stream_may_take_as_long_as_a_kubelet_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs, now = transport(), time.monotonic()
    logs.payload(line(1, "0 .all 2"))
    monkeypatch.setattr(time, "monotonic", lambda: now + 30)
    assert not logs.needs_restart
    monkeypatch.setattr(time, "monotonic", lambda: now + 45)
    assert logs.needs_restart


POD = """set -euo pipefail
export SEATRIAL_ATTEMPT_DIR=$SEATRIAL_RUN_DIR/jobs/ranks/attempt1
mkdir -p "$SEATRIAL_ATTEMPT_DIR"
{}
env >"$SEATRIAL_ATTEMPT_DIR/environment"
echo "{} 1 0 .all 2" # output of a check in our format: it goes to a file
head -c 100000 /dev/urandom >"$SEATRIAL_ATTEMPT_DIR/big"
run_command sleep "$1"
exit 3
"""
KUBECTL = """#!{python}
import sys, time
cut = {folder}/"cut"
lines = 400 if cut.exists() else 10**9
cut.unlink(missing_ok=True)
sent = dict.fromkeys("01", 0)
while True:
    for node in sent:
        for line in ({folder}/f"log{{node}}").read_text(errors="replace").splitlines(keepends=True)[sent[node]:]:
            if lines == 0: sys.exit("error: unexpected EOF")
            if line.endswith("\\n"):
                print("2026-11-23T10:00:00Z " + line, end="", flush=True); sent[node] += 1; lines -= 1
    time.sleep(0.05)
"""


def test_pods_send_all_files_over_a_stream_that_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "RESTART_S", 0.1)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "kubectl"
    program.write_text(KUBECTL.format(python=sys.executable, folder=f"__import__('pathlib').Path({str(tmp_path)!r})"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    (tmp_path / "cut").touch()
    pods = []
    for node, seconds in (("0", "0.1"), ("1", "60")):
        env = {"PATH": os.environ["PATH"], "SEATRIAL_TOKEN": TOKEN, "JOB_COMPLETION_INDEX": node}
        env["SEATRIAL_RUN_DIR"] = str(tmp_path / f"pod{node}")
        script = POD.format(send_results(2), TOKEN)
        log = (tmp_path / f"log{node}").open("wb")
        pods.append(subprocess.Popen(["bash", "-c", script, "bash", seconds], env=env, stdout=log, stderr=log))
    folder = tmp_path / "run" / "jobs" / "ranks" / "attempt1"
    folder.mkdir(parents=True)
    logs = LogTransport(Kubectl(), "x", "seatrial", TOKEN, 2)
    collector = Collector(logs, NODE_DIR, folder, limit_bytes=2 * POD_LIMIT_BYTES)

    def fetched(condition: Callable[[], bool]) -> bool:
        collector.fetch()
        return condition()

    until(lambda: fetched(lambda: (folder / "node1.out").exists()))
    assert not collector.finished
    pods[1].terminate()  # as when the pod is deleted: it still sends everything
    until(lambda: fetched(lambda: collector.finished))
    assert [pod.wait(30) for pod in pods] == [3, 143]
    assert not (tmp_path / "cut").exists()
    sent = tmp_path / "pod1" / "jobs" / "ranks" / "attempt1"
    assert (folder / "big").read_bytes() in {(tmp_path / f"pod{n}/jobs/ranks/attempt1/big").read_bytes() for n in "01"}
    assert TOKEN not in (sent / "environment").read_text()
    assert f"{TOKEN} 1 0 .all 2" in (folder / "node0.out").read_text()


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    script = tmp_path / "pod.sh"
    script.write_text(f"#!/bin/bash\nset -euo pipefail\n{send_results(2)}\nrun_command true\n")
    shellcheck = Path(sys.executable).parent / "shellcheck"
    result = subprocess.run(
        [shellcheck, "--exclude=SC2016,SC2153", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


def test_commands_run_in_the_folder_of_each_pod() -> None:
    logs = transport()
    logs.nodes = "a-0-x,a-1-y"
    command = logs.command("bash", "-c", "echo", f"{NODE_DIR}/jobs")
    assert command[:2] == ["bash", "-c"]
    assert "for pod in a-0-x a-1-y; do kubectl --namespace=ml exec --container=seatrial" in command[2]
    assert command[-1] == f"{collect_logs.NODE_DIR}/jobs"
