"""The error that ends a training whose numbers are bad: since when, from which sample, which checkpoint to go back to.

Everything here is collective: all ranks see the same numbers and raise the same error.

A device's memory was too small: what this rank held there, and what would make it less.
"""

from __future__ import annotations

import math
from typing import NoReturn

from paddle_dp import checkpoint as checkpoints
from paddle_dp.data import Loader
from paddle_dp.errors import NotFiniteError, OutOfMemoryError, PaddleDPError
from paddle_dp.mesh import Mesh
from paddle_dp.parallel.learner import Learner
from paddle_dp.parallel.memory import size, states
from paddle_dp.train import blame
from paddle_dp.train.evaluation import Evaluation
from paddle_dp.train.meter import peak_memory
from paddle_dp.train.run import Run

MB = 1e6
SAID = "Out of memory error"


def is_cause(error: Exception) -> bool:
    """Whether a device had too little memory; in a backward of Python's, Paddle calls it an OSError (3.3.1)."""
    return SAID in str(error)


def explained(error: Exception, learner: Learner, mesh: Mesh, step: int) -> OutOfMemoryError:
    """Paddle's error in update `step` of this rank, with the sizes of what is known by name."""
    parameters = [parameter for _, parameter in learner.named_parameters()]
    held = {
        "parameters": size(parameters),
        "gradients": size(parameter.grad for parameter in parameters if not parameter.stop_gradient),
        "optimizer states": size(states(learner.optimizer)),
    }
    known = ", ".join(f"{name} {bytes_ / MB:.3g} MB" for name, bytes_ in held.items())
    peak = peak_memory(mesh.device)
    rest = max(peak - sum(held.values()), 0)
    return OutOfMemoryError(
        f"step {step}: rank {mesh.rank} ran out of memory on {mesh.device}. It held {known}; the rest of the "
        f"{peak / MB:.3g} MB at its peak, {rest / MB:.3g} MB, were activations, buffers and what is exchanged. "
        f"Paddle says: {_said(error)}\n"
        "What makes it less: a larger train.micro_batches, strategy.recompute, strategy.sharding over more ranks "
        "(sharding_stage 3 keeps parameters with their owners, too), strategy.offload. "
        "`paddle-dp check RECIPE --ranks N` works it out."
    )


def _said(error: Exception) -> str:
    """The sentence of Paddle's message that has the numbers."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next(line[line.index(SAID) :] for line in lines if SAID in line)


class Soundness:
    """Remembers the last `step` after which weights and states were good (None: not checked yet), and explains errors
    after it."""

    def __init__(self, run: Run, loader: Loader):
        self.run, self.loader, self.mesh = run, loader, run.mesh
        self.step: int | None = None

    def explained(self, error: PaddleDPError, step: int) -> PaddleDPError:
        """The same error, raised after `step`, with the last good step, the bad sample if there is one, and the
        checkpoint to go back to."""
        words = [str(error)]
        if self.step is not None and self.step < step:
            words.append(f"All was good after step {self.step}, when it was last looked at.")
        if isinstance(error, NotFiniteError):
            self.loader.close()  # or its workers would read on meanwhile
            first = step if self.step is None or self.step >= step else self.step + 1
            words.append(blame.bad_sample(self.loader, range(max(first, 1), step + 1), self.mesh))
        return type(error)(" ".join(filter(None, [*words, self.last_good()])))

    def last_good(self) -> str:
        """A sentence on the checkpoint to go back to, as rank 0 sees the folder."""
        folder, sentence = self.run.folder / "checkpoints", ""
        if self.mesh.is_main:
            resume = "--resume" if self.run.recipe is not None else "resume=True"
            if good := checkpoints.newest_good(folder):
                sentence = f"The newest checkpoint that was found good is {good}: {resume} goes on from it."
            elif checkpoints.checkpoints(folder):
                sentence = f"No checkpoint in {folder} was found good when it was saved."
            else:
                sentence = f"There is no checkpoint in {folder} to go back to."
        # Rank 0 reads all its bytes, which may take longer than a collective waits.
        self.mesh.wait("newest good checkpoint")
        return str(self.mesh.gather(sentence)[0])

    def refuse_loss(self, loss: float, step: int, own: float | None = None) -> NoReturn:
        """Raises NotFiniteError for a loss that is NaN or infinite; the message names the ranks whose `own` share of it
        is."""
        bad = [rank for rank, share in enumerate(self.mesh.gather(own)) if not math.isfinite(share or 0.0)]
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
        """« of 'fc1.weight' has 3 NaN of 100 on ranks 0, 1»: the first of all ranks' faulty gradients, which all have
        that have added it up; "" without one."""
        gathered = self.mesh.gather(faulty)
        first = next((row for rows in gathered for row in rows.items()), None)
        if first is None:
            return ""
        return f" of '{first[0]}' has {first[1]}{_on([r for r, rows in enumerate(gathered) if first[0] in rows])}"

    def _refuse(self, what: str, step: int, more: str = "") -> NoReturn:
        helps = "A lower schedule.learning_rate, a longer schedule.warmup or optimizer.clip usually helps."
        raise self.explained(NotFiniteError(f"{what}: training cannot go on from here. {helps}{more}"), step)

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
    return f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
