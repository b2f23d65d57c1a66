"""Hooks of mkdocs (mkdocs.yml): they make a site of pages that are written for GitHub.

Links may lead to files outside of docs/: these files become part of the site, below source/. The site has further
pages, made from the data of seatrial: metrics, reference values, known failures, results of the drills.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from tools import drills_page, known_failures_page, metrics_page, references_page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# A block of code, which may contain "[8, 8](S(0))", or a link with a path
CODE_OR_LINK = re.compile(
    r"^ *```.*?^ *```|\[(?P<text>[^\]]*)\]\((?![a-z]+:|#|<)(?P<path>[^)\s#]+)(?P<anchor>#[^)]*)?\)",
    re.MULTILINE | re.DOTALL,
)


@cache
def generated_pages() -> dict[str, str]:
    """The text of each page that is made from data, by its path in the site."""
    makers = (metrics_page, references_page, known_failures_page, drills_page)
    return {path: text for each in makers for path, text in each.pages().items()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Remove pages that do not exist from the navigation; mkdocs reports pages that the navigation lacks."""
    config.nav = _existing(config.nav or [])
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages, the files outside of docs/ that pages link to, and those that these link to."""
    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    pages = [(DOCS / file.src_uri, file.content_string) for file in files.documentation_pages()]
    while pages:
        page, text = pages.pop()
        for link in CODE_OR_LINK.finditer(text):
            if link["path"] is None:
                continue
            target = _target(page, link)
            if target.is_dir() or DOCS in target.parents or files.get_file_from_path(_address(target)):
                continue
            file = File.generated(
                config, _address(target), abs_src_path=str(target), inclusion=InclusionLevel.NOT_IN_NAV
            )
            files.append(file)
            if target.suffix == ".md":
                pages.append((target, file.content_string))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Return the page with links inside the site, and with the indent of lists that Python-Markdown reads."""
    source = Path(page.file.abs_src_path or DOCS / page.file.src_uri)
    folder = os.path.dirname(page.file.src_uri)

    def inside_site(link: re.Match[str]) -> str:
        if link["path"] is None:
            return link[0]
        target = _target(source, link)
        if target.is_dir():  # a site has no list of a folder's files
            return link["text"]
        return f"[{link['text']}]({os.path.relpath(_address(target), folder or '.')}{link['anchor'] or ''})"

    return "\n".join(_indented(CODE_OR_LINK.sub(inside_site, markdown).split("\n")))


def _indented(lines: list[str]) -> Iterator[str]:
    """Lines of a page, with the content of list items indented by four spaces instead of three."""
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
        elif (DOCS / value).exists() or value in generated_pages():
            kept.append(entry)
    return kept


def _target(page: Path, link: re.Match[str]) -> Path:
    """The file that a link of a page leads to: of a folder its README.md, or the folder if it has none."""
    target = (page.parent / link["path"]).resolve()
    if not target.exists() and os.path.relpath(target, DOCS) not in generated_pages():
        raise PluginError(f"{page.relative_to(ROOT)} links to {link['path']}, which does not exist")
    return target / "README.md" if (target / "README.md").is_file() else target


def _address(target: Path) -> str:
    """The path of a file in the site. Names that begin with a dot would not be published."""
    if DOCS in target.parents:
        return target.relative_to(DOCS).as_posix()
    return "source/" + target.relative_to(ROOT).as_posix().replace(".github", "github")
