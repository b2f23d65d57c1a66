"""Real processes: none remains after stop()."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.util import processes
from tests.processes import alive, until, with_enough_time

# A child and a grandchild in another session, both ignoring SIGTERM.
IGNORING_SIGTERM = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
grandchild = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
open(sys.argv[1], "w").write(f"{os.getpid()} {grandchild.pid}")
time.sleep(600)
"""


def start(tmp_path: Path, *argv: str) -> processes.Child:
    return processes.start([sys.executable, *argv], env={}, stdout=tmp_path / "out", stderr=tmp_path / "err")


def child_and_grandchild(tmp_path: Path) -> tuple[processes.Child, list[int]]:
    pids = tmp_path / "pids"
    child = start(tmp_path, "-c", IGNORING_SIGTERM, str(pids))
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    return child, [int(pid) for pid in pids.read_text().split()]


def test_output_and_exit_code(tmp_path: Path) -> None:
    child = start(tmp_path, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    until(lambda: child.poll() is not None)
    assert child.poll() == 7
    assert (tmp_path / "out").read_text() == "out\n"
    assert (tmp_path / "err").read_text() == "err\n"


def test_stop_ends_descendants_in_other_sessions(tmp_path: Path) -> None:
    child, pids = child_and_grandchild(tmp_path)
    processes.stop(child, grace_s=0.3)
    assert not any(alive(pid) for pid in pids)


def test_stop_ends_orphans_and_stopped_processes(tmp_path: Path) -> None:
    child, (pid, grandchild) = child_and_grandchild(tmp_path)
    os.kill(grandchild, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    processes.stop(child, grace_s=0.3)
    assert not alive(grandchild)


def test_stop_continues_stopped_processes_for_cleanup(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal, sys, time; here = pathlib.Path(sys.argv[1])\n"
        "def cleanup(*_): (here / 'cleanup').touch(); sys.exit()\n"
        "signal.signal(signal.SIGTERM, cleanup); (here / 'up').touch(); time.sleep(600)"
    )
    child = start(tmp_path, "-c", code, str(tmp_path))
    until(lambda: (tmp_path / "up").exists())
    os.kill(child.process.pid, signal.SIGSTOP)
    assert processes.stop(child, grace_s=20) == ""
    assert (tmp_path / "cleanup").exists()


def test_stop_of_an_ended_child(tmp_path: Path) -> None:
    child = start(tmp_path, "-c", "pass")
    until(lambda: child.poll() is not None)
    processes.stop(child)
    assert child.poll() == 0


def test_child_ends_with_its_killed_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from seatrial.util import processes; p = Path(sys.argv[1]);"
        "argv = [sys.executable, '-c', 'import time; time.sleep(600)'];"
        "child = processes.start(argv, env={}, stdout=p/'o', stderr=p/'e');"
        "(p / 'pid').write_text(str(child.process.pid)); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    pid_file = tmp_path / "pid"
    until(lambda: pid_file.exists() and bool(pid_file.read_text()))
    pid = int(pid_file.read_text())
    assert alive(pid)
    parent.kill()
    parent.wait()
    until(lambda: not alive(pid))


def test_run_command_result_and_timeout(tmp_path: Path) -> None:
    result = processes.run_command(
        [sys.executable, "-c", "import sys; print('yes'); print('no', file=sys.stderr); sys.exit(3)"], 30
    )
    assert result == processes.CommandResult(3, "yes\n", "no\n")
    pid_file = tmp_path / "pid"
    script = 'echo $$ >"$0"; echo on; exec sleep 600'
    argv = ["sh", "-c", script, str(pid_file)]
    result = with_enough_time(lambda seconds: processes.run_command(argv, seconds), lambda result: result.out, 1)
    assert (result.code, result.out) == (None, "on\n")
    assert not alive(int(pid_file.read_text()))


def test_run_command_keeps_background_processes(tmp_path: Path) -> None:
    """A job started by sbatch inherits the tag and may run on this host."""
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
    pid = int(processes.run_command([sys.executable, "-c", code], 30).out)
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)


def test_variables_by_prefix_are_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "7")
    code = "import os; print(os.environ.get('PET_NNODES'), os.environ.get('PET_OURS'))"
    argv, out, err = [sys.executable, "-c", code], tmp_path / "out", tmp_path / "err"
    child = processes.start(argv, env={"PET_OURS": "1"}, stdout=out, stderr=err, without="PET_")
    until(lambda: child.poll() is not None)
    assert out.read_text() == "None 1\n"


def test_child_with_dead_parent_exits() -> None:
    code = (
        "import os; from seatrial.util import processes; processes.die_with_parent(os.getppid() + 1); print('stayed')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (143, "")


def test_missing_program_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nosuchprogram"):
        processes.start(["nosuchprogram"], env={}, stdout=tmp_path / "out", stderr=tmp_path / "err")


def test_terminate_ends_a_child(tmp_path: Path) -> None:
    child = processes.start(["sleep", "600"], env={}, stdout=tmp_path / "out", stderr=tmp_path / "err")
    processes.terminate(child)
    assert child.poll() == -signal.SIGTERM


def test_terminate_kills_a_child_that_ignores_sigterm(tmp_path: Path) -> None:
    argv = ["bash", "-c", "trap '' TERM; echo ready; sleep 600"]
    child = processes.start(argv, env={}, stdout=tmp_path / "out", stderr=tmp_path / "err")
    until(lambda: (tmp_path / "out").read_text() == "ready\n")
    processes.terminate(child, wait_s=0.1)
    assert child.poll() == -signal.SIGKILL
    processes.stop(child, grace_s=0.1)  # the child of bash


# Handles SIGTERM, which a stopped process cannot.
HANDLING_SIGTERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
print("ready", flush=True)
time.sleep(600)
"""


def test_terminate_ends_a_stopped_child(tmp_path: Path) -> None:
    child = start(tmp_path, "-c", HANDLING_SIGTERM)
    until(lambda: (tmp_path / "out").read_text() == "ready\n")
    os.kill(child.process.pid, signal.SIGSTOP)
    processes.terminate(child, wait_s=0.1)
    assert child.poll() == -signal.SIGKILL


def test_stopped_child_dies_with_its_parent_by_sigkill(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys, time
from pathlib import Path
from seatrial.util import processes
out = Path(sys.argv[1])
argv = [sys.executable, "-c", {HANDLING_SIGTERM!r}]
child = processes.start(argv, env={{}}, stdout=out, stderr=out, death_signal=signal.SIGKILL)
while out.read_text() != "ready\\n":
    time.sleep(0.01)
os.kill(child.process.pid, signal.SIGSTOP)
print(child.process.pid)
"""
    argv = [sys.executable, "-c", code, str(tmp_path / "out")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    until(lambda: not alive(int(done.stdout)))
