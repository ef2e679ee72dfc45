"""A rank that the kernel ends for want of memory is told from one that somebody has killed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group below our own, with a limit of 600 MB."""
    words = dict(
        line.split(":", 1)[1].rsplit(":", 1) for line in Path("/proc/self/cgroup").read_text().splitlines()
    )
    top = Path("/sys/fs/cgroup")
    one = top / "memory" / words["memory"].lstrip("/") if "memory" in words else top / words[""].lstrip("/")
    made = one / f"paddle_dp-{os.getpid()}"
    limit = made / ("memory.limit_in_bytes" if "memory" in words else "memory.max")
    try:
        made.mkdir()
        limit.write_text(str(600 << 20))
    except OSError as error:
        if made.exists():
            made.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield made
    made.rmdir()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_rank_that_the_kernel_ends_is_told_so(start, found, group):
    job = start("take_all_memory", extra={"group": str(group)})
    status, _, complained = job.finish(timeout=100)
    named = re.search(
        "rank 1 of 2 on .* failed first: ended by SIGKILL, by the kernel: memory ran out", complained
    )
    found(
        "rank 1: out of memory, ended by the kernel",
        job.seconds_from_fault(),
        named is not None,
        phase="forward",
    )
    assert status == 137 and named and not job.left(), complained
