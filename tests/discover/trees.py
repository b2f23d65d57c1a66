"""Files of /proc, /sys and /etc as on real machines, written under a folder of the test."""

from __future__ import annotations

from pathlib import Path

from tests.paths import FIXTURES

MOUNTINFO = (FIXTURES / "host" / "mountinfo-gpu-node.txt").read_text()


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def node(root: Path) -> None:
    """Two sockets of 4 cores with 2 threads each, 2 NUMA nodes, 2 TiB; one Ethernet interface; no RDMA, no GPU."""
    write(
        root,
        {
            "etc/os-release": 'PRETTY_NAME="Ubuntu 22.04.4 LTS"\nNAME="Ubuntu"\nVERSION_ID="22.04"\n',
            "proc/sys/kernel/osrelease": "5.15.0-105-generic\n",
            "proc/sys/kernel/hostname": "node3\n",
            "proc/cpuinfo": "processor\t: 0\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R) Platinum 8468\n",
            "proc/meminfo": "MemTotal:       2113384312 kB\nMemAvailable:   2000000000 kB\nSwapTotal:      0 kB\n",
            "proc/self/cgroup": "0::/system.slice/slurmd.service\n",
            "proc/self/mountinfo": MOUNTINFO,
            "proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\nCpus_allowed_list:\t0-7\n",
            "proc/self/uid_map": "         0          0 4294967295\n",
            "sys/class/dmi/id/sys_vendor": "Supermicro\n",
            "sys/class/dmi/id/product_name": "SYS-821GE-TNHR\n",
            "sys/devices/system/cpu/online": "0-15\n",
            "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
            "sys/fs/cgroup/system.slice/slurmd.service/memory.max": "max\n",
            "sys/fs/cgroup/system.slice/slurmd.service/cpu.max": "max 100000\n",
        },
    )
    for cpu in range(16):
        core = cpu % 8
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = {"physical_package_id": f"{core // 4}\n", "thread_siblings_list": f"{core},{core + 8}\n"}
        write(root, {f"{topology}/{name}": value for name, value in siblings.items()})
    for numa, cpus in enumerate(("0-3,8-11", "4-7,12-15")):
        folder = f"sys/devices/system/node/node{numa}"
        write(root, {f"{folder}/cpulist": f"{cpus}\n", f"{folder}/meminfo": f"Node {numa} MemTotal:  1056692156 kB\n"})
    for folder in ("dev/shm", "tmp", "root", "scratch", "shared", "mnt/my data", "opt/b"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    nic(root, "eno1", speed="25000\n")
    write(root, {"sys/class/net/lo/mtu": "65536\n"})


def nic(root: Path, name: str, speed: str) -> None:
    """A physical interface with the driver bnxt_en on NUMA node 0."""
    folder = f"sys/class/net/{name}"
    values = {"operstate": "up\n", "mtu": "9000\n", "address": "3c:ec:ef:00:00:01\n", "device/numa_node": "0\n"}
    write(root, {f"{folder}/{key}": value for key, value in values.items()} | {f"{folder}/speed": speed})
    (root / "sys/bus/pci/drivers/bnxt_en").mkdir(parents=True, exist_ok=True)
    (root / folder / "device/driver").symlink_to(root / "sys/bus/pci/drivers/bnxt_en")


def eight_mlx5(root: Path) -> None:
    """Eight InfiniBand ports of 400 Gb/s, the last one without cable, and a RoCE port: mlx5_0 to mlx5_8."""
    for index in range(7):
        hca(root, f"mlx5_{index}", "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)")
    hca(root, "mlx5_7", "1: DOWN", "2: Polling", "10 Gb/sec (4X SDR)")
    hca(root, "mlx5_8", "4: ACTIVE", "5: LinkUp", "100 Gb/sec (4X EDR)", netdev="ens1f0np0")
    write(root, {"sys/module/nvidia_peermem/refcnt": "0\n"})


def hca(root: Path, name: str, state: str, physical: str, rate: str, netdev: str = "") -> None:
    """A ConnectX-7 with one port; RoCE on the interface ``netdev`` if given, else InfiniBand."""
    folder, number = f"sys/class/infiniband/{name}", name.removeprefix("mlx5_")
    port = {
        "state": f"{state}\n",
        "phys_state": f"{physical}\n",
        "rate": f"{rate}\n",
        "link_layer": "Ethernet\n" if netdev else "InfiniBand\n",
    }
    device = {"hca_type": "MT4129\n", "fw_ver": "28.39.1002\n", "device/numa_node": "1\n"}
    write(root, {f"{folder}/{key}": value for key, value in device.items()})
    write(root, {f"{folder}/ports/1/{key}": value for key, value in port.items()})
    if netdev:
        write(root, {f"{folder}/ports/1/gid_attrs/ndevs/0": f"{netdev}\n"})
    write(root, {f"sys/class/infiniband_verbs/uverbs{number}/ibdev": f"{name}\n"})
    write(root, {f"dev/infiniband/uverbs{number}": ""})


GPU_BRIDGE, NIC_BRIDGE = "0000:15:01.0", "0000:15:02.0"  # ports of a PCIe switch


def gpu_host(root: Path) -> None:
    """``node`` with an H200 and mlx5_0 behind one PCIe switch, and settings as NVIDIA and NCCL recommend them."""
    node(root)
    hca(root, "mlx5_0", "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)")
    (root / "sys/class/infiniband/mlx5_0/device/numa_node").unlink()
    (root / "sys/class/infiniband/mlx5_0/device").rmdir()
    root_port = "sys/devices/pci0000:00/0000:00:01.0"
    gpu = pci_device(root, f"{root_port}/{GPU_BRIDGE}/0000:18:00.0", "0x10de", "0x030200")
    nic = pci_device(root, f"{root_port}/{NIC_BRIDGE}/0000:19:00.0", "0x15b3", "0x020700")
    for bridge in (root_port, f"{root_port}/{GPU_BRIDGE}", f"{root_port}/{NIC_BRIDGE}"):
        pci_device(root, bridge, "0x1000", "0x060400")
        (root / bridge / "config").write_bytes(pci_config(acs_control=0))
    (root / "sys/class/infiniband/mlx5_0/device").symlink_to(nic)
    for group, device in enumerate((gpu, nic)):
        write(root, {f"sys/kernel/iommu_groups/{group}/type": "identity\n"})
        (device / "iommu_group").symlink_to(root / f"sys/kernel/iommu_groups/{group}")
    cpus = "sys/devices/system/cpu"
    write(
        root,
        {
            "proc/driver/nvidia/version": (FIXTURES / "host" / "nvidia-version-open.txt").read_text(),
            "proc/driver/nvidia/params": (FIXTURES / "host" / "nvidia-params.txt")
            .read_text()
            .replace("Only: 1", "Only: 0"),
            "proc/sys/kernel/numa_balancing": "0\n",
            f"{cpus}/intel_pstate/no_turbo": "0\n",
            **{f"{cpus}/cpu{cpu}/cpufreq/scaling_governor": "performance\n" for cpu in range(16)},
            **{
                f"{cpus}/cpu0/cpuidle/state{number}/name": f"{name}\n"
                for number, name in enumerate(("POLL", "C1", "C6"))
            },
            **{f"{cpus}/cpu0/cpuidle/state{number}/latency": f"{us}\n" for number, us in enumerate((0, 1, 290))},
            **{f"{cpus}/cpu0/cpuidle/state{number}/disable": "0\n" for number in range(3)},
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        },
    )
    meminfo = root / "proc/meminfo"
    meminfo.write_text(
        meminfo.read_text() + "HugePages_Total:    1024\nHugePages_Free:     1024\nHugepagesize:       2048 kB\n"
    )


def pci_device(root: Path, path: str, vendor: str, kind: str) -> Path:
    """The folder of a PCI device at ``path``, with its link in /sys/bus/pci/devices."""
    write(root, {f"{path}/vendor": f"{vendor}\n", f"{path}/class": f"{kind}\n"})
    link = root / "sys/bus/pci/devices" / Path(path).name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(root / path)
    return root / path


def pci_config(acs_control: int | None) -> bytes:
    """The configuration space of a bridge: AER at 0x100, and ACS at 0x148 unless ``acs_control`` is None."""
    config = bytearray(4096)
    config[0x100:0x104] = (0x148 << 20 | 2 << 16 | 0x0001 if acs_control is not None else 2 << 16 | 0x0001).to_bytes(
        4, "little"
    )
    if acs_control is not None:
        config[0x148:0x14C] = (1 << 16 | 0x000D).to_bytes(4, "little")  # the last capability
        config[0x14C:0x14E] = (0x005F).to_bytes(2, "little")
        config[0x14E:0x150] = acs_control.to_bytes(2, "little")
    return bytes(config)


def roce_gids(root: Path, name: str, addresses: dict[int, tuple[str, str]]) -> None:
    """The GID table of port 1: index → address as in /sys and type. The other entries are empty, as on ConnectX."""
    port = f"sys/class/infiniband/{name}/ports/1"
    write(root, {f"{port}/gids/{index}": "0000:0000:0000:0000:0000:0000:0000:0000\n" for index in range(8)})
    for index, (address, kind) in addresses.items():
        write(root, {f"{port}/gids/{index}": f"{address}\n", f"{port}/gid_attrs/types/{index}": f"{kind}\n"})


def on_pci(root: Path, name: str, path: str, speed: str, width: int) -> None:
    """Move an RDMA device to the PCI ``path``, such as ``0000:15:01.0/0000:18:00.0``, with this link."""
    link, target = root / "sys/class/infiniband" / name / "device", root / "sys/devices/pci0000:15" / path
    target.parent.mkdir(parents=True, exist_ok=True)
    link.rename(target)
    link.symlink_to(target)
    write(target, {"current_link_speed": f"{speed}\n", "current_link_width": f"{width}\n"})


# Port 1 of a RoCE NIC with one IPv4 address: indices as mlx5 fills them
ROCE_GIDS = {
    0: ("fe80:0000:0000:0000:bace:f6ff:fe12:3456", "IB/RoCE v1"),
    1: ("fe80:0000:0000:0000:bace:f6ff:fe12:3456", "RoCE v2"),
    2: ("0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1"),
    3: ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2"),
}
