"""Changes of a drill: only to its own processes, and taken back at its end, also after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seatrial.drill import faults
from seatrial.drill.base import Drill, Expected
from seatrial.drill.injection import Injection, TrialEndedEarly
from seatrial.model import SeatrialError
from seatrial.worker import Heartbeat
from tests.processes import alive, until

DRILL = Drill(
    name="test",
    title="",
    machine="cpu",
    checks={"host.inventory": {}},
    thresholds={"host.inventory": {"memlock_unlimited": "== 1 bool"}},
    settings={"limits": {"startup_s": 60}},
    expected=Expected(cause="", place="", command=""),
)


@pytest.fixture
def injection(tmp_path: Path) -> Injection:
    return Injection(DRILL, tmp_path)


def test_no_signal_to_a_process_that_is_no_rank_of_the_trial(injection: Injection) -> None:
    beat = Heartbeat(pid=os.getpid(), node="n0", status="train.ddp", progress="", time=0)
    with pytest.raises(SeatrialError, match="is not a rank of this drill"):
        injection.signal_rank(beat, signal.SIGKILL)


def test_processes_end_with_the_drill(injection: Injection) -> None:
    child = injection.start_process(["sleep", "300"], "sleep")
    injection.at_end((injection.folder / "restored").touch)
    injection.close()
    assert not alive(child.process.pid)
    assert (injection.folder / "restored").exists()


def test_processes_end_when_the_drill_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tests.drill.test_injection import DRILL, Injection\n"
        "child = Injection(DRILL, Path(sys.argv[1])).start_process(['sleep', '300'], 'sleep')\n"
        "print(child.process.pid, flush=True); time.sleep(300)"
    )
    drill = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
    assert drill.stdout
    pid = int(drill.stdout.readline())
    assert alive(pid)
    drill.kill()
    drill.wait()
    drill.stdout.close()
    until(lambda: not alive(pid), 30)


def test_trial_runs_with_setup_and_environment(injection: Injection) -> None:
    injection.setup.append("ulimit -n 4321; touch setup-ran")
    injection.setup.append(f"cat /proc/self/limits > {injection.folder}/limits; env > {injection.folder}/env")
    injection.setup.append("exit 7")
    injection.environment["DRILL_VALUE"] = "here"
    injection.setup[0] = injection.setup[0].replace("setup-ran", f"{injection.folder}/setup-ran")
    injection.start_trial()
    assert injection.wait_for_end(60) == 7
    assert (injection.folder / "setup-ran").exists()
    assert "4321" in (injection.folder / "limits").read_text()
    assert "DRILL_VALUE=here" in (injection.folder / "env").read_text().splitlines()
    with pytest.raises(TrialEndedEarly, match="the trial ended before: never"):
        injection.wait_for(lambda: False, "never")
    injection.close()


def test_each_wait_is_reported_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.drill.injection._PROGRESS_S", 0.2)
    messages: list[str] = []

    def add(message: str) -> None:
        messages.append(message)
        if message.endswith("so far; ranks: none"):
            (tmp_path / "reported").touch()

    injection = Injection(DRILL, tmp_path, add)
    injection.setup += [f"until [ -e '{tmp_path}/reported' ]; do sleep 0.05; done", "exit 7"]
    injection.start_trial()
    injection.mark_injected()
    injection.wait_for_end(60)
    injection.close()
    start, fault, wait, *waits, end = messages
    assert (start, fault) == ("starting a trial with host.inventory", "injecting the fault")
    assert "at most 60 s" in wait
    assert waits
    assert all(text.endswith("so far; ranks: none") for text in waits)
    assert end.endswith("exit code 7")


def test_fault_is_in_no_other_process(injection: Injection) -> None:
    code = "import sys; print('seatrial.drill.faults' in sys.modules)"
    injection.use_fault("bit_flip")

    def loaded(environment: dict[str, str]) -> str:
        env = {**os.environ, **environment}
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout

    assert (loaded({}), loaded(injection.environment)) == ("False\n", "True\n")
    with pytest.raises(ModuleNotFoundError):
        injection.use_fault("no_such_fault")


def test_heartbeats_are_of_the_last_attempt(injection: Injection) -> None:
    for attempt, status in ((1, "old"), (2, "train.ddp")):
        folder = injection.run_dir / "jobs" / "ranks" / f"attempt{attempt}"
        folder.mkdir(parents=True)
        beat = Heartbeat(pid=1, node="n0", status=status, progress="speed", time=time.time())
        (folder / "rank3.heartbeat.json").write_text(beat.model_dump_json())
        (folder / "rank4.heartbeat.json").write_text("{")
        time.sleep(0.02)
    assert {rank: beat.status for rank, beat in injection.heartbeats().items()} == {3: "train.ddp"}


def test_every_fault_finds_what_it_changes_in_the_module() -> None:
    names = [path.stem for path in Path(faults.__file__).parent.glob("[a-z]*.py")]
    assert "truncated_cache" in names
    code = f"""
from seatrial.drill import faults
for name in {names}:
    faults.install(name)
import seatrial.bench.collectives, seatrial.train.checkpoint, seatrial.train.ddp, seatrial.train.loop
"""
    environment = {**os.environ, "RANK": str(faults.FAULTY_RANK)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
