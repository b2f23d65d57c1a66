"""The JUnit XML report."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.model import Outcome, Trial, Verdict
from seatrial.report.junit import MAX_SUBJECTS, render
from tests.report import samples
from tests.report.conftest import assert_golden


def with_verdicts(*outcomes: Outcome, reason: str = "because") -> Trial:
    verdicts = tuple(
        Verdict(check="train.cnn", subject="node1/gpu0", metric=f"m{number}", outcome=outcome, detail=reason)
        for number, outcome in enumerate(outcomes)
    )
    return samples.accepted().model_copy(update={"verdicts": verdicts, "measurements": (), "jobs": ()})


def single_case(trial: Trial) -> ET.Element:
    (case,) = ET.fromstring(render(trial)).iter("testcase")
    return case


def test_golden() -> None:
    assert_golden("report-rejected.junit.xml", render(samples.rejected()))


@pytest.mark.parametrize(
    ("outcome", "tag", "kind"),
    [
        (Outcome.FAIL, "failure", "FAIL"),
        (Outcome.ERROR, "error", "ERROR"),
        (Outcome.UNJUDGED, "error", "UNJUDGED"),
        (Outcome.SKIP, "skipped", None),
    ],
)
def test_tags_of_outcomes_other_than_pass_and_warn(outcome: Outcome, tag: str, kind: str | None) -> None:
    case = single_case(with_verdicts(outcome))
    assert [child.tag for child in case] == [tag]
    assert (case[0].get("type"), case[0].get("message")) == (kind, "because")


def test_a_warning_passes_with_its_text_in_system_out() -> None:
    case = single_case(with_verdicts(Outcome.WARN))
    assert [(child.tag, child.text) for child in case] == [("system-out", "WARN m0: because")]


def test_a_case_has_its_worst_outcome_and_the_text_of_all_others() -> None:
    case = single_case(with_verdicts(Outcome.PASS, Outcome.SKIP, Outcome.WARN, Outcome.FAIL))
    assert [child.tag for child in case] == ["failure"]
    assert case[0].text == "FAIL m3: because\n\nWARN m2: because\n\nSKIP m1: because"


def test_a_case_with_pass_and_skip_is_not_skipped() -> None:
    assert single_case(with_verdicts(Outcome.PASS, Outcome.SKIP)).find("skipped") is None


@pytest.mark.parametrize("sample", samples.SAMPLES)
def test_totals_are_the_numbers_of_cases(sample: str) -> None:
    root = ET.fromstring(render(samples.SAMPLES[sample]()))
    for element in [root, *root.iter("testsuite")]:
        for attribute, path in (("tests", ""), ("failures", "/failure"), ("errors", "/error"), ("skipped", "/skipped")):
            assert int(element.attrib[attribute]) == len(element.findall(f".//testcase{path}"))


def test_an_excluded_check_is_skipped() -> None:
    root = ET.fromstring(render(samples.rejected()))
    skipped = root.find("testsuite[@name='train.ddp']/testcase/skipped")
    assert skipped is not None
    assert skipped.get("message") == "excluded: --skip"


def test_a_planned_check_without_a_verdict_is_an_error() -> None:
    trial = samples.accepted().model_copy(update={"verdicts": (), "measurements": ()})
    errors = ET.fromstring(render(trial)).findall("testsuite/testcase/error")
    assert [error.get("type") for error in errors] == ["UNJUDGED"] * 5


def test_of_many_subjects_those_without_a_problem_are_one_case() -> None:
    trial = with_verdicts(Outcome.FAIL)
    passed = [replace(trial.verdicts[0], subject=f"n{n}", outcome=Outcome.PASS) for n in range(MAX_SUBJECTS)]
    cases = ET.fromstring(render(trial.model_copy(update={"verdicts": (*trial.verdicts, *passed)}))).iter("testcase")
    assert [case.get("name") for case in cases] == [f"{MAX_SUBJECTS} subjects without a problem", "node1/gpu0"]


def test_hostile_text_is_escaped() -> None:
    root = ET.fromstring(render(samples.hostile()))
    text = "".join(root.itertext())
    assert "<script>alert(1)</script>" in text
    assert "]]>" in text


@given(st.text())
def test_any_text_is_well_formed(text: str) -> None:
    trial = with_verdicts(Outcome.FAIL, Outcome.WARN)
    verdict = replace(trial.verdicts[0], subject=text, metric=text, detail=text, evidence=text, fix=text)
    ET.fromstring(render(trial.model_copy(update={"verdicts": (verdict,), "excluded_checks": {text: text}})).encode())
