"""Addresses of host names."""

from __future__ import annotations

import socket

import pytest

from seatrial.util.resolver import resolve


def test_localhost_resolves_on_this_machine() -> None:
    addresses = resolve("localhost")
    assert "127.0.0.1" in addresses
    assert len(set(addresses)) == len(addresses)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(socket.gaierror):
        resolve("no-such-host.invalid")
