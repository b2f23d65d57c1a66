from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from seatrial.bench import connectivity
from seatrial.bench.connectivity import (
    Connection,
    ConnectivityProbe,
    local_address,
)
from seatrial.bench.tcp import Endpoint, Lookup, open_connection


@pytest.fixture
def pair() -> Iterator[tuple[ConnectivityProbe, ConnectivityProbe]]:
    probes = ConnectivityProbe(0, ("a", "b")), ConnectivityProbe(1, ("a", "b"))
    yield probes
    for probe in probes:
        probe.close()


def measure_over_loopback(probes: tuple[ConnectivityProbe, ConnectivityProbe]) -> dict[str, Connection | str]:
    """Results of the first probe for the second."""
    endpoints = [
        Endpoint(endpoint.port, endpoint.token, "127.0.0.1") for endpoint in (probes[0].listen(), probes[1].listen())
    ]
    unknown = [Lookup((), "unknown")] * 2
    errors = probes[0].connect_all(endpoints, unknown)
    return {**errors, **probes[0].measure()}


def test_two_probes_measure_each_other(pair: tuple[ConnectivityProbe, ConnectivityProbe]) -> None:
    (connection,) = measure_over_loopback(pair).values()
    assert isinstance(connection, Connection)
    assert 1e-6 < connection.round_trip < 1
    assert 0 < connection.clock_uncertainty <= connection.round_trip
    assert abs(connection.clock_offset) <= connection.clock_uncertainty + 1e-6


@pytest.mark.parametrize("skew", [2.5, -400.0])
def test_clock_offset_has_the_sign_and_size_of_the_remote_clock(
    pair: tuple[ConnectivityProbe, ConnectivityProbe], monkeypatch: pytest.MonkeyPatch, skew: float
) -> None:
    """Both probes read one clock, which is ahead for all readings but the first and last of an exchange."""
    readings = iter(range(10**6))
    monkeypatch.setattr(connectivity, "wall_clock", lambda: time.time() + (skew if next(readings) % 4 in (1, 2) else 0))
    (connection,) = measure_over_loopback(pair).values()
    assert isinstance(connection, Connection)
    assert connection.clock_offset == pytest.approx(skew, abs=connection.clock_uncertainty + 1e-6)
    assert connection.round_trip < 1


def test_asymmetric_delay_is_within_the_clock_uncertainty(
    pair: tuple[ConnectivityProbe, ConnectivityProbe], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ping(connection: socket.socket) -> tuple[float, float]:
        round_trip, offset = real(connection)
        return round_trip + 0.2, offset + 0.1  # a delay of 0.2 s in one direction looks like a clock offset of 0.1 s

    real = connectivity._ping
    monkeypatch.setattr(connectivity, "_ping", ping)
    (connection,) = measure_over_loopback(pair).values()
    assert isinstance(connection, Connection)
    assert abs(connection.clock_offset) <= connection.clock_uncertainty


@pytest.mark.parametrize("address", ["127.0.0.1", "no.such.name.invalid"])
def test_no_local_address_without_a_routable_master(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setattr(socket, "getaddrinfo", no_network(socket.getaddrinfo))
    assert local_address() is None


def no_network(real: object) -> object:
    """Numeric addresses resolve, names do not, so that tests use no name service."""

    def getaddrinfo(name: str, *arguments: object, **options: object) -> object:
        if not name[0].isdigit():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(name, *arguments, **options)  # type: ignore[operator]

    return getaddrinfo


def test_close_ends_listening() -> None:
    probe = ConnectivityProbe(0, ("a",))
    endpoint = probe.listen()
    probe.close()
    with pytest.raises(ConnectionError):
        open_connection(["127.0.0.1"], endpoint)
