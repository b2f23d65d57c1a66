"""Examples at the end of each help text."""

from __future__ import annotations


def _examples(*commands: str) -> str:
    """Return the commands as a section of a help text; empty lines separate them, since typer joins adjacent lines."""
    return "\n\n".join(["Examples:" if len(commands) > 1 else "Example:", *(f"$ seatrial {text}" for text in commands)])


EXAMPLES = {
    "seatrial": _examples("run", "run acceptance --launcher slurm --nodes 4 --gpus-per-node 8", "COMMAND -h"),
    "run": _examples(
        "run",
        "run acceptance --gpus-per-node 8",
        "run acceptance --launcher slurm --nodes 4 --gpus-per-node 8 --set slurm.partition=gpu",
        "run acceptance --only 'collectives.*' --gpus-per-node 8",
        "run --resume seatrial-runs/RUN",
    ),
    "discover": _examples("discover", "discover --json"),
    "show checks": _examples(
        "show checks", "show checks device.gemm", "show checks device.gemm --power", "show checks --json"
    ),
    "show skus": _examples("show skus", "show skus H200", "show skus --json"),
    "render": _examples(
        "render slurm acceptance --nodes 4 --gpus-per-node 8",
        "render slurm acceptance --nodes 4 --gpus-per-node 8 --only 'collectives.*'",
        "render torchrun quick --nodes 2 --gpus-per-node 8 --out /shared/RUN",
        "render kubernetes quick --nodes 2 --gpus-per-node 8 --set kubernetes.image=registry.example/seatrial:0.1.0",
    ),
    "train run": _examples(
        "train run throughput --set max_steps=20 --out /tmp/throughput",
        "train run configs/sft-smollm-135m.yaml --set data.path=rows.jsonl",
    ),
    "train preprocess": _examples(
        "train preprocess function-calling-qwen2-7b --set data.cache=/shared/tokens",
        "train preprocess mine.yaml --set data.path=rows.jsonl --set data.cache=/shared/tokens",
    ),
    "train evaluate": _examples("train evaluate function-calling-qwen2-7b --out RUN"),
    "judge": _examples(
        "judge seatrial-runs/RUN",
        "judge seatrial-runs/RUN --why-not",
        "judge seatrial-runs/RUN --format junit",
        "judge seatrial-runs/RUN --baseline baseline.yaml",
        "judge seatrial-runs/RUN --set 'checks.collectives.all_reduce.expect.busbw.8GiB=> 460 GB/s'",
        "judge provider/trial.json --trial contract.yaml --html acceptance.html",
        "judge nccl-tests.out --gpus 8xH200 --nodes 2 --nics 8x400",
    ),
    "baseline learn": _examples(
        "baseline learn seatrial-runs/RUN1 seatrial-runs/RUN2 seatrial-runs/RUN3 --out baseline.yaml"
    ),
    "explain": _examples(
        "explain slurm-123.out", "explain seatrial-runs/RUN", "explain - < dmesg.txt", "explain --follow train.log"
    ),
    "drill": _examples("drill --list", "drill rank-killed", "drill cpu --out drills", "drill --all --json"),
    "ticket": _examples("ticket seatrial-runs/RUN", "ticket seatrial-runs/RUN node3/gpu5"),
    "compare": _examples(
        "compare seatrial-runs/BEFORE seatrial-runs/AFTER --fail-on regression",
        "compare runs-before/ runs-after/ --format html",
    ),
    "history": _examples("history seatrial-runs", "history seatrial-runs --part 1654024075472"),
    "bundle": _examples(
        "bundle seatrial-runs/RUN -o acceptance.tar.gz --sign ~/.ssh/id_ed25519",
        "bundle acceptance.tar.gz --sign ~/.ssh/id_ed25519 --as customer",
    ),
    "verify": _examples(
        "verify acceptance.tar.gz --allowed-signers allowed_signers --contract",
    ),
    "schema": _examples("schema > trial.schema.json"),
    "init": _examples(
        "init /shared/site", "init /shared/site --nodes 4 --gpus-per-node 8 --partition gpu --account ops"
    ),
    "watch": _examples("watch 123", "watch /shared/site/runs/train_1gpu-123 --once", "watch seatrial-runs/RUN --json"),
    "hook": _examples(
        "hook health --gpus-per-node 8 --dry-run",
        "hook prolog --gpus-per-node 8 --nodes 64 --state-dir /shared/seatrial",
        "hook install /etc/seatrial/hooks --site /shared/site/site.yaml --state-dir /shared/seatrial --dry-run",
    ),
    "readmit": _examples(
        "readmit node7 --baseline site-baseline.yaml --gpus-per-node 8",
        "readmit node7 --baseline site-baseline.yaml --gpus-per-node 8 --undrain --comment --dry-run",
        "readmit n[7-8] --partner n[1-3] --undrain --drain --state-dir /shared/seatrial",
        "readmit node7 --launcher kubernetes --set kubernetes.image=IMAGE --condition --undrain",
    ),
}
