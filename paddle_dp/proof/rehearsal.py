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
from paddle_dp.proof.trace import short
from paddle_dp.recipe import LoaderSettings, Recipe
from paddle_dp.train import Callback, Moment
from paddle_dp.train.assemble import Assembly, Setup, Split
from paddle_dp.train.build import setup
from paddle_dp.train.trainer import Trainer
from paddle_dp.units import Length

EVALUATED, SAVED, STEPS = 1, 2, 5  # after which step; an epoch has 3
K = 8.0  # times one process's own noise
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


class Watch(Callback):
    """Writes down each step's loss, gradient norm and samples."""

    def __init__(self, samples: Few, mesh: Mesh):
        self.samples, self.mesh = samples, mesh
        self.rows: list[dict[str, Any]] = []

    def step(self, moment: Moment) -> None:
        numbers = moment.numbers
        read = sorted({n for some in self.mesh.gather(list(self.samples.read)) for n in some})
        self.samples.read.clear()
        self.rows.append({"step": moment.progress.step, "loss": numbers["loss"], "read": read,
                          "gradient_norm": numbers["gradient_norm"]})  # fmt: skip


def rehearse(recipe: Recipe, options: dict[str, Any]) -> None:
    """A task of every rank: rehearses this side and leaves rehearsal.json in options["trace"].

    options["ranks"] is the larger side's number of ranks. One process is not interrupted, and does it again with
    weights that are one unit in the last place off: its own noise.
    """
    joined = join(seed=recipe.train.seed, device=recipe.train.device)
    folder = Path(options["trace"])
    stage = Stage(replace(setup(recipe), folder=folder / "run"), joined, options["ranks"])
    if joined.ranks == 1:
        told: dict[str, Any] = {"plain": stage.plain(), "noise": [stage.plain(nudged(seed)) for seed in (1, 2)]}
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
        name: hashlib.blake2b(piece.array.tobytes(), digest_size=8).hexdigest() for name, piece in tensors.items()
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
    """The first thing in which two rehearsals differ: after which step, what kind of thing, and a sentence."""

    step: int
    kind: str  # samples, loss, evaluation, resume
    sentence: str


def first_difference(one: dict[str, Any], many: dict[str, Any], ranks: int) -> Difference | None:
    """None where `ranks` ranks, interrupted and resumed, did what one process did without interruption."""
    return next(differences(one, many, ranks), None)


def differences(one: dict[str, Any], many: dict[str, Any], ranks: int) -> Iterator[Difference]:
    """All of them, in the order of the rehearsal. Numbers may be K times as far apart as one process strays."""
    plain, noisy = one["plain"], one["noise"]
    for n, (a, b) in enumerate(zip(plain["rows"], many["rows"], strict=True)):
        if found := _row(a, b, [run["rows"][n] for run in noisy], ranks):
            yield found
    held = [run["evaluation"] for run in noisy]
    yield from _held_out(plain["evaluation"], many["evaluation"], held, f"{ranks} ranks")
    yield from _resumed(many)


def _row(one: dict[str, Any], many: dict[str, Any], noisy: list[dict[str, Any]], ranks: int) -> Difference | None:
    step = one["step"]
    if one["read"] != many["read"]:
        more, less = sorted({*many["read"]} - {*one["read"]}), sorted({*one["read"]} - {*many["read"]})
        epoch = 1 + (step - 1) // 3
        said = f"step {step}, epoch {epoch}: {ranks} ranks read other samples than one process: {_some(more)} more, {_some(less)} less"
        return Difference(step, "samples", said)
    for name in ("loss", "gradient_norm"):
        if not _near(one[name], many[name], [row[name] for row in noisy]):
            after = {EVALUATED + 1: ", after the evaluation", SAVED + 1: ", after the checkpoint"}.get(step, "")
            said = f"step {step}{after}: {name.replace('_', ' ')} {one[name]:.9g} on one process, {many[name]:.9g} on {ranks} ranks"
            return Difference(step, "loss", said)
    return None


def _held_out(
    one: dict[str, float], many: dict[str, float], noisy: list[dict[str, float]], who: str
) -> Iterator[Difference]:
    for name, number in one.items():
        if not _near(number, many[name], [held[name] for held in noisy]):
            said = f"held out: {name} {number:.9g} on one process, {many[name]:.9g} on {who}, with equal weights"
            yield Difference(STEPS, "evaluation", said)


def _resumed(many: dict[str, Any]) -> Iterator[Difference]:
    resumed = many["resumed"]
    for a, b in zip(many["rows"][SAVED:], resumed["rows"], strict=True):
        if a != b:
            words = [name for name in ("read", "loss", "gradient_norm") if a[name] != b[name]]
            what = {"read": "other samples", "loss": "another loss", "gradient_norm": "another gradient"}[words[0]]
            said = f"step {a['step']} has {what} after a resume from the checkpoint of step {SAVED}"
            yield Difference(a["step"], "resume", said)
            return
    if resumed["changed"] or resumed["evaluation"] != many["evaluation"]:
        where = f" in '{resumed['changed'][0]}'" if resumed["changed"] else ""
        more = f" and {len(resumed['changed']) - 1} more" if len(resumed["changed"]) > 1 else ""
        said = f"resumed from the checkpoint of step {SAVED}, the run ends in other bits{where}{more}"
        yield Difference(STEPS, "resume", said)


def _near(one: float, many: float, noisy: list[float]) -> bool:
    """Whether a number is at most K times as far off as one process strays by itself, or is the same infinity."""
    if one == many or (one != one and many != many):
        return True
    allowed = max([abs(other - one) for other in noisy] + [2.0**-23 * abs(one)])
    return bool(abs(one - many) <= K * allowed)


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:3])) + (" …" if len(numbers) > 3 else "") if numbers else "none"
