"""The commands compare and history: exit codes, formats and sides of several records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tools.noise import REPEATS
from tools.records import record_path

from tests.processes import call

FIRST, SECOND = sorted(map(str, REPEATS.glob("*.json.gz")))[:2]


@pytest.fixture
def slower(tmp_path: Path) -> str:
    """The second record with a training at a tenth of the speed."""
    document = json.loads(gzip.decompress(Path(SECOND).read_bytes()))
    for measurement in document["measurements"]:
        for metric in measurement.get("metrics", ()):
            if metric["name"] == "tokens_per_second_per_gpu":
                metric |= {"value": metric["value"] / 10, "samples": []}
    document["retries"] = []
    path = tmp_path / "slower.trial.json"
    path.write_text(json.dumps(document))
    return str(path)


def test_a_regression_is_exit_code_1_only_if_asked_for(slower: str) -> None:
    assert call("compare", FIRST, slower)[0] == 0
    assert call("compare", FIRST, slower, "--fail-on", "regression")[0] == 1
    assert call("compare", FIRST, SECOND, "--fail-on", "regression")[0] == 0
    other_gpu = str(record_path("2026-11-24-1xh200/quick"))
    assert call("compare", FIRST, other_gpu, "--fail-on", "regression")[0] == 3


def test_json_has_all_changes_and_losses(slower: str) -> None:
    code, out, _ = call("compare", FIRST, slower, "--json")
    result = json.loads(out)
    assert (code, result["regression"]) == (0, True)
    assert [loss["changes"][0]["check"] for loss in result["losses"]] == ["train.ddp"]
    assert {"facts", "parts", "not_comparable", "notes"} < result.keys()


def test_a_side_of_several_records_is_a_folder_or_a_list(slower: str) -> None:
    _, by_folder, _ = call("compare", str(REPEATS), slower, "--json")
    paths = ",".join(sorted(map(str, REPEATS.glob("*.json.gz"))))
    _, by_list, _ = call("compare", paths, slower, "--json")
    assert json.loads(by_folder) == json.loads(by_list)
    assert json.loads(by_folder)["notes"][0].startswith("spread between runs: of the 10 and 1 records themselves")


def test_copies_of_a_run_are_one_record(slower: str, tmp_path: Path) -> None:
    """Equal copies, as of a bundle that was unpacked, would have no spread: each change would be an alarm."""
    copies = tmp_path / "copies"
    for number in range(4):
        (copies / str(number)).mkdir(parents=True)
        (copies / str(number) / "trial.json").write_bytes(gzip.decompress(Path(FIRST).read_bytes()))
    assert call("compare", copies, slower, "--json")[1] == call("compare", FIRST, slower, "--json")[1]


@pytest.mark.parametrize(("format", "start"), [("markdown", "## Comparison: "), ("html", "<!doctype html>")])
def test_formats(slower: str, format: str, start: str) -> None:
    code, out, _ = call("compare", FIRST, slower, "--format", format)
    assert (code, out.lstrip().startswith(start)) == (0, True)
    assert call("compare", FIRST, slower, "--format", format, "--json")[0] == 2


def test_a_record_of_another_schema_is_a_usage_error(tmp_path: Path) -> None:
    other = tmp_path / "other.trial.json"
    other.write_text('{"schema_version": "9", "seatrial": "7.0"}')
    code, _, err = call("compare", FIRST, str(other))
    assert (code, "schema_version" in err) == (2, True)
    assert call("compare", FIRST, str(tmp_path))[0] == 2
    assert call("compare", FIRST, str(tmp_path / "none"))[0] == 2


def test_history_lists_runs_and_those_of_a_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, _ = call("history", str(REPEATS))
    assert (code, out.count("ACCEPTED")) == (0, 10)
    runs = json.loads(call("history", str(REPEATS), "--json")[1])["runs"]
    serial = runs[0]["gpus"]["vm/gpu0"][0] or runs[0]["gpus"]["vm/gpu0"][1]
    code, out, _ = call("history", str(REPEATS), "--part", serial)
    assert (code, out.splitlines()[-1]) == (0, f"{serial} failed in 0 of 10 runs")
    assert call("history", str(REPEATS), "--part", "none")[0] == 2
