"""Examples of help texts."""

from __future__ import annotations

import re
import shlex

import pytest

from seatrial.cli.examples import EXAMPLES
from tests.processes import call

COMMANDS = [text for texts in EXAMPLES.values() for text in re.findall(r"^\$ (.*)", texts, re.MULTILINE)]


@pytest.mark.parametrize("example", [text for text in COMMANDS if "COMMAND" not in text])
def test_every_option_of_an_example_exists(example: str) -> None:
    words = shlex.split(example)[1:]
    command = words[:2] if " ".join(words[:2]) in EXAMPLES else words[:1]
    _, out, _ = call(*command, "-h")
    assert all(option in out for option in words if option.startswith("--"))
