"""Prints the section of CHANGELOG.md for a tag: ``python tools/release_notes.py v1.2.3``."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def release_notes(tag: str, changelog: str, version: str) -> str:
    """The text below the heading ``## X.Y.Z (date)`` of the tag ``vX.Y.Z``.

    Raises ValueError if the tag is not ``version``, or if the section is missing, undated or empty.
    """
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, but pyproject.toml has version {version}: the tag must be v{version}")
    heading = re.compile(
        rf"^## {re.escape(version)} \((\d{{4}}-\d\d-\d\d)\)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL
    )
    if not (section := heading.search(changelog)):
        raise ValueError(
            f"CHANGELOG.md has no heading '## {version} (YYYY-MM-DD)': write the date of the release there"
        )
    if not (notes := section[2].strip()):
        raise ValueError(f"the section {version} of CHANGELOG.md is empty")
    return notes + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: release_notes.py vX.Y.Z")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    try:
        print(release_notes(sys.argv[1], (ROOT / "CHANGELOG.md").read_text(), project["version"]), end="")
    except ValueError as error:
        sys.exit(f"release_notes: {error}")
