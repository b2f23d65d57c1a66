"""A reader who starts at README.md finds every file of deploy/ and .github."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

from tests.paths import ROOT


def links(page: Path) -> list[Path]:
    """Files and folders of the repository to which the page links."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    return [(page.parent / target).resolve() for target in targets if "://" not in target]


def linked_paths() -> set[Path]:
    """All paths to which README.md and the pages that it reaches link."""
    found: set[Path] = set()
    pages = [ROOT / "README.md"]
    while pages:
        new = set(links(pages.pop())) - found
        found |= new
        pages += [path for path in new if path.suffix == ".md" and path.is_file()]
        pages += [page for path in new if path.is_dir() for page in path.glob("*.md")]
    return found


def test_every_file_of_deploy_and_github_is_reached_from_the_readme() -> None:
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
    files = [
        path
        for folder in (ROOT / "deploy", ROOT / ".github")
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(fnmatch(part, name) for part in path.parts for name in ignored)
    ]
    assert len(files) > 10
    linked = linked_paths()
    unreached = [str(path.relative_to(ROOT)) for path in files if not {path, path.parent} & linked]
    assert unreached == [], "link each of them, or its folder, from a page of docs/"
