"""The catalog has the checks of the page add-a-check.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docs.add_a_check import driver


@pytest.fixture(autouse=True)
def checks_of_the_page() -> Iterator[None]:
    with driver.added():
        yield
