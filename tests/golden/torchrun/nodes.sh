#!/bin/bash
# seatrial, job nodes: nodes.reachable, train.ddp
# Run on each node at about the same time: bash torchrun.sh NODE, NODE from 0 to 1.
# The nodes must share the run directory. When the script has ended on all nodes: seatrial run --resume RUN_DIR.
# shellcheck disable=SC2016 # single quotes are intended
set -euo pipefail

RUN_DIR=/shared/runs/today

python=(/opt/venv/bin/python)
worker=(-m seatrial.worker "$RUN_DIR/jobs/nodes/job.json" 1)

case ${1:-} in
0) RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 exec "${python[@]}" "${worker[@]}" ;;
1) RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 exec "${python[@]}" "${worker[@]}" ;;
*) echo "usage: bash torchrun.sh NODE, with NODE from 0 to 1" >&2 && exit 2 ;;
esac
