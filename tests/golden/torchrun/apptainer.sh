#!/bin/bash
# seatrial, job ranks: nodes.reachable, train.ddp
# Run on each node at about the same time: bash torchrun.sh NODE, NODE from 0 to 1.
# The nodes must share the run directory. When the script has ended on all nodes: seatrial run --resume RUN_DIR.
# shellcheck disable=SC2016 # single quotes are intended
set -euo pipefail

RUN_DIR=/shared/runs/today
MASTER_ADDR=${MASTER_ADDR:?set it to the host name or address of the first node}
MASTER_PORT=${MASTER_PORT:-29500}

export NCCL_DEBUG=INFO
export NOTE='it'"'"'s "quoted" $HOME'

python=(apptainer exec --nv --bind "$RUN_DIR:$RUN_DIR" --bind /mnt/data:/data:ro '/shared/oumi latest.sif' python3)
agent=(
    "${python[@]}" -m torch.distributed.run
    --nnodes=2 --nproc-per-node=8 --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"
    --max-restarts=0 --redirects=3 # a restart would hide a fault
)
worker=(-m seatrial.worker "$RUN_DIR/jobs/ranks/job.json" 1)
logs=$RUN_DIR/jobs/ranks/attempt1/logs

case ${1:-} in
0) exec "${agent[@]}" --node-rank=0 --log-dir="$logs/node0" "${worker[@]}" ;;
1) exec "${agent[@]}" --node-rank=1 --log-dir="$logs/node1" "${worker[@]}" ;;
*) echo "usage: bash torchrun.sh NODE, with NODE from 0 to 1" >&2 && exit 2 ;;
esac
