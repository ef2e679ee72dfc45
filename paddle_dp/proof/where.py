"""Finds the first difference in the order of a step: samples, layer outputs, loss, gradients from the last layer to the
first, updates.

A mistake spreads: after a wrong output everything is wrong. So only the first difference is named, with its likely
cause (proof.diagnose).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from paddle_dp.proof import diagnose
from paddle_dp.proof.compare import Finding, K, Part, ratio
from paddle_dp.proof.trace_files import Key, key

_LAST = ("score", "update", "frozen", "statistic", "buffer", "state")


@dataclass(frozen=True, kw_only=True)
class Where:
    """The first difference: at which step (0: before the first), in which quantity, and a sentence about it."""

    step: int
    kind: str
    name: str
    sentence: str


@dataclass
class Search:
    """Searches a part, whose ranks have axes of `degrees`, for the first difference. `guesses`: a sentence may guess a
    cause from the step alone; not where one is known."""

    part: Part
    degrees: Mapping[str, int]
    guesses: bool = True

    def first(self) -> Where | None:
        """The first difference of the first step that has one."""
        return next(self._all(), None)

    def samples(self) -> Where | None:
        """The first step whose samples are not read once each."""
        pairs = enumerate(zip(self._rows("one"), self._rows("many"), strict=True), start=1)
        return next((found for step, (one, many) in pairs for found in self._samples(step, one, many)), None)

    def _all(self) -> Iterator[Where]:
        bad = {finding.key: finding for finding in self.part.findings if not finding.same}
        yield from (
            Where(step=0, kind="initial", name=what.name, sentence=self._initial(what))
            for what in bad
            if what.kind == "initial"
        )
        for step, (one, many) in enumerate(zip(self._rows("one"), self._rows("many"), strict=True), start=1):
            yield from self._samples(step, one, many)
            yield from self._output(step)
            here = {what: finding for what, finding in bad.items() if what.step == step}
            yield from self._losses(step, here, one["loss"], many["loss"])
            gradients = [what for what in here if what.kind in ("gradient", "probe")]
            gradients.sort(key=lambda what: -self._place(what.name))
            yield from (self._gradient(step, here[what], gradients) for what in gradients)
            yield from self._unshared(step)
            for kind in _LAST:
                yield from (self._other(step, here[what]) for what in here if what.kind == kind)

    def _rows(self, side: str) -> list[dict[str, Any]]:
        trace = self.part.one if side == "one" else self.part.many
        rows: list[dict[str, Any]] = trace.facts["rows"]
        return rows

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.part.one.facts["order"])}

    def _place(self, parameter: str) -> int:
        """The position of the parameter's layer in the forward; -1 for a layer without an output of its own."""
        layer = parameter.rpartition(".")[0]
        while layer not in self._order and "." in layer:
            layer = layer.rpartition(".")[0]
        return self._order.get(layer, -1)

    def _initial(self, what: Key) -> str:
        return (
            f"before the first step: the initial weights of {what.name} are not one process's. Every rank has to draw "
            "them from the recipe's seed, on the whole model, before it is cut"
        )

    def _samples(self, step: int, one: dict[str, Any], many: dict[str, Any]) -> Iterator[Where]:
        said = diagnose.samples(one["read"][0][1], [(dp_rank, numbers) for dp_rank, numbers in many["read"]])
        if said:
            yield Where(step=step, kind="samples", name="", sentence=f"step {step}: {said}")

    def _losses(self, step: int, here: Mapping[Key, Finding], one: float, many: float) -> Iterator[Where]:
        if Key("loss", step, "") in here:
            said = diagnose.loss(one, many, self.degrees) + self._uneven(step)
            yield Where(step=step, kind="loss", name="", sentence=f"step {step}: {said}")

    def _uneven(self, step: int) -> str:
        """A remark on shares, if a step with unequal shares is the first that differs."""
        shares: Sequence[int] = self._rows("many")[step - 1]["shares"]
        first = self.guesses and step > 1 and len(set(shares)) > 1
        return f" ({diagnose.uneven(shares)})" if first else ""

    def _output(self, step: int) -> Iterator[Where]:
        """The first layer, in the order of the forward, whose outputs differ."""
        for name in self.part.one.facts["order"]:
            for call in range(64):
                number = key("output", step, f"{name}#{call}")
                one = self._whole_output(number)
                if one is None:
                    break
                found = self._off(number, one)
                if found is not None:
                    yield Where(
                        step=step, kind="output", name=name, sentence=self._say_output(step, name, found)
                    )
                    return

    def _whole_output(self, number: str) -> np.ndarray | None:
        sheet = self.part.one.sheets[0]
        return sheet.array("output", number) if sheet.has("output", number) else None

    def _off(self, number: str, one: np.ndarray) -> np.ndarray | None:
        """The positions in the global batch whose outputs differ; None if none does, or they cannot be compared."""
        what = Key.read(number)
        many = self._many_output(number, what.step, one.shape)
        if many is None:
            return None
        noise = self.part.one.noise(number)
        most = noise[0] if noise is not None else np.zeros_like(one)
        # The noise of one sample is a single draw, so the batch's is the measure.
        floor = np.maximum(np.linalg.norm(most, axis=0), 1e-13 * np.linalg.norm(one, axis=0))
        apart = np.abs(many - one)
        if max(map(ratio, np.linalg.norm(apart, axis=0), floor)) <= K:
            return None
        return np.flatnonzero((apart > K * floor / max(len(one), 1) ** 0.5).any(1))

    def _many_output(self, number: str, step: int, shape: tuple[int, ...]) -> np.ndarray | None:
        """The ranks' outputs by position in the global batch: copies once, slices summed."""
        result, filled = np.zeros(shape), np.zeros(shape[0], int)
        dp_size: dict[int, list[np.ndarray]] = {}
        places: dict[int, list[int]] = {}
        for sheet in self.part.many.sheets:
            if sheet.has("output", number):
                dp_size.setdefault(sheet.facts["dp_rank"], []).append(sheet.array("output", number))
                places[sheet.facts["dp_rank"]] = sheet.facts["places"][str(step)]
        for dp_rank, arrays in dp_size.items():
            at = places[dp_rank]
            if any(array.shape != (len(at), 2) for array in arrays):
                return None
            copies = all(np.allclose(arrays[0], array, rtol=1e-9, atol=0) for array in arrays)
            result[at] = arrays[0] if copies else np.sum(arrays, axis=0)
            filled[at] += 1
        return result if (filled == 1).all() else None

    def _say_output(self, step: int, name: str, places: np.ndarray) -> str:
        owners = {
            place: sheet.facts["dp_rank"]
            for sheet in self.part.many.sheets
            for place in sheet.facts["places"][str(step)]
        }
        wrong, all_of_it = {owners[p] for p in places.tolist()}, len(places) == len(owners)
        which = (
            "in all samples" if all_of_it or not len(places) else f"in {len(places)} of {len(owners)} samples"
        )
        if wrong and wrong != set(owners.values()):
            which += f", all of data rank{'s' * (len(wrong) > 1)} {', '.join(map(str, sorted(wrong)))}"
        return f"step {step}: the forward output of {name} is the first that differs, {which}{self._uneven(step)}"

    def _gradient(self, step: int, finding: Finding, all_of_them: Sequence[Key]) -> Where:
        what = finding.key
        more = len({one.name for one in all_of_them}) - 1
        others = f" (and of {more} more parameters)" if more else ""
        said = self._say_gradient(finding)
        when = f"step {step}" if what.kind == "gradient" else f"batch {step} with the initial weights"
        sentence = f"{when}: gradient of {what.name} {said}{others}{self._uneven(step)}"
        return Where(step=step, kind="gradient", name=what.name, sentence=sentence)

    def _unshared(self, step: int) -> Iterator[Where]:
        """Weights that differ between ranks after an update."""
        apart = self.part.many.facts["apart"]
        some = [Key.read(number) for number in apart if Key.read(number)[:2] == ("weight", step)]
        if some:
            groups = apart[key(*some[0])]
            who = " and ".join(diagnose.ranks(group) for group in groups[:2])
            more = f" (and in {len(some) - 1} more)" if len(some) > 1 else ""
            sentence = (
                f"step {step}: with equal gradients, {who} hold different weights after the update in {some[0].name}"
                f"{more}: an update that one rank does is not shared, or ranks step differently"
            )
            yield Where(step=step, kind="update", name=some[0].name, sentence=sentence)

    def _say_gradient(self, finding: Finding) -> str:
        if finding.missing:
            return _missing(finding.missing)
        number, trace = key(*finding.key), self.part.many
        one, copies = self.part.one.array(number), trace.copies(number)
        if copies and next(iter(copies.values())).shape == one.shape:
            return diagnose.unmet(
                one, copies, [sheet.facts["coords"] for sheet in trace.sheets], self.degrees
            )
        said = self._slices(number, one)
        if said:
            return said
        return diagnose.scaled(*diagnose.factor(one, trace.array(number)), self.degrees, trace.cut(number))

    def _slices(self, number: str, one: np.ndarray) -> str:
        """A sentence if some slices of a parameter are wrong and some right; "" if all are wrong, or it is not cut."""
        wrong: dict[int, tuple[float, float]] = {}
        right: list[int] = []
        for rank, sheet in enumerate(self.part.many.sheets):
            if number in sheet.facts["cut"]:
                array = sheet.array("shard", number)
                box, _ = sheet.box(number, array)
                mine = one[tuple(slice(a, b) for a, b in zip(box.offset, box.stop, strict=True))]
                if np.linalg.norm(array - mine) > 1e-6 * np.linalg.norm(mine):
                    wrong[rank] = diagnose.factor(mine, array)
                else:
                    right.append(rank)
        if not (wrong and right):
            return ""
        said = diagnose.scaled(*next(iter(wrong.values())), self.degrees, cut=True)
        return f"{said}, in the slice of {diagnose.ranks(list(wrong))} only"

    def _other(self, step: int, finding: Finding) -> Where:
        kind, name = finding.key.kind, finding.key.name
        words = {
            "update": "update of", "frozen": "frozen weight", "statistic": "running statistic", "buffer": "buffer",
            "state": "optimizer state", "score": "score",
        }  # fmt: skip
        if finding.missing:
            said = _missing(finding.missing)
        elif kind == "frozen":
            said = "has moved"
        else:
            number = key(*finding.key)
            c, rest = diagnose.factor(self.part.of_one(number), self.part.many.array(number))
            said = diagnose.update(c, rest, self.degrees) if kind == "update" else _off_by(c, rest)
        return Where(step=step, kind=kind, name=name, sentence=f"step {step}: {words[kind]} {name} {said}")


def _off_by(c: float, rest: float) -> str:
    if np.isnan(c):
        return "is not one process's"
    return f"is {c:.6g} × one process's" + (f" and {min(rest, 1):.1e} something else" if rest > 1e-12 else "")


def _missing(side: str) -> str:
    return (
        "is there on one process, and on no rank"
        if side == "many"
        else "is there on ranks, and not on one process"
    )
