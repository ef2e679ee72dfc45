"""What a case of the zoo is: a silent fault that must be caught, or an honest model that must pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from tests.proof.zoo.patching import Make, around, replaced

Replacement = TypeVar("Replacement", bound=Callable[..., Any])

RECIPES = Path(__file__).with_name("recipes")

# Who is expected to say so first. `verify`: the comparison with one process. `weights`: the ranks' digests of their
# weights. `gradients`: the check that every gradient is exchanged. `evaluation`: held-out numbers of one process, or
# the count of samples. `resume`: a run that is saved and resumed against one that is not. `rehearsal`: any other part
# of the rehearsed training. `door`: refused by name before, or instead of, doing harm.
Guard = Literal["verify", "weights", "gradients", "rehearsal", "evaluation", "resume", "door"]
Exam = Literal["verify", "rehearsal"]


@dataclass(frozen=True)
class Setting:
    """A recipe of `recipes/`, laid over with overrides, on so many ranks: as small as the case allows."""

    recipe: str
    ranks: int = 2
    overrides: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return RECIPES / f"{self.recipe}.yaml"

    @property
    def layout(self) -> str:
        """In words, for the table: "2 ranks, tensor 2"."""
        words = [
            o.removeprefix("strategy.").replace("=", " ") for o in self.overrides if o.startswith("strategy.")
        ]
        words = [w for w in words if not w.startswith("use ")]
        return ", ".join([f"{self.ranks} ranks", *(words or ["data"])])

    def with_(self, *overrides: str) -> Setting:
        return Setting(self.recipe, self.ranks, (*self.overrides, *overrides))


def strategy(recipe: str, ranks: int = 2, **degrees: object) -> Setting:
    """The recipe under strategy hybrid with these settings: `strategy("gpt", tensor=2)`."""
    words = [f"strategy.{name}={str(value).lower()}" for name, value in degrees.items()]
    return Setting(recipe, ranks, ("strategy.use=hybrid", *words))


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`patches` put the fault into the processes of both sides, as a fault in our code would be; it must not show on
    one process, where nothing is distributed: names, and what makes their replacements (`patching.replaced`). None,
    where the model is at fault. `where`: what the sentence of verify must name."""

    name: str
    says: str
    source: str
    setting: Setting
    patches: tuple[tuple[str, Make], ...] = ()
    guard: Guard = "verify"
    exam: Exam = "verify"
    steps: int = 4  # of the recipe's own
    where: tuple[str, ...] = ()

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """Context in which the fault is in this process."""
        with ExitStack() as stack:
            for place, make in self.patches:
                stack.enter_context(replaced(place, make))
            yield


class FaultTable(list[Fault]):
    """The faults of a file, in its order."""

    def add(
        self,
        name: str,
        source: str,
        setting: Setting,
        place: str,
        also: Sequence[tuple[str, Make]] = (),
        **more: Any,
    ) -> Callable[[Replacement], Replacement]:
        """A decorator: the function replaces the one at `place`, and is called with that one before its arguments.

        The first paragraph of its docstring says what the fault is. `also`: further patches, put in before it.
        """

        def decorate(replacement: Replacement) -> Replacement:
            says, _, _ = inspect.cleandoc(replacement.__doc__ or "").partition("\n\n")
            patches = (*also, (place, around(replacement)))
            self.append(
                Fault(
                    name=name,
                    says=says.replace("\n", " "),
                    source=source,
                    setting=setting,
                    patches=patches,
                    **more,
                )
            )
            return replacement

        return decorate


@dataclass(frozen=True, kw_only=True)
class Honest:
    """A model and a recipe without a fault. `told`: a difference that is real and must be said, instead of SAME.

    `heavy`: takes a minute, or gigabytes; examined on request only.
    """

    name: str
    says: str
    setting: Setting
    told: str | None = None
    exam: Exam = "verify"
    heavy: bool = False
