"""host.inventory: what every node is and has, and the settings of an operating system that break training."""

from __future__ import annotations

from collections.abc import Iterator

from seatrial.checks.base import Check, Options, Place
from seatrial.discover import host
from seatrial.discover.host import Amount, HostFacts
from seatrial.model import Fact, Metric, Observation, Outcome, Phase, Rule, Scope

METRICS = {
    "shm_bytes": "B",
    "shm_free": "B",
    "tmp_free": "B",
    "home_writable": "bool",
    "hung_mounts": "mounts",
    "nofile_soft": "files",
    "nofile_hard": "files",
    "memlock_unlimited": "bool",
    "hostname_resolves": "bool",
    "clock_known": "bool",
    "clock_synchronised": "bool",
    "rdma_known": "bool",
    "rdma_closed_devices": "devices",
    "rdma_idle_ports": "ports",
}

RULES = (
    Rule(
        metric="shm_bytes",
        expect=">= 1GiB",
        why="Data loader workers and NCCL's shared-memory transport allocate here: with Docker's default of 64 MiB "
        "they die of 'Bus error' or 'No space left on device'.",
        fix="Docker: --shm-size=16g or --ipc=host. Kubernetes: an emptyDir with medium: Memory at /dev/shm. "
        "Otherwise: mount -o remount,size=16G /dev/shm",
    ),
    Rule(
        metric="shm_free",
        expect=">= 1GiB",
        breach=Outcome.WARN,
        why="Segments that crashed jobs left behind take the room that the next job needs.",
        fix="Look whose they are: ls -l /dev/shm; delete those of jobs that have ended.",
    ),
    Rule(
        metric="tmp_free",
        expect=">= 1GiB",
        breach=Outcome.WARN,
        why="Error files of torchrun and the compile caches of torch and Triton go to the temporary folder.",
        fix="Find what fills it: du -xsh ${TMPDIR:-/tmp}/* | sort -h; or set TMPDIR to a folder with room.",
    ),
    Rule(
        metric="home_writable",
        expect="== 1 bool",
        breach=Outcome.WARN,
        why="Triton, Hugging Face and torch extensions keep caches under the home folder, and stop where they cannot.",
        fix="Set HOME to a folder that this user may write to, or TRITON_CACHE_DIR, HF_HOME and "
        "TORCH_EXTENSIONS_DIR each.",
    ),
    Rule(
        metric="hung_mounts",
        shows=("hung",),
        expect="== 0 mounts",
        why="A process that touches a filesystem whose server does not answer hangs, and with it the whole job.",
        fix="See fact 'hung' for which; try: timeout 5 stat -f MOUNT; reach its server, then umount -f -l MOUNT and "
        "mount it again.",
    ),
    # Two rules on one limit. The soft limit is 1024 on most distributions, with which small jobs run, and a process may
    # raise it (NCCL does, in the one process that all others report to). Beyond the hard limit only root gets.
    Rule(
        metric="nofile_soft",
        expect=">= 4096 files",
        breach=Outcome.WARN,
        why="Each tensor that a data loader worker hands over and each connection to a peer takes a file descriptor: "
        "wide jobs end with 'Too many open files'.",
        fix="ulimit -n 65536 in the job; for good: '* soft nofile 65536' in /etc/security/limits.d/, "
        "LimitNOFILE=1048576 for slurmd, --ulimit nofile=65536 for Docker.",
    ),
    Rule(
        metric="nofile_hard",
        expect=">= 4096 files",
        why="The job cannot raise its limit of open files beyond this, and NCCL and data loaders need more.",
        fix="'* hard nofile 1048576' in /etc/security/limits.d/, LimitNOFILE=1048576 for slurmd or containerd, "
        "--ulimit nofile=65536:1048576 for Docker.",
    ),
    Rule(
        metric="memlock_unlimited",
        expect="== 1 bool",
        where={"verbs_reachable": "yes"},
        why="RDMA pins the memory that it sends from: beyond the limit ibv_reg_mr fails with 'Cannot allocate memory', "
        "and NCCL with it.",
        fix="'* soft memlock unlimited' and '* hard memlock unlimited' in /etc/security/limits.d/, "
        "LimitMEMLOCK=infinity for slurmd or containerd, --ulimit memlock=-1 for Docker.",
    ),
    Rule(
        metric="hostname_resolves",
        shows=("hostname",),
        expect="== 1 bool",
        # One node needs no name. That several nodes reach each other is for a check that runs on all of them.
        breach=Outcome.WARN,
        why="Rendezvous and Gloo publish the address that a node's own name resolves to; where that is a loopback "
        "address no other node can connect.",
        fix='Try: getent ahosts "$(hostname)"; put the node\'s address in DNS or /etc/hosts, and take its name off '
        "the line of 127.0.0.1 or 127.0.1.1. Until then set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
    ),
    Rule(
        metric="clock_known",
        expect="== 1 bool",
        breach=Outcome.WARN,
        why="Here the kernel does not tell whether the clock is kept in time, as in some containers.",
        fix="Look on the host itself: timedatectl show -p NTPSynchronized",
    ),
    Rule(
        metric="clock_synchronised",
        shows=("clock",),
        expect="== 1 bool",
        breach=Outcome.WARN,
        where={"clock_known": "yes"},
        why="Munge, Slurm, Kerberos and TLS refuse a node whose clock has drifted, and its logs cannot be put in order "
        "beside those of others.",
        fix="timedatectl set-ntp true, or systemctl enable --now chrony (with rtcsync in chrony.conf, without which "
        "the kernel is not told); then: chronyc tracking",
    ),
    Rule(
        metric="rdma_known",
        shows=("unread",),
        expect="== 1 bool",
        breach=Outcome.WARN,
        why="Something about the InfiniBand or RoCE devices could not be read, so nothing vouches for them.",
        fix="See fact 'unread' for what and why; compare with: ibstat; rdma link",
    ),
    Rule(
        metric="rdma_closed_devices",
        expect="== 0 devices",
        breach=Outcome.WARN,
        where={"rdma_present": "yes"},
        why="NCCL cannot open these RDMA devices and quietly takes TCP instead, many times slower between nodes.",
        fix="Docker: --device=/dev/infiniband. Kubernetes: request the RDMA resource of the device plugin. "
        "Host: modprobe ib_uverbs; ls -l /dev/infiniband",
    ),
    Rule(
        metric="rdma_idle_ports",
        shows=("idle_ports",),
        expect="== 0 ports",
        # A port may be spare: only whoever wired the cluster knows.
        breach=Outcome.WARN,
        where={"rdma_present": "yes"},
        why="A port that is not ACTIVE carries no traffic: NCCL leaves it out, and its rail is slower or missing.",
        fix="See fact 'idle_ports' for which; ibstat. Polling: cable or the switch's port. LinkUp yet INIT: no "
        "subnet manager, see sminfo. Disabled: ip link set INTERFACE up. A spare port may stay as it is.",
    ),
)


def measure(place: Place, options: Options) -> Iterator[Observation]:
    place.note("reading /proc and /sys")
    facts = host.read(place.root)
    for area, value in facts.model_dump(mode="json").items():
        yield Fact(name=area, value=value)
    yield Fact(name="unread", value=dict(facts.unread()))
    yield from _gates(facts)
    for name, value in _numbers(facts):
        if value is not None:  # what could not be read is no number: its rule then has nothing to judge
            yield Metric(name=name, value=value, unit=METRICS[name], subject=place.node)


def _gates(facts: HostFacts) -> Iterator[Fact]:
    """Facts that decide whether a rule applies, and those that a fix points to."""
    rdma = facts.rdma
    yield Fact(name="clock_known", value=_word(facts.clock.synchronised is not None))
    yield Fact(name="rdma_present", value=_word(bool(rdma.devices)))
    yield Fact(name="verbs_reachable", value=_word(any(device.verbs for device in rdma.devices)))
    yield Fact(name="idle_ports", value=list(rdma.idle_ports))
    yield Fact(name="hung", value=[mount.target for mount in facts.mounts.filesystems if not mount.answers])


def _numbers(facts: HostFacts) -> Iterator[tuple[str, float | None]]:
    mounts, limits, rdma = facts.mounts, facts.limits, facts.rdma
    yield "shm_bytes", mounts.shm.size_bytes
    yield "shm_free", mounts.shm.free_bytes
    yield "tmp_free", mounts.tmp.free_bytes if mounts.tmp.writable else 0
    yield "home_writable", bool(mounts.home.writable)
    listed = "filesystems" not in mounts.unread
    yield "hung_mounts", sum(not mount.answers for mount in mounts.filesystems) if listed else None
    yield "nofile_soft", _count(limits.nofile.soft)
    yield "nofile_hard", _count(limits.nofile.hard)
    yield "memlock_unlimited", _memlock_unlimited(facts)
    yield "hostname_resolves", facts.hostname.reachable
    yield "clock_known", facts.clock.synchronised is not None
    yield "clock_synchronised", facts.clock.synchronised
    yield "rdma_known", rdma.known
    yield "rdma_closed_devices", len(rdma.closed_devices)
    yield "rdma_idle_ports", len(rdma.idle_ports)


def _memlock_unlimited(facts: HostFacts) -> bool:
    """Whether a process may pin as much as it likes: no limit, one beyond the memory there is, or CAP_IPC_LOCK.

    The kernel checks pinned memory against RLIMIT_MEMLOCK unless the process is so capable (ib_umem_get).
    """
    soft, total = facts.limits.memlock.soft, facts.memory.total_bytes
    return bool(soft == "unlimited" or facts.limits.ipc_lock or (total and soft >= total))


def _count(limit: Amount) -> int:
    return 2**63 - 1 if limit == "unlimited" else limit  # the greatest limit that getrlimit(2) could tell from none


def _word(yes: bool) -> str:
    return "yes" if yes else "no"


CHECK = Check(
    name="host.inventory",
    title="Operating system, limits, filesystems and network of every node",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    metrics=METRICS,
    rules=RULES,
    measure=measure,
    limit_s=120,
)
