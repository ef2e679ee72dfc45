"""The contract of a gradient exchange: how gradients leave their ranks (ZeRO-3's owners take theirs in stage3.py).

`choose_exchange` (choose.py) has the table of all exchanges. The learner and its runner call one in this
order, in each update:

    begin_update → for each micro-batch: begin_micro_batch, backward(…) → finish → [before_metrics] → commit, if the
    optimizer has stepped

A pipeline interleaves the forwards and backwards of micro-batches: its runner enters `backward` without `counted` and
never calls `begin_micro_batch`, so exchanges that need these (Paddle's reducer, a compressed one) are not for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import paddle

from paddle_dp.core.loss import Count
from paddle_dp.core.precision import NOTHING
from paddle_dp.errors import UsageError

# The id() of each exchange of this process that has sent an update's gradients, until the update ends.
UNFINISHED: set[int] = set()
_FAILED_BEFORE = (
    "an update of this process failed after some of its gradients had been sent, and the ranks would add them to the "
    'next one\'s. Start the job again; Trainer.of(…, resume="auto") goes on from the newest checkpoint.'
)


class GradientExchange:
    """Sums gradients over ranks. This base class is the exchange of one process, which sends nothing.

    `mean_over`: the number of ranks over which the exchange averages; 1: it adds up.
    `missing`: how a gradient counts that some ranks lack: as `zeros`, or as an error (`raise`).
    `waits_for_all`: a parameter without a gradient on any rank blocks the exchange.
    `each_micro_batch`: every backward exchanges, so that only a gradient's owner holds it between them (ZeRO-2).
    `counts_bytes`: `mesh.transport.traffic` counts all bytes that the exchange sends.
    `rounds_to`: the dtype to which gradients are rounded without error feedback: a step is one process's within that
    rounding, a whole training is not. None: they are not rounded.
    """

    mean_over: int = 1
    missing: Literal["raise", "zeros"] = "zeros"
    waits_for_all: bool = False
    each_micro_batch: bool = False
    counts_bytes: bool = True
    rounds_to: str | None = None

    @property
    def description(self) -> str:
        """How gradients are summed, as a part of a sentence."""
        return f"gradients rounded to {self.rounds_to}" if self.rounds_to else "unrounded gradients"

    def begin_update(self, number: int, loss_scale: float, divisor: float) -> None:
        """Called before the first forward of update `number` (from 1). Totals are scaled by loss_scale / divisor.
        Raises UsageError after an update that failed with gradients on their way."""
        if UNFINISHED:
            raise UsageError(_FAILED_BEFORE)

    def begin_micro_batch(self, last: bool) -> None:
        """Called before the forward of a micro-batch; `last`: of its update. Not under a pipeline."""

    def backward(self, last: bool, counted: Count = 0) -> AbstractContextManager[Any]:
        """A context for one backward, within which final gradients are sent. `counted`: the loss's count in this update
        on this rank, including this micro-batch; 0 under a pipeline."""
        return NOTHING

    def finish(self) -> list[int]:
        """Waits, after the last backward, until the owner of each gradient has the sum of the ranks that have one.
        Returns the indices of the parameters without a local gradient. Collective."""
        return []

    def discard(self) -> None:
        """Ends the exchanges of backwards without a last one. Collective."""

    def before_metrics(self, update: int) -> None:
        """Called before the metrics of update number `update` are added up. Collective."""

    def commit(self) -> None:
        """Called after the optimizer's step: keeps residuals of compression."""

    def trace(self) -> None:
        """Begins to record each bucket on the heartbeat's tape, for an exchange that Paddle runs; the others hand
        theirs over whenever there is a tape."""

    def explain(self, error: RuntimeError) -> Exception | None:
        """The error to raise instead of an `error` in a forward or a backward; None: raise `error`."""
        return None

    def extra_state(self) -> ExtraState:
        """The tensors that a checkpoint holds in addition to model and optimizer."""
        return ExtraState()

    def load_extra_state(self, saved: SavedExtraState) -> None:
        """Loads them; `saved` is empty if another strategy wrote the checkpoint."""


class GradReadyHooks:
    """Calls `ready(index, final)` during backward when the gradient of `parameters[index]` has been added to.

    `final`: it has been added to as often as in the previous round, so no more contributions are expected.

    Paddle calls a hook after each addition to `parameter.grad`: once per backward, but with recompute once per inner
    backward, hence twice for a parameter that two recomputed blocks share. `ready` is called at the count of the
    previous round. In the first round and beyond that count it is called each time, not final; below it never. (Paddle
    cannot remove such a hook, so it is registered once, with a switch.)
    """

    def __init__(self, parameters: Sequence[paddle.Tensor], ready: Callable[[int, bool], None]):
        self._ready, self._enabled = ready, False
        self._counts: dict[int, int] = {}  # in this round, by index
        self._expected: dict[int, int] = {}
        for index, parameter in enumerate(parameters):
            parameter._register_backward_hook(partial(self._on_gradient, index))

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Wraps a backward that exchanges gradients."""
        self._enabled = True
        try:
            yield
        finally:
            self._enabled = False

    def end(self) -> list[int]:
        """Ends a round's backwards. Returns the indices of parameters with fewer contributions than the round
        before."""
        fewer = [index for index, count in self._counts.items() if count < self._expected.get(index, 0)]
        self._expected.update(self._counts)
        self._counts = {}
        return fewer

    def _on_gradient(self, index: int, *_: Any) -> None:
        if self._enabled:
            self._counts[index] = count = self._counts.get(index, 0) + 1
            expected = self._expected.get(index, 0)
            if count >= expected:
                self._ready(index, count == expected)


@dataclass(frozen=True, kw_only=True)
class ExtraState:
    """Tensors that a checkpoint holds in addition to model and optimizer, so that a resume is bit-equal, by name:
    `shared`, the same on all ranks, and this rank's `local`."""

    shared: Mapping[str, paddle.Tensor] = field(default_factory=dict)
    local: Mapping[str, paddle.Tensor] = field(default_factory=dict)


class SavedExtraState(Protocol):
    """An ExtraState in a checkpoint. `local` is empty if another number of ranks has saved it."""

    @property
    def shared(self) -> Collection[str]: ...

    @property
    def local(self) -> Collection[str]: ...

    def shared_into(self, name: str, tensor: paddle.Tensor) -> None:
        """Writes a shared tensor into `tensor`, of the same shape."""

    def local_into(self, name: str, tensor: paddle.Tensor) -> None: ...

    def sum_into(self, name: str, tensor: paddle.Tensor) -> bool:
        """Writes the sum of all ranks' local tensors, for any number of ranks; False if there is none."""
