"""How one update is computed: its exchange, the count that divides its gradients, and their norm; and how ranks get its
weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.core import gradients
from paddle_dp.core.consistency import Replica
from paddle_dp.core.loss import Count, Loss, number
from paddle_dp.core.optimizer import Clip
from paddle_dp.core.placed_model import NamedTensors, Placed, PlacedModel
from paddle_dp.core.precision import NOTHING
from paddle_dp.errors import LossError
from paddle_dp.exchange.gradient_exchange import ExtraState, GradientExchange, SavedExtraState
from paddle_dp.mesh import Mesh

Parameters = Sequence[paddle.Tensor]


@dataclass
class Counter:
    """The number by which the gradients of an update are divided: the loss's count on all ranks."""

    loss: Loss
    mesh: Mesh

    @property
    def steps(self) -> bool:
        """Whether this rank's optimizer steps in this update."""
        return True

    def known_count(self, batch: Batch) -> float | None:
        """The `final_count` of this global batch, over all its micro-batches; None if it is only known after the
        forward. Collective."""
        if self.loss.counted == "samples":
            return batch.samples
        local = self.local_count(batch)
        return None if local is None else self.final_count(local)

    def local_count(self, batch: Batch) -> Count | None:
        """The count of this rank's share of a batch; None if it is only known after the forward."""
        if self.loss.counted == "answers":
            return None
        local = [micro_batch for micro_batch in batch.micro_batches if not micro_batch.is_dummy]
        if self.loss.counted == "samples":
            return sum(micro_batch.samples for micro_batch in local)
        return sum(self._count(micro_batch) for micro_batch in local)

    def _count(self, micro_batch: MicroBatch) -> Count:
        """The loss's count of the targets; computed on the host if they are there, to not wait for a device."""
        if micro_batch.host_targets is None:
            return self.loss.count(micro_batch.targets)
        with paddle.device.device_guard("cpu"):
            return self.loss.count(micro_batch.host_targets)

    def final_count(self, counted: Count) -> float:
        """The count that divides the gradients of the update, from `counted`, this rank's; 0: no update. Collective."""
        return self.checked(self.mesh.sum([number(counted) if self.mesh.is_loss_rank else 0.0])[0])

    def global_count(self, count: float) -> float:
        """The count of the global batch, which divides metrics, from `count`, the `final_count`. Collective."""
        return count

    def checked(self, count: float) -> float:
        """Returns the count. Raises LossError if it is negative or NaN."""
        if not count >= 0:
            raise LossError(f"the loss {self.loss.name} returned a count of {count:g}: it must be 0 or more.")
        return count


class GradientNorm:
    """The 2-norm of all gradients of a model that every rank has whole, in their dtype and in float32 at least; the
    optimizer clips by itself. `zero_dtype`: of the norm if there is no gradient.

    `clips`: global-norm clips that were taken out of the optimizer, because it sees only this rank's part.
    """

    clips: Sequence[Clip] = ()

    def __init__(self, parameters: Parameters, zero_dtype: str = "float32"):
        self._parameters, self._zero_dtype = parameters, zero_dtype

    # The metrics of an update need one exchange: each rank's `to_row(term())` joins it, and `from_row` makes the norm
    # of the ranks' sum. A subclass whose term is the norm already inherits both. One whose term is not, as of a server,
    # which has the square of its gradients' norm, overrides both, and `global_norm`.

    def term(self) -> Any:
        """The number of this rank from which `to_row` and `from_row` make the norm over the whole model: here that norm
        itself; 0-d or a number. Collective in subclasses."""
        return gradients.global_norm(self._parameters, self._zero_dtype)

    def global_norm(self) -> Any:
        """The norm over the whole model, the same on every rank, at once. Collective in subclasses."""
        return self.term()

    def clip(self) -> None:
        """Scales the gradients before the optimizer steps: nothing here, for the optimizer clips by itself, where each
        rank has all gradients. Collective in subclasses."""

    def to_row(self, term: float) -> float:
        """The number that ranks add up: here the norm if it is not finite, else 0."""
        return 0.0 if term - term == 0.0 else term

    def from_row(self, term: float, summed: float) -> float:
        """The norm, from this rank's term and the sum of the rows; finite on all ranks or on none."""
        return term if summed == 0.0 else summed


class PlacedNorm(GradientNorm):
    """The 2-norm over placements: each gradient counts once, at its parameter's main replica. The squares of the ranks'
    norms, each in float32 at least, are summed in float64. It also clips: Paddle's optimizer and fleet's would see the
    gradients of this rank alone."""

    def __init__(self, placed: PlacedModel, clips: Sequence[Clip]):
        super().__init__(placed.trainable)
        self.placed, self.clips = placed, clips

    def term(self) -> paddle.Tensor:
        return self.norms_over([self._parameters])[0]

    def clip(self) -> None:
        if not self.clips:
            return
        norms = self.norms_over([clip.parameters for clip in self.clips])
        for clip, norm in zip(self.clips, norms, strict=True):
            gradients.clip(clip.parameters, norm, clip.bound)

    def norms_over(self, lists: Sequence[Parameters]) -> paddle.Tensor:
        """The 2-norm over the whole model's gradients of each list, [lists]. One exchange for all. Collective."""
        at, placements = self.placed.mesh.coords, self.placed.placements
        counted = [
            [p for p in parameters if placements.placement_of(p).is_main_replica(at)] for parameters in lists
        ]
        # Float64 on every rank: a rank without main replicas has no gradient from which to take the dtype.
        squares = [gradients.global_norm(parameters).astype("float64").square() for parameters in counted]
        return self.placed.mesh.sum_tensor(paddle.stack(squares)).sqrt()


@dataclass(frozen=True, kw_only=True)
class UpdateMode:
    """How one update is computed. Local SGD has two modes, together and alone; other strategies have one."""

    exchange: GradientExchange
    counter: Counter
    norm: GradientNorm


# The weights of an update ---------------------------------------------------------------------------------------------

States = Iterable[Placed]  # of an optimizer


class WeightSync:
    """Every rank makes the same step, so nothing is sent. Strategies that send weights have subclasses.

    `mode`: how updates are computed. `collective_forward`: a forward gathers weights from other ranks (ZeRO-3).
    `diverged`: the ranks' weights differ now. `overlaps`: new weights may still arrive after `publish`, because the
    next forward waits for them layer by layer; while it is set, call `wait` before reading a parameter elsewhere.
    `description`: the part of a sentence that replaces the exchange's; "" for the exchange's.
    """

    collective_forward: bool = False
    diverged: bool = False
    description: str = ""

    def __init__(self, mode: UpdateMode):
        self.mode, self.overlaps = mode, False
        self.after_equal: Callable[[], None] = lambda: None  # the checks, once weights are equal again

    def begin_update(self, number: int) -> UpdateMode:
        """Returns the mode of update `number` (from 1), before its forward. Collective."""
        return self.mode

    def step(self, optimizer: paddle.optimizer.Optimizer) -> None:
        """Lets the optimizer update this rank's parameters."""
        optimizer.step()

    def publish(self) -> None:
        """Sends the new weights after the optimizer's step; they have arrived after `wait`. Collective."""

    def wait(self) -> None:
        """Waits, on the device, until this rank's parameters have their newest values."""

    def share(self) -> None:
        """Sends values that owners have written into their parameters to the ranks that hold copies. Collective."""

    def forward_only(self) -> AbstractContextManager[Any]:
        """A context for a forward without backward."""
        return NOTHING

    def end_pass(self, backward: bool) -> None:
        """Called after each forward and backward of a pipeline stage."""

    def optimizer_states_on_device(self) -> AbstractContextManager[Any]:
        """A context for reading or writing the optimizer's states, which may be offloaded."""
        return NOTHING

    def means(self, states: bool = False) -> AbstractContextManager[Any]:
        """A context for reading the weights of the training, and with `states` the optimizer's states: if the ranks'
        differ, means replace them within it. Collective."""
        return NOTHING

    def global_gradients(self) -> AbstractContextManager[Any]:
        """A context for reading the gradients of an update before its step: within it they are the global batch's, even
        if ranks use local ones. Collective."""
        return NOTHING

    def finalize(self) -> None:
        """Ends a training: from here on all ranks have the same weights. Collective."""

    def compared(self, placed: PlacedModel, states: States) -> tuple[list[Replica], NamedTensors]:
        """The replicas that must be bit-equal on all ranks now, and other tensors that must be finite."""
        named, placement_of = placed.named_parameters(), placed.placements.placement_of
        parameters = [(name, p, placement_of(p)) for name, p in named if placed.is_stored(p)]
        replicas = [
            Replica(name, tensor, placement.slice_index) for name, tensor, placement in (*parameters, *states)
        ]
        return replicas, placed.state_without_parameters()

    def explain(self, error: RuntimeError) -> Exception | None:
        """The error to raise instead of an `error` in a forward or a backward; None: raise `error`."""
        return None

    def extra_state(self) -> ExtraState:
        """The tensors that a checkpoint holds in addition to model and optimizer. Call it outside of `means`."""
        return ExtraState()

    def load_extra_state(self, saved: SavedExtraState) -> None:
        """Loads them after model and optimizer; `saved` is empty if another strategy wrote the checkpoint."""
