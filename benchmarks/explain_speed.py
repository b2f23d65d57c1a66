"""Speed and memory of ``seatrial explain`` on a large log of mixed lines, on one core.

    python benchmarks/explain_speed.py [--gib 1] [--json FILE]

The log has the lines of eight ranks: NCCL's INFO lines, training steps, progress bars with carriage returns, coloured
and JSON lines, kernel and Slurm lines, and the logs of tests/fixtures/incidents; its last line is an Xid, which must be
found. ``families``: logs of kernel lines of one kind, such as Xids of 20 numbers, each FAMILY_BYTES long.

Seconds are those of user CPU time, since other programs may use the machine. ``start_seconds``: for a log of one line,
with the patterns in the cache;
``plain_seconds``: for a program that only counts the lines of the log, at the same moment. Exits with 1 above
START_LIMIT_S, above LIMIT_MB, without the Xid, or below LIMIT_MB_PER_S, for which the start does not count.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

INCIDENTS = Path(__file__).parent.parent / "tests" / "fixtures" / "incidents"
START_LIMIT_S = 0.8
LIMIT_MB = 200.0
LIMIT_MB_PER_S = 50.0
BLOCK_BYTES = 2**24
FAMILY_BYTES = 2**28
_LAST_LINE = "Nov 23 05:00:07 node7 kernel: [9.000000] NVRM: Xid (PCI:0000:fe:00): 140, pid=4711, name=python\n"
_LAST_XID = "xid.140"
_COUNT_LINES = """import sys
with open(sys.argv[1], "rb") as file:
    print(sum(block.count(b"\\n") for block in iter(lambda: file.read(2**20), b"")))"""
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
    """Write a log of ``size`` bytes and explain it; megabytes, user CPU seconds, MB/s, peak memory in MB, findings."""
    with tempfile.TemporaryDirectory() as folder:
        log, short_log = Path(folder) / "mixed.log", Path(folder) / "short.log"
        short_log.write_text(_LAST_LINE, encoding="utf-8")
        with log.open("wb") as file:
            while file.tell() < size:
                file.write(block)
            file.write(_LAST_LINE.encode())
        explain = ("-m", "seatrial", "explain", "--json")
        _, plain_s = _user_seconds("-c", _COUNT_LINES, str(log))
        start_s = min(_user_seconds(*explain, str(short_log))[1] for _ in range(2))  # the first may fill the cache
        output, seconds = _user_seconds(*explain, str(log))
        megabytes = log.stat().st_size / 1e6
    findings = json.loads(output)
    return {
        "megabytes": round(megabytes),
        "plain_seconds": round(plain_s, 2),
        "start_seconds": round(start_s, 2),
        "seconds": round(seconds, 1),
        "megabytes_per_second": round(megabytes / max(seconds - start_s, 0.01), 1),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6),
        "findings": len(findings),
        "last_xid_found": any(finding["signature"] == _LAST_XID for finding in findings),
    }


def _user_seconds(*arguments: str) -> tuple[bytes, float]:
    """The output of Python with ``arguments``, and its user CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, check=True)
    return done.stdout, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def meets_limits(result: dict[str, float]) -> bool:
    """Whether start, speed and memory are within the limits, and the Xid at the end of the log was found."""
    is_fast = result["megabytes_per_second"] >= LIMIT_MB_PER_S and result["start_seconds"] <= START_LIMIT_S
    return is_fast and result["peak_memory_mb"] <= LIMIT_MB and bool(result["last_xid_found"])


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
    sys.exit(0 if all(map(meets_limits, [result, *families.values()])) else 1)


if __name__ == "__main__":
    main()
