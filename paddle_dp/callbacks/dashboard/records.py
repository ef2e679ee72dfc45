"""Records of a VisualDL log: making them, and going on from a step without doubling what is there.

Read in VisualDL 2.5.3 (its last release, 2023): a log is a row of records, each an 8-byte little-endian length and a
protobuf message with one value; the server remembers how far it has read each file.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("<Q")
_UNKNOWN = bytes([15 << 3 | 2])  # the key of field 15, of any bytes: readers skip a field they do not know


def cut(log: bytes, step: int) -> tuple[bytes, dict[str, int]]:
    """`log` without what came after `step`, and the last step of each tag in it.

    What goes is blanked, not taken out: a server that has read the log up to some byte goes on reading from there.
    The row in the table of runs goes too, since VisualDL reads only the first and a new one will be written.
    """
    parts: list[bytes] = []
    latest: dict[str, int] = {}
    for body, value in _read(log):
        goes = value.id > step or value.HasField("hparam")
        parts.append(framed(_blank(len(body)) if goes else body))
        if not goes:
            latest[value.tag] = value.id
    return b"".join(parts), latest


def _read(log: bytes) -> Iterator[tuple[bytes, Any]]:
    """Each record with its value, as far as the log can be read (a crash of the machine may leave half a record)."""
    record, position = makers().Record, 0
    while position + _LENGTH.size <= len(log):
        begin = position + _LENGTH.size
        position = begin + _LENGTH.unpack_from(log, position)[0]
        try:
            values = record.FromString(log[begin:position]).values
        except Exception:  # noqa: BLE001 - protobuf's DecodeError, whose module comes without types
            return
        if position > len(log) or not values:
            return
        yield log[begin:position], values[0]


def _blank(size: int) -> bytes:
    """A record of `size` bytes that shows nothing: an empty note about the file, and a field that nobody knows."""
    record = makers().Record
    # The longer tag is for where the length of the field takes a byte more or less than is left.
    for tag in ("-", "--"):
        note: bytes = record(values=[record.Value(tag=tag, meta_data=record.MetaData())]).SerializeToString()
        for length in range(max(size - len(note) - 6, 0), size - len(note) - 1):
            filled = note + _UNKNOWN + _varint(length) + bytes(length)
            if len(filled) == size:
                return filled
        if len(note) == size:
            return note
    raise ValueError(f"no record has {size} bytes")


def _varint(number: int) -> bytes:
    """7 bits a byte, the lowest first, the last byte without the highest bit."""
    digits = []
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


def framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def makers() -> Any:
    """visualdl's makers of records. Importing it writes into the home folder, which a container may not have."""
    home = os.path.expanduser("~")
    if any(os.access(path, os.W_OK) for path in (os.path.join(home, ".visualdl"), home)):
        from visualdl.component import base_component

        return base_component
    before = os.environ.get("HOME")
    with tempfile.TemporaryDirectory() as borrowed:
        os.environ["HOME"] = borrowed
        try:
            from visualdl.component import base_component
        finally:
            os.environ.pop("HOME") if before is None else os.environ.update(HOME=before)
    return base_component
