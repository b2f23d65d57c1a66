#!/bin/bash
# seatrial, job ranks, attempt 1: train.ddp
set -euo pipefail

export SEATRIAL_RUN_DIR=/runs/today
job=$SEATRIAL_RUN_DIR/jobs/ranks

# Not inherited from this shell: PET_*, from which torchrun reads options. PYTHONSAFEPATH: do not import a folder named
# seatrial in the current directory instead of the package.
unset "${!PET_@}"
export PYTHONSAFEPATH=1

# The environment of the checks.
export GLOO_SOCKET_IFNAME=lo
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=(/opt/python)

worker=(-m seatrial.worker "$job/job.json" 1)
# --standalone picks a free port. No restarts: they would hide a fault.
agent=(
    -m seatrial.bench.run_module torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=4
    --max-restarts=0 --redirects=3 --log-dir="$job/attempt1/logs"
)
exec "${python[@]}" "${agent[@]}" "${worker[@]}"
