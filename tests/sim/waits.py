"""Counts how often the host stood still for the device, by the line of Python that caused it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from tests.ranks import ROOT

KINDS = ("stream", "device", "event", "copy to the host")  # as in device/waits.h


class Waits:
    """While it is entered, `lines` counts each wait under "file:line function": the innermost of this repository, but
    not of the mesh, which says what others ask it to."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(Path(os.environ["CUSTOM_DEVICE_ROOT"]) / "libsim.so"))
        self._listen = library.sim_listen
        self._told = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._hear)
        self._off = ctypes.cast(None, type(self._told))
        self.lines: Counter[str] = Counter()

    def __enter__(self) -> Waits:
        self._listen(self._told)
        return self

    def __exit__(self, *exception: object) -> None:
        self._listen(self._off)

    def _hear(self, kind: int) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not self._is_told(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            self.lines[f"{KINDS[kind]}: not from this repository"] += 1
            return
        file = Path(frame.f_code.co_filename).relative_to(ROOT)
        self.lines[f"{KINDS[kind]}: {file}:{frame.f_lineno} {frame.f_code.co_name}"] += 1

    @staticmethod
    def _is_told(file: str) -> bool:
        # An environment may stand in the clone.
        ours = file.startswith(str(ROOT)) and "site-packages" not in file
        return ours and not file.startswith(str(ROOT / "paddle_dp" / "mesh"))
