from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence

import pytest

from seatrial.bench import connectivity
from seatrial.bench.connectivity import (
    Connection,
    ConnectivityProbe,
    Endpoint,
    local_address,
    open_connection,
    resolve_names,
)


@pytest.fixture
def pair() -> Iterator[tuple[ConnectivityProbe, ConnectivityProbe]]:
    stations = ConnectivityProbe(0, ("a", "b")), ConnectivityProbe(1, ("a", "b"))
    yield stations
    for station in stations:
        station.close()


def by_loopback(stations: tuple[ConnectivityProbe, ConnectivityProbe]) -> dict[str, Connection | str]:
    """What the first measures of the second."""
    cards = [Endpoint(card.port, card.token, "127.0.0.1") for card in (stations[0].listen(), stations[1].listen())]
    unknown = {name: connectivity.Lookup((), "unknown") for name in ("a", "b")}
    failures = stations[0].connect_all(cards, unknown)
    return {**failures, **stations[0].measure()}


def test_two_stations_measure_each_other(pair: tuple[ConnectivityProbe, ConnectivityProbe]) -> None:
    (found,) = by_loopback(pair).values()
    assert isinstance(found, Connection)
    assert 1e-6 < found.round_trip < 1
    assert 0 < found.clock_uncertainty <= found.round_trip
    assert abs(found.clock_offset) <= found.clock_uncertainty + 1e-6


@pytest.mark.parametrize("skew", [2.5, -400.0])
def test_the_offset_has_the_sign_and_size_of_the_others_clock(
    pair: tuple[ConnectivityProbe, ConnectivityProbe], monkeypatch: pytest.MonkeyPatch, skew: float
) -> None:
    """Both stations read one clock here: it is ahead for every reading but the first and the last of an exchange."""
    readings = iter(range(10**6))
    monkeypatch.setattr(connectivity, "wall_clock", lambda: time.time() + (skew if next(readings) % 4 in (1, 2) else 0))
    (found,) = by_loopback(pair).values()
    assert isinstance(found, Connection)
    assert found.clock_offset == pytest.approx(skew, abs=found.clock_uncertainty + 1e-6)
    assert found.round_trip < 1


def test_a_slow_way_widens_the_uncertainty_and_does_not_move_the_clock(
    pair: tuple[ConnectivityProbe, ConnectivityProbe], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(line: socket.socket) -> tuple[float, float]:
        round_trip, offset = real(line)
        return round_trip + 0.2, offset + 0.1  # 0.2 s on the way back alone looks like a clock that is 0.1 s off

    real = connectivity._ping
    monkeypatch.setattr(connectivity, "_ping", exchange)
    (found,) = by_loopback(pair).values()
    assert isinstance(found, Connection)
    assert abs(found.clock_offset) <= found.clock_uncertainty


def test_a_port_that_nobody_listens_on_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1: Connection refused"):
        open_connection(["127.0.0.1"], Endpoint(port, bytes(16), None))


def test_a_port_whose_queue_is_full_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectivity, "CONNECT_TIMEOUT_S", 0.2)
    waiting = []
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        for _ in range(3):  # the kernel drops what does not fit: as a firewall does
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(address)
        with pytest.raises(ConnectionError, match=r"no answer within 0\.2 s"):
            open_connection(["127.0.0.1"], Endpoint(address[1], bytes(16), None))
    for line in waiting:
        line.close()


def test_a_port_that_says_nothing_is_not_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectivity, "CONNECT_TIMEOUT_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(ConnectionError, match="connected, and nobody answers"),
    ):
        open_connection(["127.0.0.1"], Endpoint(server.getsockname()[1], bytes(16), None))


def test_the_next_address_is_tried_and_all_failures_are_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1: .*; 127\.0\.0\.2: Connection refused"):
        open_connection(["127.0.0.1", "127.0.0.2"], Endpoint(port, bytes(16), None))


def test_names_are_looked_up_at_once_and_only_addresses_that_lead_out_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str) -> Sequence[str]:
        if name == "unknown":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if name == "silent":
            time.sleep(60)
        return {"good": ("10.0.0.1",), "both": ("127.0.1.1", "10.0.0.2"), "self": ("127.0.1.1", "::1", "fe80::1")}[name]

    monkeypatch.setattr(connectivity, "RESOLVE_TIMEOUT_S", 1.0)
    found = resolve_names(["good", "both", "self", "unknown", "silent"], resolve)
    assert {name: lookup.addresses for name, lookup in found.items() if lookup.addresses} == {
        "good": ("10.0.0.1",),
        "both": ("10.0.0.2",),
    }
    assert found["good"].problem is None
    assert found["self"].problem == "resolves to 127.0.1.1, ::1, fe80::1, which no other node can reach"
    assert found["unknown"].problem == "Name or service not known"
    assert found["silent"].problem == "not resolved within 1 s"


@pytest.mark.parametrize("address", ["127.0.0.1", "no.such.name.invalid"])
def test_a_master_at_loopback_or_nowhere_tells_no_address(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setattr(socket, "getaddrinfo", no_network(socket.getaddrinfo))
    assert local_address() is None


def no_network(real: object) -> object:
    """Numbers resolve as ever, names do not: no test asks a name service."""

    def getaddrinfo(name: str, *arguments: object, **options: object) -> object:
        if not name[0].isdigit():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(name, *arguments, **options)  # type: ignore[operator]

    return getaddrinfo


def test_closing_ends_the_listening() -> None:
    station = ConnectivityProbe(0, ("a",))
    card = station.listen()
    station.close()
    with pytest.raises(ConnectionError):
        open_connection(["127.0.0.1"], card)
