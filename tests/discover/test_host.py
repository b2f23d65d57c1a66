from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seatrial.discover import host
from seatrial.util import resolver
from tests.discover import trees


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    trees.node(tmp_path)
    monkeypatch.setattr(resolver, "resolve", lambda name: {"node3": ("10.0.4.3",)}[name])
    return tmp_path


def test_facts_of_this_machine_as_json() -> None:
    facts = host.read()
    assert facts.hostname.name == socket.gethostname()
    assert facts.os.kernel
    assert host.HostFacts.model_validate_json(facts.model_dump_json()) == facts


def test_a_node(root: Path) -> None:
    facts = host.read(root)
    assert (facts.os.name, facts.os.kernel) == ("Ubuntu 22.04.4 LTS", "5.15.0-105-generic")
    assert facts.os.machine == "Supermicro SYS-821GE-TNHR"
    assert (facts.hostname.name, facts.hostname.addresses, facts.hostname.routable) == ("node3", ("10.0.4.3",), True)
    assert facts.limits.ipc_lock is False


def test_without_proc_and_sys_fields_are_unreadable(tmp_path: Path) -> None:
    facts = host.read(tmp_path)
    unreadable = facts.unreadable()
    assert {
        "os.kernel",
        "cpu.threads",
        "memory.total_bytes",
        "mounts.filesystems",
        "nics.interfaces",
        "rdma.devices",
    } <= set(unreadable)
    assert {"hostname.name", "limits.ipc_lock", "cpu.numa", "software.driver"} <= set(unreadable)
    assert (facts.cpu.threads, facts.memory.total_bytes, facts.hostname.routable) == (None, None, False)
    assert json.loads(facts.model_dump_json())


def test_unreadable_fields_have_the_name_of_their_device(root: Path) -> None:
    trees.hca(root, "mlx5_0", "garbage", "5: LinkUp", "400 Gb/sec (4X NDR)")
    unreadable = host.read(root).unreadable()
    assert "expected a state" in unreadable["rdma.devices.mlx5_0.ports.1.state"]


@pytest.mark.parametrize(
    ("addresses", "routable"),
    [
        ((), False),
        (("127.0.1.1", "::1"), False),
        (("fe80::1",), False),
        (("127.0.1.1", "192.168.1.5"), True),
        (("2001:db8::7",), True),
    ],
)
def test_a_routable_hostname_has_an_address_besides_loopback(addresses: tuple[str, ...], routable: bool) -> None:
    assert host.HostnameFacts(name="node3", addresses=addresses).routable is routable


def test_a_hostname_that_does_not_resolve(tmp_path: Path) -> None:
    trees.write(tmp_path, {"proc/sys/kernel/hostname": "no-such-host.invalid\n"})
    facts = host.read(tmp_path).hostname
    assert facts.addresses == ()
    assert facts.unreadable["addresses"].startswith("no-such-host.invalid: ")


def test_a_hostname_that_is_too_long(tmp_path: Path) -> None:
    trees.write(tmp_path, {"proc/sys/kernel/hostname": "x" * 300 + "\n"})
    assert "addresses" in host.read(tmp_path).hostname.unreadable


def test_a_name_server_that_does_not_respond(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "resolve", lambda _name: time.sleep(30))
    monkeypatch.setattr(resolver, "RESOLVE_TIMEOUT_S", 0.2)
    assert host.read(root).hostname.unreadable == {"addresses": "node3 did not resolve within 0.2 s"}


def test_limits_are_those_of_the_process() -> None:
    program = "from seatrial.discover import host; print(host.read().limits.model_dump_json())"
    command = f"ulimit -S -n 512; ulimit -H -n 1000; ulimit -l 64; exec '{sys.executable}' -c '{program}'"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    limits = json.loads(result.stdout)
    assert limits["nofile"] == {"soft": 512, "hard": 1000}
    assert limits["memlock"] == {"soft": 65536, "hard": 65536}


@pytest.mark.parametrize(
    ("capabilities", "uid_map", "expected"),
    [
        ("000001ffffffffff", "0 0 4294967295", True),
        ("0000000000004000", "0 0 4294967295", True),
        ("00000000a80425fb", "0 0 4294967295", False),  # Docker's default set
        ("000001ffffffffff", "0 1000 1", False),  # root of a user namespace
    ],
)
def test_the_capability_to_lock_memory(root: Path, capabilities: str, uid_map: str, expected: bool) -> None:
    trees.write(root, {"proc/self/status": f"CapEff:\t{capabilities}\n", "proc/self/uid_map": f"{uid_map}\n"})
    assert host.read(root).limits.ipc_lock is expected


def test_container_runtime(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(variable, raising=False)
    assert host.read(root).os.container is None
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert host.read(root).os.container == "kubernetes"
    (root / ".dockerenv").touch()
    assert host.read(root).os.container == "docker"
