"""Finds this machine's cores and devices, and MKL's switch, without importing paddle."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paddle_dp.launch.devices import detect


@dataclass(frozen=True, kw_only=True)
class Machine:
    """This machine's processors and devices.

    `cores` counts processors that this process may use. `kind` is the device of the installed paddle ("gpu", "xpu", a
    plugin's word, else "cpu"); `devices` are the visible ones of that kind, by the launcher's names.
    """

    cores: int
    mkl_type: str | None = None
    kind: str = "cpu"
    devices: tuple[str, ...] = ()

    @classmethod
    def here(cls, variables: Mapping[str, str] | None = None) -> Machine:
        """Returns this machine under the environment `variables`. Raises InstallError if paddle is not installed."""
        environment = os.environ if variables is None else variables
        kind, devices = detect(environment)
        return cls(cores=cores(), mkl_type=mkl_type(), kind=kind, devices=devices)


@cache
def mkl_type(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Returns the MKL_DEBUG_CPU_TYPE that makes the MKL in Paddle's CPU wheel fast here; None if MKL needs no help.

    On an AMD processor MKL takes its slowest path without it: "5" is AVX2, "7" AVX-512. On an EPYC of 2 cores (Paddle
    3.3.1) AVX2 made steps 2 to 4 times faster, and AVX-512 took 0.73 of AVX2's time for an MLP and 0.78 for ResNet-18.
    On other processors the variable would only hide instructions; without AVX-512, "7" ends in an illegal instruction.
    """
    try:
        text = cpuinfo.read_text()
    except OSError:
        return None
    if "AuthenticAMD" not in text:
        return None
    flags = set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())
    if flags >= {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}:
        return "7"
    return "5" if "avx2" in flags else None


def cores() -> int:
    """Returns the number of processors of this process (of its container or taskset, not of the machine)."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
