"""What Paddle's math library and threads should be told about this processor, before paddle is imported."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


@cache
def slow_mkl() -> bool:
    """Whether the MKL inside Paddle's CPU wheel would take its slow path here: an AMD processor with AVX2.

    MKL_DEBUG_CPU_TYPE=5 then made steps 2 to 4 times faster (measured on an EPYC, Paddle 3.3.1). On other
    processors the variable would only hide instructions that MKL finds by itself.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "AuthenticAMD" in text and " avx2" in text


def cores() -> int:
    """How many processors this process may run on (a container's or taskset's share, not the machine's)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
