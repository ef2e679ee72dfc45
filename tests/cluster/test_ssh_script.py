"""ssh.sh where ssh is played: hosts are processes of this machine. test_ssh.py has real ones."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.eventually import eventually
from tests.house.programs import ROOT

SSH = ROOT / "tools" / "cluster" / "ssh.sh"
# Runs its last word, as sshd does; the host `lacking` has no paddle-dp, and `killed` is killed.
PLAYED_SSH = """#!/usr/bin/env bash
[ "$1" = -G ] && exit
host=$3
[ "$host" = lacking ] && export PATH=/usr/bin:/bin
[ "$host" = killed ] && { sleep 0.3; exit 255; }
exec bash -c "${@: -1}"
"""
# Needs two requests to end, as one that is in the middle of an update.
PADDLE_DP = """#!/usr/bin/env bash
requests=0
trap 'requests=$((requests + 1)); echo "$requests" >> FILE' TERM
echo 0 >> FILE
while [ "$requests" -lt "$PATIENCE" ]; do sleep 0.05; done
sleep "${DELAY:-0}"
exit "${STATUS:-75}"
"""


def started(tmp_path: Path, hosts: str, patience: int, **more: str) -> tuple[subprocess.Popen[str], Path]:
    requests = tmp_path / "requests"
    for name, text in {"ssh": PLAYED_SSH, "paddle-dp": PADDLE_DP.replace("FILE", str(requests))}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "GRACE": "0", "PATIENCE": str(patience), **more}
    script = subprocess.Popen(
        [SSH, hosts, "r.yaml", "--output-dir", tmp_path], env={**os.environ, **variables}, cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return script, requests


@pytest.mark.processes
def test_a_host_without_the_command_ends_all(tmp_path: Path) -> None:
    script, _ = started(tmp_path, "lacking other", 1)
    screen, _ = script.communicate(timeout=20)
    assert script.returncode == 127
    assert "ssh.sh: lacking has ended with 127" in screen


@pytest.mark.processes
@pytest.mark.parametrize(
    ("patience", "more", "status"),
    [
        (0, {"STATUS": "7", "DELAY": "0.6", "GRACE": "10"}, 7),  # it notices, and ends with the first cause
        (1, {"STATUS": "143"}, 1),  # it waits for the host that is lost, and is stopped
    ],
)
def test_a_killed_host_does_not_leave_ssh_s_own_status(
    tmp_path: Path, patience: int, more: dict[str, str], status: int
) -> None:
    script, _ = started(tmp_path, "killed other", patience, **more)
    screen, _ = script.communicate(timeout=30)
    assert script.returncode == status, screen
    assert "ssh.sh: killed is lost: its ssh has ended with 255" in screen


@pytest.mark.processes
def test_signals_reach_all_hosts_and_a_second_one_too(tmp_path: Path) -> None:
    script, requests = started(tmp_path, "a b", 2)
    for count in (2, 4):  # lines of both hosts
        eventually(lambda count=count: requests.exists() and len(requests.read_text().split()) >= count, 20)
        script.send_signal(signal.SIGTERM)
    screen, _ = script.communicate(timeout=20)
    assert script.returncode == 75, screen
    assert sorted(requests.read_text().split()) == ["0", "0", "1", "1", "2", "2"]
    assert "has ended with" not in screen  # a host that stopped has not failed
