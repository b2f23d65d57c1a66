"""Strict fakes of ib_write_bw and ib_write_lat: they print recorded output and reject options that they do not know.

Client and server really connect over TCP. The options of both must be the same where perftest requires it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

FIXTURES = Path(__file__).parent.parent / "fixtures" / "perftest"
# Output and the value in it that is replaced
RECORDED = {
    "ib_write_bw": ("write_bw-6.x-ndr-gbits.txt", "392.34"),
    "ib_write_lat": ("write_lat-hdr.txt", "1.87"),
}
TIMEOUT_S = 60.0


def install(folder: Path, tools: tuple[str, ...] = tuple(RECORDED), **behaviour: Any) -> Path:
    """Write the programs to ``folder`` and return it.

    ``behaviour``: ``version``; ``cuda`` and ``dmabuf``: built for them; ``devices``; by device: ``value`` (Gb/s or us),
    ``hang``, ``fail`` (a verb completes with an error) and ``leave`` (exit without output). ``log``: file of all
    arguments.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for tool in tools:
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        code += f"from tests.fakes.perftest import main\nmain({tool!r}, {behaviour!r}, sys.argv[1:])\n"
        (folder / tool).write_text(f"#!{sys.executable} -SE\n{code}")
        (folder / tool).chmod(0o755)
    return folder


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{message}\n Invalid Command or flag.\n Please check command line and run again.\n", file=sys.stderr)
        print(" Parser function exited with Error", file=sys.stderr)
        raise SystemExit(1)


def main(tool: str, behaviour: dict[str, Any], argv: list[str]) -> None:
    if log := behaviour.get("log"):
        with Path(log).open("a", encoding="utf-8") as file:
            print(json.dumps([tool, *argv, sorted(os.sched_getaffinity(0))]), file=file)
    version = behaviour.get("version", "6.06")
    if argv == ["--version"]:
        print(f"Version: {version}")
        raise SystemExit(1)
    if argv == ["--help"]:
        print(f"Usage:\n  {tool}            start a server and wait for connection")
        print("      --use_cuda=<cuda device id> Use CUDA specific device" if behaviour.get("cuda") else "")
        print("      --use_cuda_dmabuf Use CUDA DMA-BUF" if behaviour.get("dmabuf") else "")
        raise SystemExit(1)
    options = _parse(tool, behaviour, argv)
    if options.d not in behaviour["devices"]:
        print((FIXTURES / "write_bw-6.06-no-device.txt").read_text(), file=sys.stderr, end="")
        raise SystemExit(1)
    with _connect(options) as connection, connection.makefile("rb") as received:
        symmetric = [options.n, options.s, options.q] if tool == "ib_write_bw" else [options.n]
        value = behaviour.get("value", {}).get(options.d)
        local = {"version": version, "symmetric": symmetric, "value": value}
        peer = _exchange(connection, received, local)
        if float(peer["version"]) < 5.70:
            print("Current implementation is not compatible with versions older than 5.70", file=sys.stderr)
            raise SystemExit(1)
        if peer["symmetric"] != symmetric:
            print(" Failed to exchange data between server and clients", file=sys.stderr)
            raise SystemExit(1)
        if options.d in behaviour.get("hang", ()):
            time.sleep(TIMEOUT_S)
        if options.d in behaviour.get("fail", ()):
            print((FIXTURES / "write_bw-error-status-4.txt").read_text(), file=sys.stderr, end="")
            raise SystemExit(1)
        if options.d in behaviour.get("leave", ()):
            return
        _exchange(connection, received, "done")
        worse = min if tool == "ib_write_bw" else max
        name, recorded = RECORDED[tool]
        values = [each for each in (value, peer["value"]) if each is not None]
        text = (FIXTURES / name).read_text()
        assert recorded in text
        print(text.replace(recorded, f"{worse(values):.2f}" if values else recorded), end="")


def _parse(tool: str, behaviour: dict[str, Any], argv: list[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name, kind in {"d": str, "i": int, "p": int, "n": int, "x": int}.items():
        parser.add_argument(f"-{name}", type=kind)
    parser.add_argument("-F", action="store_true")
    parser.add_argument("server", nargs="?")
    if tool == "ib_write_bw":
        parser.add_argument("-s", type=int)
        parser.add_argument("-q", type=int)
        parser.add_argument("--report_gbits", action="store_true", required=True)
        if behaviour.get("cuda"):
            parser.add_argument("--use_cuda", type=int)
        if behaviour.get("dmabuf"):
            parser.add_argument("--use_cuda_dmabuf", action="store_true")
    return parser.parse_args(argv)


def _connect(options: argparse.Namespace) -> socket.socket:
    if options.server:
        try:
            return socket.create_connection((options.server, options.p), timeout=TIMEOUT_S)
        except OSError:
            print(f"Couldn't connect to {options.server}:{options.p}", file=sys.stderr)
            raise SystemExit(1) from None
    with socket.socket() as listener:
        try:
            listener.bind(("", options.p))
        except OSError:
            print(f"Couldn't listen to port {options.p}", file=sys.stderr)
            raise SystemExit(1) from None
        print("\n************************************\n* Waiting for client to connect... *", flush=True)
        listener.listen(1)
        return listener.accept()[0]


def _exchange(connection: socket.socket, received: BinaryIO, value: Any) -> Any:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(value).encode() + b"\n")
        if line := received.readline():
            return json.loads(line)
    print(" Failed to exchange data between server and clients", file=sys.stderr)
    raise SystemExit(1)
