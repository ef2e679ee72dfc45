"""The exceptions that paddle_dp raises, as one tree, and the near-miss search behind "did you mean".

A message says where, what, and what to do next. The command line prints it without a traceback and exits with the
error's `exit_status`: 2 when another command line or recipe would help, 1 otherwise.
"""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

LONGEST = 1 << 16  # characters; longer messages and tracebacks are clipped before they are passed on


def message_of(error: BaseException) -> str:
    """An error's message, clipped. Never raises, even if `str(error)` does."""
    try:
        return clipped(str(error))
    except Exception as why:  # noqa: BLE001 - a message must not hide the failure that it is about
        return f"(its message cannot be made: {type(why).__name__})"


def clipped(text: str) -> str:
    """The text; if longer than `LONGEST`, such as a printed array, only its beginning and its end."""
    if len(text) <= LONGEST:
        return text
    left_out = f"… ({len(text) - LONGEST:,} characters are left out here) …"
    return "\n".join([text[: LONGEST // 2], left_out, text[-LONGEST // 2 :]])


class PaddleDPError(Exception):
    """The base of every exception that paddle_dp raises."""

    exit_status = 1


class UsageError(PaddleDPError):
    """A command line, an environment or a call that cannot be carried out as written."""

    exit_status = 2


class InstallError(UsageError):
    """A package is missing; the message is the command that installs it."""

    @classmethod
    def missing_paddle(cls) -> InstallError:
        """Paddle itself is missing; the message covers machines with and without a GPU."""
        return cls(
            "PaddlePaddle is not installed. On a CPU: pip install -e '.[cpu]'. On a GPU, from Paddle's own index "
            "(PyPI's stops at 2.6.2), with your CUDA version in the address: "
            "pip install paddlepaddle-gpu -i https://www.paddlepaddle.org.cn/packages/stable/cu126/"
        )


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One mistake in a recipe: where it stands, what is wrong with it, and the keys that lead to it."""

    where: str
    message: str
    path: tuple[str | int, ...] = ()

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class RecipeError(UsageError, ValueError):
    """A recipe with mistakes: all of them at once, one line each."""

    def __init__(self, mistakes: Iterable[Mistake]):
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(map(str, self.mistakes)))


class TracingError(UsageError):
    """A forward that cannot be traced into one program (`train.compile`)."""


class DataError(PaddleDPError):
    """A sample or a data set that cannot be read; the message names the file or the index."""


class CheckpointError(PaddleDPError):
    """A checkpoint that cannot be written, found, trusted or fitted into this model."""


class LostFolderError(CheckpointError):
    """A run's folder that disappeared during the run."""


class ExportError(PaddleDPError):
    """A model that cannot be written as a program, or a program with other outputs than the model's."""


class DivergenceError(PaddleDPError):
    """Ranks that should hold equal weights do not; the message names the parameter and the rank."""


class LossError(PaddleDPError):
    """A loss that is not finite, or has no usable count of its terms."""


class NotFiniteError(LossError):
    """A loss, gradient, weight, optimizer state or held-out score is NaN or infinite; the message names it."""


class SpikeError(LossError):
    """A loss far above those before it, which a recipe's `guard` refuses."""


class TargetError(LossError):
    """A target outside the classes; `row`: its sample's index in the micro-batch, `value`: the target."""

    def __init__(self, message: str, row: int, value: int):
        self.row, self.value = row, value
        super().__init__(message)


class ProcessorError(PaddleDPError):
    """A rank that computes other results than its peers from the same numbers; the message names it and its machine."""


class OutOfMemoryError(PaddleDPError):
    """A device with too little memory; the message lists the rank's memory there, and settings that reduce it."""


class JobError(PaddleDPError):
    """A job of several processes that failed; the message holds the error of the rank that failed first."""


class LostPeerError(JobError):
    """A rank waited in vain for another rank; the failure of that one is the cause."""


class StoppedError(PaddleDPError):
    """A training that stopped early on request; `--resume` continues it. 75 is EX_TEMPFAIL."""

    exit_status = 75


class EndedError(JobError):
    """A job ended by a signal from outside; the steps that would follow it are skipped, too."""

    def __init__(self, number: int):
        super().__init__(f"ended by {signal.Signals(number).name}.")
        self.exit_status = 128 + number


def near(typed: str, known: Iterable[str]) -> str | None:
    """The entry of `known` that equals `typed` but for case, separators and one slip; None if there is none.

    A slip is a letter more, less or replaced, or two adjacent letters swapped.
    """
    plain = _letters(typed)
    slips = [name for name in known if plain == (letters := _letters(name)) or _single_edit(plain, letters)]
    return min(slips, key=lambda name: _letters(name) != plain, default=None)


@lru_cache(maxsize=4096)  # a recipe's unknown keys are compared with the same few hundred words
def _letters(text: str) -> str:
    return re.sub(r"[\W_]", "", text).lower()


def _single_edit(typed: str, other: str) -> bool:
    """True if one edit or one transposition makes `other` of `typed`; for three letters, only a transposition."""
    if min(len(typed), len(other)) < 3 or abs(len(typed) - len(other)) > 1:
        return False
    pairs = enumerate(zip(typed, other, strict=False))
    begin = next((n for n, (a, b) in pairs if a != b), min(len(typed), len(other)))
    first, second = typed[begin:], other[begin:]
    if first[:2][::-1] == second[:2] and first[2:] == second[2:]:
        return True
    return max(len(typed), len(other)) > 3 and (first[1:] in (second, second[1:]) or first == second[1:])


def similar(name: str, known: Iterable[str]) -> str | None:
    """The most similar of the `known` names of layers or tensors, or None; `name` may be a part of one."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), None)


def did_you_mean(
    typed: str,
    known: Iterable[str],
    listed_as: str = "It takes",
    guessed: Callable[[str, Iterable[str]], str | None] = near,
) -> str:
    """A sentence to append to a message: " Did you mean 'width'? It takes depth, heads, width."."""
    known = sorted(known)
    hint = f" Did you mean '{guess}'?" if (guess := guessed(typed, known)) else ""
    return f"{hint} {listed_as} {', '.join(known) or 'nothing'}."


def gist(error: BaseException) -> str:
    """The line of an error's message that states the fault. In Paddle's messages it follows the frames of C++ and
    Python, and precedes hints and operators' names."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    stated = [line for line in lines if re.match(r"\(\w+\) |\w*(Error|Exception): ", line)]
    bare = [line for line in lines if not line.startswith("[")]
    return next(iter([*stated[-1:], *bare[-1:], *lines[-1:]]), "")
