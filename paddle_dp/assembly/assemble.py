"""Assembles a training, strategy → mesh → loaders → learner → trainer: for recipes, scripts and proofs alike."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import paddle

from paddle_dp import checkpoint as checkpoints
from paddle_dp.assembly import sample_trial
from paddle_dp.assembly.initial import initial_weights, other_settings
from paddle_dp.batch import leaves, mapped
from paddle_dp.certificate.certificate import CertificateWriter, with_proof
from paddle_dp.checkpoint import node_copies
from paddle_dp.checks.samplewise import SAMPLES, Findings, is_known
from paddle_dp.core.metric import Metric, metrics_of
from paddle_dp.core.optimizer import check_within
from paddle_dp.data import Loader, Sampler
from paddle_dp.data.sample import read_samples
from paddle_dp.data.sampler import is_ordered
from paddle_dp.data.scatter import Elsewhere, ReadByMain, is_in_order, share
from paddle_dp.data.sources import refuse_targets, sources_targets
from paddle_dp.errors import UsageError
from paddle_dp.identity import consistency, same_run
from paddle_dp.identity.facts import TrainingSettings
from paddle_dp.identity.walk import checksum
from paddle_dp.learner import Learner, Strategy, Task
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.environment import MEMORY
from paddle_dp.mesh.mesh import seed_ranks
from paddle_dp.part import read_part
from paddle_dp.recipe import Load, LoaderSettings, write_recipe
from paddle_dp.text import plural
from paddle_dp.train.callback import Callback
from paddle_dp.train.run import Run
from paddle_dp.train.state import progress_of
from paddle_dp.train.training_state import TrainingState

_REMEMBERS = (
    "the value of {}, which a forward changes: it is plain Python, separate on each rank and in no checkpoint "
    "(register_buffer makes a buffer)"
)
_TWICE = (
    "{} is changed in the forward of a block that recompute runs twice, and the second time it is another one, with "
    "other gradients: keep it in a buffer (register_buffer), which is put back, or set strategy.recompute=none"
)
_LATER = (
    "{} is written in the forward of a block, and in a pipeline other micro-batches run forward before backward reads "
    "it, so gradients differ: keep it in a buffer (register_buffer), of which each forward has a copy, or set "
    "train.micro_batches=1"
)
_TRIALS = count()  # a script may make several trainers, and an attempt makes them in the same order
_LARGE = 1e9  # bytes of weights from which it matters that each rank builds them all
_FULL_MODEL_NOTICE = (
    "Every rank builds the whole model, {:.1f} GB, before it keeps its part: {}. A model whose constructor only makes "
    "layers is built part by part (docs/parallelism.md)."
)
T = TypeVar("T", bound=TrainingState)
Split = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class TrainerSpec(TrainingSettings):
    """The settings of a training, and functions that make its parts.

    `dataset(split)` gives a data set or None, `task(steps, steps_per_epoch)` the task, `callbacks(run)` the callbacks
    of the run. `metrics`: (setting, metric). `delivered` is called with the split and the samples that this rank gets
    from rank 0, if that reads for all.
    """

    name: str
    folder: Path
    dataset: Callable[[Split], Any]
    task: Callable[[int, int], Task]
    load: Load | None = None
    loader: LoaderSettings = field(default_factory=LoaderSettings)
    callbacks: Callable[[Run], Sequence[Callback]] = lambda run: ()
    metrics: Sequence[tuple[str, Any]] = ()
    delivered: Callable[[Split, Any], None] | None = None


class TrainerBuilder:
    """Builds the parts of one training on this rank, each on first access, with the strategy's mesh.

    The constructor and each first access are collective. Raises UsageError for a layout that the recipe does not allow.
    """

    def __init__(self, setup: TrainerSpec, mesh: Mesh):
        self.setup = setup
        # Differences from one process that are known before the model is placed.
        self._warnings: list[str] = []
        self._fingerprints: dict[str, dict[str, str]] = {}  # by split, of the data sets opened so far
        self._first: dict[Loader, Any] = {}  # inputs of the first samples
        self._targets: dict[str, Any] = {}  # of the first sample of each of a data set's sources
        self._findings: Findings | None = None  # of the task's trial
        self._identity: Mapping[str, Any] | None = None  # of a recipe's or a script's training
        self.metrics: tuple[Metric, ...] = ()  # of evaluations, from when the loss is known
        consistency.compare_setups(setup, mesh)
        for component in (setup.requested.strategy, *setup.requested.callbacks):
            component.refuse(setup.requested, mesh.ranks, mesh.computes_on)
        _refuse_guard(setup)
        if setup.requested.mix and setup.loader.collate == "batch":
            raise UsageError(
                "mix and loader.collate: batch both make something of a whole global batch: leave mix out, and mix in "
                "collate_fn; or leave loader.collate out."
            )
        self.strategy: Strategy = setup.requested.strategy.build(mesh)
        # Its axes decide which ranks read the same samples and share random numbers.
        self.mesh = self.strategy.mesh

    @cached_property
    def train_loader(self) -> Loader:
        """The training data in micro-batches, shuffled unless it must be read in order."""
        s, dataset = self.setup, self._opened("train", "training")
        if s.requested.mix and is_in_order(dataset):
            raise UsageError(
                "mix needs the last sample of a global batch with its first one, and a stream is read in its order: "
                "give a data set with len() and [i], or leave mix out."
            )
        if s.loader.samples and not is_in_order(dataset):
            raise UsageError(
                f"loader.samples: {s.loader.samples} would be the samples of a stream's epoch, and the training data "
                "is no stream: an epoch has all of its samples. Leave it out. For shorter epochs, give the data set a "
                "method epoch_order(seed, epoch), or fewer samples."
            )
        shuffle = s.shuffle and not is_in_order(dataset)
        is_within = not is_ordered(dataset) and callable(getattr(dataset, "epoch_order", None))
        if shuffle and self.mesh.is_main and is_within:
            name, order = type(dataset).__name__, "epoch_order of the data set within it"
            print(
                f"{name} hands out {order}, and has none itself: an epoch has all {len(dataset)} samples, in a random "
                f"order. To keep the other order, give {name} a method epoch_order.", file=sys.stderr, flush=True,
            )  # fmt: skip
        cutting = {"drop_last": s.drop_last, "micro_batches": s.requested.train.micro_batches}
        ramp = s.requested.train.batch_ramp
        return self._loader("train", dataset, seed=s.seed, shuffle=shuffle, ramp=ramp, **cutting)

    @cached_property
    def test_loader(self) -> Loader | None:
        """The held-out samples to evaluate, each once, in order; None without held-out data."""
        dataset, requested = self._opened("test", "held-out"), self.setup.requested.evaluation
        if dataset is None:
            return None
        available = len(dataset)
        samples = min(requested.samples or available, available)
        if samples < available and is_in_order(dataset):
            raise UsageError(
                f"evaluation.samples: the {samples} samples are spread over the held-out data, and a stream is read in "
                "its order: leave it out, and let the data set end earlier."
            )
        chosen = {"samples": samples, "dataset_samples": available} if samples < available else {}
        return self._loader("test", dataset, requested.batch, seed=self.setup.seed, shuffle=False, **chosen)

    def _opened(self, split: Split, data_name: str) -> Any:
        """Opens the data set of a split, or its stand-in on ranks that do not read it, and takes its fingerprint.
        Collective."""
        s = self.setup
        if s.scatters:
            dataset = Elsewhere.for_rank(s.dataset(split) if self.mesh.is_main else None, self.mesh)
            fingerprint = consistency.data_of_main(dataset, s.seed, s.loader, self.mesh)
        else:
            dataset = s.dataset(split)
            fingerprint = consistency.compare_data(data_name, dataset, s.seed, s.loader, self.mesh)
        self._fingerprints[split] = fingerprint
        self._warnings += consistency.random_samples(data_name, fingerprint)
        _refuse_empty(split, dataset)
        self._targets |= sources_targets(dataset, s.seed)
        return dataset

    @property
    def _scatters(self) -> bool:
        return self.setup.scatters and self.mesh.ranks > 1

    @property
    def total_steps(self) -> int:
        """The number of updates of the whole training; 0 if only `fit` will get a length. Raises UsageError for a part
        of an epoch that is less than half an update."""
        length, sampler = self.setup.length, self.train_loader.sampler
        steps = sampler.updates(length) if length else 0
        if length and not steps:
            key = "Trainer.of.length" if self.setup.is_script else "train.length"
            raise UsageError(
                f"{key}: '{length}' is no training: an epoch has {plural(sampler.batches, 'update')}, and this is less "
                "than half of one. Give a longer one, or steps."
            )
        return steps

    def learner(self) -> Learner:
        """The placed task, to load a checkpoint into: only an adapter's base weights are loaded. Afterwards ranks draw
        different random numbers (`seed_ranks`). Collective."""
        task = self._task(1, 1)
        return self._begun(task, self.setup.load if task.base else None, verbose=False)

    def first_learner(self, loaded: bool = False) -> Learner:
        """The placed task with a new training's weights. `loaded`: the task's model has them already. Collective."""
        task = self._tried(self._task(1, 1))
        return self._begun(task, None if loaded else self.setup.load, verbose=False)

    def _task(self, steps: int, steps_per_epoch: int) -> Task:
        """The task before placement, the same on every rank. Collective."""
        task = self.setup.task(steps, steps_per_epoch)
        task = replace(task, samples=self._samples, known_differences=tuple(self._warnings))
        check_within(task.optimizer, task.loss.function, task.model)
        consistency.compare_task(task, self.mesh)
        refuse_targets(self._targets, task.loss.function)
        self.metrics = metrics_of(self.setup.metrics, task.loss.function)
        return task

    def _tried(self, task: Task) -> Task:
        """Adds the findings of a trial in another process to the task. Collective. Raises UsageError or LossError, on
        every rank, if the trial refuses the task."""
        config = self.setup.requested.strategy.config
        divided = self.mesh.dp_size > 1 or config.batch_chunks > 1
        if self.mesh.ranks == 1 and not divided and not config.chained and is_known(task.loss):
            return task
        if self._findings is None:
            loader = self.train_loader  # opened by all ranks together
            rank = 0 if self._scatters else self.mesh.readers[0]
            here = self._trial(task, loader, divided, config.chained) if self.mesh.rank == rank else None
            self.mesh.wait("the trial of the model")  # it may take longer than a collective waits
            self._findings = sample_trial.understood(self.mesh.gather(here)[rank])
        notes = self._findings
        written = self._written_in_blocks(task, notes.in_blocks)
        for setting, sentence in written.items() if self.mesh.is_main else ():
            print(f"{setting}: {sentence}", file=sys.stderr, flush=True)
        if notes.derivative_error and self.test_loader is not None and self.mesh.is_main:
            evaluates = any(entry.name == "evaluate" for entry in self.setup.requested.callbacks)
            which = "the first evaluation will" if evaluates else "an evaluation would"
            print(f"{which} end with this: {notes.derivative_error}", file=sys.stderr, flush=True)
        return replace(
            task,
            known_differences=(*task.known_differences, *notes.differences, *written.values()),
            unknown=[*notes.unknown, *(map(_REMEMBERS.format, notes.remembers[:1]) if divided else ())],
            lendable=notes.lendable,
            remembers=notes.remembers,
        )

    def _written_in_blocks(self, task: Task, names: Sequence[str]) -> dict[str, str]:
        """By setting, a sentence on what the forward of a block changes and backward would read too late."""
        config, sentences = self.setup.requested.strategy.config, {}
        if config.recompute.blocks and names:
            sentences["strategy.recompute"] = _TWICE.format(names[0])
        weights = {f"model.{name}" for name, _ in task.model.named_parameters()}
        frozen = [name for name in names if name in weights]
        if config.chained == "strategy.pipeline" and frozen and self.setup.requested.train.micro_batches > 1:
            sentences["strategy.pipeline"] = _LATER.format(frozen[0])
        return sentences

    def _trial(self, task: Task, loader: Loader, divided: bool, chained: str) -> dict[str, Any]:
        folder = self.setup.folder
        if self.mesh.device != "cpu":
            if self.setup.recipe is None or not folder.is_dir():
                return {"failed": "a script's model is not tried on an accelerator"}
            recipe = folder / f".trial.{os.getpid()}.yaml"
            write_recipe(self.setup.recipe, recipe)
            try:
                return sample_trial.in_process(recipe, divided, chained)
            finally:
                recipe.unlink()
        data = loader.dataset.dataset if isinstance(loader.dataset, ReadByMain) else loader.dataset
        most = 2 if is_in_order(data) else min(SAMPLES, self.setup.batch)  # a stream may be read once only
        indices, mixes = loader.sampler.order(0)[:most].tolist(), self.setup.requested.mix is not None
        first = sample_trial.first_samples(loader.dataset, indices, self.setup.seed, mixes)
        run = partial(sample_trial.in_fork, task, first, divided, chained)
        if self._identity is None:
            return run()
        sums = [checksum(array.numpy().tobytes()) for array in leaves([first.inputs, first.targets])]
        return sample_trial.once_a_job(
            [self._identity, self.mesh.axes.as_dict(), sums, divided, chained, next(_TRIALS)], run
        )

    def _placed(self, task: Task) -> Learner:
        if task.full_model_reason and self.mesh.is_main:
            size = sum(p.size * p.element_size() for p in task.model.parameters())
            if size >= _LARGE:
                print(_FULL_MODEL_NOTICE.format(size / 1e9, task.full_model_reason), flush=True)
        learner = self.strategy.place(task)
        seed_ranks(self.setup.seed, self.mesh)
        return learner

    def _begun(self, task: Task, load: Load | None, *, verbose: bool) -> Learner:
        """The placed task with the weights of `load`; `verbose`: print a table of them. Collective."""
        learner, lines = begin(task, self._placed, load)
        if load is not None and self.mesh.is_main and verbose:
            if self.setup.recipe is not None:
                lines += other_settings(Path(load.path).expanduser(), self.setup.recipe.model.settings)
            print("\n".join(lines), flush=True)
        return learner

    def _samples(self) -> Any:
        """The inputs of the first two samples, held-out ones if the training data is not open yet. Collective."""
        is_train_open = "train_loader" in vars(self) or self.test_loader is None
        loader = self.train_loader if is_train_open else self.test_loader
        assert loader is not None, "there is training data"
        if loader not in self._first:
            inputs: Any = None
            if loader.reads is not None:
                indices = np.arange(min(2, len(loader.dataset)))
                inputs, _ = read_samples(loader.dataset, indices, self.setup.seed, 0)
            self._first[loader] = share(self.mesh, inputs) if self._scatters else inputs
        return mapped(paddle.to_tensor, self._first[loader])

    def trainer(self, kind: Callable[..., T], resume: str | None = None, accept: Sequence[str] = ()) -> T:
        """A trainer ready to fit, new or resumed from a checkpoint.

        `resume`: None, "newest", "best" or a checkpoint's path. `accept`: settings that may differ from the
        checkpoint's. Raises UsageError or CheckpointError when no checkpoint fits.
        """
        options = {"resume": resume, "accept": sorted(accept)}
        consistency.compare(options, self.mesh, "Resume from the same checkpoint on every node.")
        resumed = find_checkpoint(self.setup.folder, resume, self.mesh) if resume else None
        if resumed is not None:
            progress_of(resumed)  # refuses a newer version's checkpoint
            consistency.compare_checkpoints(resumed, self.mesh)
        loaders = {"train": self.train_loader, "test": self.test_loader}
        task = self._task(self.total_steps, self.train_loader.batches)
        changes: list[str] = []
        identity = same_run.identity(self.setup, task, self.mesh, loaders, self._fingerprints)
        self._identity = identity.state()
        if resumed is not None:
            with checkpoints.content_of(resumed.folder):
                updates = self.train_loader.sampler.updates
                changes, identity = same_run.compare(
                    resumed, identity, task, self.setup, self.mesh, updates, accept
                )
        requested = self.setup.requested
        run = Run(
            name=self.setup.name,
            folder=self.setup.folder,
            mesh=self.mesh,
            train_loader=self.train_loader,
            test_loader=self.test_loader,
            recipe=self.setup.recipe,
            resumed=resumed,
            total_steps=self.total_steps,
            layout=requested.strategy.config.layout(self.mesh.ranks),
            identity=identity,
            changes=tuple(changes),
            metrics=self.metrics,
        )
        run = with_proof(run)
        # Checkpoints do not hold the weights of an adapter's base.
        load = self.setup.load if resumed is None or task.base else None
        learner = self._begun(self._tried(task), load, verbose=resumed is None)
        report = read_part("callbacks", {"use": "report"})
        trainer = kind(
            learner,
            self.train_loader,
            [*self.setup.callbacks(run), CertificateWriter(run), report.build(run)],
            run=run,
            check_every=requested.strategy.config.check_every,
            guard=requested.guard,
        )
        if requested.ema is not None:
            trainer.keep_averages(requested.ema)
        if resumed is not None:
            trainer.restore(resumed)
        return trainer

    def _loader(self, split: Split, dataset: Any, batch: int | None = None, **sampling: Any) -> Loader:
        settings, hook = self.setup.loader, self.setup.delivered
        sampler = Sampler.for_dataset(dataset, batch or self.setup.batch, self.mesh, **sampling)
        if self._scatters:
            dataset = ReadByMain(dataset, self.mesh, None if hook is None else partial(hook, split))
        return Loader(
            dataset,
            sampler,
            num_workers=settings.num_workers,
            prefetch=settings.prefetch,
            timeout=settings.timeout.seconds,
            global_batches=settings.collate == "batch",
            mix=self.setup.requested.mix if split == "train" else None,
        )


def _refuse_empty(split: str, dataset: Any) -> None:
    if dataset is not None and not len(dataset):
        else_none = " To hold nothing out, let it be None." if split == "test" else ""
        raise UsageError(f"dataset: the {split} split is empty: its len() is 0.{else_none}")


def _refuse_guard(setup: TrainerSpec) -> None:
    requested = setup.requested
    if requested.guard.recompute is not None and requested.train.dropout != "exact":
        raise UsageError(
            "guard.recompute compares ranks that draw the same masks: set train.dropout=exact, or leave "
            "guard.recompute out."
        )
    saves = any(entry.name == "checkpoint" for entry in requested.callbacks) or setup.script_callbacks
    if requested.guard.non_finite == "rewind" and not saves:
        raise UsageError(
            "guard.non_finite is rewind, and no callback saves a checkpoint to go back to: add "
            "{use: checkpoint, every: …} to the callbacks."
        )


def begin(
    task: Task, make_learner: Callable[[Task], Learner], load: Load | None
) -> tuple[Learner, list[str]]:
    """Places a task, with the weights of `load`. Returns the learner, and the table of these weights. Collective."""
    fill = None if load is None else initial_weights(load, task)
    learner = make_learner(task)
    return learner, [] if fill is None else fill(learner.placed)


def find_checkpoint(folder: Path, which: str, mesh: Mesh) -> checkpoints.Checkpoint:
    """The verified checkpoint of the run in `folder`; `which`: "newest", "best", a path, or a generation in the memory
    of the job's nodes (checkpoint/node_copies.py). Collective."""
    if node_copies.SPEC.fullmatch(which):
        return checkpoints.load(node_copies.complete(which, mesh, os.environ.get(MEMORY, "")), mesh)
    return checkpoints.load(checkpoints.find(which, folder / "checkpoints", mesh), mesh)
