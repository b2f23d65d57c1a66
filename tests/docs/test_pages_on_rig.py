"""The commands of the pages that need Slurm, in the order of the playbook, on a real Slurm cluster without GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.console import blocks, environment, run_in_shell
from tests.paths import ROOT
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster

STEPS = sorted((ROOT / "docs").glob("[0-9][0-9]-*.md"))


def test_commands_of_the_playbook_on_a_cluster(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = make_cluster(2)
    (tmp_path / "shared").mkdir()
    variables = {name: environment()[name] for name in ("PATH", "COLUMNS")}
    run_in_shell([block for page in STEPS for block in blocks(page)], tmp_path, {**cluster.env, **variables})
    others = {page.name for page in (ROOT / "docs").rglob("*.md") if "<!-- run on cluster -->" in page.read_text()}
    assert others <= {page.name for page in STEPS}, "these pages are not run"
