"""The command ``hook``: exit codes, output for each caller, installation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.operate.hook_record import Record
from tests.checks.host.mounts import CAN_MOUNT
from tests.processes import Program, call

GPUS = ("--gpus-per-node", "4")  # this machine has none
RUN = ("--time-limit", "50")  # a loaded machine starts Python slowly


def test_a_node_without_its_gpus_fails_within_the_limit(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    code, out, _ = call("hook", "install", tmp_path / "hooks", *GPUS, "--nodes", "2", "--state-dir", state)
    assert code == 0
    assert f"{state}/drains" in out
    arguments = ("--records", tmp_path / "hook.jsonl", "--state-dir", state, "--nodes", "2", *GPUS, *RUN)
    first = Program("hook", "prolog", *arguments, env={"SEATRIAL_NODE": "n1", "SLURM_JOB_ID": "7"})
    code, out, err = first.finish()
    assert (code, err) == (1, "")
    assert out.startswith("FAILED seatrial ")
    second = Program("hook", "prolog", *arguments, "--json", env={"SLURMD_NODENAME": "n2"})
    code, out, _ = second.finish()
    assert code == 0
    record = Record.model_validate_json(out)
    assert record.result == "limited"
    assert {failure.metric for failure in record.failures} == {"gpus_missing"}
    lines = (tmp_path / "hook.jsonl").read_text().splitlines()
    assert [(json.loads(line)["node"], json.loads(line)["job"]) for line in lines] == [("n1", "7"), ("n2", "")]
    code, out, _ = call("hook", "list", "--state-dir", state)
    first_line, command = out.splitlines()
    assert (code, first_line.split(" ", 2)[2][:13]) == (0, "n1: seatrial ")
    assert command.startswith("  scontrol update NodeName=n1 'Reason=seatrial ")


def test_soperator_gets_the_reason_on_descriptor_3_and_npd_one_line(tmp_path: Path) -> None:
    (tmp_path / "drains").mkdir()
    arguments = ["--records", "/dev/full", "--state-dir", str(tmp_path), "--nodes", "2", *GPUS, *RUN]
    command = [sys.executable, "-m", "seatrial", "hook", "health", *arguments, "--caller"]
    detail = tmp_path / "detail"
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" 3>detail', *command, "soperator"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the record could not be written" in done.stderr
    assert detail.read_text().startswith("seatrial ")
    assert "gpus_missing is 4 GPUs" in detail.read_text()
    done = subprocess.run([*command, "npd"], capture_output=True, text=True, check=False)
    assert done.returncode == 1, "the same node is granted again"
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize("redirection", [">/dev/full 2>&- <&-", "| true"])
def test_output_without_a_reader_changes_no_exit_code(redirection: str, tmp_path: Path) -> None:
    (tmp_path / "drains").mkdir()
    arguments = ["--records", str(tmp_path / "records"), "--state-dir", str(tmp_path), "--nodes", "2", *GPUS, *RUN]
    script = f'{{ "$0" -m seatrial hook prolog "$@"; echo $? >code; }} {redirection}'
    subprocess.run(["sh", "-c", script, sys.executable, *arguments], check=True, cwd=tmp_path)
    assert (tmp_path / "code").read_text() == "1\n"
    assert (tmp_path / "drains/000001.json").exists()


def test_a_wrong_option_is_no_failed_check() -> None:
    assert call("hook", "prolog", "--gpus", "8")[0] == 2


def test_install_of_a_site_prints_the_steps_and_uninstall_removes_it(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("cluster: {nodes: 64, gpus_per_node: 8}\nchecks: {gpu.model: {options: {expected: H200}}}\n")
    code, out, err = call("hook", "install", tmp_path / "hooks", "--site", site, "--state-dir", tmp_path)
    assert (code, err) == (0, "")
    assert "scontrol reconfigure" in out
    assert {"--gpus-per-node 8", "--gpu-model H200", "--nodes 64"} <= {
        line.strip(" \\\n") for line in (tmp_path / "hooks/prolog.sh").read_text().splitlines()
    }
    assert (tmp_path / "drains").is_dir()
    code, out, _ = call("hook", "uninstall", tmp_path / "hooks")
    assert code == 0
    assert str(tmp_path / "hooks/prolog.sh") in out.splitlines()
    assert not (tmp_path / "hooks").exists()
    assert (tmp_path / "drains").is_dir(), "the record of drained nodes stays"


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    code, out, _ = call("hook", "install", tmp_path / "hooks", "--dry-run", "--nodes", "2", "--state-dir", tmp_path)
    assert code == 0
    assert f"===== {tmp_path}/hooks/prolog.sh" in out
    assert list(tmp_path.iterdir()) == []


def test_install_for_one_caller_has_its_files_and_steps_only(tmp_path: Path) -> None:
    code, out, _ = call("hook", "install", tmp_path / "hooks", "--caller", "npd")
    files = {path.name for path in (tmp_path / "hooks").iterdir()}
    assert (code, files) == (0, {"npd", "systemd", "installed.json"})  # NPD reads what the timer writes
    assert "node-problem-detector: on each node systemctl link" in out
    assert "slurm.conf" not in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("hooks", "--state-dir", "state"), "--nodes or --site"),
        (("my hooks",), "slurm.conf and systemd need"),
        (("hooks", "--state-dir", "missing", "--nodes", "2"), "missing"),
        (("hooks", "--site", "missing.yaml"), "missing.yaml"),
        (("hooks", "--caller", "nagios"), "expected slurm, systemd, npd, soperator"),
        (("hooks", "--gpu-model", 'H200"\n'), "of a GPU's name"),
    ],
)
def test_an_installation_that_could_not_work_is_refused(
    arguments: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call("hook", "install", *arguments)
    assert code == 2
    assert expected in err
    assert os.listdir(tmp_path) == []


SILENT = """
"$0" -m seatrial.drill.silent_filesystem "$1" & program=$!
until grep -q " $1 fuse" /proc/mounts; do kill -0 $program || exit 9; sleep 0.05; done
"$0" -m seatrial hook prolog --gpus-per-node 4 --nodes 4 --records "$1/hook.jsonl" --state-dir "$1" --time-limit 6
echo "exit $?"
"$0" -c 'import seatrial.cli.hook as hook; hook._LIST_TIMEOUT_S = 1
from seatrial.cli import main; main()' hook list --state-dir "$1"
echo "list $?"
kill -KILL $program
"""


@pytest.mark.skipif(not CAN_MOUNT or not os.access("/dev/fuse", os.W_OK), reason="needs CAP_SYS_ADMIN and /dev/fuse")
def test_a_shared_filesystem_that_never_answers_takes_no_node_out(tmp_path: Path) -> None:
    argv = ["unshare", "--mount", "--propagation", "private", "bash", "-c", SILENT, sys.executable, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.splitlines()[-2:] == ["exit 0", "list 3"], done.stdout + done.stderr
    assert f"{tmp_path} does not answer within 1 s" in done.stderr
    assert f"the record could not be written: {tmp_path}/hook.jsonl: no answer" in done.stderr
