"""Signatures of any error of a kind: reported if no signature names the cause of the line."""

from __future__ import annotations

import io
import time
from pathlib import Path

from seatrial.diagnose import explain
from seatrial.diagnose.log_search import search
from seatrial.diagnose.signatures import all_signatures, signatures

GENERAL = [signature for signature in all_signatures() if signature.role == "general"]
HEALTHY = """
WARNING: skipped a sample: KeyError: 'text'
INFO retry 1 of 5 after ConnectionError: timed out
except ValueError: pass
errors: 0, RuntimeError: 0
[rank0]: step 10 loss 2.1
Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f3a>
2026-05-10T10:00:00Z stderr F INFO no error
""".strip().splitlines()


def ids(text: str) -> list[str]:
    return [finding.signature for finding in explain(search(io.BytesIO(text.encode()), "x"))]


def test_example_matches_one_general_signature() -> None:
    assert GENERAL
    started = time.process_time()
    for signature in GENERAL:
        assert not signature.nested_repeat()
        for example in signature.examples:
            assert [each.id for each in GENERAL if each.matches(example)] == [signature.id], example
        for line in (*signature.counter_examples, *HEALTHY, "a." * 10**5, "[a]: " * 10**5, "Error" * 10**5):
            assert not signature.matches(line), (signature.id, line[:80])
    assert time.process_time() - started < 2


def test_general_error_gives_way_to_a_cause_and_comes_before_its_consequences() -> None:
    error = "[rank0]: ValueError: not enough values to unpack"
    cascade = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
    assert ids(f"{error}\n{cascade}\n") == ["exception.value"]
    assert ids(f"{error}\n{cascade}\nOSError: [Errno 24] Too many open files\n") == ["host.too_many_files"]
    assert ids("RuntimeError: Pin memory thread exited unexpectedly\n") == ["data.pin_memory"]
    (finding,) = explain(search(io.BytesIO(error.encode()), "x"))
    assert (finding.confidence, finding.subject) == ("low", "rank 0")


def test_line_prefixes() -> None:
    prefixes = (
        "[rank3]: ",
        "(Worker_TP0 pid=12) ",
        "0: ",
        "[1,0]<stderr>:",
        "2026-05-10T10:00:00.123456789Z stderr F ",
    )
    for prefix in ("", *prefixes):
        assert ids(f"{prefix}json.decoder.JSONDecodeError: Expecting value\n") == ["exception.json"], prefix


def test_general_signatures_are_not_among_the_causes() -> None:
    assert not {signature.id for signature in GENERAL} & {signature.id for signature in signatures()}


def test_warnings_of_tools_in_healthy_jobs_are_no_failures() -> None:
    path = Path(__file__).parent.parent / "fixtures" / "healthy-tool-output.log"
    with path.open("rb") as log:
        assert [match.signature.id for match in search(log, "x")] == []
