"""`seatrial bundle`: what is in the archive."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tools.records import record_path

from seatrial import report
from seatrial.config.schema import Config
from seatrial.handover import archive, bundle, signatures
from seatrial.handover.verify import verify
from seatrial.model import UsageError
from seatrial.pipeline.run_directory import Request, load_trial
from tests.handover.fixtures import CHECK, contents, make_key, make_run, write_journal
from tests.processes import call

SECRET = "planted-secret-0123456789"


def made(run: Path, folder: Path, name: str = "a.tar.gz") -> dict[str, bytes]:
    bundle.make(run, folder / name, None, "provider")
    return contents(folder / name)


def statement(files: dict[str, bytes]) -> Any:
    return json.loads(files[bundle.STATEMENT])


def test_equal_runs_give_equal_bytes(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path / "copy")
    for run, name in ((run_dir, "a.tar.gz"), (tmp_path / "copy", "b.tar.gz")):
        bundle.make(run, tmp_path / name, None, "provider")
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()


def test_coreutils_and_tar_check_the_files(run_dir: Path, tmp_path: Path) -> None:
    code, out, _ = call("bundle", run_dir, "-o", tmp_path / "a.tar.gz")
    assert (code, "unsigned" in out) == (0, True)
    subprocess.run(["tar", "-xzf", tmp_path / "a.tar.gz", "-C", tmp_path], check=True)
    subprocess.run(["sha256sum", "--check", "--strict", archive.SUMS], cwd=tmp_path / archive.ROOT, check=True)
    names = {path.relative_to(tmp_path / archive.ROOT).as_posix() for path in (tmp_path / archive.ROOT).rglob("*.*")}
    assert names >= {"run/trial.json", "run/report.html", "run/jobs/ranks/attempt1/launcher.out"}


def test_rules_and_reference_values_of_the_verdicts(run_dir: Path, tmp_path: Path) -> None:
    info = bundle.BundleInfo.model_validate_json(made(run_dir, tmp_path)[bundle.RULES])
    assert info.rulebook
    (value,) = info.rulebook.references[f"{CHECK} copy"]
    assert value.expected == 4272
    assert value.source
    assert any(text.startswith(">= 0.9 reference, else FAIL") for text in info.rulebook.rules[f"{CHECK} copy"])


@pytest.mark.parametrize(("factor", "result"), [(1.0, "WARNED"), (0.5, "FAILED")])
def test_the_statement(run_dir: Path, tmp_path: Path, factor: float, result: str) -> None:
    files = made(run_dir if factor == 1 else make_run(tmp_path / "run", factor=factor), tmp_path)
    document = statement(files)
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert document["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    (subject,), predicate = document["subject"], document["predicate"]
    assert subject["digest"] == {"sha256": hashlib.sha256(files["run/trial.json"]).hexdigest()}
    assert predicate["result"] == result
    assert (CHECK in predicate["failedTests"], CHECK in predicate["passedTests"]) == (factor < 1, factor == 1)
    assert all(each["digest"]["sha256"] for each in predicate["configuration"])


def test_incomplete_is_failed_with_its_reason(tmp_path: Path) -> None:
    document = statement(made(make_run(tmp_path / "run", "2026-11-27-2xh200/parity-after"), tmp_path))
    (subject,) = document["subject"]
    assert document["predicate"]["result"] == "FAILED"
    assert subject["annotations"]["decision"] == "INCOMPLETE"
    assert subject["annotations"]["reason"]


def test_secrets_are_removed_before_hashing(run_dir: Path, tmp_path: Path) -> None:
    run = shutil.copytree(run_dir, tmp_path / "run")
    config = Config.model_validate({"name": "t", "checks": {}, "env": {"MY_TOKEN": SECRET}})
    request = Request(config=config, origins={}, only=(), skip=(), command=(), started=0)
    (run / "run.json").write_text(request.model_dump_json())
    for name in ("jobs/ranks/attempt1/job.sh", "jobs/ranks/attempt1/rank0.log", "figures.csv"):
        (run / name).write_text(f"export X=1\nprefix {SECRET}\n")
    (run / "jobs" / "ranks" / "hf.log").write_text("using hf_abcdefghijklmnopqrstuvwx012345\n")
    files = made(run, tmp_path)
    assert [name for name, content in files.items() if SECRET.encode() in content or b"hf_abc" in content] == []
    assert "run/run.json" not in files
    info = bundle.BundleInfo.model_validate_json(files[bundle.RULES])
    assert len(info.redacted) == 4
    assert verify(tmp_path / "a.tar.gz").result == "ok"


@pytest.mark.parametrize("secret", [SECRET, 'planted "secret\\ é 0123456789'])
def test_a_secret_in_the_journal(tmp_path: Path, secret: str) -> None:
    """It is removed also where JSON escapes it, and the measurements without it are compared."""
    run = make_run(tmp_path / "run")
    trial = load_trial(run / "trial.json")
    first = trial.measurements[0].model_copy(update={"facts": {**trial.measurements[0].facts, "text": secret}})
    changed = trial.model_copy(update={"measurements": (first, *trial.measurements[1:])})
    (run / "measurements.jsonl").unlink()
    digest = write_journal(run, changed)
    changed = changed.model_copy(update={"manifest": {"measurements.jsonl": digest}})
    (run / "trial.json").write_text(report.render(changed, "json"))
    config = Config.model_validate({"name": "t", "checks": {}, "env": {"MY_TOKEN": secret}})
    request = Request(config=config, origins={}, only=(), skip=(), command=(), started=0)
    (run / "run.json").write_text(request.model_dump_json())
    files = made(run, tmp_path)
    assert [name for name, content in files.items() if secret[-10:].encode() in content] == []
    (step,) = [step for step in verify(tmp_path / "a.tar.gz").steps if step.name == "record"]
    assert step.result == "ok", step.details


def test_a_run_that_this_version_judges_otherwise_is_bundled_without_rules(tmp_path: Path) -> None:
    """The record of last month, with the rules of today: the decision of the record is handed over."""
    record, path = record_path("2026-11-21-4xh200/repeat-1"), tmp_path / "a.tar.gz"
    document = json.loads(gzip.decompress(record.read_bytes()))
    document["verdicts"] = [each for each in document["verdicts"] if each["outcome"] == "SKIP"]
    document["decision"]["value"] = "ACCEPTED"
    (tmp_path / "old.json").write_text(json.dumps(document))
    code, _, err = call("bundle", tmp_path / "old.json", "-o", path)
    assert (code, "judges this run otherwise" in err) == (0, True)
    files = contents(path)
    assert bundle.BundleInfo.model_validate_json(files[bundle.RULES]).rulebook is None
    (subject,) = statement(files)["subject"]
    assert subject["annotations"]["decision"] == "ACCEPTED"
    (step,) = [step for step in verify(path).steps if step.name == "decision"]
    assert (step.result, "the record has ACCEPTED, this version gives INCOMPLETE" in step.text) == ("failed", True)
    assert any("the bundle has no rules" in each for each in step.details)


def test_a_record_is_a_run_and_no_bundle(tmp_path: Path) -> None:
    """`bundle RECORD.json` and `bundle RECORD.json.gz`: a record outside of its run directory is not original."""
    record = record_path("2026-11-29-1xh200/acceptance")
    (tmp_path / "packed.trial.json.gz").write_bytes(gzip.compress(record.read_bytes()))
    for run in (record, tmp_path / "packed.trial.json.gz"):
        path = tmp_path / f"{run.name}.tar.gz"
        assert call("bundle", run, "-o", path)[0] == 0
        assert contents(path)[bundle.RECORD] == record.read_bytes()
        assert {step.name: step.result for step in verify(path).steps}["record"] == "failed"


def test_a_journal_of_other_results_is_refused(run_dir: Path, tmp_path: Path) -> None:
    run = shutil.copytree(run_dir, tmp_path / "run")
    (run / "measurements.jsonl").write_bytes(b"")
    with pytest.raises(UsageError, match="damaged or of a later measurement"):
        bundle.make(run, tmp_path / "a.tar.gz", None, "provider")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_refused_arguments(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"")
    refused: dict[tuple[str | Path, ...], str] = {
        (run_dir, "-o", tmp_path / "a.tar.gz"): "exists",
        (run_dir, "-o", tmp_path / "no" / "b.tar.gz"): "cannot write",
        (run_dir, "--as", "vendor"): "not one of 'provider', 'customer'",
        (tmp_path, "-o", tmp_path / "c.tar.gz"): "the run is not finished",
        (tmp_path / "a.tar.gz",): "is a file",
        (tmp_path / "a.tar.gz", "--sign", tmp_path / "key"): "not a bundle",
        (tmp_path / "missing",): "cannot read",
    }
    for arguments, message in refused.items():
        code, _, err = call("bundle", *arguments, cwd=tmp_path)
        assert (code, message in err) == (2, True), err


def test_a_key_that_cannot_sign(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("no key")
    with pytest.raises(UsageError, match="could not sign"):
        bundle.make(run_dir, tmp_path / "a.tar.gz", tmp_path / "key", "provider")
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_the_second_signature_changes_nothing_that_the_first_signed(run_dir: Path, tmp_path: Path) -> None:
    path, keys = tmp_path / "a.tar.gz", [make_key(tmp_path / role) for role in signatures.ROLES]
    bundle.make(run_dir, path, keys[0], "provider")
    before = contents(path)
    with pytest.raises(UsageError, match="use --as customer"):
        bundle.add_signature(path, keys[0], "provider")
    bundle.add_signature(path, keys[1], "customer")
    after = contents(path)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"SHA256SUMS.customer.sig"}
    with pytest.raises(UsageError, match="has a signature of the customer"):
        bundle.add_signature(path, keys[1], "customer")
