"""Slurm's checks on a machine that has Slurm's client, but belongs to no cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.checks import catalog
from seatrial.checks.check import Check, SkipIf
from tests.fakes.slurm import NO_CONFIGURATION, FakeSlurm, failure, run_check

CHECKS = [check for name, check in catalog().items() if name.startswith("slurm.")]
TOOLS = ("scontrol", "sinfo", "srun", "sbatch", "scancel")


@pytest.fixture(autouse=True)
def no_trace_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JOB_ID", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("seatrial.discover.slurm._CONFIGURATION_FILES", ())
    monkeypatch.setattr("psutil.process_iter", lambda _fields: [])
    FakeSlurm(dict.fromkeys(TOOLS, failure(NO_CONFIGURATION))).install(monkeypatch)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_not_applicable(check: Check, tmp_path: Path) -> None:
    measurement = run_check(check, tmp_path, expected=(1, 8))
    assert (measurement.error, measurement.metrics, measurement.absent) == (None, (), ())
    assert measurement.skipped
    # the judge accepts this skip only if Slurm starts no job; slurm.gres runs in such a job, where it is an ERROR
    assert set(check.skip_if) <= ({SkipIf.NO_SLURM, SkipIf.NO_GPU} if check.name == "slurm.gres" else {SkipIf.NO_SLURM})


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("name", ["SLURM_CONF", "SLURM_JOB_ID"])
def test_an_error_if_slurm_is_used(check: Check, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(name, "7")
    measurement = run_check(check, tmp_path, expected=(1, 8))
    assert measurement.error
    assert measurement.skipped is None
