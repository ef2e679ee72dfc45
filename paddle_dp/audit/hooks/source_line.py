"""Finds the line of the script that caused an event: the nearest frame of the stack in the user's code."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path
from types import FrameType

_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep
    for path in {
        *site.getsitepackages(),
        site.getusersitepackages(),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
    }
)
_OURS = str(Path(__file__).resolve().parents[2]) + os.sep  # a script may be written with this package


def here() -> str:
    """ "train.py:41": the nearest line of the script, or of a module outside installed libraries; "" without one."""
    return nearest(sys._getframe(1))


def nearest(frame: FrameType | None) -> str:
    """As `here`, starting at a frame of any thread."""
    user_frame = _user_frame(frame)
    return "" if user_frame is None else f"{_short(user_frame.f_code.co_filename)}:{user_frame.f_lineno}"


def caller() -> str:
    """The nearest line outside this package, also in a library: paddle.Model makes several loaders on its lines."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and os.path.realpath(frame.f_code.co_filename).startswith(_OURS):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def called_by(*endings: str) -> bool:
    """Whether a caller's file ends with one of `endings`, such as "paddle/hapi/model.py"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.replace(os.sep, "/").endswith(endings):
            return True
        frame = frame.f_back
    return False


def direct() -> bool:
    """Whether the user's code called a hook, not a library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and os.path.realpath(frame.f_code.co_filename).startswith(_OURS):
        frame = frame.f_back
    return frame is not None and _is_users(frame)


def _user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return frame


def _is_users(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    path = os.path.realpath(name)
    return not name.startswith("<") and not path.startswith((*_LIBRARIES, _OURS))


def _short(name: str) -> str:
    path = os.path.relpath(name)
    return name if path.startswith("..") else path
