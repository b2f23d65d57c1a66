from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from seatrial.discover import filesystem_quota
from seatrial.discover.filesystem_quota import Quota, parse_beegfs_7, parse_beegfs_8, parse_lfs_df, parse_quota_table
from seatrial.util.processes import CommandResult
from tests.paths import FIXTURES

FOLDER = FIXTURES / "filesystems"
GIB = 2**30


def read(name: str) -> str:
    return (FOLDER / name).read_text()


def quota(bytes_used: int, bytes_limit: int | None, files_used: int, files_limit: int | None) -> Quota:
    return Quota(bytes_used=bytes_used, bytes_limit=bytes_limit, files_used=files_used, files_limit=files_limit)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lfs-quota-nig.txt", quota(982177580 * 1024, 1000000000 * 1024, 443208230, None)),
        ("lfs-quota-mila.txt", quota(round(99.99 * GIB), 100 * GIB, 921718, 1048576)),
        ("quota-over.txt", quota(1444800 * 1024, 1444800 * 1024, 9515, 31000)),  # with "*", on two lines
        ("quota-grace.txt", quota(2097156 * 1024, 1024, 1, 1)),  # the soft limit, in its grace period
        ("quota-human.txt", quota(479 * GIB, 5120 * GIB, 352_000, 5_000_000)),  # quota -s
        ("quota-none.txt", None),
        ("quota-group-none.txt", None),
        ("lfs-quota-group.txt", quota(round(5.95 * GIB), 50 * 2**40, 60751, None)),
        ("lfs-quota-project.txt", quota(round(15.4 * 2**40), 19 * 2**40, 739564, 1048576)),
    ],
)
def test_tables_of_lfs_and_quota(name: str, expected: Quota | None) -> None:
    assert parse_quota_table(read(name)) == expected


def test_other_names_of_the_columns() -> None:
    renamed = read("lfs-quota-nig.txt").replace("quota   limit   grace", "bquota  blimit  bgrace", 1)
    renamed = renamed.replace("quota limit  grace", "iquota ilimit  igrace")
    assert parse_quota_table(renamed) == parse_quota_table(read("lfs-quota-nig.txt"))


def test_quota_of_beegfs_7_and_8() -> None:
    assert parse_beegfs_7(read("beegfs-ctl-csv.txt")) == quota(2791507521536, None, 873812, None)
    assert parse_beegfs_8(read("beegfs-8.ndjson")) == quota(900000000000, 1000000000000, 12, None)  # fullest pool
    group = '\n{"name":"lab","id":77,"type":"group","pool":"p","space":"99/100","inode":"1/∞"}\n'
    assert parse_beegfs_8(read("beegfs-8.ndjson") + group, 77) == quota(99, 100, 1, None)
    assert parse_beegfs_8(read("beegfs-8.ndjson") + group, 78) == parse_beegfs_8(read("beegfs-8.ndjson"))


@pytest.mark.parametrize(
    "text", ["", "Error: no server", '{"type": "user"}', "[1]", '{"type":"user","space":"?/?","inode":"?/?"}']
)
@pytest.mark.parametrize("parse", [parse_quota_table, parse_beegfs_7, parse_beegfs_8, parse_lfs_df])
def test_other_output_is_an_error(parse: object, text: str) -> None:
    with pytest.raises(ValueError, match="unknown version of the tool"):
        parse(text)  # type: ignore[operator]


FORMATS = [*FOLDER.glob("*quota*"), *FOLDER.glob("beegfs-*"), *FOLDER.glob("lfs-df*")]


@pytest.mark.parametrize("path", FORMATS, ids=lambda path: path.name)
def test_no_parser_reads_the_output_of_another_tool(path: Path) -> None:
    accepted = []
    for parse in (parse_quota_table, parse_beegfs_7, parse_beegfs_8, parse_lfs_df):
        try:
            parse(path.read_text())
            accepted.append(parse.__name__)
        except ValueError:
            continue
    assert len(accepted) <= 1


@pytest.mark.parametrize("cut", ["lfs-quota-nig.txt", "quota-over.txt", "quota-human.txt"])
def test_a_truncated_row_is_an_error(cut: str) -> None:
    with pytest.raises(ValueError, match="six numbers"):
        parse_quota_table(read(cut).rstrip().rpartition(" ")[0].rstrip(" -0123456789k"))


def test_inaccurate_numbers_are_an_error() -> None:
    with pytest.raises(ValueError, match="inaccurate"):
        parse_quota_table(read("lfs-quota-inaccurate.txt"))


def test_fullest_server_disk() -> None:
    targets = parse_lfs_df(read("lfs-df-full-ost.txt"))
    assert (targets.fullest, targets.used_percent, targets.inactive) == ("testfs-OST0002", 99, ())
    down = read("lfs-df-full-ost.txt") + "testfs-OST0006_UUID : inactive device\n"
    assert parse_lfs_df(down).inactive == ("testfs-OST0006",)
    with pytest.raises(ValueError, match="OSTs"):
        parse_lfs_df(read("lfs-df-full-ost.txt").replace(" 99%", "   -"))


def install(monkeypatch: pytest.MonkeyPatch, **by_tool: CommandResult | None) -> None:
    """Replace the tools: each prints this result, or is not installed."""

    def run(argv: Sequence[str], timeout_s: float) -> CommandResult:
        result = by_tool.get(argv[0].replace("-", "_"))
        if result is None:
            raise FileNotFoundError(argv[0])
        return result

    monkeypatch.setattr(filesystem_quota, "run_command", run)


def test_beegfs_7_is_asked_where_version_8_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, beegfs_ctl=CommandResult(0, read("beegfs-ctl-csv.txt"), ""))
    reading = filesystem_quota.read_quota("beegfs", "/b")
    assert reading.quota
    assert reading.command.startswith("beegfs-ctl --getquota")
    install(monkeypatch, beegfs_ctl=CommandResult(1, "", read("beegfs-ctl-7.4.7.err")))
    reason = filesystem_quota.read_quota("beegfs", "/b").reason
    assert reason.startswith("beegfs is not installed; beegfs-ctl ended with exit code 1: Unable to resolve")


def test_exit_code_1_of_quota_means_over_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, quota=CommandResult(1, read("quota-over.txt"), ""))
    reading = filesystem_quota.read_quota("quota", "/home")
    assert reading.quota
    assert reading.quota.used_percent == 100
    install(monkeypatch, quota=CommandResult(1, "", "quota: Cannot find mountpoint"))
    assert "exit code 1" in filesystem_quota.read_quota("quota", "/home").reason


@pytest.mark.parametrize(
    ("outputs", "command", "unread"),
    [
        (("lfs-quota-nig.txt", "lfs-quota-group.txt", "lfs-quota-project.txt"), "lfs quota -u", 0),  # 98.2 %
        (("lfs-quota-group.txt", "lfs-quota-mila.txt", "lfs-quota-project.txt"), "lfs quota -g 77", 0),  # 99.99 %
        (("lfs-quota-group.txt", "lfs-quota-group.txt", "lfs-quota-project.txt"), "lfs quota -p 110255", 0),  # 81 %
        (("lfs-quota-group.txt", "lfs-quota-group.txt", "lfs-df-expanse.txt"), "lfs quota -u", 1),
    ],
)
def test_the_fullest_of_user_group_and_project(
    outputs: tuple[str, ...], command: str, unread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_option = dict(zip(("-u", "-g", "-p"), outputs, strict=True)) | {"-d": "lfs-project.txt"}

    def run(argv: Sequence[str], timeout_s: float) -> CommandResult:
        return CommandResult(0, read(by_option[argv[2]]), "")

    monkeypatch.setattr(filesystem_quota, "run_command", run)
    reading = filesystem_quota.read_quota("lfs", "/l", gid=77)
    assert (reading.command.startswith(command), len(reading.unread), reading.reason) == (True, unread, "")


def test_project_of_a_folder() -> None:
    assert filesystem_quota.parse_project(read("lfs-project.txt")) == 110255
    assert filesystem_quota.parse_project("    0 - /lustre\n") == 0
    for text in ("", "110255 P", "lfs: failed", read("lfs-quota-project.txt")):
        with pytest.raises(ValueError, match="unknown version"):
            filesystem_quota.parse_project(text)


def test_a_tool_that_hangs_and_an_unknown_type(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, lfs=CommandResult(None, "", ""))
    assert "did not end within 20 s" in filesystem_quota.read_quota("lfs", "/l").reason
    assert "no quota tool" in filesystem_quota.read_quota("", "/x").reason


def test_quota_of_a_folder_is_the_size_that_statvfs_reports(tmp_path: Path) -> None:
    reading = filesystem_quota.read_quota("statvfs", str(tmp_path))
    assert reading.quota
    assert 0 < (reading.quota.used_percent or 0) <= 100
    assert filesystem_quota.read_quota("statvfs", str(tmp_path / "absent")).reason
