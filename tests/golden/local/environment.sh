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
    # shellcheck source=/dev/null
    { [[ $(source '/opt/my env.sh' && echo complete) == *complete ]] && source '/opt/my env.sh'; } >/dev/null 2>&1 ||
        report_error 'environment.source /opt/my env.sh is not readable, fails or exits the shell' 'bash -x '"'"'/opt/my env.sh'"'"''
    module load cuda/13.0 >/dev/null 2>&1 ||
        report_error 'environment.modules: cannot load cuda/13.0' 'bash -lc "module avail"'
    [ -x /opt/venv/bin/python ] ||
        report_error 'environment.venv: /opt/venv/bin/python does not exist or is not executable' 'ls -l /opt/venv/bin/python'
    [ ! -x /opt/venv/bin/python ] || [ -e /opt/venv/bin/activate ] ||
        report_error 'environment.venv: no /opt/venv/bin/activate' 'ls -l /opt/venv/bin/activate'
    true
}
errors=$(set +eu; requirements)
[[ -z $errors ]] || { echo "$errors" >&2; exit 1; }

# The environment of the checks.
job_cwd=$PWD
set +euo pipefail
# shellcheck source=/dev/null
source '/opt/my env.sh' || exit
module load cuda/13.0 || exit
# shellcheck source=/dev/null
source /opt/venv/bin/activate || exit
set -euo pipefail
cd "$job_cwd"
export HF_HOME=/data/hf
export RANK=0
export WORLD_SIZE=1
export LOCAL_RANK=0
python=(/opt/venv/bin/python)
if ! error=$("${python[@]}" -c "import seatrial.bench.preflight" 2>&1); then
    report_error 'cannot run seatrial with /opt/venv/bin/python'": ${error##*$'\n'}" '/opt/venv/bin/python -m pip show seatrial' >&2
    exit 1
fi

worker=(-m seatrial.worker "$job/job.json" 1)
# Tries Python, seatrial and what the checks need in this environment, then starts the command that follows.
preflight=(-m seatrial.bench.preflight "$job/job.json" 1)
exec "${python[@]}" "${preflight[@]}" "${worker[@]}"
