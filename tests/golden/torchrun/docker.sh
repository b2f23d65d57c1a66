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
    command -v docker >/dev/null ||
        report_error 'container.runtime: docker is not installed' 'which docker'
    ! command -v docker >/dev/null || docker image inspect 'nvcr.io#nvidia/pytorch:25.12-py3' >/dev/null 2>&1 ||
        report_error 'container.image: docker has no image nvcr.io#nvidia/pytorch:25.12-py3, or this user may not use docker' 'docker image inspect '"'"'nvcr.io#nvidia/pytorch:25.12-py3'"'"'; docker pull '"'"'nvcr.io#nvidia/pytorch:25.12-py3'"'"''
    true
}
(set +eu; requirements)
[[ ! -s $errors ]] || exit 1

SEATRIAL_IMAGE_ID=$(docker image inspect --format '{{.Id}}' 'nvcr.io#nvidia/pytorch:25.12-py3')
SEATRIAL_HOST_NAMESPACE=$(readlink /proc/self/ns/mnt) # the preflight compares it with the container's
export SEATRIAL_IMAGE_ID SEATRIAL_HOST_NAMESPACE HF_HOME=${HF_HOME:-$HOME/.cache/huggingface}
mkdir -p "$HF_HOME" || true # the preflight reports it
mapfile -t variables < <(compgen -e | grep -E '^(CUDA|FI|GLOO|HF|NCCL|NVIDIA|OMP|SEATRIAL|TORCH|UCX)_|^(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|PYTHONSAFEPATH)$')
devices=()
[ ! -e /dev/infiniband ] || devices=(--device=/dev/infiniband)
python=(
    docker run --rm --pull=never --label="seatrial=${SEATRIAL_JOB_TAG:-}"
    --network=host --ipc=host --pid=host --security-opt=label=disable
    --user="$(id -u):$(id -g)" --env=HOME=/tmp --env=USER="$(id -un)" --ulimit=memlock=-1 --ulimit=stack=67108864
    --gpus=all "${devices[@]}"
    "${variables[@]/#/--env=}"
    --volume="$SEATRIAL_RUN_DIR:$SEATRIAL_RUN_DIR" --volume="$HF_HOME:$HF_HOME"
    --volume=/mnt/data:/data:ro
    --entrypoint=python3 'nvcr.io#nvidia/pytorch:25.12-py3'
)
if ! output=$("${python[@]}" -m seatrial.bench.preflight "$job/job.json" 1 2>&1); then
    grep -a "^preflight: " <<<"$output" | tee -a "$errors" >&2 ||
        report_error 'cannot run seatrial with docker run --rm --entrypoint=python3 '"'"'nvcr.io#nvidia/pytorch:25.12-py3'"'"''": ${output##*$'\n'}" 'docker run --rm --entrypoint=python3 '"'"'nvcr.io#nvidia/pytorch:25.12-py3'"'"' -m pip show seatrial'
    exit 1
fi

worker=(-m seatrial.worker "$job/job.json" 1)
exec "${python[@]}" "${worker[@]}"
