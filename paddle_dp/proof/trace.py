"""One side of a comparison, inside its ranks: the first steps of a recipe in this layout, written down.

Two runs: `wide`, two steps in float64, and `own`, the recipe's first steps in its own precision. On one process each is
followed by runs with noise (proof.noise), of which only the distance from the run without is kept.
"""

from __future__ import annotations

import gc
import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dp.batch import Batch
from paddle_dp.checkpoint import Piece
from paddle_dp.data import Share
from paddle_dp.errors import PaddleDPError
from paddle_dp.mesh import Mesh, join
from paddle_dp.parallel import Learner, Task
from paddle_dp.parallel.memory import Holdings
from paddle_dp.proof import noise
from paddle_dp.proof.outputs import Outputs
from paddle_dp.proof.record import Recorder
from paddle_dp.proof.rehearsal import rehearse
from paddle_dp.proof.replay import replay
from paddle_dp.proof.shares import short
from paddle_dp.proof.sheets import REPLAYED, Key, Run, key, write_sheet
from paddle_dp.recipe import LoaderSettings, Precision, Recipe
from paddle_dp.train.assemble import Assembly
from paddle_dp.train.build import setup, task
from paddle_dp.train.meter import memory

PROBES = 3  # batches whose gradients are taken from the initial weights, in the recipe's own precision


@dataclass(frozen=True)
class Chosen:
    """Some samples of a data set, as a data set; `read` has the numbers of those that were asked for."""

    dataset: Any
    indices: np.ndarray
    read: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int) -> Any:
        number = int(self.indices[i])
        self.read.append(number)
        return self.dataset[number]


def first_samples(recipe: Recipe, steps: int, ranks: int) -> Chosen:
    """What the recipe's first `steps` global batches hold, the last of them cut so that `ranks` ranks get unequal
    shares."""
    dataset = recipe.dataset.build("train")
    whole = Share(len(dataset), recipe.train.batch, seed=recipe.train.seed)
    full = min(steps - 1, whole.samples // whole.batch)
    room = min(whole.batch, whole.samples - full * whole.batch)
    count = full * whole.batch + (short(room, ranks) if room > 1 else room)
    return Chosen(dataset, whole.order(0)[:count])


def trace(recipe: Recipe, options: dict[str, Any]) -> None:
    """Writes the sheets of a side into options["trace"]; rank 0 also side.json.

    options["ranks"] is the larger side's number of ranks, so that both sides read the same batches; "steps" how many
    of the recipe's own are done; "wide" whether two are done in float64; "holdings" whether what a rank holds is
    counted; "rehearse" whether the training itself is rehearsed behind them (proof.rehearsal). options["beside"], for
    one process, are the sides whose updates it does again: folder and number of ranks (proof.replay). options["patch"],
    if any, is "module:function", called first.
    """
    if patch := options.get("patch"):
        module, _, function = patch.partition(":")
        getattr(import_module(module), function)()
    side = Side(recipe, options)
    told: dict[str, Any] = {"wide": None}
    if options.get("wide", True):
        try:
            side.run("wide", Precision(dtype="float64"))
        except PaddleDPError:
            raise
        except Exception as error:  # noqa: BLE001 - a model's own code may know float32 only, in any words
            told["wide"] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    learner = side.run("own", recipe.train.precision)
    told["differences"] = learner.differences()
    del learner
    for number, (folder, ranks) in enumerate(options.get("beside", ())):
        side.replay(number, Path(folder), ranks)
    told |= {"axes": side.mesh.axes.as_dict(), **side.told}
    if side.mesh.is_first:
        (side.folder / "side.json").write_text(json.dumps(told))
    if options.get("rehearse"):
        rehearse(recipe, options)


class Side:
    """A recipe in one layout, learned again and again from its one initial state. Collective, all of it."""

    def __init__(self, recipe: Recipe, options: dict[str, Any]):
        self.recipe, self.options, self.folder = recipe, options, Path(options["trace"])
        joined = join(recipe.train.seed, recipe.train.device, recipe.train.patience.seconds)
        self.chosen = first_samples(recipe, options["steps"], options["ranks"])
        samples = len(self.chosen.dataset)
        self.per_epoch = Share(samples, recipe.train.batch, last=recipe.train.last).batches
        self.given = Given(recipe.train.precision)
        read: dict[str, Any] = {"dataset": lambda split: self.chosen, "shuffle": False, "last": "keep"}
        read |= {"task": self._task, "loader": LoaderSettings()}
        self.assembly = Assembly(replace(setup(recipe), **read), joined)
        self.mesh: Mesh = self.assembly.mesh
        self.told: dict[str, Any] = {}
        self._beyond: list[noise.Noise] = []  # those whose effect is no rounding
        self._judged = False  # whether float64 has told which

    def _task(self, *_: int) -> Task:
        """The recipe's task in the precision, and with the noise, of the run that begins."""
        train = replace(self.recipe.train, precision=self.given.precision)
        recipe = self.recipe.model_copy(update={"train": train})
        found = task(recipe, train.length.steps(self.per_epoch), self.per_epoch)
        if self.given.noise is not None:
            self.given.noise.model(found.model)
        return replace(found, compared=True)

    def _trusted(self, one: noise.Noise) -> bool:
        """Whether no run with noise of this kind led further than rounding can, in a higher precision or before."""
        return not any(other.order is None or one.order is not None for other in self._beyond)

    def batches(self, wide: bool) -> Iterator[Batch]:
        """The first global batches; in float64 the first of them, and the one of unequal shares."""
        loader = self.assembly.train_loader
        if not wide:
            yield from loader.read(0)
            return
        for start in sorted({0, loader.batches - 1}):
            yield next(loader.read(0, start))

    def run(self, name: str, precision: Precision) -> Learner:
        """A run and, on one process, its runs with noise; returns the run's learner."""
        begun, wide = time.perf_counter(), name == "wide"
        self.given = Given(precision)
        gc.collect()
        seen = Watched(self, wide)
        seconds = time.perf_counter() - begun
        floors, drift, beyond = Floors(seen), [], {}
        for one in noise.runs(precision.dtype, self.options["ranks"]) if self.mesh.ranks == 1 else ():
            if not self._trusted(one):
                continue
            self.given = Given(precision, one)
            again = None  # the run before
            gc.collect()  # a learner and its recorder hold each other: Python alone would free them late
            again = Watched(self, wide, None if wide or one.long else 1)
            first, its = (run.rows[0]["loss"] for run in (seen, again))
            if not self._judged and not noise.is_rounding(precision.dtype, first, its):
                beyond[one.name] = [first, its]
                self._beyond.append(one)
                continue
            floors.add(again)
            drift += [again.rows] if one.long and not wide else []
        facts = {
            "rows": seen.rows, "places": seen.places, "order": seen.order, "recorded": seen.recorder.recorded,
            "apart": seen.recorder.apart, "amiss": seen.amiss, "broken": seen.broken, "noise": floors.norms,
            "drift": drift, "beyond": beyond, "seconds": seconds, "all seconds": time.perf_counter() - begun,
            "reader": self.mesh.reader, "seats": self.mesh.seats, "dtype": precision.dtype,
            "numbers": sum(piece.array.size for piece in seen.pieces.values()),
        }  # fmt: skip
        groups = {"copy": seen.recorder.copies, "output": seen.outputs, "noise": floors.most}
        self._judged = wide
        write_sheet(self.folder, name, self.mesh.rank, seen.pieces, facts, **groups)
        return seen.learner

    def replay(self, number: int, folder: Path, ranks: int) -> None:
        """Does the updates of a side of `ranks` ranks again, and leaves them in the folder replay<number>."""
        for name, precision in (("wide", Precision(dtype="float64")), ("own", self.recipe.train.precision)):
            many = Run.read(folder, name, ranks)
            if many is not None:
                self.given = Given(precision)
                gc.collect()
                write_sheet(
                    self.folder / f"replay{number}", name, 0, replay(self.assembly.learner(), many), {}
                )


@dataclass(frozen=True)
class Given:
    """What a run is done in, and with which noise."""

    precision: Precision
    noise: noise.Noise | None = None


class Watched:
    """A run: the rows of its steps, and what its recorder saw."""

    def __init__(self, side: Side, wide: bool, steps: int | None = None):
        self.side, self.mesh, self.wide = side, side.mesh, wide
        noisy = side.given.noise
        self.order_of = noisy.order if noisy is not None else None
        self.learner = side.assembly.learner()
        self.recorder = Recorder(self.learner)
        self.hooks = Outputs(self.learner) if wide or noisy is None else None
        holdings = Holdings(self.learner) if side.options.get("holdings") and not wide else None
        if noisy is None:
            self.recorder.initial()
        self.order: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.places: dict[int, list[int]] = {}
        self.outputs: dict[str, np.ndarray] = {}
        self.broken: dict[int, str] = {}  # by step: the first layer that gave something that is not finite
        self.amiss: str | None = None
        for step, batch in enumerate(() if wide else itertools.islice(side.batches(wide), PROBES), start=1):
            if step > 1:  # the first batch is that of the first step
                with self.recorder.probing(step):
                    self.learner.train_batch(self._in_order(batch))
        side.chosen.read.clear()
        for step, batch in enumerate(side.batches(wide), start=1):
            self._learn(step, batch)
            if step == steps:
                break
        if wide:
            self.amiss = self.recorder.final(len(self.rows))
        else:
            self.recorder.weights(len(self.rows))
        if self.hooks is not None:
            self.hooks.remove()
        if holdings is not None:
            peak, held = max(self.mesh.gather(memory(self.mesh.device))), self.mesh.gather(holdings.read())
            side.told |= {"memory": peak, "held": held}

    @property
    def pieces(self) -> dict[str, Piece]:
        """What the recorder saw, and on the first rank losses and gradient norms."""
        found = dict(self.recorder.pieces)
        if self.mesh.is_first:
            for step, row in enumerate(self.rows, start=1):
                for kind in ("loss", "gradient_norm"):
                    number = key(kind.replace("_", " "), step, "")
                    found[number] = Piece.whole(number, np.array([row[kind]], "float64"))
        return found

    def _learn(self, step: int, batch: Batch) -> None:
        """One step, watched where it is worth it: in float64 each, else the first that ends in an update."""
        rows, counted = [len(m.targets) for m in batch.micros], [m.samples for m in batch.micros]
        asked = self.side.chosen.read
        read = _counting(asked[-sum(rows) :], rows, counted)
        asked.clear()
        self.recorder.watch(step if self.wide or not self.recorder.recorded else 0)
        with self.hooks or nullcontext():
            self.learner.train_batch(self._in_order(batch), observe=True)
        cuts = self.side.assembly.train_loader.share.cuts(batch.samples)
        self.places[step] = [place for start, stop in cuts for place in range(start, stop)]
        if self.hooks is not None:
            self._take_outputs(step, self.hooks.taken(rows, counted), _back(counted, self.order_of))
        shares = self.mesh.gather([self.mesh.reader, self.mesh.speaks, read])
        self.rows.append({
            "loss": self.mesh.sum([self.learner.observed["loss"]])[0],
            "gradient_norm": self.learner.observed["gradient_norm"], "samples": batch.samples,
            "shares": [len(numbers) for _, speaks, numbers in shares if speaks],
            "read": [[reader, numbers] for reader, _, numbers in shares],
        })  # fmt: skip

    def _in_order(self, batch: Batch) -> Batch:
        return batch if self.order_of is None else noise.permute(batch, self.order_of)

    def _take_outputs(self, step: int, found: dict[str, np.ndarray], back: np.ndarray) -> None:
        self.order = self.hooks.order if self.hooks is not None else []
        bad = {name.rpartition("#")[0] for name, sums in found.items() if not np.isfinite(sums).all()}
        if bad:
            self.broken[step] = min(bad, key=self.order.index)
        if self.wide:
            self.outputs |= {key("output", step, name): sums[back] for name, sums in found.items()}


def _counting(read: list[int], rows: list[int], counted: list[int]) -> list[int]:
    """The samples that count: not the one that a ghost reads."""
    found, start = [], 0
    for n, counts in zip(rows, counted, strict=True):
        found += read[start : start + n] if counts else []
        start += n
    return found


def _back(counted: list[int], order: Callable[[int], np.ndarray] | None) -> np.ndarray:
    """Where each sample of the batch went, when the samples of its micros were put into another order."""
    found, start = [], 0
    for samples in counted:
        places = np.argsort(order(samples)) if order is not None else np.arange(samples)
        found.append(start + places)
        start += samples
    return np.concatenate(found) if found else np.zeros(0, int)


class Floors:
    """How far runs with noise were from the run without: by key the most of each element, and of the 2-norm."""

    def __init__(self, base: Watched):
        self._base = base.pieces
        self._outputs = base.outputs
        self.most: dict[str, np.ndarray] = {}
        self.norms: dict[str, float] = {}

    def add(self, run: Watched) -> None:
        for number, piece in run.pieces.items():
            if number in self._base and Key.read(number).kind not in REPLAYED:
                self._add(number, piece.array.astype("float64") - self._base[number].array)
        for number, seen in run.outputs.items():
            if number in self._outputs and seen.shape == self._outputs[number].shape:
                self._add(number, seen - self._outputs[number])

    def _add(self, number: str, apart: np.ndarray) -> None:
        apart = np.abs(apart)
        self.norms[number] = max(self.norms.get(number, 0.0), float(np.linalg.norm(apart)))
        most = self.most.get(number)
        small = apart.astype("float32")
        self.most[number] = small if most is None else np.maximum(most, small)
