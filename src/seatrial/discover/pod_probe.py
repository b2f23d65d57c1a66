"""GPUs, /dev/shm, limits, RDMA devices and name resolution of a pod's container, from the output of a shell script.

The script writes lines ``key=value`` to the log of the pod. Other lines of the log are ignored. A missing value, or one
that the script cannot have written, is an error.
"""

from __future__ import annotations

import re

from seatrial.model import Frozen, SeatrialError

PEERS = 8  # each pod resolves the names of the 8 pods with the next indices, so that every name is resolved
# $1: name of the Job and of its Service; $2: number of pods; $3: GPUs that the pod requests; $4: seconds for which the
# pod stays, so that pods that start minutes later can resolve its name
SCRIPT = r"""
if test "$3" -gt 0; then
  if ! output=$(timeout 60 nvidia-smi -L 2>&1); then
    echo "gpu_error=$(echo "${output:-nvidia-smi -L did not answer within 60 s}" | tr '\n' ' ')"
  elif echo "$output" | grep -q 'UUID: MIG-'; then
    echo "gpu_error=MIG enabled; MIG instances are not supported"
  else
    echo "gpus=$(echo "$output" | grep -c '^GPU ')"
  fi
fi
df -Pk /dev/shm | while read -r _ size _; do echo "shm_kib=$size"; done
echo "memlock_kib=$(ulimit -l)"
while read -r key value _; do test "$key" != MemTotal: || echo "memory_kib=$value"; done </proc/meminfo
while read -r key value; do test "$key" != CapEff: || echo "capabilities=$value"; done </proc/self/status
for device in /dev/infiniband/uverbs*; do
  test -c "$device" && (: <"$device") 2>/dev/null || continue
  echo "rdma=$(cat "/sys/class/infiniband_verbs/${device##*/}/ibdev")"
done
offset=1 names=
while test $offset -lt "$2" && test $offset -le PEERS; do
  names="$names $1-$(((JOB_COMPLETION_INDEX + offset) % $2)).$1"
  offset=$((offset + 1))
done
command -v getent >/dev/null || { names=; echo "dns_error=the image has no getent"; }
echo "probed=1"
while test -n "$names"; do
  unresolved=
  for name in $names; do
    if getent hosts "$name" >/dev/null; then echo "resolved=${name%%.*}"; else unresolved="$unresolved $name"; fi
  done
  names=$unresolved
  test -z "$names" || sleep 2
done
echo "end=1"
sleep "$4"
""".replace("PEERS", str(PEERS))
_LINE = re.compile(r"(?:\[pod/(?P<pod>[^/\]]+)/[^/\]]+\] )(?P<key>[a-z_]+)=(?P<value>.*)")
_CAP_IPC_LOCK = 1 << 14  # linux/capability.h


class Container(Frozen):
    """A container of a probe pod. ``gpus``: None if the pod requests none, or if nvidia-smi failed (``gpu_error``)."""

    gpus: int | None = None
    gpu_error: str = ""
    shm_bytes: int
    memlock_unlimited: bool  # no limit, a limit above the memory of the node, or CAP_IPC_LOCK
    rdma_devices: tuple[str, ...] = ()
    dns_error: str = ""
    resolved: tuple[str, ...] = ()  # host names of other pods
    ended: bool = False  # the script has resolved all names, or cannot resolve names (``dns_error``)


def parse_logs(text: str) -> dict[str, Container]:
    """Pod → container for each pod whose script has read the devices, from ``kubectl logs --prefix``.

    Raises SeatrialError if a value is missing or is not one that the script writes.
    """
    values_by_pod: dict[str, dict[str, list[str]]] = {}
    for line in text.splitlines():
        if match := _LINE.fullmatch(line):
            values_by_pod.setdefault(match["pod"], {}).setdefault(match["key"], []).append(match["value"])
    return {pod: _container(pod, values) for pod, values in values_by_pod.items() if "probed" in values}


def _container(pod: str, values: dict[str, list[str]]) -> Container:
    try:
        memlock_kib, memory_kib = values["memlock_kib"][0], int(values["memory_kib"][0])
        is_unlimited = memlock_kib == "unlimited" or int(memlock_kib) >= memory_kib
        has_ipc_lock = bool(int(values["capabilities"][0], 16) & _CAP_IPC_LOCK)
        return Container(
            gpus=int(values["gpus"][0]) if "gpus" in values else None,
            gpu_error="".join(values.get("gpu_error", ())).strip(),
            # the first line of df is its header
            shm_bytes=int(values["shm_kib"][-1]) * 1024,
            memlock_unlimited=is_unlimited or has_ipc_lock,
            rdma_devices=tuple(values.get("rdma", ())),
            dns_error="".join(values.get("dns_error", ())),
            resolved=tuple(values.get("resolved", ())),
            ended="end" in values,
        )
    except (KeyError, ValueError) as error:
        raise SeatrialError(
            f"pod {pod}: unexpected output of the probe ({error}). Run first: kubectl logs {pod}"
        ) from None


def peers(index: int, count: int) -> list[int]:
    """The indices of the pods whose names the pod ``index`` of ``count`` resolves."""
    return [(index + offset) % count for offset in range(1, min(count, PEERS + 1))]
