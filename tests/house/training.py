"""A training inside a rank, as most tests of what a layout learns begin: a recipe's text, a folder, and settings."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def build_trainer(
    recipe: str, folder: str, *words: str, resume: bool | str | None = False, seed: int | None = None
) -> Any:
    """In a rank: joins the job, and returns the trainer of a recipe's text, whose run is in `folder`; with `resume`,
    from the newest checkpoint there, or from the named one. `words`: settings, as on the command line.
    `seed`: the recipe's by default."""
    from paddle_dp.assembly.build import build
    from paddle_dp.mesh import join
    from paddle_dp.recipe import read_recipe

    path = Path(folder) / f"recipe-{os.getpid()}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(recipe)
    read = read_recipe(path, [f"output_dir={folder}", *words])
    mesh = join(read.train.seed if seed is None else seed, servers=read.strategy.config.servers)
    return build(read, mesh, resume if isinstance(resume, str) else "newest" if resume else None)


def untried() -> None:
    """In a rank: the trainings that follow begin without a trial of their samples, which has tests of its own."""
    from paddle_dp.assembly.assemble import TrainerBuilder

    TrainerBuilder._tried = lambda self, task: task  # type: ignore[method-assign]


def trained(
    recipe: str, folder: str, *words: str, until: str | None = None, resume: bool | str | None = False
) -> dict[str, Any]:
    """In a rank: trains as `build_trainer` has it, and as `finished` does; saved before the first step, too."""
    from paddle_dp import checkpoint

    trainer = build_trainer(recipe, folder, *words, resume=resume)
    begun = checkpoint.save(trainer.snapshot(), Path(folder) / "begun", trainer.mesh)
    return finished(trainer, folder, until) | {"begun": str(begun)}


def finished(trainer: Any, folder: str, until: str | None = None) -> dict[str, Any]:
    """In a rank: trains, evaluates and saves under `folder`.

    Returns [loss, gradient norm] of each step, the evaluation, what differs from one process, the names of this rank's
    parameters and where the checkpoint is."""
    from paddle_dp import checkpoint

    rows = recorded(trainer)
    trainer.fit(until)
    evaluation = trainer.evaluate()
    saved = checkpoint.save(trainer.snapshot(), Path(folder) / "checkpoints", trainer.mesh)
    return {
        "rows": rows, "held_out": dict(evaluation.numbers), "samples": evaluation.samples,
        "confusion": evaluation.confusion, "differences": trainer.differences, "saved": str(saved),
        "names": [name for name, _ in trainer.learner.placed.named_parameters()],
    }  # fmt: skip


def trained_each(recipes: dict[str, str], folder: str, **how: Any) -> dict[str, dict[str, Any]]:
    """`trained` by each of the recipes, one after the other in the same ranks."""
    return {name: trained(recipe, f"{folder}/{name}", **how) for name, recipe in recipes.items()}


def recorded(trainer: Any) -> list[list[float]]:
    """[loss, gradient norm] of every step that a trainer will do."""
    from paddle_dp.train import Callback

    rows: list[list[float]] = []

    class Recorder(Callback):
        def step(self, moment: Any) -> None:
            rows.append([moment.numbers["loss"], moment.numbers["gradient_norm"]])

    trainer.add(Recorder())
    return rows


def diary(trainer: Any) -> SimpleNamespace:
    """What a trainer will tell: `steps` have the numbers of each, and its `samples` so far; `epochs` the steps at which
    one ended; `evaluations` the steps and numbers of each, the last one's in `held_out`."""
    from paddle_dp.train import Callback

    lines = SimpleNamespace(steps=[], epochs=[], evaluations=[], held_out={})

    class Diary(Callback):
        def step(self, moment: Any) -> None:
            lines.steps.append({**moment.numbers, "samples": moment.progress.samples})

        def epoch(self, moment: Any) -> None:
            lines.epochs.append(moment.progress.step)

        def evaluated(self, moment: Any, evaluation: Any) -> None:
            lines.held_out = dict(evaluation.numbers)
            lines.evaluations.append((moment.progress.step, lines.held_out))

    trainer.add(Diary())
    return lines


def kill_after(trainer: Any, step: int, rank: int | None = None) -> None:
    """Each rank, or the one that is named, will kill itself after a step, as `kill -9` would; never after step 0."""
    from paddle_dp.train import Callback

    class Kill(Callback):
        def step(self, moment: Any) -> None:
            if moment.progress.step == step and rank in (None, moment.trainer.mesh.rank):
                os.kill(os.getpid(), signal.SIGKILL)

    trainer.add(Kill())


def settle(trainer: Any) -> None:
    """Waits for the device and all ranks: a rank that leaves takes what it is still sending with it."""
    import paddle

    paddle.device.synchronize()
    trainer.mesh.wait("the end")
