"""Causes and environment variables as data: the checks, metrics and signatures in them exist."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest

from seatrial.checks import catalog
from seatrial.checks.cause import Cause
from seatrial.diagnose.cause_data import causes
from seatrial.discover.environment_variables import variables


@pytest.mark.parametrize("cause", causes(), ids=lambda cause: cause.id)
def test_cause_names_checks_and_metrics_that_exist(cause: Cause) -> None:
    for pattern, metrics in cause.evidence.items():
        checks = [check for name, check in catalog().items() if fnmatchcase(name, pattern)]
        assert checks, pattern
        for metric in metrics:
            declared = any(
                fnmatchcase(metric, name) or fnmatchcase(name, metric) for check in checks for name in check.units
            )
            assert declared or metric.startswith("new_errors."), metric
    assert all(
        any(fnmatchcase(name, pattern) for name in catalog()) for pattern in cause.explains if pattern != "fabric.*"
    )
    assert not re.findall(
        r"\{(?!gpu\}|node\}|port\}|paths\}|names\}|namespace\}|pod\})",
        re.sub(r"\{[a-z]+,|awk '.*'", "", cause.first_command),
    )
    assert len({other.id for other in causes()}) == len(causes())


@pytest.mark.parametrize("cause", causes(), ids=lambda cause: cause.id)
def test_cause_has_metrics_or_a_message_as_evidence(cause: Cause) -> None:
    assert bool(cause.evidence) is not bool(cause.message)
    assert cause.evidence or not cause.explained_by_job_failure
    assert cause.title
    assert cause.fix


def test_variables_have_a_default_and_an_effect() -> None:
    assert len(variables()) >= 50
    for name, variable in variables().items():
        assert re.fullmatch(r"[A-Z][A-Z0-9_]+", name)
        assert not re.search(r"\.$", variable.effect)
        assert any(fnmatchcase(check, pattern) for pattern in variable.explains for check in catalog())
        re.compile(variable.harmless)


def test_causes_of_causes_exist() -> None:
    names = {cause.id for cause in causes()} | {"node_differs"} | set(variables())
    by_id = {cause.id: cause for cause in causes()}
    for cause in causes():
        assert set(cause.consequence_of) <= names
        assert cause.id not in cause.consequence_of
        # a cause that is folded under another one must not hide its own consequence
        for name in cause.consequence_of:
            assert name not in by_id or set(by_id[name].consequence_of) <= set(cause.consequence_of), cause.id
