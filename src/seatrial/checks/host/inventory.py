"""host.inventory: what every node is and has, and the settings of an operating system that break training."""

from __future__ import annotations

from collections.abc import Iterator

from seatrial.checks.base import Check, Context, Options, facts, metric
from seatrial.discover import host
from seatrial.discover.host import HostFacts
from seatrial.model import Observation, Outcome, Phase, Rule, Scope

NO_LIMIT = 2**63 - 1  # the greatest limit that getrlimit(2) could tell from none
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
    "clock_status_readable": "bool",
    "clock_synchronised": "bool",
    "rdma_status_readable": "bool",
    "rdma_inaccessible_devices": "devices",
    "rdma_inactive_ports": "ports",
}


def measure(context: Context, options: Options) -> Iterator[Observation]:
    context.progress("reading /proc and /sys")
    found = host.read(context.root)
    mounts, limits, clock, rdma = found.mounts, found.limits, found.clock.synchronised, found.rdma
    yield from facts(found.model_dump(mode="json"))
    yield from facts(
        {
            "unread": dict(found.unreadable()),
            # the rules ask for these, or a fix points to them
            "clock_status_readable": "no" if clock is None else "yes",
            "rdma_present": "yes" if rdma.devices else "no",
            "verbs_accessible": "yes" if any(device.verbs_accessible for device in rdma.devices) else "no",
            "inactive_ports": list(rdma.inactive_ports),
            "hung": [mount.target for mount in mounts.filesystems if not mount.responding],
        }
    )
    values: dict[str, float | None] = {
        "shm_bytes": mounts.shm.size_bytes,
        "shm_free": mounts.shm.free_bytes,
        "tmp_free": mounts.tmp.free_bytes if mounts.tmp.writable else 0,
        "home_writable": bool(mounts.home.writable),
        "hung_mounts": None
        if "filesystems" in mounts.unreadable
        else sum(not one.responding for one in mounts.filesystems),
        "nofile_soft": NO_LIMIT if limits.nofile.soft == "unlimited" else limits.nofile.soft,
        "nofile_hard": NO_LIMIT if limits.nofile.hard == "unlimited" else limits.nofile.hard,
        "memlock_unlimited": _memlock_unlimited(found),
        "hostname_resolves": found.hostname.routable,
        "clock_status_readable": clock is not None,
        "clock_synchronised": clock,
        "rdma_status_readable": rdma.status_readable,
        "rdma_inaccessible_devices": len(rdma.inaccessible_devices),
        "rdma_inactive_ports": len(rdma.inactive_ports),
    }
    for name, value in values.items():
        if value is not None:  # what could not be read is no number: its rule then has nothing to judge
            yield metric(name, value, METRICS[name], context.node)


def _memlock_unlimited(found: HostFacts) -> bool:
    """Whether a process may pin as much as it likes: no limit, one beyond the memory there is, or CAP_IPC_LOCK.

    The kernel checks pinned memory against RLIMIT_MEMLOCK unless the process is so capable (ib_umem_get).
    """
    soft, total = found.limits.memlock.soft, found.memory.total_bytes
    return bool(soft == "unlimited" or found.limits.ipc_lock or (total and soft >= total))


RULES = (
    Rule(
        metric="shm_bytes",
        expect=">= 1GiB",
        meaning="Data loader workers and NCCL's shared-memory transport allocate here: with Docker's default of 64 MiB "
        "they die of 'Bus error' or 'No space left on device'.",
        fix="Docker: --shm-size=16g or --ipc=host. Kubernetes: an emptyDir with medium: Memory at /dev/shm. "
        "Otherwise: mount -o remount,size=16G /dev/shm",
    ),
    Rule(
        metric="shm_free",
        expect=">= 1GiB",
        outcome_if_violated=Outcome.WARN,
        meaning="Segments that crashed jobs left behind take the room that the next job needs.",
        fix="Look whose they are: ls -l /dev/shm; delete those of jobs that have ended.",
    ),
    Rule(
        metric="tmp_free",
        expect=">= 1GiB",
        outcome_if_violated=Outcome.WARN,
        meaning="Error files of torchrun and the compile caches of torch and Triton go to the temporary folder.",
        fix="Find what fills it: du -xsh ${TMPDIR:-/tmp}/* | sort -h; or set TMPDIR to a folder with room.",
    ),
    Rule(
        metric="home_writable",
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="Triton, Hugging Face and torch extensions keep caches under the home folder, and stop where they cannot.",
        fix="Set HOME to a folder that this user may write to, or TRITON_CACHE_DIR, HF_HOME and "
        "TORCH_EXTENSIONS_DIR each.",
    ),
    Rule(
        metric="hung_mounts",
        evidence_facts=("hung",),
        expect="== 0 mounts",
        meaning="A process that touches a filesystem whose server does not answer hangs, and with it the whole job.",
        fix="See fact 'hung' for which; try: timeout 5 stat -f MOUNT; reach its server, then umount -f -l MOUNT and "
        "mount it again.",
    ),
    # Two rules on one limit. The soft limit is 1024 on most distributions, with which small jobs run, and a process may
    # raise it (NCCL does, in the one process that all others report to). Beyond the hard limit only root gets.
    Rule(
        metric="nofile_soft",
        expect=">= 4096 files",
        outcome_if_violated=Outcome.WARN,
        meaning="Each tensor that a data loader worker hands over and each connection to a peer takes a file descriptor: "
        "wide jobs end with 'Too many open files'.",
        fix="ulimit -n 65536 in the job; for good: '* soft nofile 65536' in /etc/security/limits.d/, "
        "LimitNOFILE=1048576 for slurmd, --ulimit nofile=65536 for Docker.",
    ),
    Rule(
        metric="nofile_hard",
        expect=">= 4096 files",
        meaning="The job cannot raise its limit of open files beyond this, and NCCL and data loaders need more.",
        fix="'* hard nofile 1048576' in /etc/security/limits.d/, LimitNOFILE=1048576 for slurmd or containerd, "
        "--ulimit nofile=65536:1048576 for Docker.",
    ),
    Rule(
        metric="memlock_unlimited",
        expect="== 1 bool",
        applies_if={"verbs_accessible": "yes"},
        meaning="RDMA pins the memory that it sends from: beyond the limit ibv_reg_mr fails with 'Cannot allocate memory', "
        "and NCCL with it.",
        fix="'* soft memlock unlimited' and '* hard memlock unlimited' in /etc/security/limits.d/, "
        "LimitMEMLOCK=infinity for slurmd or containerd, --ulimit memlock=-1 for Docker.",
    ),
    Rule(
        metric="hostname_resolves",
        evidence_facts=("hostname",),
        expect="== 1 bool",
        # One node needs no name. That several nodes reach each other is for a check that runs on all of them.
        outcome_if_violated=Outcome.WARN,
        meaning="Rendezvous and Gloo publish the address that a node's own name resolves to; where that is a loopback "
        "address no other node can connect.",
        fix='Try: getent ahosts "$(hostname)"; put the node\'s address in DNS or /etc/hosts, and take its name off '
        "the line of 127.0.0.1 or 127.0.1.1. Until then set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
    ),
    Rule(
        metric="clock_status_readable",
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="Here the kernel does not tell whether the clock is kept in time, as in some containers.",
        fix="Look on the host itself: timedatectl show -p NTPSynchronized",
    ),
    Rule(
        metric="clock_synchronised",
        evidence_facts=("clock",),
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        applies_if={"clock_status_readable": "yes"},
        meaning="Munge, Slurm, Kerberos and TLS refuse a node whose clock has drifted, and its logs cannot be put in order "
        "beside those of others.",
        fix="timedatectl set-ntp true, or systemctl enable --now chrony (with rtcsync in chrony.conf, without which "
        "the kernel is not told); then: chronyc tracking",
    ),
    Rule(
        metric="rdma_status_readable",
        evidence_facts=("unread",),
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="Something about the InfiniBand or RoCE devices could not be read, so nothing vouches for them.",
        fix="See fact 'unread' for what and why; compare with: ibstat; rdma link",
    ),
    Rule(
        metric="rdma_inaccessible_devices",
        expect="== 0 devices",
        outcome_if_violated=Outcome.WARN,
        applies_if={"rdma_present": "yes"},
        meaning="NCCL cannot open these RDMA devices and quietly takes TCP instead, many times slower between nodes.",
        fix="Docker: --device=/dev/infiniband. Kubernetes: request the RDMA resource of the device plugin. "
        "Host: modprobe ib_uverbs; ls -l /dev/infiniband",
    ),
    Rule(
        metric="rdma_inactive_ports",
        evidence_facts=("inactive_ports",),
        expect="== 0 ports",
        # A port may be spare: only whoever wired the cluster knows.
        outcome_if_violated=Outcome.WARN,
        applies_if={"rdma_present": "yes"},
        meaning="A port that is not ACTIVE carries no traffic: NCCL leaves it out, and its rail is slower or missing.",
        fix="See fact 'inactive_ports' for which; ibstat. Polling: cable or the switch's port. LinkUp yet INIT: no "
        "subnet manager, see sminfo. Disabled: ip link set INTERFACE up. A spare port may stay as it is.",
    ),
)


CHECK = Check(
    name="host.inventory",
    title="Operating system, limits, filesystems and network of every node",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    metrics=METRICS,
    rules=RULES,
    measure=measure,
    fact_roles={"rdma_devices": "rdma"},
    limit_s=120,
)
