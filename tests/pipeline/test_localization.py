"""The search for slow nodes after the checks of a trial, with ranks that a script simulates."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.checks import catalog
from seatrial.config.schema import CheckSettings, Config
from seatrial.hardware.pair_rates import PAIR_RATES
from seatrial.model import DecisionValue, Job, Trial
from seatrial.pipeline.plan import LOCALIZATION_JOB, localization_job
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run import run
from seatrial.pipeline.run_directory import RunDir, load_trial
from tests.hardware.test_pair_search import search, slow
from tests.pipeline.fixtures import JOB, SilentDisplay, request
from tests.pipeline.test_run import BROKEN, ScriptLauncher

CHECK, METRIC, NODES = "collectives.all_reduce", "busbw.64KiB", 4
SEARCH = next(name for name, check in catalog().items() if check.localizes)
RANKS = range(2 * NODES)


def script(check: str, facts: dict[str, object], metrics: list[dict[str, object]]) -> str:
    """Return a script in which all ranks measure ``check``, and rank 0 reports facts and metrics."""
    values = json.dumps({"facts": facts, "metrics": metrics})
    return f"""
values = json.loads({values!r})
for rank in {list(RANKS)}:
    NODES[rank] = f"n{{rank // 2:04}}"
    start(rank, "{check}")
    subject = f"n{{rank // 2:04}}/rank{{rank}}"
    fields = {{"check": "{check}", "subject": subject, "rank": rank, "started": time.time()}}
    write(rank, measurement=fields | (values if rank == 0 else {{}}))
    done(rank)
"""


def all_reduce(gb_s: float) -> str:
    metrics: list[dict[str, object]] = [
        {"name": METRIC, "value": gb_s, "unit": "GB/s", "subject": "cluster"},
        {"name": "wrong_elements", "value": 0, "unit": "count", "subject": "cluster"},
        {"name": "sizes_not_allocated", "value": 0, "unit": "sizes", "subject": "cluster"},
    ]
    facts: dict[str, object] = {"backend": "gloo", "nodes": NODES, "world_size": 8}
    return script(CHECK, facts, metrics)


RATES = [rate.model_dump(mode="json") for rate in search(NODES, slow("n0002", share=0.05), rails=1)[1]]
SEARCHED = script(SEARCH, {"backend": "gloo", PAIR_RATES: RATES}, [])
SLOW = {"ranks": all_reduce(0.5), "ranks-retry": all_reduce(0.5)}


Start = Callable[..., tuple[Trial, SilentDisplay]]


@pytest.fixture
def run_scripts(monkeypatch: pytest.MonkeyPatch) -> Start:
    closed: list[RunDir] = []

    def start(run_dir: RunDir, scripts: dict[str, str], stopped_job: str = "") -> tuple[Trial, SilentDisplay]:
        display, launcher = SilentDisplay(), ScriptLauncher(scripts, stopped_job)
        for module in ("run", "resume"):
            monkeypatch.setattr(f"seatrial.pipeline.{module}.select_launcher", lambda settings, placement: launcher)
        trial = run(run_dir, display)
        os.close(run_dir._journal.fileno())  # releases the lock
        closed.append(run_dir)  # its destructor would close a descriptor that another one uses by then
        return trial, display

    return start


def trial_dir(out: Path, **settings: object) -> RunDir:
    check = CheckSettings.model_validate({"expect": {METRIC: "> 1 GB/s"}})
    cluster = {"nodes": NODES, "gpus_per_node": 0}
    fields = {"name": "t", "launcher": "torchrun", "cluster": cluster, "telemetry": {"enabled": False}}
    config = Config.model_validate({**fields, **settings, "checks": {CHECK: check}})
    return RunDir.create(out, request().model_copy(update={"config": config}))


def test_slow_node_is_named_and_explains_the_failure(tmp_path: Path, run_scripts: Start) -> None:
    run_dir = trial_dir(tmp_path / "out")
    trial, display = run_scripts(run_dir, {**SLOW, LOCALIZATION_JOB: SEARCHED})
    (finding,) = [each for each in trial.findings if each.cause == "slow_node"]
    assert (finding.subject, finding.confidence) == ("n0002", "high")
    assert [(each.check, each.metric) for each in finding.explains] == [(CHECK, METRIC)]
    assert trial.decision.value is DecisionValue.REJECTED
    assert {measurement.check for measurement in trial.measurements} == {CHECK}
    assert {measurement.check for measurement in trial.localization} == {SEARCH}
    assert [job.name for job in trial.jobs] == ["ranks"]
    assert any(note.startswith("search for slow nodes, about ") and METRIC in note for note in display.notes)
    rejudged = rejudge(load_trial(run_dir.path))
    assert (rejudged.findings, rejudged.verdicts) == (trial.findings, trial.verdicts)
    resumed, _ = run_scripts(RunDir.reopen(run_dir.path), {})
    assert (resumed.findings, resumed.localization, len(resumed.results)) == (trial.findings, trial.localization, 3)


def test_good_trial_and_no_localize_start_no_search(tmp_path: Path, run_scripts: Start) -> None:
    trial, _ = run_scripts(trial_dir(tmp_path / "good"), {"ranks": all_reduce(2)})
    assert [result.job for result in trial.results] == ["ranks"]
    trial, _ = run_scripts(trial_dir(tmp_path / "off", localize=False), SLOW)
    assert [result.job for result in trial.results] == ["ranks", "ranks-retry"]
    assert trial.localization == ()


@pytest.mark.parametrize(("stopped", "error"), [("", "exit code 3"), (LOCALIZATION_JOB, "interrupted")])
def test_search_that_ends_early_changes_no_verdict_and_is_repeated_by_resume(
    tmp_path: Path, run_scripts: Start, stopped: str, error: str
) -> None:
    expected, _ = run_scripts(trial_dir(tmp_path / "off", localize=False), SLOW)
    run_dir = trial_dir(tmp_path / "out")
    start_only = f'for rank in {list(RANKS)}: start(rank, "{SEARCH}")\n'
    broken = start_only if stopped else start_only + BROKEN
    trial, display = run_scripts(run_dir, {**SLOW, LOCALIZATION_JOB: broken}, stopped)
    assert (trial.verdicts, trial.decision, trial.stop_reason) == (expected.verdicts, expected.decision, "")
    assert not any(finding.cause == "slow_node" for finding in trial.findings)
    assert any("search for slow nodes not completed" in warning for warning in display.warnings)
    (note,) = [insight for insight in trial.insights if insight.check == CHECK and "not completed" in insight.text]
    assert error in note.text
    assert note in rejudge(trial).insights
    resumed, _ = run_scripts(RunDir.reopen(run_dir.path), {LOCALIZATION_JOB: SEARCHED})
    assert [finding.subject for finding in resumed.findings if finding.cause == "slow_node"] == ["n0002"]
    assert resumed.verdicts == trial.verdicts


def planned(config: Config, nodes: int, time_limit_s: float | None = None, device: str = "cuda") -> Job | None:
    jobs = [JOB.model_copy(update={"name": "nodes", "placement": "nodes", "nodes": nodes, "typical": {}})]
    jobs += [
        JOB.model_copy(
            update={"nodes": nodes, "device": device, "limits": {"train.cnn": 10.0}, "typical": {"train.cnn": 5.0}}
        )
    ]
    return localization_job(config, catalog(), jobs, time_limit_s)


def test_job_runs_on_the_nodes_of_the_ranks_for_its_typical_time() -> None:
    config = Config(name="t", checks={"train.cnn": CheckSettings()})
    job = planned(config, NODES)
    assert job
    assert (job.name, job.checks, job.nodes, job.ranks_per_node) == (LOCALIZATION_JOB, (SEARCH,), NODES, 2)
    assert job.limit_s == config.limits.startup_s + catalog()[SEARCH].limit_s
    assert 10 < job.typical[SEARCH] < 60
    assert planned(config, 2)
    assert planned(config, 2, device="cpu") is None, "one noisy pair"
    assert planned(config, 3, device="cpu")
    assert planned(config, 1) is None
    assert planned(config, NODES, time_limit_s=10) is None
    assert planned(config, NODES, time_limit_s=1000)
    assert planned(config.model_copy(update={"localize": False}), NODES) is None
    assert planned(Config(name="t", checks={"train.cnn": CheckSettings(), SEARCH: CheckSettings()}), NODES) is None
