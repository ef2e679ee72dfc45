"""Writes the dashboard's curves, texts and pictures for TensorBoard to <run>/tensorboard; needs tensorboardX.

Its numbers, tags and steps equal the callback `dashboard`'s. Events are made with tensorboardX's messages, and
written here: its own writer cannot continue a log without repeated steps, and may leave half an event.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_dp.callbacks import dashboard
from paddle_dp.callbacks._files import Journal
from paddle_dp.checkpoint.disk import replace
from paddle_dp.errors import InstallError
from paddle_dp.train import Callback, Run

if TYPE_CHECKING:
    from paddle_dp.recipe import Recipe

_LENGTH, _CRC, _PNG_SIZE = struct.Struct("<Q"), struct.Struct("<I"), struct.Struct(">II")
_NO_STEP = b"\x10\x00"  # step 0, two bytes


@dataclass(frozen=True, kw_only=True)
class Config(dashboard.Config):
    def refuse(self, recipe: Recipe, ranks: int, device: str = "cpu") -> None:
        """Raises InstallError without tensorboardX. Called before any process starts."""
        if find_spec("tensorboardX") is None:
            raise InstallError(
                "callback tensorboard needs tensorboardX: pip install 'paddle_dp[tensorboard]', or tensorboardX alone"
            )

    def build(self, run: Run) -> Callback:
        return TensorBoard(run, self)


class TensorBoard(dashboard.Dashboard):
    """Writes one event file, which a resumed run continues without repeated steps."""

    def open_log(self, step: int) -> EventLog:
        return EventLog(self.run.folder / "tensorboard", step)


class EventLog:
    """The event file of a run, continued after `step`: a sequence of Event messages (tensorflow's event.proto), each
    with its length and masked CRC-32C (tensorflow's record_writer.cc)."""

    def __init__(self, folder: Path, step: int):
        folder.mkdir(parents=True, exist_ok=True)
        earlier = sorted(folder.glob("events.out.tfevents.*"))
        self._latest: dict[str, int] = {}
        if earlier:
            self.path = earlier[-1]
            content, self._latest = cut(self.path.read_bytes(), step)
            # A TensorBoard that is open removes the later steps from its memory at this event.
            session = _events().SessionLog(status=_events().SessionLog.START)
            content += framed(_event(step + 1, session_log=session))
        else:
            self.path = folder / f"events.out.tfevents.{int(time.time()):010d}.paddle_dp"
            content = framed(_event(0, file_version="brain.Event:2"))
        replace(self.path, content)
        self._journal = Journal(self.path)

    def scalars(self, numbers: Mapping[str, float], step: int) -> None:
        self._add(step, [_value(tag, simple_value=float(number)) for tag, number in numbers.items()])

    def text(self, tag: str, text: str, step: int) -> None:
        from tensorboardX import summary

        indented = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown: as it stands
        self._add(step, summary.text(tag, indented).value)

    def picture(self, tag: str, png: bytes, step: int) -> None:
        width, height = _PNG_SIZE.unpack_from(png, 16)
        image = _summaries().Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png)
        self._add(step, [_value(tag, image=image)])

    def histogram(self, tag: str, counts: Any, edges: Any, step: int) -> None:
        middles, numbers = (np.asarray(edges[:-1]) + edges[1:]) / 2, np.asarray(counts)
        histogram = _summaries().HistogramProto(
            min=edges[0], max=edges[-1], num=numbers.sum(), sum=numbers @ middles, sum_squares=numbers @ middles**2,
            bucket_limit=list(edges[1:]), bucket=list(counts),
        )  # fmt: skip
        self._add(step, [_value(tag, histo=histogram)])

    def settings(self, settings: Mapping[str, int | float | str], tags: list[str]) -> None:
        """Adds the row of the table HPARAMS: the settings, and the curves that end with the results."""
        from tensorboardX import summary

        experiment, start, _ = summary.hparams(dict(settings), dict.fromkeys(tags, 0.0))
        self._add(0, [*experiment.value, *start.value])

    def _add(self, step: int, values: Iterable[Any]) -> None:
        """Writes these values at once, except those that the log already has (repeated at the step of a resume)."""
        fresh = [value for value in values if self._latest.get(value.tag, -1) < step]
        if fresh:
            self._journal.add(framed(_event(step, summary=_summaries().Summary(value=fresh))))


def cut(log: bytes, step: int) -> tuple[bytes, dict[str, int]]:
    """`log` up to its first incomplete event, without the values after `step`, and the last step of each tag in it.

    Removed events are replaced by empty ones of the same size, because a TensorBoard continues at its byte.
    """
    chunks: list[bytes] = []
    latest: dict[str, int] = {}
    for body in _bodies(log):
        event = _events().Event.FromString(body)
        if event.HasField("summary") and event.step > step:
            body = blank(len(body))
        else:
            latest |= {value.tag: event.step for value in event.summary.value}
        chunks.append(framed(body))
    return b"".join(chunks), latest


def _bodies(log: bytes) -> Iterator[bytes]:
    position, around = 0, _LENGTH.size + _CRC.size
    while position + around <= len(log):
        begin = position + around
        end = begin + _LENGTH.unpack_from(log, position)[0]
        if end + _CRC.size > len(log) or log[position : end + _CRC.size] != framed(log[begin:end]):
            return
        yield log[begin:end]
        position = end + _CRC.size


def blank(size: int) -> bytes:
    """An Event of `size` bytes that shows nothing. Raises ValueError if there is none."""
    for before in (b"", _NO_STEP, 2 * _NO_STEP):
        if filled := dashboard.padded(before, size):
            return filled
    raise ValueError(f"no event has {size} bytes")


def framed(body: bytes) -> bytes:
    length = _LENGTH.pack(len(body))
    return b"".join((length, _masked(length), body, _masked(body)))


def _masked(data: bytes) -> bytes:
    """The CRC-32C, rotated and shifted, so that a checksum of checksums is none of them."""
    from tensorboardX.crc32c import crc32c

    crc = crc32c(data)
    return _CRC.pack(((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _event(step: int, **content: Any) -> bytes:
    body: bytes = _events().Event(wall_time=time.time(), step=step, **content).SerializeToString()
    return body


def _value(tag: str, **content: Any) -> Any:
    return _summaries().Summary.Value(tag=dashboard.clean_tag(tag), **content)


def _events() -> Any:
    from tensorboardX.proto import event_pb2

    return event_pb2


def _summaries() -> Any:
    from tensorboardX.proto import summary_pb2

    return summary_pb2
