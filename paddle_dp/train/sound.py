"""Why a training ends when its numbers go bad: since when, by which sample, and which checkpoint to go back to.

Everything here is collective: all ranks have seen the same, and all end with the same error.
"""

from __future__ import annotations

from typing import NoReturn

from paddle_dp import checkpoint as checkpoints
from paddle_dp.data import Loader
from paddle_dp.errors import NotFiniteError, PaddleDPError
from paddle_dp.train import blame
from paddle_dp.train.evaluation import Evaluation
from paddle_dp.train.run import Run


class Soundness:
    """Until when a training's numbers were good (`step`; None: they were not looked at yet), and what is said when
    they no longer are."""

    def __init__(self, run: Run, loader: Loader):
        self.run, self.loader, self.mesh = run, loader, run.mesh
        self.step: int | None = None

    def explained(self, error: PaddleDPError, step: int) -> PaddleDPError:
        """The same error after `step`, saying too until when all was good, which sample may have done it, and what to
        go back to."""
        words = [str(error)]
        if self.step is not None and self.step < step:
            words.append(f"All was good after step {self.step}, when it was last looked at.")
        if isinstance(error, NotFiniteError):
            self.loader.close()  # its workers would read on beside
            first = step if self.step is None or self.step >= step else self.step + 1
            words.append(blame.bad_sample(self.loader, range(max(first, 1), step + 1), self.mesh))
        return type(error)(" ".join(filter(None, [*words, self.last_good()])))

    def last_good(self) -> str:
        """A sentence on which checkpoint to go back to, as the first rank sees the folder."""
        folder, said = self.run.folder / "checkpoints", ""
        if self.mesh.is_main:
            again = "--resume" if self.run.recipe is not None else "resume=True"
            if good := checkpoints.newest_good(folder):
                said = f"The newest checkpoint that was found good is {good}: {again} goes on from it."
            elif checkpoints.checkpoints(folder):
                said = f"No checkpoint in {folder} was found good when it was saved."
            else:
                said = f"There is no checkpoint in {folder} to go back to."
        # Its bytes are read, which may take longer than a collective may.
        self.mesh.wait("newest good checkpoint")
        return str(self.mesh.gather(said)[0])

    def refuse_loss(self, loss: float, step: int) -> NoReturn:
        """Raises NotFiniteError for a loss that is none."""
        self._refuse(f"the loss is {loss} at step {step}", step)

    def refuse_gradients(self, norm: float, faulty: dict[str, str], step: int) -> NoReturn:
        """Raises NotFiniteError for a gradient norm that is none; the first of the `faulty` gradients (by name, and
        what they hold here) is named, and its rank."""
        gathered = self.mesh.gather(faulty)
        first = next(((rank, *row) for rank, rows in enumerate(gathered) for row in rows.items()), None)
        who = f": that of '{first[1]}' has {first[2]} on rank {first[0]}" if first else ""
        self._refuse(f"the gradient norm is {norm} at step {step}{who}", step)

    def _refuse(self, what: str, step: int) -> NoReturn:
        helps = "A lower schedule.learning_rate, a longer schedule.warmup or optimizer.clip usually helps."
        raise self.explained(NotFiniteError(f"{what}: training cannot go on from here. {helps}"), step)

    def refuse_evaluation(self, found: Evaluation, when: str) -> NoReturn:
        """Raises NotFiniteError for an evaluation with numbers that are none, where all weights are finite."""
        loader, why = self.run.test_loader, ""
        if loader is not None:
            why = blame.bad_sample(loader, range(1, loader.batches + 1), self.mesh, "held-out")
        raise NotFiniteError(
            f"{when} gives {found.bad_numbers}, though all weights are finite. "
            f"{why or 'Look at the loss, its scores and the held-out data.'} {self.last_good()}"
        )
