"""History of runs: entries, unfinished and damaged runs, the cache, and the runs of one part."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tools.records import record_path

from seatrial.handover import history
from seatrial.handover.history import part_history, read_runs, summary
from seatrial.model import Trial, UsageError
from seatrial.pipeline.run_directory import load_trial

RECORD = "2026-11-23-2xh200/busy-gpu"  # REJECTED: a FAIL of one GPU


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: Path, name: str, trial: Trial, **changes: Any) -> Path:
    run = folder / "runs" / name
    run.mkdir(parents=True)
    text = trial.model_copy(update=changes).as_stored().model_dump_json()
    (run / "trial.json").write_text(text)
    return run


def busy() -> Trial:
    return load_trial(record_path(RECORD))


def at_host(trial: Trial, host: str, started: float, *, is_good: bool = False) -> dict[str, Any]:
    """The fields of a run on another host, in which the same GPUs fail, or none."""

    def moved(text: Any) -> Any:
        return json.loads(json.dumps(text).replace('"vm', f'"{host}'))

    document = trial.as_stored().model_dump(mode="json")
    other = Trial.model_validate({name: moved(value) for name, value in document.items()})
    changes = {"measurements": other.measurements, "host": other.host, "started": started}
    return changes | {"verdicts": () if is_good else other.verdicts, "findings": () if is_good else other.findings}


def failing_serial() -> str:
    run = history._run(Path("x"), record_path(RECORD))
    return next(run.gpus[name][0] for name in run.failing if name in run.gpus)


def test_an_entry_has_decision_and_failing_parts(tmp_path: Path) -> None:
    write(tmp_path, "a", busy())
    (run,) = read_runs([tmp_path / "runs"])
    assert (run.state, run.trial, run.size, run.decision) == ("finished", "acceptance", "1 node × 2 GPUs", "REJECTED")
    assert run.failing
    assert set(run.gpus) == {"vm/gpu0", "vm/gpu1"}


def test_a_run_counts_once_under_several_names_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a", busy())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("runs")
    (run,) = read_runs([Path("runs"), Path("."), tmp_path / "runs", Path("link")])
    assert run.path == "runs/a"


def test_runs_without_a_usable_record_are_listed_as_such(tmp_path: Path) -> None:
    write(tmp_path, "good", busy())
    damaged = write(tmp_path, "damaged", busy())
    (damaged / "trial.json").write_text((damaged / "trial.json").read_text()[:5000])
    nan = write(tmp_path, "nan", busy())
    (nan / "trial.json").write_text((nan / "trial.json").read_text().replace('"value":', '"value":NaN,"x":', 1))
    other = write(tmp_path, "other", busy())
    (other / "trial.json").write_text('{"schema_version": "9", "seatrial": "7.0"}')
    unfinished = tmp_path / "runs" / "unfinished"
    unfinished.mkdir()
    (unfinished / "run.json").write_text("{")
    runs = {Path(run.path).name: run for run in read_runs([tmp_path / "runs"])}
    assert {name: run.state for name, run in runs.items()} == {
        "good": "finished",
        "damaged": "unreadable",
        "nan": "unreadable",
        "other": "unreadable",
        "unfinished": "unfinished",
    }
    assert "schema_version" in runs["other"].note
    assert "not finite" in runs["nan"].note
    assert runs["unfinished"].note.startswith("seatrial run --resume")


def test_the_cache_saves_reading_and_follows_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path, "a", busy())
    first = read_runs([tmp_path / "runs"])
    reads: list[Path] = []

    def counted(path: Path, *, verify_results: bool) -> Trial:
        reads.append(path)
        return load_trial(path, verify_results=verify_results)

    monkeypatch.setattr(history, "load_trial", counted)
    assert read_runs([tmp_path / "runs"]) == first
    assert reads == []
    file = run / "trial.json"
    file.write_text(file.read_text().replace('"REJECTED"', '"ACCEPTED"'))
    assert read_runs([tmp_path / "runs"])[0].decision == "ACCEPTED"
    (cache,) = (tmp_path / "cache" / "seatrial").iterdir()
    cache.write_bytes(b"damaged")
    assert read_runs([tmp_path / "runs"])[0].decision == "ACCEPTED"
    assert len(reads) == 2


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a", busy())
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert len(read_runs([tmp_path / "runs"])) == 1


def test_several_at_once_leave_a_usable_cache(tmp_path: Path) -> None:
    for name in "abc":
        write(tmp_path, name, busy())
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(len(read_runs([tmp_path / "runs"])))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [3] * 4
    (cache,) = (tmp_path / "cache" / "seatrial").iterdir()
    assert ".incomplete" not in cache.name
    name, key = cache.name.rsplit("-", 1)
    assert len(history._read_cache(name, key)) == 3


def test_a_fault_that_moves_with_the_gpu_is_the_gpus(tmp_path: Path) -> None:
    trial = busy()
    for day, (host, is_good) in enumerate(
        (("vm", False), ("vm", True), ("node9", False), ("node9", True), ("vm", False)), 1
    ):
        write(tmp_path, f"run{day}", trial, **at_host(trial, host, 1e9 + day, is_good=is_good))
    sightings = part_history(read_runs([tmp_path / "runs"]), failing_serial())
    assert [bool(each.failure) for each in sightings] == [True, False, True, False, True]
    assert {each.place.partition("/")[0] for each in sightings} == {"vm", "node9"}
    text = summary(failing_serial(), sightings)
    assert f"{failing_serial()} failed in 3 of 5 runs" in text
    assert "the GPU moved" in text
    assert "suspect the GPU" in text


def test_a_fault_that_stays_is_of_the_slot_or_node(tmp_path: Path) -> None:
    trial = busy()
    for day, (host, is_good) in enumerate((("vm", False), ("node9", True)), 1):
        write(tmp_path, f"run{day}", trial, **at_host(trial, host, 1e9 + day, is_good=is_good))
    text = summary(failing_serial(), part_history(read_runs([tmp_path / "runs"]), failing_serial()))
    assert "suspect the slot or the node" in text


def test_an_unknown_part_and_a_folder_without_runs_are_errors(tmp_path: Path) -> None:
    write(tmp_path, "a", busy())
    with pytest.raises(UsageError, match="no run has a part 4711"):
        part_history(read_runs([tmp_path / "runs"]), "4711")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no run in"):
        read_runs([tmp_path / "empty"])
    with pytest.raises(UsageError, match="not a directory"):
        read_runs([tmp_path / "none"])


def test_a_run_directory_is_not_searched_for_other_runs(tmp_path: Path) -> None:
    run = write(tmp_path, "a", busy())
    (run / "artifacts").mkdir()
    os.link(run / "trial.json", run / "artifacts" / "trial.json")
    assert len(read_runs([tmp_path / "runs"])) == 1
    assert len(read_runs([tmp_path / "runs", tmp_path])) == 1
