"""host.inventory: operating system, limits, filesystems, clock and RDMA devices of every node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from seatrial.checks.base import Check, Context, Options, RuleFact, facts, metric
from seatrial.model import Observation, Outcome, Phase, Rule, Scope

if TYPE_CHECKING:
    from seatrial.discover.host import HostFacts

NO_LIMIT = 2**63 - 1  # reported for "unlimited": the largest signed 64-bit integer
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


def measure(context: Context, _options: Options) -> Iterator[Observation]:
    """Yield the facts and the metrics of the node."""
    from seatrial.discover import host

    context.progress("reading /proc and /sys")
    node = host.read(context.root)
    mounts, limits, clock_synchronised, rdma = node.mounts, node.limits, node.clock.synchronised, node.rdma
    hung_mounts = [mount.target for mount in mounts.filesystems if not mount.responding]
    yield from facts(node.model_dump(mode="json"))
    yield from facts(
        {
            "unreadable": dict(node.unreadable()),
            # conditions (applies_if) and evidence of the rules
            "clock_status_readable": "no" if clock_synchronised is None else "yes",
            "rdma_present": "yes" if rdma.devices else "no",
            "verbs_accessible": "yes" if any(device.verbs_accessible for device in rdma.devices) else "no",
            "inactive_ports": list(rdma.inactive_ports),
            "hung_mounts": hung_mounts,
        }
    )
    values: dict[str, float | None] = {
        "shm_bytes": mounts.shm.size_bytes,
        "shm_free": mounts.shm.free_bytes,
        "tmp_free": mounts.tmp.free_bytes if mounts.tmp.writable else 0,
        "home_writable": bool(mounts.home.writable),
        "hung_mounts": None if "filesystems" in mounts.unreadable else len(hung_mounts),
        "nofile_soft": NO_LIMIT if limits.nofile.soft == "unlimited" else limits.nofile.soft,
        "nofile_hard": NO_LIMIT if limits.nofile.hard == "unlimited" else limits.nofile.hard,
        "memlock_unlimited": _memlock_unlimited(node),
        "hostname_resolves": node.hostname.routable,
        "clock_status_readable": clock_synchronised is not None,
        "clock_synchronised": clock_synchronised,
        "rdma_status_readable": rdma.status_readable,
        "rdma_inaccessible_devices": len(rdma.inaccessible_devices),
        "rdma_inactive_ports": len(rdma.inactive_ports),
    }
    for name, value in values.items():
        if value is not None:  # a value that could not be read has no metric: its rule ends in ERROR
            yield metric(name, value, METRICS[name], context.node)


def _memlock_unlimited(node: HostFacts) -> bool:
    """Return whether a process may pin all memory: it has no limit, a limit >= total memory, or CAP_IPC_LOCK.

    The kernel checks pinned memory against RLIMIT_MEMLOCK unless the process has CAP_IPC_LOCK (ib_umem_get).
    """
    soft, total = node.limits.memlock.soft, node.memory.total_bytes
    return bool(soft == "unlimited" or node.limits.ipc_lock or (total and soft >= total))


RULES = (
    Rule(
        metric="shm_bytes",
        expect=">= 1GiB",
        meaning="Data loader workers and NCCL's shared-memory transport allocate in /dev/shm. With Docker's default of "
        "64 MiB they fail with 'Bus error' or 'No space left on device'.",
        fix="Docker: --shm-size=16g or --ipc=host. Kubernetes: an emptyDir with medium: Memory at /dev/shm. "
        "Otherwise: mount -o remount,size=16G /dev/shm",
    ),
    Rule(
        metric="shm_free",
        expect=">= 1GiB",
        outcome_if_violated=Outcome.WARN,
        meaning="Little free space in /dev/shm, often because of segments that crashed jobs left there.",
        fix="ls -l /dev/shm: find the owners; delete the files of jobs that have ended.",
    ),
    Rule(
        metric="tmp_free",
        expect=">= 1GiB",
        outcome_if_violated=Outcome.WARN,
        meaning="The temporary directory holds the error files of torchrun and the compile caches of torch and Triton.",
        fix="Find large files: du -xsh ${TMPDIR:-/tmp}/* | sort -h; or set TMPDIR to a directory with free space.",
    ),
    Rule(
        metric="home_writable",
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="Triton, Hugging Face and torch extensions write caches to the home directory, or fail.",
        fix="Set HOME to a writable directory, or set TRITON_CACHE_DIR, HF_HOME and TORCH_EXTENSIONS_DIR.",
    ),
    Rule(
        metric="hung_mounts",
        evidence_facts=("hung_mounts",),
        expect="== 0 mounts",
        meaning="The server of a mounted filesystem does not answer: processes that access it hang.",
        fix="Fact hung_mounts lists the mounts. Test: timeout 5 stat -f MOUNT. Restore the connection to the server, "
        "then umount -f -l MOUNT and mount it again.",
    ),
    # Two rules, for soft and hard limit. The soft limit is 1024 on most distributions, which is enough for small jobs.
    # A process may raise it up to the hard limit (NCCL does so in its root process).
    Rule(
        metric="nofile_soft",
        expect=">= 4096 files",
        outcome_if_violated=Outcome.WARN,
        meaning="Each tensor from a data loader worker and each connection to a peer takes a file descriptor: large "
        "jobs fail with 'Too many open files'.",
        fix="ulimit -n 65536 in the job; permanently: '* soft nofile 65536' in /etc/security/limits.d/, "
        "LimitNOFILE=1048576 for slurmd, --ulimit nofile=65536 for Docker.",
    ),
    Rule(
        metric="nofile_hard",
        expect=">= 4096 files",
        meaning="The job cannot raise its limit of open files above this value; NCCL and data loaders need more.",
        fix="'* hard nofile 1048576' in /etc/security/limits.d/, LimitNOFILE=1048576 for slurmd or containerd, "
        "--ulimit nofile=65536:1048576 for Docker.",
    ),
    Rule(
        metric="memlock_unlimited",
        expect="== 1 bool",
        applies_if={"verbs_accessible": "yes"},
        meaning="RDMA pins its buffers. Above the limit ibv_reg_mr fails with 'Cannot allocate memory', and so does "
        "NCCL.",
        fix="'* soft memlock unlimited' and '* hard memlock unlimited' in /etc/security/limits.d/, "
        "LimitMEMLOCK=infinity for slurmd or containerd, --ulimit memlock=-1 for Docker.",
    ),
    Rule(
        metric="hostname_resolves",
        evidence_facts=("hostname",),
        expect="== 1 bool",
        # WARN: a single node needs no name; nodes.connectivity checks names between nodes.
        outcome_if_violated=Outcome.WARN,
        meaning="Rendezvous and Gloo publish the address that the node's host name resolves to; other nodes cannot "
        "connect to a loopback address.",
        fix='Try: getent ahosts "$(hostname)"; put the node\'s address in DNS or /etc/hosts, and remove its name from '
        "the line of 127.0.0.1 or 127.0.1.1. Workaround: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
    ),
    Rule(
        metric="clock_status_readable",
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="The kernel does not report the clock status, for example in some containers.",
        fix="On the host: timedatectl show -p NTPSynchronized",
    ),
    Rule(
        metric="clock_synchronised",
        evidence_facts=("clock",),
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        applies_if={"clock_status_readable": "yes"},
        meaning="Clock not synchronized: munge, Slurm, Kerberos and TLS reject a node with a wrong clock, and its logs "
        "cannot be ordered with the logs of other nodes.",
        fix="timedatectl set-ntp true, or systemctl enable --now chrony (chrony.conf needs rtcsync to set the "
        "kernel's status); then: chronyc tracking",
    ),
    Rule(
        metric="rdma_status_readable",
        evidence_facts=("unreadable",),
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="Some attributes of the InfiniBand or RoCE devices could not be read; their state is unknown.",
        fix="Fact unreadable lists attributes and reasons; compare with: ibstat; rdma link",
    ),
    Rule(
        metric="rdma_inaccessible_devices",
        expect="== 0 devices",
        outcome_if_violated=Outcome.WARN,
        applies_if={"rdma_present": "yes"},
        meaning="NCCL cannot open these RDMA devices and falls back to TCP, which is many times slower between nodes.",
        fix="Docker: --device=/dev/infiniband. Kubernetes: request the RDMA resource of the device plugin. "
        "Host: modprobe ib_uverbs; ls -l /dev/infiniband",
    ),
    Rule(
        metric="rdma_inactive_ports",
        evidence_facts=("inactive_ports",),
        expect="== 0 ports",
        # WARN: an unused port may be intended.
        outcome_if_violated=Outcome.WARN,
        applies_if={"rdma_present": "yes"},
        meaning="NCCL does not use a port that is not ACTIVE: its rail is slower or missing.",
        fix="Fact inactive_ports lists the ports; ibstat. Polling: check the cable and the switch port. LinkUp but "
        "INIT: no subnet manager, see sminfo. Disabled: ip link set INTERFACE up. Ignore unused ports.",
    ),
)


CHECK = Check(
    name="host.inventory",
    title="Operating system, limits, filesystems, clock and RDMA devices",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    metrics=METRICS,
    rules=RULES,
    rule_facts={
        "verbs_accessible": RuleFact(reason="no RDMA device can be opened"),
        "clock_status_readable": RuleFact(reason="the clock synchronisation status is not readable"),
        "rdma_present": RuleFact(reason="no RDMA device"),
    },
    measure=measure,
    fact_roles={"rdma_devices": "rdma", "nics": "nics"},
    limit_s=120,
)
