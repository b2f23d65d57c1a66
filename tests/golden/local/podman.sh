#!/bin/bash
# seatrial, job nodes, attempt 1: train.ddp
set -euo pipefail

export SEATRIAL_RUN_DIR=/runs/today
job=$SEATRIAL_RUN_DIR/jobs/nodes

# Not inherited from this shell: PET_*, from which torchrun reads options. PYTHONSAFEPATH: do not import a folder named
# seatrial in the current directory instead of the package.
unset "${!PET_@}"
export PYTHONSAFEPATH=1

report_error() { echo "preflight: $(hostname): $1. Run first: $2"; }

# Prints one line for each requirement that this node does not meet.
requirements() {
    command -v podman >/dev/null ||
        report_error 'container.runtime: podman is not installed' 'which podman'
    ! command -v podman >/dev/null || podman image inspect nvcr.io/nvidia/pytorch:25.12-py3 >/dev/null 2>&1 ||
        report_error 'container.image: podman has no image nvcr.io/nvidia/pytorch:25.12-py3, or this user may not use podman' 'podman image inspect nvcr.io/nvidia/pytorch:25.12-py3; podman pull nvcr.io/nvidia/pytorch:25.12-py3'
    true
}
errors=$(set +eu; requirements)
[[ -z $errors ]] || { echo "$errors" >&2; exit 1; }

# The environment of the checks.
export RANK=0
export WORLD_SIZE=1
export LOCAL_RANK=0
SEATRIAL_IMAGE_ID=$(podman image inspect --format '{{.Id}}' nvcr.io/nvidia/pytorch:25.12-py3)
SEATRIAL_HOST_NAMESPACE=$(readlink /proc/self/ns/mnt) # the preflight compares it with the container's
export SEATRIAL_IMAGE_ID SEATRIAL_HOST_NAMESPACE HF_HOME=${HF_HOME:-$HOME/.cache/huggingface}
mkdir -p "$HF_HOME" || true # the preflight reports it
mapfile -t variables < <(compgen -e | grep -E '^(CUDA|FI|GLOO|HF|NCCL|NVIDIA|OMP|SEATRIAL|TORCH|UCX)_|^(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|PYTHONSAFEPATH)$|^RANK$|^WORLD_SIZE$|^LOCAL_RANK$')
devices=()
[ ! -e /dev/infiniband ] || devices=(--device=/dev/infiniband)
python=(
    podman run --rm --pull=never --label="seatrial=${SEATRIAL_JOB_TAG:-}"
    --network=host --ipc=host --pid=host --security-opt=label=disable
    --user=0:0 --ulimit=host
    --device=nvidia.com/gpu=all "${devices[@]}"
    "${variables[@]/#/--env=}"
    --volume="$SEATRIAL_RUN_DIR:$SEATRIAL_RUN_DIR" --volume="$HF_HOME:$HF_HOME"
    --volume=/mnt/data:/data:ro
    --entrypoint=python3 nvcr.io/nvidia/pytorch:25.12-py3
)
if ! error=$("${python[@]}" -c "import seatrial.bench.preflight" 2>&1); then
    report_error 'cannot run seatrial with podman run --rm --entrypoint=python3 nvcr.io/nvidia/pytorch:25.12-py3'": ${error##*$'\n'}" 'podman run --rm --entrypoint=python3 nvcr.io/nvidia/pytorch:25.12-py3 -m pip show seatrial' >&2
    exit 1
fi

worker=(-m seatrial.worker "$job/job.json" 1)
# Tries Python, seatrial and what the checks need in this environment, then starts the command that follows.
preflight=(-m seatrial.bench.preflight "$job/job.json" 1)
exec "${python[@]}" "${preflight[@]}" "${worker[@]}"
