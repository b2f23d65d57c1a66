from __future__ import annotations

import pytest
import yaml

from seatrial.util import data_files
from tests.paths import ROOT

DATA = ROOT / "src" / "seatrial" / "data"
FILES = sorted(str(path.relative_to(DATA)) for path in DATA.rglob("*.yaml"))


@pytest.mark.parametrize("name", FILES)
def test_same_content_as_pyyaml(name: str) -> None:
    assert data_files.read(name) == yaml.safe_load((DATA / name).read_text())


def test_all_files_of_a_folder_in_order() -> None:
    names = [name for name in FILES if name.startswith("skus/")]
    assert len(names) > 5
    assert data_files.read_all("skus") == [data_files.read(name) for name in names]
