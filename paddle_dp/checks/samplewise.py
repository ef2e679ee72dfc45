"""Trials of a model and a loss before a training: refuses, or names, dependencies between samples.

Ranks may share a batch if the sum of the samples' gradients is the batch's gradient. A loss that compares samples
(contrastive ones do), or a model that subtracts their mean, computes something else from a rank's share than from the
whole batch; totals and counts do not show this. So a few samples are tried: the loss on outputs of the model, the model
on two samples, and both together with their backward, which may mix samples where the forward does not. A run with
weights that differ in their last digit measures the tolerance for totals and gradients.

All of this runs in processes of `run_trial`. Runs share one as long as they leave the state as it was, so that none
sees a buffer, an attribute or a generator that another one changed. A clean trial is not a guarantee.
"""

from __future__ import annotations

import math
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import paddle
from paddle import nn

from paddle_dp.batch import Batch, MicroBatch, call, leaves
from paddle_dp.checks.gradient_sketch import Sketches, farthest, sketches
from paddle_dp.checks.model_mixing import CLOSE, UNTRIED, Sentences, answers, mixing, rows, state_of, untried
from paddle_dp.core.batch_norm import by_running_statistics
from paddle_dp.core.blocks import blocks_of, check_chain, has_groups, is_table
from paddle_dp.core.consistency import digests
from paddle_dp.core.derivatives import DerivativeError, derivatives_need_gradients
from paddle_dp.core.dropout.uncaught import DrawMonitor
from paddle_dp.core.extra_forwards import random_state
from paddle_dp.core.loss import Count, Loss, number
from paddle_dp.core.precision import MixedPrecision
from paddle_dp.core.process_runner import ProcessRunner, Result, results_of
from paddle_dp.core.turns import TurnsLoss
from paddle_dp.errors import LossError, PaddleDPError
from paddle_dp.learner.learner import Learner
from paddle_dp.learner.learner_checks import attributes_of
from paddle_dp.learner.task import Task, full_model_learner
from paddle_dp.mesh import Mesh
from paddle_dp.model.compiled import plain_forward
from paddle_dp.model.initial_weights import draw, initial_weights, is_lendable, trial_weights
from paddle_dp.text import FIRST_SAMPLES

Total = tuple[float, Sketches]  # a loss, and its gradients

SAMPLES = 16  # at most, in a trial
# Bytes of weights up to which a model is tried with its loss and backward, which need three times as much.
MAX_TRIED_BYTES = 2e9
CALLS = 6  # calls of a loss with the same outputs: its state may change late
# Relative to the gradient, and to the largest one: a ReLU that flips by the last digit of its input is far below.
SLOPES, SLIGHT = 0.01, 1e-3
_SAME = 1e-5  # the same function of the same numbers
_ACROSS = (
    "to compare the samples of all ranks, or add up several means, let the model return one row for each sample, and "
    "give the loss a method across: docs/add-a-part.md#a-loss-that-compares-samples"
)


@dataclass
class Findings:
    """The results of trials. `differences`: sentences about why a training will differ from one process's. `unknown`:
    about failed trials. `remembers`: attributes, generators and weights that a forward changes; `in_blocks`: those
    within the model's blocks. `lendable`: `is_lendable`. `derivative_error`: an evaluation's, if it will raise one."""

    differences: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    remembers: list[str] = field(default_factory=list)
    in_blocks: list[str] = field(default_factory=list)
    lendable: bool = True
    derivative_error: str = ""


class OutputProbe(Loss):
    """Sums a number per sample's outputs, in place of a loss that is meant to compare samples."""

    name, counted = "of each output", "samples"

    def __call__(self, outputs: Any, targets: Any) -> tuple[paddle.Tensor, Count]:
        """(total, count): outputs with unequal weights, so that they do not cancel, and no two are alike."""
        total: paddle.Tensor = paddle.zeros([])
        for output in answers(outputs):
            row = output.reshape([output.shape[0], -1]).astype("float32")
            total = total + (row * paddle.arange(1, row.shape[1] + 1, dtype="float32").cos()).sum()
        return total, int(leaves(targets)[0].shape[0])


def is_known(loss: Loss) -> bool:
    """Whether a loss needs no trial: it is in this package, or is meant to compare samples."""
    if isinstance(loss, TurnsLoss):
        return all(is_known(turn.loss) for turn in loss.turns)
    return loss.function is None or is_package_loss(loss) or bool(loss.compares)


def is_package_loss(loss: Loss) -> bool:
    """Whether all of a loss's code is in this package."""
    if isinstance(loss, TurnsLoss):
        return all(is_package_loss(turn.loss) for turn in loss.turns)
    code = loss if loss.function is None else loss.function
    return type(code).__module__.startswith("paddle_dp.")


def findings(
    task: Task, first: MicroBatch, run_trial: ProcessRunner, splits_batch: bool, chained: str = ""
) -> Findings:
    """Tries a task on the samples of `first`; `splits_batch`: ranks, or copies, read different samples.

    `chained`: the recipe's key that needs a forward equal to the model's blocks one after another. Raises UsageError if
    it is not, and LossError if a loss's counts do not add up, or it keeps state between calls. Changes the task's
    model.
    """
    model, report = task.model, Findings()

    def samples() -> Any:
        return rows(first.inputs, slice(2))

    if initial_weights(model) is not None:
        report.lendable = run_trial(lambda: {"lendable": is_lendable(model, samples)})["lendable"]
    if not report.lendable:
        draw(model)
    with trial_weights(model):
        if chained and _needs_chain(model, chained):
            check_chain(model, samples, chained, run_trial)
        if splits_batch and first.samples > 1:
            _add(report, mixing(model, samples(), run_trial, task.dropout == "exact"))
    if (size := sum(p.size * p.element_size() for p in model.parameters())) > MAX_TRIED_BYTES:
        report.unknown.append(_TOO_LARGE.format(type(model).__name__, size / 1e9, MAX_TRIED_BYTES / 1e9))
        return report
    draw(model)
    try:
        learner = full_model_learner(replace(task, compile=False, samples=None), Mesh.alone())
    except PaddleDPError:  # placing the model reports it
        return report
    trial = _Trial(learner, first, run_trial)
    report.remembers, drawn = trial.state()
    report.derivative_error = trial.derivative_error
    inside = {id(layer) for block in blocks_of(model) for layer in block.sublayers(include_self=True)}
    names = [f"model.{name}." for name, layer in model.named_sublayers() if id(layer) in inside]
    report.in_blocks = [name for name in report.remembers if f"{name.rpartition('.')[0]}." in names]
    if first.samples < 2:
        mixes: Sentences = [], [UNTRIED.format(task.loss.name, "there is one sample only")]
    else:
        mixes = ([] if is_known(task.loss) else trial.loss_alone(), [])
        mixes = mixes if mixes[0] else trial.compare_halves() if splits_batch else mixes
    if splits_batch:
        _add(report, (drawn, []))
        _add(report, mixes)
    return report


def _needs_chain(model: nn.Layer, chained: str) -> bool:
    """Whether forward has to be the chain of the blocks: recompute alone needs none of a model whose forward runs each
    of them itself."""
    if chained == "strategy.recompute":
        return has_groups(model)
    return chained == "strategy.pipeline" or is_table(model)


def _add(report: Findings, sentences: Sentences) -> None:
    report.differences += sentences[0]
    report.unknown += sentences[1]


class _Trial:
    """Runs a learner of the whole model on its first samples. If a run fails, the result is reported as unknown."""

    def __init__(self, learner: Learner, first: MicroBatch, run_trial: ProcessRunner):
        self.learner, self.loss, self.first = learner, learner.loss, learner.mixed.cast_micro_batch(first)
        self._run_trial, self.derivative_error = run_trial, ""
        inputs_and_targets = self.first.inputs, self.first.targets
        self._state = state_of(learner.model, inputs_and_targets, is_package_loss(self.loss), True)
        self._batch = Batch((), first.samples, 0, 0)
        half = first.samples // 2
        self._halves = [_slice_of(self.first, slice(half)), _slice_of(self.first, slice(half, None))]
        self._shares = f"{half} and {first.samples - half} of them"

    def state(self) -> tuple[list[str], list[str]]:
        """Attributes, generators and weights that a forward and its loss change, and sentences about draws."""

        def forward() -> Result:
            learner = self.learner
            weights = dict(learner.placed.named_parameters())
            before = digests(weights.values())
            attributes = attributes_of(learner.placed, self.loss)
            if self._derivative_error():
                learner.model.eval()  # a gradient penalty may be of the training alone
                return {"changed": [], "drawn": [], "derivative_error": self._derivative_error()}
            learner.runner.draws.after_update()
            after = zip(weights, digests(weights.values()), before, strict=True)
            written = [f"model.{name}" for name, now, then in after if now != then]
            return {"changed": [*attributes.changed(), *written], "drawn": learner.runner.draws.differences()}

        try:
            result = self._run_trial(forward)
        except Exception:  # noqa: BLE001 - the first update reports it
            return [], []
        self.derivative_error = result.get("derivative_error", "")
        return result["changed"], result["drawn"]

    def _derivative_error(self) -> str:
        """The sentence on a derivative in a forward without gradients, in the model's mode; "" if there is none."""
        learner = self.learner
        with (
            learner.runner.draws.around(self._batch, self.first, learner.placed.named_layers),
            paddle.no_grad(),
            derivatives_need_gradients(),
        ):
            try:
                learner.runner.repeat_forward(self.first, self._batch)
            except DerivativeError as error:
                return str(error)
        return ""

    def loss_alone(self) -> list[str]:
        """A sentence if the loss compares samples. Raises LossError for one that no number of ranks can share."""
        try:
            full, *halves = self._calls()
            if not full["totals"]:
                return []  # outputs without a sample dim are tried with the model
        except LossError:
            raise
        except Exception:  # noqa: BLE001 - not possible here; a later call reports any error
            return []
        self._refuse_counts(full, halves, "returned")
        if full["is_pair"] and abs(full["stated"] - full["returned"]) > _SAME * full["returned"]:
            raise LossError(
                f"the loss {self.loss.name} returns a count of {full['returned']:g}, and its count(targets) is "
                f"{full['stated']:g}, by which the sum over all ranks would be divided: both must be the same number."
            )
        self._refuse_counts(full, halves, "stated")
        if full["drew"]:
            return []
        first, *repeats = full["totals"]
        repeated = next((total for total in repeats if abs(total - first) > _SAME * abs(first)), None)
        if repeated is not None and not self._is_state_in_model:
            raise LossError(
                f"the loss {self.loss.name} gives {first:.6g} and then {repeated:.6g} for the same outputs "
                "and targets: it remembers something, which no checkpoint holds and ranks do not share. "
                "Keep it in a buffer of the model, and make the loss a method or a sublayer of the model."
            )
        sums = [chunk["totals"][0] for chunk in halves]
        if abs(first - sum(sums)) <= CLOSE * max(sum(map(abs, sums)), abs(first)):
            if repeated is None:
                self._refuse_scores(full["scores"], [chunk["scores"] for chunk in halves])
            return []
        return [
            f"the loss {self.loss.name} is {first:.4g} for {self.first.samples} samples together and {sum(sums):.4g} "
            f"for {self._shares}, added up: it compares samples, or is a mean, and each rank computes it over its "
            f"samples only ({_ACROSS})"
        ]

    @property
    def _is_state_in_model(self) -> bool:
        """Whether the loss keeps its state in buffers of the model."""
        owner = self.loss.owner
        buffer_ids = {id(buffer) for buffer in owner.buffers()} if isinstance(owner, nn.Layer) else set()
        return not buffer_ids.isdisjoint(id(buffer) for buffer in self.learner.model.buffers())

    def _calls(self, is_certain: bool = False) -> list[Result]:
        """The results of `_called` with all samples and with each half."""
        runs = [partial(self._called, self.first, CALLS, is_certain)]
        runs += [partial(self._called, chunk, 1, is_certain) for chunk in self._halves]
        results = list(results_of(self._run_trial, runs, self._state))
        if "is_doubtful" in results[0] and not self._has_steps_first():
            return self._calls(is_certain=True)
        return results

    def _has_steps_first(self) -> bool:
        """Whether dim 0 of the outputs is not the samples', since fewer of them have as many rows; False if the
        model or the loss refuses fewer."""
        fewer = _slice_of(self.first, slice(self.first.samples - 1))
        run = partial(_Trial(self.learner, fewer, self._run_trial)._called, fewer, 1)
        try:
            (result,) = results_of(self._run_trial, [run], self._state)
        except Exception:  # noqa: BLE001 - then it is not known
            return False
        return result == {"totals": []}

    def _called(self, chunk: MicroBatch, calls: int, is_certain: bool = False) -> Result:
        """Totals of the loss, called with the chunk's rows of all samples' outputs, its counts, and scores, if they can
        be computed; no totals if the outputs have no sample dim, or if it `is_doubtful` and not `is_certain`."""
        learner, first = self.learner, self.first
        scope = learner.runner.draws.scope(self._batch, first)
        with scope, learner.mixed.context(), paddle.no_grad():
            outputs = call(learner.model, first.inputs, plain_forward(learner.model))
            cuttable = paddle.utils.flatten(outputs)
            if not all(isinstance(x, paddle.Tensor) and x.ndim and len(x) == first.samples for x in cuttable):
                return {"totals": []}
            if not is_certain and any(_is_doubtful(x.shape, first.samples) for x in cuttable):
                return {"totals": [], "is_doubtful": True}
            start = chunk.places[0] - first.first if chunk.places is not None else 0
            outputs, before = rows(outputs, slice(start, start + chunk.samples)), _drawn(scope)
            pair, scores = (outputs, chunk.targets), {}
            total, returned = map(number, self.loss(*pair))
            with suppress(Exception):  # an evaluation reports it
                scores = {name: number(value) for name, value in self.loss.scores(*pair).items()}
            totals = [total, *(number(self.loss(*pair)[0]) for _ in range(calls - 1))]
            stated = number(self.loss.count(chunk.targets)) if self.loss.counted == "targets" else returned
            function = self.loss.function if stated != returned else None
            return {
                "totals": totals, "scores": scores, "returned": returned, "stated": stated,
                "is_pair": callable(function) and isinstance(function(*pair), tuple | list),
                "drew": _drawn(scope) != before, "shape": list(cuttable[0].shape) if len(cuttable) == 1 else None,
            }  # fmt: skip

    def _refuse_counts(self, full: Result, chunks: list[Result], kind: str) -> None:
        """Raises LossError for counts, "returned" or "stated", that do not add up."""
        count, samples, chunk_counts = full[kind], self.first.samples, [chunk[kind] for chunk in chunks]
        if abs(count - sum(chunk_counts)) <= CLOSE * max(abs(count), 1.0):
            return
        outputs, targets = full["shape"], self.first.targets
        if count == chunk_counts[0] == chunk_counts[1]:
            hint = "Return the sum over the samples and their number, not a mean and a constant."
        elif outputs and isinstance(targets, paddle.Tensor) and len(outputs) != targets.ndim:
            hint = (
                f"Outputs {outputs} and targets {list(targets.shape)} are probably broadcast, each "
                "sample's output against every target: give them one shape, with squeeze(-1) or unsqueeze(-1)."
            )
        else:
            hint = "The count of a loss must be the sum of its samples' counts."
        raise LossError(
            f"the loss {self.loss.name} is over {count:g} things for {samples} samples together, and over "
            f"{chunk_counts[0]:g} and {chunk_counts[1]:g} for {self._shares}: "
            f"on another number of ranks, or of micro-batches, it would be another loss. {hint}"
        )

    def _refuse_scores(self, full: dict[str, float], chunks: list[dict[str, float]]) -> None:
        """Raises LossError for a score that is no sum over samples: it is added up over ranks and micro-batches."""
        close = max(CLOSE, _tolerance(self.learner.mixed))
        for name, value in full.items():
            addends = [chunk.get(name, math.nan) for chunk in chunks]  # none, if it failed there
            if abs(value - sum(addends)) > close * max(abs(value), sum(map(abs, addends))):
                raise LossError(
                    f"the score {name} of the loss {self.loss.name} is {value:g} for {self.first.samples} samples "
                    f"together, and {addends[0]:g} and {addends[1]:g} for {self._shares}: a score is a sum, which the "
                    "count divides. Return .sum(), not .mean(); any other number is a metric (docs/metrics.md)."
                )

    def compare_halves(self) -> Sentences:
        """Sentences if the losses, or gradients, of two halves with separate forwards do not add up; and about failed
        trials. Raises LossError for a loss that returns neither a pair nor one loss per sample."""
        runs = [partial(self._learned, chunk, False) for chunk in (self.first, *self._halves)]
        runs.append(partial(self._learned, self.first, True))  # the last: it changes the weights
        totals: list[Total] = []
        try:
            for result in results_of(self._run_trial, runs, self._state):
                if result["drew"]:
                    return [], []  # random numbers, or masks without a sample: other sentences name the draws
                totals.append((result["total"], dict(zip(result["names"], result["arrays"], strict=True))))
        except Exception as error:  # any other error leaves it unknown
            if type(error) is LossError and not totals:
                raise
            when = "with fewer samples" if totals else FIRST_SAMPLES
            return [], [untried(self.loss.name, when, error)]
        full, *halves, noisy = totals
        added = sum(half[0] for half in halves)
        size = max(sum(abs(half[0]) for half in halves), abs(full[0]))
        if full[0] != full[0] or added != added:
            return [], [UNTRIED.format(self.loss.name, "it is not a number")]
        if abs(full[0] - added) > max(8 * abs(full[0] - noisy[0]), _tolerance(self.learner.mixed) * size):
            return [
                f"the loss {self.loss.name} is {full[0]:.6g} for {self.first.samples} samples in one forward and "
                f"{added:.6g} for {self._shares} in separate ones, added up: the model, or values that the loss takes "
                f"from its forward, mix samples, and each rank has only its own ({_ACROSS})"
            ], []
        worst = farthest(full[1], noisy[1], [chunk[1] for chunk in halves], SLOPES, SLIGHT)
        if worst is None:
            return [], []
        return [
            f"the gradient of {worst[0]} from {self.first.samples} samples in one backward is {worst[1]:.0%} off the "
            f"sum from {self._shares}: the backward mixes samples, and each rank has only its own"
        ], []

    def _learned(self, chunk: MicroBatch, nudged: bool) -> Result:
        """The loss of some samples, sketches of its gradients if they are precise, and whether numbers were drawn that
        differ from run to run. `OutputProbe` replaces a loss that is meant to compare samples."""
        learner, watch = self.learner, DrawMonitor()
        if self.loss.compares:
            learner.runner.loss = OutputProbe()
        if nudged:
            _nudge(learner.model)
        low = learner.mixed.low
        context = paddle.no_grad() if low else nullcontext()
        with watch.on([]), by_running_statistics(learner.model), context:
            total, _ = learner.runner.repeat_forward(chunk, self._batch)
            if not low:
                with learner.mixed.around_backward():
                    total.backward()
        sketched = sketches(learner.placed.named_parameters(trainable=True))
        learner.runner.loss = self.loss
        for parameter in learner.model.parameters():
            parameter.clear_gradient(set_to_zero=False)
        return {
            "total": number(total), "names": list(sketched), "arrays": list(sketched.values()),
            "drew": bool(watch.kinds_by_layer or watch.doubted),
        }  # fmt: skip


def _drawn(scope: Any) -> Any:
    """Changes with each random number: of the generators, and of a `Scope`, which draws exact masks of dropout."""
    return random_state(), dict(getattr(scope, "calls", {}))


_TOO_LARGE = "whether {} and its loss treat each sample alone: of {:.1f} GB of weights at most {:g} are tried"


def _tolerance(mixed: MixedPrecision) -> float:
    """The relative difference that is allowed between totals of the same numbers."""
    return 1e-7 if mixed.double else 1e-2 if mixed.low else 1e-5


def _is_doubtful(shape: list[int], samples: int) -> bool:
    """Whether dim 0 of outputs [n, n, …] may be n steps, as for a CTC loss: fewer samples tell."""
    return len(shape) > 2 and samples > 2 and shape[0] == shape[1] == samples


def _slice_of(full_batch: MicroBatch, cut: slice) -> MicroBatch:
    """Some of a micro-batch's samples, each with its index in the global batch."""
    positions = tuple(range(full_batch.first, full_batch.first + full_batch.samples))[cut]
    inputs, targets = rows(full_batch.inputs, cut), rows(full_batch.targets, cut)
    return MicroBatch(inputs, targets, len(positions), positions[0], positions)


@paddle.no_grad()
def _nudge(model: nn.Layer) -> None:
    """Moves every weight in memory by about one unit in its last place, up or down, in place."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter._is_initialized():
            ulp = 2.0**-52 if parameter.dtype == paddle.float64 else 2.0**-23
            signs = (paddle.arange(parameter.size) % 3 - 1).reshape(parameter.shape).astype(parameter.dtype)
            parameter.set_value(parameter * (1 + ulp * signs))
