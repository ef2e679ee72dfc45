"""The frames of a user's code in a traceback or a stack, outside this package and libraries."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator
from types import FrameType

from paddle_dp.identity.walk import is_library


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs a user's code."""
    return not is_library(str(frame.f_globals.get("__name__", "")))


def user_frames(frames: Iterable[tuple[FrameType, int]]) -> Iterator[tuple[FrameType, int]]:
    """The pairs (frame, line) that run a user's code, of those that `traceback.walk_tb` and `walk_stack` yield."""
    return ((frame, line) for frame, line in frames if is_users(frame))


def location(frame: FrameType, line: int) -> tuple[str, str]:
    """("loss.py, line 12, in forward", "return x / y"); the second is "" where the source is not at hand."""
    code = frame.f_code
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}, line {line}, in {code.co_name}", text
