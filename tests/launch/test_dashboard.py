"""VisualDL over a folder of runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.launch.dashboard import argv, check, check_port

# VisualDL's account at a counter of visits; in pages that report.
TELEMETRY = "63a600296f8a71f576c4806376a9245b"
ROOT = Path(__file__).resolve().parent.parent.parent


def logged(folder: Path) -> Path:
    from visualdl import LogWriter

    with LogWriter(logdir=str(folder / "run" / "visualdl")) as writer:
        writer.add_scalar("loss", 1.0, 0)
    return folder


def test_the_server_listens_here_only_and_tells_nobody() -> None:
    words = argv(Path("runs"), 8041)
    assert words[words.index("--host") + 1] == "127.0.0.1" and "--disable-telemetry" in words
    assert words[words.index("--logdir") + 1] == "runs" and words[words.index("--port") + 1] == "8041"


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder"):
        check(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="holds no VisualDL log"):
        check(tmp_path)


def test_a_log_at_any_depth_will_do(tmp_path: Path) -> None:
    check(logged(tmp_path))


def test_a_taken_port_is_told_with_the_next_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"--port {port}: .*in use.*--port {port + 1}"):
            check_port(port)
    with pytest.raises(UsageError, match="1 to 65535"):
        check_port(0)


def test_the_dashboard_shows_the_runs_and_ends_with_its_process(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "paddle_dp", "dashboard", str(logged(tmp_path)), "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "no_proxy": "127.0.0.1"}
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        assert f"http://127.0.0.1:{port}/" in process.stdout.readline()
        assert "run/visualdl" in page(f"http://127.0.0.1:{port}/app/api/runs")
        assert TELEMETRY not in page(f"http://127.0.0.1:{port}/app/__snowpack__/env.local.js")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def page(address: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(address, headers={"Accept-Language": "en"})  # a server error without it
    until = time.monotonic() + 60
    while True:
        try:
            return str(opener.open(request, timeout=5).read().decode())
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
