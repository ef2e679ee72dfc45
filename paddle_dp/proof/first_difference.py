"""Finds the first difference in the order of a step: samples, layer outputs, loss, gradients from the last layer to the
first, updates.

A mistake spreads to all that follows, so only the first difference is reported, with its likely cause (proof.diagnose).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paddle_dp.proof import diagnose
from paddle_dp.proof.compare import QuantityDistance, TraceComparison
from paddle_dp.proof.tolerance import LARGEST_R, is_same, ratio
from paddle_dp.proof.trace_files import Key, Row, Sheet, key_of
from paddle_dp.text import and_more, numbered

_LAST = {  # the kinds that come last in a step, in this order, as sentences call them
    "score": "score", "update": "update of", "frozen": "frozen weight", "statistic": "running statistic",
    "buffer": "buffer", "state": "optimizer state",
}  # fmt: skip


@dataclass(frozen=True)
class FirstDifference:
    """The first difference: at which step (0: before the first), in which quantity, and a sentence about it."""

    step: int
    kind: str
    name: str
    sentence: str


@dataclass
class DifferenceSearch:
    """Searches a comparison for the first difference; `degrees`: the ranks' axes. `guesses`: as no cause is known."""

    comparison: TraceComparison
    degrees: Mapping[str, int]
    guesses: bool = True

    def first(self) -> FirstDifference | None:
        """The first difference of the first step that has one."""
        return next(self._all(), None)

    def samples(self) -> FirstDifference | None:
        """The first step in which the samples are not read once each."""
        steps = (self._samples(*step) for step in self._steps())
        return next(itertools.chain.from_iterable(steps), None)

    def _all(self) -> Iterator[FirstDifference]:
        bad = {distance.quantity: distance for distance in self.comparison.distances if not distance.same}
        for quantity in bad:
            if quantity.kind == "initial":
                sentence = (
                    f"before the first step: the initial weights of {quantity.name} are not one process's. Every rank "
                    "has to draw them from the recipe's seed, on the whole model, before it is cut"
                )
                yield FirstDifference(0, "initial", quantity.name, sentence)
        for step, reference, candidate in self._steps():
            yield from self._samples(step, reference, candidate)
            yield from self._output(step)
            here = {quantity: distance for quantity, distance in bad.items() if quantity.step == step}
            yield from self._losses(step, here, reference["loss"], candidate["loss"])
            gradients = [quantity for quantity in here if quantity.kind in ("gradient", "probe")]
            gradients.sort(key=lambda quantity: -self._layer_position(quantity.name))
            yield from (self._gradient(step, here[quantity], gradients) for quantity in gradients)
            yield from self._unshared(step)
            for kind, label in _LAST.items():
                for quantity in (quantity for quantity in here if quantity.kind == kind):
                    sentence = f"step {step}: {label} {quantity.name} {self._description(here[quantity])}"
                    yield FirstDifference(step, kind, quantity.name, sentence)
        for quantity, distance in bad.items():  # last: a step names the layer, where it differs, too
            if quantity.kind == "evaluation":
                yield FirstDifference(quantity.step, "evaluation", quantity.name, self._evaluation(distance))

    def _steps(self) -> Iterator[tuple[int, Row, Row]]:
        """Each step's number, and its rows on both sides."""
        rows = (side.facts["rows"] for side in self.comparison.sides)
        return ((step, *pair) for step, pair in enumerate(zip(*rows, strict=True), start=1))

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: position for position, name in enumerate(self.comparison.reference.facts["order"])}

    def _layer_position(self, parameter: str) -> int:
        """The position of the parameter's layer in the forward; -1 without a recorded output."""
        layer = parameter.rpartition(".")[0]
        while layer not in self._order and "." in layer:
            layer = layer.rpartition(".")[0]
        return self._order.get(layer, -1)

    def _evaluation(self, distance: QuantityDistance) -> str:
        _, step, name = distance.quantity
        moment = f"after step {step}" if step else "before the first step"
        return (
            f"{moment}: {name} of the held-out samples {self._description(distance)}, with the same weights"
        )

    def _samples(self, step: int, reference: Row, candidate: Row) -> Iterator[FirstDifference]:
        description = diagnose.samples(reference["read"][0][1], candidate["read"])
        if description:
            yield FirstDifference(step, "samples", "", f"step {step}: {description}")
        empty = bool(reference.get("empty"))
        if empty != bool(candidate.get("empty")):
            sides = ("one process", "the ranks") if empty else ("the ranks", "one process")
            description = "nothing in the batch counts for the loss on {}, and something on {}".format(*sides)
            yield FirstDifference(step, "samples", "", f"step {step}: {description}")

    def _losses(
        self, step: int, here: Mapping[Key, QuantityDistance], reference: float, candidate: float | None
    ) -> Iterator[FirstDifference]:
        if Key("loss", step, "") not in here:
            return
        if candidate is None:
            yield FirstDifference(step, "loss", "", f"step {step}: the loss {diagnose.missing('many')}")
        else:
            description = diagnose.loss(reference, candidate, self.degrees) + self._uneven(step)
            yield FirstDifference(step, "loss", "", f"step {step}: {description}")

    def _uneven(self, step: int) -> str:
        """The likely mistake, if a step with unequal shares is the first that differs."""
        shares: Sequence[int] = self.comparison.candidate.facts["rows"][step - 1]["shares"]
        if not self.guesses or step == 1 or len(set(shares)) < 2:
            return ""
        return (
            f" (equal shares agree, unequal ones ({'+'.join(map(str, shares))}) do not: means of the ranks' means, "
            "weighted alike, or a sample that is padded or left out)"
        )

    def _output(self, step: int) -> Iterator[FirstDifference]:
        """The first layer, in the order of the forward, with outputs that differ."""
        sheet = self.comparison.reference.sheets[0]
        for name in sheet.facts["order"]:
            calls = (key_of("output", step, f"{name}#{call}") for call in itertools.count())
            for key in itertools.takewhile(lambda key: sheet.has("output", key), calls):
                positions = self._off(step, key, sheet.array("output", key))
                if positions is not None:
                    yield FirstDifference(step, "output", name, self._output_sentence(step, name, positions))
                    return

    def _off(self, step: int, key: str, reference: np.ndarray) -> np.ndarray | None:
        """The positions in the global batch with outputs that differ; None if none does or they are not comparable."""
        candidate = self._candidate_output(step, key, reference.shape)
        if candidate is None:
            return None
        noise = self.comparison.reference.noise(key)
        most = noise[0] if noise is not None else np.zeros_like(reference)
        # The noise of one sample is a single draw, so the batch's noise is the measure.
        finite = np.where(np.isfinite(reference), reference, 0.0)
        floor = np.maximum(np.linalg.norm(most, axis=0), 1e-13 * np.linalg.norm(finite, axis=0))
        equal = (candidate == reference) | (np.isnan(candidate) & np.isnan(reference))
        with np.errstate(invalid="ignore"):
            difference = np.where(equal, 0.0, np.abs(candidate - reference))
        if is_same(max(map(ratio, np.linalg.norm(difference, axis=0), floor))):
            return None
        return np.flatnonzero((difference > LARGEST_R * floor / max(len(reference), 1) ** 0.5).any(1))

    def _candidate_output(self, step: int, key: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """The ranks' outputs by position in the global batch: copies once, slices summed."""
        result, filled = np.zeros(shape), np.zeros(shape[0], int)
        holders: dict[int, list[Sheet]] = {}  # by dp_rank
        for sheet in self.comparison.candidate.sheets:
            if sheet.has("output", key):
                holders.setdefault(sheet.facts["dp_rank"], []).append(sheet)
        for sheets in holders.values():
            at = sheets[-1].facts["positions"][str(step)]
            arrays = [sheet.array("output", key) for sheet in sheets]
            if any(array.shape != (len(at), 2) for array in arrays):
                return None
            copies = all(np.allclose(arrays[0], array, rtol=1e-9, atol=0, equal_nan=True) for array in arrays)
            result[at] = arrays[0] if copies else np.sum(arrays, axis=0)
            filled[at] += 1
        return result if (filled == 1).all() else None

    def _output_sentence(self, step: int, name: str, positions: np.ndarray) -> str:
        owners = {
            position: sheet.facts["dp_rank"]
            for sheet in self.comparison.candidate.sheets
            for position in sheet.facts["positions"][str(step)]
        }
        wrong, which = {owners[p] for p in positions.tolist()}, "in all samples"
        if len(positions) not in (0, len(owners)):
            which = f"in {len(positions)} of {len(owners)} samples"
        if wrong and wrong != set(owners.values()):
            which += f", all of data {numbered('rank', sorted(wrong))}"
        return f"step {step}: the forward output of {name} is the first that differs, {which}{self._uneven(step)}"

    def _gradient(self, step: int, distance: QuantityDistance, all_of_them: Sequence[Key]) -> FirstDifference:
        quantity = distance.quantity
        more = and_more({other.name for other in all_of_them}, phrase=" (and of {} more parameters)")
        when = f"step {step}" if quantity.kind == "gradient" else f"batch {step} with the initial weights"
        description = f"gradient of {quantity.name} {self._description(distance)}{more}{self._uneven(step)}"
        return FirstDifference(step, "gradient", quantity.name, f"{when}: {description}")

    def _unshared(self, step: int) -> Iterator[FirstDifference]:
        """Weights that differ between ranks after an update."""
        candidate = self.comparison.candidate.facts
        weights = [key for key in self.comparison.unshared if key.step == step]
        if weights:
            groups = candidate["copy_groups"][key_of(*weights[0])]
            condition = "with equal gradients, " if step in candidate["recorded"] else ""
            rank_groups = " and ".join(numbered("rank", group) for group in groups[:2])
            more = and_more(weights, phrase=" (and in {} more)")
            sentence = (
                f"step {step}: {condition}{rank_groups} hold different weights after the update in "
                f"{weights[0].name}{more}: an update that one rank does is not shared, or ranks step differently"
            )
            yield FirstDifference(step, "update", weights[0].name, sentence)

    def _description(self, distance: QuantityDistance) -> str:
        key, kind = key_of(*distance.quantity), distance.quantity.kind
        if distance.missing:
            return diagnose.missing(distance.missing)
        if kind in ("gradient", "probe"):
            return self._gradient_description(key)
        if kind == "frozen":
            return "has moved"
        if kind == "evaluation":
            reference, candidate = (float(side.array(key)[0]) for side in self.comparison.sides)
            return f"is {candidate:.9g}, one process's {reference:.9g}"
        c, rest = diagnose.factor(self.comparison.reference_array(key), self.comparison.candidate.array(key))
        return diagnose.update(c, rest) if kind == "update" else _off_by(c, rest)

    def _gradient_description(self, key: str) -> str:
        trace = self.comparison.candidate
        reference, copies = self.comparison.reference.array(key), trace.copies(key)
        if copies and next(iter(copies.values())).shape == reference.shape:
            return diagnose.unequal_copies(
                reference, copies, [sheet.facts["coords"] for sheet in trace.sheets], self.degrees
            )
        description = self._slices(key, reference)
        if description:
            return description
        return diagnose.scaled(*diagnose.factor(reference, trace.array(key)), self.degrees, trace.cut(key))

    def _slices(self, key: str, reference: np.ndarray) -> str:
        """A sentence if only some slices of a parameter are wrong; else ""."""
        wrong: dict[int, tuple[float, float]] = {}
        right: list[int] = []
        for rank, sheet in enumerate(self.comparison.candidate.sheets):
            if key in sheet.facts["cut"]:
                array = sheet.array("shard", key)
                box, _ = sheet.box(key, array)
                expected = reference[box.slices]
                if np.linalg.norm(array - expected) > 1e-6 * np.linalg.norm(expected):
                    wrong[rank] = diagnose.factor(expected, array)
                else:
                    right.append(rank)
        if not (wrong and right):
            return ""
        description = diagnose.scaled(*next(iter(wrong.values())), self.degrees, cut=True)
        return f"{description}, in the slice of {numbered('rank', wrong)} only"


def _off_by(c: float, rest: float) -> str:
    if np.isnan(c):
        return "is not one process's"
    return f"is {c:.6g} × one process's" + (f" and {min(rest, 1):.1e} something else" if rest > 1e-12 else "")
