"""Whatever ends a worker or a server in step: it is called by what it is, first, and nobody is left."""

from __future__ import annotations

import re
from typing import Any

import pytest

SERVERS = ["strategy={use: parameter_server, servers: 2}"]


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("forward 3 6 kill", "worker 1 (rank 3)"),
        ("update 1 6 kill", "server 1 (rank 1)"),
        ("exchange 0 6 kill", "server 0 (rank 0)"),
        ("backward 2 6 raise", "worker 0 (rank 2)"),
    ],
)
def test_a_worker_or_a_server_that_fails_is_named(start: Any, found: Any, fault: str, name: str) -> None:
    job = start("train", ranks=4, recipe="tests/faults/faulty.yaml", overrides=SERVERS, env={"FAULT": fault})
    status, _, complained = job.finish(timeout=110)
    how = r"ended by SIGKILL in \w+ of step 7" if "kill" in fault else ""
    words = rf"{re.escape(name)} of 4 on \S+ failed first(: {how})?"
    named = re.search(words, complained) is not None and (not how or re.search(how, complained) is not None)
    found(
        f"{name}, parameter_server: {fault}", job.seconds_from_fault(), named, phase=fault.split()[0], job=job
    )
    assert named and status == (137 if "kill" in fault else 1) and not job.left(), complained
