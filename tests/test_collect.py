"""What a running trial says of a check the moment it has been measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.collect import Collected
from seatrial.model import Limit, Measurement, Metric, Outcome
from seatrial.rundir import Request, RunDir
from seatrial.settings import CheckSettings, Config
from tests.test_trial import Quiet


class Heard(Quiet):
    """Somebody watches."""

    def judged(self, check: str, outcome: Outcome, reason: str, seconds: float) -> None:
        self.told = reason


@pytest.mark.parametrize(("retry", "words"), [(True, ""), (False, "; not repeated")])
def test_a_figure_that_is_to_be_measured_again_is_not_called_unrepeated(
    tmp_path: Path, retry: bool, words: str
) -> None:
    asked = CheckSettings(expect={"busbw.1GiB": Limit.parse("> 350 GB/s")})
    config = Config(name="t", retry=retry, checks={"collectives.all_reduce": asked})
    request = Request(config=config, origins={}, only=(), skip=(), command=(), started=1.0)
    metrics = {"busbw.1GiB": (300, "GB/s"), "wrong_elements": (0, "count"), "sizes_refused": (0, "sizes")}
    made = tuple(Metric(name=n, value=v, unit=unit, subject="cluster") for n, (v, unit) in metrics.items())
    heard = Heard()
    collected = Collected(RunDir.create(tmp_path / "run", request), config, heard)
    collected.measured(Measurement(check="collectives.all_reduce", subject="n0/gpu0", rank=0, metrics=made))
    assert heard.told.startswith(f"busbw.1GiB is 300 GB/s, expected > 350 GB/s{words}: ")
