"""Which finding comes first: causes before consequences, facts of the log, places, errors that no signature knows."""

from __future__ import annotations

import io

import pytest

from seatrial.diagnose import error_lines, explain
from seatrial.diagnose.log_origin import LogOrigins
from seatrial.diagnose.log_search import search
from seatrial.diagnose.signature import Match
from seatrial.model import Finding

FALLEN_OFF = "NVRM: Xid (PCI:0000:{}:00): 79, pid=1, GPU has fallen off the bus."
PREEMPTED = "NVRM: Xid (PCI:0000:{}:00): 45, pid=7, name=python, Ch 00000001"
VIRTUAL_GPU = "GPU 0: GRID A100DX-1-20C (UUID: GPU-00000000-0000-0000-0000-000000000001)"
NOT_SUPPORTED = "pod-a:86:143 [0] init.cc:426 NCCL WARN Cuda failure 'operation not supported'"
INTERNAL_ERROR = "[rank3]: ncclInternalError: Internal check failed."
UNKNOWN_WARNING = "n0:1:2 [3] flux.cc:7 NCCL WARN Flux capacitor 7 is inverted"


def found(*lines: str) -> tuple[Finding, ...]:
    origins = LogOrigins()
    return explain(search(io.BytesIO("\n".join(lines).encode()), "x", origins=origins), origins)


def matches(*lines: str) -> list[Match]:
    return list(search(io.BytesIO("\n".join(lines).encode()), "x"))


def test_consequence_is_hidden_by_a_cause_of_its_own_device_only() -> None:
    same = found(FALLEN_OFF.format("3b"), PREEMPTED.format("3b"))
    assert [finding.signature for finding in same] == ["xid.79"]
    other = found(FALLEN_OFF.format("3b"), PREEMPTED.format("5e"))
    assert [(finding.signature, finding.subject) for finding in other] == [
        ("xid.79", "PCI 0000:3b:00"),
        ("xid.45", "PCI 0000:5e:00"),
    ]


def test_one_failure_of_many_devices_is_one_finding_that_names_them() -> None:
    (finding,) = found(*(FALLEN_OFF.format(f"{bus:02x}") for bus in (1, 2, 2, 3)))
    assert finding.subject == "PCI 0000:01:00, PCI 0000:02:00, PCI 0000:03:00"
    (finding,) = found(*(FALLEN_OFF.format(f"{bus:02x}") for bus in range(99)))
    assert finding.subject.endswith("and 10 more")


@pytest.mark.parametrize("lines", [(VIRTUAL_GPU, NOT_SUPPORTED), (NOT_SUPPORTED, VIRTUAL_GPU)])
def test_facts_anywhere_in_the_log_decide(lines: tuple[str, ...]) -> None:
    assert found(*lines)[0].signature == "cuda.virtual_gpu"
    assert "cuda.virtual_gpu" not in [finding.signature for finding in found(NOT_SUPPORTED)]


def test_error_that_no_signature_knows_stands_above_a_consequence() -> None:
    first, second = found(UNKNOWN_WARNING, INTERNAL_ERROR)
    assert (first.signature, first.confidence, first.first_command) == ("", "low", "")
    assert "Flux capacitor 7" in first.title
    assert (second.signature, second.confidence) == ("nccl.internal_error", "low")
    (alone,) = found(INTERNAL_ERROR)
    assert alone.confidence == "low"
    (after,) = found(INTERNAL_ERROR, UNKNOWN_WARNING)
    assert after.signature == "nccl.internal_error"


def test_error_of_another_rank_stays_below() -> None:
    first = found("[rank1]: odd error: flux", "[rank3]: ncclInternalError: Internal check failed.")[0]
    assert first.signature == "nccl.internal_error"


def test_known_cause_hides_unknown_errors() -> None:
    (finding,) = found(UNKNOWN_WARNING, "torch.OutOfMemoryError: CUDA out of memory.")
    assert finding.signature == "cuda.out_of_memory"


@pytest.mark.parametrize(
    ("path", "library"),
    [
        ("/opt/venv/lib/python3.12/site-packages/trl/x.py", " in trl"),
        ("/workspace/Megatron-LM/megatron/core/x.py", " in megatron"),
        ("/opt/venv/lib/python3.12/site-packages/ray/_private/worker.py", " in torch"),
        ("/home/user/x.py", " in torch"),
    ],
)
@pytest.mark.parametrize("message", ["the sample is empty", "tokens must be positive"], ids=["general", "family"])
def test_exception_names_the_library_that_raised_it_and_its_message(path: str, library: str, message: str) -> None:
    frame = '  File "{}", line 7, in f'
    (finding,) = found(
        "Traceback (most recent call last):",
        frame.format("/opt/venv/lib/python3.12/site-packages/torch/x.py"),
        frame.format(path),
        f"[rank3]: ValueError: {message}",
    )
    assert finding.title.endswith(f'{library}: "{message}"')


@pytest.mark.parametrize(
    ("line", "title"),
    [
        (
            "ValueError: Please specify `target_modules` in `peft_config`",
            "PEFT cannot apply or load the adapter (target_modules): "
            '"Please specify `target_modules` in `peft_config`"',
        ),
        (
            'srun: error: Invalid numeric value "" for --ntasks.',
            'A command of Slurm refuses an option or its value (--ntasks): "Invalid numeric value "" for --ntasks."',
        ),
        (
            "slurmd: error: Couldn't find the specified plugin name for mpi/pmix_v9",
            "Slurm cannot load a plug-in (plugin mpi/pmix_v9): "
            '"Couldn\'t find the specified plugin name for mpi/pmix_v9"',
        ),
        ("ModuleNotFoundError: No module named 'vllm'", "A Python package is missing: vllm"),
    ],
)
def test_title_names_the_option_and_quotes_the_message(line: str, title: str) -> None:
    assert found(line)[0].title == title


@pytest.mark.parametrize(
    ("world", "has_slurm"),
    [("[pod/train-0/main] x", False), ("srun: x", True), ("", True)],
    ids=["pod", "srun", "none"],
)
def test_commands_are_of_the_world_of_the_log(world: str, has_slurm: bool) -> None:
    (finding,) = found(world, "  Remote daemon: [[43015,0],20] on node worker-19")
    assert ("sacct" in finding.first_command) is has_slurm


@pytest.mark.parametrize(
    ("line", "is_error"),
    [
        ("[ERROR] flux capacitor", True),
        ("level=fatal msg=x", True),
        ("flux_error: empty", True),
        ("flux step 3 failed", True),
        ("n0:1:2 [0] NCCL WARN odd thing", True),
        ("exit status: 0", False),
        ("0 failed, 12 passed", False),
        ("failed=0", False),
        ("errors per second: 0", False),
        ("INFO: flux error 3", False),
        ('[rank3]:     raise FluxError("flux error: empty")', False),
    ],
)
def test_lines_that_look_like_errors(line: str, is_error: bool) -> None:
    lines = error_lines(matches("fine", line), LogOrigins())
    assert [match.line for match in lines] == ([line] if is_error else [])


def test_equal_error_lines_count_once() -> None:
    lines = [f"odd error {number} at 0x{number:x}" for number in range(999)]
    assert len(error_lines(matches(*lines, *(f"{chr(97 + n)} error" for n in range(26))), LogOrigins())) == 20


@pytest.mark.parametrize(
    ("line", "signature", "confidence"),
    [
        ("It looks like MPI_INIT failed for some reason; your parallel process is", "mpi.init_failed", "low"),
        ("NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.", "xid.79", "medium"),
        ("slurmd: error: Invalid GRES data for gpu, Cores=0-63", "slurmd.gres_file_invalid", "low"),
    ],
)
def test_confidence_is_low_where_only_the_line_says_why(line: str, signature: str, confidence: str) -> None:
    (finding,) = found(line)
    assert (finding.signature, finding.confidence) == (signature, confidence)
