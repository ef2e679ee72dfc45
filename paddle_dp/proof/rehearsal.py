"""The training itself, rehearsed: what a comparison of first steps cannot see.

Two epochs of three global batches each, the last of them short, with an evaluation after the first step and a
checkpoint after the second; then a resume from it in a freshly built model. On one process neither an evaluation nor a
checkpoint interrupts it. So what an evaluation or a checkpoint changes, what a second epoch reads, what is held out and
how often, and what a checkpoint forgets, all show as a difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddle_dp.checkpoint import save
from paddle_dp.mesh import Mesh, join
from paddle_dp.parallel import Task
from paddle_dp.proof.compare import EPS, K
from paddle_dp.proof.shares import short
from paddle_dp.recipe import LoaderSettings, Recipe
from paddle_dp.train import Callback, Moment
from paddle_dp.train.assemble import Assembly, Setup, Split
from paddle_dp.train.build import setup
from paddle_dp.train.trainer import Trainer
from paddle_dp.units import Length

EVALUATED, SAVED, STEPS = 1, 2, 5  # after which step
EPOCH = 3  # global batches
HELD_OUT = 3  # times the ranks, and one more: no number of ranks shares them equally


@dataclass(frozen=True)
class Few:
    """The first samples of a data set, as a data set; `read` has the numbers of those that were asked for."""

    dataset: Any
    count: int
    read: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        self.read.append(int(i))
        return self.dataset[int(i)]


_TOLD = {  # numbers of a step, as sentences call them
    "lr": "learning rate", "loss_scale": "loss scale", "loss": "loss", "gradient_norm": "gradient norm",
}  # fmt: skip


class Watch(Callback):
    """Writes down each step's loss, gradient norm and samples."""

    def __init__(self, samples: Few, mesh: Mesh):
        self.samples, self.mesh = samples, mesh
        self.rows: list[dict[str, Any]] = []

    def start(self, moment: Moment) -> None:
        self.samples.read.clear()  # some were looked at, to compare the ranks' data sets

    def step(self, moment: Moment) -> None:
        numbers = moment.numbers
        read = sorted({n for some in self.mesh.gather(list(self.samples.read)) for n in some})
        self.samples.read.clear()
        told = {name: numbers[name] for name in _TOLD if name in numbers}
        self.rows.append({"step": moment.progress.step, "read": read, **told})


def rehearse(recipe: Recipe, options: dict[str, Any]) -> None:
    """A task of every rank: rehearses this side and leaves rehearsal.json in options["trace"].

    options["ranks"] is the larger side's number of ranks. One process is not interrupted, and does it again with
    weights that are one unit in the last place off: its own noise.
    """
    joined = join(seed=recipe.train.seed, device=recipe.train.device)
    folder = Path(options["trace"])
    stage = Stage(replace(setup(recipe), folder=folder / "run"), joined, options["ranks"])
    if joined.ranks == 1:
        noise = [stage.plain(nudged(seed)) for seed in (1, 2)]
        told = {"plain": stage.plain(), "noise": noise, "dtype": recipe.train.precision.dtype}
    else:
        told = stage.interrupted()
    if joined.is_first:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rehearsal.json").write_text(json.dumps(told))


class Stage:
    """Where one side is rehearsed: its recipe, cut down to a few samples, and its ranks."""

    def __init__(self, setup: Setup, mesh: Mesh, ranks: int):
        self.setup, self.mesh = setup, mesh
        self.batch = setup.batch
        self.held_out = HELD_OUT * ranks + 1
        self.short = short(self.batch, ranks)

    def plain(self, change: Callable[[Task], None] = lambda task: None) -> dict[str, Any]:
        """One process from the first step to the last, evaluated then."""
        trainer, watch = self._trainer(change=change)
        trainer.fit(Length(STEPS, "steps"))
        return self._told(trainer, watch)

    def interrupted(self) -> dict[str, Any]:
        """The ranks, evaluated and saved on their way, and resumed from there."""
        trainer, watch = self._trainer()
        trainer.fit(Length(EVALUATED, "steps"))
        if trainer.run.test_loader is not None:
            trainer.evaluate()
        trainer.fit(Length(SAVED, "steps"))
        save(trainer.snapshot(), self.setup.folder / "checkpoints", trainer.mesh)
        trainer.fit(Length(STEPS, "steps"))
        ended = digests(trainer)
        told = self._told(trainer, watch)
        again, watch = self._trainer(resume="newest")
        again.fit(Length(STEPS, "steps"))
        changed = sorted(name for name, bits in digests(again).items() if ended.get(name) != bits)
        names = sorted({name for names in trainer.mesh.gather(changed) for name in names})
        return told | {"resumed": {**self._told(again, watch), "changed": names}}

    def _trainer(
        self, resume: str | None = None, change: Callable[[Task], None] = lambda task: None
    ) -> tuple[Trainer, Watch]:
        found: list[Few] = []

        def dataset(split: Split) -> Any:
            whole = self.setup.dataset(split)
            wanted = 2 * self.batch + self.short if split == "train" else self.held_out
            few = None if whole is None else Few(whole, min(wanted, len(whole)))
            if few is not None and split == "train":
                found.append(few)
            return few

        def task(steps: int, steps_per_epoch: int) -> Task:
            made = self.setup.task(steps, steps_per_epoch)
            change(made)
            return made

        watches: list[Callback] = []

        def callbacks(run: Any) -> list[Callback]:
            watches.append(Watch(found[0], run.mesh))
            return watches

        settings = replace(
            self.setup, dataset=dataset, task=task, callbacks=callbacks, loader=LoaderSettings(), last="keep",
            length=Length(STEPS, "steps"),
        )  # fmt: skip
        trainer = Assembly(settings, self.mesh).trainer(Trainer, resume)
        watch = watches[0]
        assert isinstance(watch, Watch)
        return trainer, watch

    def _told(self, trainer: Trainer, watch: Watch) -> dict[str, Any]:
        held_out = trainer.evaluate() if trainer.run.test_loader is not None else None
        numbers = {} if held_out is None else {**held_out.numbers, "samples": held_out.samples}
        return {"rows": watch.rows, "evaluation": numbers}


def digests(trainer: Trainer) -> dict[str, str]:
    """The bits of what this rank brings to a checkpoint, by name: weights, statistics, optimizer states. Collective."""
    tensors = trainer.snapshot().tensors
    return {
        name: hashlib.blake2b(piece.array.tobytes(), digest_size=8).hexdigest()
        for name, piece in tensors.items()
    }


def nudged(seed: int) -> Callable[[Task], None]:
    """Multiplies every weight of a task with 1 ± one unit in float32's last place; signs are drawn from `seed`."""

    def change(task: Task) -> None:
        draw = np.random.default_rng(seed)
        with paddle.no_grad():
            for parameter in task.model.parameters():
                old = parameter.numpy()
                signs = draw.integers(0, 2, old.shape, np.int8).astype(old.dtype) * 2 - 1
                parameter.set_value((old * (1 + old.dtype.type(2.0**-23) * signs)).astype(old.dtype))

    return change


@dataclass(frozen=True)
class Difference:
    """Something in which two rehearsals differ: after which step, what kind of thing, and a sentence."""

    step: int
    kind: str  # samples, loss, evaluation, resume
    sentence: str


@dataclass(frozen=True)
class Rehearsals:
    """One process's rehearsal beside that of `ranks` ranks; numbers may be K times as far apart as its own noise."""

    one: dict[str, Any]
    many: dict[str, Any]
    ranks: int

    @classmethod
    def read(cls, one: Path, many: Path, ranks: int) -> Rehearsals:
        """From the folders that two sides left."""
        told = [json.loads((folder / "rehearsal.json").read_text()) for folder in (one, many)]
        return cls(told[0], told[1], ranks)

    def first_difference(self) -> Difference | None:
        """None where the ranks, interrupted and resumed, did what one process did without interruption."""
        return next(self._differences(), None)

    def _differences(self) -> Iterator[Difference]:
        """In the order of the rehearsal."""
        yield from self._samples()
        for n, (one, many) in enumerate(zip(self.one["plain"]["rows"], self.many["rows"], strict=True)):
            noisy = [run["rows"][n] for run in self.one["noise"]]
            for name in [name for name in _TOLD if name in one]:
                if not self._near(one[name], many[name], [row[name] for row in noisy]):
                    yield Difference(one["step"], "loss", self._number(one, many, name))
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

    def _number(self, one: dict[str, Any], many: dict[str, Any], name: str) -> str:
        step, what = one["step"], _TOLD[name]
        after = {
            EVALUATED + 1: " (the first after the evaluation)",
            SAVED + 1: " (the first after the checkpoint)",
        }
        return (
            f"step {step}{after.get(step, '')}: {what} {one[name]:.9g} on one process that nothing interrupts, "
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
        resumed, words = self.many["resumed"], {"read": "samples", **_TOLD}
        for before, after in zip(self.many["rows"][SAVED:], resumed["rows"], strict=True):
            changed = [what for name, what in words.items() if not _equal(before.get(name), after.get(name))]
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

    def _near(self, one: float, many: float, noisy: list[float]) -> bool:
        if not (np.isfinite(one) or np.isfinite(many)):  # a sum over ranks makes no number of two infinities
            return True
        allowed = max([abs(other - one) for other in noisy] + [EPS[self.one["dtype"]] * abs(one)])
        return bool(abs(one - many) <= K * allowed)


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other or (one != one and other != other))


def _some(numbers: list[int]) -> str:
    """ "samples 3, 5, 8 and 2 more"."""
    more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    return f"sample{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers[:3])) or 'none'}{more}"


def told(found: Difference | None, ranks: int) -> str:
    """A sentence on two rehearsals."""
    if found is None:
        return (
            f"Rehearsed, SAME: {ranks} ranks that were evaluated, saved and resumed on their way read and learned what "
            "one process does that nothing interrupts."
        )
    return f"Rehearsed, DIFFERENT: {found.sentence}."
