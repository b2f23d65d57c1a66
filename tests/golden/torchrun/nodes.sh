#!/bin/bash
# seatrial, job nodes: nodes.reachable, train.ddp
# Run on each node at about the same time: bash torchrun.sh NODE, NODE from 0 to 1.
# The nodes must share the run directory. When the script has ended on all nodes: seatrial run --resume RUN_DIR.
# shellcheck disable=SC2016 # single quotes are intended
set -euo pipefail
umask 077

export SEATRIAL_RUN_DIR=/shared/runs/today
job=$SEATRIAL_RUN_DIR/jobs/nodes
node=${1:-}
if ! [[ $node =~ ^[0-9]+$ ]] || ((node >= 2)); then
    echo "usage: bash torchrun.sh NODE, with NODE from 0 to 1" >&2
    exit 2
fi
export RANK="$node" WORLD_SIZE=2 LOCAL_RANK=0

# The preflight: one line for each requirement that this node does not meet, also in a file that `run --resume` reads.
errors=$job/preflight.$node
rm -f "$errors"
report_error() { echo "preflight: $(hostname): $1. Run first, on this node: $2" | tee -a "$errors" >&2; }
requirements() {
    [ -x /opt/venv/bin/python ] ||
        report_error 'seatrial'"'"'s Python /opt/venv/bin/python does not exist on this node: set environment.venv' 'ls -l /opt/venv/bin/python'
    true
}
(set +eu; requirements)
[[ ! -s $errors ]] || exit 1

python=(/opt/venv/bin/python)
if ! output=$("${python[@]}" -m seatrial.bench.preflight "$job/job.json" 1 2>&1); then
    grep -a "^preflight: " <<<"$output" | tee -a "$errors" >&2 ||
        report_error 'cannot run seatrial with /opt/venv/bin/python'": ${output##*$'\n'}" '/opt/venv/bin/python -m pip show seatrial'
    exit 1
fi

worker=(-m seatrial.worker "$job/job.json" 1)
exec "${python[@]}" "${worker[@]}"
