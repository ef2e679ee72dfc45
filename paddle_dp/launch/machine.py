"""This machine's cores and GPUs, and whether MKL needs a switch, found without importing paddle."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from paddle_dp.errors import InstallError


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`cores` that this process may use; `gpus` that the installed paddle can use, named as in CUDA_VISIBLE_DEVICES."""

    cores: int
    slow_mkl: bool = False
    cuda: bool = False
    gpus: tuple[str, ...] = ()

    @classmethod
    def here(cls, variables: Mapping[str, str] | None = None) -> Machine:
        """This machine under the environment `variables`. Raises InstallError if paddle is not installed."""
        given = os.environ if variables is None else variables
        cuda = paddle_has_cuda()
        return cls(cores=cores(), slow_mkl=slow_mkl(), cuda=cuda, gpus=visible_gpus(given) if cuda else ())


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
    """The number of processors that this process may run on (of its container or taskset, not of the machine)."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@cache
def paddle_has_cuda() -> bool:
    """Whether the installed paddle was built for CUDA, read from its version file (importing it takes over a second).

    Raises InstallError if paddle is not installed.
    """
    spec = find_spec("paddle")
    if spec is None or not spec.origin:
        raise InstallError.of_paddle()
    version = Path(spec.origin).parent / "version" / "__init__.py"
    text = version.read_text() if version.exists() else ""
    match = re.search(r"^cuda_version\s*=\s*'([^']*)'", text, re.MULTILINE)
    return match is not None and match[1] not in ("False", "")


def visible_gpus(
    variables: Mapping[str, str], driver: Path = Path("/proc/driver/nvidia/gpus")
) -> tuple[str, ...]:
    """The GPUs that a process with these environment variables may use, named as the launcher takes them."""
    chosen = variables.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(word for word in chosen.replace(" ", "").split(",") if word not in ("", "-1"))
    number = len(list(driver.iterdir())) if driver.is_dir() else len(list(Path("/dev").glob("nvidia[0-9]*")))
    return tuple(map(str, range(number)))
