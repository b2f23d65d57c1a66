"""What every record is: immutable, strict about its keys, and always to be written down as UTF-8."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticSerializationError

_SURROGATE = re.compile("[\ud800-\udfff]")


def replace_surrogates(value: Any) -> Any:
    """``value`` with U+FFFD for every half of a surrogate pair in its strings, which UTF-8 cannot hold."""
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(replace_surrogates, value))
    return value


class Frozen(BaseModel):
    """Base of every record: immutable, and a key that nobody declared is an error.

    Paths, host names and the command line come with any bytes. In memory they stay as they are, so that a path still
    leads to its file; written down, what is not UTF-8 becomes U+FFFD, or one byte would cost all the reports.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def model_dump(self, *args: Any, **options: Any) -> dict[str, Any]:
        dumped: dict[str, Any] = replace_surrogates(super().model_dump(*args, **options))
        return dumped

    def model_dump_json(self, *, indent: int | None = None, **options: Any) -> str:
        try:
            return super().model_dump_json(indent=indent, **options)
        except PydanticSerializationError:
            return json.dumps(self.model_dump(mode="json", **options), indent=indent, ensure_ascii=False)
