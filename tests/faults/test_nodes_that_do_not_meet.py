"""Nodes that do not find each other: each says within `watch.start` what it waits for, and a taken port at once."""

from __future__ import annotations

import random
import socket
import time

import pytest

from paddle_dp.launch.network import _is_free
from paddle_dp.launch.nodes import job as node_job
from paddle_dp.launch.nodes import rendezvous

RECIPE = "tests/faults/faulty.yaml"
SHORT = ["watch.start=6 s"]


@pytest.fixture
def port() -> int:
    return next(filter(_is_free, random.sample(range(61_000, 64_000), 100)))


# On one machine any node opens the meeting, if its address is the master's; 127.0.0.2 is like another machine's.
# After so many seconds of waiting a line reports it; the last line reports the end.
ALONE = {
    "the second node never comes": (
        0,
        "127.0.0.1",
        (rendezvous.NOTICE, "waiting for node 1 at {}, for 6 s at most (watch.start)"),
        "node 1 did not come within 6 s (watch.start). Node 0 waits at {}: is the same command running there",
    ),
    "the first node is not there": (
        1,
        "127.0.0.2",
        (node_job.NOTICE, "no answer at {} yet, waiting for 6 s at most (watch.start)"),
        "no answer at {} for 6 s (watch.start). Is node 0 running, and can this node reach",
    ),
}


@pytest.mark.long
@pytest.mark.timeout(90)
@pytest.mark.parametrize("fault", ALONE)
def test_a_node_that_waits_alone_says_for_whom_and_ends(start, found, port, fault):
    """The wait is timed from the line that reports it: a node needs seconds of work before it waits, on a busy machine
    many times as many, and those are no part of its patience."""
    node, host, (notice, waits), words = ALONE[fault]
    master = f"{host}:{port}"
    alone = start("train", ranks=1, recipe=RECIPE, overrides=SHORT, nodes=2, master=master, node_rank=node)
    lines = [(time.monotonic(), line) for line in alone.process.stderr]
    status, _, _ = alone.finish(timeout=60)
    (began, said), (ended, complained) = lines
    seconds = notice + ended - began
    named = complained.startswith(words.format(master))
    found(f"2 nodes: {fault} (patience 6 s)", seconds, named, phase="start")
    assert status == 124 and named and said.startswith(waits.format(master)) and not alone.left(), lines
    assert abs(seconds - 6) < 2, lines


@pytest.mark.timeout(90)
def test_a_master_port_that_somebody_else_has_is_refused_at_once(fork, found, port):
    with socket.create_server(("127.0.0.1", port)):
        job = fork("train", ranks=1, recipe=RECIPE, nodes=2, master=f"127.0.0.1:{port}", node_rank=0)
        begun = time.monotonic()
        status, _, complained = job.finish(timeout=60)
    named = f"--master 127.0.0.1:{port}: another program listens at port {port} here" in complained
    found("2 nodes: the master's port is taken", time.monotonic() - begun, named, phase="start")
    assert status == 2 and named and complained.count("\n") == 1, complained


@pytest.mark.long
@pytest.mark.timeout(120)
def test_nodes_whose_folders_have_other_histories_meet(start, port, tmp_path):
    """The job's name is the same on all nodes, however many attempts each has logged."""
    (tmp_path / "first" / "logs" / "attempt-007").mkdir(parents=True)
    jobs = [
        start(
            "say", ranks=1, nodes=2, master=f"127.0.0.1:{port}", node_rank=node,
            output_dir=str(tmp_path / ("first" if node == 0 else "second")),
        )
        for node in range(2)
    ]  # fmt: skip
    said = [job.finish(timeout=90) for job in jobs]
    assert [status for status, _, _ in said] == [0, 0], said
    assert "rank 0 of 2 says 3" in said[0][1] and "rank 1 of 2 says 3" in said[1][1]
