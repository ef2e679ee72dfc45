"""A machine that is gone: noticed by the other, and with --restarts awaited; no etcd, and nobody touches the other."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from paddle_dp.launch.processes import alive, descendants, variable
from tests.eventually import eventually
from tests.faults.deeds import ranks_below
from tests.faults.namespaces import begin, finish, kill_node, needs_root, pull
from tests.faults.slow_run import are_right, at_step, newest, right_weights

pytestmark = [pytest.mark.long, needs_root, pytest.mark.timeout(240)]
SLOW = {"recipe": "tests/faults/slow.yaml"}
AGAIN = {**SLOW, "restarts": 2}


def nodes(spaces: list[str], out: Path, *overrides: str, job: dict) -> list[subprocess.Popen[str]]:
    return [begin(space, node, out, "train", *overrides, job=job) for node, space in enumerate(spaces)]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Of two ranks on one machine, with one thread each: the same arithmetic, bit by bit."""
    return right_weights(tmp_path_factory.mktemp("alone"), ranks=2)


def seconds_until_ranks_end(*nodes: subprocess.Popen[str]) -> float:
    """How long it takes until none of these nodes' ranks is left. Call it at once: other ranks may follow them.

    A node that waits for another one has processes all the same: the launcher of its next attempt.
    """
    begun, ranks = time.monotonic(), [rank for node in nodes for rank in ranks_below(node.pid).values()]
    eventually(lambda: not any(map(alive, ranks)), 60)
    return time.monotonic() - begun


@pytest.mark.parametrize("node", [1, 0])
def test_a_node_that_is_killed_and_returns(spaces, tmp_path, found, right, node):
    out = tmp_path / "run"
    both = nodes(spaces, out, job=AGAIN)
    at_step(out, 60)
    kill_node(both[node])
    seconds = seconds_until_ranks_end(both[1 - node])
    time.sleep(3.0)
    assert both[1 - node].poll() is None
    both[node] = begin(spaces[node], node, out, "train", job=AGAIN)  # the same command
    ended = finish(both)
    assert [status for status, _, _ in ended] == [0, 0], ended
    said = ended[1 - node][2]
    named = f"node {node}" in said and "is lost: the connection was closed" in said
    difference = are_right(out, right)
    print(f"node {node} killed and returned: weights differ by {difference:.1e}\n{said}")
    cost = "0" if difference == 0 else f"{difference:.1e}"
    found(f"2 nodes: node {node} is killed, and returns", seconds, named, cost=cost)
    assert named and difference == 0


def test_a_rank_that_is_killed_on_one_node(spaces, tmp_path, found, right):
    """Its own node goes on, and all ranks of both nodes start again."""
    out = tmp_path / "run"
    both = nodes(spaces, out, job=AGAIN)
    at_step(out, 60)
    [rank] = [pid for pid in descendants(both[1].pid) if variable(pid, "PADDLE_TRAINER_ID") == "1"][:1]
    os.kill(rank, signal.SIGKILL)
    seconds = seconds_until_ranks_end(both[0])
    ended = finish(both)
    assert [status for status, _, _ in ended] == [0, 0], ended
    words = f"failed: rank 1 of 2 on {socket.gethostname()}: ended by SIGKILL"
    named = all(words in said for _, _, said in ended)
    difference = are_right(out, right)
    found("2 nodes: rank 1 is killed, on node 1", seconds, named, cost="0" if difference == 0 else "?")
    assert named and difference == 0, ended


def test_a_rank_that_stands_still_on_one_node_is_named_on_both(spaces, tmp_path, found):
    fault = {"FAULT": "forward 1 7"}
    both = [
        begin(space, node, tmp_path / "run", "train", job={"recipe": "tests/faults/faulty.yaml"}, env=fault)
        for node, space in enumerate(spaces)
    ]
    ended = finish(both)
    words = "rank 1 has been in forward of step"
    named = all(words in said and "stand_still" in said for _, _, said in ended)
    found("2 nodes: rank 1 stands still, on node 1 (patience 3 s)", 3.0, named, phase="forward")
    assert [status for status, _, _ in ended] == [124, 124] and named, ended


def test_a_cable_that_is_out_for_ten_seconds(spaces, tmp_path, right):
    out = tmp_path / "run"
    both = nodes(spaces, out, job=SLOW)
    at_step(out, 40)
    pull(spaces, 1, plugged=False)
    time.sleep(10.0)
    pull(spaces, 1, plugged=True)
    ended = finish(both)
    assert [status for status, _, _ in ended] == [0, 0], ended
    difference = are_right(out, right)
    print(f"cable out for 10 s: weights differ by {difference:.1e}")
    assert difference == 0


def test_a_cable_that_stays_out(spaces, tmp_path, found):
    """Both nodes notice it, and end, each with the other one's name; nothing is left of them."""
    out = tmp_path / "run"
    both = nodes(spaces, out, job=SLOW)
    at_step(out, 40)
    pull(spaces, 1, plugged=False)
    begun = time.monotonic()
    ended = finish(both)
    seconds = time.monotonic() - begun
    (status, _, said), (other_status, _, other_said) = ended
    print(f"cable out for good, after {seconds:.1f} s:\n{said}\n{other_said}")
    named = "10.77.0.2) is lost: nothing was heard of it for 20 s (watch.node)" in said
    other_named = "node 0 at 10.77.0.1:9701 is lost: nothing was heard of it for 20 s" in other_said
    found("2 nodes: the cable stays out (patience 20 s)", seconds, named and other_named)
    assert (status, other_status) == (1, 1) and named and other_named
    assert seconds < 20 + 12
    assert "go on from step" in said


def test_a_cable_that_is_out_for_longer_than_the_patience(spaces, tmp_path, found, right):
    """With --restarts both nodes end their ranks, wait for each other, and go on when the cable is back."""
    out = tmp_path / "run"
    both = nodes(spaces, out, job=AGAIN)
    at_step(out, 40)
    pull(spaces, 1, plugged=False)
    seconds = seconds_until_ranks_end(*both)
    time.sleep(2.0)
    pull(spaces, 1, plugged=True)
    ended = finish(both)
    assert [status for status, _, _ in ended] == [0, 0], ended
    lost = "is lost: nothing was heard of it for 20 s (watch.node)"
    named = all(lost in said for _, _, said in ended)
    difference = are_right(out, right)
    cost = "0" if difference == 0 else f"{difference:.1e}"
    found("2 nodes: the cable is out for longer than the patience of 20 s", seconds, named, cost=cost)
    assert named and difference == 0, ended


def test_a_job_goes_on_without_a_lost_node_and_grows_when_it_returns(spaces, tmp_path, found, right):
    """--nodes 1:2: 2 nodes, then 1, then 2 again; node 0's process is the same one all the time."""
    out = tmp_path / "run"
    job = {**AGAIN, "least_nodes": 1}
    both = nodes(spaces, out, "watch.rejoin=4 s", job=job)
    at_step(out, 40)
    kill_node(both[1])
    seconds = seconds_until_ranks_end(both[0])
    begun = time.monotonic()
    at_step(out, newest(out) + 40)
    alone = time.monotonic() - begun
    both[1] = begin(spaces[1], 1, out, "train", "watch.rejoin=4 s", job=job)
    ended = finish(both)
    assert [status for status, _, _ in ended] == [0, 0], ended
    said = ended[0][2]
    difference = are_right(out, right)
    print(f"nodes 2 -> 1 -> 2, alone after {alone:.1f} s: weights differ by {difference:.1e}\n{said}")
    named = (
        "node 1 (" in said
        and "is lost: the connection was closed" in said
        and "10.77.0.2) has come: saving a checkpoint, then going on" in said
    )
    found("2 nodes, --nodes 1:2: node 1 is killed, and returns later", seconds, named)
    assert named and difference < 1e-6
    assert len(list((out / "logs").glob("attempt-*"))) == 3
