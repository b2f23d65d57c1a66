"""Rates of pairs: invalid rates, and ratios of rates."""

from __future__ import annotations

from math import log

import pytest
from pydantic import ValidationError

from seatrial.hardware.pair_rates import GPU_LIMITS, PairRate, log_ratio


def test_names_of_a_pair_are_in_alphabetical_order() -> None:
    assert PairRate(stage="rounds", first="n2", second="n1", gb_s=(1.0,)).pair == ("n1", "n2")


@pytest.mark.parametrize("changes", [{"second": "n1"}, {"gb_s": ()}, {"gb_s": (-1.0,)}, {"gb_s": (float("nan"),)}])
def test_invalid_rates_are_rejected(changes: dict[str, object]) -> None:
    good: dict[str, object] = {"stage": "rounds", "first": "n1", "second": "n2", "gb_s": (1.0,)}
    PairRate.model_validate(good)
    with pytest.raises(ValidationError):
        PairRate.model_validate(good | changes)


def test_ratio_of_a_rate_of_zero_is_finite() -> None:
    assert log_ratio(0, 48) == pytest.approx(log(1e-6))
    assert log_ratio(1, 0) == 0
    assert GPU_LIMITS.log_deficit == pytest.approx(-log(0.975))
