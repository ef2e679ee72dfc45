"""The result of an evaluation. Does not import paddle."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paddle_dp.errors import UsageError, did_you_mean

_LINE = json.JSONEncoder(allow_nan=False)  # dumps() would make one for each line
EMA = "ema_"  # prefix of the names of averaged weights' numbers


def as_json(content: Mapping[str, Any], to_read: bool = False) -> str:
    """Encodes standard JSON. NaN and infinity become null, with their text in `not_finite`. `to_read`: each field has a
    line, and so has each row of a table: `json.dumps` has one for each number, and takes five times as long."""
    not_finite = {k: repr(v) for k, v in content.items() if isinstance(v, float) and not math.isfinite(v)}
    if not_finite:
        content = {**content, **dict.fromkeys(not_finite), "not_finite": not_finite}
    if not to_read:
        return _LINE.encode(content) + "\n"
    fields = ",\n ".join(f"{_LINE.encode(key)}: {_lines(value)}" for key, value in content.items())
    return f"{{\n {fields}\n}}\n"


def _lines(value: Any) -> str:
    rows = ",\n  ".join(map(_LINE.encode, value)) if isinstance(value, list) else ""
    return f"[\n  {rows}\n ]" if rows else _LINE.encode(value)


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The result of an evaluation: `numbers` are means over all that counted, never means of means. `available`: the
    number of held-out samples, if only `samples` of them were evaluated.

    `confusion` [true class, predicted class] counts samples (classifiers only); `classes` are their names. `failure`:
    why a metric's numbers are NaN, though the weights may be sound.
    """

    numbers: Mapping[str, float]
    samples: int
    available: int | None = None
    confusion: np.ndarray | None = None
    classes: tuple[str, ...] | None = None
    failure: str = ""

    def with_prefixed(self, prefix: str, other: Evaluation) -> Evaluation:
        """Adds the numbers of another evaluation of the same samples, under names with a prefix."""
        numbers = {**self.numbers, **{prefix + n: v for n, v in other.numbers.items()}}
        return replace(self, numbers=numbers, failure=self.failure or other.failure)

    @property
    def not_finite(self) -> list[str]:
        """The names of the numbers that are NaN or infinite."""
        return [name for name, value in self.numbers.items() if not math.isfinite(value)]

    def refuse_metric(self) -> None:
        """Raises UsageError if a metric failed, and by its own fault: the loss of the same outputs is finite."""
        losses = [self.numbers.get(name, 0.0) for name in ("loss", EMA + "loss")]
        if self.failure and all(map(math.isfinite, losses)):
            raise UsageError(self.failure)

    @property
    def content(self) -> dict[str, Any]:
        """The fields of evaluation.json: samples, of how many if only some were evaluated, and the numbers."""
        available = {} if self.available is None else {"available": self.available}
        return {"samples": self.samples, **available, **self.numbers}

    @property
    def counted(self) -> str:
        """ "each of the 360 held-out samples counted once", "each of 100 of the 360 …"."""
        if self.samples == (self.available or 1):
            return "the only held-out sample counted once"
        some = f"{self.samples} of the {self.available}" if self.available else f"the {self.samples}"
        return f"each of {some} held-out samples counted once"

    @property
    def bad_numbers(self) -> str:
        """ "loss nan, perplexity inf"."""
        return ", ".join(f"{name} {self.numbers[name]}" for name in self.not_finite)

    @property
    def names_of_classes(self) -> list[str]:
        """A name for each row of `confusion`: its number for a class that the model has and the data set does not."""
        names, rows = list(self.classes or ()), 0 if self.confusion is None else len(self.confusion)
        return [*names[:rows], *map(str, range(len(names), rows))]

    def per_class(self) -> list[dict[str, Any]]:
        """Precision, recall, F1 and support of each class; 0 where a denominator is 0, as in scikit-learn."""
        if self.confusion is None:
            return []
        hits, true, predicted = np.diag(self.confusion), self.confusion.sum(1), self.confusion.sum(0)
        return [
            {
                "class": name,
                "precision": float(hits[i] / max(predicted[i], 1)),
                "recall": float(hits[i] / max(true[i], 1)),
                "f1": float(2 * hits[i] / max(predicted[i] + true[i], 1)),
                "support": int(true[i]),
            }
            for i, name in enumerate(self.names_of_classes)
        ]


def unknown_number(name: str, known: Iterable[str], setting: str) -> str:
    """The sentence on a number that the recipe's `setting` names and evaluations do not have."""
    known = set(known)
    bare = re.sub(r"^(val|eval|valid|test)[_/-]?", "", name.lower())
    meant = {"acc": "acc1", "accuracy": "acc1", "top1": "acc1", "top5": "acc5"}.get(bare, bare)
    hint = f" Did you mean '{meant}'?" if meant in known else ""
    names = ", ".join(sorted(known))
    hint = f"{hint} They have {names}." if hint else did_you_mean(name, known, "They have")
    why = (
        " Precision, recall and F1 of the model are the metric classification: metrics: [{use: classification}]."
        if name.lower() in ("f1", "precision", "recall")
        else ""
    )
    return f"{setting}: evaluations of this model have no number '{name}'.{why}{hint}"
