"""Finds this machine's cores, devices and free memory, and MKL's switch, without importing paddle."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from paddle_dp.errors import InstallError
from paddle_dp.launch.processes import text_of

SPOKEN = {"cpu": "CPU", "gpu": "GPU", "xpu": "XPU", "npu": "NPU"}
VISIBLE = {"gpu": "CUDA_VISIBLE_DEVICES", "xpu": "XPU_VISIBLE_DEVICES"}
# Names in `paddle/version/__init__.py`; "False" or "" in a Paddle that was built without such devices.
BUILT_FOR = {"gpu": "cuda_version", "xpu": "xpu_xre_version"}


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
    def here(cls) -> Machine:
        """Returns this machine. Raises InstallError if paddle is not installed."""
        kind, devices = detect(os.environ)
        return cls(cores=cores(), mkl_type=mkl_type(), kind=kind, devices=devices)


@cache
def mkl_type(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Returns the MKL_DEBUG_CPU_TYPE that makes the MKL in Paddle's CPU wheel fast here; None if MKL needs no help.

    On an AMD processor MKL takes its slowest path without it: "5" is AVX2, "7" AVX-512. On an EPYC of 2 cores (Paddle
    3.3.1) AVX2 made steps 2 to 4 times faster, and AVX-512 took 0.73 of AVX2's time for an MLP and 0.78 for ResNet-18.
    On other processors the variable would only hide instructions; without AVX-512, "7" ends in an illegal instruction.
    """
    text = text_of(cpuinfo)
    if "AuthenticAMD" not in text:
        return None
    flags = set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())
    if flags >= {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}:
        return "7"
    return "5" if "avx2" in flags else None


def cores() -> int:
    """Returns the number of processors of this process (of its container or taskset, not of the machine)."""
    return len(os.sched_getaffinity(0))


def spoken(kind: str) -> str:
    """Returns the name of a kind of device in messages: "GPU"; otherwise the plugin's word."""
    return SPOKEN.get(kind, kind)


def visible_in(kind: str) -> str:
    """Returns the environment variable that lists the devices of this kind that a process may use."""
    return VISIBLE.get(kind, f"{kind.upper()}_VISIBLE_DEVICES")


def detect(variables: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Returns the kind of device that Paddle prefers here ("cpu" if it has no other), and the visible ones by number.

    A plugin's devices come before GPUs and XPUs, as in Paddle's launcher. Raises InstallError without paddle.
    """
    if root := plugins(variables):
        kind, count = ask_paddle(root)
        if count:
            chosen = variables.get(visible_in(kind))
            return kind, numbers(chosen) if chosen is not None else tuple(map(str, range(count)))
    kind = built_for()
    visible = {"gpu": visible_gpus, "xpu": visible_xpus}
    return kind, visible[kind](variables) if kind in visible else ()


def plugins(variables: Mapping[str, str]) -> str | None:
    """Returns the folder from which Paddle would load plugins; None without plugins."""
    root = variables.get("CUSTOM_DEVICE_ROOT")
    folder = paddle_folder().parent / "paddle_custom_device" if root is None else Path(root) if root else None
    return str(folder) if folder is not None and any(folder.glob("*.so")) else None


@cache
def ask_paddle(root: str) -> tuple[str, int]:
    """Returns the type and the number of devices of the plugin in the folder `root`.

    Loads the plugin in a separate process, because a job must not begin with its threads.
    """
    code = "import json, paddle; print(json.dumps(paddle.device.get_available_custom_device()))"
    variables = {**os.environ, "CUSTOM_DEVICE_ROOT": root, "GLOG_minloglevel": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    if done.returncode:
        raise InstallError(f"The plugin of a device in {root} cannot be loaded: {done.stderr.strip()[-300:]}")
    devices = [name.partition(":")[0] for name in json.loads(done.stdout.strip().splitlines()[-1] or "[]")]
    return (devices[0], devices.count(devices[0])) if devices else ("cpu", 0)


def paddle_folder() -> Path:
    """Returns paddle's folder. Raises InstallError if paddle is not installed."""
    spec = find_spec("paddle")
    if spec is None or not spec.origin:
        raise InstallError.missing_paddle()
    return Path(spec.origin).parent


@cache
def built_for() -> str:
    """Returns "gpu", "xpu" or "cpu": the device of the installed paddle.

    Raises InstallError if paddle is not installed.
    """
    built = (kind for kind, name in BUILT_FOR.items() if version_field(name) not in ("False", ""))
    return next(built, "cpu")


def version_field(name: str) -> str:
    """Returns a text of the version file of the installed paddle, "" without it: importing paddle takes over a second.

    Raises InstallError if paddle is not installed.
    """
    text = text_of(paddle_folder() / "version" / "__init__.py")
    match = re.search(rf"^{name}\s*=\s*'([^']*)'", text, re.MULTILINE)
    return match[1] if match else ""


def visible_gpus(
    variables: Mapping[str, str], driver: Path = Path("/proc/driver/nvidia/gpus")
) -> tuple[str, ...]:
    """Returns the GPUs that a process with these environment variables may use, by the launcher's names."""
    chosen = variables.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return numbers(chosen)
    number = len(list(driver.iterdir())) if driver.is_dir() else len(list(Path("/dev").glob("nvidia[0-9]*")))
    return tuple(map(str, range(number)))


def visible_xpus(variables: Mapping[str, str], nodes: Path = Path("/dev")) -> tuple[str, ...]:
    """Returns the visible XPUs: like the launcher, it reads XPULINK_VISIBLE_DEVICES first."""
    for name in ("XPULINK_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES"):
        if (chosen := variables.get(name)) is not None:
            return numbers(chosen)
    return tuple(map(str, range(len(list(nodes.glob("xpu[0-9]*"))))))


def numbers(chosen: str) -> tuple[str, ...]:
    """Parses "0, 3" as ("0", "3"); "" and "-1" are no device."""
    return tuple(number for number in chosen.replace(" ", "").split(",") if number not in ("", "-1"))


def available_memory(root: Path = Path("/")) -> int | None:
    """Returns the available bytes; None if the system does not report them."""
    # Linux's estimate: free memory plus releasable caches.
    match = re.search(r"^MemAvailable:\s*(\d+) kB", text_of(root / "proc/meminfo"), re.MULTILINE)
    machine_limit = [int(match[1]) * 1024] if match else []
    return min([*machine_limit, *_group_limits(root)], default=None)


def _group_limits(root: Path) -> list[int]:
    """Returns the bytes that each control group (cgroup v2) of this process may still use."""
    match = re.search(r"^0::/(.*)$", text_of(root / "proc/self/cgroup"), re.MULTILINE)
    top = root / "sys/fs/cgroup"
    group, limits = top / (match[1] if match else ""), []
    for folder in (group, *group.parents):
        limit, used = text_of(folder / "memory.max").strip(), text_of(folder / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            cached = re.search(r"^inactive_file (\d+)", text_of(folder / "memory.stat"), re.MULTILINE)
            limits.append(int(limit) - int(used) + (int(cached[1]) if cached else 0))
        if folder == top:
            break
    return limits
