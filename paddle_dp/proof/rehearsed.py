"""Compares two rehearsals: one process's, without interruption, and that of the ranks. Does not import paddle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dp.proof.compare import EPS, K, least_of_a_score
from paddle_dp.proof.trace_files import SCORE

EVALUATED, SAVED, STEPS = 1, 2, 8  # after which step
EPOCH = 3  # global batches
TOLD = {  # numbers of a step, as sentences call them
    "lr": "learning rate", "loss_scale": "loss scale", "loss": "loss", "gradient_norm": "gradient norm",
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """A difference between two rehearsals: the step, the kind of quantity, and a sentence."""

    step: int
    kind: str  # samples, gradient, loss, evaluation, resume
    sentence: str


@dataclass(frozen=True)
class Rehearsals:
    """One process's rehearsal and that of `ranks` ranks; numbers may differ by K times one process's own noise.

    Where the ranks round their gradients, the one process made its updates with theirs (proof.followed): its rows have
    how far its own were `apart` from these, and what may be `rounded`, which is allowed beside the noise.
    """

    one: dict[str, Any]
    many: dict[str, Any]
    ranks: int

    @classmethod
    def read(cls, one: Path, many: Path, ranks: int) -> Rehearsals:
        """Reads the two sides' folders."""
        results = [json.loads((folder / "rehearsal.json").read_text()) for folder in (one, many)]
        return cls(results[0], results[1], ranks)

    def first_difference(self) -> Difference | None:
        """The first difference; None if the ranks, interrupted and resumed, did what one process did."""
        return next(self._differences(), None)

    def _differences(self) -> Iterator[Difference]:
        """In the order of the rehearsal."""
        yield from self._samples()
        for n, (one, many) in enumerate(zip(self.one["plain"]["rows"], self.many["rows"], strict=True)):
            noisy = [run["rows"][n] for run in self.one["noise"]]
            for name in _told(one, many):
                more = one.get("rounded", 0.0) if name == "gradient_norm" else 0.0
                if name.startswith(SCORE):
                    more = K * least_of_a_score(self.one["dtype"], one["samples"])
                if not self._near(one[name], many[name], [row[name] for row in noisy], more):
                    yield Difference(one["step"], "loss", self._number(one, many, name))
            if "apart" in one and np.isfinite(one["gradient_norm"]):
                allowed = self._gradients_apart(one, noisy)
                if not one["apart"] <= allowed:
                    yield Difference(one["step"], "gradient", self._gradient(one, allowed))
        yield from self._held_out()
        yield from self._resumed()

    def _samples(self) -> Iterator[Difference]:
        for one, many in zip(self.one["plain"]["rows"], self.many["rows"], strict=True):
            step, more = one["step"], sorted({*many["read"]} - {*one["read"]})
            less = sorted({*one["read"]} - {*many["read"]})
            if more or less:
                yield Difference(
                    step, "samples",
                    f"step {step}, in epoch {1 + (step - 1) // EPOCH}: the {self.ranks} ranks read {_some(more)} that "
                    f"one process does not read then, and not {_some(less)}",
                )  # fmt: skip

    def _gradients_apart(self, one: dict[str, Any], noisy: list[dict[str, Any]]) -> float:
        """How far the gradients of the ranks may be apart from one process's with the same weights, as a 2-norm."""
        noise = max([row["apart"] for row in noisy] + [EPS[self.one["dtype"]] * one["gradient_norm"]])
        return float(K * noise + one["rounded"])

    def _gradient(self, one: dict[str, Any], allowed: float) -> str:
        size = one["gradient_norm"] or 1.0
        return (
            f"step {one['step']}{_after(one['step'])}: the gradient of the {self.ranks} ranks is "
            f"{one['apart'] / size:.2g} of its norm away from that of one process with the same weights, and rounding "
            f"takes {allowed / size:.2g} at most"
        )

    def _number(self, one: dict[str, Any], many: dict[str, Any], name: str) -> str:
        step, what = one["step"], TOLD.get(name, name)
        return (
            f"step {step}{_after(step)}: {what} {one[name]:.9g} on one process that nothing interrupts, "
            f"{many[name]:.9g} on {self.ranks} ranks"
        )

    def _held_out(self) -> Iterator[Difference]:
        noisy = [run["evaluation"] for run in self.one["noise"]]
        for name, number in self.one["plain"]["evaluation"].items():
            other = self.many["evaluation"][name]
            if not self._near(number, other, [held[name] for held in noisy]):
                yield Difference(
                    STEPS, "evaluation",
                    f"held out: {name} {number:.9g} on one process, {other:.9g} on {self.ranks} ranks, after losses "
                    "that were the same",
                )  # fmt: skip

    def _resumed(self) -> Iterator[Difference]:
        resumed = self.many["resumed"]
        for before, after in zip(self.many["rows"][SAVED:], resumed["rows"], strict=True):
            names = {"read": "samples", **{name: TOLD.get(name, name) for name in _told(before, after)}}
            changed = [what for name, what in names.items() if not _equal(before.get(name), after.get(name))]
            if changed:
                yield Difference(
                    before["step"], "resume",
                    f"step {before['step']}: resumed from the checkpoint of step {SAVED}, it has another "
                    f"{', another '.join(changed)} than without the interruption",
                )  # fmt: skip
        if resumed["changed"]:
            more = f" and {len(resumed['changed']) - 1} more" if len(resumed["changed"]) > 1 else ""
            yield Difference(
                STEPS, "resume",
                f"resumed from the checkpoint of step {SAVED}, the run ends with other bits in "
                f"'{resumed['changed'][0]}'{more}",
            )  # fmt: skip

    def _near(self, one: float, many: float, noisy: list[float], rounded: float = 0.0) -> bool:
        if not (np.isfinite(one) or np.isfinite(many)):  # a sum over ranks may turn infinities into NaN
            return True
        allowed = max([abs(other - one) for other in noisy] + [EPS[self.one["dtype"]] * abs(one)])
        return bool(abs(one - many) <= K * allowed + rounded)


def _told(row: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The numbers of a step that both sides have: ranks read those of every second one only."""
    names = [*TOLD, *(name for name in row if name.startswith(SCORE))]
    return [name for name in names if name in row and name in other]


def _after(step: int) -> str:
    after = {EVALUATED: " (the first after the evaluation)", SAVED: " (the first after the checkpoint)"}
    return after.get(step - 1, "")


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other or (one != one and other != other))


def _some(numbers: list[int]) -> str:
    """ "samples 3, 5, 8 and 2 more"."""
    more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    return f"sample{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers[:3])) or 'none'}{more}"


def sentence(found: Difference | None, ranks: int, rounds_to: str | None = None) -> str:
    """The result of comparing two rehearsals, in a sentence; `rounds_to`: the dtype to which ranks round gradients."""
    if found is None:
        who = f"{ranks} ranks that were" if ranks > 1 else "the parts of one process that were"
        told = f"Rehearsed, SAME: {who} evaluated, saved and resumed on their way read and learned what one process"
        if rounds_to is not None:
            return (
                f"{told} does in each step with the same weights, but for the digits that {rounds_to} takes from "
                "gradients."
            )
        return f"{told} does that nothing interrupts."
    return f"Rehearsed, DIFFERENT: {found.sentence}."
