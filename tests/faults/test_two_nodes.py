"""Two machines, played by two network namespaces joined by a cable: one rank on each, one job."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time

import pytest

from tests.faults.namespaces import NODES, ROOT, begin, finish, needs_root

pytestmark = [pytest.mark.long, needs_root]


def test_two_nodes_are_one_job(spaces, tmp_path):
    """The host's own name leads to 127.0.0.1 on many machines; nodes meet by the addresses that face the master."""
    out = tmp_path / "run"
    first, second = finish([begin(space, node, out, "say") for node, space in enumerate(spaces)])
    assert first[0] == 0, first
    assert second[0] == 0, second
    assert first[1].splitlines()[0].startswith("node 0 of 2, 1 rank here on CPU")
    assert first[1].splitlines()[1:] == ["rank 0 of 2 says 3"]
    assert second[1].splitlines()[1:] == ["rank 1 of 2 says 3"]
    assert (tmp_path / "run.node-1" / "logs" / "attempt-001" / "workerlog.0").exists()


def test_a_failure_on_one_node_ends_the_other(spaces, tmp_path):
    (tmp_path / "pids").mkdir()
    words = {"fault": "raise", "pids": str(tmp_path / "pids")}
    jobs = [begin(space, node, tmp_path / "run", "spoil", **words) for node, space in enumerate(spaces)]
    (status, _, complained), (culprit_status, _, cause) = finish(jobs)
    assert culprit_status == 1 and "ValueError: the culprit's own words" in cause
    assert status == 1 and "ValueError: the culprit's own words" in complained  # on both screens
    assert f"on {socket.gethostname()} failed first" in complained


def test_nodes_with_different_recipes_do_not_begin(spaces, tmp_path):
    """Both end, with the first key that differs, its values, and whose they are; other folders would be no matter."""
    jobs = [
        begin(space, node, tmp_path / f"run-{node}", "train", f"train.batch={64 // (node + 1)}")
        for node, space in enumerate(spaces)
    ]
    for status, _, complained in finish(jobs):
        assert status == 2, complained
        assert "train.batch: 64 on rank 0 (node 0; host " in complained
        assert "32 on rank 1 (node 1; host " in complained


def test_a_job_on_one_machine_is_closed_to_others(spaces, tmp_path, found):
    """Every port at which its ranks listen is tried from the other end of the cable; 4 hybrid ranks have the most."""
    job = {
        "recipe": "tests/faults/hybrid.yaml", "entry_point": "train", "ranks": 4, "output_dir": str(tmp_path / "run"),
        "overrides": ["train.max_time=30 s"],
    }  # fmt: skip
    inside = ["ip", "netns", "exec", spaces[0]]
    process = subprocess.Popen(
        [*inside, sys.executable, "tests/faults/start.py", json.dumps(job)], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    ports: set[int] = set()
    while process.poll() is None:
        listing = subprocess.run([*inside, "ss", "-ltnH"], capture_output=True, text=True, check=True).stdout
        ports |= {int(line.split()[3].rpartition(":")[2]) for line in listing.splitlines()}
        if len(ports) >= 9 and (tmp_path / "run" / "logs").exists():
            break
        time.sleep(0.2)
    time.sleep(2.0)  # a socket listens for a moment before it is closed to others
    probe = (
        "import socket, sys\n"
        "for port in sys.argv[2:]:\n"
        "    try: socket.create_connection((sys.argv[1], int(port)), timeout=2).close(); print(port)\n"
        "    except OSError: pass"
    )
    outside = [
        "ip",
        "netns",
        "exec",
        spaces[1],
        sys.executable,
        "-c",
        probe,
        NODES[0],
        *map(str, sorted(ports)),
    ]
    open_ports = subprocess.run(outside, capture_output=True, text=True, check=True).stdout.split()
    _, complained = process.communicate(timeout=90)
    found(f"another machine tries the {len(ports)} ports of 4 hybrid ranks", 0.0, not open_ports)
    assert process.returncode == 75, complained  # and the ranks have met each other there
    assert len(ports) >= 9 and not open_ports, f"open: {open_ports} of {sorted(ports)}"
