from __future__ import annotations

import pytest

from seatrial.discover.slurm_messages import (
    SlurmMessage,
    first_commands,
    first_match,
    is_permanent_pending_reason,
    messages,
)

LISTS = (messages().unreachable, messages().refused, messages().reasons)


@pytest.mark.parametrize(("entries", "entry"), [(entries, entry) for entries in LISTS for entry in entries])
def test_each_entry_is_the_first_to_match_its_example(entries: tuple[SlurmMessage, ...], entry: SlurmMessage) -> None:
    assert first_match(entries, entry.example) is entry


def test_an_unlisted_message_has_no_match() -> None:
    assert first_match(messages().refused, "sbatch: error: out of paper") is None


POLICY = (
    "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    ("message", "transient"),
    [
        (f"QOSMaxSubmitJobPerUserLimit; {POLICY}", True),
        (f"AssocMaxSubmitJobLimit; {POLICY}", True),
        (f"AssocGrpSubmitJobsLimit; {POLICY}", True),
        (POLICY, True),
        ("Batch job submission failed: Resource temporarily unavailable", True),
        ("Slurm temporarily unable to accept job, sleeping and retrying", True),
        (f"QOSMaxWallDurationPerJobLimit; {POLICY}", False),
        (f"AssocMaxNodePerJobLimit; {POLICY}", False),
        ("Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)", False),
        ("Batch job submission failed: Invalid partition name specified", False),
        ("Batch job submission failed: Invalid account or account/partition combination specified", False),
    ],
)
def test_a_refusal_is_transient_if_the_same_job_may_be_accepted_later(message: str, transient: bool) -> None:
    match = first_match(messages().refused, message)
    assert match
    assert match.transient is transient


@pytest.mark.parametrize(
    ("reason", "permanent"),
    [
        ("PartitionTimeLimit", True),
        ("QOSMaxNodePerJobLimit", True),
        ("launch failed requeued held", True),
        ("JobHeldAdmin, Resources", True),
        ("QOSMaxJobsPerUserLimit", False),
        ("Resources", False),
        ("", False),
    ],
)
def test_permanent_pending_reasons(reason: str, permanent: bool) -> None:
    assert is_permanent_pending_reason(reason) is permanent


def test_the_first_command_has_the_job_id() -> None:
    assert first_commands("7", "JobHeldUser") == "scontrol show job 7; scontrol release 7, or scancel 7"
    assert first_commands("7", "Prolog") == "scontrol show job 7"
