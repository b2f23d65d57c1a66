"""Speed and memory of ``seatrial explain`` on a large log of mixed lines, on one core.

    python benchmarks/explain_speed.py [--gib 1] [--json FILE]

The log has the lines of eight ranks: NCCL's INFO lines, training steps, progress bars with carriage returns, coloured
and JSON lines, kernel and Slurm lines, and the logs of tests/fixtures/incidents. Exits with 1 above LIMIT_S of CPU time
for 1 GB, above LIMIT_MB, or below LIMIT_MB_PER_S. Start of Python and compilation of the patterns count.

``families``: logs of kernel lines of one kind, such as Xids of 20 numbers, each FAMILY_BYTES long. Exits with 1 for one
below FAMILY_LIMIT_MB_PER_S.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

INCIDENTS = Path(__file__).parent.parent / "tests" / "fixtures" / "incidents"
LIMIT_S = 20.0
LIMIT_MB = 200.0
LIMIT_MB_PER_S = 50.0
BLOCK_BYTES = 2**24
FAMILY_LIMIT_MB_PER_S = 20.0
FAMILY_BYTES = 2**26
_XIDS = (13, 31, 43, 45, 48, 61, 62, 63, 64, 68, 69, 74, 79, 92, 94, 95, 109, 119, 121, 154)
_FAMILIES = {
    "xid": [f"NVRM: Xid (PCI:{{bdf}}): {xid}, pid=4711, name=python, Ch 00000008" for xid in _XIDS],
    "sxid": [
        f"nvidia-nvswitch0: SXid (PCI:{{bdf}}.0): {sxid}, {severity}, Link 12 error"
        for sxid in (12028, 19084, 20034, 22003, 24007)
        for severity in ("Fatal", "Non-fatal")
    ],
    "aer": [
        "pcieport {bdf}.0: AER: Corrected error received: {bdf}.0",
        "pcieport {bdf}.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)",
        "mlx5_core {bdf}.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
        "pcieport {bdf}.0: AER: Multiple Uncorrected (Non-Fatal) error received: {bdf}.0",
    ],
    "mlx5": [
        "mlx5_core {bdf}.0: poll_health:790:(pid 0): device's health compromised - reached miss count",
        "mlx5_core {bdf}.0: cmd_work_handler:877:(pid 4711): failed to allocate command entry",
        "mlx5_core {bdf}.0: mlx5_cmd_out_err:838: CREATE_QP(0x500) op_mod(0x0) failed, status bad parameter(0x3)",
        "mlx5_core {bdf}.0 eth0: Link down",
        "mlx5_core {bdf}.0: temp_warn:244: High temperature on sensors with bit set 0x0 0x1",
    ],
    "mce": [
        "mce: [Hardware Error]: Machine check events logged",
        "mce: [Hardware Error]: CPU 12: Machine Check: 0 Bank 7: dc00008000010091",
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x1 offset:0x2)",
        "EDAC MC1: 1 UE memory read error on CPU_SrcID#1_MC#0_Chan#0_DIMM#0 (channel:0 slot:0 page:0x1 offset:0x2)",
    ],
}
_TEMPLATES = (
    "node{n}:{p}:{p} [{r}] NCCL INFO Channel {c:02}/0 : {r}[{r}] -> {q}[{q}] [send] via NET/IB/{r}/GDRDMA",
    "[2026-11-23 05:{m:02}:{c:02}] node{n}:{p}:{p} [{r}] NCCL INFO AllReduce: opCount {p:x} sendbuff 0x7f{p:010x}",
    "[rank{r}]: step {p} loss {c}.{p:04} grad_norm 0.{c:03} lr 3.0e-04 tokens/s {p} mfu 41.{m}%",
    " {c}%|#####     | {p}/100000 [05:{m:02}<1:22:01,  2.83s/it]\r" * 4,
    "\x1b[32mINFO\x1b[0m 11-23 05:{m:02}:{c:02} worker.py:{p}] Memory profiling takes {c}.{m} seconds",
    "Nov 23 05:{m:02}:{c:02} node{n} kernel: [{p}.{c:06}] mlx5_core 0000:{c:02x}:00.0 eth{r}: Link up",
    "[2026-11-23T05:{m:02}:{c:02}.{p:03}] sched: Allocate JobId={p} NodeList=node[{n}-{q}] #CPUs=128 Partition=gpu",
    '  File "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line {p}, in _call_impl',
    '10.0.{c}.{m} - - [23/Nov/2026:05:{m:02}:{c:02} +0000] "GET /metrics HTTP/1.1" 200 {p}',
)


def mixed_block(size: int, seed: int = 1) -> bytes:
    """About ``size`` bytes of log lines; a line in 500 is an incident."""
    source = random.Random(seed)
    incidents = [path.read_bytes() for path in sorted(INCIDENTS.glob("*.log"))]
    lines: list[bytes] = []
    length = 0
    while length < size:
        if source.random() < 1 / 500:
            line = source.choice(incidents).rstrip(b"\n")
        else:
            numbers = {name: source.randrange(60) for name in "cmnq"} | {"r": source.randrange(8)}
            line = source.choice(_TEMPLATES).format(p=source.randrange(10**5), **numbers).encode()
        lines.append(line)
        length += len(line) + 1
    return b"\n".join(lines) + b"\n"


def kernel_block(messages: Sequence[str], size: int, seed: int = 1) -> bytes:
    """About ``size`` bytes of kernel lines of ``messages``, with {bdf} replaced and with other numbers in each line."""
    source = random.Random(seed)
    lines: list[str] = []
    length = 0
    while length < size:
        text = source.choice(messages).replace("{bdf}", f"0000:{source.randrange(256):02x}:00")
        seconds = f"{source.randrange(10**6)}.{source.randrange(10**6):06}"
        lines.append(f"Nov 23 05:{source.randrange(60):02}:07 node{source.randrange(60)} kernel: [{seconds}] {text}\n")
        length += len(lines[-1])
    return "".join(lines).encode()


def run(size: int, block: bytes) -> dict[str, float]:
    """Write a log of ``size`` bytes, explain it on one core; megabytes, seconds, MB/s and peak memory in MB."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "mixed.log"
        with log.open("wb") as file:
            while file.tell() < size:
                file.write(block)
        core = min(os.sched_getaffinity(0))
        command = ["taskset", "--cpu-list", str(core), sys.executable, "-m", "seatrial", "explain", "--json", str(log)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        seconds = time.monotonic() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        megabytes = log.stat().st_size / 1e6
    return {
        "megabytes": round(megabytes),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_s, 1),
        "megabytes_per_cpu_second": round(megabytes / cpu_s, 1),
        "peak_memory_mb": round(after.ru_maxrss * 1024 / 1e6),
        "findings": len(json.loads(done.stdout)),
    }


def meets_limits(result: dict[str, float]) -> bool:
    """Whether speed and memory are within the limits; by CPU seconds, since other programs may use the core."""
    seconds = result["cpu_seconds"] * 1000 / result["megabytes"]
    speed = result["megabytes_per_cpu_second"]
    return seconds <= LIMIT_S and speed >= LIMIT_MB_PER_S and result["peak_memory_mb"] <= LIMIT_MB


def main() -> None:
    """Print the result and exit with 1 beyond the limits."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the log in GiB")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    size = int(arguments.gib * 2**30)
    result = run(size, mixed_block(min(size, BLOCK_BYTES)))
    families = {name: run(FAMILY_BYTES, kernel_block(messages, BLOCK_BYTES)) for name, messages in _FAMILIES.items()}
    text = json.dumps({**result, "families": families}, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    are_fast = all(each["megabytes_per_cpu_second"] >= FAMILY_LIMIT_MB_PER_S for each in families.values())
    sys.exit(0 if meets_limits(result) and are_fast else 1)


if __name__ == "__main__":
    main()
