"""Judges each update by its loss and gradient norm before it is made: not finite, or a spike? (recipe: `guard`)

Both numbers are reduced over all ranks before, so every rank judges alike without another exchange. Checkpoints keep
the judge's state: a resumed run judges as the uninterrupted one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paddle_dp.recipe.schema import Guard

WINDOW, WARM_UP = 100, 20  # losses in the mean and deviation: at most, at least
# The smallest deviation, as a fraction of the mean: a constant loss would make spikes of rounding.
FLOOR = 0.01
Action = Literal["skip", "rewind"]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An update that was not made: number `step`, from global batch `batch` of `epoch` with these `samples`.

    `why`: the reason; `first`: a sentence on the first number that is not finite, or ""; `sample`: "sample 17 has
    inputs that are not finite", or "". `again`: the batch was refused before and is now skipped without a forward, so
    `loss` and `gradient_norm` are NaN.
    """

    step: int
    epoch: int
    batch: int
    samples: Sequence[int]
    why: str
    action: Action
    loss: float = math.nan
    gradient_norm: float = math.nan
    first: str = ""
    sample: str = ""
    again: bool = False


def as_fields(refusal: Refusal) -> dict[str, object]:
    """A refusal as fields of a line of JSON, with other names than the line's common fields."""
    rows = {**vars(refusal), "refused_step": refusal.step, "samples_of_batch": list(refusal.samples)}
    for name in ("step", "epoch", "samples"):
        del rows[name]
    return {**rows, "refused_epoch": refusal.epoch}


@dataclass
class LossGuard:
    """Approves or refuses an update by its metrics. `scaled`: a loss scale skips updates with overflowing gradients, so
    they are no fault.

    `why`: the reason of the last refusal. `left_out`: (epoch, batch) of the batches that are skipped from now on.
    """

    guard: Guard
    scaled: bool = False
    why: str = field(default="", init=False)
    left_out: set[tuple[int, int]] = field(default_factory=set, init=False)
    in_a_row: int = field(default=0, init=False)  # refusals without an update of a later step
    last: int = field(default=0, init=False)  # the last step that was refused
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW), init=False)

    @property
    def judges(self) -> bool:
        return self.guard.non_finite is not None

    def approve(self, metrics: Mapping[str, float]) -> bool:
        """True if the update with these metrics is to be made; keeps its loss if so, and sets `why` if not."""
        self.why = self._fault(metrics["loss"], metrics["gradient_norm"])
        if not self.why:
            self._losses.append(metrics["loss"])
        return not self.why

    def count_update(self, step: int) -> None:
        """Call it when update number `step` was made."""
        if step > self.last:
            self.in_a_row = 0

    def count_refusal(self, step: int) -> bool:
        """Call it when update number `step` was refused. True if too many were refused in a row."""
        self.in_a_row, self.last = self.in_a_row + 1, max(step, self.last)
        return self.in_a_row > self.guard.in_a_row

    def _fault(self, loss: float, norm: float) -> str:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return "" if self.scaled else f"the gradient norm is {norm}"
        limit = self.limit()
        if limit is None or loss <= limit:
            return ""
        return (
            f"the loss {loss:.6g} is a spike: {self.guard.spike} above the mean of the last {len(self._losses)} losses "
            f"is {limit:.6g}"
        )

    def limit(self) -> float | None:
        """The mean of the last losses plus `guard.spike` standard deviations; None with too few losses or no `spike`.

        The z-score of a window. PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1) went back to a checkpoint
        and left batches out around spikes; ZClip (Kumar et al. 2025, arXiv:2504.02507) judges by a z-score.
        """
        if self.guard.spike is None or len(self._losses) < WARM_UP:
            return None
        mean = math.fsum(self._losses) / len(self._losses)
        variance = math.fsum((loss - mean) ** 2 for loss in self._losses) / (len(self._losses) - 1)
        return mean + self.guard.spike.count * max(math.sqrt(variance), FLOOR * abs(mean))

    def state(self) -> dict[str, Any] | None:
        """The state for a checkpoint; None if there is none."""
        if not (self.judges or self.left_out):
            return None
        return {
            "left_out": sorted(map(list, self.left_out)),
            "in_a_row": self.in_a_row,
            "last": self.last,
            "losses": list(self._losses) if self.guard.spike else [],
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restores the result of `state`."""
        state = state or {}
        self.left_out = {(epoch, batch) for epoch, batch in state.get("left_out", ())}
        self.in_a_row, self.last = state.get("in_a_row", 0), state.get("last", 0)
        self._losses = deque(state.get("losses", ()), maxlen=WINDOW)

    def go_back(self, state: Mapping[str, Any] | None, without: tuple[int, int]) -> None:
        """Restores the losses of a checkpoint, and skips the batch `without` from now on."""
        left_out, counts = self.left_out | {without}, (self.in_a_row, self.last)
        self.load(state)
        self.left_out, (self.in_a_row, self.last) = self.left_out | left_out, counts
