"""Signatures of any error of a kind: reported if no signature names the cause of the line."""

from __future__ import annotations

import io
import time
from pathlib import Path

from seatrial.diagnose import explain
from seatrial.diagnose.log_search import search
from seatrial.diagnose.signatures import all_signatures, signatures

GENERAL = [signature for signature in all_signatures() if signature.role == "general"]
EXCEPTIONS = [signature for signature in GENERAL if signature.id.startswith("exception.")]
FAMILIES = [signature for signature in all_signatures() if signature.role == "family"]
FIXTURES = Path(__file__).parent.parent / "fixtures"
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


def test_first_signature_of_an_example_is_its_own() -> None:
    """The first one that matches a line is reported, so that a narrow reason comes before a wide one."""
    assert GENERAL
    assert FAMILIES
    for role in (FAMILIES, GENERAL):
        for signature in role:
            assert not signature.nested_repeat()
            for example in signature.examples:
                assert next(each.id for each in role if each.matches(example)) == signature.id, example
            for line in signature.counter_examples:
                assert not signature.matches(line), (signature.id, line)
    for signature in EXCEPTIONS:
        for example in signature.examples:
            assert [each.id for each in EXCEPTIONS if each.matches(example)] == [signature.id], example
        for line in HEALTHY:
            assert not signature.matches(line), (signature.id, line)


def test_examples_of_families_are_reported() -> None:
    """As the only line of a log: no healthy line, and named by the family or by a signature of role root."""
    for signature in (*FAMILIES, *GENERAL):
        for example in signature.examples:
            found = [match.signature for match in search(io.BytesIO(f"{example}\n".encode()), "x")]
            assert signature in found or any(each.role != "general" for each in found), (signature.id, example)


def test_long_lines_are_matched_quickly() -> None:
    lines = (
        "a." * 10**5,
        "[a]: " * 10**5,
        "Error" * 10**5,
        "/a" * 10**5,
        "failed to " * 10**5,
        "error: invalid " * 10**4,
    )
    for signature in (*FAMILIES, *GENERAL):
        started = time.process_time()
        for line in lines:
            signature.matches(line)
        assert time.process_time() - started < 0.5, signature.id


def test_general_error_gives_way_to_a_cause_and_comes_before_its_consequences() -> None:
    error = "[rank0]: ValueError: the sample is empty"
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


def test_family_names_the_reason_of_a_line_before_its_exception() -> None:
    line = "NotADirectoryError: [Errno 20] /data/a: Not a directory"
    assert ids(f"{line}\nRuntimeError: no data\n") == ["file.kind"]
    (finding,) = explain(search(io.BytesIO(line.encode()), "x"))
    assert (finding.confidence, finding.first_command.split("; ")[0]) == ("low", "namei -l /data/a")
    assert ids(f"{line}\ntorch.OutOfMemoryError: CUDA out of memory.\n") == ["cuda.out_of_memory"]


def test_first_family_comes_first() -> None:
    lines = "cp: cannot stat '/nfs/x': Stale file handle\ncat: /data/a: No such file or directory\n"
    assert ids(lines) == ["storage.stale_handle"]
    lines = "error: write /sys/fs/x: Invalid argument\nerror: /data/a: No such file or directory\n"
    assert ids(lines) == ["file.invalid_argument", "file.missing"]


def test_reason_comes_before_the_step_that_failed() -> None:
    step = "FATAL:   container creation failed: while starting: "
    assert ids(f"{step}something odd\n") == ["containers.apptainer"]
    reason = f"{step}open /a/x: file name too long\n"
    assert ids(reason) == ["file.kind", "containers.apptainer"]
    root = "torch.OutOfMemoryError: CUDA out of memory.\n"
    assert ids(f"{reason}{root}") == ["cuda.out_of_memory", "containers.apptainer"]


def test_consequence_hides_its_own_text_only() -> None:
    assert ids("node0:1:2 [0] NCCL WARN Cuda failure 'out of memory'\nBroken pipe\n") == ids(
        "node0:1:2 [0] NCCL WARN Cuda failure 'out of memory'\n"
    )


def test_command_has_only_parts_whose_values_are_known() -> None:
    (finding,) = explain(search(io.BytesIO(b"error: open failed: Permission denied\n"), "x"))
    assert finding.first_command == "id"
    (finding,) = explain(search(io.BytesIO(b"cat: /etc/a b: Permission denied\n"), "x"))
    assert "''" not in finding.first_command


def test_lines_of_healthy_programs_have_no_family() -> None:
    for name in ("healthy-retries-and-probes.log", "healthy-tool-output.log"):
        for line in (FIXTURES / name).read_bytes().splitlines():
            found = [match.signature for match in search(io.BytesIO(line + b"\n"), "x")]
            assert [each.id for each in found if each.role in ("family", "general", "step")] == [], line
    assert [ids(line) for line in HEALTHY] == [[]] * len(HEALTHY)


def test_warnings_of_tools_in_healthy_jobs_are_no_failures() -> None:
    with (FIXTURES / "healthy-tool-output.log").open("rb") as log:
        assert [finding.signature for finding in explain(search(log, "x"))] == []
