"""Writes the dashboard's curves, texts and pictures for Trackio, into its local database; needs trackio.

Open with `trackio show --project paddle_dp`. Nothing leaves the machine unless `space` names a Space of Hugging Face.
"""

from __future__ import annotations

import io
import os
import sqlite3
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from paddle_dp.callbacks import _tracker, dashboard
from paddle_dp.train import Callback, Run

if TYPE_CHECKING:
    from paddle_dp.recipe import Recipe

_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID", "TRACKIO_WEBHOOK_URL")


@dataclass(frozen=True, kw_only=True)
class Config(dashboard.Config):
    project: str = "paddle_dp"
    """The project of Trackio in which runs are compared."""

    space: str | None = None
    """A Space of Hugging Face, such as name/runs, that gets the curves over the network; `null`: local only."""

    def refuse(self, recipe: Recipe, ranks: int, device: str = "cpu") -> None:
        """Raises InstallError without trackio. Called before any process starts."""
        _tracker.refuse_without("trackio")

    def build(self, run: Run) -> Callback:
        return Trackio(run, self)


class Trackio(_tracker.Tracker):
    """Writes one run, named after the folder and its first beginning; a resumed training goes on in it."""

    name = "trackio"
    config: Config

    def begin_run(self, step: int, settings: Mapping[str, int | float | str]) -> TrackioRun:
        new_name = f"{self.run.folder.name} {time.strftime('%Y-%m-%d %H:%M:%S')} {uuid.uuid4().hex[:4]}"
        name, is_known = _tracker.run_id(self.run.folder / "trackio.txt", lambda: new_name)
        return TrackioRun(self.config, name, step if is_known else None, settings)


class TrackioRun:
    """A run of Trackio; after a resume at step `resumed`, the entries of later steps are removed (of a local run)."""

    def __init__(self, config: Config, name: str, resumed: int | None, settings: Mapping[str, Any]):
        import huggingface_hub
        import trackio

        self._trackio = trackio
        self.written: frozenset[str] = frozenset()
        with ExitStack() as stack:
            if config.space is None:
                stack.enter_context(mock.patch.dict(os.environ))
                for variable in _REMOTE:
                    os.environ.pop(variable, None)
                # Trackio asks the hub for the user's name, if a token is at hand.
                local = mock.patch.object(huggingface_hub, "whoami", side_effect=OSError("local"))
                stack.enter_context(local)
                if resumed is not None:
                    database = trackio.SQLiteStorage.get_project_db_path(config.project)
                    self.written = remove_after(database, name, resumed)
            self._run = trackio.init(
                config.project, name=name, resume="never" if resumed is None else "allow",
                space_id=config.space, config=dict(settings), embed=False, auto_log_cpu=False, auto_log_gpu=False,
            )  # fmt: skip

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self._run.log(dict(values), step=step)

    def text(self, text: str) -> Any:
        return self._trackio.Markdown("\n".join(f"    {line}" for line in text.splitlines()))  # as it stands

    def picture(self, png: bytes) -> Any:
        from PIL import Image

        return self._trackio.Image(Image.open(io.BytesIO(png)))

    def histogram(self, counts: Any, edges: Any) -> Any:
        return self._trackio.Histogram(np_histogram=(counts, edges))

    def finish(self, failure: BaseException | None) -> None:
        self._trackio.finish()


def remove_after(database: Path, name: str, step: int) -> frozenset[str]:
    """Removes the entries after `step` of the run `name` (its table is the one of `trackio query`), and returns the
    tags at `step`. Raises sqlite3.Error for a database of another kind."""
    if not database.exists():
        return frozenset()
    with closing(sqlite3.connect(database, timeout=30)) as connection, connection:
        connection.execute("DELETE FROM metrics WHERE run_name = ? AND step > ?", (name, step))
        rows = connection.execute(
            "SELECT DISTINCT key FROM metrics, json_each(CAST(metrics AS TEXT)) WHERE run_name = ? AND step = ?",
            (name, step),
        )
        return frozenset(str(tag) for (tag,) in rows)
