"""Every entry of data/slurm_messages.yaml is reached, by its own example."""

from __future__ import annotations

import pytest

from seatrial.discover.slurm_messages import Message, first_commands, first_match, is_permanent_pending_reason, messages

LISTS = (messages().unreachable, messages().refused, messages().reasons)


@pytest.mark.parametrize(("entries", "entry"), [(entries, entry) for entries in LISTS for entry in entries])
def test_each_entry_is_the_first_to_match_its_example(entries: tuple[Message, ...], entry: Message) -> None:
    assert first_match(entries, entry.example) is entry


def test_a_message_that_is_not_listed_has_no_meaning() -> None:
    assert first_match(messages().refused, "sbatch: error: out of paper") is None


@pytest.mark.parametrize(
    ("reason", "never"),
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
def test_which_reasons_waiting_does_not_change(reason: str, never: bool) -> None:
    assert is_permanent_pending_reason(reason) is never


def test_the_first_command_names_the_job() -> None:
    assert first_commands("7", "JobHeldUser") == "scontrol show job 7; scontrol release 7, or scancel 7"
    assert first_commands("7", "Prolog") == "scontrol show job 7"
