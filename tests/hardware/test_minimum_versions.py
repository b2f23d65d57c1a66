from __future__ import annotations

from datetime import date

import pytest
from pydantic import ValidationError

from seatrial.hardware.minimum_versions import MinimumVersions, UnknownVersionError, minimum_versions
from seatrial.util import data_files


def test_the_file_has_a_source_and_an_advisory_for_each_component() -> None:
    components = minimum_versions()
    assert {"driver", "container_toolkit", "runc", "dcgm", "nic_firmware", "kernel"} == set(components)
    for component in components.values():
        assert component.source.startswith("https://")
        assert all(advisory.startswith("CVE-") for advisory in component.advisories)
        assert date(2025, 1, 1) < component.published < date(2026, 11, 24)


@pytest.mark.parametrize(
    ("component", "version", "minimum"),
    [
        ("driver", "580.159.03", ""),
        ("driver", "580.159.04", ""),
        ("driver", "580.95.05", "580.159.03"),  # 95 < 159: numbers, not text
        ("driver", "535.309.01", ""),
        ("driver", "535.288.01", "535.309.01"),
        ("driver", "570.211.01", "595.71.05"),  # no fix in this branch
        ("driver", "440.95.01", "595.71.05"),
        ("container_toolkit", "1.17.8", "1.19.1"),
        ("container_toolkit", "1.19.1", ""),
        ("container_toolkit", "1.20.0", ""),
        ("runc", "1.1.12", "1.4.0"),
        ("runc", "1.2.7", "1.2.8"),
        ("runc", "1.3.3", ""),
        ("runc", "1.5.0", ""),
        ("dcgm", "4.5.2", "4.5.3"),
        ("dcgm", "4.7.0", ""),
        ("nic_firmware", "28.39.1002", "28.39.8002"),
        ("nic_firmware", "28.39.8002", ""),
        ("nic_firmware", "28.42.1000", "28.46.3008"),
        ("nic_firmware", "28.43.8002", ""),
        ("nic_firmware", "28.48.1000", ""),
        ("kernel", "6.8.0-60", "6.8.0-124"),
        ("kernel", "6.8.0-124", ""),
    ],
)
def test_minimum_of_an_outdated_version(component: str, version: str, minimum: str) -> None:
    assert minimum_versions()[component].minimum_for(version) == minimum


@pytest.mark.parametrize(
    ("component", "version"),
    [
        ("driver", "610.43.02"),  # newer than the bulletin
        ("kernel", "5.15.0-105"),
        ("kernel", "6.14.0-29"),
        ("runc", "1.4.0-rc.1"),
        ("runc", "1.3.4-0ubuntu1~24.04.1"),
        ("runc", "1.1.5+ds1"),
        ("nic_firmware", "28"),
        ("dcgm", "unknown"),
        ("dcgm", ""),
    ],
)
def test_unknown_versions(component: str, version: str) -> None:
    with pytest.raises(UnknownVersionError):
        minimum_versions()[component].minimum_for(version)


@pytest.mark.parametrize(
    "change",
    [
        {"tracks": {}},
        {"tracks": {"580": "535.309.01"}},
        {"tracks": {"580": "580.x"}},
        {"tracks": {"46": 46.3008}},
        {"source": "NVIDIA"},
        {"source": None},
        {"advisories": []},
        {"published": "soon"},
        {"older_tracks": "fixed"},
        {"minimum": "580.159.03"},
    ],
)
def test_the_loader_is_strict(change: dict[str, object]) -> None:
    entry = data_files.read("minimum_versions.yaml")["driver"]
    MinimumVersions.model_validate(entry)
    with pytest.raises(ValidationError):
        MinimumVersions.model_validate(entry | change)
