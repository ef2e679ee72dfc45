"""What a fault has cost: the run is resumed to its end, and compared with one that nobody disturbed."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paddle_dp.checkpoint import UnusableError, check, checkpoints, load, step_of
from paddle_dp.launch.command import Job
from tests.jobs import run_in_forks

MORE = 4  # updates after the newest checkpoint, where the recipe's own length is that of a test that waits to be ended
ENDLESS = "train.length=100000 steps"


@dataclass(frozen=True, kw_only=True)
class Lost:
    """`damaged`: checkpoints that cannot be used; `tensors`: those of the resumed run, weights and optimizer states,
    whose bits are not those of the undisturbed run. `step`: what was resumed; None where nothing had been saved."""

    damaged: int
    tensors: int
    step: int | None

    def __str__(self) -> str:
        if self.step is None:
            return f"{self.damaged}, from the start" if not self.damaged else f"{self.damaged} checkpoints"
        if self.tensors:
            return f"{self.tensors} tensors differ"
        return f"{self.damaged}, from step {self.step}"


def lost(job: Job) -> Lost:
    """Resumes the ended training `job` in its folder, and trains the same from the start in another one.

    Raises AssertionError if the resumed one does not end well.
    """
    folder = Path(str(job.output_dir)) / "checkpoints"
    saved = checkpoints(folder)
    usable = [path for path in saved if _is_usable(path)]
    damaged = len(saved) - len(usable)
    if not usable:
        return Lost(damaged=damaged, tensors=0, step=None)
    step = step_of(usable[-1])
    ranks = (job.ranks or 1) * (job.nodes or 1)
    words = tuple(each for each in job.overrides if not each.startswith("train.max_time"))
    words = tuple(f"train.length={step + MORE} steps" if each == ENDLESS else each for each in words)
    train(job.recipe, words, ranks, str(job.output_dir), "newest")
    whole = _undisturbed(job.recipe, words, ranks)
    return Lost(damaged=damaged, tensors=different(checkpoints(folder)[-1], whole), step=step)


def different(one: Path, other: Path) -> int:
    """How many tensors of two checkpoints are not the same bits, or are in one of them only."""
    first, second = load(one), load(other)
    common = set(first.names) & set(second.names)
    apart = [name for name in common if first.read(name).tobytes() != second.read(name).tobytes()]
    return len(apart) + len(set(first.names) ^ set(second.names)) + (step_of(one) != step_of(other))


@cache
def _undisturbed(recipe: Path, overrides: tuple[str, ...], ranks: int) -> Path:
    """The last checkpoint of the same training, from its start to its end."""
    folder = tempfile.mkdtemp(prefix="undisturbed-")
    train(recipe, overrides, ranks, folder, None)
    return checkpoints(Path(folder) / "checkpoints")[-1]


def train(recipe: Path, overrides: tuple[str, ...], ranks: int, folder: str, resume: str | None) -> None:
    job = Job(recipe=recipe, overrides=overrides, ranks=ranks, output_dir=folder, resume=resume)
    assert run_in_forks(job) == 0, "the run could not be gone on with"


def _is_usable(checkpoint: Path) -> bool:
    try:
        check(checkpoint)
    except UnusableError:
        return False
    return True
