"""This rank's part of a model: its tensors under whole-model names, which rank saves them, and checks of them.

Which parameters are trained is decided when a model is placed: exchange, norm and checkpoints depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import paddle
from paddle import nn

from paddle_dp.errors import UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.parallel.batch_norm import keeps_statistics, statistics
from paddle_dp.parallel.blocks import elements_of
from paddle_dp.parallel.consistency import Digest, Replica, check_sound, digests
from paddle_dp.parallel.first_not_finite import not_finite
from paddle_dp.parallel.placement import Placement, Placements


class Trainable:
    """Notices a parameter that was frozen or unfrozen since the model was placed on several ranks."""

    def __init__(self, named: Iterable[tuple[str, paddle.Tensor]]):
        self._placed = [(name, parameter, parameter.stop_gradient) for name, parameter in named]

    def check(self, may_freeze: bool) -> None:
        """Raises UsageError for a parameter that is trained now and was not, and, unless `may_freeze`, for one that is
        not and was."""
        for name, parameter, frozen in self._placed:
            if parameter.stop_gradient == frozen or (may_freeze and not frozen):
                continue
            if frozen:
                raise UsageError(
                    f"parameter '{name}' was unfrozen after the model was placed, so its gradient would not be "
                    "all-reduced, and the ranks would drift apart. End the training here, unfreeze it before the model "
                    "is given to Trainer.of, and resume with accept=['frozen']."
                )
            raise UsageError(
                f"parameter '{name}' was frozen after the model was placed, and paddle.DataParallel waits for its "
                "gradient. Set strategy.find_unused_parameters=true, or strategy.use=hybrid."
            )


Placed = tuple[str, paddle.Tensor, Placement]
"""A tensor's whole-model name, this rank's part of it, and the placement of that part."""


@dataclass(kw_only=True)
class PlacedModel:
    """The interface of a placed model for checkpoints, comparisons and proofs.

    Whatever part of the model this rank has, tensors have their whole-model names. `placements` has each tensor's slice
    and which of its replicas counts. `base`: names of what is not saved, because an adapter stands on it.
    """

    model: nn.Layer
    mesh: Mesh
    placements: Placements = field(default_factory=Placements)
    base: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._statistics = statistics(self.model)
        self._excused = self._infinite_from_the_start()
        self._initial = self._not_saved()

    def elements(self) -> list[tuple[int, nn.Layer]]:
        """This rank's layers of the model's ordered blocks, each with the number of its block."""
        return elements_of(self.model)

    def named_layers(self) -> list[tuple[str, nn.Layer]]:
        """This rank's layers by whole-model name."""
        return list(self.model.named_sublayers(include_self=True))

    def named_parameters(self, trainable: bool = False) -> list[tuple[str, paddle.Tensor]]:
        """This rank's parameters by whole-model name, without running statistics."""
        named = [(n, p) for n, p in self.model.named_parameters() if n not in self._statistics]
        return [(n, p) for n, p in named if not (trainable and p.stop_gradient)]

    def state(self) -> dict[str, paddle.Tensor]:
        """The parameters, statistics and buffers that this rank stores between updates, by whole-model name."""
        return {name: tensor for name, tensor in self._state().items() if self.is_stored(tensor)}

    def _state(self) -> dict[str, paddle.Tensor]:
        return dict(self.model.state_dict())

    def shards(self) -> Iterator[Placed]:
        """The parts of parameters, statistics and buffers that this rank saves. Call `sync_buffers` first: until then
        running statistics differ between ranks."""
        return self._placed_tensors(lambda name: name not in self.base)

    def base_shards(self) -> Iterator[Placed]:
        """The parts of the base that this rank would save."""
        return self._placed_tensors(self.base.__contains__)

    def _placed_tensors(self, selects: Callable[[str], bool]) -> Iterator[Placed]:
        at = self.mesh.coords
        for name, tensor in self.state().items():
            if not selects(name):
                continue
            # A tied weight is saved under each of its names, so its copy on another stage is no replica.
            placement = replace(self.placements.placement_of(tensor), first_copy=True)
            if placement.is_main_replica(at):
                yield name, tensor, placement

    def main_replicas(self, tensors: Iterable[tuple[str, paddle.Tensor, paddle.Tensor]]) -> Iterator[Placed]:
        """Those gradients or optimizer states (name, tensor, its parameter) of which this rank is the main replica."""
        at = self.mesh.coords
        for name, tensor, parameter in tensors:
            placement = self.placements.placement_of(tensor, parameter)
            if placement.is_main_replica(at):
                yield name, tensor, placement

    def is_stored(self, tensor: paddle.Tensor) -> bool:
        """Whether this rank stores the values of a parameter, statistic or buffer between updates."""
        return self.placements.placement_of(tensor).is_stored_at(self.mesh.coords)

    def is_updated(self, parameter: paddle.Tensor) -> bool:
        """Whether this rank updates a parameter, and so keeps the optimizer's states of it."""
        return self.placements.placement_of(parameter).is_updated_at(self.mesh.coords)

    def sync_buffers(self) -> None:
        """Averages the running statistics of local BatchNorms over all ranks. Collective.

        Averages of running averages do not depend on how often they are taken, and training does not read them (only
        when a layer is frozen; then the learner calls this). So evaluation and checkpoints may call it at any time
        without changing the training. Other buffers are equal on all ranks already (`buffers`).
        """
        if self.mesh.ranks == 1:
            return
        with paddle.no_grad():
            for statistic in self._local_statistics():
                total = self._sum_over_readers(statistic.astype("float64"))
                mean = total / (self.mesh.dp_size - len(self.mesh.lost))
                statistic.set_value(mean.astype(statistic.dtype))

    def _local_statistics(self) -> list[paddle.Tensor]:
        """Running means and variances of this rank's own samples, also of layers in evaluation mode."""
        own = [layer for layer in self.model.sublayers(include_self=True) if keeps_statistics(layer)]
        return [statistic for layer in own for statistic in (layer._mean, layer._variance)]

    def _sum_over_readers(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """The sum over readers of a tensor that is equal on all ranks of a reader; in place."""
        if self.mesh.axes.servers:  # which have no samples
            return self.mesh.sum_tensor(tensor if self.mesh.reads else paddle.zeros_like(tensor))
        return self.mesh.sum_tensor(tensor) * (self.mesh.dp_size / self.mesh.ranks)

    def named_buffers(self) -> list[tuple[str, paddle.Tensor]]:
        """This rank's buffers, without BatchNorm's statistics, by whole-model name."""
        return list(self.model.named_buffers())

    def _not_saved(self) -> dict[str, Digest]:
        """Digests of the buffers that checkpoints do not save (persistable=False), by name."""
        saved = {id(tensor) for tensor in self.model.state_dict().values()}
        # One with a gradient is made of weights in each forward: the weight of spectral norm, of weight norm.
        buffers = [(n, t) for n, t in self.named_buffers() if id(t) not in saved and t.stop_gradient]
        return dict(zip([n for n, _ in buffers], digests(tensor for _, tensor in buffers), strict=True))

    def unsaved_buffers(self) -> list[str]:
        """The buffers that training has changed and checkpoints do not save, by whole-model name. Collective."""
        now = self._not_saved()
        changed = [name for name, initial in self._initial.items() if now.get(name, initial) != initial]
        return list(dict.fromkeys(name for names in self.mesh.gather(changed) for name in names))

    def _same_buffers(self) -> Sequence[Any]:
        """The groups of ranks with the same buffers, one for each axis; None: all ranks."""
        return (None,)

    def check(self, when: str, states: Iterable[tuple[str, paddle.Tensor, paddle.Tensor]] = ()) -> None:
        """Raises NotFiniteError unless all tensors of the model are finite, DivergenceError unless replicas of a
        parameter are bit-equal. `states` are optimizer states to check, too: (name, tensor, parameter). Collective.
        """
        parameters = [(name, p, p) for name, p in self.named_parameters() if self.is_stored(p)]
        copies = [
            Replica(name, tensor, self.placements.placement_of(tensor, parameter).slice_index)
            for name, tensor, parameter in (*parameters, *states)
        ]
        check_sound(copies, self._buffers(), self.mesh, when, self._excused)

    def _buffers(self) -> list[tuple[str, paddle.Tensor]]:
        """This rank's running statistics and buffers under their whole-model names."""
        parameters = {id(p) for _, p in self.named_parameters()}
        return [(name, tensor) for name, tensor in self.state().items() if id(tensor) not in parameters]

    def _infinite_from_the_start(self) -> set[str]:
        """Frozen parameters and buffers with infinities, but no NaN, such as a mask of minus infinities."""
        frozen = [(name, p) for name, p in self.named_parameters() if p.stop_gradient and self.is_stored(p)]
        contents = not_finite(frozen + self._buffers())
        return {name for name, content in contents.items() if "NaN" not in content}
