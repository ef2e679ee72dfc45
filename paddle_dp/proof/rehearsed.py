"""Compares two rehearsals: one process's, without interruption, and the ranks'. Does not import paddle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dp.proof import diagnose
from paddle_dp.proof.tolerance import EPS, LARGEST_R, least_of_a_score, unit_of
from paddle_dp.proof.trace_files import SCORE, Row
from paddle_dp.text import and_more

EVALUATED, SAVED, STEPS = 1, 2, 8  # the step after which each happens
READ = 2  # ranks read the numbers of every second step
EPOCH = 3  # global batches
EXACT_MEANS = ("samples", "loss", "ema_loss")  # numbers of an evaluation that no two tied classes change
NUMBER_NAMES = {  # numbers of a step, as sentences call them
    "lr": "learning rate", "loss_scale": "loss scale", "loss": "loss", "gradient_norm": "gradient norm",
}  # fmt: skip


@dataclass(frozen=True)
class RehearsalDifference:
    """A difference between two rehearsals: the step, the kind of quantity, and a sentence."""

    step: int
    kind: str  # samples, gradient, loss, evaluation, resume
    sentence: str


@dataclass(frozen=True)
class RehearsalComparison:
    """The rehearsals of one process and of `ranks` ranks; numbers may differ by LARGEST_R times one process's noise.

    If the ranks round their gradients, the one process made its updates with theirs (proof.replay). Its rows then have
    `apart`, the distance of its gradients from theirs, and `rounded`, the bound allowed in addition to the noise.
    """

    reference: dict[str, Any]
    candidate: dict[str, Any]
    ranks: int

    @classmethod
    def read(cls, reference: Path, candidate: Path, ranks: int) -> RehearsalComparison:
        """Reads the two sides' folders."""
        results = [json.loads((folder / "rehearsal.json").read_text()) for folder in (reference, candidate)]
        return cls(results[0], results[1], ranks)

    def first_difference(self) -> RehearsalDifference | None:
        """The first difference; None if the interrupted and resumed ranks match one process."""
        return next(self._differences(), None)

    def _differences(self) -> Iterator[RehearsalDifference]:
        """All differences, in the order of the rehearsal."""
        yield from self._samples()
        for n, (reference, candidate) in enumerate(self._steps()):
            step, noisy = reference["step"], [run["rows"][n] for run in self.reference["noise"]]
            for name in _missing_numbers(reference, candidate):
                description = diagnose.missing("many" if name in reference else "one")
                sentence = f"step {step}: the {NUMBER_NAMES.get(name, name)} {description}"
                yield RehearsalDifference(step, "loss", sentence)
            for name in _common_numbers(reference, candidate):
                more = reference.get("rounded", 0.0) if name == "gradient_norm" else 0.0
                if name.startswith(SCORE):
                    more = LARGEST_R * least_of_a_score(self.reference["dtype"], reference["samples"])
                if not self._near(reference[name], candidate[name], [row[name] for row in noisy], more):
                    yield RehearsalDifference(step, "loss", self._number(reference, candidate, name))
            if "apart" in reference and np.isfinite(reference["gradient_norm"]):
                yield from self._gradient(step, reference, max(row["apart"] for row in noisy))
        yield from self._evaluations()
        yield from self._resumed()

    def _steps(self) -> Iterator[tuple[Row, Row]]:
        return zip(self.reference["plain"]["rows"], self.candidate["rows"], strict=True)

    def _samples(self) -> Iterator[RehearsalDifference]:
        for reference, candidate in self._steps():
            step, expected, read = reference["step"], {*reference["read"]}, {*candidate["read"]}
            if read != expected:
                yield RehearsalDifference(
                    step, "samples",
                    f"step {step}, in epoch {1 + (step - 1) // EPOCH}: the {self.ranks} ranks read "
                    f"{_list_samples(read - expected)} that one process does not read then, and not "
                    f"{_list_samples(expected - read)}",
                )  # fmt: skip

    def _gradient(self, step: int, reference: Row, noise: float) -> Iterator[RehearsalDifference]:
        distance, size = reference["apart"], reference["gradient_norm"]
        allowed = LARGEST_R * unit_of(noise, size, EPS[self.reference["dtype"]], reference["rounded"])
        if not distance <= allowed:
            yield RehearsalDifference(
                step, "gradient",
                f"step {step}{_after(step)}: the gradient of the {self.ranks} ranks is {distance / (size or 1.0):.2g} "
                "of its norm away from one process's with the same weights, and rounding takes "
                f"{allowed / (size or 1.0):.2g} at most",
            )  # fmt: skip

    def _number(self, reference: Row, candidate: Row, name: str) -> str:
        step, label = reference["step"], NUMBER_NAMES.get(name, name)
        return (
            f"step {step}{_after(step)}: {label} {reference[name]:.9g} on one process that nothing interrupts, "
            f"{candidate[name]:.9g} on {self.ranks} ranks"
        )

    def _evaluations(self) -> Iterator[RehearsalDifference]:
        reference, candidate = self.reference["plain"]["evaluation"], self.candidate["evaluation"]
        noisy = [run["evaluation"] for run in self.reference["noise"]]
        for name in dict.fromkeys([*reference, *candidate]):
            if name not in reference or name not in candidate:
                lacking = diagnose.missing("many" if name in reference else "one")
                yield RehearsalDifference(STEPS, "evaluation", f"held out: the {name} {lacking}")
                continue
            more = 0.0
            if name not in EXACT_MEANS:
                more = LARGEST_R * least_of_a_score(self.reference["dtype"], reference["samples"])
            if not self._near(reference[name], candidate[name], [numbers[name] for numbers in noisy], more):
                yield RehearsalDifference(
                    STEPS, "evaluation",
                    f"held out: {name} {reference[name]:.9g} on one process, {candidate[name]:.9g} on {self.ranks} "
                    "ranks, after losses that were the same",
                )  # fmt: skip

    def _resumed(self) -> Iterator[RehearsalDifference]:
        resumed = self.candidate["resumed"]
        for before, after in zip(self.candidate["rows"][SAVED:], resumed["rows"], strict=True):
            names = ["read", *_common_numbers(before, after), *_missing_numbers(before, after)]
            labels = {"read": "samples", **NUMBER_NAMES}
            changed = [labels.get(n, n) for n in names if not _equal(before.get(n), after.get(n))]
            if changed:
                yield RehearsalDifference(
                    before["step"], "resume",
                    f"step {before['step']}: resumed from the checkpoint of step {SAVED}, it has another "
                    f"{', another '.join(changed)} than without the interruption",
                )  # fmt: skip
        if resumed["changed"]:
            yield RehearsalDifference(
                STEPS, "resume",
                f"resumed from the checkpoint of step {SAVED}, the run ends with other bits in "
                f"'{resumed['changed'][0]}'{and_more(resumed['changed'])}",
            )  # fmt: skip

    def _near(self, reference: float, candidate: float, noisy: list[float], rounded: float = 0.0) -> bool:
        if not (np.isfinite(reference) or np.isfinite(candidate)):
            return True  # a sum over ranks may turn infinities into NaN
        noise, eps = max(abs(other - reference) for other in noisy), EPS[self.reference["dtype"]]
        return bool(abs(reference - candidate) <= LARGEST_R * unit_of(noise, abs(reference), eps, rounded))


def _common_numbers(row: Row, other: Row) -> list[str]:
    return [name for name in _number_names(row, other) if name in row and name in other]


def _missing_numbers(row: Row, other: Row) -> list[str]:
    """The numbers of a step that only one side has, and the other one should have: ranks need not read every step."""
    expected = _number_names(row, other) if row["step"] % READ == 0 else ["lr", "loss_scale"]
    return [name for name in expected if (name in row) != (name in other)]


def _number_names(row: Row, other: Row) -> list[str]:
    """The names of numbers that a step may have, and of its scores on either side."""
    return [*NUMBER_NAMES, *dict.fromkeys(name for name in (*row, *other) if name.startswith(SCORE))]


def _after(step: int) -> str:
    after = {EVALUATED: " (the first after the evaluation)", SAVED: " (the first after the checkpoint)"}
    return after.get(step - 1, "")


def _equal(reference: Any, other: Any) -> bool:
    return bool(reference == other or (reference != reference and other != other))


def _list_samples(numbers: set[int]) -> str:
    """ "samples 3, 5, 8 and 2 more"."""
    shown = ", ".join(map(str, sorted(numbers)[:3])) or "none"
    return f"sample{'s' * (len(numbers) != 1)} {shown}{and_more(numbers, 3)}"


def rehearsal_sentence(
    difference: RehearsalDifference | None, ranks: int, rounds_to: str | None = None
) -> str:
    """The result of comparing two rehearsals, in a sentence; `rounds_to`: the dtype to which ranks round gradients."""
    if difference is not None:
        return f"Rehearsed, DIFFERENT: {difference.sentence}."
    subject = f"{ranks} ranks" if ranks > 1 else "the parts of one process"
    does = "does that nothing interrupts"
    if rounds_to is not None:
        does = f"does in each step with the same weights, but for the digits that {rounds_to} takes from gradients"
    return (
        f"Rehearsed, SAME: {subject} that were evaluated, saved and resumed on their way read and learned what one "
        f"process {does}."
    )
