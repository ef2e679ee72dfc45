"""Writes VisualDL's log of a run, record by record.

VisualDL's LogWriter (2.5.3) opens and closes the file for each record in a thread, at five times the cost (36 µs per
scalar instead of 7). It may leave half a record, which makes the whole log unreadable, and it cannot continue a log
without repeated steps.
"""

from __future__ import annotations

import math
import os
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paddle_dp.callbacks._files import Journal
from paddle_dp.checkpoint.disk import replace

# Makes the records of a VisualDL log, and removes those after a step, which a resumed run writes again ----------------


_LENGTH, _FLOAT = struct.Struct("<Q"), struct.Struct("<f")
_UNKNOWN = bytes([15 << 3 | 2])  # the protobuf key of a bytes field 15, which readers do not know and skip


def cut(log: bytes, step: int) -> tuple[bytes, dict[str, int]]:
    """`log` without records after `step`, and the last step of each tag in it.

    Removed records are replaced by blank ones of the same size, because a server continues at the byte where it
    stopped. The row in the table of runs is removed, too: VisualDL reads only the first, and a new one will be written.
    """
    chunks: list[bytes] = []
    latest: dict[str, int] = {}
    for body, value in _read(log):
        is_removed = value.id > step or value.HasField("hparam")
        chunks.append(framed(_blank(len(body)) if is_removed else body))
        if not is_removed:
            latest[value.tag] = value.id
    return b"".join(chunks), latest


def _read(log: bytes) -> Iterator[tuple[bytes, Any]]:
    """Yields each record with its value, up to the first incomplete one (after a crash of the machine)."""
    record, position = makers().Record, 0
    while position + _LENGTH.size <= len(log):
        begin = position + _LENGTH.size
        position = begin + _LENGTH.unpack_from(log, position)[0]
        try:
            values = record.FromString(log[begin:position]).values
        except Exception:  # noqa: BLE001 - protobuf's DecodeError; its module has no types
            return
        if position > len(log) or not values:
            return
        yield log[begin:position], values[0]


def _blank(size: int) -> bytes:
    """A record of `size` bytes that shows nothing: empty metadata, and an unknown field as padding."""
    record = makers().Record
    # Some sizes are not reachable with the shorter tag and any length of the padding.
    for tag in ("-", "--"):
        note: bytes = record(values=[record.Value(tag=tag, meta_data=record.MetaData())]).SerializeToString()
        if filled := padded(note, size):
            return filled
        if len(note) == size:
            return note
    raise ValueError(f"no record has {size} bytes")


def padded(message: bytes, size: int) -> bytes:
    """The protobuf message, padded to `size` bytes by an unknown field; b"" if no padding has such a length."""
    for length in range(max(size - len(message) - 6, 0), size - len(message) - 1):
        filled = message + _UNKNOWN + varint(length) + bytes(length)
        if len(filled) == size:
            return filled
    return b""


def varint(number: int) -> bytes:
    """A protobuf varint: 7 bits per byte, lowest first; the highest bit is set except in the last byte."""
    digits = []
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


def points(numbers: Iterable[tuple[str, float]], step: int, now: int) -> Iterator[bytes]:
    """Yields a point of each curve (tag, value) at `step`, `now` in ms. The bytes equal `makers().scalar`'s at a tenth
    of the time, because a dashboard writes nine or more every ten steps."""
    before = b"\x08" + varint(step) if step else b""  # protobuf leaves a 0 out
    after = b"\x18" + varint(now) + b"\x25"
    for tag, value in numbers:
        name = tag.encode()
        body = b"".join((before, b"\x12", varint(len(name)), name, after, _float(value)))
        yield b"\x0a" + varint(len(body)) + body


def _float(number: float) -> bytes:
    try:
        return _FLOAT.pack(number)
    except OverflowError:  # beyond float32, protobuf writes an infinity
        return _FLOAT.pack(math.copysign(math.inf, number))


def framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def makers() -> Any:
    """Imports VisualDL's module that makes records. The import writes into the home folder; without a writable one HOME
    is a temporary folder meanwhile."""
    home = os.path.expanduser("~")
    if any(os.access(path, os.W_OK) for path in (os.path.join(home, ".visualdl"), home)):
        from visualdl.component import base_component

        return base_component
    from unittest import mock

    with tempfile.TemporaryDirectory() as borrowed, mock.patch.dict(os.environ, HOME=borrowed):
        from visualdl.component import base_component
    return base_component


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
            meta = self._make.meta_data(display_name=clean_tag(shown), walltime=_now())
            content = framed(meta.SerializeToString())
        replace(self.path, content)
        self._journal = Journal(self.path)

    def scalars(self, numbers: Mapping[str, float], step: int) -> None:
        tags = ((clean_tag(tag), float(value)) for tag, value in numbers.items())
        fresh = [(tag, value) for tag, value in tags if self._latest.get(tag, -1) < step]
        if fresh:
            self._journal.add(b"".join(map(framed, points(fresh, step, _now()))))

    def text(self, tag: str, text: str, step: int) -> None:
        self._add([self._make.text(clean_tag(tag), text, step, _now())])

    def picture(self, tag: str, png: bytes, step: int) -> None:
        image = self._make.Record.Image(encoded_image_string=png)
        value = self._make.Record.Value(id=step, tag=clean_tag(tag), timestamp=_now(), image=image)
        self._add([self._make.Record(values=[value])])

    def histogram(self, tag: str, counts: Any, edges: Any, step: int) -> None:
        self._add([self._make.histogram(clean_tag(tag), counts, edges, step, _now())])

    def settings(self, settings: Mapping[str, int | float | str], tags: list[str]) -> None:
        """Adds the row of the table of runs: the settings, and the curves that end with the results."""
        self._add([self._make.hparam(self.path.name, dict(settings), tags, _now())])

    def _add(self, records: Iterable[Any]) -> None:
        """Writes these records at once, except those that the log already has (repeated at the step of a resume)."""
        fresh = [r for r in records if self._latest.get(r.values[0].tag, -1) < r.values[0].id]
        if fresh:
            self._journal.add(b"".join(framed(r.SerializeToString()) for r in fresh))


def clean_tag(tag: str) -> str:
    """`tag` without %, which VisualDL uses to escape slashes in addresses."""
    return tag.replace("%", "_")


def _now() -> int:
    return round(time.time() * 1000)


def flat_settings(recipe: dict[str, Any]) -> dict[str, int | float | str]:
    """Flattens a recipe's settings to the types of VisualDL's table: `model: mlp`, `model/width: 64`.

    Names are joined by / because a column with a dot in its name stays empty there.
    """
    flat: dict[str, int | float | str] = {}
    for name, value in recipe.items():
        if name in ("callbacks", "name", "output_dir", "loader"):
            continue
        for key, leaf in _leaves(name, value):
            if isinstance(leaf, bool):
                leaf = "yes" if leaf else "no"
            flat[key] = leaf if isinstance(leaf, int | float | str) else "none" if leaf is None else str(leaf)
    return flat


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(name, [*value] if isinstance(value, tuple) else value)]
    pairs = [(name if key == "use" else f"{name}/{key}", leaf) for key, leaf in value.items()]
    return [row for key, leaf in pairs for row in _leaves(key, leaf)]
