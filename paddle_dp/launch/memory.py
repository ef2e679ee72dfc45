"""The memory that a new process can get, limited by the machine and by its container's or job's control groups."""

from __future__ import annotations

import re
from pathlib import Path


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes; None if the system does not say."""
    limits = [limit for limit in (_of_machine(root), *_of_groups(root)) if limit is not None]
    return min(limits, default=None)


def _of_machine(root: Path) -> int | None:
    """Linux's own estimate: free memory and what its caches would release."""
    text = _read(root / "proc/meminfo")
    match = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _of_groups(root: Path) -> list[int]:
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
