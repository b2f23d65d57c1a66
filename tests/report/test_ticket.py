"""The ticket for the vendor."""

from __future__ import annotations

import pytest

from seatrial.model import UsageError
from seatrial.report.ticket import render
from tests.report import samples


@pytest.mark.parametrize("sample", ["rejected", "incomplete", "hostile", "large_cluster", "four_nodes"])
def test_a_ticket_of_any_trial_is_plain_text(sample: str) -> None:
    text = render(samples.SAMPLES[sample]())
    assert "Serial:" in text or not text.startswith("GPU ")
    assert all(character.isprintable() or character in "\n\t" for character in text)


def test_addresses_and_directories_of_users_are_removed() -> None:
    trial = samples.rejected()
    finding = trial.findings[0].model_copy(update={"evidence": "ann@example.org read /home/ann/key on 10.0.7.13"})
    text = render(trial.model_copy(update={"findings": (finding,)}), "node2/gpu2")
    assert "[removed] read [removed] on [removed]" in text
    assert "ann" not in text.partition("Cause")[2].partition("Passed")[0]


def test_a_healthy_trial_has_no_ticket() -> None:
    passed = samples.accepted().model_copy(update={"verdicts": (), "findings": ()})
    with pytest.raises(UsageError, match="ACCEPTED"):
        render(passed)
