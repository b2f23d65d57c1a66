from __future__ import annotations

from seatrial.checks.declare import NoValue, value
from seatrial.checks.host import _tiers
from seatrial.checks.host.filesystem_metadata import OPERATIONS
from seatrial.model import Why
from seatrial.util import data_files
from tests.paths import ROOT


def test_each_tier_has_a_rate_for_each_operation() -> None:
    assert set(_tiers.tiers()) == set(_tiers.default_paths("/run", {}))
    assert {tuple(tier.rates) for tier in _tiers.tiers().values()} == {OPERATIONS}
    assert [name for name, tier in _tiers.tiers().items() if tier.local_disk] == ["local_scratch"]


def test_the_source_of_the_rates_is_in_the_file() -> None:
    file = ROOT / "src" / "seatrial" / "data" / "filesystem_tiers.yaml"
    assert "docs.aws.amazon.com/efs" in file.read_text()
    assert data_files.read(file.name)["tiers"]["local_scratch"]["rates"]["create"] == int(1 / 0.0027)


def test_default_paths_follow_the_environment() -> None:
    environment = {"HOME": "/home/me", "TMPDIR": "/nvme"}
    paths = _tiers.default_paths("/runs/1", environment)
    assert paths == {
        "run_directory": "/runs/1",
        "home": "/home/me",
        "hf_cache": "/home/me/.cache/huggingface",
        "local_scratch": "/nvme",
    }
    assert _tiers.default_paths("/runs/1", {**environment, "HF_HOME": "/hf"})["hf_cache"] == "/hf"


def test_unknown_tiers_are_not_judged_and_named() -> None:
    unknown, *without_path = _tiers.answers({"home": "/home", "archive": "/archive"})
    assert isinstance(unknown, NoValue)
    assert (unknown.names, unknown.why) == (("unknown_tiers",), Why.NOT_PERMITTED)
    assert unknown.reason.startswith("no thresholds for tier archive")
    names = [name for answer in without_path if isinstance(answer, NoValue) for name in answer.names]
    assert names == ["*.run_directory", "*.hf_cache", "*.local_scratch"]


def test_known_tiers() -> None:
    (number,) = _tiers.answers(_tiers.default_paths("/run", {}))
    assert number == value("unknown_tiers", 0)
