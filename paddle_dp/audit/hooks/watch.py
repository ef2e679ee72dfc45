"""The state that a rank's hooks share: the journal, the limits, and the batches since the last update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddle_dp.audit.events import EventJournal

EPOCHS = 2  # recorded passes over the training data: the second shows whether the order changes


class EnoughRecorded(SystemExit):
    """Ends the script once the audit has recorded enough. `except Exception` does not catch it."""

    def __init__(self) -> None:
        super().__init__(0)


def wrap(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Replaces a function of a class or a module by one that calls `hook` with the original before its arguments."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: hook(original, *args, **kwargs))


@dataclass
class ReadBatch:
    """A batch that the script got: batch `index` of pass `number` over a loader."""

    loader: int
    number: int
    index: int
    data: Any


@dataclass
class ScriptMonitor:
    """`steps` updates of each pass are recorded, and its last batch. `window`: the batches since the last update."""

    journal: EventJournal
    folder: Path
    rank: int
    steps: int
    done: int = 0
    gradients: int = 0
    record_next: bool = True
    window: list[ReadBatch] = field(default_factory=list)
    states_at_window: str = ""
    enough: bool = False

    @property
    def limit(self) -> int:
        """The number of updates after which the script ends; each pass has one more for its last batch."""
        return EPOCHS * (self.steps + 1)

    def stop(self) -> None:
        """Raises EnoughRecorded, now and in every later hook, since a bare `except:` may swallow the first."""
        self.enough = True
        raise EnoughRecorded

    def check(self) -> None:
        if self.enough:
            raise EnoughRecorded

    def forget(self, loader: int, number: int) -> None:
        """Removes the batches of a pass without training from the next update."""
        self.window = [each for each in self.window if (each.loader, each.number) != (loader, number)]
        self.record_next = self.done == 0
