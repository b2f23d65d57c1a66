from __future__ import annotations

import resource
from pathlib import Path

import pytest

from seatrial.checks.slurm.controller import CHECK, METRICS, RULES
from seatrial.model import Outcome
from tests.fakes.slurm import Bench, Reply, cluster, configured, recorded, run, said

UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
GOOD = {
    "ProctrackType": "proctrack/cgroup",
    "TaskPlugin": "task/affinity,task/cgroup",
    "HealthCheckProgram": "/usr/sbin/nhc",
    "KillWait": "30 sec",
    "SlurmdTimeout": "300 sec",
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    monkeypatch.setattr(resource, "getrlimit", lambda which: UNLIMITED)
    return Bench(CHECK, monkeypatch, tmp_path)


def settings(**changes: str) -> dict[str, Reply]:
    """The recorded cluster, set up well, but for these settings."""
    return {**cluster(), "scontrol show config": configured(**(GOOD | changes))}


def test_every_rule_judges_a_metric_that_is_measured(bench: Bench) -> None:
    measured = {metric.name for metric in bench.measure(settings(), (4, 2)).metrics}
    assert {rule.metric for rule in RULES} == measured == set(METRICS)


def test_a_cluster_that_is_set_up_well(bench: Bench) -> None:
    assert bench.bad(settings()) == {}


def test_what_is_recorded(bench: Bench) -> None:
    facts = bench.measure(settings(), (4, 2)).facts
    assert facts["version"] == "22.05.8"
    assert facts["select_type_parameters"] == ["CR_CORE_MEMORY"]
    assert facts["controllers"] == [{"role": "primary", "host": "ctl", "up": True}]
    assert facts["mpi_default"] == "none"


@pytest.mark.parametrize(
    ("key", "value", "metric"),
    [
        ("HASH_VAL", "Different Ours=0x16694b49 Slurmctld=0xfd050da5", "configuration_differs"),
        ("ProctrackType", "proctrack/pgid", "loses_processes"),
        ("ProctrackType", "proctrack/linuxproc", "loses_processes"),
        ("TaskPlugin", "task/none", "binds_tasks"),
        ("TaskPlugin", "(null)", "binds_tasks"),
        ("KillWait", "600 sec", "kill_wait"),
        ("SlurmdTimeout", "0 sec", "dead_nodes_noticed"),
        ("HealthCheckProgram", "(null)", "health_check"),
    ],
)
def test_what_is_unwise_warns(bench: Bench, key: str, value: str, metric: str) -> None:
    assert bench.bad(settings(**{key: value})) == {metric: Outcome.WARN}


def test_a_configuration_that_slurm_does_not_compare_is_not_judged(bench: Bench) -> None:
    assert bench.bad(settings(HASH_VAL="Not Verified")) == {}


class TestGpus:
    def test_promised_and_unknown_to_slurm(self, bench: Bench) -> None:
        assert bench.bad(settings(GresTypes="(null)")) == {"gpu_resource": Outcome.FAIL}

    @pytest.mark.parametrize("promised", [None, 0])
    def test_not_promised(self, bench: Bench, promised: int | None) -> None:
        assert bench.bad(settings(GresTypes="(null)"), gpus=promised) == {}


class TestLockedMemory:
    """This machine's limit is that of its jobs, where Slurm passes limits on."""

    @pytest.fixture(autouse=True)
    def little(self, bench: Bench) -> None:
        bench.monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * 2**20, 8 * 2**20))

    def test_is_passed_on(self, bench: Bench) -> None:
        (verdict,) = (v for v in bench.verdicts(settings()) if v.outcome is Outcome.WARN)
        assert verdict.metric == "memlock_lowered"
        assert "memlock_here: 8388608" in verdict.evidence

    @pytest.mark.parametrize(
        ("changes", "bad"),
        [
            ({"PropagateResourceLimits": "NONE"}, False),
            ({"PropagateResourceLimits": "CORE,STACK"}, False),
            ({"PropagateResourceLimits": "CORE,MEMLOCK"}, True),
            ({"PropagateResourceLimits": "(null)", "PropagateResourceLimitsExcept": "MEMLOCK"}, False),
            ({"PropagateResourceLimits": "(null)", "PropagateResourceLimitsExcept": "CORE"}, True),
        ],
    )
    def test_as_slurm_conf_says(self, bench: Bench, changes: dict[str, str], bad: bool) -> None:
        assert ("memlock_lowered" in bench.bad(settings(**changes))) is bad


class TestWithoutAnAnswer:
    def replies(self, trouble: str) -> dict[str, Reply]:
        return {
            "scontrol ping": recorded(f"scontrol-ping-{trouble}.txt"),
            "scontrol show config": recorded(f"scontrol-show-config-{trouble}.txt"),
        }

    def test_a_dead_controller_fails_and_the_rest_is_an_error(self, bench: Bench) -> None:
        assert bench.bad(self.replies("controller-down")) == {"controllers_up": Outcome.FAIL, "login": Outcome.ERROR}

    @pytest.mark.parametrize("trouble", ["munge-down", "munge-key-wrong"])
    def test_a_client_that_is_not_trusted_says_nothing_of_the_controller(self, bench: Bench, trouble: str) -> None:
        """Though ping, as such a client sees it, says DOWN."""
        assert "is DOWN" in recorded(f"scontrol-ping-{trouble}.txt").out
        assert bench.bad(self.replies(trouble)) == {"login": Outcome.ERROR}

    def test_a_backup_that_is_down_warns(self, bench: Bench) -> None:
        two = "Slurmctld(primary) at ctl is UP\nSlurmctld(backup) at ctl2 is DOWN\n"
        assert bench.bad({**settings(), "scontrol ping": said(two)}) == {"controllers_down": Outcome.WARN}

    def test_no_client(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert run(CHECK, tmp_path).skipped == "no Slurm client (sinfo) on this machine"
