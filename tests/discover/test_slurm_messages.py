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
