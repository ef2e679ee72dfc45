"""Finds the devices of the installed Paddle before a rank starts: their kind, and the visible ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from paddle_dp.errors import InstallError

SPOKEN = {"cpu": "CPU", "gpu": "GPU", "xpu": "XPU", "npu": "NPU"}
VISIBLE = {"gpu": "CUDA_VISIBLE_DEVICES", "xpu": "XPU_VISIBLE_DEVICES"}
# Names in `paddle/version/__init__.py`; "False" or "" in a Paddle that was built without such devices.
BUILT_FOR = {"gpu": "cuda_version", "xpu": "xpu_xre_version"}


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
    return kind, visible_gpus(variables) if kind == "gpu" else visible_xpus(
        variables
    ) if kind == "xpu" else ()


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


def forget() -> None:
    """Makes the next look-up ask a plugin for its devices again, as one may have gone."""
    ask_paddle.cache_clear()


def paddle_folder() -> Path:
    """Returns paddle's folder. Raises InstallError if paddle is not installed."""
    spec = find_spec("paddle")
    if spec is None or not spec.origin:
        raise InstallError.missing_paddle()
    return Path(spec.origin).parent


@cache
def built_for() -> str:
    """Returns "gpu", "xpu" or "cpu", from the version file of the installed paddle (importing takes over a second).

    Raises InstallError if paddle is not installed.
    """
    version = paddle_folder() / "version" / "__init__.py"
    text = version.read_text() if version.exists() else ""
    for kind, name in BUILT_FOR.items():
        match = re.search(rf"^{name}\s*=\s*'([^']*)'", text, re.MULTILINE)
        if match is not None and match[1] not in ("False", ""):
            return kind
    return "cpu"


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
    """Parses «0, 3» as ("0", "3"); «» and «-1» are no device."""
    return tuple(number for number in chosen.replace(" ", "").split(",") if number not in ("", "-1"))
