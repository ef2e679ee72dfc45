"""Two network namespaces joined by a cable, and nodes of a job in them. Needs root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.launch.processes import kill_tree

ROOT = Path(__file__).resolve().parent.parent.parent
NODES = ("10.77.0.1", "10.77.0.2")
PORT = 9701
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"),
    reason="two machines are played by two network namespaces, which takes root and iproute2",
)


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, timeout=10)


@contextmanager
def two_spaces() -> Iterator[list[str]]:
    """Two namespaces; each has its own lo, its own ports, and one end of the cable."""
    names = [f"paddle-dp-{os.getpid()}-{number}" for number in range(2)]
    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"link add {end_of(0)} type veth peer name {end_of(1)}")
        for number, (name, address) in enumerate(zip(names, NODES, strict=True)):
            end = end_of(number)
            ip(f"link set {end} netns {name}")
            ip(f"-n {name} address add {address}/24 dev {end}")
            ip(f"-n {name} link set {end} up")
            ip(f"-n {name} link set lo up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], timeout=10)


def end_of(node: int) -> str:
    """The name of a node's end of the cable."""
    return f"pdp{os.getpid() % 100000}{'ab'[node]}"


def pull(spaces: list[str], node: int, plugged: bool) -> None:
    """Unplugs the cable at one end, or plugs it in again."""
    ip(f"-n {spaces[node]} link set {end_of(node)} {'up' if plugged else 'down'}")


def begin(
    space: str,
    node: int,
    out: Path,
    entry_point: str,
    *overrides: str,
    job: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    before: Sequence[str] = (),
    **extra: str,
) -> subprocess.Popen[str]:
    """`paddle-dp` in one of the namespaces, as node `node`; `job`: more fields of the Job; `before`: words that
    stand before its command, in the namespace."""
    words = {
        "entry_point": entry_point if entry_point == "train" else f"tests.faults.entry_points:{entry_point}",
        "overrides": overrides,
        "recipe": "tests/faults/tiny.yaml", "output_dir": str(out), "extra": extra,
        "nodes": 2, "master": f"{NODES[0]}:{PORT}", "node_rank": node, **(job or {}),
    }  # fmt: skip
    command = [
        "ip",
        "netns",
        "exec",
        space,
        *before,
        sys.executable,
        "tests/faults/start.py",
        json.dumps(words),
    ]
    # One thread, as in a rank of two on one machine: other numbers of threads round otherwise.
    mark = f"{space.rpartition('-')[0]}-0"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PADDLE_DP_TEST": mark, **(env or {})}
    return subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def kill_node(process: subprocess.Popen[str]) -> None:
    """What a power cut does to a node: all of it ends at once."""
    kill_tree(process)
    process.communicate()


def finish(processes: list[subprocess.Popen[str]], timeout: float = 120) -> list[tuple[int, str, str]]:
    try:
        said = [process.communicate(timeout=timeout) for process in processes]
        return [(p.returncode, out, error) for p, (out, error) in zip(processes, said, strict=True)]
    finally:
        for process in processes:
            process.kill()
