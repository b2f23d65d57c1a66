"""The oldest versions without known serious vulnerabilities, from data/minimum_versions.yaml, and the comparison."""

from __future__ import annotations

import re
from datetime import date
from functools import cache
from typing import Literal

from pydantic import Field, model_validator

from seatrial.model import Frozen
from seatrial.util import data_files

_VERSION = re.compile(r"v?(\d+(?:[.-]\d+)*)")


class UnknownVersionError(ValueError):
    """The version cannot be compared; the message is the reason."""


class MinimumVersions(Frozen):
    """The minimum versions of one component, by track; see the comment in data/minimum_versions.yaml."""

    title: str = Field(min_length=1)
    tracks: dict[str, str] = Field(min_length=1)
    # Leading numbers before the track, such as the model in a NIC's firmware; the versions in ``tracks`` omit them
    prefix_numbers: int = Field(default=0, ge=0)
    track_numbers: int = Field(ge=0)
    older_tracks: Literal["affected", "unknown"] = "unknown"
    newer_tracks: Literal["fixed", "unknown"] = "unknown"
    models: tuple[str, ...] = ()
    advisories: tuple[str, ...] = Field(min_length=1)
    published: date
    source: str = Field(pattern=r"^https://\S+$")
    risk: str = Field(min_length=1)
    fix: str = Field(min_length=1)

    @model_validator(mode="after")
    def _check_tracks(self) -> MinimumVersions:
        for track, minimum in self.tracks.items():
            numbers = _numbers(minimum)
            if numbers[: self.track_numbers] != _track(track):
                raise ValueError(f"{self.title}: minimum {minimum} does not belong to track {track!r}")
        return self

    def minimum_for(self, version: str) -> str:
        """The minimum version if ``version`` is below it; empty if ``version`` is not outdated.

        Raises UnknownVersionError for a version that cannot be parsed, or whose track the advisory does not cover.
        """
        numbers = _numbers(version)
        prefix, numbers = numbers[: self.prefix_numbers], numbers[self.prefix_numbers :]
        track = numbers[: self.track_numbers]
        if len(track) < self.track_numbers:
            raise UnknownVersionError(f"version {version}: too few numbers")
        minimums = {_track(name): minimum for name, minimum in self.tracks.items()}
        newest = max(minimums)
        minimum = minimums[newest] if track < newest and self.older_tracks == "affected" else ""
        if minimum := minimums.get(track, minimum):
            return ".".join([*map(str, prefix), minimum]) if numbers < _numbers(minimum) else ""
        if track > newest and self.newer_tracks == "fixed":
            return ""
        tracks = ", ".join(self.tracks)
        raise UnknownVersionError(f"version {version}: {self.source} covers the versions {tracks} only")


@cache
def minimum_versions() -> dict[str, MinimumVersions]:
    """Component → its minimum versions. Raises ValueError for an invalid file."""
    entries = data_files.read("minimum_versions.yaml")
    return {name: MinimumVersions.model_validate(entry) for name, entry in entries.items()}


def _track(name: str) -> tuple[int, ...]:
    return _numbers(name) if name else ()


def _numbers(version: str) -> tuple[int, ...]:
    """``6.8.0-137`` → (6, 8, 0, 137).

    Raises UnknownVersionError for a pre-release, and for the build of a distribution, which has additional fixes.
    """
    match = _VERSION.fullmatch(version)
    if not match:
        raise UnknownVersionError(f"version {version}: a pre-release, or a build of a distribution with its own fixes")
    return tuple(int(number) for number in re.findall(r"\d+", match[1]))
