"""Hooks of mkdocs (mkdocs.yml): they make a site of pages that are written for GitHub.

Links may lead to files outside of docs/: these files become part of the site, below source/.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# a bracket after a letter or digit is part of a log line, such as f32[8, 8](R)
LINK = re.compile(r"(?<!\w)\[(?P<text>[^\]]*)\]\((?![a-z]+:|#|<)(?P<path>[^)\s#]+)(?P<anchor>#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave out pages of the navigation that do not exist. A wrong name is still found: its page is then not in it."""
    config.nav = _existing(config.nav or [])
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/ that pages link to, and those that these link to."""
    pages = [Path(str(file.abs_src_path)) for file in files.documentation_pages()]
    while pages:
        page = pages.pop()
        for link in LINK.finditer(page.read_text(encoding="utf-8")):
            target = _target(page, link)
            if target.is_dir() or DOCS in target.parents or files.get_file_from_path(_address(target)):
                continue
            file = File.generated(
                config, _address(target), abs_src_path=str(target), inclusion=InclusionLevel.NOT_IN_NAV
            )
            files.append(file)
            if target.suffix == ".md":
                pages.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Return the page with links inside the site, and with the indent of lists that Python-Markdown reads."""
    source = Path(str(page.file.abs_src_path))
    folder = os.path.dirname(page.file.src_uri)

    def inside_site(link: re.Match[str]) -> str:
        target = _target(source, link)
        if target.is_dir():  # a site has no list of a folder's files
            return link["text"]
        return f"[{link['text']}]({os.path.relpath(_address(target), folder or '.')}{link['anchor'] or ''})"

    return "\n".join(_indented(LINK.sub(inside_site, markdown).split("\n")))


def _indented(lines: list[str]) -> Iterator[str]:
    """Lines of a page, with what belongs to an item of a list indented by four spaces instead of three."""
    in_block = False
    for line in lines:
        in_block ^= line.startswith("```")
        yield f" {line}" if line.startswith("   ") and not in_block else line


def _existing(entries: list[Any]) -> list[Any]:
    kept: list[Any] = []
    for entry in entries:
        title, value = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if isinstance(value, list):
            kept += [{title: pages}] if (pages := _existing(value)) else []
        elif (DOCS / value).exists():
            kept.append(entry)
    return kept


def _target(page: Path, link: re.Match[str]) -> Path:
    """The file that a link of a page leads to: of a folder its README.md, or the folder if it has none."""
    target = (page.parent / link["path"]).resolve()
    if not target.exists():
        raise PluginError(f"{page.relative_to(ROOT)} links to {link['path']}, which does not exist")
    return target / "README.md" if (target / "README.md").is_file() else target


def _address(target: Path) -> str:
    """The path of a file in the site. Names that begin with a dot would not be published."""
    if DOCS in target.parents:
        return target.relative_to(DOCS).as_posix()
    return "source/" + target.relative_to(ROOT).as_posix().replace(".github", "github")
