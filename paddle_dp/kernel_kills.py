"""Has the kernel ended a process because memory ran out? By its count of such ends."""

from __future__ import annotations

import re
from pathlib import Path

WINDOW = 5.0  # seconds that may pass between the kernel's kill of a process and its discovery


class KernelKills:
    """Detects that the kernel has lately ended a process of this machine because memory ran out.

    The kernel counts all such ends (Linux 4.13), also at a control group's limit.
    """

    def __init__(self, root: Path = Path("/")):
        self._root = root
        self._before = self._latest = _count(root)
        self._looked = 0.0

    def look(self, now: float) -> None:
        """Saves the count at `now`, in seconds of any clock; cheap enough to be called for each batch."""
        if now - self._looked >= WINDOW:
            self._before, self._latest, self._looked = self._latest, _count(self._root), now

    def lately(self) -> bool | None:
        """True if the kernel has lately ended a process; None if it does not count."""
        now = _count(self._root)
        return None if now is None or self._before is None else now > self._before


def _count(root: Path) -> int | None:
    try:
        text = (root / "proc/vmstat").read_text()
    except OSError:
        return None
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else None
