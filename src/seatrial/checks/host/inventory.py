"""host.inventory: operating system, limits, filesystems, clock and RDMA devices of every node."""

from __future__ import annotations

from seatrial.checks.cause import Cause
from seatrial.checks.check import Check, Context, Options, facts
from seatrial.checks.declare import Answers, absent, metric, unreadable, value, warning
from seatrial.model import Phase, Scope

NO_LIMIT = 2**63 - 1  # reported for "unlimited": the largest signed 64-bit integer


def measure(context: Context, _options: Options) -> Answers:
    from seatrial.discover import host

    context.progress("reading /proc and /sys")
    node = host.read(context.root)
    mounts, clock, rdma = node.mounts, node.clock, node.rdma
    recorded, problems = node.model_dump(mode="json"), node.unreadable()
    verbs_accessible = "yes" if any(device.verbs_accessible for device in rdma.devices) else "no"
    yield from facts({**recorded, "unreadable": problems, "verbs_accessible": verbs_accessible})
    space = {
        "shm_bytes": mounts.shm.size_bytes,
        "shm_free": mounts.shm.free_bytes,
        "tmp_free": mounts.tmp.free_bytes if mounts.tmp.writable else 0,
    }
    unreadable_mounts = "; ".join(f"{name}: {text}" for name, text in problems.items() if name.startswith("mounts."))
    for name, size in space.items():
        yield unreadable(name, unreadable_mounts) if size is None else value(name, size)
    yield value("home_writable", bool(mounts.home.writable))
    hung_mounts = [mount.target for mount in mounts.filesystems if not mount.responding]
    if "filesystems" in mounts.unreadable:
        yield unreadable("hung_mounts", mounts.unreadable["filesystems"])
    else:
        yield value("hung_mounts", len(hung_mounts), evidence=hung_mounts)
    for name, limit in (("nofile_soft", node.limits.nofile.soft), ("nofile_hard", node.limits.nofile.hard)):
        yield value(name, NO_LIMIT if limit == "unlimited" else limit)
    # The kernel checks pinned memory against RLIMIT_MEMLOCK unless the process has CAP_IPC_LOCK (ib_umem_get)
    memlock, total = node.limits.memlock.soft, node.memory.total_bytes
    may_pin_all = memlock == "unlimited" or node.limits.ipc_lock or (total and memlock >= total)
    yield value("memlock_unlimited", bool(may_pin_all))
    yield value("hostname_resolves", node.hostname.routable, evidence=recorded["hostname"])
    yield value("clock_status_readable", clock.synchronised is not None)
    if clock.synchronised is None:
        yield absent("clock_synchronised", "the clock synchronisation status is not readable")
    else:
        yield value("clock_synchronised", clock.synchronised, evidence=recorded["clock"])
    yield value("rdma_status_readable", rdma.status_readable, evidence={"unreadable": dict(problems)})
    if not rdma.devices:
        yield absent(("rdma_inaccessible_devices", "rdma_inactive_ports"), "no RDMA device")
        return
    yield value("rdma_inaccessible_devices", len(rdma.inaccessible_devices), evidence=list(rdma.inaccessible_devices))
    yield value("rdma_inactive_ports", len(rdma.inactive_ports), evidence=list(rdma.inactive_ports))


CHECK = Check(
    name="host.inventory",
    title="Operating system, limits, filesystems, clock and RDMA devices",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    measure=measure,
    fact_roles={"rdma_devices": "rdma", "nics": "nics"},
    limit_s=120,
    declared=(
        metric(
            "shm_bytes",
            ">= 1GiB",
            "Data loader workers and NCCL's shared-memory transport allocate in /dev/shm. With Docker's default of "
            "64 MiB they fail with 'Bus error' or 'No space left on device'.",
            "Docker: --shm-size=16g or --ipc=host. Kubernetes: an emptyDir with medium: Memory at /dev/shm. "
            "Otherwise: mount -o remount,size=16G /dev/shm",
        ),
        warning(
            "shm_free",
            ">= 1GiB",
            "Little free space in /dev/shm, often because of segments that crashed jobs left there.",
            "ls -l /dev/shm: find the owners; delete the files of jobs that have ended.",
        ),
        warning(
            "tmp_free",
            ">= 1GiB",
            "Little free space, or not writable (0): the temporary directory holds the error files of torchrun and the "
            "compile caches of torch and Triton.",
            "Find large files: du -xsh ${TMPDIR:-/tmp}/* | sort -h; or set TMPDIR to a directory with free space.",
        ),
        warning(
            "home_writable",
            "yes",
            "Triton, Hugging Face and torch extensions write caches to the home directory, or fail.",
            "Set HOME to a writable directory, or set TRITON_CACHE_DIR, HF_HOME and TORCH_EXTENSIONS_DIR.",
        ),
        metric(
            "hung_mounts",
            "== 0 mounts",
            "The server of a mounted filesystem does not answer: processes that access it hang.",
            "Test each of these mounts: timeout 5 stat -f MOUNT. Restart the filesystem's client or server, or restore "
            "the connection; umount -f -l MOUNT removes a mount whose server is gone; then mount it again.",
            cause=Cause(
                id="hung_mounts",
                title="a mounted filesystem does not answer",
                place="node",
                wrong_results=True,
                explains=("filesystem.*", "train.*"),
                signatures=("host.hung_task", "filesystem.endpoint_lost"),
                first_command="grep -E ' (nfs|nfs4|lustre|beegfs|fuse)' /proc/mounts; "
                "dmesg | grep -iE 'nfs|lustre|beegfs' | tail",
                action="restart-service",
            ),
        ),
        # The soft limit is 1024 on most distributions, which is enough for small jobs. A process may raise it up to the
        # hard limit (NCCL does so in its root process).
        warning(
            "nofile_soft",
            ">= 4096 files",
            "Each tensor from a data loader worker and each connection to a peer takes a file descriptor: large "
            "jobs fail with 'Too many open files'.",
            "ulimit -n 65536 in the job; permanently: '* soft nofile 65536' in /etc/security/limits.d/, "
            "LimitNOFILE=1048576 for slurmd, --ulimit nofile=65536 for Docker.",
        ),
        metric(
            "nofile_hard",
            ">= 4096 files",
            "The job cannot raise its limit of open files above this value; NCCL and data loaders need more.",
            "'* hard nofile 1048576' in /etc/security/limits.d/, LimitNOFILE=1048576 for slurmd or containerd, "
            "--ulimit nofile=65536:1048576 for Docker.",
        ),
        metric(
            "memlock_unlimited",
            "yes",
            "RDMA pins its buffers. Above the limit ibv_reg_mr fails with 'Cannot allocate memory', and so does NCCL.",
            "'* soft memlock unlimited' and '* hard memlock unlimited' in /etc/security/limits.d/, "
            "LimitMEMLOCK=infinity for slurmd or containerd, --ulimit memlock=-1 for Docker.",
            when="verbs_accessible == yes",
        ),
        warning(
            "hostname_resolves",
            "yes",
            "Rendezvous and Gloo publish the address that the node's host name resolves to; other nodes cannot "
            "connect to a loopback address.",
            'Try: getent ahosts "$(hostname)"; put the node\'s address in DNS or /etc/hosts, and remove its name from '
            "the line of 127.0.0.1 or 127.0.1.1. Workaround: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
            # WARN: a single node needs no name; nodes.connectivity checks names between nodes.
        ),
        warning(
            "clock_status_readable",
            "yes",
            "The kernel does not report the clock status, for example in some containers.",
            "On the host: timedatectl show -p NTPSynchronized",
        ),
        warning(
            "clock_synchronised",
            "yes",
            "Clock not synchronized: munge, Slurm, Kerberos and TLS reject a node with a wrong clock, and its logs "
            "cannot be ordered with the logs of other nodes.",
            "timedatectl set-ntp true, or systemctl enable --now chrony (chrony.conf needs rtcsync to set the "
            "kernel's status); then: chronyc tracking",
        ),
        warning(
            "rdma_status_readable",
            "yes",
            "Some attributes of the InfiniBand or RoCE devices could not be read; their state is unknown.",
            "Compare the attributes under unreadable with: ibstat; rdma link",
        ),
        warning(
            "rdma_inaccessible_devices",
            "== 0 devices",
            "NCCL cannot open these RDMA devices and falls back to TCP, which is many times slower between nodes.",
            "Docker: --device=/dev/infiniband. Kubernetes: request the RDMA resource of the device plugin. "
            'Host: modprobe ib_uverbs; ls -l /dev/infiniband; a udev rule with MODE="0666"',
            cause=Cause(
                id="rdma_devices_inaccessible",
                title="this user cannot open the RDMA devices",
                place="node",
                wrong_results=True,
                explains=("collectives.*", "train.*", "fabric.*"),
                signatures=("infiniband.open_device",),
                first_command="ls -l /dev/infiniband; id",
                action="fix-environment",
            ),
        ),
        warning(
            "rdma_inactive_ports",
            "== 0 ports",
            "NCCL does not use a port that is not ACTIVE: its rail is slower or missing.",
            "See ibstat. Polling: check the cable and the switch port. LinkUp but INIT: no subnet manager, see sminfo. "
            "Disabled: ip link set INTERFACE up. Ignore unused ports.",
            # WARN: an unused port may be intended.
            cause=Cause(
                id="rdma_ports_inactive",
                title="RDMA ports of the node are not active",
                place="node",
                explains=("collectives.*", "train.*", "fabric.*"),
                signatures=("infiniband.port_down", "infiniband.link_down"),
                first_command='ibstat | grep -E "CA \'|State|Physical state|Rate"',
                action="check-cable",
            ),
        ),
    ),
)
