"""The memory that a new process can get, limited by the machine and by its container's or job's control groups; and
whether the kernel has just ended a process because there was none left."""

from __future__ import annotations

import re
from pathlib import Path

WINDOW = 5.0  # seconds: so long before a rank was seen to end the kernel may have ended it


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes; None if the system does not say."""
    limits = [limit for limit in (_machine_limit(root), *_group_limits(root)) if limit is not None]
    return min(limits, default=None)


class KernelKills:
    """Whether the kernel has ended a process of this machine for want of memory in the last few seconds.

    It counts them all (Linux 4.13), also those that only their control group's limit has ended.
    """

    def __init__(self, root: Path = Path("/")):
        self._root = root
        self._before = self._latest = _kernel_kills(root)
        self._looked = 0.0

    def look(self, now: float) -> None:
        """Remembers the count at `now`, in seconds of any clock; cheap enough for ten times a second."""
        if now - self._looked >= WINDOW:
            self._before, self._latest, self._looked = self._latest, _kernel_kills(self._root), now

    def lately(self) -> bool | None:
        """None where the kernel does not count."""
        now = _kernel_kills(self._root)
        return None if now is None or self._before is None else now > self._before


def _kernel_kills(root: Path) -> int | None:
    match = re.search(r"^oom_kill (\d+)$", _read(root / "proc/vmstat"), re.MULTILINE)
    return int(match[1]) if match else None


def _machine_limit(root: Path) -> int | None:
    """Linux's own estimate: free memory and what its caches would release."""
    text = _read(root / "proc/meminfo")
    match = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _group_limits(root: Path) -> list[int]:
    """The bytes that each control group (cgroup v2) of this process may still use."""
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
