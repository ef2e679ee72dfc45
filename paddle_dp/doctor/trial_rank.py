"""The steps of `paddle-dp plan --try` inside its ranks: trains a recipe for some steps, and times them.

    paddle-dp launch --ranks N -m paddle_dp.doctor.trial_rank RECIPE FILE

Rank 0 writes FILE, as JSON: the seconds of a step, the mean of each window.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

from paddle_dp.doctor.prove_rank import write
from paddle_dp.launch.silence import import_paddle

FIRST, WINDOW, WINDOWS = 4, 4, 3  # steps that do not count; steps of a window, and how many of them
STEPS = FIRST + WINDOW * WINDOWS + 1  # the last window ends where another step begins


def main() -> None:
    import_paddle()
    from paddle_dp.assembly.build import build
    from paddle_dp.doctor.probe_rank import wait
    from paddle_dp.mesh import join
    from paddle_dp.recipe import read_recipe

    recipe = read_recipe(Path(sys.argv[1]))
    mesh = join(recipe.train.seed, recipe.train.device)
    if mesh.is_main:
        recipe.folder.mkdir(parents=True)
    mesh.wait("the run folder is made")
    trainer = build(recipe, mesh)
    # A measurement of the training's own waits for the device after each phase, so that nothing overlaps.
    trainer.measurements.plan = lambda *_: None  # type: ignore[method-assign]
    train_batch, number, times = trainer.learner.train_batch, 0, list[float]()

    def timed(*args: Any, **settings: Any) -> Any:
        nonlocal number
        if number >= FIRST and (number - FIRST) % WINDOW == 0:
            wait(mesh.device)
            times.append(time.perf_counter())
        number += 1
        return train_batch(*args, **settings)

    trainer.learner.train_batch = timed  # type: ignore[method-assign]
    trainer.fit(recipe.train.length)
    if mesh.is_main:
        seconds = [(after - before) / WINDOW for before, after in itertools.pairwise(times)]
        write(sys.argv[2], {"seconds": seconds})


if __name__ == "__main__":
    main()
