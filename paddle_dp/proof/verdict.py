"""The verdict on two sides: same, different, proves nothing or failed, and the sentences that the screen shows of it.

The sentences name the first difference, the smallest visible fault, and the quantities that could not be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

import numpy as np

from paddle_dp.mesh.degrees import MODEL_AXES
from paddle_dp.proof import diagnose
from paddle_dp.proof.compare import TraceComparison
from paddle_dp.proof.first_difference import DifferenceSearch, FirstDifference
from paddle_dp.proof.sides import NOT_RUN, Side
from paddle_dp.proof.steps import Step, StepComparison
from paddle_dp.proof.tolerance import ROUNDING_BOUND, VISIBLE_FAULT, is_same
from paddle_dp.proof.trace_files import MODEL_LAYER, Key, Trace
from paddle_dp.text import CAN_DIFFER, and_more, numbered

# Exit statuses. FAILED also means a side that did not run (proof.sides).
SAME, DIFFERENT, PROVES_NOTHING, FAILED = 0, 1, 3, NOT_RUN
STATUSES = {
    "same": SAME, "same at first": PROVES_NOTHING, "proves nothing": PROVES_NOTHING, "different": DIFFERENT,
    "failed": FAILED,
}  # fmt: skip


@dataclass
class Verdict:
    """The verdict on `reference`, one process, and `candidate`, the ranks, by comparing their traces and steps."""

    reference: Side
    candidate: Side

    def __post_init__(self) -> None:
        self.wide = _compare_traces(self.reference, self.candidate, "wide")
        turns = self.reference.facts.get("kinks") != [] and (self.wide is None or self.wide.same)
        float64_trace = None if self.wide is None else self.wide.reference
        native = _compare_traces(self.reference, self.candidate, "own", float64_trace, turns)
        assert native is not None, "a side without the recipe's own steps was not finished"
        self.native = native
        farthest = max([1.0, *native.turned.values()])
        self.steps = StepComparison(native.reference, native.candidate, farthest)

    @property
    def comparisons(self) -> list[TraceComparison]:
        """The comparisons in float64, if both sides have it, and in the recipe's precision."""
        return [*([] if self.wide is None else [self.wide]), self.native]

    @property
    def same(self) -> bool:
        return self.status == SAME

    @property
    def label(self) -> str:
        """The verdict in a word or two: a key of STATUSES."""
        if not self._alike:
            return "different"
        if self.failed is not None:
            return "failed"
        if not self.learned or self.insensitive is not None:
            return "proves nothing"
        return "same" if self.steps.ended is None else "same at first"

    @property
    def status(self) -> int:
        """The exit status of verify."""
        return STATUSES[self.label]

    @property
    def failed(self) -> str | None:
        """A sentence if one side failed in float64 and the other one did not; else None."""
        if (self.reference.failed is None) == (self.candidate.failed is None):
            return None
        reference, candidate = "one process", f"{self.candidate.ranks} ranks"
        failed_side, other = (reference, candidate) if self.reference.failed else (candidate, reference)
        return f"in float64 {failed_side} failed, and {other} did not: {self.reference.failed or self.candidate.failed}"

    @cached_property
    def _alike(self) -> bool:
        traces_agree = all(comparison.same for comparison in self.comparisons)
        search = DifferenceSearch(self.native, self.candidate.axes)
        return traces_agree and self.steps.same and search.samples() is None

    @cached_property
    def learned(self) -> bool:
        """Whether one process learned anything in the recipe's precision: some gradient is finite and not zero, and
        some weight changed while the numbers were finite."""
        ended = self.steps.ended
        if ended is not None and ended.number == 1:
            return False
        return self._has("gradient") and (self._has("update") or self.steps.moved)

    @cached_property
    def insensitive(self) -> tuple[str, float] | None:
        """The least sensitive parameter and the smallest fault of its gradient on one rank that would show, if that is
        above VISIBLE_FAULT; else None. Judged in float64, or in the recipe's precision if not compared there."""
        shows = {**self.native.shows, **(self.wide.shows if self.wide is not None else {})}
        name = max(shows, key=lambda name: shows[name], default=None)
        if name is None or shows[name] * self.candidate.ranks <= VISIBLE_FAULT:
            return None
        return name, shows[name] * self.candidate.ranks

    def _has(self, kind: str) -> bool:
        """Whether any number of this kind is finite and not zero on one process."""
        trace = self.native.reference
        arrays = (trace.array(key) for key in trace.keys if Key.read(key).kind == kind)
        return any(bool(np.any(np.isfinite(array) & (array != 0))) for array in arrays)

    @cached_property
    def layer_state_difference(self) -> str | None:
        """A sentence on the first state outside the weights that changes differently on some rank; None without one."""
        for comparison in self.comparisons:
            reference, sheets = comparison.reference.facts.get("layer_state", {}), comparison.candidate.sheets
            groups = [[sheet.facts["coords"].get(axis) for axis in MODEL_AXES] for sheet in sheets]
            candidate = [sheet.facts.get("layer_state", {}) for sheet in sheets]
            close = ROUNDING_BOUND.get(comparison.dtype, 2.0**-3)
            difference = diagnose.layer_state(reference, candidate, groups, close)
            known = any(sentence.startswith("buffer ") for sentence in self.candidate.differences)
            if difference is not None and not (known and difference.startswith("buffer ")):
                return difference
        return None

    @cached_property
    def first_difference(self) -> FirstDifference | None:
        """The first difference; None if the sides are the same."""
        if self._alike:
            return None
        late = next((step for step in self.steps.steps if not is_same(step.r)), None)
        dependence = self.reference.facts.get("dependence")
        guesses = not (dependence or self.layer_state_difference or self.candidate.differences)
        for comparison in self.comparisons:
            difference = DifferenceSearch(comparison, self.candidate.axes, guesses).first()
            is_later = late is not None and difference is not None and late.number < difference.step
            if difference is not None and not (comparison is self.native and is_later):
                return difference
        if late is not None:
            return FirstDifference(late.number, "loss", "", _late(late))
        if not is_same(self.steps.weights.r):
            last = len(self.steps.steps)
            return FirstDifference(last, "weight", "", _weights(last, self.steps.weights.r))
        return None

    @property
    def sentences(self) -> list[str]:
        """The sentences for the screen; the last one begins with the verdict in capitals."""
        return list(self._sentences())

    def _sentences(self) -> Iterator[str]:
        ranks = self.candidate.ranks
        subject = f"{ranks} ranks" if ranks > 1 else "the parts of one process"
        for remarks in (
            self._dependence,
            self._limits,
            self._left_out,
            self._lost,
            self._empty,
            self._not_finite,
        ):
            yield from remarks()
        if not self._alike:
            if self.failed is not None:
                yield f"Not compared in float64: {self.failed}."
            yield from filter(None, [comparison.divergence for comparison in self.comparisons])
            if self.first_difference is not None:
                yield f"Where: {self.first_difference.sentence}."
            yield f"DIFFERENT: {subject} do not learn what one process learns."
        elif self.failed is not None:
            yield (
                f"FAILED: {self.failed.rstrip('.')}. In {self.native.dtype} both learn the same, as far as its "
                "rounding shows."
            )
        elif not self.learned:
            yield self._nothing()
        elif self.insensitive is not None:
            yield self._too_noisy(*self.insensitive)
        elif self.steps.ended is not None:
            yield self._at_first(self.steps.ended)
        else:
            yield self._same(subject)

    def _same(self, subject: str) -> str:
        if self.candidate.rounds_to is None:
            return f"SAME: {subject} learn what one process learns, to rounding."
        return (
            f"SAME in each step: from the same weights {subject} compute what one process computes, but for the digits "
            f"that {self.candidate.rounds_to} takes from gradients on their way (reduce_dtype), for good: whole "
            "trainings are not compared."
        )

    def _nothing(self) -> str:
        broken = self.steps.broken
        reason = "no gradient, or no update that moves a weight"
        advice = "Is everything frozen, or the learning rate 0?"
        if all(step.empty for step in self.steps.steps):
            reason = "nothing counts for the loss"
            advice = "Look at the batch, its micro-batches and the targets."
        elif broken is not None:
            reason = f"its numbers are not finite from step {broken.number}"
            advice = "Look at the data, the loss and the learning rate."
        beginning = f"PROVES NOTHING: nothing was learned on one process in these steps ({reason})"
        return f"{beginning}, so nothing is proven. {advice}"

    def _too_noisy(self, name: str, shows: float) -> str:
        dtype = self.native.dtype if self.wide is None or name not in self.wide.shows else "float64"
        advice = "Find out what amplifies rounding so much (a smaller model of the same layers may tell)."
        if dtype != "float64":
            advice = (
                "Let the model's code run in float64, which is compared where it can be, or take fewer ranks."
            )
        return (
            f"PROVES NOTHING: in {dtype} the gradient of {name} is so noisy on one process that only a fault above "
            f"{_percent(shows)} of it on one rank would show, and SAME requires that one of {_percent(VISIBLE_FAULT)} "
            f"does. {advice}"
        )

    def _at_first(self, ended: Step) -> str:
        last = ended.number - 1
        return (
            f"SAME up to step {last}: from step {ended.number} on the numbers are not finite {self._sides(ended)}, and "
            "nothing could be compared. Look at the data, the loss and the learning rate; "
            f"--steps {last} compares those."
        )

    def _sides(self, step: Step) -> str:
        """The sides without finite numbers, in a step in which one process has none."""
        numbers = (step.loss.many, step.gradient_norm.many)
        are_finite = all(number is not None and isfinite(number) for number in numbers)
        return "on one process" if are_finite else "on both sides"

    def _limits(self) -> Iterator[str]:
        if self.wide is None and self.failed is None:
            reason = self.reference.failed or self.candidate.failed or "it was not asked for"
            yield (
                f"Not compared in float64: {reason.rstrip('.')}. So rounding hides more than it would there, and "
                "optimizer states, running statistics, buffers and held-out numbers after the steps are not compared."
            )
        for comparison in self.comparisons:
            is_repeated = comparison is not self.wide and self.wide and comparison.dtype == "float64"
            if comparison.noise and not is_repeated:
                rounding = f", and {self.candidate.rounds_to}'s rounding" if comparison.rounded else ""
                fault = f"a fault above {_percent(comparison.visible(self.candidate.ranks))} of a parameter's gradient"
                yield (
                    f"In {comparison.dtype} {fault} on one rank would show (8 × the noise of one process × ranks"
                    f"{rounding}, median over parameters)."
                )

    def _dependence(self) -> Iterator[str]:
        """A sentence if one process learns something else from samples in another order, or in a second run."""
        dependence = self.reference.facts.get("dependence")
        if dependence is None:
            return
        name, step = dependence["name"], dependence["step"]
        shown = f"{_percent(dependence['distance'])} apart"
        if dependence["plain"] is not None:
            shown = f"{dependence['plain']:.9g}, and {dependence['other']:.9g}"
        if dependence["kind"] == "order":
            yield (
                f"In step {step} one process's {name} is {shown} with the samples of each micro-batch in another "
                "order: samples meet in forward or loss, something remembers which came, or random numbers go by the "
                "place in the micro-batch (each sample's own are dropout, where dim 0 is the samples, and draws of one "
                "number for each sample: docs/dropout.md). That is no rounding, and it excuses nothing."
            )
        else:
            yield (
                f"In step {step} one process's {name} is {shown} in a second run of the same steps: something is drawn "
                "that no seed decides, or goes on from run to run (a global variable). That is no rounding, and it "
                "excuses nothing. Let forward draw by Paddle's dropout only, and keep its state in the model."
            )

    def _left_out(self) -> Iterator[str]:
        prefix = "Can differ, and did not in these steps" if self._alike else "Differs by nature"
        yield from (f"{prefix}: {each.removesuffix(CAN_DIFFER)}." for each in self.candidate.differences)
        if self.layer_state_difference is not None:
            yield (
                f"{prefix}: {self.layer_state_difference}: state that layers keep outside their weights is not shared "
                "between ranks. Compute it from the weights, or give up keeping it; a mean over samples is a "
                "BatchNorm's work (sync_batch_norm)."
            )
        noisy = {d.quantity.name: d.undetermined for d in (self.wide or self.native).without_gradient}
        if noisy:
            first = list(noisy.items())[:3]
            names = [name if fraction > 0.999 else f"{fraction:.0%} of {name}" for name, fraction in first]
            yield (
                f"Without a true gradient: {', '.join(names)}{and_more(noisy, 3)}. Their gradient is rounding (a "
                "bias before a norm, the key's bias in attention), so they are judged apart, by their own noise. Adam "
                "makes steps of it: a bias before a BatchNorm drifts, on one process too, and held-out numbers with "
                "its running mean. bias_attr=False removes it."
            )
        turned = self.native.turned
        if turned:
            worst = max(turned, key=lambda name: turned[name])
            alike = " Without float64, a fault of the first batch alone would look the same."
            unseen = "" if self.wide else alike
            yield (
                f"In {self.native.dtype} the first gradients of {worst}{and_more(turned)} are {turned[worst]:.2g} × "
                "the noise apart, and those of other batches are not, as a fault's would be: rounding turned a ReLU or "
                f"a pooling over.{unseen}"
            )

    def _lost(self) -> Iterator[str]:
        if (step := self.steps.lost) is not None:
            spread = step.noise_spread
            off = f"off itself by {100 * spread:.0f} %" if isfinite(spread) else "not finite"
            yield (
                f"From step {step.number} on one process is {off} when its weights "
                "move by one unit in the last place: from there on losses, gradient norms and weights are shown, not "
                "judged. A smaller learning rate, or a warm-up, makes these steps comparable."
            )

    def _empty(self) -> Iterator[str]:
        """A sentence if nothing in a batch counts: an anchor without a positive, targets that are all ignored."""
        if self.wide is not None and all(row.get("empty") for row in self.wide.reference.facts["rows"]):
            yield "Not compared in float64: nothing counts for the loss in the batches of its steps."
        if empty := [step.number for step in self.steps.steps if step.empty]:
            yield (
                f"In {numbered('step', empty)} nothing counts for the loss, on both sides: it is no number there, and "
                "no update was made."
            )

    def _not_finite(self) -> Iterator[str]:
        step = self.steps.broken
        if step is None:
            return
        steps = len(self.steps.steps)
        left_out = next(iter(self.native.reference.facts["recorded"]), steps + 1) - 1
        if self.native.dtype == "float16" and left_out:
            which = f"all {steps} steps" if left_out == steps else f"the first {left_out} steps"
            yield (
                f"float16 overflowed in {which} on one process, so their updates were left out: a smaller "
                "train.precision.scale begins with the first."
            )
            return
        layer = self.native.reference.facts["broken"].get(str(step.number))
        location = f", first in layer {layer}" if layer else ", in the gradients only"
        if layer == MODEL_LAYER:
            location = ", first in the model's output"
        yield f"Not a number {self._sides(step)} from step {step.number}{location}."


def compare_sides(reference: Side, candidate: Side) -> Verdict:
    """The verdict on two sides of one `sides.SideRunner`; `reference.candidates` must contain `candidate`."""
    return Verdict(reference, candidate)


def _compare_traces(
    reference: Side, candidate: Side, name: str, float64_trace: Trace | None = None, turns: bool = False
) -> TraceComparison | None:
    """The comparison of the sides' traces of this name; None if one side has none."""
    a, b = (reference.followed(candidate, name) or reference.trace(name)), candidate.trace(name)
    if a is None or b is None:
        return None
    return TraceComparison(a, b, float64_trace, reference.replayed(candidate, name), turns=turns)


def _percent(fraction: float) -> str:
    digits = 2 if fraction > 0.1 else 1
    return f"{100 * fraction:.{digits}g} %" if fraction < 1 else "100 %"


def _weights(step: int, r: float) -> str:
    return (
        f"after step {step}: all weights together are {r:.1f} × as far from one process's as its own stray, and no "
        "step that was read differs: look at the last updates"
    )


def _late(step: Step) -> str:
    off = {name: pair for name, pair in step.scores.items() if not is_same(pair.r)}
    scores = "".join(f", {name} {pair.one:.6g} and {pair.many:.6g}" for name, pair in off.items())
    return (
        f"step {step.number}: loss {step.loss.one:.9g} of one process and {step.loss.many:.9g} are {step.loss.r:.1f} × "
        f"as far apart as one process strays by itself, gradient norms {step.gradient_norm.r:.1f} ×{scores}; the first "
        "steps agree, so look at state that carries over: optimizer states, running statistics, the schedule, later "
        "batches"
    )
