"""A training inside a rank, as most tests of what a layout learns begin: a recipe's text, a folder, and settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def build_trainer(
    recipe: str, folder: str, *words: str, resume: bool = False, seed: int | None = None
) -> Any:
    """In a rank: joins the job, and returns the trainer of a recipe's text, whose run is in `folder`; with `resume`,
    from the newest checkpoint there. `words`: settings, as on the command line.
    `seed`: the recipe's by default."""
    from paddle_dp.assembly.build import build
    from paddle_dp.mesh import join
    from paddle_dp.recipe import read_recipe

    path = Path(folder) / f"recipe-{os.getpid()}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(recipe)
    read = read_recipe(path, [f"output_dir={folder}", *words])
    mesh = join(read.train.seed if seed is None else seed, servers=read.strategy.config.servers)
    return build(read, mesh, "newest" if resume else None)


def recorded(trainer: Any) -> list[list[float]]:
    """[loss, gradient norm] of every step that a trainer will do."""
    from paddle_dp.train import Callback

    rows: list[list[float]] = []

    class Diary(Callback):
        def step(self, moment: Any) -> None:
            rows.append([moment.numbers["loss"], moment.numbers["gradient_norm"]])

    trainer.add(Diary())
    return rows


def settle(trainer: Any) -> None:
    """Waits for the device and all ranks: a rank that leaves takes what it is still sending with it."""
    import paddle

    paddle.device.synchronize()
    trainer.mesh.wait("the end")
