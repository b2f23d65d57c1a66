from __future__ import annotations

import resource
from pathlib import Path

import pytest

from seatrial.checks.slurm.controller import CHECK
from seatrial.model import Outcome, Why
from tests.fakes.slurm import CheckRunner, Reply, cluster, config_with, reasons, recorded, run_check, success

UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
GOOD = {
    "ProctrackType": "proctrack/cgroup",
    "TaskPlugin": "task/affinity,task/cgroup",
    "HealthCheckProgram": "/usr/sbin/nhc",
    "KillWait": "30 sec",
    "SlurmdTimeout": "300 sec",
}


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CheckRunner:
    monkeypatch.setattr(resource, "getrlimit", lambda which: UNLIMITED)
    return CheckRunner(CHECK, monkeypatch, tmp_path)


def settings(**changes: str) -> dict[str, Reply]:
    """Return the recorded cluster with recommended settings and these changes."""
    return {**cluster(), "scontrol show config": config_with(**(GOOD | changes))}


def test_every_metric_has_a_value(runner: CheckRunner) -> None:
    measured = runner.measure(settings(), (4, 2))
    assert {metric.name for metric in measured.metrics} == set(CHECK.units)
    assert measured.absent == ()


def test_recommended_settings_pass(runner: CheckRunner) -> None:
    assert runner.not_passed(settings()) == {}


def test_facts(runner: CheckRunner) -> None:
    measured = runner.measure(settings(), (4, 2))
    facts, evidence = measured.facts, {metric.name: metric.evidence for metric in measured.metrics}
    assert facts["version"] == "22.05.8"
    assert facts["select_type_parameters"] == ["CR_CORE_MEMORY"]
    assert evidence["controllers_up"] == {"controllers": [{"role": "primary", "host": "ctl", "up": True}]}
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
        ("HealthCheckProgram", "(null)", "health_check_configured"),
    ],
)
def test_problematic_setting_is_a_warning(runner: CheckRunner, key: str, value: str, metric: str) -> None:
    assert runner.not_passed(settings(**{key: value})) == {metric: Outcome.WARN}


def test_unverified_configuration_is_not_judged(runner: CheckRunner) -> None:
    replies = settings(HASH_VAL="Not Verified")
    assert runner.not_passed(replies) == {}
    assert reasons(runner.measure(replies, (4, 2)), Why.DOES_NOT_APPLY).keys() == {"configuration_differs"}


@pytest.mark.parametrize(
    ("key", "value", "metric"),
    [
        ("ProctrackType", "(null)", "proctrack_loses_processes"),
        ("KillWait", "UNLIMITED", "kill_wait"),
        ("SlurmdTimeout", "(null)", "dead_nodes_detected"),
    ],
)
def test_unreadable_setting_is_an_error(runner: CheckRunner, key: str, value: str, metric: str) -> None:
    assert runner.not_passed(settings(**{key: value})) == {f"{metric} login": Outcome.ERROR}


class TestGpus:
    def test_gpus_expected_but_not_in_slurm(self, runner: CheckRunner) -> None:
        assert runner.not_passed(settings(GresTypes="(null)")) == {"gpu_gres_configured": Outcome.FAIL}

    @pytest.mark.parametrize("expected", [None, 0])
    def test_no_gpus_expected(self, runner: CheckRunner, expected: int | None) -> None:
        replies = settings(GresTypes="(null)")
        assert runner.not_passed(replies, gpus=expected) == {}
        assert reasons(runner.measure(replies, (4, expected)), Why.DOES_NOT_APPLY).keys() == {"gpu_gres_configured"}


class TestLockedMemory:
    """Jobs inherit the memlock limit of the submit host if Slurm propagates limits."""

    @pytest.fixture(autouse=True)
    def low_limit(self, runner: CheckRunner) -> None:
        runner.monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * 2**20, 8 * 2**20))

    def test_limit_is_propagated(self, runner: CheckRunner) -> None:
        assert runner.not_passed(settings()) == {"memlock_limit_propagated": Outcome.WARN}
        evidence = {metric.name: metric.evidence for metric in runner.measure(settings(), (4, 2)).metrics}
        assert evidence["memlock_limit_propagated"] == {
            "propagate_resource_limits": ["ALL"],
            "submit_host_memlock": 8 * 2**20,
        }

    @pytest.mark.parametrize(
        ("changes", "propagated"),
        [
            ({"PropagateResourceLimits": "NONE"}, False),
            ({"PropagateResourceLimits": "CORE,STACK"}, False),
            ({"PropagateResourceLimits": "CORE,MEMLOCK"}, True),
            ({"PropagateResourceLimits": "(null)", "PropagateResourceLimitsExcept": "MEMLOCK"}, False),
            ({"PropagateResourceLimits": "(null)", "PropagateResourceLimitsExcept": "CORE"}, True),
        ],
    )
    def test_propagation_settings(self, runner: CheckRunner, changes: dict[str, str], propagated: bool) -> None:
        assert ("memlock_limit_propagated" in runner.not_passed(settings(**changes))) is propagated


class TestControllerErrors:
    def replies(self, error: str) -> dict[str, Reply]:
        return {
            "scontrol ping": recorded(f"scontrol-ping-{error}.txt"),
            "scontrol show config": recorded(f"scontrol-show-config-{error}.txt"),
        }

    def test_controller_down(self, runner: CheckRunner) -> None:
        assert runner.not_passed(self.replies("controller-down")) == {
            "controllers_up": Outcome.FAIL,
            "login": Outcome.ERROR,
        }

    @pytest.mark.parametrize("error", ["munge-down", "munge-key-wrong"])
    def test_munge_error_is_not_a_controller_failure(self, runner: CheckRunner, error: str) -> None:
        """scontrol ping reports DOWN for such a client."""
        assert "is DOWN" in recorded(f"scontrol-ping-{error}.txt").out
        assert runner.not_passed(self.replies(error)) == {"login": Outcome.ERROR}

    def test_backup_controller_down(self, runner: CheckRunner) -> None:
        two = "Slurmctld(primary) at ctl is UP\nSlurmctld(backup) at ctl2 is DOWN\n"
        assert runner.not_passed({**settings(), "scontrol ping": success(two)}) == {"controllers_down": Outcome.WARN}

    def test_no_slurm_client(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert run_check(CHECK, tmp_path).skipped == "no Slurm client (sinfo) on this machine"
