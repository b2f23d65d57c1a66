"""Checks a bundle: its files, its signatures, whether its record is original, and its decision by judging again."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from seatrial import __version__
from seatrial.handover import archive, signatures
from seatrial.handover.bundle import (
    JOURNAL,
    RECORD,
    RULES,
    RUN,
    STATEMENT,
    BundleInfo,
    file_problems,
    parse_record,
    statement_bytes,
)
from seatrial.handover.rules import changes, different_verdicts, rulebook
from seatrial.model import Measurement, Session, Trial, UsageError, first_validation_error
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import read_saved_run
from seatrial.util.gc_pause import gc_paused
from seatrial.util.grouping import grouped
from seatrial.util.input_files import parse_json
from seatrial.util.text import plural

Result = Literal["ok", "failed", "not checked"]
_SIGNATURES = {signatures.file_name(role): role for role in signatures.ROLES}
_READ = (archive.SUMS, RECORD, JOURNAL, RULES, STATEMENT, *_SIGNATURES)


@dataclass(frozen=True)
class Step:
    """One step of the verification; ``details``: what differs."""

    name: Literal["files", "signature", "record", "decision"]
    result: Result
    text: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verification:
    """The result for a bundle. ``judged``: the record judged by this version; None if its files changed."""

    steps: tuple[Step, ...]
    judged: Trial | None

    @property
    def result(self) -> Result:
        """The worst result of all steps."""
        results = {step.result for step in self.steps}
        return "failed" if "failed" in results else "not checked" if "not checked" in results else "ok"


@gc_paused()
def verify(bundle: Path, allowed_signers: Path | None = None) -> Verification:
    """Check a bundle. ``allowed_signers``: who may sign; without it, only that signatures fit the files is checked.

    The archive is read once: what is judged has the digests that were checked. Raises UsageError for what is no bundle,
    and for a bundle or a record of another version of the format.
    """
    if allowed_signers and not allowed_signers.is_file():
        raise UsageError(f"cannot read --allowed-signers {allowed_signers}: not a file")
    digests, contents = archive.read(bundle, _READ)
    if problems := file_problems(contents[archive.SUMS], digests):
        text = f"{plural(len(problems), 'file')} of {len(digests)} not as in {archive.SUMS}"
        return Verification((Step("files", "failed", text, tuple(problems)),), None)
    listed = len(digests.keys() - _SIGNATURES.keys()) - 1
    steps = [Step("files", "ok", f"{plural(listed, 'file')} as in {archive.SUMS}")]
    steps += signature_steps(contents, allowed_signers)
    info = _info(bundle, contents[RULES])
    trial = parse_record(contents[RECORD], f"{bundle}:{RECORD}")
    steps.append(_record_step(contents.get(JOURNAL), digests, info.redacted, trial))
    judged = rejudge(trial)
    is_stated = contents[STATEMENT] == statement_bytes(trial, digests[RECORD], info.rulebook)
    steps.append(_decision_step(info, trial, judged, is_stated=is_stated))
    return Verification(tuple(steps), judged)


def signature_steps(contents: Mapping[str, bytes], allowed_signers: Path | None) -> Iterator[Step]:
    """A step for each role, or one if nobody signed; ``contents``: SHA256SUMS and the signatures by name."""
    if not _SIGNATURES.keys() & contents.keys():
        text = "unsigned: the digests prove integrity, not origin; anyone can make such a bundle of other files"
        yield Step("signature", "failed" if allowed_signers else "ok", text)
        return
    for name, role in _SIGNATURES.items():
        result: Result = "failed"
        try:
            signature = contents.get(name, b"")
            key, is_allowed = signatures.check(contents[archive.SUMS], signature, role, allowed_signers)
            if name not in contents:
                result, text = "ok", "has not signed"
            elif not key:
                text = f"{name} is no signature of this {archive.SUMS}"
            elif allowed_signers is None:
                result, text = "ok", f"signed by {key}; whose key this is was not checked: give --allowed-signers FILE"
            elif is_allowed:
                result, text = "ok", f"signed by {key}, which {allowed_signers} lists for {role}"
            else:
                text = f"signed by {key}, which {allowed_signers} does not list for {role}: an unknown key"
        except signatures.NoSshKeygen as error:
            result, text = "not checked", str(error)
        yield Step("signature", result, f"{role}: {text}")


def _info(bundle: Path, content: bytes) -> BundleInfo:
    """The content of bundle.json. Raises UsageError."""
    try:
        return BundleInfo.model_validate(parse_json(content))
    except ValidationError as error:
        reason = first_validation_error(error)
        raise UsageError(f"{bundle}: {RULES} is not of this version of seatrial: {reason}") from error
    except ValueError as error:
        raise UsageError(f"{bundle}: {RULES} is damaged: {error}") from error


def _record_step(journal: bytes | None, digests: Mapping[str, str], redacted: Collection[str], trial: Trial) -> Step:
    if problems := list(_origin_problems(journal, digests, redacted, trial)):
        text = "not original: the record is not shown to be what the processes wrote in the journals"
        return Step("record", "failed", text, tuple(problems))
    changed = [RUN + name for name in trial.manifest if RUN + name in redacted]
    unknown = tuple(f"{name}: secrets were removed, so its digest is not compared" for name in changed)
    count = plural(len((*trial.measurements, *trial.retries, *trial.localization)), "measurement")
    return Step("record", "ok", f"original: {count} as in {JOURNAL}, and all digests of journals", unknown)


def _origin_problems(
    journal: bytes | None, digests: Mapping[str, str], redacted: Collection[str], trial: Trial
) -> Iterator[str]:
    """What contradicts that the record contains what the processes wrote in the run's journals."""
    if trial.rewritten_from:
        yield f"{RECORD} was rewritten from {trial.rewritten_from}"
    if JOURNAL.removeprefix(RUN) not in trial.manifest or journal is None:
        yield f"{JOURNAL} is not in the bundle, or not in the digests of {RECORD}"
        return
    for name, expected in trial.manifest.items():
        digest = digests.get(RUN + name, "that of no file")
        if digest != expected and (RUN + name not in redacted or RUN + name not in digests):
            yield f"{RUN}{name}: SHA-256 is {digest}, {RECORD} has {expected}"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "measurements.jsonl"
        copy.write_bytes(journal)
        saved = read_saved_run(copy)
    # of the search for slow nodes are measurements of checks that the trial does not name
    search = [each for each in saved.measurements if each.check not in trial.config["checks"]]
    first = [each for each in saved.measurements if each.check in trial.config["checks"]]
    written = _by_key({"measurements": first, "retries": saved.retries, "localization": search})
    recorded = _by_key({name: getattr(trial, name) for name in ("measurements", "retries", "localization")})
    for key in sorted(written.keys() | recorded.keys()):
        for in_record, in_journal in zip_longest(recorded.get(key, ()), written.get(key, ())):
            if in_record != in_journal:
                yield f"{key[0]} of {key[1]}, rank {key[2] or 'none'}: {_difference(in_record, in_journal, key[3])}"
    if list(trial.results) != saved.job_results:
        yield f"results of jobs of {RECORD} not as in {JOURNAL}"
    stop_reasons = [each.stop_reason for each in saved.sessions] or [""]
    if [*map(_session, trial.sessions)] != [*map(_session, saved.sessions)] or trial.stop_reason != stop_reasons[-1]:
        yield f"sessions or stop_reason of {RECORD} not as in {JOURNAL}"


def _session(session: Session) -> tuple[float, tuple[str, ...], str]:
    """The start, the command and why it ended early; after these are saved, the time of the reports is added."""
    return session.started, session.command, session.stop_reason


def _by_key(lists: Mapping[str, Iterable[Measurement]]) -> dict[tuple[str, ...], list[Measurement]]:
    """The measurements by check, subject, rank, name of their list, and start."""
    return grouped(
        ((each.check, each.subject, "" if each.rank is None else str(each.rank), name, str(each.started)), each)
        for name, measurements in lists.items()
        for each in measurements
    )


def _difference(recorded: Measurement | None, written: Measurement | None, kind: str) -> str:
    """The first metric, else the fields, that differ; ``kind``: the name of the list in the record."""
    if not recorded or not written:
        places = (RECORD, JOURNAL) if recorded else (JOURNAL, RECORD)
        return f"only in {places[0]}, not in {places[1]} ({kind})"
    for metric, original in zip(recorded.metrics, written.metrics, strict=False):
        if metric != original:
            values = f"{metric.value:g} {metric.unit} in {RECORD}, {original.value:g} {original.unit} in {JOURNAL}"
            return f"{metric.name} {metric.subject}: {values}"
    fields = [name for name in Measurement.model_fields if getattr(recorded, name) != getattr(written, name)]
    return f"{', '.join(fields)} of {RECORD} not as in {JOURNAL}"


def _decision_step(info: BundleInfo, trial: Trial, judged: Trial, *, is_stated: bool) -> Step:
    """Whether this version gives the decision and the verdicts of the record, and by the same rules.

    The reason is computed again: it begins with thresholds that the trial loosened, if there are any.
    """
    decision, now = trial.decision.value, judged.decision.value
    reason = [f"{trial.name}: {judged.decision.reason}", f"tested: {judged.decision.tested_hardware or 'no GPU'}"]
    causes = changes(info.rulebook, rulebook(judged)) if info.rulebook else {}
    different = different_verdicts(trial.verdicts, judged.verdicts)
    problems = [] if is_stated else [f"{STATEMENT} does not state what {RECORD} and {RULES} contain"]
    for (check, subject, metric), (before, after) in different.items():
        cause = _cause(f"{check} {metric}", causes, info)
        problems.append(f"{check} {metric} {subject}: {before} in the record, {after} by this version; {cause}")
    for name in ("value", "cpu_only", "unknown_gpus", "tested_hardware"):
        values = getattr(trial.decision, name), getattr(judged.decision, name)
        if values[0] != values[1]:
            problems.append(f"{name}: {values[0]} in the record, {values[1]} by this version")
    if problems:
        text = (
            f"other verdicts: {len(different)}" if different else "decision and statement do not follow from the record"
        )
        text += f"; the record has {decision}, this version gives {now}"
        return Step("decision", "failed", text, (*problems, *reason))
    text = f"same decision by the same rules: {now}"
    if causes or not info.rulebook:
        text = f"same decision and verdicts: {now}, but by other rules or reference values"
    details = [f"{key}: {cause}" for key, cause in causes.items()]
    return Step("decision", "ok", f"{text} (seatrial {__version__})", (*details, *reason))


def _cause(metric: str, causes: Mapping[str, str], info: BundleInfo) -> str:
    """The rule, the reference value or the data that explains another verdict on a metric."""
    if not info.rulebook:
        return f"the bundle has no rules: the seatrial that made it ({info.seatrial}) did not know those of the record"
    cause = next((text for name, text in causes.items() if fnmatchcase(metric, name)), causes.get("thresholds", ""))
    if cause:
        return cause
    return (
        f"no rule and no reference value differs: the record does not follow from its measurements, or seatrial "
        f"{info.seatrial} computed otherwise"
    )
