#!/bin/bash
# seatrial, job nodes: nodes.reachable, train.ddp
# bash torchrun.sh 0 on the first node, and so on to 1 on the last, all at about the same time.
# They share the run directory. Once all have ended: seatrial run --resume, with that directory
# shellcheck disable=SC2016 # what stands in single quotes is meant as it is
set -euo pipefail

RUN_DIR=/shared/runs/today

python=(/opt/venv/bin/python)
worker=(-m seatrial.worker "$RUN_DIR/jobs/nodes/job.json" 1)

case ${1:-} in
0) RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 exec "${python[@]}" "${worker[@]}" ;;
1) RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 exec "${python[@]}" "${worker[@]}" ;;
*) echo "usage: bash torchrun.sh NODE, from 0 to 1" >&2 && exit 2 ;;
esac
