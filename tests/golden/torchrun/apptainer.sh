#!/bin/bash
# seatrial, job ranks: nodes.reachable, train.ddp
# bash torchrun.sh 0 on the first node, and so on to 1 on the last, all at about the same time.
# They share the run directory. Once all have ended: seatrial run --resume, with that directory
# shellcheck disable=SC2016 # what stands in single quotes is meant as it is
set -euo pipefail

RUN_DIR=/shared/runs/today
MASTER_ADDR=${MASTER_ADDR:?set it to the name or address at which all nodes reach the first one}
MASTER_PORT=${MASTER_PORT:-29500}

export NCCL_DEBUG=INFO
export NOTE='it'"'"'s "quoted" $HOME'

python=(apptainer exec --nv --bind "$RUN_DIR:$RUN_DIR" --bind /mnt/data:/data:ro '/shared/oumi latest.sif' python3)
agent=(
    "${python[@]}" -m torch.distributed.run
    --nnodes=2 --nproc-per-node=8 --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"
    --max-restarts=0 --redirects=3 # a restart would hide the fault
)
worker=(-m seatrial.worker "$RUN_DIR/jobs/ranks/job.json" 1)
logs=$RUN_DIR/jobs/ranks/attempt1/logs

case ${1:-} in
0) exec "${agent[@]}" --node-rank=0 --log-dir="$logs/node0" "${worker[@]}" ;;
1) exec "${agent[@]}" --node-rank=1 --log-dir="$logs/node1" "${worker[@]}" ;;
*) echo "usage: bash torchrun.sh NODE, from 0 to 1" >&2 && exit 2 ;;
esac
