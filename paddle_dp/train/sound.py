"""Explains the error that ends a training with bad numbers: since when, which sample, which checkpoint to go back to.

Everything here is collective: all ranks see the same numbers and raise the same error.
"""

from __future__ import annotations

import math
from typing import NoReturn

from paddle_dp import checkpoint as checkpoints
from paddle_dp.data import Loader
from paddle_dp.errors import NotFiniteError, PaddleDPError
from paddle_dp.text import numbered
from paddle_dp.train import blame
from paddle_dp.train.evaluation import Evaluation
from paddle_dp.train.run import Run


class NumericsCheck:
    """Keeps the last `step` after which weights and states were good (None: not checked yet), and the last one whose
    loss was `finite` (0: none was read). Explains errors after them."""

    def __init__(self, run: Run, loader: Loader):
        self.run, self.loader, self.mesh = run, loader, run.mesh
        self.step: int | None = None
        self.finite = 0

    def explained(self, error: PaddleDPError, step: int, advice: str = "") -> PaddleDPError:
        """The same error, raised after `step`, with the bad sample if there is one, the last good step, the `advice`,
        and the checkpoint to go back to."""
        sentences = [str(error)]
        if isinstance(error, NotFiniteError):
            self.loader.close()  # or its workers would read on meanwhile
            # A finite loss is no reason to begin later: Paddle's ReLU makes 0 of a NaN on a CPU.
            first = step if self.step is None or self.step >= step else self.step + 1
            sentences.append(blame.bad_sample(self.loader, range(max(first, 1), step + 1), self.mesh))
        if (self.step or 0) < self.finite < step:
            sentences.append(f"The loss was finite at step {self.finite}, when it was last read.")
        elif self.step is not None and self.step < step:
            sentences.append(f"All was good after step {self.step}, when it was last looked at.")
        return type(error)(" ".join(filter(None, [*sentences, advice, self.last_good()])))

    def last_good(self) -> str:
        """A sentence on the checkpoint to go back to, as rank 0 sees the folder."""
        folder, sentence = self.run.folder / "checkpoints", ""
        if self.mesh.is_main:
            resume = "--resume" if self.run.recipe is not None else "resume=True"
            if good := checkpoints.newest_good(folder):
                sentence = f"The newest checkpoint that was found good is {good}: {resume} continues from it."
            elif checkpoints.checkpoints(folder):
                sentence = f"No checkpoint in {folder} was found good when it was saved."
            else:
                sentence = f"There is no checkpoint in {folder} to go back to."
        # Rank 0 reads all its bytes, which may take longer than a collective waits.
        self.mesh.wait("newest good checkpoint")
        return str(self.mesh.gather(sentence)[0])

    def refuse_loss(self, loss: float, step: int, local_loss: float | None = None) -> NoReturn:
        """Raises NotFiniteError for a loss that is NaN or infinite; the message names the ranks with a bad
        `local_loss`, their share of it."""
        bad = [
            rank for rank, share in enumerate(self.mesh.gather(local_loss)) if not math.isfinite(share or 0.0)
        ]
        where = f"step {step}{_on(bad) if self.mesh.ranks > 1 else ''}"
        layer = " guard: {non_finite: stop} looks before each update, and names the layer."
        self._refuse(f"the loss is {loss} at {where}", step, layer)

    def refuse_gradients(self, norm: float, faulty: dict[str, str], step: int) -> NoReturn:
        """Raises NotFiniteError for a gradient norm that is NaN or infinite. The message names the first of the
        `faulty` gradients (name → its bad values on this rank), and its rank."""
        first = self.first_gradient(faulty)
        where = f": that{first}" if first else ""
        self._refuse(f"the gradient norm is {norm} at step {step}{where}", step)

    def first_gradient(self, faulty: dict[str, str]) -> str:
        """Describes the first of all ranks' faulty gradients: « of 'fc1.weight' has 3 NaN of 100 on ranks 0, 1»; all
        ranks that have summed it have it. "" without one."""
        gathered = self.mesh.gather(faulty)
        first = next((row for rows in gathered for row in rows.items()), None)
        if first is None:
            return ""
        return f" of '{first[0]}' has {first[1]}{_on([r for r, rows in enumerate(gathered) if first[0] in rows])}"

    def _refuse(self, problem: str, step: int, more: str = "") -> NoReturn:
        helps = "A lower schedule.learning_rate, a longer schedule.warmup or optimizer.clip usually helps."
        error = NotFiniteError(f"{problem}: training cannot go on from here.")
        raise self.explained(error, step, f"{helps}{more}")

    def refuse_evaluation(self, evaluation: Evaluation, when: str) -> NoReturn:
        """Raises NotFiniteError for an evaluation with NaN or infinite numbers, if all weights are finite."""
        loader, why = self.run.test_loader, ""
        if loader is not None:
            why = blame.bad_sample(loader, range(1, loader.batches + 1), self.mesh, "held-out")
        raise NotFiniteError(
            f"{when} gives {evaluation.bad_numbers}, though all weights are finite. "
            f"{why or 'Look at the loss, its scores and the held-out data.'} {self.last_good()}"
        )


def _on(ranks: list[int]) -> str:
    """« on ranks 0, 1»; "" for none."""
    return f" on {numbered('rank', ranks)}" if ranks else ""
