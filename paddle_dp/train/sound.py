"""Why a training ends when its numbers go bad: since when, by which sample, and which checkpoint to go back to.

Everything here is collective: all ranks have seen the same, and all end with the same error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from paddle_dp import checkpoint as checkpoints
from paddle_dp.errors import NotFiniteError, PaddleDPError
from paddle_dp.train import blame
from paddle_dp.train.evaluation import Evaluation

if TYPE_CHECKING:
    from paddle_dp.train.trainer import Trainer


def explained(error: PaddleDPError, trainer: Trainer) -> PaddleDPError:
    """The same error, saying too until when all was good, which sample may have done it, and what to go back to."""
    step, words = trainer.progress.step, [str(error)]
    if trainer.sound is not None and trainer.sound < step:
        words.append(f"All was good after step {trainer.sound}, when it was last looked at.")
    if isinstance(error, NotFiniteError):
        trainer.loader.close()  # its workers would read on beside
        first = step if trainer.sound is None or trainer.sound >= step else trainer.sound + 1
        words.append(blame.bad_sample(trainer.loader, range(max(first, 1), step + 1), trainer.mesh))
    return type(error)(" ".join(filter(None, [*words, last_good(trainer)])))


def last_good(trainer: Trainer) -> str:
    """A sentence on which checkpoint to go back to, as the first rank sees the folder."""
    folder, said = trainer.run.folder / "checkpoints", ""
    if trainer.mesh.is_main:
        again = "--resume" if trainer.run.recipe is not None else "resume=True"
        if good := checkpoints.newest_good(folder):
            said = f"The newest checkpoint that was found good is {good}: {again} goes on from it."
        elif checkpoints.checkpoints(folder):
            said = f"No checkpoint in {folder} was found good when it was saved."
        else:
            said = f"There is no checkpoint in {folder} to go back to."
    trainer.mesh.wait(
        "newest good checkpoint"
    )  # its bytes are read, which may take longer than a collective may
    return str(trainer.mesh.gather(said)[0])


def refuse_loss(loss: float, trainer: Trainer) -> NoReturn:
    """Raises NotFiniteError for a loss that is none."""
    _refuse(f"the loss is {loss} at step {trainer.progress.step}", trainer)


def refuse_gradients(norm: float, trainer: Trainer) -> NoReturn:
    """Raises NotFiniteError for a gradient norm that is none; the first parameter is named, and its rank."""
    faulty = trainer.mesh.gather(trainer.learner.faulty_gradients)
    first = next(((rank, *row) for rank, rows in enumerate(faulty) for row in rows.items()), None)
    who = f": that of '{first[1]}' has {first[2]} on rank {first[0]}" if first else ""
    _refuse(f"the gradient norm is {norm} at step {trainer.progress.step}{who}", trainer)


def _refuse(what: str, trainer: Trainer) -> NoReturn:
    helps = "A lower schedule.learning_rate, a longer schedule.warmup or optimizer.clip usually helps."
    raise explained(NotFiniteError(f"{what}: training cannot go on from here. {helps}"), trainer)


def refuse_evaluation(found: Evaluation, trainer: Trainer) -> NoReturn:
    """Raises NotFiniteError for an evaluation with numbers that are none: the weights are to blame, or its data."""
    when = f"the evaluation after step {trainer.progress.step}"
    trainer.check(f"by {when}")
    loader, why = trainer.run.test_loader, ""
    if loader is not None:
        why = blame.bad_sample(loader, range(1, loader.batches + 1), trainer.mesh, "held-out")
    raise NotFiniteError(
        f"{when} gives {found.bad_numbers}, though all weights are finite. "
        f"{why or 'Look at the loss, its scores and the held-out data.'} {last_good(trainer)}"
    )
