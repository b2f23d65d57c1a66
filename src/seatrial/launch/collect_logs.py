"""Transport through ``kubectl logs``: the pods of a job print their result files, and seatrial follows their logs.

Fetching needs no permission to run commands in pods. A pod prints lines ``TOKEN NUMBER NODE DATA``, where ``NODE
DATA`` is a line of ``collect.NODE_SCRIPT``. The token is random, and only the pod's script knows it, from the
environment of the pod; all other lines of the log are ignored. The kubelet keeps the log until the pod is deleted.
After an interrupted stream, the log is read again from the last complete package on. Lines that were read before are
skipped by their numbers. If the kubelet of one node cannot be reached, the logs of the other nodes are read.

A process in the pod that reads the environment of process 1 can forge lines. This adds no risk: such a process can also
change the result files.
"""

from __future__ import annotations

import hmac
import math
import re
import shlex
import time
from dataclasses import dataclass, field

from seatrial.discover.kubectl import Kubectl, pod_log_error
from seatrial.launch.collect import NODE_SCRIPT, Transport

# A kubelet rotates a log of 10 MiB by default (containerLogMaxSize), and kubectl reads the latest file only
POD_LIMIT_BYTES = 6 * 2**20  # compressed; 8 MiB in base64
# If a pod sends no line for this long, the stream of all logs is started again. The first line of a stream may take
# longer: the API server waits 30 s for a kubelet that does not answer, then kubectl prints the error
SILENT_S, FIRST_LINE_S = 15.0, 40.0
NODE_DIR = "/run-directory-of-the-pod"  # placeholder: ``command`` replaces it by $SEATRIAL_SCRATCH/$SEATRIAL_POD
_FRAME = re.compile(rb"(?P<token>[0-9a-f]{32}) (?P<number>\d{1,12}) (?P<payload>(?P<node>\d{1,6}) (?P<data>\S.*))$")
_TIME = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)(?= )")  # kubectl logs --timestamps

_SEND = r"""
# Sends the files of the run directory as lines on the container's standard output, which nothing else writes to. The
# token is not in the environment of the checks.
seatrial_token=$SEATRIAL_TOKEN
unset SEATRIAL_TOKEN
exec 3>&1 >"$SEATRIAL_ATTEMPT_DIR/node$JOB_COMPLETION_INDEX.out" 2>"$SEATRIAL_ATTEMPT_DIR/node$JOB_COMPLETION_INDEX.err"
send_results() {
    local ended="" line number=0
    export node=$JOB_COMPLETION_INDEX nodes=%(nodes)d
    while [ -z "$ended" ]; do
        [ ! -e "$SEATRIAL_RUN_DIR/ended" ] || ended=1 # this step sends all files
        bash -c %(script)s "$SEATRIAL_RUN_DIR" $((%(limit)d * nodes))
    done 3>&- | while IFS= read -r line; do
        number=$((number + 1))
        printf '%%s %%d %%s\n' "$seatrial_token" "$number" "$line"
    done >&3
}
send_results &
seatrial_sender=$!
exec 3>&-
send_and_exit() {
    code=$?
    trap "" TERM
    set +e
    touch "$SEATRIAL_RUN_DIR/ended"
    wait "$seatrial_sender"
    exit "$code"
}
trap send_and_exit EXIT
seatrial_command=
# Kubernetes sends SIGTERM to this shell only, which passes it on; a check may clean up for some seconds.
terminate() {
    trap "" TERM
    if [ -n "$seatrial_command" ]; then
        kill -TERM "$seatrial_command" 2>/dev/null || true
        for ((tenth = 0; tenth < 80; tenth++)); do
            kill -0 "$seatrial_command" 2>/dev/null || break
            sleep 0.1
        done
    fi
    exit 143
}
trap terminate TERM
# Runs a command so that a signal to this shell is handled at once.
run_command() {
    local code=0
    "$@" &
    seatrial_command=$!
    wait "$seatrial_command" || code=$?
    seatrial_command=
    return "$code"
}
"""


def send_results(nodes: int) -> str:
    """Return the bash lines of a pod's script that send its files until the script ends, even if SIGTERM ends it.

    They define ``run_command``, by which the script starts long commands. They need the variables JOB_COMPLETION_INDEX,
    SEATRIAL_TOKEN, SEATRIAL_RUN_DIR, and SEATRIAL_ATTEMPT_DIR; the last names an existing folder.
    """
    script = "'" + NODE_SCRIPT.strip().replace("'", "'\\''") + "'"
    return (_SEND % {"nodes": nodes, "script": script, "limit": POD_LIMIT_BYTES}).strip()


@dataclass
class LogTransport(Transport):
    """Follows the logs of the pods of one job and returns the lines of their packages, each once and in order.

    ``nodes``: names of the pods, separated by commas. ``errors``: kubectl's last error for the log of a pod.
    """

    name, starts_at_once, keeps_files = "kubectl logs", True, True
    kubectl: Kubectl
    selector: str
    container: str
    token: str
    pods: int
    _last_number: dict[bytes, int] = field(default_factory=dict)  # node → number of its last line
    _last_complete: dict[bytes, int] = field(default_factory=dict)  # node → number of the last line of its last package
    _package_times: dict[bytes, str] = field(default_factory=dict)  # node → timestamp of the same line
    _damaged: bool = False  # lines are missing
    # node that has not sent all its files → time until which it must send its next line
    _next_line_limit: dict[bytes, float] = field(default_factory=dict)
    # (node, number of the last line before a gap) of each gap found so far. If the lines are still missing when the log
    # is read again, they are lost, and the gap no longer counts as damage
    _gaps: set[tuple[bytes, int]] = field(default_factory=set)

    @property
    def test_command(self) -> str:
        return self.kubectl.command_text("logs", f"--selector={self.selector}", "--tail=1")

    def step(self, node_dir: str, limit_bytes: int) -> list[str]:
        """Return the command that prints the logs from the last complete package on."""
        del node_dir, limit_bytes  # known to the pod's script
        self._damaged = False
        self._last_number = dict(self._last_complete)
        self._next_line_limit = {str(node).encode(): time.monotonic() + FIRST_LINE_S for node in range(self.pods)}
        # with a selector kubectl prints ten lines of five pods by default
        options = ["--follow", "--timestamps", "--tail=-1", "--ignore-errors", f"--max-log-requests={self.pods}"]
        if len(self._package_times) == self.pods:
            options += [f"--since-time={min(self._package_times.values())}"]
        return self.kubectl.command("logs", f"--selector={self.selector}", f"--container={self.container}", *options)

    @property
    def needs_restart(self) -> bool:
        """Whether lines are missing, or a pod, which should send a line every 2 s, has sent none for too long."""
        return self._damaged or time.monotonic() > min(self._next_line_limit.values(), default=math.inf)

    def payload(self, line: bytes) -> bytes | None:
        """Return the line of a package in a line of the log; None for other output and for a line read before.

        An error of kubectl is recorded in ``errors`` until the pod's next line.
        """
        frame = _FRAME.search(line.rstrip())
        if not frame and (pod_error := pod_log_error(line.decode(errors="replace").rstrip())):
            pod, error = pod_error
            index = pod.split("-")[-2]
            self.errors[int(index)] = error
            self._next_line_limit[index.encode()] = time.monotonic() + SILENT_S
        if not frame or not hmac.compare_digest(frame["token"], self.token.encode()) or int(frame["node"]) >= self.pods:
            return None
        node, number = frame["node"], int(frame["number"])
        last_number = self._last_number.get(node, 0)
        if number <= last_number:
            return None
        self._last_number[node], self._next_line_limit[node] = number, time.monotonic() + SILENT_S
        self.errors.pop(int(node), None)
        if number != last_number + 1 and (node, last_number) not in self._gaps:
            self._gaps.add((node, last_number))
            self._damaged = True
        if self._damaged:
            return None
        if frame["data"].startswith(b".all"):
            # not added to _last_complete: the package is read again until all files have arrived
            self._next_line_limit.pop(node, None)
        elif frame["data"].startswith(b".") and (stamp := _TIME.search(line)):
            self._last_complete[node], self._package_times[node] = number, stamp[0].decode()
        return frame["payload"]

    def command(self, *argv: str) -> list[str]:
        """Return a command that runs ``argv`` in all pods; NODE_DIR in it becomes the run directory of each pod."""
        run = self.kubectl.command_text("exec", f"--container={self.container}")
        in_pod = 'exec "${@/#"$0"/"$SEATRIAL_SCRATCH/$SEATRIAL_POD"}"'
        script = f'for pod in {shlex.join(self.nodes.split(","))}; do {run} "$pod" -- "$@" & done; wait'
        return ["bash", "-c", script, "bash", "bash", "-c", in_pod, NODE_DIR, *argv]
