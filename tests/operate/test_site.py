"""Values of a site from Slurm, and folders that cannot be used."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from seatrial.discover import slurm
from seatrial.discover.slurm_facts import Gres, Partition, SlurmNode
from seatrial.discover.slurm_output import parse_settings
from seatrial.launch.site_folder import Site, SiteValue, render
from seatrial.model import UsageError
from seatrial.operate import site
from tests.fakes.slurm import recorded


def node(name: str, gpus: int, *partitions: str) -> SlurmNode:
    gres = (Gres(name="gpu", type=None, count=gpus),) if gpus else ()
    return SlurmNode(
        name=name,
        state="IDLE",
        flags=(),
        reason="",
        cpus=8,
        memory_bytes=None,
        gres=gres,
        partitions=partitions,
    )


def partition(name: str, default: bool = False) -> Partition:
    return Partition(name=name, state="UP", nodes="", default=default, max_time_s=None, default_time_s=None)


CPU_NODE, TWO_GPU_NODES = node("c0", 0, "cpu"), (node("g0", 8, "gpu", "all"), node("g1", 8, "gpu", "all"))


@pytest.mark.parametrize(
    ("partitions", "nodes", "expected"),
    [
        pytest.param([partition("gpu", default=True)], TWO_GPU_NODES, ("gpu", 2, 8), id="default"),
        pytest.param(
            [partition("cpu", default=True), partition("gpu")], [CPU_NODE, *TWO_GPU_NODES], ("gpu", 2, 8), id="gpus"
        ),
        pytest.param([partition("gpu"), partition("all")], TWO_GPU_NODES, (None, None, None), id="several"),
        pytest.param([partition("cpu", default=True)], [CPU_NODE], ("cpu", 1, None), id="no gpus"),
        pytest.param(
            [partition("gpu", default=True)], [*TWO_GPU_NODES, node("g2", 4, "gpu")], ("gpu", 3, None), id="different"
        ),
        pytest.param([], [], (None, None, None), id="empty"),
    ],
)
def test_values_from_slurm(
    partitions: Sequence[Partition],
    nodes: Sequence[SlurmNode],
    expected: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slurm, "partitions", lambda: tuple(partitions))
    monkeypatch.setattr(slurm, "nodes", lambda: tuple(nodes))
    described = site.describe(Path("/s"), no_options())
    assert (described.partition.value, described.nodes.value, described.gpus_per_node.value) == expected
    assert not described.slurm_error
    assert all(setting.note for setting in described.settings().values())


@pytest.fixture(autouse=True)
def slurm_without_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise slurm.SlurmRefused("no database of accounts")

    monkeypatch.setattr(slurm, "settings", lambda: parse_settings(recorded("scontrol-show-config.txt").out))
    monkeypatch.setattr(slurm, "accounts", refuse)


@pytest.mark.parametrize(
    ("names", "value", "note"),
    [
        (("physics",), "physics", "the only account of"),
        (
            ("chemistry", "physics"),
            None,
            r"several in Slurm \(chemistry, physics\), --account",
        ),
        ((), None, "Slurm lists none of"),
    ],
)
def test_the_account_is_read_if_it_is_the_only_one(
    names: tuple[str, ...], value: str | None, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "partitions", lambda: (partition("gpu", default=True),))
    monkeypatch.setattr(slurm, "nodes", lambda: TWO_GPU_NODES)
    assert site.describe(Path("/s"), no_options()).account == SiteValue(
        None, "jobs use Slurm's default account; yours could not be listed: no database of accounts"
    )
    monkeypatch.setattr(slurm, "accounts", lambda *_: names)
    account = site.describe(Path("/s"), no_options()).account
    assert account.value == value
    assert re.search(note, account.note)
    assert site.describe(Path("/s"), no_options(account="ops")).account.value == "ops"


def test_a_script_requests_at_most_the_time_that_its_partition_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = partition("gpu", default=True).model_copy(update={"max_time_s": 20 * 60})
    monkeypatch.setattr(slurm, "partitions", lambda: (limited,))
    monkeypatch.setattr(slurm, "nodes", lambda: TWO_GPU_NODES)
    files = render(site.describe(Path("/s"), no_options()))
    assert "\n#SBATCH --time=20\n" in files["jobs/fsdp_2nodes.sbatch"]
    assert "MaxTime of partition gpu); this workload may need 60 minutes" in files["jobs/fsdp_2nodes.sbatch"]
    assert "\n#SBATCH --time=10\n" in files["jobs/discovery.sbatch"]
    assert "MaxTime" not in files["jobs/discovery.sbatch"]


def no_options(**options: str | int) -> dict[str, str | int | None]:
    names = ("nodes", "gpus_per_node", "partition", "account", "venv")
    return dict.fromkeys(names) | options


def test_options_replace_the_values_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "partitions", lambda: (partition("cpu", default=True), partition("gpu")))
    monkeypatch.setattr(slurm, "nodes", lambda: (CPU_NODE, *TWO_GPU_NODES))
    described: Site = site.describe(Path("/s"), no_options(partition="cpu", nodes=9, gpus_per_node=0, account="ops"))
    assert {name: setting.value for name, setting in described.settings().items()} | {"venv": None} == {
        "partition": "cpu",
        "nodes": 9,
        "gpus_per_node": 0,
        "account": "ops",
        "venv": None,
        "max_minutes": None,
    }
    with pytest.raises(UsageError, match="--partition nosuch: Slurm has cpu, gpu"):
        site.describe(Path("/s"), no_options(partition="nosuch"))


@pytest.mark.parametrize("name", ["100%", "a:b", "a,b", "back\\slash", "line\nbreak", os.fsdecode(b"latin-\xe9")])
def test_names_that_slurm_or_containers_interpret_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose another directory"):
        site.require_new(tmp_path / name)


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "other").write_text("theirs")
    monkeypatch.setattr(site, "require_new", lambda _folder: None)
    with pytest.raises(UsageError, match="another process created it meanwhile"):
        site.write(folder, {"env.sh": "ours"})
    assert [path.name for path in tmp_path.rglob("*")] == ["site", "other"]


@pytest.mark.parametrize("option", ["partition", "account", "venv"])
def test_values_of_several_lines_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match=f"--{option}"):
        site.describe(Path("/s"), no_options(**{option: "a\n#SBATCH --uid=0"}))
