"""Writes VisualDL's log of a run, record by record.

VisualDL's LogWriter (2.5.3) opens and closes the file for each record in a thread, at five times the cost (36 µs per
scalar instead of 7). It may leave half a record, which makes the whole log unreadable, and it cannot continue a log
without repeated steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paddle_dp.callbacks._journal import Journal
from paddle_dp.callbacks.dashboard.records import cut, framed, makers, points
from paddle_dp.checkpoint.disk import replace


class Log:
    """The log of a run, continued after `step`.

    `name`: the run's name in lists, by default its folder's. The time is appended, because VisualDL shows only one of
    two runs with the same name.
    """

    def __init__(self, folder: Path, step: int, name: str = ""):
        self._make = makers()
        folder.mkdir(parents=True, exist_ok=True)
        earlier = sorted(folder.glob("vdlrecords.*.log"))
        self._latest: dict[str, int] = {}
        if earlier:
            self.path = earlier[-1]
            content, self._latest = cut(self.path.read_bytes(), step)
        else:
            self.path = folder / f"vdlrecords.{int(time.time()):010d}.log"
            shown = f"{name} {time.strftime('%m-%d %H:%M:%S')}" if name else ""
            meta = self._make.meta_data(display_name=_clean(shown), walltime=_now())
            content = framed(meta.SerializeToString())
        replace(self.path, content)
        self._journal = Journal(self.path)

    def scalars(self, numbers: Mapping[str, float], step: int) -> None:
        """Adds a point to the curve of each tag."""
        tags = ((_clean(tag), float(value)) for tag, value in numbers.items())
        fresh = [(tag, value) for tag, value in tags if self._latest.get(tag, -1) < step]
        if fresh:
            self._journal.add(b"".join(map(framed, points(fresh, step, _now()))))

    def text(self, tag: str, text: str, step: int) -> None:
        self._add([self._make.text(_clean(tag), text, step, _now())])

    def picture(self, tag: str, png: bytes, step: int) -> None:
        image = self._make.Record.Image(encoded_image_string=png)
        value = self._make.Record.Value(id=step, tag=_clean(tag), timestamp=_now(), image=image)
        self._add([self._make.Record(values=[value])])

    def histogram(self, tag: str, counts: Any, edges: Any, step: int) -> None:
        self._add([self._make.histogram(_clean(tag), counts, edges, step, _now())])

    def settings(self, settings: Mapping[str, int | float | str], tags: list[str]) -> None:
        """Adds the row of the table of runs: the settings, and the curves that end with the results."""
        self._add([self._make.hparam(self.path.name, dict(settings), tags, _now())])

    def _add(self, records: Iterable[Any]) -> None:
        """Writes these records at once, except those that the log already has (repeated at the step of a resume)."""
        fresh = [r for r in records if self._latest.get(r.values[0].tag, -1) < r.values[0].id]
        if fresh:
            self._journal.add(b"".join(framed(r.SerializeToString()) for r in fresh))


def _clean(tag: str) -> str:
    """`tag` without %, which VisualDL uses to escape slashes in addresses."""
    return tag.replace("%", "_")


def _now() -> int:
    return round(time.time() * 1000)
