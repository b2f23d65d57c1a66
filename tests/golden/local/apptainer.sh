#!/bin/bash
# seatrial, job ranks, attempt 1: train.ddp
set -euo pipefail

export SEATRIAL_RUN_DIR=/runs/today
job=$SEATRIAL_RUN_DIR/jobs/ranks

# Not inherited from this shell: PET_*, from which torchrun reads options. PYTHONSAFEPATH: do not import a folder named
# seatrial in the current directory instead of the package.
unset "${!PET_@}"
export PYTHONSAFEPATH=1

report_error() { echo "preflight: $(hostname): $1. Run first: $2"; }

# Prints one line for each requirement that this node does not meet.
requirements() {
    command -v apptainer >/dev/null ||
        report_error 'container.runtime: apptainer is not installed' 'which apptainer'
    [ -e '/data/my torch.sif' ] ||
        report_error 'container.image /data/my torch.sif does not exist' 'ls -l '"'"'/data/my torch.sif'"'"''
    true
}
errors=$(set +eu; requirements)
[[ -z $errors ]] || { echo "$errors" >&2; exit 1; }

# The environment of the checks.
export NCCL_DEBUG='INFO WARN'
hf_home=()
[ ! -d "${HF_HOME:-}" ] || hf_home=(--bind "$HF_HOME:$HF_HOME")
python=(apptainer exec --nv --bind "$SEATRIAL_RUN_DIR:$SEATRIAL_RUN_DIR" "${hf_home[@]}" --bind /mnt/data:/data:ro '/data/my torch.sif' python3)
if ! error=$("${python[@]}" -c "import seatrial.bench.preflight" 2>&1); then
    report_error 'cannot run seatrial with apptainer exec '"'"'/data/my torch.sif'"'"' python3'": ${error##*$'\n'}" 'apptainer exec '"'"'/data/my torch.sif'"'"' python3 -m pip show seatrial' >&2
    exit 1
fi

worker=(-m seatrial.worker "$job/job.json" 1)
# --standalone picks a free port. No restarts: they would hide a fault.
agent=(
    -m seatrial.bench.run_module torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=4
    --max-restarts=0 --redirects=3 --log-dir="$job/attempt1/logs"
)
# Tries Python, seatrial and what the checks need in this environment, then starts the command that follows.
preflight=(-m seatrial.bench.preflight "$job/job.json" 1)
exec "${python[@]}" "${preflight[@]}" "${agent[@]}" "${worker[@]}"
