"""A model as it lies on this rank: its tensors under whole-model names, who saves them, and whether they are sound."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import paddle
from paddle import nn

from paddle_dp.mesh import Mesh
from paddle_dp.parallel.batch_norm import keeps_statistics, statistics
from paddle_dp.parallel.blocks import elements_of
from paddle_dp.parallel.consistency import Copy, Digest, check_sound, digests
from paddle_dp.parallel.finite import not_finite
from paddle_dp.parallel.placement import Placement, Placements

Placed = tuple[str, paddle.Tensor, Placement]
"""A tensor's whole-model name, what lies here of it, and where that is."""


@dataclass(kw_only=True)
class PlacedModel:
    """What checkpoints, comparisons and proofs ask of a model that was placed on the mesh.

    Whatever part of it lies here, tensors have the names that they have in the whole model. `placements` says of each
    which slice of the whole this rank has, and which rank counts for it.
    """

    model: nn.Layer
    mesh: Mesh
    placements: Placements = field(default_factory=Placements)

    def __post_init__(self) -> None:
        self._statistics = statistics(self.model)
        self._excused = self._never_finite()
        self._made_with = self._not_saved()

    def elements(self) -> list[tuple[int, nn.Layer]]:
        """The layers of the model's ordered blocks that lie here, each with the number of its block."""
        return elements_of(self.model)

    def named_layers(self) -> list[tuple[str, nn.Layer]]:
        """Every layer that lies here, under its whole-model name."""
        return list(self.model.named_sublayers(include_self=True))

    def named_parameters(self, trainable: bool = False) -> list[tuple[str, paddle.Tensor]]:
        """The model's parameters under their whole-model names, without running statistics."""
        named = [(n, p) for n, p in self.model.named_parameters() if n not in self._statistics]
        return [(n, p) for n, p in named if not (trainable and p.stop_gradient)]

    def state(self) -> dict[str, paddle.Tensor]:
        """The parameters, statistics and buffers that lie on this rank between updates, under whole-model names."""
        return {name: tensor for name, tensor in self._state().items() if self.is_stored(tensor)}

    def _state(self) -> dict[str, paddle.Tensor]:
        return dict(self.model.state_dict())

    def shards(self) -> Iterator[Placed]:
        """What of the model's parameters, statistics and buffers this rank is the one to save. Running statistics are
        each rank's own until `sync_buffers`."""
        at = self.mesh.coords
        for name, tensor in self.state().items():
            # A tied weight has a name for each of its uses, so its copy on another stage is no replica.
            placement = replace(self.placements.of(tensor), first_copy=True)
            if placement.is_main_replica(at):
                yield name, tensor, placement

    def main_replicas(self, tensors: Iterable[tuple[str, paddle.Tensor, paddle.Tensor]]) -> Iterator[Placed]:
        """Those of the gradients or optimizer states (name, tensor, its parameter) that this rank counts for."""
        at = self.mesh.coords
        for name, tensor, parameter in tensors:
            placement = self.placements.of(tensor, parameter)
            if placement.is_main_replica(at):
                yield name, tensor, placement

    def is_stored(self, tensor: paddle.Tensor) -> bool:
        """Whether a parameter, statistic or buffer has its values on this rank between updates."""
        return self.placements.of(tensor).is_stored_at(self.mesh.coords)

    def is_updated(self, parameter: paddle.Tensor) -> bool:
        """Whether this rank updates a parameter, and so keeps the optimizer's states of it."""
        return self.placements.of(parameter).is_updated_at(self.mesh.coords)

    def sync_buffers(self) -> None:
        """Gives all ranks the average of the running statistics of their local BatchNorms. Collective.

        Averages of running averages do not depend on how often they are taken, and training does not read them before
        a layer is frozen, when the learner takes them: so evaluation and checkpoints may ask for this at any time
        without changing what is learned. Every other buffer is the same on all ranks anyway (`buffers`).
        """
        if self.mesh.ranks == 1:
            return
        with paddle.no_grad():
            for statistic in self._own_statistics():
                mean = self._sum_over_readers(statistic.astype("float64")) / self.mesh.dp_size
                statistic.set_value(mean.astype(statistic.dtype))

    def _own_statistics(self) -> list[paddle.Tensor]:
        """Running means and variances that this rank keeps of its own samples, whatever mode it is in now."""
        own = [layer for layer in self.model.sublayers(include_self=True) if keeps_statistics(layer)]
        return [statistic for layer in own for statistic in (layer._mean, layer._variance)]

    def _sum_over_readers(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """The sum of a tensor that each reader has one of, in place; ranks of one reader have the same."""
        return self.mesh.sum_tensor(tensor) * (self.mesh.dp_size / self.mesh.ranks)

    def named_buffers(self) -> list[tuple[str, paddle.Tensor]]:
        """What the model remembers here besides parameters and BatchNorm's statistics, by whole-model name."""
        return list(self.model.named_buffers())

    def _not_saved(self) -> dict[str, Digest]:
        """The buffers here that no checkpoint holds (persistable=False), and digests of them."""
        saved = {id(tensor) for tensor in self.model.state_dict().values()}
        buffers = [(name, tensor) for name, tensor in self.named_buffers() if id(tensor) not in saved]
        return dict(zip([n for n, _ in buffers], digests(tensor for _, tensor in buffers), strict=True))

    def lost(self) -> list[str]:
        """The buffers that training has changed and no checkpoint holds, by whole-model name. Collective."""
        now = self._not_saved()
        mine = [name for name, made in self._made_with.items() if now.get(name, made) != made]
        return list(dict.fromkeys(name for names in self.mesh.gather(mine) for name in names))

    def _same_buffers(self) -> Sequence[Any]:
        """Groups of the ranks that hold the same buffers, one for each axis; None stands for all ranks."""
        return (None,)

    def check(self, when: str, states: Iterable[tuple[str, paddle.Tensor, paddle.Tensor]] = ()) -> None:
        """Raises NotFiniteError unless every number of the model is finite, DivergenceError unless ranks that hold
        the same parameter hold the same bits. Collective. `states` are tensors of the optimizer to look at as well:
        name, tensor, parameter.
        """
        parameters = [(name, p, p) for name, p in self.named_parameters() if self.is_stored(p)]
        copies = [
            Copy(name, tensor, self.placements.of(tensor, parameter).part)
            for name, tensor, parameter in (*parameters, *states)
        ]
        check_sound(copies, self._buffers(), self.mesh, when, self._excused)

    def _buffers(self) -> list[tuple[str, paddle.Tensor]]:
        """This rank's running statistics and buffers under their whole-model names."""
        parameters = {id(p) for _, p in self.named_parameters()}
        return [(name, tensor) for name, tensor in self.state().items() if id(tensor) not in parameters]

    def _never_finite(self) -> set[str]:
        """What nobody trains and is infinite, but never NaN, from the beginning: a mask of minus infinities."""
        frozen = [(name, p) for name, p in self.named_parameters() if p.stop_gradient]
        return {name for name, held in not_finite(frozen + self._buffers()).items() if "NaN" not in held}
