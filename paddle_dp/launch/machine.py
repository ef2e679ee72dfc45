"""This machine's cores and devices, and whether MKL needs a switch, found without importing paddle."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paddle_dp.launch.devices import found


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`cores` that this process may use; the `kind` of device that the installed paddle computes on ("gpu", "xpu", a
    plugin's own word; "cpu" where it knows no other), and the visible `devices` of that kind, by the launcher's names.
    """

    cores: int
    slow_mkl: bool = False
    kind: str = "cpu"
    devices: tuple[str, ...] = ()

    @classmethod
    def here(cls, variables: Mapping[str, str] | None = None) -> Machine:
        """This machine under the environment `variables`. Raises InstallError if paddle is not installed."""
        given = os.environ if variables is None else variables
        kind, devices = found(given)
        return cls(cores=cores(), slow_mkl=slow_mkl(), kind=kind, devices=devices)


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
