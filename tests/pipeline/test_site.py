"""The command ``seatrial init``: what it reads from Slurm, and folders that it cannot write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from seatrial.discover import slurm
from seatrial.discover.slurm_facts import Gres, Node, Partition
from seatrial.launch.site_folder import FOLDERS, Site
from seatrial.model import UsageError
from seatrial.pipeline import site
from tests.processes import Program, call

ARGUMENTS = ("--nodes", "2", "--gpus-per-node", "8", "--partition", "gpu")
SCRIPTS = {
    "discovery",
    "train_1gpu",
    "ddp_1node",
    "ddp_2nodes",
    "fsdp_1node",
    "fsdp_2nodes",
    "function_calling",
    "oumi",
}


@pytest.fixture(autouse=True)
def without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")  # with scontrol, but no slurm.conf, Slurm's client waits for a minute


def node(name: str, gpus: int, *partitions: str) -> Node:
    gres = (Gres(name="gpu", type=None, count=gpus),) if gpus else ()
    return Node(
        name=name,
        state="IDLE",
        flags=(),
        reason="",
        cpus=8,
        memory_bytes=None,
        gres=gres,
        gres_used=None,
        partitions=partitions,
    )


def partition(name: str, default: bool = False) -> Partition:
    return Partition(
        name=name, state="UP", nodes="", total_nodes=None, default=default, max_time_s=None, default_time_s=None
    )


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
    nodes: Sequence[Node],
    expected: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slurm, "partitions", lambda: tuple(partitions))
    monkeypatch.setattr(slurm, "nodes", lambda: tuple(nodes))
    described = site.describe(Path("/s"), no_options())
    assert (described.partition.value, described.nodes.value, described.gpus_per_node.value) == expected
    assert not described.slurm_error
    assert all(setting.note for setting in described.settings().values())


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
    }
    with pytest.raises(UsageError, match="--partition nosuch: Slurm has cpu, gpu"):
        site.describe(Path("/s"), no_options(partition="nosuch"))


def test_without_slurm_the_folder_is_written_and_the_reason_printed(tmp_path: Path) -> None:
    code, out, err = call("init", tmp_path / "site")
    assert code == 0
    assert "nodes: not set (Slurm could not be read)" in out
    (error,) = [line for line in err.splitlines() if line.startswith("Slurm could not be read: ")]
    assert "Run first: " in error
    assert {path.stem for path in (tmp_path / "site" / "jobs").iterdir()} == SCRIPTS
    assert {path.name for path in (tmp_path / "site").iterdir() if path.is_dir()} == set(FOLDERS)
    assert error.removeprefix("Slurm could not be read: ") in (tmp_path / "site" / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_an_existing_file_is_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    for name in ("env.sh", "notes.txt", *(f"z{number}" for number in range(10))):
        (tmp_path / name).write_text("mine")
    code, out, err = call("init", tmp_path, *ARGUMENTS)
    assert (code, out) == (2, "")
    assert "not empty (env.sh, notes.txt, z0, " in err
    assert "and 2 more" in err
    assert "choose another folder" in err
    assert {path.read_text() for path in tmp_path.iterdir()} == {"mine"}
    assert len(list(tmp_path.iterdir())) == 12


def test_an_empty_folder_is_used_unless_it_is_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.chdir(folder)
    code, _, err = call("init", ".", *ARGUMENTS)
    assert (code, list(folder.iterdir())) == (2, [])
    assert "is the current folder" in err
    monkeypatch.chdir(tmp_path)
    assert call("init", folder, *ARGUMENTS)[0] == 0
    assert (folder / "site.yaml").is_file()


@pytest.mark.parametrize("name", ["100%", "a:b", "a,b", "back\\slash", "line\nbreak", os.fsdecode(b"latin-\xe9")])
def test_names_that_slurm_or_containers_interpret_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose another folder"):
        site.require_new(tmp_path / name)


@pytest.mark.parametrize("parent", ["a-file", "/proc"])
def test_a_folder_that_cannot_be_written(parent: str, tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    code, out, err = call("init", tmp_path / parent / "site", *ARGUMENTS)
    assert (code, out) == (2, "")
    assert "cannot" in err
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    # RLIMIT_FSIZE simulates a full disk: README.md and site.yaml do not fit, the scripts do
    first = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))"
    code, out, err = Program("init", tmp_path / "site", *ARGUMENTS, first=first).finish()
    assert (code, out) == (2, "")
    assert "File too large; nothing was written" in err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "other").write_text("theirs")
    monkeypatch.setattr(site, "require_new", lambda _folder: None)
    with pytest.raises(UsageError, match="another process created it meanwhile"):
        site.write(folder, {"env.sh": "ours"})
    assert [path.name for path in tmp_path.rglob("*")] == ["site", "other"]
