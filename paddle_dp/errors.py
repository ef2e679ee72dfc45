"""Everything that can go wrong on purpose, as one tree, and the near-miss helper behind «did you mean».

A message says where, what, and what to do next. The command line prints it alone, without a traceback, and leaves
with the error's `exit_status`: 2 when the person at the keyboard can mend it by typing something else, 1 otherwise.
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable
from dataclasses import dataclass


class PaddleDPError(Exception):
    """The root: catch this to catch whatever paddle_dp raises on purpose."""

    exit_status = 1


class UsageError(PaddleDPError):
    """A command line, an environment or a call that cannot be carried out as written."""

    exit_status = 2


class InstallError(UsageError):
    """A package is missing; the message is the command that installs it."""

    @classmethod
    def of_paddle(cls) -> InstallError:
        """Paddle itself is missing: how to get it, for a machine without and with a GPU."""
        return cls(
            "PaddlePaddle is not installed. On a CPU: pip install -e '.[cpu]'. On a GPU, from Paddle's own index "
            "(PyPI's stops at 2.6.2), with your CUDA version in the address: "
            "pip install paddlepaddle-gpu -i https://www.paddlepaddle.org.cn/packages/stable/cu126/"
        )


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One mistake in a recipe: where it stands, what is wrong with it, and the keys that lead to it."""

    where: str
    what: str
    path: tuple[str | int, ...] = ()

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


class RecipeError(UsageError, ValueError):
    """A recipe with mistakes: all of them at once, one line each."""

    def __init__(self, mistakes: Iterable[Mistake]):
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(map(str, self.mistakes)))


class DataError(PaddleDPError):
    """A sample or a data set that cannot be read; the message names the file or the index."""


class CheckpointError(PaddleDPError):
    """A checkpoint that cannot be written, found, trusted or fitted into this model."""


class ExportError(PaddleDPError):
    """A model that cannot be written as a program, or a program that does not give the model's own outputs."""


class DivergenceError(PaddleDPError):
    """Ranks that should hold equal weights do not; the message names the parameter and the rank."""


class LossError(PaddleDPError):
    """A loss that does not say what it is over, or is no longer a finite number."""


class NotFiniteError(LossError):
    """A loss, a gradient, a weight, an optimizer's state or a held-out score that is NaN or infinite; it is named."""


class TargetError(LossError):
    """A target that is none of the classes; `row` is its sample's place in the micro-batch, `value` the target."""

    def __init__(self, message: str, row: int, value: int):
        self.row, self.value = row, value
        super().__init__(message)


class JobError(PaddleDPError):
    """A job of several processes that failed; the message carries the first failing rank's own words."""


class EndedError(JobError):
    """A job that somebody ended by a signal, so that what would come after it is not wanted either."""

    def __init__(self, number: int):
        super().__init__(f"ended by {signal.Signals(number).name}.")
        self.exit_status = 128 + number


def near(word: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `word` was probably meant to be, or None."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), None)


def did_you_mean(word: str, known: Iterable[str], listed_as: str = "It takes") -> str:
    """To be put behind a sentence: " Did you mean 'width'? It takes depth, heads, width."."""
    known = sorted(known)
    guess = near(word, known)
    hint = f" Did you mean '{guess}'?" if guess else ""
    return f"{hint} {listed_as} {', '.join(known) or 'nothing'}."
