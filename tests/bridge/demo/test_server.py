"""Starting, waiting for and ending a server, tried on a small stand-in process that behaves badly."""

import os
import subprocess
import sys
import textwrap
import time

import pytest

from bridge.demo import server
from bridge.demo.server import ServerError, serve

HEALTHY = """
    import http.server, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("Load weight begin", child.pid, flush=True)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200 if self.path == "/generate" else 400)
            self.end_headers()
            self.wfile.write(b'{"a": 1}')
        def log_message(self, *_): pass
    time.sleep(1)
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
DEAF = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Makes `serve` run the given source, with the port as its argument, and write its log below `tmp_path`."""

    def use(source):
        program = textwrap.dedent(source)
        monkeypatch.setattr(
            server, "command", lambda model, port, arguments: [sys.executable, "-c", program, str(port)]
        )
        monkeypatch.setattr(server, "LOGS", tmp_path)

    return use


def running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def test_serves_reports_and_leaves_nothing(stand_in, tmp_path):
    stand_in(HEALTHY)
    stages = []
    with serve(tmp_path, seconds=30, report=stages.append) as up:
        assert up.post("/generate", {"x": 1}) == {"a": 1}
        with pytest.raises(ServerError, match="/other answered 400"):
            up.post("/other", {})
        child = int(up.log.read_text().split()[-1])
        assert running(child)
    assert stages == ["starting Python and importing SGLang", "loading the weights"]
    assert not running(child)


def test_ended_also_by_an_exception(stand_in, tmp_path):
    stand_in(HEALTHY)
    with pytest.raises(KeyboardInterrupt), serve(tmp_path, seconds=30) as up:
        child = int(up.log.read_text().split()[-1])
        raise KeyboardInterrupt
    assert not running(child)


def test_one_that_ends_is_reported_with_its_log(stand_in, tmp_path):
    stand_in("import sys; print('out of luck'); sys.exit(3)")
    with pytest.raises(ServerError, match=r"exit code 3(?s:.*)out of luck"), serve(tmp_path, seconds=30):
        pass


def test_one_that_never_answers_is_given_up(stand_in, tmp_path, monkeypatch):
    stand_in(DEAF)
    before = time.monotonic()
    monkeypatch.setattr(server.stop, "__defaults__", (1.0,))
    with pytest.raises(ServerError, match=r"did not answer within 1 s(?s:.*)deaf"), serve(tmp_path, seconds=1):
        pass
    assert time.monotonic() - before < 15


def test_stop_waits_for_the_process_itself(monkeypatch):
    """Also where nothing of its group is seen to run, as when it ends between two looks."""
    monkeypatch.setattr(server, "_group", lambda process: [])
    command = [sys.executable, "-c", textwrap.dedent(DEAF)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == b"deaf\n"
        server.stop(process, 0.5)
    assert process.returncode is not None
