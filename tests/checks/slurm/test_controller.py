from __future__ import annotations

import resource
from pathlib import Path

import pytest

from seatrial.checks.slurm.controller import CHECK, METRICS, RULES
from seatrial.model import Outcome
from tests.fakes.slurm import CheckRunner, Reply, cluster, config_with, recorded, run_check, success

UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
GOOD = {
    "ProctrackType": "proctrack/cgroup",
    "TaskPlugin": "task/affinity,task/cgroup",
    "HealthCheckProgram": "/usr/sbin/nhc",
    "KillWait": "30 sec",
    "SlurmdTimeout": "300 sec",
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CheckRunner:
    monkeypatch.setattr(resource, "getrlimit", lambda which: UNLIMITED)
    return CheckRunner(CHECK, monkeypatch, tmp_path)


def settings(**changes: str) -> dict[str, Reply]:
    """The recorded cluster, set up well, but for these settings."""
    return {**cluster(), "scontrol show config": config_with(**(GOOD | changes))}


def test_every_rule_judges_a_metric_that_is_measured(bench: CheckRunner) -> None:
    measured = {metric.name for metric in bench.measure(settings(), (4, 2)).metrics}
    assert {rule.metric for rule in RULES} == measured == set(METRICS)


def test_a_cluster_that_is_set_up_well(bench: CheckRunner) -> None:
    assert bench.not_passed(settings()) == {}


def test_what_is_recorded(bench: CheckRunner) -> None:
    facts = bench.measure(settings(), (4, 2)).facts
    assert facts["version"] == "22.05.8"
    assert facts["select_type_parameters"] == ["CR_CORE_MEMORY"]
    assert facts["controllers"] == [{"role": "primary", "host": "ctl", "up": True}]
    assert facts["mpi_default"] == "none"


@pytest.mark.parametrize(
    ("key", "value", "metric"),
    [
        ("HASH_VAL", "Different Ours=0x16694b49 Slurmctld=0xfd050da5", "configuration_differs"),
        ("ProctrackType", "proctrack/pgid", "proctrack_loses_processes"),
        ("ProctrackType", "proctrack/linuxproc", "proctrack_loses_processes"),
        ("TaskPlugin", "task/none", "task_binding_enabled"),
        ("TaskPlugin", "(null)", "task_binding_enabled"),
        ("KillWait", "600 sec", "kill_wait"),
        ("SlurmdTimeout", "0 sec", "dead_nodes_detected"),
        ("HealthCheckProgram", "(null)", "health_check"),
    ],
)
def test_what_is_unwise_warns(bench: CheckRunner, key: str, value: str, metric: str) -> None:
    assert bench.not_passed(settings(**{key: value})) == {metric: Outcome.WARN}


def test_a_configuration_that_slurm_does_not_compare_is_not_judged(bench: CheckRunner) -> None:
    assert bench.not_passed(settings(HASH_VAL="Not Verified")) == {}


class TestGpus:
    def test_promised_and_unknown_to_slurm(self, bench: CheckRunner) -> None:
        assert bench.not_passed(settings(GresTypes="(null)")) == {"gpu_gres_configured": Outcome.FAIL}

    @pytest.mark.parametrize("promised", [None, 0])
    def test_not_promised(self, bench: CheckRunner, promised: int | None) -> None:
        assert bench.not_passed(settings(GresTypes="(null)"), gpus=promised) == {}


class TestLockedMemory:
    """This machine's limit is that of its jobs, where Slurm passes limits on."""

    @pytest.fixture(autouse=True)
    def little(self, bench: CheckRunner) -> None:
        bench.monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * 2**20, 8 * 2**20))

    def test_is_passed_on(self, bench: CheckRunner) -> None:
        (verdict,) = (v for v in bench.verdicts(settings()) if v.outcome is Outcome.WARN)
        assert verdict.metric == "memlock_limit_propagated"
        assert "submit_host_memlock: 8388608" in verdict.evidence

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
    def test_as_slurm_conf_says(self, bench: CheckRunner, changes: dict[str, str], bad: bool) -> None:
        assert ("memlock_limit_propagated" in bench.not_passed(settings(**changes))) is bad


class TestWithoutAnAnswer:
    def replies(self, trouble: str) -> dict[str, Reply]:
        return {
            "scontrol ping": recorded(f"scontrol-ping-{trouble}.txt"),
            "scontrol show config": recorded(f"scontrol-show-config-{trouble}.txt"),
        }

    def test_a_dead_controller_fails_and_the_rest_is_an_error(self, bench: CheckRunner) -> None:
        assert bench.not_passed(self.replies("controller-down")) == {
            "controllers_up": Outcome.FAIL,
            "login": Outcome.ERROR,
        }

    @pytest.mark.parametrize("trouble", ["munge-down", "munge-key-wrong"])
    def test_a_client_that_is_not_trusted_says_nothing_of_the_controller(
        self, bench: CheckRunner, trouble: str
    ) -> None:
        """Though ping, as such a client sees it, says DOWN."""
        assert "is DOWN" in recorded(f"scontrol-ping-{trouble}.txt").out
        assert bench.not_passed(self.replies(trouble)) == {"login": Outcome.ERROR}

    def test_a_backup_that_is_down_warns(self, bench: CheckRunner) -> None:
        two = "Slurmctld(primary) at ctl is UP\nSlurmctld(backup) at ctl2 is DOWN\n"
        assert bench.not_passed({**settings(), "scontrol ping": success(two)}) == {"controllers_down": Outcome.WARN}

    def test_no_client(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert run_check(CHECK, tmp_path).skipped == "no Slurm client (sinfo) on this machine"
