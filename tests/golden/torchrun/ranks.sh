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
    # shellcheck source=/dev/null
    { [[ $(source '/shared/my env.sh' && echo complete) == *complete ]] && source '/shared/my env.sh'; } >/dev/null 2>&1 ||
        report_error 'environment.source /shared/my env.sh is not readable, fails or exits the shell' 'bash -x '"'"'/shared/my env.sh'"'"''
    module load cuda/13.0 nccl >/dev/null 2>&1 ||
        report_error 'environment.modules: cannot load cuda/13.0 nccl' 'bash -lc "module avail"'
    [ -x /shared/venv/bin/python ] ||
        report_error 'environment.venv: /shared/venv/bin/python does not exist or is not executable' 'ls -l /shared/venv/bin/python'
    [ ! -x /shared/venv/bin/python ] || [ -e /shared/venv/bin/activate ] ||
        report_error 'environment.venv: no /shared/venv/bin/activate' 'ls -l /shared/venv/bin/activate'
    true
}
(set +eu; requirements)
[[ ! -s $errors ]] || exit 1

job_cwd=$PWD
set +euo pipefail
# shellcheck source=/dev/null
source '/shared/my env.sh' || exit
module load cuda/13.0 nccl || exit
# shellcheck source=/dev/null
source /shared/venv/bin/activate || exit
set -euo pipefail
cd "$job_cwd"
export HF_HOME=/shared/hf
export NCCL_DEBUG=INFO
export NOTE='it'"'"'s "quoted" $HOME'
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=(/shared/venv/bin/python)
if ! output=$("${python[@]}" -m seatrial.bench.preflight "$job/job.json" 1 2>&1); then
    grep -a "^preflight: " <<<"$output" | tee -a "$errors" >&2 ||
        report_error 'cannot run seatrial with /shared/venv/bin/python'": ${output##*$'\n'}" '/shared/venv/bin/python -m pip show seatrial'
    exit 1
fi

worker=(-m seatrial.worker "$job/job.json" 1)
agent=(
    -m seatrial.bench.run_module torch.distributed.run --node-rank="$node" --log-dir="$job/attempt1/logs/node$node"
    --nnodes=2 --nproc-per-node=8 --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"
    --max-restarts=0 --redirects=3 # a restart would hide a fault
)
exec "${python[@]}" "${agent[@]}" "${worker[@]}"
