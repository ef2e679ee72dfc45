"""Writes the dashboard's curves, texts and pictures for SwanLab to <run>/swanlab; needs swanlab.

Nothing leaves the machine: `swanlab sync` sends the folder when you want it to, or `mode: online` does at once.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paddle_dp.callbacks import _tracker, dashboard
from paddle_dp.errors import StoppedError, message_of
from paddle_dp.train import Callback, Run

if TYPE_CHECKING:
    from paddle_dp.recipe import Recipe

_PROBES = ("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor")


@dataclass(frozen=True, kw_only=True)
class Config(dashboard.Config):
    project: str = "paddle_dp"
    """The project of SwanLab in which runs are compared."""

    mode: Literal["offline", "local", "online"] = "offline"
    """`offline`: files to send with `swanlab sync`; `local`: for SwanLab's local dashboard (`pip install
    'swanlab[dashboard]'`); `online`: to the server, after `swanlab login`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.histograms:
            raise ValueError("histograms: SwanLab has none; set false, or use dashboard or tensorboard")

    def refuse(self, recipe: Recipe, ranks: int, device: str = "cpu") -> None:
        """Raises InstallError without swanlab. Called before any process starts."""
        _tracker.refuse_without("swanlab")

    def build(self, run: Run) -> Callback:
        return SwanLab(run, self)


class SwanLab(_tracker.Tracker):
    """Writes a folder for each attempt, all with the id of one run, which `swanlab sync` joins by it."""

    name = "swanlab"
    config: Config

    def begin_run(self, step: int, settings: Mapping[str, int | float | str]) -> SwanLabRun:
        folder = self.run.folder / "swanlab"
        run_id, is_known = _tracker.run_id(folder / "run_id.txt", lambda: uuid.uuid4().hex[:20])
        files = sorted(folder.glob("run-*/*.swanlab")) if is_known else []
        written = frozenset().union(*(remove_after(file, step) for file in files))
        return SwanLabRun(self.config, folder, self.run.folder.name, run_id, settings, written)


class SwanLabRun:
    """A session of a run of SwanLab."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        name: str,
        run_id: str,
        settings: Mapping[str, Any],
        written: frozenset[str],
    ):
        import swanlab

        self._swanlab, self.written = swanlab, written
        quiet_settings = swanlab.Settings(
            interactive=False, probe=dict.fromkeys(_PROBES, False), terminal={"proxy_type": "none"},
            **({} if config.mode == "online" else {"integration": {"webhook": {"url": ""}}}),
        )  # fmt: skip
        self._run = swanlab.init(
            mode=config.mode, log_dir=str(folder), project=config.project, name=name, id=run_id, resume="allow",
            config=dict(settings), settings=quiet_settings,
        )  # fmt: skip

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self._run.log(dict(values), step=step)

    def text(self, text: str) -> Any:
        return self._swanlab.Text(text)

    def picture(self, png: bytes) -> Any:
        from PIL import Image

        return self._swanlab.Image(Image.open(io.BytesIO(png)))

    def histogram(self, counts: Any, edges: Any) -> Any:
        """Config refuses histograms."""

    def finish(self, failure: BaseException | None) -> None:
        if failure is None:
            self._run.finish()
        else:
            is_stop = isinstance(failure, StoppedError)
            self._run.finish(state="aborted" if is_stop else "crashed", error=message_of(failure))


def remove_after(file: Path, step: int) -> frozenset[str]:
    """Removes the entries after `step` of an earlier session's file, and returns the keys at `step`. A record that is
    not complete, after a kill, ends the file."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader, DataStoreWriter

    reader, writer, keys = DataStoreReader(), DataStoreWriter(), set[str]()
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    reader.open(file)
    writer.open(partial)
    try:
        while data := _next(reader):
            record = Record.FromString(data)
            kind = next(filter(record.HasField, ("scalar", "media")), None)
            entry = getattr(record, kind) if kind else None
            if entry is None or entry.step <= step:
                writer.write(data)
            if entry is not None and entry.step == step:
                keys.add(entry.key)
    finally:
        reader.close()
        writer.close()
    partial.replace(file)
    return frozenset(keys)


def _next(reader: Any) -> bytes | None:
    try:
        return reader.scan()
    except Exception:  # noqa: BLE001 - it asserts, or raises its own kind of error
        return None
