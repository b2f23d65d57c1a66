"""`seatrial migrate`."""

from __future__ import annotations

import json
from pathlib import Path

from seatrial.pipeline.run_directory import load_trial
from tests.config.test_renames import NEW_TRIAL, OLD_TRIAL
from tests.paths import ROOT
from tests.processes import call

RECORD = ROOT / "docs" / "results" / "2026-11-22-2xh200" / "transfer-host-1.trial.json"


def test_a_trial_is_rewritten_and_the_old_content_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(OLD_TRIAL)
    assert call("migrate", "--dry-run", str(file))[0] == 0
    assert file.read_text() == OLD_TRIAL
    code, out, _ = call("migrate", str(file))
    assert (code, file.read_text(), Path(f"{file}.bak").read_text()) == (0, NEW_TRIAL, OLD_TRIAL)
    assert "silence_s -> heartbeat_timeout_s" in out
    assert call("migrate", str(file))[0] == 0
    assert file.read_text() == NEW_TRIAL


def test_a_backup_is_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(OLD_TRIAL)
    Path(f"{file}.bak").write_text("mine")
    code, _, err = call("migrate", str(file))
    assert (code, file.read_text(), Path(f"{file}.bak").read_text()) == (2, OLD_TRIAL, "mine")
    assert "mine.yaml.bak" in err


def test_a_trial_json_is_upgraded(tmp_path: Path) -> None:
    file = tmp_path / "trial.json"
    file.write_bytes(RECORD.read_bytes())
    assert call("migrate", str(file))[0] == 0
    assert json.loads(file.read_text())["schema_version"] == "2"
    assert load_trial(file) == load_trial(RECORD)


def test_old_names_of_schema_version_2_are_replaced(tmp_path: Path) -> None:
    record = load_trial(RECORD).model_dump(mode="json")
    record["environment"]["nic.eth0.speed_mbps"] = 1000
    file = tmp_path / "trial.json"
    file.write_text(json.dumps(record))
    code, out, _ = call("migrate", "--dry-run", str(file))
    assert (code, json.loads(file.read_text())) == (0, record)
    assert f"{file}: no longer used: nic.eth0.speed_mbps\n" in out
    assert f"{file}: added: nic.eth0.speed_mbit_s\n" in out
    assert call("migrate", str(file))[0] == 0
    assert json.loads(Path(f"{file}.bak").read_text()) == record
    assert "speed_mbps" not in file.read_text()
    assert call("migrate", str(file))[1] == f"{file}: no old names\n"


def test_a_file_that_cannot_be_read_is_a_usage_error(tmp_path: Path) -> None:
    for content in (b"\xff\xfe", b"{", b"x: 1"):
        (tmp_path / "x.yaml").write_bytes(content)
        assert call("migrate", str(tmp_path / "x.yaml"))[0] == 2
    assert call("migrate", str(tmp_path / "absent.yaml"))[0] == 2


def test_several_files_are_converted_or_none(tmp_path: Path) -> None:
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for file in files:
        file.write_text(OLD_TRIAL)
    code, _, err = call("migrate", *files, tmp_path)
    assert (code, "is a directory" in err) == (2, True)
    assert [file.read_text() for file in files] == [OLD_TRIAL, OLD_TRIAL]
    assert call("migrate", *files)[0] == 0
    assert [file.read_text() for file in files] == [NEW_TRIAL, NEW_TRIAL]
