"""Drills for several nodes of the test cluster."""

from __future__ import annotations

import os
import shlex
from functools import partial
from pathlib import Path
from typing import Any

from seatrial.drill.base import ONLY_ERROR, Expected
from seatrial.drill.cluster_nodes import (
    NODE,
    change_node,
    kill_slurmd,
    missing_cluster,
    on_nodes,
    run_before_tasks,
    run_on,
    set_variables,
    shape_link,
    start_slurmd,
    test_cluster,
    wait_until_idle,
)
from seatrial.drill.injection import Injection
from seatrial.worker import Heartbeat

_CHECK = "collectives.all_reduce"
_RANKS = 4  # two per node
# 120 s: longer than a drill needs to disturb the operation
_ALL_REDUCE: dict[str, dict[str, Any]] = {_CHECK: {"sizes": ["1MiB"], "min_seconds_per_size": 120}}
# The ports of the rendezvous on node0
_RENDEZVOUS_RULE = "OUTPUT --protocol tcp --destination node0 --dport 20000:29999 --jump DROP"
_FAKETIME = "/usr/lib/*/faketime/libfaketime.so.1"  # Debian package libfaketime
_LOSS_RULE = "INPUT --in-interface eth0 --match statistic --mode random --probability 0.2 --jump DROP"


def _rank_on_node(injection: Injection) -> Heartbeat:
    """Wait until all ranks are in the all-reduce; return the heartbeat of the last rank on NODE."""
    beats = injection.wait_for_ranks(_CHECK, _RANKS)
    return next(beat for _, beat in sorted(beats.items(), reverse=True) if beat.node == NODE)


def _faketime_libraries() -> list[Path]:
    return sorted(Path("/").glob(_FAKETIME.removeprefix("/")))


def _missing_faketime() -> str:
    missing = "" if _faketime_libraries() else f"needs {_FAKETIME}: apt-get install libfaketime"
    return missing_cluster() or missing


def _set_clock(injection: Injection) -> None:
    """Add 2 s to the time that the tasks of the node read.

    With libfaketime, since all nodes of the test cluster share the clock of one kernel. libfaketime also delays the end
    of waits with a time limit by 2 s.
    """
    set_variables(injection, LD_PRELOAD=str(_faketime_libraries()[0]), FAKETIME="+2s")


def _mount_other_filesystem(injection: Injection) -> None:
    """Mount an empty tmpfs over a folder on the node; the trial tests whether all nodes share the folder."""
    shared = injection.folder / "shared"
    shared.mkdir()
    injection.options["filesystem.shared"] = {"paths": [str(shared)]}
    path = shlex.quote(str(shared))
    change_node(injection, f"mount -t tmpfs tmpfs {path}", f"umount --lazy {path}")


def _limit_memlock(injection: Injection) -> None:
    """Restart slurmd of the node without CAP_IPC_LOCK, and limit the locked memory of its tasks to 64 KiB."""
    run_before_tasks(injection, "prlimit --pid $SLURM_TASK_PID --memlock=65536:65536\n")
    kill_slurmd(injection)
    injection.at_end(start_slurmd, injection)
    injection.at_end(kill_slurmd, injection)
    start_slurmd(injection, "setpriv --inh-caps=-ipc_lock --bounding-set=-ipc_lock")


def _replace_munge_key(injection: Injection) -> None:
    """Start a munged with another key on the node, and mount its socket over that of the cluster's munged."""
    folder = injection.folder / "munge"
    folder.mkdir(mode=0o755)
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    run, quoted = shlex.quote(str(test_cluster().folder / "run")), shlex.quote(str(folder))
    files = f"--key-file={quoted}/key --socket={quoted}/socket --pid-file={quoted}/pid --seed-file={quoted}/seed"
    injection.at_end(wait_until_idle)
    change_node(
        injection,
        f"munged --force {files} --log-file={quoted}/log && mount --bind {quoted}/socket {run}/munge.socket",
        f"umount {run}/munge.socket; kill $(cat {quoted}/pid)",
    )


def _unplug(injection: Injection) -> None:
    """Set the link of the node down and kill its processes, except its init: other nodes see a node without power."""
    _rank_on_node(injection)
    link = test_cluster().nodes[NODE].link
    injection.at_end(start_slurmd, injection)
    injection.at_end(injection.run_command, ["ip", "link", "set", link, "up"])
    injection.mark_injected()
    injection.run_command(["ip", "link", "set", link, "down"])
    run_on(injection, NODE, "kill -KILL -1")  # the shell that calls it is the only process that survives


def _drain(injection: Injection) -> None:
    """Drain the node with a reason, as a health check does."""
    injection.run_command(["scontrol", "update", f"nodename={NODE}", "state=drain", "reason=fan broken"])
    injection.at_end(wait_until_idle)
    injection.at_end(injection.run_command, ["scontrol", "update", f"nodename={NODE}", "state=resume"])


def _kill_rank(injection: Injection) -> None:
    """Send SIGKILL to a rank on the node; the heartbeat has its pid in the node's namespace."""
    beat = _rank_on_node(injection)
    injection.mark_injected()
    run_on(injection, NODE, f"kill -KILL {beat.pid}")


def _kill_slurmd_in_job(injection: Injection) -> None:
    """Kill slurmd on the node; the ranks there go on, until Slurm sets the node DOWN and ends the job."""
    _rank_on_node(injection)
    injection.at_end(start_slurmd, injection)
    injection.mark_injected()
    kill_slurmd(injection)


def _remove_name(injection: Injection) -> None:
    """Mount an /etc/hosts without node0 on the node."""
    hosts = injection.folder / "hosts"
    change_node(
        injection,
        f"grep -v node0 /etc/hosts >{hosts}; mount --bind {hosts} /etc/hosts",
        "umount /etc/hosts",
    )


def _plant_metadata(injection: Injection) -> None:
    """Put the metadata of an old torch on the Python path of the node, as if an old installation were still there."""
    folder = injection.folder / "old" / "torch-2.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.1.0\n", encoding="utf-8")
    set_variables(injection, PYTHONPATH=str(folder.parent))


DRILLS = (
    on_nodes(2, "iptables")(
        name="blocked-port",
        title="iptables drops packets to the rendezvous port from one of two nodes",
        checks={"nodes.reachable": {}},
        expected=Expected(
            refusal=r"preflight failed",
            cause="cannot connect to the rendezvous at",
            place=rf"{NODE}: cannot connect to the rendezvous at node0, port 2\d{{4}}",
            command=rf"^srun --nodelist={NODE} .*ping -c 3 node0; ip route get node0; nft list ruleset",
        ),
        prepare=partial(
            change_node, command=f"iptables --append {_RENDEZVOUS_RULE}", undo=f"iptables --delete {_RENDEZVOUS_RULE}"
        ),
    ),
    on_nodes(2, other=_missing_faketime)(
        name="clock-skew",
        title="libfaketime adds 2 s to the clock of one of two nodes",
        checks={"nodes.connectivity": {}},
        expected=Expected(
            metric="clock_skew",
            cause="clock_skew",
            place=rf"^{NODE}: ",
            command=rf"nodelist={NODE} .*chronyc tracking",
            action="fix-config",
        ),
        prepare=_set_clock,
    ),
    on_nodes(3)(
        name="folder-unshared",
        title="a tmpfs at the path of a shared folder on one of three nodes",
        checks={"filesystem.shared": {}},
        expected=Expected(
            metric="paths_not_shared",
            cause="filesystem_not_shared",
            place=rf"^{NODE}: ",
            command=rf"nodelist={NODE} .*df -hT .*/shared",
            action="fix-environment",
        ),
        prepare=_mount_other_filesystem,
    ),
    on_nodes(3, "iptables")(
        name="lossy-link",
        title="one of three nodes loses 20 % of the packets that it receives",
        checks={"collectives.all_reduce": {"sizes": ["4MiB"]}},
        expected=Expected(
            check="collectives.localization",
            metric="slow_ranks",
            cause="slow_node",
            place=rf"^{NODE}: ",
            command=rf"nodelist={NODE} .*ip -s link",
            action="check-cable",
        ),
        prepare=partial(change_node, command=f"iptables --append {_LOSS_RULE}", undo=f"iptables --delete {_LOSS_RULE}"),
        limit_s=600.0,  # TCP's timeouts slow the trial itself: it took 295 s
    ),
    on_nodes(3)(
        name="max-nchannels-on-node",
        title="NCCL_MAX_NCHANNELS=2 on one of three nodes",
        checks={"nodes.connectivity": {}},
        expected=Expected(
            metric="network_differing",
            cause="environment_variable",
            place=rf"^{NODE}: NCCL_MAX_NCHANNELS=2 is set on {NODE} only",
            command=rf"nodelist={NODE} .*NCCL_MAX_NCHANNELS",
            action="fix-environment",
        ),
        prepare=partial(set_variables, NCCL_MAX_NCHANNELS="2"),
    ),
    on_nodes(2, "setpriv", "prlimit")(
        name="memlock-low-on-node",
        title="locked memory is limited to 64 KiB on one of two nodes, without CAP_IPC_LOCK",
        # the check's rule applies only to nodes with RDMA devices; this threshold applies to any node
        checks={"host.inventory": {}},
        thresholds={"host.inventory": {"memlock_unlimited": "== 1 bool"}},
        expected=Expected(
            metric="memlock_unlimited",
            cause="memlock_limited",
            place=rf"^{NODE}: ",
            command=rf"nodelist={NODE} .*ulimit -l",
            action="fix-config",
        ),
        prepare=_limit_memlock,
    ),
    on_nodes(2, "munged")(
        name="munge-key",
        title="one of two nodes has another munge key",
        checks={"host.inventory": {}},
        expected=Expected(
            cause="node_authentication",
            place=rf"^{NODE}: ",
            command=rf"munge -n \| ssh {NODE} unmunge",
            action="fix-environment",
        ),
        prepare=_replace_munge_key,
    ),
    on_nodes(2)(
        name="node-dead",
        title="the link of one of two nodes goes down and all its processes are killed during an all-reduce",
        checks=_ALL_REDUCE,
        expected=Expected(
            outcomes=ONLY_ERROR,
            cause="node_unreachable",
            place=rf"^{NODE}: ",
            command=rf"ping -c 3 {NODE}",
            action="reboot-node",
        ),
        act=_unplug,
    ),
    on_nodes(2)(
        name="node-drained",
        title="scontrol sets one of two nodes to DRAIN",
        checks={"host.inventory": {}},
        expected=Expected(
            cause="node_drained",
            place=rf"^{NODE}: .*DRAIN: fan broken",
            command=rf"^scontrol show node {NODE}",
            action="fix-environment",
        ),
        prepare=_drain,
    ),
    on_nodes(3)(
        name="p2p-disabled-on-node",
        title="NCCL_P2P_DISABLE=1 on one of three nodes",
        checks={"nodes.connectivity": {}},
        expected=Expected(
            metric="network_differing",
            cause="environment_variable",
            place=rf"^{NODE}: NCCL_P2P_DISABLE=1 is set on {NODE} only",
            command=rf"nodelist={NODE} .*NCCL_P2P_DISABLE",
            action="fix-environment",
        ),
        prepare=partial(set_variables, NCCL_P2P_DISABLE="1"),
    ),
    on_nodes(2)(
        name="rank-killed-on-node",
        title="SIGKILL to a rank on one of two nodes during an all-reduce",
        checks=_ALL_REDUCE,
        expected=Expected(
            outcomes=ONLY_ERROR,
            cause="torchrun.killed",
            place=rf"rank \d+ \({NODE}",
            command=r"dmesg",
            action="fix-config",
        ),
        act=_kill_rank,
    ),
    on_nodes(3, "tc")(
        name="shaped-link",
        title="the link of one of three nodes is shaped to 200 Mbit/s",
        checks={"collectives.all_reduce": {"sizes": ["4MiB"]}},
        expected=Expected(
            check="collectives.localization",
            metric="slow_ranks",
            cause="slow_node",
            place=rf"^{NODE}: ",
            command=rf"nodelist={NODE} .*tc qdisc show",
            action="check-cable",
        ),
        prepare=partial(shape_link, discipline="tbf rate 200mbit burst 256kbit latency 100ms"),
    ),
    on_nodes(2)(
        name="shm-small-on-node",
        title="/dev/shm of 1 MiB on one of two nodes",
        checks={"host.inventory": {}},
        expected=Expected(
            metric="shm_bytes",
            cause="shm_too_small",
            place=rf"^{NODE}: ",
            command=rf"nodelist={NODE} .*df -h /dev/shm",
            action="fix-environment",
        ),
        prepare=partial(
            change_node, command="mount -o remount,size=1m /dev/shm", undo="mount -o remount,size=50% /dev/shm"
        ),
    ),
    on_nodes(2)(
        name="slurmd-dead",
        title="SIGKILL to slurmd on one of two nodes during an all-reduce",
        checks=_ALL_REDUCE,
        expected=Expected(
            outcomes=ONLY_ERROR,
            cause="slurmd_down",
            place=rf"^{NODE}: .*slurmd does not run",
            command=rf"ssh {NODE} systemctl status slurmd",
            action="restart-service",
        ),
        act=_kill_slurmd_in_job,
    ),
    on_nodes(2)(
        name="unresolvable-host",
        title="one of two nodes does not resolve the other's name",
        checks={"nodes.connectivity": {}},
        expected=Expected(
            metric="names_unresolved",
            cause="names_unresolved",
            place=rf"^{NODE}: .*node0",
            command=rf"nodelist={NODE} .*getent ahosts node0",
            action="fix-config",
        ),
        prepare=_remove_name,
    ),
    on_nodes(3)(
        name="version-differs",
        title="one of three nodes has a fake package entry (dist-info) of torch 2.1.0",
        checks={"nodes.connectivity": {}},
        expected=Expected(
            metric="nodes_differing",
            cause="node_differs",
            place=rf"^{NODE}: .*torch: 2\.1\.0",
            command=rf"nodelist={NODE} python3 -m torch.utils.collect_env",
            action="fix-config",
        ),
        prepare=_plant_metadata,
    ),
    on_nodes(2)(
        name="wrong-interface",
        title="GLOO_SOCKET_IFNAME=ib7 on one of two nodes, which has no such interface",
        checks={"nodes.reachable": {}},
        expected=Expected(
            refusal=r"preflight failed",
            cause="GLOO_SOCKET_IFNAME=ib7: this node has no interface ib7",
            place=rf"{NODE}: GLOO_SOCKET_IFNAME",
            command=r"^ip -br address",
        ),
        prepare=partial(set_variables, GLOO_SOCKET_IFNAME="ib7"),
    ),
)
