"""Name resolution and connections to listeners of this host."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence

import pytest

from seatrial.bench import tcp
from seatrial.bench.tcp import Endpoint, Lookup, open_connection, resolve_names
from tests.processes import with_enough_time


def test_segments_are_counted() -> None:
    sent, sent_again = tcp.segment_counters()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        after, again_after = tcp.segment_counters()
    assert 0 <= sent_again <= again_after <= after
    assert after > sent


def test_port_without_listener_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1: Connection refused"):
        open_connection(["127.0.0.1"], Endpoint(port, bytes(16), None))


def test_port_with_a_full_queue_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "CONNECT_TIMEOUT_S", 0.2)
    waiting = []
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        for _ in range(3):  # the kernel drops what does not fit, like a firewall
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(address)
        with pytest.raises(ConnectionError, match=r"no answer within 0\.2 s"):
            open_connection(["127.0.0.1"], Endpoint(address[1], bytes(16), None))
    for connection in waiting:
        connection.close()


def test_port_that_sends_no_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "CONNECT_TIMEOUT_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(ConnectionError, match="received no answer"),
    ):
        open_connection(["127.0.0.1"], Endpoint(server.getsockname()[1], bytes(16), None))


def test_all_addresses_are_tried_and_all_errors_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1: .*; 127\.0\.0\.2: Connection refused"):
        open_connection(["127.0.0.1", "127.0.0.2"], Endpoint(port, bytes(16), None))


def test_names_are_resolved_in_parallel_to_routable_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str) -> Sequence[str]:
        if name == "unknown":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if name == "silent":
            time.sleep(60)
        return {"good": ("10.0.0.1",), "both": ("127.0.1.1", "10.0.0.2"), "self": ("127.0.1.1", "::1", "fe80::1")}[name]

    def lookups_within(seconds: float) -> Mapping[str, Lookup]:
        monkeypatch.setattr(tcp, "RESOLVE_TIMEOUT_S", seconds)
        return resolve_names(["good", "both", "self", "unknown", "silent"], resolve)

    lookups = with_enough_time(
        lookups_within, lambda lookups: all(lookups[name].addresses for name in ("good", "both")), 1
    )
    assert {name: lookup.addresses for name, lookup in lookups.items() if lookup.addresses} == {
        "good": ("10.0.0.1",),
        "both": ("10.0.0.2",),
    }
    assert lookups["good"].problem is None
    assert "127.0.1.1, ::1, fe80::1" in (lookups["self"].problem or "")
    assert lookups["unknown"].problem == "Name or service not known"
    assert (lookups["silent"].problem or "").startswith("not resolved within ")
