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


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", ["forward 2 6 kill", "forward 3 6 raise", "callback-epoch 1 6 kill"])
def test_a_worker_that_dies_is_left_behind_where_none_waits(start: Any, found: Any, fault: str) -> None:
    """It dies within a round, or where the ranks meet: the others learn from, and evaluate, what was its."""
    overrides = ["strategy={use: parameter_server, mode: async}"]
    job = start(
        "train", ranks=4, recipe="tests/faults/faulty.yaml", overrides=overrides, env={"FAULT": fault}
    )
    status, said, complained = job.finish(timeout=110)
    rank = int(fault.split()[1])
    name = f"worker {rank - 1} (rank {rank})"
    how = "ValueError: the culprit's own words" if "raise" in fault else "ended by SIGKILL in"
    named = f"{name} is lost: {how}" in complained and f"done without {name}" in complained
    found(f"{name}, async: {fault}", job.seconds_from_fault(), named, phase=fault.split()[0])
    assert status == 0 and named and not job.left(), complained + said
    assert (job.out / "checkpoints" / "step-00000016").is_dir()


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", ["update 1 6 kill", "forward all 6 raise"])
def test_without_a_server_or_any_worker_the_job_ends(start: Any, found: Any, fault: str) -> None:
    overrides = ["strategy={use: parameter_server, servers: 2, mode: async}"]
    job = start(
        "train", ranks=4, recipe="tests/faults/faulty.yaml", overrides=overrides, env={"FAULT": fault}
    )
    status, _, complained = job.finish(timeout=110)
    words = r"server 1 \(rank 1\) of 4 .* failed first: ended by SIGKILL"
    if "all" in fault:
        words = r"the culprit's own words\nworker \d \(rank \d\) of 4 \S+ \S+ failed first"
    named = re.search(words, complained) is not None
    found(f"async: {fault}", job.seconds_from_fault(), named, phase=fault.split()[0])
    assert status != 0 and named and not job.left(), complained


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_worker_that_dies_in_its_first_pull_is_left_behind(start: Any, found: Any) -> None:
    """Server 1 has told it nothing yet, and could not connect to it any more: that ended the server, and the job."""
    overrides = ["strategy={use: parameter_server, servers: 2, mode: async}"]
    fault = "pull 3 0 kill"
    job = start(
        "train", ranks=4, recipe="tests/faults/faulty.yaml", overrides=overrides, env={"FAULT": fault}
    )
    status, said, complained = job.finish(timeout=110)
    named = "worker 1 (rank 3) is lost: ended by SIGKILL in" in complained
    found(f"worker 1 (rank 3), async: {fault}", job.seconds_from_fault(), named, phase="exchange")
    assert status == 0 and named and not job.left(), complained + said
