"""The base class of all records: immutable, without undeclared keys, written as UTF-8."""

import json
import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticSerializationError

# Strict: neither text nor true and false are numbers
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Duration = Annotated[float, Field(strict=True, ge=0)]  # in seconds; a sum of a damaged record may be infinite
Seconds = Annotated[Duration, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0)]
RetryNumber = Annotated[int, Field(strict=True, ge=0, le=2)]  # 0: first measurement

_SURROGATE = re.compile("[\ud800-\udfff]")


def replace_surrogates(value: Any) -> Any:
    """``value`` with every surrogate in its strings replaced by U+FFFD, since UTF-8 cannot encode surrogates."""
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(replace_surrogates, value))
    return value


class Frozen(BaseModel):
    """Base of every record: immutable, without undeclared keys.

    Paths, host names and the command line may contain bytes that are not UTF-8. In memory they are unchanged, so paths
    remain usable. When a record is written, these bytes become U+FFFD.

    Modules of records that every command imports do not have ``from __future__ import annotations``. This import would
    turn the annotations into strings, which pydantic compiles one by one (10 ms of `seatrial render slurm acceptance`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    def model_dump(self, *args: Any, **options: Any) -> dict[str, Any]:
        dumped: dict[str, Any] = replace_surrogates(super().model_dump(*args, **options))
        return dumped

    def model_dump_json(self, *, indent: int | None = None, **options: Any) -> str:
        try:
            return super().model_dump_json(indent=indent, **options)
        except PydanticSerializationError:
            return json.dumps(self.model_dump(mode="json", **options), indent=indent, ensure_ascii=False)
