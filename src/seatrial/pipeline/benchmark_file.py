"""Recognises the file of `seatrial judge` by its content: a record of seatrial, or the output of a benchmark."""

from __future__ import annotations

import io
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from seatrial.checks import catalog
from seatrial.config.argument_paths import is_folder
from seatrial.discover import nccl_tests_json, nccl_tests_output, nvbandwidth_output
from seatrial.judge import plausibility, site_baseline
from seatrial.model import Baseline, Outcome, UsageError, worst
from seatrial.model.benchmark import BenchmarkHardware, BenchmarkJudgement
from seatrial.pipeline import judge_nccl_tests, judge_nvbandwidth
from seatrial.pipeline.benchmark_hardware import HardwareOptions
from seatrial.util.input_files import (
    GZIP_MAGIC,
    MAX_DOCUMENT_BYTES,
    HeadThenRest,
    LimitedGzip,
    open_file,
    parse_json,
    with_limit,
)

STDIN = Path("-")
_MAX_TEXT = 2**30  # characters: larger than a log of 1,024 ranks with NCCL_DEBUG=INFO
_HEAD_BYTES = 2**18  # read from the start of a file to identify its format
_MAX_LINE = 2**16  # characters of a line that are read at once
_MIN_LINE = 2**7  # characters that a line counts at least, since the time of parsing depends on the number of lines
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")  # PowerShell redirects to UTF-16
# The start of a JSON report of nvbandwidth, or of nccl-tests, as written or with sorted keys. It identifies a report
# even if the rest is missing
_JSON_REPORT = re.compile(rb'\s*\{\s*"(?:(nvbandwidth)"|args"|version"\s*:\s*\d+\s*,\s*"start_time")\s*:')
_EXPECTED = (
    "expected a run directory or trial.json of seatrial, or the output of nccl-tests (*_perf) or nvbandwidth, as text "
    "or JSON; each may be compressed with gzip"
)


@dataclass(frozen=True)
class BenchmarkFile:
    """An open file that is no record of seatrial. ``name``: for messages. ``stream``: the whole content, decompressed.

    ``encoding``: of text. ``report_of``: the tool that wrote a JSON report; empty for text.
    """

    name: str
    stream: BinaryIO
    encoding: str
    report_of: str

    def judge(self, options: HardwareOptions, operation: str = "", baseline: Path | None = None) -> BenchmarkJudgement:
        """Return the verdicts on the output of a benchmark.

        ``operation``: the option --operation, empty if not set; ``baseline``: a file of `seatrial baseline learn`.
        Raises UsageError if the file is not the output of a known benchmark, or cannot be read.
        """
        site = site_baseline.load(baseline, catalog()) if baseline else None
        if site:
            plausibility.validate_baseline(site, catalog())
        try:
            judge = self._judge_report if self.report_of else self._judge_text
            return judge(options, operation, site)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise UsageError(f"cannot read {self.name}: {error}") from error

    def _judge_report(self, options: HardwareOptions, operation: str, site: Baseline | None) -> BenchmarkJudgement:
        content = self.stream.read(MAX_DOCUMENT_BYTES + 1)
        if len(content) > MAX_DOCUMENT_BYTES:
            raise UsageError(f"{self.name} is larger than the limit of {MAX_DOCUMENT_BYTES} bytes of a JSON report")
        try:
            document = parse_json(content.decode(errors="replace"))
        except ValueError as error:
            note = f"the JSON report is truncated or damaged, and no value is taken from it: {error}"
            hardware = BenchmarkHardware()
            return BenchmarkJudgement(
                tool=self.report_of, file=self.name, outcome=Outcome.UNJUDGED, hardware=hardware, notes=(note,)
            )
        if nvbandwidth_output.is_report(document):
            return judge_nvbandwidth.judge_output(nvbandwidth_output.parse_json(document), options, self.name, site)
        if nccl_tests_json.is_report(document):
            output = nccl_tests_json.parse(document)
            return judge_nccl_tests.judge_output(output, options, self.name, operation, site)
        raise UsageError(f"{self.name} is JSON of another program; {_EXPECTED}")

    def _judge_text(self, options: HardwareOptions, operation: str, site: Baseline | None) -> BenchmarkJudgement:
        tables, matrices = nccl_tests_output.NcclTestsOutput(), nvbandwidth_output.NvbandwidthOutput()
        for line in self._lines():  # the log of a job may have the output of both tools
            tables.read(line)
            if "NCCL" not in line:  # most lines of a large log have it; nvbandwidth does not use NCCL
                matrices.read(line)
        judgements, output, bandwidths = [], tables.finish(), matrices.finish()
        if output.is_nccl_tests:
            judgements.append(judge_nccl_tests.judge_output(output, options, self.name, operation, site))
        if bandwidths.is_nvbandwidth:
            judgements.append(judge_nvbandwidth.judge_output(bandwidths, options, self.name, site))
        if not judgements:
            raise UsageError(f"{self.name} has no results of nccl-tests or nvbandwidth; {_EXPECTED}")
        return _combined(judgements)

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the text; a line above _MAX_LINE characters comes in pieces."""
        length = 0
        with io.TextIOWrapper(cast(Any, self.stream), encoding=self.encoding, errors="replace") as text:
            while line := text.readline(_MAX_LINE):
                length += max(len(line), _MIN_LINE)
                if length > _MAX_TEXT:
                    limit = f"the limit of {_MAX_TEXT} characters, where a line counts as at least {_MIN_LINE}"
                    raise UsageError(f"{self.name} is larger than {limit}")
                yield line


def _combined(judgements: Sequence[BenchmarkJudgement]) -> BenchmarkJudgement:
    """The judgements on one file as one, with the hardware of the first."""
    return judgements[0].model_copy(
        update={
            "tool": " and ".join(judgement.tool for judgement in judgements),
            "outcome": worst(judgement.outcome for judgement in judgements),
            "contradictions": tuple(text for judgement in judgements for text in judgement.contradictions),
            "notes": tuple(dict.fromkeys(note for judgement in judgements for note in judgement.notes)),
            "results": tuple(result for judgement in judgements for result in judgement.results),
        }
    )


def open_benchmark(path: Path) -> BenchmarkFile | None:
    """Return the output of a benchmark; None for a record of seatrial, a folder, and a file that open() refuses.

    ``-`` is standard input. If the result is None, the caller calls load_trial, which reads the record or reports the
    error. All text that is not JSON is accepted: ``BenchmarkFile.judge`` finds out which program wrote it.

    Raises UsageError for a binary file and for an error while reading. JSON of another program in a file may be a
    record, so the result is None; on standard input it is a UsageError.
    """
    is_stdin = path == STDIN
    name = "standard input" if is_stdin else str(path)
    if is_stdin and sys.stdin is None:  # Python's value for a closed stream
        raise UsageError(f"{name} is closed")
    if not is_stdin and is_folder(path):
        return None
    try:
        file = cast(BinaryIO, sys.stdin.buffer if is_stdin else open_file(path, pipes=True))
    except OSError:
        return None
    try:
        stream: Any = io.BufferedReader(HeadThenRest(with_limit(file, name, is_stdin=is_stdin)))
        if stream.peek(2)[:2] == GZIP_MAGIC:
            stream = LimitedGzip(stream, name)
        head = stream.read(_HEAD_BYTES)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UsageError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from error
    is_utf16, report = head.startswith(_UTF16_MARKS), _JSON_REPORT.match(head)
    if b"\0" in head and not is_utf16:
        raise UsageError(f"{name} is a binary file; {_EXPECTED}")
    if head.lstrip().startswith(b"{") and not report:
        if is_stdin:
            raise UsageError(
                f"{name} is not JSON of nccl-tests or nvbandwidth; {_EXPECTED}. A record of seatrial cannot be read "
                "from standard input: use the path of trial.json or of the run directory"
            )
        return None
    whole = cast(BinaryIO, io.BufferedReader(HeadThenRest(stream, head)))
    report_of = "" if not report else "nvbandwidth" if report[1] else "nccl-tests"
    return BenchmarkFile(name, whole, "utf-16" if is_utf16 else "utf-8", report_of)
