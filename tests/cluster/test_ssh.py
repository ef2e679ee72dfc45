"""Two real sshd on loopback: ssh.sh starts two nodes on hosts that only ssh's configuration knows, stops them, goes on.

`pytest -m ssh`; always where there is an sshd (Debian: apt-get install openssh-server).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paddle_dp.launch.network import free_port
from tests.eventually import eventually
from tests.faults.slow_run import are_right, at_step, losses, newest, right_weights
from tests.house.programs import ROOT, commands, run_program

RECIPE = "tests/faults/slow.yaml"
SSH = ROOT / "tools" / "cluster" / "ssh.sh"
sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [
    pytest.mark.ssh, pytest.mark.processes,
    pytest.mark.skipif(not (sshd and shutil.which("ssh")), reason="no ssh and sshd here"),
]  # fmt: skip


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables with which ssh knows node0 and node1."""
    folder, programs = tmp_path / "ssh", tmp_path / "bin"
    programs.mkdir()
    (programs / "paddle-dp").write_text(f'#!/bin/sh\nexec {sys.executable} -m paddle_dp "$@"\n')
    (programs / "paddle-dp").chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    first, second = free_port(62_022), free_port(62_522)
    servers = subprocess.Popen(
        [Path(__file__).with_name("sshd_up.sh"), folder, str(first), str(second)],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        eventually((folder / "up").exists, 60, pause=0.1)
        yield {**os.environ, "PATH": f"{folder / 'bin'}:{path}", "PORT": str(free_port(63_000))}
    finally:
        servers.terminate()
        servers.wait()


def test_two_hosts_train_stop_and_go_on(hosts: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [SSH, "node0 node1", RECIPE, "--ranks", "1", "--output-dir", out]
    job = subprocess.Popen(
        words, cwd=ROOT, env=hosts, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - as in a terminal
    )  # fmt: skip
    try:
        at_step(out, 20)
        job.send_signal(signal.SIGINT)
        said, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 75, said
    assert "SIGTERM: stopping after one of the next updates, with a checkpoint" in said
    assert 20 <= newest(out) < 300
    run_program(*words, "--resume", env=hosts, timeout=120)
    assert sorted(losses(out)) == list(range(1, 301))
    assert are_right(out, right_weights(tmp_path, 2)) == 0.0


@pytest.mark.long
def test_a_host_whose_command_is_killed_ends_all(hosts: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [SSH, "node0 node1", RECIPE, "--ranks", "1", "--output-dir", out]
    job = subprocess.Popen(
        words, cwd=ROOT, env=hosts, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # fmt: skip
    try:
        at_step(out, 40)
        (killed,) = (
            pid for pid, command in commands().items()
            if "-m paddle_dp train" in command and str(out) in command and command.endswith("--node-rank 1")
        )  # fmt: skip
        os.kill(killed, signal.SIGKILL)
        screen, _ = job.communicate(timeout=100)
    finally:
        job.kill()
    assert job.returncode not in (0, 75), screen
    assert "ssh.sh: node1 is lost: its ssh has ended with 255" in screen and "node 1 (" in screen, screen
    assert not [command for command in commands().values() if str(out) in command]
    run_program(*words, "--resume", env=hosts, timeout=200)
    assert are_right(out, right_weights(tmp_path, 2)) == 0.0
    print(f"ended with {job.returncode}:\n{screen}")
