from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from seatrial.discover import slurm
from seatrial.discover.slurm_facts import Gres, SlurmNode
from seatrial.model import SeatrialError
from seatrial.util.processes import CommandResult
from tests.fakes.slurm import (
    NEWER_NODES,
    NO_CONFIGURATION,
    NODES,
    PARTITIONS,
    RECORDED,
    FakeSlurm,
    Reply,
    cluster,
    failure,
    recorded,
    success,
)
from tests.paths import FIXTURES

SACCT = "sacct --jobs 7 --allocations --noheader --parsable2 --format JobIDRaw,State,ExitCode,NodeList,"
SACCT += "TimelimitRaw,Start,Reason"


Install = Callable[[Mapping[str, Reply]], FakeSlurm]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    return lambda replies: FakeSlurm(replies).install(monkeypatch)


def names(nodes: tuple[SlurmNode, ...]) -> list[str]:
    return [node.name for node in nodes]


class TestNodes:
    def test_nodes_that_are_down_or_drained(self, install: Install) -> None:
        fake = install(cluster("troubled"))
        assert [str(node) for node in slurm.nodes()] == [
            "IDLE",
            "DOWN+NOT_RESPONDING: Not responding",
            "IDLE+DRAIN: fan broken",
            "IDLE",
        ]
        assert fake.commands == [NODES]

    def test_future_nodes_are_omitted(self, install: Install) -> None:
        install({NODES: success(NEWER_NODES.read_text())})
        assert names(slurm.nodes()) == ["gpu1", "gpu2", "gpu3", "gpu4", "gpu5", "gpu7", "gpu8"]

    def test_no_controller_is_an_error(self, install: Install) -> None:
        install({NODES: recorded("scontrol-show-nodes-controller-down.txt")})
        with pytest.raises(slurm.ControllerDown, match="controller does not answer"):
            slurm.nodes()


def test_partitions(install: Install) -> None:
    install(cluster())
    assert [partition.name for partition in slurm.partitions()] == ["gpu", "short", "closed", "members"]


class TestJob:
    def failed(self) -> str:
        text = recorded("scontrol-show-jobs-ended.txt").out
        return next(record for record in text.split("\n\n") if "ExitCode=3:0" in record)

    def test_known_to_the_controller(self, install: Install) -> None:
        fake = install({**cluster(), "scontrol show job 28": success(self.failed())})
        job = slurm.job(28)
        assert (job.state, job.exit_code, job.ended, job.has_state) == ("FAILED", 3, True, True)
        assert fake.commands == ["scontrol show job 28"]

    def test_unknown_without_accounting(self, install: Install) -> None:
        install({**cluster(), "scontrol show job 999": recorded("scontrol-show-job-unknown.txt")})
        job = slurm.job(999)
        assert not job.has_state
        assert not job.ended
        assert not job.pending
        assert "300 s after their end (MinJobAge)" in job.reason

    @pytest.mark.parametrize(
        ("answer", "state"), [("7|TIMEOUT|0:15|gpu1|60|2026-11-21T09:40:00|None\n", "TIMEOUT"), ("", "UNKNOWN")]
    )
    def test_unknown_to_the_controller_but_in_accounting(self, install: Install, answer: str, state: str) -> None:
        settings = (RECORDED / "scontrol-show-config.txt").read_text()
        unknown = recorded("scontrol-show-job-unknown.txt")
        replies = {"scontrol show job 7": unknown, SACCT: success(answer)}
        replies["scontrol show config"] = success(
            settings.replace("accounting_storage/none", "accounting_storage/slurmdbd")
        )
        install({**cluster(), **replies})
        assert slurm.job(7).state == state

    def test_other_errors_are_raised(self, install: Install) -> None:
        install({**cluster(), "scontrol show job 7": failure("slurm_load_jobs error: Access/permission denied")})
        with pytest.raises(slurm.SlurmRefused, match="permission denied"):
            slurm.job(7)


class TestPing:
    def test_up(self, install: Install) -> None:
        install(cluster())
        assert [(ping.role, ping.host, ping.up) for ping in slurm.ping()] == [("primary", "ctl", True)]

    def test_down(self, install: Install) -> None:
        install({"scontrol ping": recorded("scontrol-ping-controller-down.txt")})
        assert [ping.up for ping in slurm.ping()] == [False]

    def test_a_client_without_munge_is_unavailable(self, install: Install) -> None:
        """scontrol prints DOWN, and on stderr that authentication failed."""
        answer = recorded("scontrol-ping-munge-down.txt")
        assert "is DOWN" in answer.out
        install({"scontrol ping": answer})
        with pytest.raises(slurm.SlurmUnavailable, match="MUNGE"):
            slurm.ping()


class TestErrors:
    def error(self, install: Install, answer: Reply) -> SeatrialError:
        install({PARTITIONS: answer})
        with pytest.raises(SeatrialError) as caught:
            slurm.partitions()
        return caught.value

    @pytest.mark.parametrize(
        ("file", "kind", "meaning", "first"),
        [
            ("scontrol-show-nodes-controller-down.txt", slurm.ControllerDown, "does not answer", "scontrol ping; "),
            ("scontrol-show-nodes-munge-down.txt", slurm.SlurmUnavailable, "MUNGE", "munge -n | unmunge"),
            (
                "scontrol-show-nodes-munge-key-wrong.txt",
                slurm.SlurmUnavailable,
                "closed the connection",
                "munge -n | ssh",
            ),
            ("sbatch-partition-unknown.txt", slurm.SlurmRefused, "no such partition", "sinfo -s"),
            ("sbatch-reservation-unknown.txt", slurm.SlurmRefused, "no such reservation", "scontrol show reservations"),
            ("sbatch-constraint-unknown.txt", slurm.SlurmRefused, "no node has that feature", "sinfo -o '%N %f'"),
            ("sbatch-gpus-too-many.txt", slurm.SlurmRefused, "no node has the requested resources", "sinfo -Nel"),
            ("sbatch-gres-unknown.txt", slurm.SlurmRefused, "no such generic resource", "sinfo -o '%N %G'"),
            ("sbatch-memory-too-much.txt", slurm.SlurmRefused, "no node has the requested resources", "sinfo -Nel"),
            ("sbatch-node-unknown.txt", slurm.SlurmRefused, "no node has the requested resources", "sinfo -Nel"),
            ("sbatch-time-invalid.txt", slurm.SlurmRefused, "Slurm refused", PARTITIONS),
        ],
    )
    def test_the_message_has_meaning_first_command_and_output(
        self, install: Install, file: str, kind: type[Exception], meaning: str, first: str
    ) -> None:
        answer = recorded(file)
        error = self.error(install, answer)
        assert type(error) is kind
        assert meaning in str(error)
        assert f"Run first: {first}" in str(error)
        assert answer.err.strip().splitlines()[-1].strip() in str(error)

    def test_no_configuration(self, install: Install) -> None:
        error = self.error(install, failure("sinfo: fatal: Could not establish a configuration source\n"))
        assert type(error) is slurm.SlurmUnavailable
        assert "no slurm.conf" in str(error)

    def test_no_client(self, install: Install) -> None:
        error = self.error(install, FileNotFoundError(2, "No such file or directory", "scontrol"))
        assert str(error).startswith("scontrol: No such file or directory. Run first: ")

    def test_timeout(self, install: Install) -> None:
        error = self.error(install, CommandResult(None, "", ""))
        assert f"{PARTITIONS} timed out after 90 s" in str(error)

    def test_repeated_lines_appear_once(self, install: Install) -> None:
        error = self.error(install, failure("a: error: x\na: error: x\na: error: y\n"))
        assert "(a: error: x; a: error: y)" in str(error)

    def test_no_output(self, install: Install) -> None:
        assert "exit code 3, no output" in str(self.error(install, CommandResult(3, "", "")))


class TestOneNode:
    def test_known(self, install: Install) -> None:
        (text,) = (part for part in recorded("scontrol-show-nodes-healthy.txt").out.split("\n\n") if "=node1 " in part)
        install({"scontrol show node node1": success(text + "\n")})
        node = slurm.node("node1")
        assert node
        assert (node.name, node.gpus) == ("node1", 2)

    def test_unknown(self, install: Install) -> None:
        unknown = CommandResult(1, "Node node9 not found\n", "")
        install({"scontrol show node node9": unknown})
        assert slurm.node("node9") is None

    def test_no_controller_is_an_error(self, install: Install) -> None:
        down = recorded("scontrol-show-nodes-controller-down.txt")
        install({"scontrol show node node9": down})
        with pytest.raises(slurm.ControllerDown):
            slurm.node("node9")


def test_allocations_by_node(install: Install) -> None:
    details = (FIXTURES / "slurm-task/scontrol-show-job-details.txt").read_text()
    show = {"scontrol --details show job 1": success(details)}
    install({**show, "scontrol show hostnames 'node[0-1]'": success("node0\nnode1\n")})
    by_node = slurm.allocations(1)
    assert set(by_node) == {"node0", "node1"}
    gpus = (Gres(name="gpu", type="fake", count=2),)
    assert {(each.cpus, each.memory_bytes, each.gres) for each in by_node.values()} == {(2, 2000 * 2**20, gpus)}


class TestAccounts:
    ARGV = "sacctmgr --noheader --parsable2 show associations user=ada cluster=c1 format=Account,Partition"

    def test_associations_of_another_partition_are_omitted(self, install: Install) -> None:
        install({self.ARGV: success("physics|\nphysics|gpu\nchemistry|cpu\n")})
        assert slurm.accounts("ada", "c1", "gpu") == ("physics",)
        assert slurm.accounts("ada", "c1", None) == ("chemistry", "physics")

    def test_without_a_database_of_accounts_or_with_other_output(self, install: Install) -> None:
        install({self.ARGV: recorded("sacctmgr-no-accounting.txt")})
        with pytest.raises(slurm.SlurmRefused, match="accounting_storage"):
            slurm.accounts("ada", "c1", "gpu")
        install({self.ARGV: success("physics\n")})
        with pytest.raises(slurm.SlurmRefused, match="unexpected output of sacctmgr"):
            slurm.accounts("ada", "c1", "gpu")


class TestNotConfigured:
    """A machine that has Slurm's client, but belongs to no cluster."""

    @pytest.fixture(autouse=True)
    def no_trace_of_slurm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JOB_ID"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("seatrial.discover.slurm._CONFIGURATION_FILES", ())
        monkeypatch.setattr("psutil.process_iter", lambda _fields: [])

    def error(self, install: Install, stderr: str = NO_CONFIGURATION) -> SeatrialError:
        install({"scontrol": failure(stderr)})
        with pytest.raises(slurm.SlurmUnavailable) as caught:
            slurm.ping()
        return caught.value

    def test_no_trace_of_slurm(self, install: Install) -> None:
        assert isinstance(self.error(install), slurm.NotConfigured)

    @pytest.mark.parametrize("name", ["SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JOB_ID"])
    def test_a_variable_of_slurm(self, install: Install, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setenv(name, "7")
        assert not isinstance(self.error(install), slurm.NotConfigured)

    def test_a_configuration_that_the_client_does_not_read(
        self, install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "slurm.conf").touch()
        monkeypatch.setattr("seatrial.discover.slurm._CONFIGURATION_FILES", (str(tmp_path / "slurm.conf"),))
        assert not isinstance(self.error(install), slurm.NotConfigured)

    @pytest.mark.parametrize("name", ["slurmd", "slurmctld", "sackd"])
    def test_a_daemon_of_slurm(self, install: Install, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        process = SimpleNamespace(info={"name": name})
        monkeypatch.setattr("psutil.process_iter", lambda _fields: [process])
        assert not isinstance(self.error(install), slurm.NotConfigured)

    @pytest.mark.parametrize(
        "stderr",
        [
            NO_CONFIGURATION.replace("Unknown host", "Host name lookup failure"),  # DNS does not answer
            # DNS announces a controller that does not answer
            "\n".join(line for line in NO_CONFIGURATION.splitlines() if "DNS" not in line and "dns" not in line),
            "scontrol: error: s_p_parse_file: unable to status file /etc/slurm/slurm.conf: Permission denied",
        ],
    )
    def test_unknown_or_unreadable_configuration(self, install: Install, stderr: str) -> None:
        assert not isinstance(self.error(install, stderr), slurm.NotConfigured)
