"""How an attempt ended on one node, as a message that every node can show."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paddle_dp.launch import logs
from paddle_dp.launch.failures import LOST_NODE, Failure
from paddle_dp.launch.nodes.messages import Message
from paddle_dp.launch.nodes.rendezvous import LOST
from paddle_dp.launch.restarts import Outcome

MOST, SHORT = 8000, 300  # characters of each text of a failure, and of one that followed from it
FOLLOWED = 8  # so many of those


def end_of(own: Outcome, node: int, told_to_end: bool) -> Message:
    """How this node's ranks ended an attempt: "done", "stopped", "failed", or "ended" because others had failed; and of
    a failure what is to be said of it, with its age in seconds, for clocks differ."""
    cause = own.cause or _without_ranks(own, node)
    if cause is None:
        return {"how": "ended" if told_to_end else "done"}
    words = {
        "failure": _clipped(cause, MOST), "log": None if own.log is None else str(own.log),
        "step": own.step, "began": own.began,
        "consequences": [_clipped(failure, SHORT) for failure in own.consequences[:FOLLOWED]],
    }  # fmt: skip
    age = max(0.0, time.time() - cause.time)
    how = "stopped" if own.stopped else "failed"
    late = cause is own.cause and cause.consequence  # a signal to `paddle-dp` itself is no consequence
    return {"how": how, "age": age, "consequence": late, "words": words}


def _without_ranks(own: Outcome, node: int) -> Failure | None:
    """The end by a signal to `paddle-dp`, or of Paddle's launcher by itself."""
    if not own.status:
        return None
    if own.signal:
        kind, message = own.signal, f"node {node} was ended by {own.signal}."
    else:
        said = logs.tail(own.attempt / "launcher.log", 12)
        kind, message = "launcher", f"{said}\nPaddle's launcher of node {node} ended with {own.status}"
    return Failure(rank=0, kind=kind, message=message, exit_status=own.status, expected=True)


def outcome_of(message: Message, attempt: Path | None, node: int, own: Outcome | None) -> Outcome:
    """The outcome of an attempt whose first cause was told by some node, with what followed from it on this one,
    `node`, whose `own` outcome is known here."""
    try:
        return _outcome(message, attempt, node, own)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        said = f"node {message['node']} failed, and nobody here understands what it says of that ({error!r}): is its "
        cause = Failure(
            rank=-1, kind=LOST_NODE, message=f"{said}paddle-dp of another version?", expected=True
        )
        return Outcome(attempt=attempt or Path(), status=LOST, cause=cause)


def _outcome(message: Message, attempt: Path | None, node: int, own: Outcome | None) -> Outcome:
    words = message["words"]
    known: dict[str, Any] = {
        "attempt": attempt or Path(),
        "step": message.get("step", 0),
        "began": message.get("began", 0),
    }
    if "failure" not in words:
        lost = Failure(rank=-1, kind=LOST_NODE, message=words["lost"], exit_status=LOST, expected=True)
        return Outcome(status=LOST, cause=lost, **known)
    failure = Failure(**words["failure"])
    followed = [Failure(**other) for other in words["consequences"]]
    if message["node"] != node and own is not None and own.cause is not None:
        followed += [own.cause, *own.consequences]
    log = None if words["log"] is None else Path(words["log"])
    return Outcome(status=failure.exit_status, cause=failure, consequences=followed, log=log, **known)


def _clipped(failure: Failure, most: int) -> dict[str, Any]:
    """A failure as JSON, of bounded size: the ends of long texts."""
    return {
        name: value[-most:] if isinstance(value, str) else value for name, value in asdict(failure).items()
    }
