"""discover/nccl_tests_json.py: the report of option -J, and JSON with other values."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.discover import nccl_tests_json


def report() -> dict[str, Any]:
    """As util.cu of nccl-tests 2.19 writes it with -J."""
    place = {"time": 2465.33, "alg_bw": 435.54, "bus_bw": 326.65, "nwrong": 0.0}
    device = {"rank": 0, "group": 0, "pid": 7, "hostname": "n1", "device": 0, "device_hex": "0000:1a:00"}
    return {
        "version": 3,
        "start_time": "2026-11-23 08:00:00",
        "args": ["/opt/nccl-tests/build/all_gather_perf", "-J", "out.json"],
        "env": ["HOME=/root", "NCCL_ALGO=Ring"],
        "nccl_version": 22809,
        "config": {"maximum_bytes": 2**30, "step_factor": 4, "devices": [device | {"device_info": "NVIDIA H200"}]},
        "results": [
            {"size": 2**30, "count": 67108864, "type": "float", "redop": "none", "root": "    -1"}
            | {"out_of_place": place, "in_place": place | {"nwrong": None}}
        ],
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 326.6, "okay": "unchecked"},
        "errors": [],
    }


def test_json_report() -> None:
    document = report()
    assert nccl_tests_json.is_report(document)
    output = nccl_tests_json.parse(document)
    (table,) = output.tables
    (row,) = table.rows
    assert (table.program, table.max_bytes, table.footer_count) == ("all_gather", 2**30, 1)
    assert row.out_of_place
    assert (row.out_of_place.busbw, row.root, row.in_place and row.in_place.wrong) == (
        326.65,
        -1,
        None,
    )
    assert (output.nccl.version, output.nccl.settings) == ("2.28.9", {"NCCL_ALGO": "Ring"})
    assert [device.name for device in table.devices] == ["NVIDIA H200"]


@settings(max_examples=20)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda child: st.lists(child, max_size=3)
    )
)
def test_json_report_with_values_of_other_types(value: Any) -> None:
    for key in report():
        nccl_tests_json.parse(report() | {key: value})
    entry = report()["results"][0]
    for key in entry:
        nccl_tests_json.parse(report() | {"results": [entry | {key: value}]})


def test_rows_whose_bandwidth_contradicts_the_time_are_rejected() -> None:
    document = report()
    document["results"][0]["out_of_place"] = {"time": 2465.33, "alg_bw": 480.0, "bus_bw": 420.0, "nwrong": 0.0}
    (table,) = nccl_tests_json.parse(document).tables
    assert table.rows == []
    assert table.rejected == ["row of 1073741824 B: algbw 480 GB/s contradicts the time of 2465.33 us"]


def test_cpu_times_are_not_compared_with_the_bandwidth() -> None:
    """Option -C; a row without a value, or of text, is rejected."""
    document = report()
    values = document["results"][0]["out_of_place"]
    cpu_time = {"cpu_time": 12.5} | {name: values[name] for name in ("alg_bw", "bus_bw", "nwrong")}
    document["results"][0] |= {"out_of_place": cpu_time, "in_place": cpu_time}
    document["results"] += [document["results"][0] | {"size": 2**31, "in_place": cpu_time | {"bus_bw": wrong}}
                            for wrong in (None, "fast", True, float("nan"), -1.0)]  # fmt: skip
    (table,) = nccl_tests_json.parse(document).tables
    assert [(row.size, row.in_place and row.in_place.busbw) for row in table.rows] == [(2**30, 326.65)]
    assert len(table.rejected) == 5


def test_row_of_one_place() -> None:
    document = report()
    del document["results"][0]["in_place"]
    (table,) = nccl_tests_json.parse(document).tables
    assert [(row.out_of_place is not None, row.in_place) for row in table.rows] == [(True, None)]


def test_last_message_of_nccl_is_no_failure_of_a_complete_run() -> None:
    document = report() | {"errors": ["Could not open a network plugin"]}
    output = nccl_tests_json.parse(document)
    assert (output.failure, output.tables[0].failure) == ("", "")
    del document["average_bus_bandwidth"]
    failed = nccl_tests_json.parse(document)
    assert "Could not open a network plugin" in failed.failure
    assert failed.tables[0].failure == failed.failure
