from __future__ import annotations

import pytest

from seatrial.discover import perftest
from tests.paths import FIXTURES

FOLDER = FIXTURES / "perftest"


def recorded(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("name", "gbps"),
    [
        ("write_bw-6.x-ndr-gbits", 392.34),
        ("write_bw-roce-gbits-all-sizes", 92.39),
        ("write_bw-hdr-mb", 23317.65 * 2**20 * 8 / 1e9),  # 195.6 of 200 Gb/s
        ("write_bw-cuda-mib", 14948.67 * 2**20 * 8 / 1e9),
    ],
)
def test_bandwidth_of_recorded_output(name: str, gbps: float) -> None:
    assert perftest.parse_bandwidth(recorded(name)) == pytest.approx(gbps)


def test_latency_of_recorded_output() -> None:
    assert perftest.parse_latency(recorded("write_lat-hdr")) == 1.87


def test_a_further_column_does_not_shift_the_bandwidth() -> None:
    text = recorded("write_bw-6.x-ndr-gbits")
    with_cpu = text.replace("MsgRate[Mpps]", "MsgRate[Mpps]    CPU_Util[%]").replace("0.748336", "0.748336   12.50")
    assert perftest.parse_bandwidth(with_cpu) == 392.34


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "no table"),
        (recorded("write_bw-error-status-4"), "no table"),
        (recorded("write_bw-6.x-ndr-gbits").replace(" 65536 ", " #"), "is empty"),
        (recorded("write_bw-6.x-ndr-gbits").replace("392.34", "-12.00"), "expected a positive"),  # perftest issue 82
        (recorded("write_bw-6.x-ndr-gbits").replace("392.34", "0.00"), "expected a positive"),
        (recorded("write_bw-6.x-ndr-gbits").replace("392.34", "nan"), "expected a positive"),
        (recorded("write_bw-6.x-ndr-gbits").replace("392.34", ""), "but the line is"),
        (recorded("write_bw-6.x-ndr-gbits").replace("Gb/sec", "furlongs"), "unknown unit"),
        (recorded("write_lat-hdr"), "no column 'BW average'"),
    ],
)
def test_output_without_a_bandwidth_is_an_error(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        perftest.parse_bandwidth(text)


def test_output_without_a_latency_is_an_error() -> None:
    with pytest.raises(ValueError, match="t_typical"):
        perftest.parse_latency(recorded("write_bw-6.x-ndr-gbits"))


def test_errors() -> None:
    failed = recorded("write_bw-error-status-4")
    assert perftest.transport_error(failed) == "Failed status 4: wr_id 0 syndrom 0x51"
    assert perftest.transport_error(recorded("write_bw-6.06-no-device")) == ""
    assert perftest.transport_error(recorded("write_bw-6.x-ndr-gbits")) == ""
    assert perftest.first_error(recorded("write_bw-6.06-no-device")) == "Did not detect devices"
    assert "unrecognized option" in perftest.first_error(recorded("write_bw-6.06-unknown-option"))
    assert perftest.first_error("") == ""


def test_version() -> None:
    assert perftest.parse_version("Version: 6.06\n") == "6.06"
    assert perftest.parse_version("command not found") is None
