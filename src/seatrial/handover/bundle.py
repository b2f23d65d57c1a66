"""Makes a bundle: one archive of a finished run, with digests, the rules it was judged by, and signatures."""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from seatrial import __version__, report
from seatrial.checks import catalog
from seatrial.handover import archive, signatures
from seatrial.handover.rules import Rulebook, different_verdicts, digest, rulebook
from seatrial.model import DecisionValue, Frozen, Outcome, Trial, UsageError
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import Request, load_trial
from seatrial.report.view import check_views
from seatrial.util import journal
from seatrial.util.files import sync_folder
from seatrial.util.gc_pause import gc_paused
from seatrial.util.input_files import GZIP_MAGIC, MAX_RECORD_BYTES, gunzip, read_bytes, read_text
from seatrial.util.secrets import REDACTED, redacted, secret_values

RUN, RULES, STATEMENT = "run/", "bundle.json", "statement.json"
RECORD = f"{RUN}trial.json"
JOURNAL = f"{RUN}measurements.jsonl"
_PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"


class BundleInfo(Frozen):
    """Content of bundle.json. ``redacted``: files of which secrets were removed.

    Without their digests before, by which a guessed secret could be confirmed. ``rulebook``: None if the version that
    made the bundle judges the run otherwise: it does not know the rules that gave the decision.
    """

    format: Literal["1"] = "1"
    seatrial: str
    redacted: tuple[str, ...]
    rulebook: Rulebook | None = None


@gc_paused()
def make(run: Path, out: Path, key: Path | None, role: str) -> str:
    """Write the bundle of a run directory or a trial.json to ``out``, signed if there is a ``key``.

    Return what the parties should know: that this version judges the run otherwise. Raises UsageError.
    """
    if out.exists():
        raise UsageError(f"--out {out} exists: name another file")
    secrets, paths = _secrets(run), _paths(run)
    record = _without_secrets(paths[RECORD], secrets, is_own=True)
    trial = parse_record(record[0], str(paths[RECORD]))
    judged = rejudge(trial)
    different = different_verdicts(trial.verdicts, judged.verdicts)
    is_same = not different and judged.decision.value == trial.decision.value
    rules = rulebook(judged) if is_same else None
    files = dict(_files(paths, secrets, record, trial, rules))
    sums = archive.sums_text({name: hashlib.sha256(content).hexdigest() for name, content in files.items()}).encode()
    signature = {signatures.file_name(role): signatures.sign(sums, key)} if key else {}
    archive.write(out, (files | {archive.SUMS: sums} | signature).items())
    if is_same:
        return ""
    return (
        f"seatrial {__version__} judges this run otherwise: {judged.decision.value}, where the record of seatrial "
        f"{trial.seatrial} has {trial.decision.value}, with {len(different)} other verdicts. The bundle has the "
        "recorded decision without its rules, and verify lists what differs. For a bundle with the rules, use the "
        f"build that judged the run, or hand over the decision of today: seatrial judge {run} --out DIR"
    )


def parse_record(content: bytes, name: str) -> Trial:
    """The trial in the content of a trial.json. Raises UsageError, which calls it ``name``."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "trial.json"
        copy.write_bytes(content)
        try:
            return load_trial(copy)
        except UsageError as error:
            raise UsageError(str(error).replace(str(copy), name)) from error


def add_signature(bundle: Path, key: Path, role: str) -> None:
    """Add a signature to an intact bundle; what earlier parties signed does not change. Raises UsageError."""
    digests, contents = archive.read(bundle)
    if problems := file_problems(contents[archive.SUMS], digests):
        raise UsageError(f"{bundle} is not signed, since its files changed: {problems[0]}; seatrial verify {bundle}")
    name = signatures.file_name(role)
    if name in digests:
        (other,) = {*signatures.ROLES} - {role}
        both = signatures.file_name(other) in digests
        raise UsageError(
            f"{bundle} has a signature of the {role}" + (f" and of the {other}" if both else f": use --as {other}")
        )
    archive.write(bundle, [*contents.items(), (name, signatures.sign(contents[archive.SUMS], key))])
    sync_folder(bundle.absolute().parent)


def file_problems(sums: bytes, digests: Mapping[str, str]) -> list[str]:
    """``changed: NAME``, ``missing: NAME`` and ``extra: NAME`` of the files that are not as in SHA256SUMS."""
    lines = (line.partition("  ") for line in sums.decode(errors="replace").split("\n") if line)
    listed = {name: digest for digest, _, name in lines}
    if sums != archive.sums_text(listed).encode() or not all(map(archive.is_plain_name, listed)):
        return [f"changed: {archive.SUMS}: lines that seatrial does not write"]
    not_listed = {archive.SUMS, *map(signatures.file_name, signatures.ROLES)}
    present = {name: digest for name, digest in digests.items() if name not in not_listed}
    problems = [f"changed: {name}" for name in listed if name in present and listed[name] != present[name]]
    problems += [f"missing: {name}" for name in (*listed, RECORD, RULES, STATEMENT) if name not in present]
    return list(dict.fromkeys(problems + [f"extra: {name}" for name in present if name not in listed]))


def statement_bytes(trial: Trial, record_digest: str, rules: Rulebook | None) -> bytes:
    """The result in a record as an in-toto Statement v1 with the predicate test-result v0.1.

    INCOMPLETE is FAILED; decision and reason are annotations of the subject, the record. A check without a verdict that
    a required check needs (ERROR, UNJUDGED) is among the failed tests. A record does not contain verdicts with PASS.
    """
    tests = dict[str, list[str]](passedTests=[], warnedTests=[], failedTests=[])
    for check in check_views(trial):
        outcome = check.outcome if check.verdicts else Outcome.PASS
        if outcome is not Outcome.SKIP:
            kind = {Outcome.PASS: "passedTests", Outcome.WARN: "warnedTests"}.get(outcome, "failedTests")
            tests[kind].append(check.name)
    accepted = "WARNED" if tests["warnedTests"] else "PASSED"
    decision = trial.decision
    subject = {
        "name": RECORD,
        "digest": {"sha256": record_digest},
        "annotations": {"decision": str(decision.value), "reason": decision.reason},
    }
    judged_by = {f"{RECORD}#config": trial.config}
    for name, value in rules.model_dump(mode="json").items() if rules else ():
        judged_by[f"{RULES}#rulebook.{name}"] = value
    configuration = [{"name": name, "digest": {"sha256": digest(value)}} for name, value in judged_by.items()]
    predicate = {
        "result": accepted if decision.value is DecisionValue.ACCEPTED else "FAILED",
        "configuration": configuration,
        **tests,
    }
    document = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [subject],
        "predicateType": _PREDICATE,
        "predicate": predicate,
    }
    return (json.dumps(document, indent=1) + "\n").encode()


def _files(
    paths: Mapping[str, Path],
    secrets: Mapping[str, str],
    record: tuple[bytes, bytes],
    trial: Trial,
    rules: Rulebook | None,
) -> Iterator[tuple[str, bytes]]:
    """Name and content, without secrets, of each file of a bundle except SHA256SUMS and signatures.

    ``record``: the content of trial.json that was judged, and the original. Raises UsageError if a journal belongs to
    another record.
    """
    removed = []
    for name, path in paths.items():
        in_run = name.removeprefix(RUN)
        is_own = in_run in {*report.FILES, *trial.manifest}
        content, original = record if name == RECORD else _without_secrets(path, secrets, is_own=is_own)
        if in_run in trial.manifest and hashlib.sha256(original).hexdigest() != trial.manifest[in_run]:
            raise UsageError(f"{path} is damaged or of a later measurement: trial.json was made of other results")
        if content != original:
            removed.append(name)
        yield name, content
    info = BundleInfo(seatrial=__version__, redacted=tuple(removed), rulebook=rules)
    yield RULES, info.model_dump_json(indent=1, exclude_none=True).encode()
    yield STATEMENT, statement_bytes(trial, hashlib.sha256(record[0]).hexdigest(), rules)


def _paths(run: Path) -> dict[str, Path]:
    """Name in the bundle → file: the reports, journals, scripts and logs of the run; the record alone of a trial.json.

    Without run.json, which is the request with its secrets, and without artifacts, such as weights of models.
    """
    if not run.is_dir():
        return {RECORD: run}
    names = [name for name in report.FILES if name != "trial.json"]
    paths = [run / name for name in (*names, "measurements.jsonl") if (run / name).is_file()]
    paths += [path for path in (run / "jobs").rglob("*") if path.is_file() and not path.is_symlink()]
    named = {f"{RUN}{path.relative_to(run).as_posix()}": path for path in (run / "trial.json", *paths)}
    if unusual := [name for name in named if not archive.is_plain_name(name)]:
        raise UsageError(f"{run}: {unusual[0]!r} has a control character or a backslash in its name: rename the file")
    return dict(sorted(named.items()))


def _secrets(run: Path) -> Mapping[str, str]:
    """The secrets of the run's request and of this process's environment: value → name."""
    if not (run / "run.json").is_file():
        return secret_values()
    try:
        config = Request.model_validate_json(read_text(run / "run.json")).config
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the secrets to remove from {run / 'run.json'}: {error}") from error
    checks = (catalog().get(name) for name in config.checks)
    return secret_values(
        config.model_dump(), vocabulary={metric for check in checks if check for metric in check.units}
    )


def _without_secrets(path: Path, secrets: Mapping[str, str], *, is_own: bool) -> tuple[bytes, bytes]:
    """The content of a file without secrets, and its original content; a record is unpacked.

    ``is_own``: seatrial wrote the file without secrets, whose names in it, such as an option, are none; only their
    values are removed then. Raises UsageError.
    """
    try:
        original = read_bytes(path, MAX_RECORD_BYTES)
        is_packed = original.startswith(GZIP_MAGIC)
        content = gunzip(original, MAX_RECORD_BYTES) if is_packed else original
    except FileNotFoundError as error:
        raise UsageError(f"cannot read {path}: no such file; the run is not finished") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    shown = content
    if is_own:
        for value in secrets:
            in_json = (json.dumps(value, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False))
            for form in {value, *in_json, html.escape(value)}:
                shown = shown.replace(form.encode(), REDACTED.encode())
        if path.name == Path(JOURNAL).name:
            shown = journal.with_new_digests(content, shown)
    else:
        text: Any = redacted(content.decode(errors="surrogateescape"), secrets)
        shown = str(text).encode(errors="surrogateescape")
    if not is_packed or path.name.endswith(".json.gz"):
        return shown, content
    return (gzip.compress(shown, mtime=0) if shown != content else original), original
