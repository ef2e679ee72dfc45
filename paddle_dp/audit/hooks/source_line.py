"""Finds the line of the script that caused an event: the nearest frame of the stack in the user's code."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

# An environment below this one has libraries, too.
_PACKAGES = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
_LIBRARIES = tuple(os.path.realpath(path) + os.sep for path in (sysconfig.get_path("stdlib"), *_PACKAGES))
_OURS = str(Path(__file__).resolve().parents[2]) + os.sep  # a script may be written with this package


def here() -> str:
    """ "train.py:41": the nearest line of the script, or of a module outside installed libraries; "" without one."""
    return nearest(sys._getframe(1))


def nearest(frame: FrameType | None) -> str:
    """As `here`, starting at a frame of any thread."""
    user_frame = next(filter(_is_users, _outward(frame)), None)
    return "" if user_frame is None else f"{_short(user_frame.f_code.co_filename)}:{user_frame.f_lineno}"


def caller() -> str:
    """The nearest line outside this package, also in a library: paddle.Model makes several loaders on its lines."""
    frame = _caller_frame()
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def called_by(*endings: str) -> bool:
    """Whether a caller's file ends with one of `endings`, such as "paddle/hapi/model.py"."""
    files = (frame.f_code.co_filename for frame in _outward(sys._getframe(1)))
    return any(file.replace(os.sep, "/").endswith(endings) for file in files)


def direct() -> bool:
    """Whether the user's code called a hook, not a library."""
    frame = _caller_frame()
    return frame is not None and _is_users(frame)


def _caller_frame() -> FrameType | None:
    """The nearest frame outside this package."""
    frames = _outward(sys._getframe(1))
    return next((f for f in frames if not os.path.realpath(f.f_code.co_filename).startswith(_OURS)), None)


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    path = os.path.realpath(name)
    return not name.startswith("<") and not path.startswith((*_LIBRARIES, _OURS))


def _short(name: str) -> str:
    path = os.path.relpath(name)
    return name if path.startswith("..") else path
