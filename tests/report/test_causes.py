"""The causes in all reports: the verdicts that they explain are shown once, below their cause."""

from __future__ import annotations

from seatrial.model import Finding, Outcome, Reason, Trial, Verdict, VerdictKey
from seatrial.report import html_page, junit, markdown
from seatrial.report.causes import cause_text, causes
from seatrial.report.view import problems
from tests.report import samples


def fail(check: str, subject: str, metric: str) -> Verdict:
    return Verdict(check, subject, Outcome.FAIL, metric, (Reason.THRESHOLD_VIOLATED,), value=1, unit="GB/s")


VERDICTS = (
    fail("device.memory", "n/gpu0", "copy"),
    fail("device.memory", "n/gpu1", "copy"),
    fail("collectives.all_reduce", "cluster", "busbw.8GiB"),
)


def cause(title: str, *verdicts: Verdict) -> Finding:
    explains = tuple(map(VerdictKey.from_verdict, verdicts))
    return Finding(title=title, subject="n/gpu1", confidence="high", evidence="PID 7", cause="c", explains=explains)


def trial(*findings: Finding) -> Trial:
    return samples.rejected().model_copy(update={"verdicts": VERDICTS, "findings": findings})


BUSY, CABLE = cause("GPU busy", *VERDICTS[1:]), cause("bad cable", VERDICTS[2])


def test_verdicts_are_shown_below_their_first_cause_only() -> None:
    first, second = causes(trial(BUSY, CABLE))
    assert [group.first for group in first.groups] == list(VERDICTS[1:])
    assert (first.explained_earlier, second.groups, second.explained_earlier) == (0, (), 1)
    (rest,) = problems(trial(BUSY, CABLE))
    assert rest.verdicts == VERDICTS[:1]


def test_text_counts_the_explained_failures() -> None:
    assert cause_text(trial(BUSY, CABLE)) == "GPU busy on n/gpu1 (2 of 3 failures)"
    assert cause_text(trial()) == ""


def test_text_names_the_place_once() -> None:
    assert cause_text(trial(cause("n/gpu1 is slow", *VERDICTS[1:]))) == "n/gpu1 is slow (2 of 3 failures)"


def test_pages_have_causes_before_other_problems() -> None:
    page = html_page.render(trial(BUSY))
    assert page.index('id="causes"') < page.index("GPU busy</b>") < page.index('id="attention"') < page.index("n/gpu0")
    text = markdown.render(trial(BUSY))
    assert text.index("### Causes") < text.index("explains FAIL") < text.index("### FAIL")
    assert text.index("### Not explained by a cause") < text.index("### FAIL")
    assert 'id="causes"' not in html_page.render(trial())
    assert "### Not explained" not in markdown.render(trial())


def test_two_verdicts_on_one_metric_are_both_shown() -> None:
    by_trial = Verdict("device.memory", "n/gpu1", Outcome.FAIL, "copy", (Reason.BELOW_PEERS,), value=1, unit="GB/s")
    both = trial(BUSY).model_copy(update={"verdicts": (*VERDICTS, by_trial)})
    (view,) = causes(both)
    assert by_trial in [verdict for group in view.groups for verdict in group.verdicts]
    assert all(by_trial not in group.verdicts for group in problems(both))


def test_junit_names_the_cause_of_each_failure_or_says_that_it_is_unexplained() -> None:
    text = junit.render(trial(BUSY))
    assert text.count("cause: GPU busy on n/gpu1 (high confidence)") == 2
    assert text.count("cause: unexplained") == 4  # with three checks that have no verdict
    assert "cause:" not in junit.render(trial())
