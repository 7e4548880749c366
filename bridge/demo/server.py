"""The real SGLang server as a child process: started on a free loopback port, waited for, and always stopped."""

import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from bridge.demo import BUILD

LOGS = BUILD / "demo"

STAGES = {
    "Init parallel begin": "starting the scheduler",
    "Load weight begin": "loading the weights",
    "Load weight end": "allocating the KV cache",
    "Memory pool end": "building the attention backend",
    "Application startup complete": "answering SGLang's own warm-up request",
    "The server is fired up": "passing the health check",
}
"""What the server says in its log, and what it does from then on."""

Report = Callable[[str], None]


class ServerError(RuntimeError):
    """The server ended, or did not answer in time; the message says which, with the end of its log."""


class Server(NamedTuple):
    url: str
    log: Path

    def post(self, path: str, body: dict[str, Any], seconds: float = 300.0) -> dict[str, Any]:
        """The JSON answer to one request of SGLang's own API, or `ServerError`."""
        try:
            answer = httpx.post(f"{self.url}{path}", json=body, timeout=seconds)
        except httpx.HTTPError as error:
            raise ServerError(f"{path} got no answer within {seconds:.0f} s: {error!r}\n{tail(self.log)}") from error
        if answer.status_code != 200:
            raise ServerError(f"{path} answered {answer.status_code}: {answer.text[:500]}\n{tail(self.log)}")
        return answer.json()


def tail(log: Path, lines: int = 30) -> str:
    """The end of the log with its path above it."""
    with log.open(errors="replace") as file:
        return f"--- the last lines of {log}\n" + "".join(collections.deque(file, lines))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def command(model: Path, port: int, arguments: Sequence[str]) -> list[str]:
    import torch

    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(model), "--attention-backend", "jax_mla"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--device", "cuda" if torch.cuda.is_available() else "cpu"),
        *arguments,
    ]


def environment() -> dict[str, str]:
    """This process's own, offline, and without torch.compile, which spends a minute on a model this small."""
    return {"HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1"} | os.environ


@contextlib.contextmanager
def serve(
    model: Path, *arguments: str, name: str = "server", seconds: float = 600.0, report: Report = lambda stage: None
) -> Generator[Server]:
    """Serves `model` with `--attention-backend jax_mla` and `arguments` for as long as the `with` block runs.

    `report` is told each new thing that the start waits for. Raises `ServerError` if the server ends, or has not
    answered its health check after `seconds`. The server and its children form a process group of their own; leaving
    the block, by an exception or Ctrl-C too, ends that group and nothing else.
    """
    port = free_port()
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{name}.log"
    report("starting Python and importing SGLang")
    with log.open("w") as output:
        process = subprocess.Popen(
            command(model, port, arguments),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        server = Server(f"http://127.0.0.1:{port}", log)
        _wait(process, server, seconds, report)
        yield server
    finally:
        stop(process)


def _wait(process: subprocess.Popen[bytes], server: Server, seconds: float, report: Report) -> None:
    end = time.monotonic() + seconds
    waiting = dict(STAGES)
    with server.log.open(errors="replace") as log:
        while not _healthy(server.url):
            if (code := process.poll()) is not None:
                raise ServerError(f"the server ended with exit code {code} before it answered\n{tail(server.log)}")
            if time.monotonic() > end:
                raise ServerError(f"the server did not answer within {seconds:.0f} s\n{tail(server.log)}")
            text = log.read()
            for line in [line for line in waiting if line in text]:
                report(waiting.pop(line))
            time.sleep(0.5)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def stop(process: subprocess.Popen[bytes], seconds: float = 10.0) -> None:
    """Ends the process group that `process` leads, and returns when none of it runs any more.

    The server itself is asked first, alone: it takes the end of a child for a crash and then waits before it leaves.
    """
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    end = time.monotonic() + seconds
    # `_group` leaves out what has ended and was not waited for, as the server itself may be.
    while (running := _group(process)) or process.poll() is None:
        if time.monotonic() > end:
            raise ServerError(f"processes {running or [process.pid]} of the server could not be ended")
        time.sleep(0.1)


def _group(process: subprocess.Popen[bytes]) -> list[int]:
    """The processes of the group that `process` leads, or led, that still run."""
    found = []
    for other in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(other.pid) == process.pid and other.status() != psutil.STATUS_ZOMBIE:
                found.append(other.pid)
    return found
