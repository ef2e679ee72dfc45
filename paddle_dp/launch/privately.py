"""Keeps a job's environment out of its logs: Paddle's launcher writes all its variables into three files.

The launcher gets only variables that it, Python and Paddle's libraries read at their start. Each rank takes the others
from the supervisor's memory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from paddle_dp.mesh.environment import memory_file

VARIABLE = "PADDLE_DP_ENVIRONMENT"  # the path at which a rank finds the other variables
# Variables that are read when a process starts or a library is loaded, and lists of devices.
KNOWN = re.compile(
    r"""PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG|LANGUAGE|TZ|TMPDIR|PWD|VIRTUAL_ENV|CONDA_PREFIX|PORT_RANGE|.*_VISIBLE_DEVICES
    |(LC_|LD_|PYTHON|XDG_|COVERAGE_|MALLOC_|GLIBC_|OMP_|KMP_|GOMP_|MKL_|OPENBLAS_|PADDLE_|FLAGS_|GLOG_|GLOO_|NCCL_|CUDA_
    |NVIDIA_|CUSTOM_DEVICE_|XPU|BKCL_|ASCEND_|HCCL_|MLU_|CNCL_|SIM_).*""",
    re.VERBOSE,
)
SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|AUTH|API_?KEY|ACCESS_?KEY|_(KEY|PASS|PWD)$", re.I)


def in_the_open(name: str) -> bool:
    """True if the launcher may have, and so log, a variable of this name."""
    return bool(KNOWN.fullmatch(name)) and not SECRET.search(name)


@contextmanager
def for_launcher(variables: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yields the variables for Paddle's launcher; within the context its ranks can take the others."""
    hidden = {name: value for name, value in variables.items() if not in_the_open(name)}
    file, path = memory_file("environment", json.dumps(hidden).encode())
    try:
        yield {**{n: v for n, v in variables.items() if n not in hidden}, VARIABLE: path}
    finally:
        os.close(file)


def take() -> None:
    """Sets, in a rank, the variables that its launcher did not have, if any."""
    path = os.environ.pop(VARIABLE, None)
    if path is not None:
        with open(path, "rb") as memory:
            os.environ.update(json.loads(memory.read()))
