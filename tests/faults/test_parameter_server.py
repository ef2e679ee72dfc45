"""Whatever ends a worker or a server: it is called by its role, and nobody is left.

In step, it ends the job. In mode async a lost worker is left behind, and the others learn from, and evaluate, its
samples; without a server, or without any worker, the job ends.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

WORDS = "ValueError: the culprit's own words"
IN_STEP, ASYNC, TWO_SERVERS = "servers: 2", "mode: async", "servers: 2, mode: async"


def first(name: str, how: str = "") -> str:
    return rf"{re.escape(name)}.* of 4 on \S+ failed first{how}"


def lost(name: str, how: str = "ended by SIGKILL in") -> str:
    return rf"{re.escape(name)} is lost: {how}(.|\n)*done without {re.escape(name)}"


KILLED = r": ended by SIGKILL in \w+ of step 7"
# What goes wrong, where, the words of FAULT, how the job ends, and what the screen says.
ROWS = [
    ("worker 1 (rank 3), parameter_server", IN_STEP, "forward 3 6 kill", 137, first("worker 1 (rank 3)", KILLED)),
    ("server 1 (rank 1), parameter_server", IN_STEP, "update 1 6 kill", 137, first("server 1 (rank 1)", KILLED)),
    ("server 0 (rank 0), parameter_server", IN_STEP, "exchange 0 6 kill", 137, first("server 0 (rank 0)", KILLED)),
    ("worker 0 (rank 2), parameter_server", IN_STEP, "backward 2 6 raise", 1, first("worker 0 (rank 2)")),
    ("worker 1 (rank 2), async", ASYNC, "forward 2 6 kill", 0, lost("worker 1 (rank 2)")),
    ("worker 2 (rank 3), async", ASYNC, "forward 3 6 raise", 0, lost("worker 2 (rank 3)", WORDS)),
    ("worker 0 (rank 1), async", ASYNC, "callback-epoch 1 6 kill", 0, lost("worker 0 (rank 1)")),
    ("async", TWO_SERVERS, "update 1 6 kill", 137, first("server 1 (rank 1)", ": ended by SIGKILL")),
    ("async", TWO_SERVERS, "forward all 6 raise", 1, rf"{WORDS}\n.* frames .*\n{first('worker')}"),
    # In its first pull. A server that has sent it nothing yet could not connect to it any more, which ended the job.
    ("worker 1 (rank 3), async", TWO_SERVERS, "pull 3 0 kill", 0, lost("worker 1 (rank 3)")),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("role", "strategy", "deed", "status", "pattern"),
    [pytest.param(*row, id=f"{row[0]}: {row[2]}") for row in ROWS],
)
def test_the_role_of_the_rank_that_failed_is_told(
    start: Any, cause_named: Any, role: str, strategy: str, deed: str, status: int, pattern: str
) -> None:
    overrides = [f"strategy={{use: parameter_server, {strategy}}}"]
    job = start("train", ranks=4, recipe="tests/faults/faulty.yaml", overrides=overrides, env={"FAULT": deed})
    phase = deed.split()[0].replace("pull", "exchange")
    cause_named(job, f"{role}: {deed}", status, pattern, phase, measured=False)
    assert status or (job.out / "checkpoints" / "step-00000016").is_dir()
