"""Mutations of accepted records: lost evidence never ends ACCEPTED, and nothing but UsageError is raised.

The examples are the same in each run. A record that is not valid is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from benchmarks.mutations import QUICK, hidden_mutations
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tools.records import record_path

from seatrial.model import DecisionValue
from tests.pipeline.mutations import KINDS, Record, decision, evidence, judged, lost_or_bad, mutations


def bounded(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """The quick trial, which is judged in a tenth of the time, seven times as often as the acceptance."""
    quick, acceptance = (
        Record.load(record_path(f"2026-11-22-2xh200-restructured/final-{name}")) for name in ("quick", "acceptance")
    )
    assert quick.judged.decision.value is acceptance.judged.decision.value is DecisionValue.ACCEPTED
    return [*[quick] * 7, acceptance]


@pytest.mark.parametrize(("count", "examples"), [(1, 70), (2, 40)])
def test_accepted_after_any_mutation_only_with_all_evidence(records: list[Record], count: int, examples: int) -> None:
    outcomes: Counter[tuple[str, str]] = Counter()

    @bounded(examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        record = records[data.draw(st.integers(0, len(records) - 1))]
        document, kind = record.document, ""
        for _ in range(count):
            kind, document = data.draw(mutations(document))
        trial = judged(document)
        value = trial.decision.value.value if trial else "refused"
        outcomes[kind, value] += 1
        if trial and trial.decision.value is DecisionValue.ACCEPTED:
            required = {name for name, setting in trial.config["checks"].items() if setting.get("required", True)}
            lost = evidence(record.judged) - evidence(trial)
            assert not {item for item in lost if item[0] in required}

    check()
    assert len({kind for kind, _ in outcomes}) > len(KINDS) / 2
    values = Counter[str]()
    for (_, value), number in outcomes.items():
        values[value] += number
    assert min(values[value] for value in ("ACCEPTED", "INCOMPLETE", "refused")) > examples / 20, values


def test_lost_evidence_and_bad_values_are_never_accepted(records: list[Record]) -> None:
    outcomes: Counter[tuple[str, str]] = Counter()

    @bounded(3)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        record = records[data.draw(st.integers(0, len(records) - 2))]
        kinds = lost_or_bad(record, *record.good_metrics[data.draw(st.integers(0, len(record.good_metrics) - 1))])
        for kind, document in kinds.items():
            value = decision(document)
            outcomes[kind, value] += 1
            assert value != "ACCEPTED", kind

    check()
    assert len({kind for kind, _ in outcomes}) >= 20, outcomes
    assert all(value != "refused" or kind.startswith("value is") for kind, value in outcomes)


def test_no_lost_value_fact_or_identity_is_hidden() -> None:
    assert not [*hidden_mutations(60, 1, QUICK[:2])]
    assert not [*hidden_mutations(12, 2, QUICK[:1], ("one UUID", "values of a rank"))]
