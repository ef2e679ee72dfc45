"""Turns a paddle.profiler trace into the Trace Event Format that Perfetto reads.

Format: «Trace Event Format», docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Paddle 3.3.1
writes text for the thread's number (tid "123(C++)"), the duration into every name ("relu[3.1 us]", so that nothing can
be summed by name), and an empty event at the end.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_DURATION = re.compile(r"\[[0-9.]+ [a-z]+\]$")


def tidy(path: Path) -> int:
    """Rewrites the trace at `path`; returns its number of slices."""
    content = json.loads(path.read_text())
    content["traceEvents"] = tidied(content["traceEvents"])
    path.write_text(json.dumps(content))
    return sum(event["ph"] == "X" for event in content["traceEvents"])


def tidied(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events with one name per operator and a number per thread (their names stay, as `thread_name`)."""
    threads: dict[Any, int] = {}
    return [
        {
            **event,
            "name": _DURATION.sub("", event["name"]),
            "tid": threads.setdefault((event.get("pid"), event.get("tid")), len(threads) + 1),
        }
        for event in events
        if "ph" in event
    ]
