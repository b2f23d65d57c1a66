"""discover/nccl_tests_output.py: every shape of the table, and text that is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.discover.nccl_tests_output import NcclTestsOutput, Table, parse
from tests.paths import FIXTURES

FOLDER = FIXTURES / "nccl-tests"
HEADER = """\
# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
ROW_4G = (
    "  4294967296    1073741824   float     sum      -1   24361  176.31  330.58      0   24365  176.27  330.51      0"
)
ROW_8G = (
    "  8589934592    2147483648   float     sum      -1   47535  180.71  338.82      0   47743  179.92  337.35      0"
)
FOOTER = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 70.742\n"


def read(text: str) -> NcclTestsOutput:
    return parse(text.splitlines())


def only_table(text: str) -> Table:
    (table,) = read(text).tables
    return table


def busbws(table: Table) -> list[tuple[float | None, float | None]]:
    return [
        (row.out_of_place and row.out_of_place.busbw, row.in_place and row.in_place.busbw)  # type: ignore[misc]
        for row in table.rows
    ]


@pytest.mark.parametrize(
    ("prefix", "suffix"),
    [
        ("", ""),
        ("0: ", ""),
        (" 12: ", ""),
        ("[1,0]<stdout>:", ""),
        ("   [1,0]<stdout>: ", ""),
        ("[prterun-node1-1@1,0]<stdout>: ", ""),
        ("nccl-launcher-x7k2p | ", ""),
        ("2026-11-23T08:00:00.123Z ", ""),
        ("\x1b[32m", "\x1b[0m"),
        ("", "\r"),
    ],
)
def test_prefixes_of_launchers(prefix: str, suffix: str) -> None:
    lines = [*HEADER.splitlines(), ROW_4G, ROW_8G, *FOOTER.splitlines()]
    table = only_table("\n".join(prefix + line + suffix for line in lines))
    assert busbws(table) == [(330.58, 330.51), (338.82, 337.35)]
    assert (table.footer_count, table.max_bytes, table.rejected) == (1, 2**33, [])


def test_row_that_the_log_of_nccl_breaks_into_lines() -> None:
    text = HEADER + (
        "  4294967296   1073741824   float   sum    -1ip-10-0-0-1:31:45 [0] NCCL INFO comm 0x55 nRanks 16 nNodes 2\n"
        "  24361  176.31  330.58    0ip-10-0-0-1:31:46 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] via NET/IB/0/GDRDMA\n"
        "    24365  176.27  330.51      0\n"
    )
    output = read(text)
    assert busbws(output.tables[0]) == [(330.58, 330.51)]
    assert output.comm_sizes == {(16, 2)}
    assert output.nccl.transports == {"NET/IB/GDRDMA": 1}


def test_ranks_that_print_at_the_same_time() -> None:
    """The numbers of each rank follow under its own prefix."""
    text = HEADER + (
        "[1,0]<stdout>:  4294967296    1073741824     float     sum      -1\n"
        "[1,1]<stdout>:  8589934592    2147483648     float     sum      -1\n"
        "[1,0]<stdout>:    24361  176.31  330.58      0    24365  176.27  330.51      0\n"
        "[1,1]<stdout>:    47535  180.71  338.82      0    47743  179.92  337.35      0\n"
    )
    assert busbws(only_table(text)) == [(330.58, 330.51), (338.82, 337.35)]


def test_prefix_within_a_row() -> None:
    text = HEADER + "[0]  4294967296 1073741824 float sum -1[0]  24361  176.31  330.58  0[0]  24365  176.27  330.51  0"
    assert busbws(only_table(text)) == [(330.58, 330.51)]


def test_row_that_ends_anywhere_gives_no_value() -> None:
    for end in range(len(ROW_8G) - 1):
        assert busbws(only_table(HEADER + ROW_4G + "\n" + ROW_8G[:end])) == [(330.58, 330.51)]


def test_number_that_was_cut_contradicts_the_time() -> None:
    table = only_table(HEADER + ROW_8G.replace("180.71", "80.71"))
    assert table.rows == []
    assert "algbw 80.71 GB/s contradicts the time of 47535 us" in table.rejected[0]


@pytest.mark.parametrize(
    ("columns", "row", "redop", "root"),
    [
        ("size count type time algbw busbw error", "1073741824 16777216 float {}", "", None),
        ("size count type redop time algbw busbw error", "1073741824 268435456 float sum {}", "sum", None),
        ("size count type root time algbw busbw error", "1073741824 268435456 float 3 {}", "", 3),
        ("size count type redop root time algbw busbw error", "1073741824 268435456 float max 3 {}", "max", 3),
        ("size count type redop root cputime algbw busbw #wrong", "1073741824 268435456 float none 3 {}", "none", 3),
    ],
)
def test_columns_of_all_versions(columns: str, row: str, redop: str, root: int | None) -> None:
    place = columns.partition(" time ")[2] or columns.partition(" cputime ")[2]
    time = "cputime" if "cputime" in columns else "time"
    table = only_table(
        f"# {columns} {time} {place}\n {row.format('4000.5  268.4  268.4  1e-06')}  4001  268.4  268.3  N/A"
    )
    assert busbws(table) == [(268.4, 268.3)]
    assert (table.rows[0].redop, table.rows[0].root) == (redop, root)
    assert table.wrong_is_a_count is ("error" not in columns)


def test_columns_of_single_iterations_and_timestamps() -> None:
    place = "time algbw busbw #wrong i_min i_max i_p99 i_cv%"
    values = "24361 176.31 330.58 0 24000 25000 24900 1.5"
    text = f"# size count type redop root {place} {place} timestamp\n"
    text += f"4294967296 1073741824 float sum -1 {values} {values.replace('330.58', '330.5')} 2026-11-23 08:00:00"
    assert busbws(only_table(text)) == [(330.58, 330.5)]


@pytest.mark.parametrize(
    ("columns", "row", "expected"),
    [
        ("size count type redop root streams {0} {0}", "float sum -1 4 {0} 0 {0} 0", [(330.58, 330.58)]),
        ("size count type redop root time jitter algbw p99 busbw #wrong", "float sum -1 24361 3 176.31 9 330.58 0",
         [(330.58, None)]),
        ("size count type redop root time algbw busbw time algbw busbw", "float sum -1 {0} {0}", [(330.58, 330.58)]),
        ("size count type redop root path {0} {0}", "float sum -1 ring {0} 0 {0} 0", []),
    ],
)  # fmt: skip
def test_columns_of_future_versions(columns: str, row: str, expected: list[tuple[float | None, float | None]]) -> None:
    """Values are found by the names of their columns; a row with text among its numbers has none."""
    header = columns.format("time algbw busbw #wrong")
    table = only_table(f"# {header}\n 4294967296 1073741824 {row.format('24361 176.31 330.58')}\n")
    assert busbws(table) == expected
    assert bool(table.rejected) is not bool(expected)


def test_values_before_a_time_that_is_not_measured_do_not_move() -> None:
    assert only_table(HEADER + ROW_8G.replace("47535", "  N/A").replace("time", "cputime")).rows == []


def test_columns_of_one_place() -> None:
    table = only_table(
        "# size count type redop root time algbw busbw #wrong\n 268435456 67108864 float sum -1 228738 1.17 1.17 0"
    )
    assert busbws(table) == [(1.17, None)]


def test_data_that_was_not_checked() -> None:
    """Some versions print 0 wrong elements with -c 0."""
    row = only_table(HEADER.replace("validation: 1", "validation: 0 graph: 0") + ROW_8G).rows[0]
    assert row.out_of_place
    assert row.out_of_place.wrong is None


def test_several_programs_in_one_log() -> None:
    gather = ROW_8G.replace("2147483648 ", "134217728 ").replace("sum", "none")
    text = (
        f"+ NCCL_ALGO=Ring mpirun -np 16 ./build/all_reduce_perf -b 8 -e 8G -f 2\n{HEADER}{ROW_4G}\n{ROW_8G}\n{FOOTER}"
        "# Collective test concluded: all_reduce_perf\n+ mpirun ./build/all_gather_perf -b 8\n"
        f"{HEADER}{gather}\n{FOOTER}"
    )
    tables = read(text).tables
    assert [(table.program, len(table.rows), table.footer_count) for table in tables] == [
        ("all_reduce", 2, 1),
        ("all_gather", 1, 1),
    ]
    assert [table.settings for table in tables] == [{"NCCL_ALGO": "Ring"}, {}]


@pytest.mark.parametrize(("end", "tables"), [("", [True]), (FOOTER, [False, False])])
def test_second_table_without_a_command(end: str, tables: list[bool]) -> None:
    """After the end of a table, a header begins the next one; before it, two runs are mixed."""
    text = f"{HEADER}{ROW_4G}\n{end}{HEADER.partition('iters: 1 validation: 1')[2]}{ROW_8G}\n{FOOTER}"
    assert [table.has_second_header for table in read(text).tables] == tables


def test_run_that_failed() -> None:
    text = HEADER + ROW_4G + "\n .. node1 pid 123: Test failure all_reduce.cu:62\n"
    table = only_table(text)
    assert table.failure == "pid 123: Test failure all_reduce.cu:62"
    assert busbws(table) == [(330.58, 330.51)]


def test_devices() -> None:
    text = (FOLDER / "published" / "39.txt").read_text()
    devices = only_table(text).devices
    assert [(device.rank, device.host, device.index) for device in devices] == [
        (0, "vm-host40", 0),
        (1, "vm-host40", 1),
        (2, "vm-host38", 0),
        (3, "vm-host38", 1),
    ]
    assert {device.name for device in devices} == {"NVIDIA H20-3e"}


WORDS = st.sampled_from(
    [
        *HEADER.split(),
        *ROW_4G.split(),
        "[1,0]<stdout>:",
        "NCCL INFO",
        "N/A",
        "nan",
        "-1",
        "error",
        "\n",
        "\n",
        "\x1b[3",
        "９",
    ]
)


@given(st.lists(WORDS, max_size=60).map(" ".join))
def test_fragments_of_the_format_in_any_order(text: str) -> None:
    for table in read(text).tables:
        for row in table.rows:
            assert row.out_of_place
            assert row.in_place
            assert row.size >= 0
