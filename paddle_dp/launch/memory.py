"""Finds how much memory a new process can get, and if the kernel has just ended a process because memory ran out."""

from __future__ import annotations

import re
from pathlib import Path

WINDOW = 5.0  # seconds that may pass between the kernel's kill and its discovery


def available_memory(root: Path = Path("/")) -> int | None:
    """Returns the available bytes; None if the system does not report them."""
    limits = [limit for limit in (_machine_limit(root), *_group_limits(root)) if limit is not None]
    return min(limits, default=None)


class KernelKills:
    """Detects that the kernel has lately ended a process of this machine because memory ran out.

    The kernel counts all such ends (Linux 4.13), also at a control group's limit.
    """

    def __init__(self, root: Path = Path("/")):
        self._root = root
        self._before = self._latest = _kernel_kills(root)
        self._looked = 0.0

    def look(self, now: float) -> None:
        """Saves the count at `now`, in seconds of any clock; cheap enough for ten calls a second."""
        if now - self._looked >= WINDOW:
            self._before, self._latest, self._looked = self._latest, _kernel_kills(self._root), now

    def lately(self) -> bool | None:
        """True if the kernel has lately ended a process; None if it does not count."""
        now = _kernel_kills(self._root)
        return None if now is None or self._before is None else now > self._before


def _kernel_kills(root: Path) -> int | None:
    match = re.search(r"^oom_kill (\d+)$", _read(root / "proc/vmstat"), re.MULTILINE)
    return int(match[1]) if match else None


def _machine_limit(root: Path) -> int | None:
    """Returns Linux's estimate: free memory plus releasable caches, in bytes."""
    text = _read(root / "proc/meminfo")
    match = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _group_limits(root: Path) -> list[int]:
    """Returns the bytes that each control group (cgroup v2) of this process may still use."""
    match = re.search(r"^0::/(.*)$", _read(root / "proc/self/cgroup"), re.MULTILINE)
    top = root / "sys/fs/cgroup"
    group, limits = top / (match[1] if match else ""), []
    for folder in (group, *group.parents):
        limit, used = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            cached = re.search(r"^inactive_file (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
            limits.append(int(limit) - int(used) + (int(cached[1]) if cached else 0))
        if folder == top:
            break
    return limits


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
