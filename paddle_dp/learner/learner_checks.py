"""Checks that watch the updates of a learner, in the order of its calls."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import paddle

from paddle_dp.core.batch_norm import LocalNorms, RunningStatistics
from paddle_dp.core.buffers import Buffers
from paddle_dp.core.consistency import Digest, digests
from paddle_dp.core.loss import Loss
from paddle_dp.core.optimizer import parameters_of
from paddle_dp.core.placed_model import PlacedModel
from paddle_dp.core.turns import TurnsLoss
from paddle_dp.errors import UsageError
from paddle_dp.identity.parameters_within import parameters_within
from paddle_dp.identity.walk import Attributes, OptimizerMemory
from paddle_dp.learner.update import UpdateMode
from paddle_dp.mesh import Mesh
from paddle_dp.text import and_more, few, plural

SYNC_BATCH_NORM = "strategy.sync_batch_norm=true takes those of all ranks"
NO_REMEDY = (
    "under this strategy ranks do not meet in a forward, as those of data_parallel with sync_batch_norm do"
)
_LOCAL_PAIRS = (
    "the loss {} compares the samples of each rank with one another only (loss.across: rank): loss.across=ranks "
    "compares all of the micro-batch"
)


class LearnerCheck:
    """Watches updates. A method that a subclass does not override costs nothing in a step."""

    def before_update(self, mode: UpdateMode) -> None:
        """Called before the forward. Collective."""

    def after_exchange(self, update: int, empty: bool) -> None:
        """Called when the gradients of update number `update` are final, before their use; `empty`: nothing in its
        batch counts. Collective."""

    def after_update(self) -> None:
        """Called after the update, unless the ranks' weights differ. Collective."""

    def differences(self) -> Iterable[str]:
        """Sentences on differences from one process's training beyond rounding, each with its cause and remedy.
        Collective; the same on every rank. Some are known only after updates."""
        return ()


def overriding(checks: Sequence[LearnerCheck], method: str) -> list[Any]:
    """The bound methods of the checks that override `method`."""
    base = getattr(LearnerCheck, method)
    return [getattr(check, method) for check in checks if getattr(type(check), method) is not base]


class FrozenCheck(LearnerCheck):
    """Refuses a parameter that was unfrozen after the model was placed, or, on several ranks, frozen."""

    def __init__(self, placed: PlacedModel):
        self._mesh, named = placed.mesh, placed.named_parameters()
        self._placed = [(name, parameter, parameter.stop_gradient) for name, parameter in named]

    def before_update(self, mode: UpdateMode) -> None:
        self.check(may_freeze=self._mesh.ranks == 1 or mode.exchange.missing == "zeros")

    def check(self, may_freeze: bool) -> None:
        """Raises UsageError for a parameter that was unfrozen, and, unless `may_freeze`, for one that was frozen."""
        for name, parameter, frozen in self._placed:
            if parameter.stop_gradient == frozen or (may_freeze and not frozen):
                continue
            if frozen:
                many = self._mesh.ranks > 1
                left_out = "all-reduced, and the ranks would drift apart" if many else "scaled or clipped"
                raise UsageError(
                    f"parameter '{name}' was unfrozen after the model was placed (or another Trainer.of of the model "
                    f"has undone its groups), so its gradient would not be {left_out}. End the training here, unfreeze "
                    "it before the model is given to Trainer.of, and resume with accept=['frozen']."
                )
            raise UsageError(
                f"parameter '{name}' was frozen after the model was placed, and paddle.DataParallel waits for its "
                "gradient. Set strategy.find_unused_parameters=true, or strategy.use=hybrid."
            )


class ForeignCheck(LearnerCheck):
    """Prints once, on the first rank, the parameters that get a gradient in the first update and are none of the
    model's, such as a layer's in a loss's closure, or in a plain list. `names`: of the whole model's."""

    def __init__(self, placed: PlacedModel, loss: Loss, names: Collection[str]):
        self._mesh, self._model = placed.mesh, type(placed.model).__name__
        within = parameters_within([loss.function, *(layer for _, layer in placed.named_layers())])
        self._foreign = [p for p in within if p.name not in names]
        self._hooks: list[Any] = []  # of the first update: an old gradient does not count
        self._used: set[int] = set()  # ids of parameters
        self._began = self._ended = False  # on all ranks at once

    def before_update(self, mode: UpdateMode) -> None:
        for hook in self._hooks:
            hook.remove()
        self._ended, self._began = self._began, True
        watched = [] if self._ended else [p for p in self._foreign if not p.stop_gradient]
        self._hooks = [parameter.register_hook(partial(self._note, parameter)) for parameter in watched]

    def _note(self, parameter: paddle.Tensor, gradient: paddle.Tensor) -> None:
        self._used.add(id(parameter))

    def after_exchange(self, update: int, empty: bool) -> None:
        if self._ended:
            return
        names = [f"'{p.name}' {list(p.shape)}" for p in self._foreign if id(p) in self._used]
        used = gathered_names(names, self._mesh)
        self._ended = bool(used)  # else a later turn of this update may use one
        if used and self._mesh.is_main:
            print(
                f"not trained: parameter {used[0]}{and_more(used)}, which the loss or a forward uses, is not one of "
                f"the model's ({self._model}): this training does not update it, and no checkpoint has it. If it "
                "learns, make its layer a sublayer of the model (nn.LayerList for a list); if not, freeze it: "
                "parameter.stop_gradient = True. This is said once.",
                file=sys.stderr,
                flush=True,
            )


class FrozenNorms(LearnerCheck):
    """Averages running statistics before the first update in which a layer uses them."""

    def __init__(self, local_norms: LocalNorms, statistics: RunningStatistics):
        self._local_norms, self._statistics = local_norms, statistics

    def before_update(self, mode: UpdateMode) -> None:
        if self._local_norms.look():
            self._statistics.sync()


class BatchNormCheck(LearnerCheck):
    """Names BatchNorms that normalize over one rank's samples, in training or in evaluation. `remedy`: how to use the
    samples of all ranks in training."""

    def __init__(self, mesh: Mesh, local_norms: LocalNorms, remedy: str = SYNC_BATCH_NORM):
        self._mesh, self._local_norms, self._remedy = mesh, local_norms, remedy

    def differences(self) -> Iterable[str]:
        if layers := self._described(self._local_norms.names()):
            yield f"{layers[0]} over one rank's samples ({layers[1]}): {self._remedy}"
        if layers := self._described(self._local_norms.in_evaluation):
            yield (
                f"{layers[0]} by the samples of a batch in evaluation, too ({layers[1]}: trainable_statistics=True), "
                "of which each rank has a share: held-out numbers depend on the number of ranks, unless it is False"
            )

    def _described(self, names: list[str]) -> tuple[str, str] | None:
        """("2 BatchNorm layers normalize", "bn1 and 1 more") of all ranks' names; None for none. Collective."""
        all_names = gathered_names(names, self._mesh)
        if not all_names or self._mesh.dp_size == 1:
            return None
        layers = plural(len(all_names), "BatchNorm layer normalizes", "BatchNorm layers normalize")
        return layers, few(all_names, 1)


class KnownDifferences(LearnerCheck):
    """Sentences that are known before the first update, or added to `sentences` during the training."""

    def __init__(self, sentences: list[str]):
        self._sentences = sentences

    def differences(self) -> Iterable[str]:
        return self._sentences


class LossPairs(LearnerCheck):
    """Names a loss that compares the samples of each rank with one another only."""

    def __init__(self, loss: Loss, mesh: Mesh):
        self._loss, self._mesh = loss, mesh

    def differences(self) -> Iterable[str]:
        if self._mesh.dp_size > 1 and self._loss.compares == "rank":
            yield _LOCAL_PAIRS.format(self._loss.name)


class BufferCheck(LearnerCheck):
    """Keeps buffers equal on the ranks that hold the same ones, and names buffers that differ."""

    def __init__(self, buffers: Buffers, mesh: Mesh):
        self._buffers, self._mesh = buffers, mesh

    def after_update(self) -> None:
        for sentence in self._buffers.sync():
            if self._mesh.is_main:
                print(f"not as one process computes it: {sentence}", file=sys.stderr, flush=True)

    def differences(self) -> Iterable[str]:
        return self._buffers.differences()


class UnusedCheck(LearnerCheck):
    """Prints once, on the first rank, the trained parameters without a gradient on any rank."""

    def __init__(self, placed: PlacedModel, loss: Loss):
        self._mesh, self._in_turns = placed.mesh, isinstance(loss, TurnsLoss)
        self._watched = dict(placed.named_trainable)  # until their first update; a turn updates some of them
        self._ended = False  # on all ranks at once: one stage's may all be frozen

    def after_exchange(self, update: int, empty: bool) -> None:
        if self._ended or empty:
            return
        updated = [name for name, parameter in self._watched.items() if not parameter.stop_gradient]
        present = {name: self._watched.pop(name).grad is not None for name in updated}
        lacking = gathered_names([name for name, has_one in present.items() if not has_one], self._mesh)
        used = set(gathered_names([n for n in lacking if present.get(n)], self._mesh)) if lacking else ()
        self._ended = not (self._in_turns and self._watched)  # in turns all ranks have the same parameters
        unused = [name for name in lacking if name not in used]
        if unused and self._mesh.is_main:
            print(
                f"parameter '{unused[0]}'{and_more(unused)} got no gradient in update {update}: neither the "
                "outputs nor the loss use it, so updates leave it as it is. This is said once.",
                file=sys.stderr,
                flush=True,
            )


class UnsavedState:
    """State that training has changed and no checkpoint holds, by name. All methods are collective."""

    def __init__(self, placed: PlacedModel, optimizer: Any, loss: Loss, schedule: Any):
        self._placed = placed
        self._initial = self._unsaved_buffers()
        self._optimizer_memory = OptimizerMemory(optimizer, parameters_of(optimizer))
        self._attributes = attributes_of(placed, loss, schedule=schedule)

    def buffers(self) -> list[str]:
        """The changed buffers, by whole-model name."""
        now = self._unsaved_buffers()
        changed = [name for name, initial in self._initial.items() if now.get(name, initial) != initial]
        return gathered_names(changed, self._placed.mesh)

    def attributes_of_optimizer(self) -> list[str]:
        """The changed attributes of a user's optimizer."""
        return gathered_names(self._optimizer_memory.lost(), self._placed.mesh)

    def attributes(self) -> list[str]:
        """The changed attributes of a user's layers, loss and schedule, such as "model.encoder.calls"."""
        return gathered_names(self._attributes.changed(), self._placed.mesh)

    def _unsaved_buffers(self) -> dict[str, Digest]:
        """Digests of the buffers that checkpoints do not save (persistable=False), by name."""
        saved = {id(tensor) for tensor in self._placed.model.state_dict().values()}
        # A buffer with a gradient is computed from weights in each forward (spectral norm, weight norm).
        buffers: list[tuple[str, paddle.Tensor]] = [
            (name, tensor)
            for name, tensor in self._placed.named_buffers()
            if id(tensor) not in saved and tensor.stop_gradient
        ]
        return dict(zip([name for name, _ in buffers], digests(tensor for _, tensor in buffers), strict=True))


def attributes_of(placed: PlacedModel, loss: Loss, **more: Any) -> Attributes:
    """The attributes of a model's layers, of the loss's owner if it is not one of them, and of `more` objects."""
    layers = {f"model.{name}".rstrip("."): layer for name, layer in placed.named_layers()}
    owner = loss.owner
    is_separate = owner is not None and all(owner is not layer for layer in layers.values())
    return Attributes({**layers, **({"loss": owner} if is_separate else {}), **more})


def gathered_names(names: list[str], mesh: Mesh) -> list[str]:
    """The names of all ranks, without duplicates. Collective."""
    return list(dict.fromkeys(name for rank_names in mesh.gather(names) for name in rank_names))
