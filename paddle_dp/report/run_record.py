"""Reads the files of a run's folder in a bounded time: metrics, certificate, recipe, evaluation, ends of attempts."""

from __future__ import annotations

import calendar
import io
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from paddle_dp.errors import UsageError
from paddle_dp.scores import interval, smaller_is_better
from paddle_dp.text import amount

Json = dict[str, Any]
Points = list[tuple[float, float]]

METRICS, RECIPE = "metrics.jsonl", "recipe.yaml"
ENDED = "ended.json"  # in an attempt's folder of logs: launch/attempts.py writes it
# Lines of one event that are kept; of more, every second, fourth, … one.
MOST_LINES = 4000
MOST_BYTES = 1 << 30  # of metrics.jsonl; of a larger one, blocks that are evenly spread
_EVENT, _STEP = b'{"event": "', b'{"event": "step"'  # beginnings of lines
_LAST_COUNTS = (b"measured", b"epoch", b"end", b"failed")  # events of which the last line is read
_BLOCK = 1 << 20
_MOST_YAML = 200_000  # characters: YAML is read slowly
_LARGEST = 1e300  # differences of such numbers are finite
_MOST_JSON = 32 << 20  # bytes of another file
# Numbers of a step that are no scores of it.
MEASURES = frozenset({
    "step", "epoch", "samples", "time", "seconds", "elapsed", "sent_bytes", "lr", "gradient_norm", "loss_scale",
    "memory", "samples_per_second", "tokens_per_second", "seconds_per_step", "waiting", "sent", "slowest_rank",
    "slowest_times_others", "held_out", "loss",
})  # fmt: skip


@dataclass
class ThinnedLines:
    """The lines of one event, each `stride`-th of them, with the seconds of the attempts before."""

    lines: list[tuple[float, bytes]] = field(default_factory=list)
    stride: int = 1
    count: int = 0
    last: tuple[float, bytes] = (0.0, b"")

    def add(self, before: float, line: bytes) -> None:
        if self.count % self.stride == 0:
            self.lines.append((before, line))
            if len(self.lines) > 2 * MOST_LINES:
                self.lines, self.stride = self.lines[::2], 2 * self.stride
        self.count += 1
        self.last = before, line

    def read(self) -> list[Json]:
        """The lines as JSON, the last one among them."""
        is_complete = bool(self.lines) and self.lines[-1][1] == self.last[1]
        rows = self.lines if is_complete else [*self.lines, self.last]
        events = []
        for before, line in rows:
            if event := _parsed(line):
                event["elapsed"] = before + (number(event.get("seconds")) or 0.0)
                events.append(event)
        return events


def number(value: Any) -> float | None:
    """A number that can be drawn, or None for NaN, infinities and numbers close to them."""
    return float(value) if type(value) in (int, float) and abs(value) < _LARGEST else None


def _parsed(line: bytes) -> Json:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # half a line, after a crash of the machine
        return {}
    return event if isinstance(event, dict) and number(event.get("step")) is not None else {}


def read_metrics(path: Path) -> dict[str, ThinnedLines]:
    """The lines of metrics.jsonl by event, thinned. Raises OSError."""
    steps = ThinnedLines()
    events = {b"step": steps}
    before, last = 0.0, b""
    for line in _lines(path):
        if line.startswith(_STEP):  # there may be millions
            steps.add(before, line)
        elif line.startswith(_EVENT):
            name = line[len(_EVENT) : line.find(b'"', len(_EVENT))]
            if name == b"start":
                before += number(_parsed(last).get("seconds")) or 0.0
            if name in _LAST_COUNTS:
                events[name] = ThinnedLines(last=(before, line))
            else:
                events.setdefault(name, ThinnedLines()).add(before, line)
        last = line
    return {name.decode(errors="replace"): lines for name, lines in events.items() if lines.last[1]}


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines; of a file larger than `MOST_BYTES`, of evenly spread blocks, the first and the last."""
    size = path.stat().st_size
    if size <= MOST_BYTES:
        with path.open("rb") as file:
            yield from file
        return
    blocks = MOST_BYTES // _BLOCK
    with path.open("rb") as file:
        for block in range(blocks):
            file.seek(block * (size - _BLOCK) // (blocks - 1))
            text = file.read(_BLOCK)
            begin = 0 if block == 0 else text.find(b"\n") + 1
            yield from io.BytesIO(text[begin : text.rfind(b"\n") + 1])


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """The end of an attempt as its launcher saw it: its exit status, its cause as a sentence, and seconds since 1970.
    `stopped`: by request; `log`: the name of its folder."""

    log: str
    status: int
    stopped: bool
    cause: str
    began: float
    ended: float


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of a run's folder. `events`: the lines of metrics.jsonl by event, in order, each with `elapsed`,
    the seconds since the training began, without pauses between attempts. `thinned`: each so-many-th step is among
    them. `notes`: sentences on files that cannot be read."""

    folder: Path
    events: Mapping[str, Sequence[Json]]
    recipe_text: str = ""
    certificate: Json = field(default_factory=dict)
    evaluation: Json = field(default_factory=dict)
    samples: Json = field(default_factory=dict)
    attempt_ends: Sequence[AttemptEnd] = ()
    thinned: int = 1
    partial: bool = False
    notes: Sequence[str] = ()

    @property
    def name(self) -> str:
        start = self.last("start")
        return str(start.get("name") or self.certificate.get("name") or self.folder.resolve().name)

    def last(self, event: str) -> Json:
        """The last line of an event, or {}."""
        lines = self.events.get(event, ())
        return lines[-1] if lines else {}

    @property
    def attempts(self) -> list[Json]:
        rows = self.certificate.get("attempts")
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    @property
    def attempt(self) -> Json:
        """The last attempt, or {}."""
        return self.attempts[-1] if self.attempts else {}

    @cached_property
    def recipe(self) -> Json:
        """The resolved recipe; {} for a training that is described in Python."""
        if len(self.recipe_text) > _MOST_YAML:
            return {}
        try:
            content = YAML(typ="safe", pure=True).load(self.recipe_text)
        except (YAMLError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    @property
    def ranks(self) -> int:
        count = self.last("start").get("ranks") or self.attempt.get("ranks")
        return count if type(count) is int and count > 0 else 1

    @property
    def nodes(self) -> int:
        """The number of nodes, each with as many ranks as the others."""
        count = self.last("start").get("nodes")
        return count if type(count) is int and count > 1 and self.ranks % count == 0 else 1

    @property
    def step(self) -> int:
        steps = [number(lines[-1].get("step")) or 0 for lines in self.events.values() if lines]
        return int(max([*steps, number(self.attempt.get("to")) or 0]))

    @property
    def seconds(self) -> float:
        """Seconds of all attempts together, from the first update to the last line."""
        return max((lines[-1]["elapsed"] for lines in self.events.values() if lines), default=0.0)

    @property
    def ending(self) -> tuple[str, str]:
        """How the training ended, ("done" | "early" | "stopped" | "failed" | "open", sentence): a callback
        ends it early; a person, a signal or a limit stops it."""
        why = self.attempt.get("why")
        ended = self._last_end()
        if ended is not None and ended.status:
            return ("stopped" if ended.stopped else "failed"), ended.cause
        start, end, failed = (_order(self.last(name)) for name in ("start", "end", "failed"))
        if not isinstance(why, str) and failed >= start and failed > end:
            why = f"{self.last('failed').get('kind')}: {self.last('failed').get('message')}"
        elif not isinstance(why, str) and end >= start > -math.inf:
            why = "done"
        if not isinstance(why, str):
            return "open", "Its end was not recorded: it is still at work, or it was killed."
        if why.startswith("done"):
            reason = why.removeprefix("done").lstrip(": ")
            return ("early", f"It stopped early: {reason}.") if reason else ("done", "It ran to its end.")
        if why.startswith("StoppedError: "):
            return "stopped", why.removeprefix("StoppedError: ")
        return "failed", why

    def _last_end(self) -> AttemptEnd | None:
        """The launcher's record of the last attempt, if it is later than the last beginning of the training."""
        begun = max([number(self.last("start").get("time")) or 0.0, begin_seconds(self.attempt)])
        late = [end for end in self.attempt_ends if end.ended >= begun]
        return late[-1] if late else None

    def curve(self, event: str, name: str, x: str = "step") -> Points:
        """The finite numbers of an event over `x`: step, samples, elapsed or sent_bytes."""
        pairs = ((number(line.get(x)), number(line.get(name))) for line in self.events.get(event, ()))
        return [(a, b) for a, b in pairs if a is not None and b is not None]

    def score_names(self, event: str) -> list[str]:
        """The names of the scores of an event, the loss first."""
        lines = self.events.get(event, ())
        numbers = [key for line in (*lines[:3], *lines[-3:]) for key in line if number(line[key]) is not None]
        has_loss = any(number(line.get("loss")) is not None for line in lines[-3:])
        return [*(["loss"] if has_loss else []), *dict.fromkeys(k for k in numbers if k not in MEASURES)]

    def best(self, name: str) -> tuple[float, float] | None:
        """The best held-out number of that name: (step, value)."""
        points = self.curve("evaluated", name)
        if not points:
            return None
        return (min if smaller_is_better(name) else max)(points, key=lambda point: point[1])

    def independent_samples(self, evaluated: float | None = None) -> int:
        """The number of the `evaluated` samples, by default the last evaluation's, with one class each, which makes an
        accuracy a share of them; 0 if a sample is no single decision, or that is not known."""
        count = number(self.last("evaluated").get("held_out")) if evaluated is None else evaluated
        return max(round((count or 0) * self._classes_per_sample), 0)

    @cached_property
    def _classes_per_sample(self) -> float:
        """The classes of a held-out sample, one at most; 0 if it has several, or that is not known. It is a share, as
        evaluation.json may be of another number of samples: `paddle-dp evaluate` writes it, too."""
        rows = self.evaluation.get("per_class")
        counts = (
            [row.get("support") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        )
        total = sum(count for count in counts if type(count) is int and count > 0)
        total = total or sum(map(sum, self.confusion))
        samples = self.evaluation.get("samples")
        return total / samples if type(samples) is int and 0 < total <= samples else 0.0

    @cached_property
    def confusion(self) -> list[list[int]]:
        """The confusion matrix of the last evaluation, [true class][predicted class]; [] without one."""
        rows = self.evaluation.get("confusion")
        if not isinstance(rows, list) or any(type(row) is not list or len(row) != len(rows) for row in rows):
            return []
        return rows if all(type(n) is int and n >= 0 for row in rows for n in row) else []

    def bounds(self, name: str, share: float, evaluated: float | None = None) -> tuple[float, float] | None:
        """The 95 % interval of an accuracy over `evaluated` (by default the last) samples; None for other scores."""
        count = self.independent_samples(evaluated)
        is_accuracy = re.fullmatch(r"(ema_)?acc(uracy)?\d*", name) and 0 <= share <= 1
        return interval(share, count) if is_accuracy and count else None

    def shown(self, name: str, value: float) -> str:
        """ "0.986 (95 %: 0.968 to 0.994)", or the number alone."""
        limits = self.bounds(name, value)
        return f"{value:.4g}" + (f" (95 %: {limits[0]:.3g} to {limits[1]:.3g})" if limits else "")


def _order(line: Json) -> float:
    time_written = number(line.get("time"))
    return -math.inf if time_written is None else time_written


def begin_seconds(attempt: Json) -> float:
    """When an attempt of the certificate began, in seconds since 1970; 0 if that is not known."""
    try:
        return float(calendar.timegm(time.strptime(attempt["begun"], "%Y-%m-%dT%H:%M:%SZ")))
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0.0


def read_run(folder: Path) -> RunRecord:
    """The record of the run in `folder`. Raises UsageError if nothing of a training is there."""
    notes: list[str] = []
    by_event: dict[str, ThinnedLines] = {}
    size = 0
    try:
        if (folder / METRICS).is_file():
            size = (folder / METRICS).stat().st_size
            by_event = read_metrics(folder / METRICS)
        else:
            absent = "the training had no callback `metrics`, so there are no curves."
            notes.append(f"There is no {METRICS}: {absent}")
    except OSError as error:
        notes.append(f"{METRICS} cannot be read: {error.strerror}.")
    record = RunRecord(
        folder=folder,
        events={name: events for name, lines in by_event.items() if (events := lines.read())},
        recipe_text=_text(folder / RECIPE, notes),
        certificate=_json(folder / "certificate.json", notes),
        evaluation=_json(folder / "evaluation.json", notes),
        samples=_json(folder / "samples.json", notes),
        attempt_ends=_attempt_ends(folder / "logs"),
        thinned=by_event["step"].stride if "step" in by_event else 1,
        partial=size > MOST_BYTES,
        notes=notes,
    )
    if not (record.events or record.recipe_text or record.certificate or record.attempt_ends):
        reason = "holds nothing of a training" if folder.is_dir() else "is no folder"
        raise UsageError(f"{folder} {reason}: name the folder of a run, such as runs/digits_mlp.")
    if record.partial:
        notes.append(
            f"{METRICS} is larger than {amount(MOST_BYTES)}: evenly spread pieces of it were read, so the "
            "best score may be another one."
        )
    return _with_sent(record)


def _with_sent(record: RunRecord) -> RunRecord:
    """Adds `sent_bytes` to each step and evaluation: bytes that a rank has sent since the training began."""
    total, step, rate = 0.0, 0.0, 0.0
    lines = [line for name in ("step", "evaluated") for line in record.events.get(name, ())]
    if not any("sent" in line for line in lines):
        return record
    for line in sorted(lines, key=lambda line: float(line["step"])):
        rate = number(line.get("sent")) or rate
        total, step = total + rate * (line["step"] - step), line["step"]
        line["sent_bytes"] = total
    return record


def _text(path: Path, notes: list[str]) -> str:
    try:
        if not path.is_file():
            return ""
        if path.stat().st_size > _MOST_JSON:
            raise OSError(0, "it is too large")
        return path.read_text("utf-8", errors="replace")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")
        return ""


def _json(path: Path, notes: list[str]) -> Json:
    text = _text(path, notes)
    if not text:
        return {}
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        notes.append(f"{path.name} is damaged: it is no JSON.")
        return {}
    return content if isinstance(content, dict) else {}


def _attempt_ends(logs: Path) -> list[AttemptEnd]:
    ends = []
    for path in sorted(logs.glob(f"attempt-*/{ENDED}"))[-100:]:
        fields = _json(path, [])
        began, ended = number(fields.get("began")), number(fields.get("ended"))
        if type(fields.get("status")) is int and began is not None and ended is not None:
            ends.append(
                AttemptEnd(
                    log=path.parent.name, status=fields["status"], stopped=fields.get("stopped") is True,
                    cause=str(fields.get("cause", "")), began=began, ended=ended,
                )
            )  # fmt: skip
    return sorted(ends, key=lambda end: end.ended)
