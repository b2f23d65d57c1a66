"""Loading trial.json: a trial, or one message for a damaged record."""

from __future__ import annotations

import gzip
import json
import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from tools.records import record_paths

from seatrial.checks import catalog
from seatrial.model import Trial, UsageError
from seatrial.pipeline.run_directory import RunDir, load_trial
from tests.pipeline.fixtures import request
from tests.report import samples


def record(**changes: Any) -> str:
    return json.dumps({**samples.accepted().model_dump(mode="json"), **changes})


DAMAGED: dict[str, tuple[str | bytes, str]] = {
    "a list": ("[]", "expected a mapping"),
    "a number": ("5", "expected"),
    "null": ("null", "expected"),
    "an empty file": ("", "is damaged: Expecting value"),
    "a byte order mark alone": (b"\xff\xfe\x00", "is damaged: 'utf-8' codec can't decode"),
    "Latin-1": (record(name="caf\xe9").replace("\\u00e9", "\xe9").encode("latin-1"), "is damaged: 'utf-8' codec"),
    "nesting too deep for the JSON parser": ("[" * 100_000, "nested deeper than 100 levels"),
    "nesting over MAX_NESTING": (record(config={"a": json.loads("[" * 300 + "]" * 300)}), "nested deeper than"),
    "NaN": (record(seconds=float("nan")), "not finite: NaN"),
    "Infinity": (record(timings=[{"name": "a", "kind": "check", "seconds": float("inf")}]), "not finite: Infinity"),
    "a number that overflows": ('{"seconds": 1e999}', "not finite: 1e999"),
    "a number of 400 digits": (record(seconds=10**400), "number too large"),
    "a number of 5000 digits": ('{"seconds": ' + "9" * 5000 + "}", "number too large"),
    "an unknown key": (record(colour="red"), "colour: Extra inputs are not permitted"),
    "a wrong type": (record(verdicts={}), "verdicts: expected"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_record_gives_one_message(tmp_path: Path, name: str) -> None:
    content, expected = DAMAGED[name]
    (tmp_path / "trial.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError) as error:
        load_trial(tmp_path)
    assert str(tmp_path / "trial.json") in str(error.value)
    assert expected in str(error.value)


def test_directory_instead_of_a_record(tmp_path: Path) -> None:
    (tmp_path / "trial.json").mkdir()
    for path, problem in ((tmp_path, "cannot read"), (tmp_path / "trial.json", "is a directory without")):
        with pytest.raises(UsageError, match=problem):
            load_trial(path)


def test_folder_of_run_directories_instead_of_a_run(tmp_path: Path) -> None:
    for name in ("20260101-quick", "20260102-quick"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trial.json").write_text(record())
    with pytest.raises(
        UsageError, match=f"contains run directories: name one of them, such as {tmp_path}/20260102-quick"
    ):
        load_trial(tmp_path)


def test_directory_without_a_record(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is a directory without trial\.json: give a run directory, or one file"):
        load_trial(tmp_path)
    with pytest.raises(UsageError, match=r"cannot read .*/absent: No such file"):
        load_trial(tmp_path / "absent")


def test_run_in_progress_is_named_until_it_ends(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "out", request())
    with pytest.raises(UsageError, match=f"the run is not finished; .* seatrial watch {tmp_path}/out$"):
        load_trial(tmp_path / "out")
    os.close(run_dir._journal.fileno())  # releases the lock
    with pytest.raises(UsageError, match=f"seatrial run --resume {tmp_path}/out$"):
        load_trial(tmp_path / "out")


def test_another_json_file_is_not_a_record(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"results": [], "host": "a"}')
    with pytest.raises(UsageError, match=r"x\.json is not a trial\.json: .*'results', 'host'"):
        load_trial(tmp_path / "x.json")


def test_record_is_loaded_by_folder_or_file(tmp_path: Path) -> None:
    (tmp_path / "trial.json").write_text(record())
    loaded, original = load_trial(tmp_path), samples.accepted()
    assert load_trial(tmp_path / "trial.json") == loaded
    # facts that this version needs are added to the measurements
    assert loaded.model_copy(update={"measurements": original.measurements}) == original
    assert isinstance(loaded, Trial)


@pytest.mark.parametrize("version", ["1", "2", "3", "5", None, {}])
def test_a_record_of_another_schema_names_its_version_and_its_writer(tmp_path: Path, version: Any) -> None:
    (tmp_path / "trial.json").write_text(record(schema_version=version, seatrial="0.0.9", left_out={}))
    with pytest.raises(UsageError) as error:
        load_trial(tmp_path)
    assert f"schema_version is {version!r}, expected 4: use the build of seatrial that wrote it ('0.0.9')" in str(
        error.value
    )


def test_every_metric_of_a_committed_record_is_declared_by_its_check() -> None:
    undeclared = {
        (name, measurement.check, metric.name)
        for name, path in record_paths().items()
        for measurement in load_trial(path).measurements
        for metric in measurement.metrics
        if not any(fnmatchcase(metric.name, declared) for declared in catalog()[measurement.check].units)
    }
    assert undeclared == set()


def test_rewritten_records_have_the_digest_of_their_original() -> None:
    for name, path in record_paths().items():
        assert re.fullmatch(r"|schema [123], sha256 [0-9a-f]{64}", load_trial(path).rewritten_from), name


@pytest.mark.parametrize("cut", [0, 40])
def test_a_gzipped_record_is_loaded_if_it_is_whole(tmp_path: Path, cut: int) -> None:
    packed = gzip.compress(record().encode())
    (tmp_path / "trial.json.gz").write_bytes(packed[: len(packed) - cut])
    if cut:
        with pytest.raises(UsageError, match="is damaged: is truncated or damaged"):
            load_trial(tmp_path / "trial.json.gz")
    else:
        assert load_trial(tmp_path / "trial.json.gz").name == samples.accepted().name


def test_another_file_of_a_run_is_not_a_damaged_record(tmp_path: Path) -> None:
    (tmp_path / "measurements.jsonl").write_text("")
    for name, content in (("report.html", b"<!doctype html>"), ("plot.png", b"\x89PNG\xff")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError) as error:
            load_trial(tmp_path / name)
        assert str(error.value) == f"{tmp_path / name} is not a trial.json; give the run directory"
    (tmp_path / "copy.json").write_text(record()[:-9])
    with pytest.raises(UsageError, match=r"is damaged: .*seatrial run --resume"):
        load_trial(tmp_path / "copy.json")
