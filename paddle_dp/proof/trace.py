"""Records one side of a comparison, inside its ranks: the first steps of a recipe in this layout.

It writes two traces: `wide`, two steps in float64, and `own`, the recipe's first steps in its precision. On one process
runs with noise follow each (proof.noise); only their distances from the run without noise are kept.

A comparison that does not fit into this machine's memory and disk is refused first. A process needs its model in
float64 with gradients and momentum, the weights before an update, and one quantity; the disk needs all (docs/proof.md).
"""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from paddle_dp.assembly.assemble import TrainerBuilder
from paddle_dp.assembly.build import setup, task
from paddle_dp.assembly.first_forward import user_frame
from paddle_dp.assembly.initial import load_full
from paddle_dp.axes.meta_init import size_of
from paddle_dp.batch import Batch
from paddle_dp.certificate.verified import facts_of, verdict_record
from paddle_dp.checkpoint import Checkpoint, load
from paddle_dp.checks.repeats import compute_without_exchange
from paddle_dp.data import Sampler
from paddle_dp.errors import JobError, PaddleDPError, TracingError, UsageError, gist
from paddle_dp.identity.consistency import data_of_main
from paddle_dp.launch.machine import available_memory
from paddle_dp.learner import Learner, Task
from paddle_dp.mesh import Mesh, join
from paddle_dp.mesh.mesh import seed_ranks
from paddle_dp.model.initial_weights import draw
from paddle_dp.proof import noise
from paddle_dp.proof.dependence import Curve, Dependence, find_dependence, kinks, trained_curve
from paddle_dp.proof.rehearsal import rehearse
from paddle_dp.proof.replay import replay
from paddle_dp.proof.samples import evaluated_samples, first_samples
from paddle_dp.proof.sides import Side, common_failure
from paddle_dp.proof.trace_files import NoiseFloors, SheetWriter, Trace
from paddle_dp.proof.watched import RunResults, RunSettings, WatchedRun
from paddle_dp.recipe import Guard, LoaderSettings, Precision, Recipe
from paddle_dp.text import gigabytes
from paddle_dp.train.meter import peak_memory
from paddle_dp.train.state import progress_of, restore

MEMORY, DISK = 40, 210  # bytes per parameter that a process holds, and per parameter of the whole model


def check_fits(
    parameters: int,
    parameters_by_rank: Sequence[int],
    memory: int | None,
    disk: int,
    folder: str,
    wide: bool = True,
) -> None:
    """Raises UsageError if a side does not fit.

    `parameters`: of the whole model, which one process holds; `parameters_by_rank`: of each rank. `memory` (None: not
    known) and `disk`, in `folder`: free bytes. Without `wide` there is no float64, which needs twice as much.
    """
    each, written = (MEMORY, DISK) if wide else (MEMORY // 2, DISK // 2)
    model = f"{parameters / 1e6:.1f} million parameters"
    needed, alone, count = each * sum(parameters_by_rank), each * parameters, len(parameters_by_rank)
    if memory is not None and max(needed, alone) > memory:
        ranks = f"{count} ranks take {gigabytes(needed)}, and then " if count > 1 else ""
        parts = ", let each rank hold a part (strategy.sharding, tensor or pipeline)"
        advice = parts if alone <= memory else ""
        raise UsageError(
            f"this comparison does not fit into memory: for a model of {model}, {ranks}one process takes "
            f"{gigabytes(alone)}, some {each} bytes for each parameter that a process holds, and {gigabytes(memory)} "
            f"are free. End other programs here{advice}, or compare a smaller model of the same layers (docs/proof.md)."
        )
    if written * parameters > disk:
        raise UsageError(
            f"this comparison does not fit on the disk: until it ends it keeps {gigabytes(written * parameters)} in "
            f"{folder}, some {written} bytes for each of {model}, and {gigabytes(disk)} are free there. Set TMPDIR to "
            "a folder with more room."
        )


def trace(recipe: Recipe, options: dict[str, Any]) -> None:
    """Writes the sheets of a side to options["trace"]; rank 0 also writes side.json. For ranks that round their
    gradients, one process trains once more, with their gradients.

    Options: "ranks", the larger side's number of ranks, so that both sides read the same batches; "steps", the number
    of steps in the recipe's precision; "wide", two steps in float64; "failed", the reason against it, if some ranks
    failed there (proof.sides); "measure_memory" of each rank; "rehearse", the training afterwards (proof.rehearsal);
    "start", the path of a checkpoint that replaces the initial state; "alone", whether this is the one process. For it:
    "candidates", the sides with updates that it repeats, [folder, ranks] each (proof.replay), and "tensor", the largest
    degree of their tensor axes. "patch": "module:function", called first.
    """
    if patch := options.get("patch"):
        module, _, function = patch.partition(":")
        getattr(import_module(module), function)()
    full = recipe
    # A guard judges updates, which are compared here, and its rewind would require a callback that saves. All batches
    # have their full size: the same sampler cuts a ramp's.
    train = replace(recipe.train, batch_ramp=None)
    recipe = recipe.model_copy(update={"guard": Guard(), "train": train})
    if options["alone"]:  # a callback may require a layout, which the ranks have checked
        recipe = recipe.model_copy(update={"callbacks": []})
    side = RecordedSide(recipe, options)
    facts: dict[str, Any] = {"failed": options.get("failed")}
    if options.get("wide", True):
        try:
            side.run("wide")
        except Exception as error:
            if isinstance(error, PaddleDPError) and not isinstance(error, TracingError):
                raise
            mesh, line = side.mesh, user_frame(error)
            facts["failed"] = common_failure(error, side.folder, mesh.rank, mesh.ranks, line=line)
    side.run("own")
    for number, (folder, ranks) in enumerate(options.get("candidates", ())):
        candidate = Side(Path(folder), ranks)
        side.replay(number, candidate, wide=facts["failed"] is None)
    peak = max(side.mesh.gather(peak_memory(side.mesh.device)))
    facts |= {"axes": side.mesh.axes.as_dict(), "memory": peak, "parameters": side.parameters, **side.facts}
    if not options["alone"]:
        facts["verdict record"] = side.verdict_record(full)
    if side.mesh.is_main:
        (side.folder / "side.json").write_text(json.dumps(facts))
    if options.get("rehearse"):
        rehearse(recipe, options)


def first_forward(recipe: Recipe, options: dict[str, Any]) -> None:
    """Builds the recipe's parts, and computes loss and gradients of its first batch; options as for `trace`.

    Raises JobError, exit status 4, for an exception of the user's code, in one sentence with the place in that code.
    """
    doing = "The data set, the model or the optimizer of this recipe cannot be made"
    try:
        side = RecordedSide(recipe.model_copy(update={"callbacks": []}), options)
        learner = side.learner()
        doing = "The model or the loss of this recipe fails on its first batch"
        compute_without_exchange(learner, learner.mixed.cast_batch(next(side.batches(wide=False))))
    except PaddleDPError:
        raise
    except Exception as error:  # noqa: BLE001 - the code is the user's
        frame = user_frame(error)
        failed = JobError(f"{doing}. {type(error).__name__}: {gist(error)}{frame and f' ({frame})'}")
        failed.exit_status = 4
        raise failed from None


class RecordedSide:
    """A recipe in one layout, trained repeatedly from the same initial state. Every method is collective."""

    def __init__(self, recipe: Recipe, options: dict[str, Any]):
        self.recipe, self.options, self.folder = recipe, options, Path(options["trace"])
        train, servers = recipe.train, recipe.strategy.config.servers
        joined = join(train.seed, train.device, train.patience.seconds, servers)
        start = options.get("start")
        self.start: Checkpoint | None = None if start is None else load(Path(start), joined)
        after = None if self.start is None else progress_of(self.start)
        self.subset = first_samples(recipe, options["steps"], options["ranks"], joined, after)
        self.sampler = Sampler.for_dataset(
            self.subset.dataset, train.batch, seed=train.seed, drop_last=train.drop_last
        )
        self.run_settings = RunSettings(recipe.train.precision)
        self.alone: bool = options["alone"]
        splits = {"train": self.subset, "test": evaluated_samples(recipe, options["ranks"], joined)}
        read: dict[str, Any] = {"dataset": splits.__getitem__, "shuffle": False, "drop_last": False}
        read |= {"task": self._task, "loader": LoaderSettings(collate=recipe.loader.collate)}
        read |= {"delivered": self.subset.delivered}
        self.assembly = TrainerBuilder(replace(setup(recipe), **read), joined)
        self.mesh: Mesh = self.assembly.mesh
        self.facts: dict[str, Any] = {}
        self.parameters = 0  # of the whole model
        self._free = available_memory() if joined.device == "cpu" else None  # before a model is built
        self._fits = False
        self._check_fits(size_of(recipe.model.build) or 0, ())

    def _task(self, *_: int) -> Task:
        """The recipe's task with the precision and the noise of the run that begins."""
        train = replace(self.recipe.train, precision=self.run_settings.precision)
        recipe = self.recipe.model_copy(update={"train": train})
        per_epoch = self.sampler.batches
        recipe_task = task(recipe, train.length.steps(per_epoch), per_epoch)
        self.parameters = sum(parameter.size for parameter in recipe_task.model.parameters())
        if self.run_settings.noise is not None and self.start is None:
            draw(recipe_task.model)
            if recipe.load is not None:
                load_full(recipe.load, recipe_task, self.mesh)
            self.run_settings.noise.change(recipe_task.model)
        return replace(recipe_task, compared=True)

    def learner(self) -> Learner:
        """A new learner. The first call raises UsageError if the comparison does not fit into this machine."""
        gc.collect()  # the last learner and its recorder refer to each other, so only the collector frees them
        noisy = self.run_settings.noise
        learner = self.assembly.first_learner(loaded=noisy is not None and self.start is None)
        if self.start is not None:
            restore(self.start, learner)
            seed_ranks(self.recipe.train.seed, self.mesh)  # both sides begin alike, in any layout
            if noisy is not None:
                noisy.change(learner.model)
        if not self._fits:
            here = sum(p.size for _, p in learner.placed.named_parameters() if p._is_initialized())
            self._check_fits(self.parameters, self.mesh.gather(here))
            self._fits = True
        return learner

    def verdict_record(self, recipe: Recipe) -> dict[str, Any]:
        """The record of a verdict on this side, without the result: as of a training of `recipe`. Collective."""
        data, seed = self.subset.dataset, recipe.train.seed
        read = data_of_main(data, seed, recipe.loader, self.mesh)
        samples = self.sampler.samples
        return verdict_record(facts_of(recipe, self.mesh), {"train": {"samples": samples, "read": read}})

    def _check_fits(self, parameters: int, parameters_by_rank: Sequence[int]) -> None:
        """Raises UsageError, on every rank, if one process, or ranks with `parameters_by_rank`, do not fit."""
        self.folder.mkdir(parents=True, exist_ok=True)
        free, disk = self.mesh.gather([self._free, shutil.disk_usage(self.folder).free])[0]
        check_fits(
            parameters, parameters_by_rank, free, disk, str(self.folder), self.options.get("wide", True)
        )

    @cached_property
    def _dependence(self) -> Dependence | None:
        """Determined once, in the precision of the first run."""
        precision = self.run_settings.precision

        def run(kind: noise.Noise | None) -> Curve:
            self.run_settings = RunSettings(precision, kind)
            return trained_curve(self, self.learner(), None if kind is None else kind.order)

        learner = self.learner()
        with kinks(learner) as kinked:
            plain = trained_curve(self, learner, None)
        del learner
        dependence = find_dependence(run, plain, precision.dtype)
        self.facts["dependence"] = None if dependence is None else asdict(dependence)
        self.facts["kinks"] = sorted(kinked)
        return dependence

    def batches(self, wide: bool) -> Iterator[Batch]:
        """The first global batches; in float64 only the first, and the one with unequal shares."""
        loader = self.assembly.train_loader
        if not wide:
            yield from loader.read(0)
            return
        for start in sorted({0, loader.batches - 1}):
            self.subset.read.clear()  # drops samples that the loader read ahead
            yield next(loader.read(0, start))

    def _precision(self, name: str) -> Precision:
        return Precision(dtype="float64") if name == "wide" else self.recipe.train.precision

    def run(self, name: str, follows: Trace | None = None, folder: Path | None = None) -> None:
        """Does the run of a trace and, on one process, its runs with noise; `folder`: in place of the side's."""
        begun, precision = time.perf_counter(), self._precision(name)
        with SheetWriter(folder or self.folder, name, self.mesh.rank) as sheet:
            self.run_settings = RunSettings(precision, follows=follows)
            results = WatchedRun(self, name == "wide", sheet.put).run()
            facts = results | {"numbers": sheet.numbers, "dtype": precision.dtype}
            facts |= {"dp_rank": self.mesh.dp_rank, "coords": self.mesh.coords}
            sheet.group("copy", facts.pop("copies"))
            sheet.group("output", facts.pop("outputs"))
            self.facts |= {name: facts.pop(name) for name in ("differences", "rounds_to")}
            facts |= self._noise(name == "wide", sheet, results)
            sheet.finish(facts | {"seconds": time.perf_counter() - begun})

    def _noise(self, wide: bool, sheet: SheetWriter, results: RunResults) -> dict[str, Any]:
        """Does the runs with noise; writes each element's largest distance from `results` to the sheet."""
        precision = self.run_settings.precision
        # The first update: with the initial weights, on a batch that counts.
        updated = next(iter(results["recorded"]), 1)
        floors, drift = NoiseFloors(sheet), []
        if self.mesh.ranks == 1:
            kinds = noise.kinds(precision.dtype, self.options["ranks"], self.options.get("tensor", 1))
            follows, dependence = self.run_settings.follows, self._dependence
            if dependence is not None:  # other kinds would change something in exact arithmetic, too
                kinds = (kind for kind in kinds if dependence.kind == "order" and kind.order is None)
            for kind in kinds:
                self.run_settings = RunSettings(precision, kind, follows)
                noisy = WatchedRun(self, wide, floors.put).run(None if wide or kind.all_steps else updated)
                floors.outputs(noisy["outputs"])
                drift += [noisy["rows"]] if kind.all_steps and not wide else []
        return {"noise": floors.norms, "drift": drift}

    def replay(self, number: int, candidate: Side, wide: bool) -> None:
        """Repeats the candidate's updates, without `wide` not those in float64, and writes them to replay<number>. If
        its ranks round, trains with their gradients, too, each step from their weights, and writes follow<number>."""
        for name in ("wide", "own") if wide else ("own",):
            ranks_trace = candidate.trace(name)
            if ranks_trace is not None:
                self.run_settings = RunSettings(self._precision(name))
                with SheetWriter(self.folder / f"replay{number}", name, 0) as sheet:
                    replay(self.learner(), ranks_trace, sheet.put, wide=name == "wide")
                    sheet.finish({})
        if candidate.rounds_to is not None:
            self.run("own", candidate.trace("own"), self.folder / f"follow{number}")
