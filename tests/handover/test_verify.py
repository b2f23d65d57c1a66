"""`seatrial verify`: one changed bit, forged records, unknown keys, other rules."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from seatrial import report
from seatrial.handover import bundle, signatures
from seatrial.handover.verify import Step, signature_steps, verify
from seatrial.hardware import references
from seatrial.model import Trial, UsageError
from tests.handover.fixtures import CHECK, METRIC, contents, make_key, make_run, repack, tampered_record
from tests.processes import call

TRIES = 6  # beside one for each file; of 1,000 all were found too


@pytest.fixture(scope="module")
def original(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """An unsigned bundle of an accepted run, and its files."""
    folder = tmp_path_factory.mktemp("verify")
    path = folder / "a.tar.gz"
    bundle.make(run_dir, path, None, "provider")
    return path, contents(path)


def steps(path: Path, allowed_signers: Path | None = None) -> dict[str, Step]:
    """The steps by name; of several signatures the first."""
    return {step.name: step for step in reversed(verify(path, allowed_signers).steps)}


def test_an_unsigned_bundle_proves_integrity(original: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    path, _ = original
    found = steps(path)
    assert {name: step.result for name, step in found.items()} == dict.fromkeys(found, "ok")
    assert {*found} == {"files", "signature", "record", "decision"}
    assert "not origin" in found["signature"].text
    (tmp_path / "allowed").write_text("")
    assert steps(path, tmp_path / "allowed")["signature"].result == "failed"  # an origin was asked for
    code, out, _ = call("verify", path, "--contract")
    assert (code, f"{CHECK} {METRIC}" in out) == (0, True)


def test_one_flipped_bit_is_found(original: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """In any file, after unpacking: the archive's own checksum does not help."""
    signed, draw = repack(tmp_path / "a.tar.gz", original[1]), random.Random(1)
    bundle.add_signature(signed, make_key(tmp_path / "key"), "provider")
    files = contents(signed)
    for name in [*files, *draw.choices([*files], k=TRIES)]:
        if content := files[name]:
            flipped = bytearray(content)
            flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path = repack(tmp_path / "b.tar.gz", {**files, name: bytes(flipped)})
            (step,) = [step for step in verify(path).steps if step.result == "failed"]
            assert name in f"{step.text} {step.details}"


def test_a_flipped_bit_of_the_archive(original: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """Of 30 bits, each is found, or is one of the gzip header, which no file depends on."""
    packed, draw = original[0].read_bytes(), random.Random(2)
    for _ in range(30):
        flipped, place = bytearray(packed), draw.randrange(10, len(packed))
        flipped[place] ^= 1 << draw.randrange(8)
        (tmp_path / "a.tar.gz").write_bytes(flipped)
        with pytest.raises(UsageError, match="damaged"):
            verify(tmp_path / "a.tar.gz")


def test_extra_and_missing_files(original: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    _, files = original
    without = {name: content for name, content in files.items() if name != "run/report.html"}
    path = repack(tmp_path / "a.tar.gz", {**without, "run/new.txt": b"new"})
    (step,) = verify(path).steps
    assert step.details == ("missing: run/report.html", "extra: run/new.txt")
    assert call("verify", path)[0] == 1
    # neither listed nor there: the files that a bundle must have
    del without["run/trial.json"]
    (step,) = verify(repack(tmp_path / "b.tar.gz", without, new_sums=True)).steps
    assert step.details == ("missing: run/trial.json",)


def test_lines_of_sums_that_coreutils_would_not_check() -> None:
    digest = "0" * 64
    for text in (
        "no digest",
        f"{digest}  a\n{digest}  a\n",
        f"{digest}  a\x0b",
        f"{digest}  b\n{digest}  a\n",
        f"{digest}  \x1b[2J\n",
        f"\\{digest}  a\\nb\n",
    ):
        (problem,) = bundle.file_problems(text.encode(), {"a": digest, "b": digest})
        assert problem.startswith("changed: SHA256SUMS")


def test_a_rewritten_record_is_not_original(original: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """The sums and the verdicts fit the changed value; the journal does not."""
    path = repack(tmp_path / "a.tar.gz", tampered_record(original[1], 1.001), new_sums=True)
    step = steps(path)["record"]
    assert step.result == "failed"
    (detail,) = step.details
    assert all(text in detail for text in (CHECK, METRIC, "run/measurements.jsonl"))
    assert call("verify", path)[0] == 1


def test_a_changed_journal_is_not_original(original: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    _, files = original
    lines = files[bundle.JOURNAL].splitlines(keepends=True)
    path = repack(tmp_path / "a.tar.gz", {**files, bundle.JOURNAL: b"".join(lines[1:])}, new_sums=True)
    details = steps(path)["record"].details
    assert any("SHA-256" in each for each in details)
    assert any("only in run/trial.json" in each for each in details)
    without = {name: content for name, content in files.items() if name != bundle.JOURNAL}
    assert steps(repack(tmp_path / "b.tar.gz", without, new_sums=True))["record"].result == "failed"


def test_a_changed_decision_is_found(original: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """The record of a rejected run whose verdicts are removed, and a statement that is not of the record."""
    run = make_run(tmp_path / "run", factor=0.5)
    bundle.make(run, tmp_path / "rejected.tar.gz", None, "provider")
    files = contents(tmp_path / "rejected.tar.gz")
    record = json.loads(files[bundle.RECORD])
    record["decision"]["value"], record["verdicts"] = "ACCEPTED", []
    path = repack(tmp_path / "a.tar.gz", {**files, bundle.RECORD: json.dumps(record).encode()}, new_sums=True)
    step = steps(path)["decision"]
    assert step.result == "failed"
    assert any(each.startswith(f"{CHECK} {METRIC}") and "no rule and no reference" in each for each in step.details)
    rule = b">= 0.9 reference, else FAIL (when backend == cuda; reference value memory.copy)"
    assert files[bundle.RULES].count(rule) == 1
    laxer = files[bundle.RULES].replace(rule, b">= 0.4 reference")
    forged = {**files, bundle.RECORD: json.dumps(record).encode(), bundle.RULES: laxer}
    details = steps(repack(tmp_path / "c.tar.gz", forged, new_sums=True))["decision"].details
    (detail,) = [each for each in details if each.startswith(f"{CHECK} {METRIC}")]
    assert all(text in detail for text in (">= 0.4 reference in the bundle", rule.decode()))
    other = {**original[1], bundle.STATEMENT: files[bundle.STATEMENT]}
    assert steps(repack(tmp_path / "b.tar.gz", other, new_sums=True))["decision"].result == "failed"


def test_another_reference_value_is_named(
    original: tuple[Path, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This version has another value: verdicts differ because of it. In the bundle only: they do not."""
    path, files = original
    text = files[bundle.RULES].decode()
    assert text.count('"expected": 4272.0') == 1
    changed = text.replace('"expected": 4272.0', '"expected": 3000.0').encode()
    step = steps(repack(tmp_path / "a.tar.gz", {**files, bundle.RULES: changed}, new_sums=True))["decision"]
    assert step.result == "failed"  # the statement has the digest of the other rules
    (sku,) = [sku for sku in references.skus() if sku.name == "NVIDIA H200 SXM"]
    key = next(key for key, values in sku.expected.items() if any(value.value == 4272 for value in values))
    higher = tuple(value.model_copy(update={"value": 2 * value.value}) for value in sku.expected[key])
    other = sku.model_copy(update={"expected": {**sku.expected, key: higher}})
    monkeypatch.setattr("seatrial.judge.skus", lambda: (other,))
    step = steps(path)["decision"]
    assert step.result == "failed"
    (detail,) = [each for each in step.details if each.startswith(f"{CHECK} {METRIC}")]
    assert "4272 GB/s" in detail
    assert "8544 GB/s" in detail
    barely = tuple(value.model_copy(update={"value": 0.99 * value.value}) for value in sku.expected[key])
    other = sku.model_copy(update={"expected": {**sku.expected, key: barely}})
    step = steps(path)["decision"]
    assert (step.result, "by other rules or reference values" in step.text) == ("ok", True)  # no verdict differs
    assert "4272 GB/s" in step.details[0]


def test_signatures(original: tuple[Path, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = repack(tmp_path / "a.tar.gz", original[1])
    keys = {role: make_key(tmp_path / role) for role in signatures.ROLES}
    for role, key in keys.items():
        bundle.add_signature(path, key, role)
    publics = {role: key.with_name(f"{role}.pub").read_text() for role, key in keys.items()}
    allowed = tmp_path / "allowed"

    def results(lines: dict[str, str]) -> list[str]:
        allowed.write_text("".join(f"{principal} {key}" for principal, key in lines.items()))
        return [step.result for step in signature_steps(signed, allowed)]

    signed = contents(path)
    assert results(publics) == ["ok", "ok"]
    assert results({"provider": publics["provider"]}) == ["ok", "failed"]  # an unknown key
    assert results({"provider": publics["customer"], "customer": publics["provider"]}) == ["failed", "failed"]
    assert results({'provider,customer namespaces="git"': publics["provider"]}) == ["failed", "failed"]
    assert [step.result for step in signature_steps(signed, None)] == ["ok", "ok"]
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert results(publics) == ["not checked", "not checked"]
        assert call("verify", path)[0] == 3
    assert call("verify", path, "--allowed-signers", tmp_path / "none")[0] == 2


def test_allowed_signers_in_the_bundle_do_not_count(original: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """A forger lists its own key beside its signature; the verifier's file has another key."""
    keys = [make_key(tmp_path / name) for name in ("forger", "true")]
    publics = [key.with_name(f"{key.name}.pub").read_text() for key in keys]
    files = {**original[1], "allowed_signers": f"provider {publics[0]}".encode()}
    path = repack(tmp_path / "a.tar.gz", files, new_sums=True)
    bundle.add_signature(path, keys[0], "provider")
    (tmp_path / "allowed").write_text(f"provider {publics[1]}")
    assert "unknown key" in steps(path, tmp_path / "allowed")["signature"].text
    signed = [step.text for step in verify(path).steps if step.name == "signature"]
    assert "whose key this is was not checked" in signed[0]
    assert signed[1] == "customer: has not signed"


def test_a_measurement_that_is_twice_in_the_record(original: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """The second one, with another value, does not hide behind the true one."""
    record = json.loads(original[1][bundle.RECORD])
    (measurement,) = [each for each in record["measurements"] if each["check"] == CHECK]
    forged = json.loads(json.dumps(measurement))
    forged["metrics"][0]["value"] *= 2
    record["measurements"].insert(0, forged)
    files = {**original[1], bundle.RECORD: json.dumps(record).encode()}
    step = steps(repack(tmp_path / "a.tar.gz", files, new_sums=True))["record"]
    assert step.result == "failed"
    assert any("only in run/trial.json" in each for each in step.details)


@pytest.mark.parametrize("name", ["localization", "retries"])
def test_a_measurement_in_another_list_of_the_record(
    original: tuple[Path, dict[str, bytes]], tmp_path: Path, name: str
) -> None:
    """A bad measurement that is moved to where it counts less, such as the search for slow nodes."""
    trial = Trial.model_validate_json(original[1][bundle.RECORD])
    (moved,) = [each for each in trial.measurements if each.check == CHECK]
    others = tuple(each for each in trial.measurements if each is not moved)
    changed = trial.model_copy(update={"measurements": others, name: (*getattr(trial, name), moved)})
    files = {**original[1], bundle.RECORD: report.render(changed, "json").encode()}
    step = steps(repack(tmp_path / "a.tar.gz", files, new_sums=True))["record"]
    assert step.result == "failed"
    assert [name in each or "measurements)" in each for each in step.details] == [True, True]


@pytest.mark.parametrize("name", ["results", "sessions", "stop_reason"])
def test_other_results_of_jobs_and_sessions(original: tuple[Path, dict[str, bytes]], tmp_path: Path, name: str) -> None:
    """A failed job or the reason of an interruption that is removed from the record."""
    record = json.loads(original[1][bundle.RECORD])
    assert all(record[each] for each in ("results", "sessions"))
    record[name] = "interrupted" if name == "stop_reason" else []
    files = {**original[1], bundle.RECORD: json.dumps(record).encode()}
    step = steps(repack(tmp_path / "a.tar.gz", files, new_sums=True))["record"]
    assert step.result == "failed"
    assert name in step.details[0]


def test_a_damaged_statement(original: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """No JSON, and a key twice, of which programs read either."""
    statement = original[1][bundle.STATEMENT]
    twice = statement.replace(b'"result": "WARNED"', b'"result": "PASSED", "result": "WARNED"')
    assert twice != statement
    for content in (b"{", b"\xff", b"", twice):
        path = repack(tmp_path / "a.tar.gz", {**original[1], bundle.STATEMENT: content}, new_sums=True)
        step = steps(path)["decision"]
        assert (step.result, bundle.STATEMENT in step.details[0]) == ("failed", True)


@pytest.mark.parametrize("name", ["tested_hardware", "cpu_only", "unknown_gpus"])
def test_a_decision_about_other_hardware(original: tuple[Path, dict[str, bytes]], tmp_path: Path, name: str) -> None:
    record = json.loads(original[1][bundle.RECORD])
    record["decision"] |= {name: {"tested_hardware": "64 nodes × 8 GPUs", "cpu_only": True}.get(name, ["B300"])}
    files = {**original[1], bundle.RECORD: json.dumps(record).encode()}
    step = steps(repack(tmp_path / "a.tar.gz", files, new_sums=True))["decision"]
    assert step.result == "failed"
    assert any(each.startswith(f"{name}: ") for each in step.details)


def test_files_that_the_bundle_calls_redacted_must_be_there(
    original: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    record, info = (json.loads(original[1][name]) for name in (bundle.RECORD, bundle.RULES))
    record["manifest"]["jobs/ranks/attempt1/rank0.jsonl"] = "0" * 64
    info["redacted"] = ["run/jobs/ranks/attempt1/rank0.jsonl"]
    changed = {bundle.RECORD: record, bundle.RULES: info}
    files = {**original[1], **{name: json.dumps(document).encode() for name, document in changed.items()}}
    step = steps(repack(tmp_path / "a.tar.gz", files, new_sums=True))["record"]
    assert (step.result, "that of no file" in step.details[0]) == ("failed", True)


def test_loosened_thresholds_are_shown(tmp_path: Path) -> None:
    """Accepted by the same rules, but the trial replaced the rules of the memory."""
    overrides = [
        ("--set", f"checks.{CHECK}.expect.{METRIC}", ">= 2000 GB/s"),
        ("--set", f"checks.{CHECK}.override", True),
    ]
    run = make_run(tmp_path / "run", factor=0.5, overrides=overrides)
    bundle.make(run, tmp_path / "a.tar.gz", None, "provider")
    step = steps(tmp_path / "a.tar.gz")["decision"]
    assert (step.result, "ACCEPTED" in step.text) == ("ok", True)
    assert any("LAX THRESHOLD" in each and CHECK in each for each in step.details)


def test_texts_of_a_record_cannot_control_the_terminal(original: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    record = json.loads(original[1][bundle.RECORD])
    record["name"] = "\x1b[2Jok  decision  same decision\nok\u202e"
    files = {**original[1], bundle.RECORD: json.dumps(record).encode()}
    path = repack(tmp_path / "a.tar.gz", files, new_sums=True)
    out = call("verify", path, "--contract")[1]
    assert not {"\x1b", "\u202e"} & set(out)
    assert "ok  decision" not in out.splitlines()


def test_a_signature_of_other_files(original: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """A forged record, under the signature of the true one."""
    path, key = repack(tmp_path / "a.tar.gz", original[1]), make_key(tmp_path / "key")
    bundle.add_signature(path, key, "provider")
    signed = contents(path)
    forged = repack(tmp_path / "b.tar.gz", tampered_record(signed, 1.001), new_sums=True)
    both = {**contents(forged), "SHA256SUMS.provider.sig": signed["SHA256SUMS.provider.sig"]}
    assert steps(repack(tmp_path / "c.tar.gz", both))["signature"].result == "failed"
    with pytest.raises(UsageError, match="files changed"):
        bundle.add_signature(repack(tmp_path / "d.tar.gz", {**both, "run/extra": b""}), key, "customer")


def test_other_versions_and_damaged_documents(original: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    _, files = original
    record = json.loads(files[bundle.RECORD])
    for name, content, message in (
        (bundle.RECORD, json.dumps({**record, "schema_version": "99"}), "schema_version is '99'"),
        (bundle.RECORD, "{", "damaged"),
        (bundle.RULES, json.dumps({"format": "2", "seatrial": "9.9"}), "not of this version of seatrial: format"),
        (bundle.RULES, "[]", "not of this version"),
        (bundle.RULES, "nonsense", "damaged"),
    ):
        path = repack(tmp_path / "a.tar.gz", {**files, name: content.encode()}, new_sums=True)
        code, _, err = call("verify", path)
        assert (code, message in err, name in err or "format" in err) == (2, True, True), err


def test_json(original: tuple[Path, dict[str, bytes]]) -> None:
    code, out, _ = call("verify", original[0], "--json")
    document = json.loads(out)
    assert (code, document["result"], document["decision"]) == (0, "ok", "ACCEPTED")
    assert [step["name"] for step in document["steps"]] == ["files", "signature", "record", "decision"]
