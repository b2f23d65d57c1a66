"""What the text of an errno means, by the part of the system that speaks: data/errnos.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from seatrial.util import data_files

FILES = ("errnos.yaml",)


def errno_rows() -> Iterator[dict[str, Any]]:
    """A signature for each errno that a speaker gives its own meaning, and one for each errno that is only stated."""
    data = data_files.read(FILES[0])
    texts = {row["name"]: row["text"] for row in data["errnos"]}
    for meaning in data["meanings"]:
        speaker = data["speakers"][meaning["speaker"]]
        text = "|".join(texts[name] for name in meaning["errnos"])
        row = {key: value for key, value in meaning.items() if key not in ("speaker", "errnos", "also")}
        patterns = [rf"(?:{speaker})[^\n]{{0,300}}?(?:{text})", rf"(?:{text})[^\n]{{0,120}}?(?:{speaker})"]
        yield row | {"pattern": "|".join([*patterns, *filter(None, [meaning.get("also")])])}
    for row in filter(lambda row: "example" in row, data["errnos"]):
        example = row["example"]
        yield data["stated"] | {
            "id": f"errno.{row['name'].lower()}",
            "title": f"A call failed with {row['name']} ({example})",
            "pattern": row["text"],
            "examples": [f"error: foo_call failed: {example}"],
            "counter_examples": ["error: foo_call failed"],
        }


@cache
def _speakers() -> re.Pattern[str]:
    return re.compile(
        "|".join(f"(?:{pattern})" for pattern in data_files.read(FILES[0])["speakers"].values()), re.ASCII
    )


def has_speaker(line: str) -> bool:
    """Whether another part of the system than a file system or a network speaks in ``line``."""
    return _speakers().search(line) is not None
