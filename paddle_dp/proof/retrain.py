"""Trains an interval of a run again on one process, and measures the distance from the run's records.

As in a proof (proof.compare), the effect of rounding is measured. If a number is not bit-equal to the recorded one, the
interval is trained again with changes of the size of rounding (proof.noise); their largest distance is the unit.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dp.assembly.build import build
from paddle_dp.assembly.trainer import Trainer
from paddle_dp.batch import Batch
from paddle_dp.certificate.certificate import model_digest, versions
from paddle_dp.checkpoint import TensorShard, load
from paddle_dp.data import Loader
from paddle_dp.errors import UsageError
from paddle_dp.identity.same_run import data_changes
from paddle_dp.mesh import Mesh, join
from paddle_dp.proof import noise
from paddle_dp.proof.tolerance import NOISE_LIMIT, arithmetic_eps, difference, ratio, unit_of
from paddle_dp.recipe import Recipe
from paddle_dp.tensors import widened
from paddle_dp.train import Callback, Moment
from paddle_dp.train.state import model_shards
from paddle_dp.units import Length

RESULT = "again.json"
KERNELS = ("device", "paddle", "numpy", "python")  # facts on which the last bits of one process depend
Arrays = dict[str, np.ndarray]


class LossRecorder(Callback):
    """Collects the loss of each update."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def step(self, moment: Moment) -> None:
        self.by_step[moment.progress.step] = moment.numbers["loss"]


@dataclass
class TrainingResult:
    """One training of the interval: its losses by step, and the weights after it."""

    losses: dict[int, float]
    digest: str
    weights: Arrays = field(repr=False)


def retrain(recipe: Recipe, options: dict[str, Any]) -> None:
    """Entry point of one process. Writes `Retraining.result` to the folder options["out"].

    Options: "start", a checkpoint's path or None for the beginning; "accept", keys in which it may differ; "to", the
    last update; "losses", the run's recorded ones by step; "digest", of the run's weights after "to", and "saved", the
    checkpoint that holds them, each None if there is none; "data", the run's facts on its data sets; "ranks", the run's
    ranks, at least 2; "tensor", the ranks of its tensor axis.
    """
    mesh = join(recipe.train.seed, recipe.train.device)
    if mesh.ranks != 1:
        raise UsageError("an interval is trained again by one process.")
    interval = Retraining(recipe, options, mesh)
    Path(options["out"], RESULT).write_text(json.dumps(interval.result()))


class Retraining:
    """The interval that `options` describe, trained as often as its judgement needs."""

    def __init__(self, recipe: Recipe, options: Mapping[str, Any], mesh: Mesh):
        self.recipe, self.options, self.mesh = recipe, options, mesh
        self.to, self.dtype = int(options["to"]), recipe.train.precision.dtype
        self.recorded_losses = {int(step): float(loss) for step, loss in options["losses"].items()}
        self.before: Arrays = {}
        self.kernels: dict[str, str] = {}

    def result(self) -> dict[str, Any]:
        """Trains, and returns {"losses": [[step, recorded, here, drift], …], "bits": whether the weights are the run's,
        "weights": [distance, drift, movement], "digest", "kernels": the device and versions on which the last bits
        depend}; None where the run left nothing to compare."""
        plain = self._train(None)
        saved = None if self.options["saved"] is None else _saved(Path(self.options["saved"]))
        is_equal = all(
            not difference(plain.losses[step], loss) for step, loss in self.recorded_losses.items()
        )
        # The others have no rounding: a constant, such as a mask of -1e30, would hide all others.
        trained = {
            name: array
            for name, array in plain.weights.items()
            if not np.array_equal(array, self.before[name], equal_nan=True)
        }
        bits = None if self.options["digest"] is None else plain.digest == self.options["digest"]
        exact = bits is not False and is_equal
        loss_drift, weight_drift = ({}, 0.0) if exact else self._drift(plain.losses, trained)
        worst, losses = 0.0, []
        for step, loss in sorted(self.recorded_losses.items()):
            here = plain.losses[step]
            size = abs(here) if np.isfinite(here) else 0.0
            worst = unit_of(max(worst, loss_drift.get(step, 0.0)), size, arithmetic_eps(self.dtype))
            losses.append([step, loss, here, worst])
        weights = None
        if saved is not None:
            floor = unit_of(weight_drift, norm(trained), arithmetic_eps(self.dtype))
            weights = [distance(plain.weights, saved), floor, distance(plain.weights, self.before)]
        return {
            "losses": losses, "bits": bits, "digest": plain.digest, "weights": weights, "kernels": self.kernels
        }  # fmt: skip

    def _drift(self, plain: Mapping[int, float], trained: Arrays) -> tuple[dict[int, float], float]:
        """The largest distance of the runs with noise from the plain one: of the loss by step, and of all weights."""
        losses, weights = dict.fromkeys(plain, 0.0), 0.0
        for kind in noise.kinds(self.dtype, self.options["ranks"], self.options["tensor"]):
            if kind.all_steps:
                noisy = self._train(kind)
                for step, loss in noisy.losses.items():
                    losses[step] = max(losses[step], difference(loss, plain[step]))
                weights = max(weights, distance(trained, {name: noisy.weights[name] for name in trained}))
                del noisy  # its weights are as large as the next one's
        return losses, weights

    def _train(self, kind: noise.Noise | None) -> TrainingResult:
        gc.collect()  # a learner refers to itself: only the collector frees the last one
        trainer = build(self.recipe, self.mesh, self.options["start"], self.options["accept"])
        if kind is None:
            self._check(trainer)
            self.before = _arrays(model_shards(trainer.learner))
        else:
            kind.change(trainer.learner.model)
            if kind.order is not None:
                _permute(trainer.loader, kind.order)
        losses = LossRecorder()
        trainer.add(losses)
        trainer.fit(Length(self.to, "steps"))
        return TrainingResult(
            losses.by_step, model_digest(trainer.learner), _arrays(model_shards(trainer.learner))
        )

    def _check(self, trainer: Trainer) -> None:
        """Notes the device and the versions. Raises UsageError if the data are not the run's."""
        assert trainer.run.identity is not None, "a trainer of a recipe has an identity"
        known = {"device": self.mesh.displayed_device, **versions(trainer.run.identity)}
        self.kernels = {name: known[name] for name in KERNELS}
        if changes := data_changes(self.options["data"], trainer.run.identity):
            raise UsageError(f"the run cannot be trained again: {'; '.join(map(str, changes))}.")


def _permute(loader: Loader, order: Callable[[int], np.ndarray]) -> None:
    read = loader.read

    def permuted(epoch: int, start: int = 0) -> Iterator[Batch]:
        return (noise.permute(batch, order) for batch in read(epoch, start))

    loader.read = permuted  # type: ignore[method-assign]


def _saved(checkpoint: Path) -> Arrays:
    """The model's tensors of a checkpoint."""
    saved = load(checkpoint)
    names = (name for name in saved.names if name.startswith("model/"))
    return {name: _wide(saved.read(name), saved.dtype(name)) for name in names}


def _arrays(shards: Mapping[str, TensorShard]) -> Arrays:
    return {shard.name: _wide(shard.array, shard.dtype) for shard in shards.values()}


def _wide(array: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(widened(array, dtype), "float64")


def distance(reference: Arrays, candidate: Arrays) -> float:
    """The 2-norm of the difference of all tensors; infinite if they are not the same ones, or not finite."""
    if {n: a.shape for n, a in reference.items()} != {n: a.shape for n, a in candidate.items()}:
        return float("inf")
    with np.errstate(invalid="ignore"):
        total = sum(
            float(np.square(np.where(reference[n] == candidate[n], 0, reference[n] - candidate[n])).sum())
            for n in reference
        )
    return total**0.5 if np.isfinite(total) else float("inf")


def norm(arrays: Arrays) -> float:
    """The 2-norm of all finite elements."""
    return float(sum(float(np.square(array[np.isfinite(array)]).sum()) for array in arrays.values()) ** 0.5)


def drift_ratio(shift: float, drift: float, size: float) -> float | None:
    """A distance in units of the drift; None if one process's drift is so large that nothing is proven."""
    return None if shift and drift > 0 and drift >= NOISE_LIMIT * size else ratio(shift, drift)
