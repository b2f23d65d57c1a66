"""Drills for a machine without GPUs."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import sys
import time
from functools import partial
from typing import Any

from seatrial.drill.base import ONLY_ERROR, ONLY_FAIL, Drill, Expected, Needs
from seatrial.drill.faults import FAULTY_RANK
from seatrial.drill.injection import Injection
from seatrial.model import Outcome

_drill = partial(Drill, machine="cpu")
_HOST = re.escape(socket.gethostname())
_RANKS = 2  # ranks of a check on one node without GPUs
# A tiny training that lasts long enough (10 s) that a signal arrives while both ranks train
_TRAINING: dict[str, dict[str, Any]] = {"train.ddp": {"parity_steps": 2, "steps": 12, "min_seconds": 10}}
_HOG = "cpu-hog"
CPU_LIMIT = "<= 25 %"  # host.load has this limit for GPU nodes; the trial sets it for a node without GPUs
_LOOPS_START_S = 1.0  # seconds until all loops run
_CHECKPOINT = "train.checkpoint"
_DISK_SIZE = "1m"  # enough for the prepared data and logs, too little for a checkpoint of 1.4 MB
_REMOUNTED = "remounted"


def _signal_rank(injection: Injection, number: signal.Signals) -> None:
    """Send a signal to FAULTY_RANK when both ranks measure their training speed. The end of its job kills a rank."""
    ranks = injection.wait_for_ranks("train.ddp", _RANKS, "speed")
    injection.signal_rank(ranks[FAULTY_RANK], number)


def _use_all_cpus(injection: Injection) -> None:
    """Start two busy loops per CPU before the trial."""
    script = injection.folder / _HOG
    script.write_text("#!/bin/sh\nwhile :; do :; done\n", encoding="utf-8")
    script.chmod(0o700)
    for number in range(2 * len(os.sched_getaffinity(0))):
        injection.start_process([str(script)], f"{_HOG}-{number}")
    time.sleep(_LOOPS_START_S)


def _fill_disk(injection: Injection) -> None:
    """Mount a small filesystem at the artifacts of the check, for the trial only, before the training starts."""
    folder = injection.run_dir / "artifacts" / _CHECKPOINT
    injection.wait_for(lambda: (injection.run_dir / "run.json").exists(), "the run directory exists")
    folder.mkdir(parents=True, exist_ok=True)
    injection.run_in_trial_mounts(f"mount -t tmpfs -o size={_DISK_SIZE} tmpfs {shlex.quote(str(folder))}")


def _use_new_mounts(injection: Injection) -> None:
    """Give the trial its own mount namespace."""
    injection.new_mounts = True


def _limit_memlock(injection: Injection) -> None:
    """Limit locked memory to 64 KiB, and drop CAP_IPC_LOCK, with which the limit does not apply."""
    injection.setup.append("ulimit -l 64")
    injection.setup.append('set -- setpriv --inh-caps=-ipc_lock --bounding-set=-ipc_lock "$@"')


def _mount_read_only(injection: Injection) -> None:
    """Mount an empty read-only filesystem at the parent folder of the run directory, for the trial only."""
    folder = injection.folder / "read-only"
    folder.mkdir()
    injection.run_dir = folder / "run"
    injection.new_mounts = True
    injection.setup.append(f"mount -t tmpfs -o ro tmpfs {shlex.quote(str(folder))}")


def _mount_run_dir(injection: Injection) -> None:
    """Mount a filesystem at the parent folder of the run directory, for the trial only."""
    folder = injection.folder / _REMOUNTED
    folder.mkdir()
    injection.run_dir = folder / "run"
    injection.new_mounts = True
    injection.setup.append(f"mount -t tmpfs -o size=64m tmpfs {shlex.quote(str(folder))}")


def _remount_read_only(injection: Injection) -> None:
    """Make the filesystem read-only when rank 0 has started a check; only the trial's namespace shows its files."""
    journal = injection.run_dir / "jobs" / "ranks" / "attempt1" / "rank0.jsonl"
    injection.wait_for(
        lambda: bool(injection.run_in_trial_mounts(f"test -s {shlex.quote(str(journal))} && echo yes || true")),
        "rank 0 is in a check",
    )
    injection.mark_injected()
    # a new mount of the same folder: a remount of the first one fails while files are open for writing
    folder = shlex.quote(str(injection.folder / _REMOUNTED))
    injection.run_in_trial_mounts(f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}")


def _mount_small_shm(injection: Injection) -> None:
    """Mount 64 MiB at /dev/shm, in the mount namespace of the trial only."""
    injection.new_mounts = True
    injection.setup.append("mount -t tmpfs -o size=64m tmpfs /dev/shm")


def _mount_silent(injection: Injection) -> None:
    """Mount the filesystem for the trial only. Its program ends with the trial, and the mount with its program."""
    folder = injection.folder / "silent"
    folder.mkdir()
    injection.new_mounts = True
    program = shlex.join([sys.executable, "-m", "seatrial.drill.silent_filesystem", str(folder)])
    injection.setup.append(f"setpriv --pdeathsig KILL {program} &")
    mounted = shlex.quote(str(folder).replace(" ", "\\040"))  # as /proc/mounts has it
    injection.setup.append(f"for _ in $(seq 300); do grep -qF {mounted} /proc/mounts && break; sleep 0.1; done")


DRILLS = (
    _drill(
        name="bit-flip",
        title=f"one bit of one all-reduce result is flipped on rank {FAULTY_RANK}",
        checks={"collectives.all_reduce": {"sizes": ["64KiB", "1MiB"], "seconds_per_size": 0.5}},
        expected=Expected(
            metric="wrong_elements",
            outcomes=ONLY_FAIL,
            cause="data_corrupted",
            place=rf"rank{FAULTY_RANK}\b",
            command=r"dmesg.*xid|nvidia-smi",
            action="call-vendor",
        ),
        fault="bit_flip",
    ),
    _drill(
        name="corrupted-checkpoint",
        title=f"one bit of a checkpoint file is flipped by rank {FAULTY_RANK} after each save",
        checks={"train.checkpoint": {}},
        expected=Expected(
            cause="checkpoint.changed",
            place=r"/checkpoints/step-\d+ is damaged: \S+\.distcp",
            command=r"ls -l \S+/checkpoints/step-\d+; findmnt -T \S+/step-\d+",
            action="fix-environment",
        ),
        fault="damaged_checkpoint",
        limit_s=600,
    ),
    _drill(
        name="cpu-hog",
        title=f"two busy loops per CPU, in processes named {_HOG}",
        checks={"host.load": {}},
        thresholds={"host.load": {"cpu_busy": CPU_LIMIT}},
        expected=Expected(
            metric="cpu_busy",
            cause="busy_cpus",
            place=rf"^{_HOST}: .*{_HOG}",
            command=r"top |ps ",
            action="fix-environment",
        ),
        prepare=_use_all_cpus,
    ),
    _drill(
        name="dataset-cache-race",
        title=f"the prepared data is incomplete when rank {FAULTY_RANK} reads it, "
        "as if another job wrote it at that moment",
        checks={"train.fsdp": {"hf": False}},
        expected=Expected(
            cause="data.cache_incomplete",
            place=r"/train\.fsdp/native/data/blocks-[0-9a-f]+",  # every rank that reads the file afterwards fails
            command=r"ls -la \S* ?\S+/data/blocks-[0-9a-f]+; findmnt",
            action="fix-config",
        ),
        fault="truncated_cache",
    ),
    _drill(
        name="disk-full",
        title=f"the filesystem of the checkpoints has {_DISK_SIZE.upper()}B, less than one checkpoint",
        checks={_CHECKPOINT: {}},
        expected=Expected(
            cause="host.disk_full",
            place=rf"/artifacts/{_CHECKPOINT}\b",
            command=r"df -h",
            action="fix-environment",
        ),
        needs=Needs(root=True, programs=("unshare", "nsenter", "mount")),
        prepare=_use_new_mounts,
        act=_fill_disk,
    ),
    _drill(
        name="diverged-parameters",
        title=f"one bit of one parameter of rank {FAULTY_RANK} is flipped; "
        "of two ranks, no majority can say which is wrong",
        checks=_TRAINING,
        expected=Expected(
            metric="parameter_digests_differing",
            outcomes=ONLY_FAIL,
            cause="parameters_diverged",
            place=rf'differ, without a majority.*"rank": {FAULTY_RANK}\b',
            command=r"dmesg.*xid|nvidia-smi",
            action="call-vendor",
        ),
        fault="diverged_parameters",
    ),
    _drill(
        name="memlock-low",
        title="locked memory is limited to 64 KiB (ulimit -l), without CAP_IPC_LOCK",
        # the check's rule applies only to nodes with RDMA devices; this threshold applies to any node
        checks={"host.inventory": {}},
        thresholds={"host.inventory": {"memlock_unlimited": "== 1 bool"}},
        expected=Expected(
            metric="memlock_unlimited",
            cause="memlock_limited",
            place=rf"^{_HOST}: .*memlock_unlimited",
            command=r"ulimit -l",
            action="fix-config",
        ),
        needs=Needs(root=True, programs=("setpriv",)),
        prepare=_limit_memlock,
    ),
    _drill(
        name="nan-gradient",
        title=f"one gradient of rank {FAULTY_RANK} is NaN in one step",
        checks={"train.fsdp": {"hf": False}},
        expected=Expected(
            outcomes=(Outcome.FAIL, Outcome.ERROR),
            cause="data.not_finite_rank",
            place=rf"^rank {FAULTY_RANK}\b",
            command=r"dmesg|nvidia-smi",
            action="retry-job",
        ),
        fault="nan_gradient",
    ),
    _drill(
        name="out-of-memory",
        title=f"rank {FAULTY_RANK} allocates memory until its limit (RLIMIT_AS)",
        checks=_TRAINING,
        expected=Expected(
            outcomes=ONLY_ERROR,
            cause="host.out_of_memory",
            place=rf"rank{FAULTY_RANK}\b",
            command=r"dmesg",
            action="fix-config",
        ),
        fault="memory_limit",
    ),
    _drill(
        name="rank-killed",
        title=f"SIGKILL to rank {FAULTY_RANK} of a training on two ranks",
        checks=_TRAINING,
        expected=Expected(
            outcomes=ONLY_ERROR,
            cause="torchrun.killed",
            place=rf"rank {FAULTY_RANK} \(",
            command=r"dmesg",
            action="fix-config",
        ),
        act=partial(_signal_rank, number=signal.SIGKILL),
    ),
    _drill(
        name="rank-raises",
        title=f"rank {FAULTY_RANK} of a training on two ranks raises an error",
        checks=_TRAINING,
        expected=Expected(
            outcomes=ONLY_ERROR,
            cause="rank_failed",
            place=rf"rank {FAULTY_RANK} \(",
            command=r"tail .*/jobs/ranks/attempt1/logs/.*/1/stderr\.log",
            action="none",
        ),
        fault="error_in_training",
    ),
    _drill(
        name="rank-stopped",
        title=f"SIGSTOP to rank {FAULTY_RANK} of a training on two ranks",
        checks=_TRAINING,
        settings={"limits": {"heartbeat_timeout_s": 15}},
        expected=Expected(
            outcomes=ONLY_ERROR,
            cause="rank_hangs",
            place=rf"rank{FAULTY_RANK}: Rank {FAULTY_RANK}: ",
            command=r"^cat \S+/hang/(rank1|states)\.txt$",
            action="retry-job",
        ),
        act=partial(_signal_rank, number=signal.SIGSTOP),
    ),
    _drill(
        name="run-dir-read-only",
        title="the run directory is on a read-only filesystem",
        checks={"host.inventory": {}},
        expected=Expected(
            refusal=r"cannot write to --out",
            cause="Read-only file system",
            place=r"/read-only/run\b",
            command=r"findmnt -T [^;]*/read-only",
        ),
        needs=Needs(root=True, programs=("unshare", "mount")),
        prepare=_mount_read_only,
    ),
    # The filesystem of the run directory becomes read-only while ranks train, as ext4 and XFS do after an I/O error
    _drill(
        name="run-dir-remounted",
        title="the filesystem of the run directory becomes read-only while ranks train",
        checks=_TRAINING,
        expected=Expected(
            refusal=r"some reports could not be written",
            cause="Read-only file system",
            place=rf"/{_REMOUNTED}/run\b",
            command=rf"findmnt -T [^;]+/{_REMOUNTED}/run",
        ),
        needs=Needs(root=True, programs=("unshare", "nsenter", "mount")),
        prepare=_mount_run_dir,
        act=_remount_read_only,
    ),
    _drill(
        name="shm-small",
        title="/dev/shm of 64 MiB, as in a container without --shm-size",
        checks={"host.inventory": {}},
        expected=Expected(
            metric="shm_bytes",
            outcomes=ONLY_FAIL,
            cause="shm_too_small",
            place=rf"^{_HOST}: .*shm_bytes",
            command=r"df -h /dev/shm",
            action="fix-environment",
        ),
        needs=Needs(root=True, programs=("unshare", "mount")),
        prepare=_mount_small_shm,
    ),
    _drill(
        name="slow-input",
        title=f"each batch of rank {FAULTY_RANK} arrives 0.3 s late",
        checks=_TRAINING,
        expected=Expected(
            metric="rank_data_wait",
            outcomes=ONLY_FAIL,
            cause="slow_input",
            place=rf"rank{FAULTY_RANK}\b",
            command=r"vmstat|iostat",
            action="fix-environment",
        ),
        fault="slow_input",
    ),
    _drill(
        name="slow-rank",
        title=f"each forward pass of rank {FAULTY_RANK} takes 0.3 s longer",
        checks=_TRAINING,
        expected=Expected(
            metric="rank_slowdown",
            outcomes=ONLY_FAIL,
            cause="slow_rank",
            place=rf"rank{FAULTY_RANK}\b",
            command=r"^top ",
            action="fix-environment",
        ),
        fault="slow_step",
    ),
    # A mounted filesystem does not answer: a FUSE filesystem whose program never replies
    _drill(
        name="stale-mount",
        title="a FUSE filesystem whose program does not reply",
        checks={"host.inventory": {}},
        expected=Expected(
            metric="hung_mounts",
            outcomes=ONLY_FAIL,
            cause="hung_mounts",
            place=rf"^{_HOST}: .*/silent\b",
            command=r"/proc/mounts|findmnt|dmesg",
            action="restart-service",
        ),
        needs=Needs(root=True, programs=("unshare", "setpriv"), device_files=("/dev/fuse",)),
        prepare=_mount_silent,
    ),
)
