#!/bin/bash
# seatrial, job ranks: nodes.reachable, train.ddp
# Run on each node at about the same time: bash torchrun.sh NODE, NODE from 0 to 1.
# The nodes must share the run directory. When the script has ended on all nodes: seatrial run --resume RUN_DIR.
# shellcheck disable=SC2016 # single quotes are intended
set -euo pipefail
umask 077

export SEATRIAL_RUN_DIR=/shared/runs/today
job=$SEATRIAL_RUN_DIR/jobs/ranks
node=${1:-}
if ! [[ $node =~ ^[0-9]+$ ]] || ((node >= 2)); then
    echo "usage: bash torchrun.sh NODE, with NODE from 0 to 1" >&2
    exit 2
fi
MASTER_ADDR=${MASTER_ADDR:?set it to the host name or address of the first node}
MASTER_PORT=${MASTER_PORT:-29500}

# The preflight: one line for each requirement that this node does not meet, also in a file that `run --resume` reads.
errors=$job/preflight.$node
rm -f "$errors"
report_error() { echo "preflight: $(hostname): $1. Run first, on this node: $2" | tee -a "$errors" >&2; }
requirements() {
    command -v apptainer >/dev/null ||
        report_error 'container.runtime: apptainer is not installed' 'which apptainer'
    [ -e '/shared/oumi latest.sif' ] ||
        report_error 'container.image /shared/oumi latest.sif does not exist' 'ls -l '"'"'/shared/oumi latest.sif'"'"''
    true
}
(set +eu; requirements)
[[ ! -s $errors ]] || exit 1

export NCCL_DEBUG=INFO
export NOTE='it'"'"'s "quoted" $HOME'
hf_home=()
[ ! -d "${HF_HOME:-}" ] || hf_home=(--bind "$HF_HOME:$HF_HOME")
python=(apptainer exec --nv --bind "$SEATRIAL_RUN_DIR:$SEATRIAL_RUN_DIR" "${hf_home[@]}" --bind /mnt/data:/data:ro '/shared/oumi latest.sif' python3)
if ! output=$("${python[@]}" -m seatrial.bench.preflight "$job/job.json" 1 2>&1); then
    grep -a "^preflight: " <<<"$output" | tee -a "$errors" >&2 ||
        report_error 'cannot run seatrial with apptainer exec '"'"'/shared/oumi latest.sif'"'"' python3'": ${output##*$'\n'}" 'apptainer exec '"'"'/shared/oumi latest.sif'"'"' python3 -m pip show seatrial'
    exit 1
fi

worker=(-m seatrial.worker "$job/job.json" 1)
agent=(
    -m seatrial.bench.run_module torch.distributed.run --node-rank="$node" --log-dir="$job/attempt1/logs/node$node"
    --nnodes=2 --nproc-per-node=8 --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"
    --max-restarts=0 --redirects=3 # a restart would hide a fault
)
exec "${python[@]}" "${agent[@]}" "${worker[@]}"
