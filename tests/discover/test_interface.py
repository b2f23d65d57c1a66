from __future__ import annotations

from seatrial.discover import interface


def test_an_address_has_its_interface_with_what_the_kernel_says_of_it() -> None:
    found = interface.holding("127.0.0.1")
    assert found is not None
    assert (found.name, found.speed_mbps) == ("lo", None)
    assert found.mtu >= 1280  # what IPv6 asks for at least (RFC 8200, section 5)


def test_nobody_here_has_the_address_of_another() -> None:
    assert interface.holding("192.0.2.1") is None  # for documentation alone (RFC 5737)
