"""Writes RUN/report.html at the end, also of a training that failed; every training has it, listed or not."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from paddle_dp.errors import message_of
from paddle_dp.train import Callback, Moment, Run


@dataclass(frozen=True, kw_only=True)
class Config:
    def build(self, run: Run) -> Callback:
        return ReportWriter(run)


class ReportWriter(Callback):
    """Writes the report, on the main rank; a failure there is a sentence on the screen.

    It stands last in the list, and is called after the certificate, which it shows.
    """

    weights = False

    def __init__(self, run: Run):
        self.run = run
        self._started = False  # before that, the folder may still hold an older run

    def start(self, moment: Moment) -> None:
        self._started = self.run.mesh.is_main

    def end(self, moment: Moment) -> None:
        self._write()

    def failed(self, moment: Moment, error: BaseException) -> None:
        self._write()

    def _write(self) -> None:
        if not self._started or not self.run.folder.is_dir():  # the training writes no file
            return
        try:
            from paddle_dp.report.report import write_report

            write_report(self.run.folder)
        except Exception as error:  # noqa: BLE001 - a picture must not end a training
            print(f"The report was not written: {message_of(error)}.", file=sys.stderr, flush=True)
