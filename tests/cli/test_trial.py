"""Commands that write or read the record of a trial."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from pathlib import Path

import pytest
from tools.records import record_path

from seatrial import report
from seatrial.cli import trial
from seatrial.model import DecisionValue, Measurement, Outcome, ReasonCode, Trial, UsageError
from seatrial.pipeline import run as pipeline_run
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import RunDir
from tests.processes import CPU_ONLY, HOST_ONLY, call, load, run, run_host_only
from tests.schema import faults


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, out = run_host_only(tmp_path_factory.mktemp("cli"))
    assert f"Report: {folder / 'report.html'}" in out
    return folder


def test_the_files_of_a_run(finished_run: Path) -> None:
    assert {path.name for path in finished_run.iterdir()} >= {
        "trial.json",
        "measurements.jsonl",
        "report.html",
        "junit.xml",
        "figures.csv",
        "metrics.prom",
        "run.json",
        "jobs",
    }
    assert (finished_run / "jobs" / "nodes" / "attempt1" / "command.sh").read_text().strip()


def test_the_record_has_the_origin_of_settings(finished_run: Path) -> None:
    record = load(finished_run)
    assert record.origins["cluster.nodes"] == "default"
    assert record.origins["checks.host.inventory"].endswith("host.yaml")
    assert record.command[:2] == ("seatrial", "run")


def test_timings_cover_the_overhead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes 10,000 s of a clock that the test advances: the load of the machine is negligible."""
    monotonic, delays = time.monotonic, list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + sum(delays))

    def slow_down(module: object, name: str) -> None:
        function = getattr(module, name)

        def slow(*args: object, **options: object) -> object:
            delays.append(10_000)
            return function(*args, **options)

        monkeypatch.setattr(module, name, slow)

    steps = {"discover": "discover", "startable_plan": "plan", "with_verdicts": "judge", "diagnose": "diagnose"}
    for function in steps:
        slow_down(pipeline_run, function)
    slow_down(report, "render_all")
    (tmp_path / "host.yaml").write_text(HOST_ONLY)
    assert call("run", tmp_path / "host.yaml", "--out", tmp_path / "run")[0] == 0
    record = load(tmp_path / "run")
    seconds = {timing.name: timing.seconds for timing in record.timings if timing.kind == "overhead"}
    assert "start of the command" in seconds
    assert [round(seconds[name], -4) for name in (*steps.values(), "report")] == [10_000] * 5
    assert sum(timing.seconds for timing in record.timings) == pytest.approx(record.seconds, rel=0.05)


def test_the_record_matches_the_printed_schema(finished_run: Path) -> None:
    code, out, _ = call("schema")
    assert code == 0
    schema = json.loads(out)
    written = json.loads((finished_run / "trial.json").read_text())
    assert faults(written, schema, schema) == []
    assert set(schema["properties"]) == set(written)
    for invalid in (
        {key: value for key, value in written.items() if key != "decision"},
        {**written, "colour": "red"},
        {**written, "schema_version": "99"},
        {**written, "seconds": "many"},
        {**written, "decision": {**written["decision"], "value": "MAYBE"}},
        {**written, "measurements": [{**written["measurements"][0], "metrics": [{"name": "x"}]}]},
        {**written, "verdicts": [{**written["verdicts"][0], "outcome": "GOOD"}]},
    ):
        assert faults(invalid, schema, schema)


def test_run_without_gpus_is_incomplete_unless_asked_for(tmp_path: Path) -> None:
    (tmp_path / "host.yaml").write_text(HOST_ONLY.removeprefix(CPU_ONLY))
    code, out, _ = call("run", tmp_path / "host.yaml", "--out", tmp_path / "run", env={"CUDA_VISIBLE_DEVICES": ""})
    record = load(tmp_path / "run")
    assert code == 3
    assert record.decision.reason_code is ReasonCode.NO_GPU or record.gpu_error  # the latter on a host with GPUs
    assert rejudge(record).decision == record.decision
    code, out, _ = call("run", tmp_path / "host.yaml", "--gpus-per-node", "0", "--out", tmp_path / "cpu")
    assert (code, load(tmp_path / "cpu").decision.reason_code) == (0, None)
    assert "CPU ONLY" in out


def test_why_not_of_an_accepted_run(finished_run: Path) -> None:
    assert call("judge", finished_run, "--why-not")[:2] == (0, "accepted\n")
    assert call("judge", finished_run, "--why-not", "--json")[:2] == (0, '[\n  "accepted"\n]\n')


def test_judge_changes_no_file(finished_run: Path) -> None:
    before = (finished_run / "trial.json").read_bytes()
    code, out, _ = run("judge", finished_run, "--json")
    assert code == 0
    judged = Trial.model_validate_json(out)
    assert judged.as_stored().verdicts == load(finished_run).verdicts
    assert len(judged.verdicts) > len(load(finished_run).verdicts), "the record has none with PASS"
    assert (finished_run / "trial.json").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("html", "<!doctype html>"),
        ("junit", "<?xml"),
        ("prometheus", "# HELP"),
        ("json", "{"),
        ("markdown", "#"),
        ("csv", "outcome,check"),
        ("summary", "{"),
    ],
)
def test_judge_prints_every_format(finished_run: Path, name: str, start: str) -> None:
    code, out, err = call("judge", finished_run, "--format", name)
    assert code == 0, err
    assert out.lower().startswith(start.lower())


def test_a_format_has_the_new_verdicts(finished_run: Path, tmp_path: Path) -> None:
    written = json.loads((finished_run / "trial.json").read_text())
    written["decision"] = {**written["decision"], "value": "REJECTED", "reason": "an old verdict"}
    (tmp_path / "trial.json").write_text(json.dumps(written))
    assert "an old verdict" not in call("judge", tmp_path, "--format", "markdown")[1]


def test_judge_files_a_page_and_a_record(finished_run: Path, tmp_path: Path) -> None:
    page, out = tmp_path / "page.html", tmp_path / "out"
    code, _, err = call("judge", finished_run, "--html", page, "--out", out)
    assert code == 0, err
    digest = hashlib.sha256((finished_run / "trial.json").read_bytes()).hexdigest()
    assert digest in page.read_text()
    assert {path.name for path in out.iterdir()} == set(report.FILES)
    assert hashlib.sha256((out / "trial.json").read_bytes()).hexdigest() in (out / "report.html").read_text()
    assert call("judge", finished_run, "--out", out)[0] == 2, "not empty"
    code, _, err = call("judge", finished_run, "--html", tmp_path)
    assert code == 2
    assert str(tmp_path) in err


def test_options_of_a_benchmark_are_refused_for_a_run(finished_run: Path, tmp_path: Path) -> None:
    code, _, err = call("judge", finished_run, "--nics", "8x400")
    assert (code, "--nics is for the output of" in err) == (2, True)
    (tmp_path / "perf.out").write_text("# nccl-tests\n")
    code, _, err = call("judge", tmp_path / "perf.out", "--format", "html")
    assert (code, "--format is for a run of seatrial" in err) == (2, True)


def test_judge_by_another_trial(finished_run: Path, tmp_path: Path) -> None:
    contract = tmp_path / "contract.yaml"
    contract.write_text("name: contract\nchecks:\n  host.inventory: {expect: {nofile_soft: '>= 9999999999 files'}}\n")
    code, out, err = call("judge", finished_run, "--trial", contract, "--json")
    assert code == 1, err
    assert Trial.model_validate_json(out).name == "contract"


def test_judge_by_other_settings(finished_run: Path) -> None:
    """`judge --set` is `run --set` after the run: a threshold, a check that was not run, another option, a size."""
    key = "checks.host.inventory.expect.nofile_soft"
    code, out, err = call("judge", finished_run, "--set", f"{key}=>= 9999999999 files", "--json")
    assert code == 1, err
    judged = Trial.model_validate_json(out)
    assert (judged.name, judged.origins[key]) == (load(finished_run).name, "--set")
    for setting in ("checks.host.load.required=true", "cluster.nodes=2"):
        assert call("judge", finished_run, "--set", setting)[0] == 3
    record = record_path("2026-11-23-2xh200/busy-gpu")
    code, out, _ = call("judge", record, "--set", "checks.collectives.all_reduce.options.sizes=[1GiB]", "--json")
    (verdict,) = [each for each in Trial.model_validate_json(out).verdicts if each.detail.endswith("['1GiB']")]
    assert (verdict.check, verdict.outcome) == ("collectives.all_reduce", Outcome.UNJUDGED)
    for setting in ("slurm.partition=x", "launcher=slurm", "nodes=2", "checks.host.inventry.required=false"):
        code, out, err = call("judge", finished_run, "--set", setting)
        assert (code, out, err.count("\n")) == (2, "", 1), err


def test_ticket_names_the_part_and_hides_private_text() -> None:
    record = record_path("2026-11-23-2xh200/busy-gpu")
    code, out, err = call("ticket", record)
    assert code == 0, err
    for expected in ("GPU vm/gpu1", "1654924088691", "0000:00:07.0", "315.4, 316.2", "nvidia-bug-report.sh"):
        assert expected in out
    assert call("ticket", record, "cluster")[1].startswith("cluster cluster: collectives.all_reduce busbw.8GiB")
    code, _, err = call("ticket", record, "vm/gpu0")
    assert code == 2
    assert "vm/gpu1" in err


def test_a_record_with_an_invalid_config_is_not_judged(finished_run: Path, tmp_path: Path) -> None:
    written = json.loads((finished_run / "trial.json").read_text())
    written["config"]["limits"] = "none"
    (tmp_path / "trial.json").write_text(json.dumps(written))
    code, out, err = call("judge", tmp_path)
    assert (code, out) == (2, "")
    assert "config.limits: " in err
    assert "Traceback" not in err


def test_the_error_of_an_unknown_format_lists_the_formats(finished_run: Path) -> None:
    code, _, err = call("judge", finished_run, "--format", "pdf")
    assert code == 2
    assert "html, junit, prometheus, json, markdown, csv, summary" in err
    for other in ("--json", "--why-not"):
        assert call("judge", finished_run, "--format", "csv", other)[:2] == (2, "")


def test_json_puts_one_document_on_stdout_and_progress_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "host.yaml").write_text(HOST_ONLY)
    code, out, err = run("run", tmp_path / "host.yaml", "--json", "--out", tmp_path / "run")
    assert code == 0
    printed, recorded = Trial.model_validate_json(out), load(tmp_path / "run")
    assert printed == recorded.model_copy(update={"verdicts": printed.verdicts})
    assert "host.inventory" in err


def test_check_names_are_separated_by_commas_or_options(tmp_path: Path) -> None:
    for names in (["host.inventory,train.*"], ["host.inventory", "--only", "train.*"]):
        code, out, _ = call("run", "quick", "--dry-run", "--json", "--only", *names, cwd=tmp_path)
        assert code == 0
        jobs = json.loads(out)
        assert sorted(name for job in jobs for name in job["checks"]) == ["host.inventory", "train.cnn", "train.ddp"]
    code, _, err = call("run", "quick", "--dry-run", "--skip", "train.cnn,", cwd=tmp_path)
    assert (code, "no check of this trial matches ''" in err) == (2, True)


def test_a_dry_run_starts_nothing_and_writes_nothing(tmp_path: Path) -> None:
    code, out, _ = call("run", "quick", "--dry-run", cwd=tmp_path)
    assert code == 0
    assert "torch.distributed.run" in out
    assert list(tmp_path.iterdir()) == []
    assert out.endswith(call("render", "local", "quick", cwd=tmp_path)[1])


def test_a_dry_run_names_the_checks_that_cannot_run_once_per_reason(tmp_path: Path) -> None:
    _, out, _ = call("run", "quick", "--dry-run", "--gpus-per-node", "64", cwd=tmp_path)
    (line,) = [line for line in out.splitlines() if line.startswith("# not run: ")]
    assert "64 GPUs expected" in line
    assert "collectives.all_reduce, collectives.gpu_pairs" in line


def test_checks_beyond_the_time_limit_are_announced_and_prevent_acceptance(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(f"{CPU_ONLY}checks: {{host.inventory: , train.cnn: {{required: false}}}}\n")
    options = (tmp_path / "t.yaml", "--gpus-per-node", "0", "--out", tmp_path / "run", "--time-limit")
    code, _, err = call("run", *options, "0.01")
    assert (code, "shortest useful limit is 0.1 minutes" in err) == (2, True)
    code, out, err = call("run", *options, "0.1")
    assert code == 3
    assert "1 check excluded by --time-limit: train.cnn" in " ".join(out.split())
    assert err.index("excluded by --time-limit") < err.index("start   job")
    record = load(tmp_path / "run")
    assert record.excluded_checks == {"train.cnn": "--time-limit"}
    assert [measurement.check for measurement in record.measurements] == ["host.inventory"]
    assert record.jobs[0].typical["host.inventory"] > 0
    assert rejudge(record).decision.value is DecisionValue.INCOMPLETE
    code, out, _ = call("run", "--resume", tmp_path / "run")
    assert (code, load(tmp_path / "run").excluded_checks) == (3, {"train.cnn": "--time-limit"})


def test_runs_of_the_same_second_have_different_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20261121-120000")
    names = [str(trial.new_run_folder("quick")) for _ in range(3)]
    assert names == [f"seatrial-runs/20261121-120000-quick{number}" for number in ("", "-2", "-3")]
    assert all(Path(name).is_dir() for name in names)


def test_a_run_directory_that_cannot_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("seatrial-runs").touch()
    with pytest.raises(UsageError, match=r"cannot write to seatrial-runs/.*-quick: Not a directory; .* with --out"):
        trial.new_run_folder("quick")


def test_a_finished_run_has_nothing_to_resume(finished_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished_run, copy)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    code, out, err = call("run", "--resume", copy)
    assert (code, "nothing to resume" in out, "ACCEPTED" in out) == (0, True, True)
    assert "plan" not in err
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    code, out, _ = call("run", "--resume", copy, "--json")
    assert (code, Trial.model_validate_json(out).as_stored().verdicts) == (0, load(copy).verdicts)
    (copy / "metrics.prom").unlink()
    assert "nothing to resume" not in call("run", "--resume", copy)[1]
    assert (copy / "metrics.prom").exists(), "a missing report is written"
    assert len(load(copy).sessions) == 2


def test_a_run_that_cannot_be_resumed_names_the_new_run_and_no_resume(finished_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished_run, copy)
    run_dir = RunDir.reopen(copy)
    for uuid in ("GPU-old", "GPU-new"):
        run_dir.save(Measurement(check="device.gemm", subject="n0/gpu1", rank=1, gpu_uuid=uuid))
    del run_dir
    code, _, err = call("run", "--resume", copy)
    assert (code, "GPU-new" in load(copy).stop_reason) == (3, True)
    command = load(copy).new_run_command
    assert command.startswith("seatrial run ")
    assert f"To measure the missing checks: {command}\n" in err
    _, out, _ = call("judge", copy, "--why-not")
    assert (f"`{command}`" in out, "--resume" in out) == (True, False)


def test_the_report_is_printed_only_if_this_run_wrote_it(finished_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished_run, copy)
    code, out, _ = call("run", "--resume", copy)
    assert (code, f"Report: {copy / 'report.html'}" in out) == (0, True)
    (copy / "report.html").unlink()
    (copy / "report.html").mkdir()
    code, out, _ = call("run", "--resume", copy)
    assert (code, "Report:" in out) == (3, False)


def test_a_run_that_is_given_twice_is_learned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[list[Path]] = []

    def learn(_name: str, runs: list[Path]) -> str:
        learned.append(runs)
        return "gpus: 8\n"

    monkeypatch.setattr("seatrial.pipeline.rejudge.learn", learn)
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "lab.yaml"
    code, text, err = call("baseline", "learn", a, b, tmp_path / "b" / ".." / "a", a, "--out", out)
    assert (code, text) == (0, f"{out}: 1 reference value from 2 runs\n")
    assert learned == [[a, b]]
    assert err.startswith(f"seatrial: {a} is given 3 times and counts as one run\n")


@pytest.mark.parametrize(("number", "hint"), [(1, True), (2, True), (3, False)])
def test_a_baseline_of_few_runs_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, hint: bool
) -> None:
    monkeypatch.setattr("seatrial.pipeline.rejudge.learn", lambda _name, _runs: "gpus: 8\n")
    runs = [tmp_path / str(run) for run in range(number)]
    code, _, err = call("baseline", "learn", *runs, "--out", tmp_path / "lab.yaml")
    assert (code, "fewer than 3 runs" in err) == (0, hint)


def test_a_cpu_only_run_has_nothing_to_learn(finished_run: Path, tmp_path: Path) -> None:
    code, _, err = call("baseline", "learn", finished_run, "--out", tmp_path / "lab.yaml")
    assert (code, "CPU-only runs have no metrics to learn" in err) == (2, True), err
