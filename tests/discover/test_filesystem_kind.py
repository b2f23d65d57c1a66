from __future__ import annotations

import re
from pathlib import Path

import pytest

from seatrial.discover import filesystem
from seatrial.discover.filesystem_kind import FilesystemKind, identify, table
from tests.paths import FIXTURES

FOLDER = FIXTURES / "filesystems"


def kinds(root: Path) -> dict[str, FilesystemKind]:
    rows = filesystem.mountinfo((FOLDER / "mountinfo.txt").read_text())
    return {row.target: identify(row, root) for row in rows}


def values(kind: FilesystemKind) -> dict[str, str]:
    return {setting.name: setting.value for setting in kind.settings}


def advised(kind: FilesystemKind) -> set[str]:
    return {setting.name for setting in kind.settings if setting.advice}


def test_filesystems_are_recognized(tmp_path: Path) -> None:
    by_target = kinds(tmp_path)
    assert {target: kind.name for target, kind in by_target.items()} == {
        "/mnt/shared": "NFS",
        "/var/lib/nova/mnt/7470d2bb": "VAST over NFS",
        "/scratch": "Lustre",
        "/mnt/beegfs": "BeeGFS",
        "/work": "WekaFS",
        "/scratch2": "Lustre",
        "/old": "NFS",
        "/odd": "unknown type quobyte",
    }
    assert by_target["/odd"].network is None
    assert "remoteports=10.1.1.21-10.1.1.22" in by_target["/var/lib/nova/mnt/7470d2bb"].evidence


def test_settings_that_cost_speed_or_safety_have_advice(tmp_path: Path) -> None:
    by_target = kinds(tmp_path)
    assert {target: advised(kind) for target, kind in by_target.items() if advised(kind)} == {
        "/var/lib/nova/mnt/7470d2bb": {"rsize", "wsize"},
        "/scratch2": {"locks"},
        "/old": {"rsize", "wsize", "recovery", "local_lock"},
    }
    assert values(by_target["/mnt/shared"])["nconnect"] == "16"
    assert values(by_target["/old"])["nconnect"] == "1"  # absent means one connection
    assert values(by_target["/work"])["cache"] == "writecache"


def test_the_driver_of_vast_is_named_where_the_mount_does_not_use_it(tmp_path: Path) -> None:
    path = tmp_path / "sys/module/sunrpc/parameters/nfs_bundle_version"
    path.parent.mkdir(parents=True)
    path.write_text("4.0.18-vastdata-MLNX.OFED.LINUX-4.9-6.0.6.0\n")
    kind = kinds(tmp_path)["/mnt/shared"]
    assert kind.name == "NFS"
    assert "4.0.18-vastdata" in kind.evidence


def test_client_configuration_of_beegfs(tmp_path: Path) -> None:
    config = (FOLDER / "beegfs-client-config.txt").read_text()
    in_use = tmp_path / "proc/fs/beegfs/1-node/config"
    in_use.parent.mkdir(parents=True)
    in_use.write_text(config)
    assert advised(kinds(tmp_path)["/mnt/beegfs"]) == {"tuneUseGlobalFileLocks"}
    file = tmp_path / "etc/beegfs/beegfs-client.conf"
    file.parent.mkdir(parents=True)
    file.write_text("# tuneFileCacheType = native\ntuneFileCacheType = none\n")
    second = tmp_path / "proc/fs/beegfs/2-node/config"  # two filesystems: /proc does not say which is which
    second.parent.mkdir()
    second.write_text(config)
    assert values(kinds(tmp_path)["/mnt/beegfs"])["tuneFileCacheType"] == "none"


def test_unreadable_configuration_of_beegfs_gives_a_reason(tmp_path: Path) -> None:
    kind = kinds(tmp_path)["/mnt/beegfs"]
    assert values(kind) == {}
    assert list(kind.unreadable) == ["/etc/beegfs/beegfs-client.conf"]


ROWS = [*(row for fs in table()["filesystems"].values() for row in fs.get("settings", ())), *table()["common"]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_each_setting_has_effect_source_and_complete_advice(row: dict[str, str]) -> None:
    assert row["effect"]
    assert row["source"]
    assert ("unwise" in row) == ("advice" in row)
    assert re.compile(row["match"]).groups == 1
