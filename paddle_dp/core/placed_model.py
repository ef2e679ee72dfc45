"""This rank's part of a model: its tensors under whole-model names, and the rank that saves each."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import paddle
from paddle import nn

from paddle_dp.core.batch_norm import statistics
from paddle_dp.core.blocks import elements_of
from paddle_dp.core.first_not_finite import not_finite
from paddle_dp.core.placement import Placement, Placements
from paddle_dp.mesh import Mesh

NamedTensors = list[tuple[str, paddle.Tensor]]
Placed = tuple[str, paddle.Tensor, Placement]
"""A tensor's whole-model name, this rank's part of it, and the placement of that part."""


class ModelNames:
    """The whole-model names of this rank's part of a model: here the whole model."""

    def __init__(self, model: nn.Layer):
        self._model = model

    def elements(self) -> list[tuple[int, nn.Layer]]:
        """This rank's layers of the model's ordered blocks, each with the number of its block."""
        return elements_of(self._model)

    def named_layers(self) -> list[tuple[str, nn.Layer]]:
        return list(self._model.named_sublayers(include_self=True))

    def named_parameters(self) -> NamedTensors:
        """This rank's parameters, running statistics included."""
        return list(self._model.named_parameters())

    def named_buffers(self) -> NamedTensors:
        """This rank's buffers, without BatchNorm's statistics."""
        return list(self._model.named_buffers())

    def state(self) -> dict[str, paddle.Tensor]:
        return dict(self._model.state_dict())

    def blocks_of_layers(self) -> dict[int, int]:
        """The number of the block of each layer, by the layer's id, where ranks run different blocks: each rank calls
        its layers in the order of these numbers. Empty where every rank runs all blocks."""
        return {}


@dataclass(kw_only=True)
class PlacedModel:
    """A model on this rank, for checkpoints, comparisons and proofs.

    `placements` has each tensor's slice and main replica. `names`: by default the whole model's. `base`: names of
    tensors that are not saved, because an adapter stands on them. `rank_local_layers`: ids of layers that other ranks
    of the same forward do not run. `trainable` is set here, once: exchange, norm and checkpoints depend on it.
    """

    model: nn.Layer
    mesh: Mesh
    placements: Placements = field(default_factory=Placements)
    names: ModelNames = None  # type: ignore[assignment]
    base: frozenset[str] = frozenset()
    rank_local_layers: Container[int] = ()

    def __post_init__(self) -> None:
        self.names = self.names or ModelNames(self.model)
        self._statistics = {id(tensor) for tensor in statistics(self.model).values()}
        self.trainable = [p for p in self.model.parameters() if not p.stop_gradient]
        self.infinite_from_start = self._infinite_from_start()

    @cached_property
    def named_trainable(self) -> NamedTensors:
        """The trained parameters by whole-model name. Cached: a look-up takes 0.4 ms in a GPT of 24 blocks."""
        return self.named_parameters(trainable=True)

    @cached_property
    def trainable_names(self) -> list[str]:
        """The names of `trainable`, for a model that this rank holds whole."""
        names = {id(parameter): name for name, parameter in self.named_trainable}
        return [names[id(parameter)] for parameter in self.trainable]

    def named_layers(self) -> list[tuple[str, nn.Layer]]:
        """This rank's layers by whole-model name."""
        return self.names.named_layers()

    def named_parameters(self, trainable: bool = False) -> NamedTensors:
        """This rank's parameters by whole-model name, without running statistics."""
        named = [(name, p) for name, p in self.names.named_parameters() if id(p) not in self._statistics]
        return [(name, p) for name, p in named if not (trainable and p.stop_gradient)]

    def named_buffers(self) -> NamedTensors:
        """This rank's buffers by whole-model name, without BatchNorm's statistics."""
        return self.names.named_buffers()

    def state(self) -> dict[str, paddle.Tensor]:
        """The parameters, statistics and buffers that this rank stores between updates, by whole-model name."""
        return {name: tensor for name, tensor in self.names.state().items() if self.is_stored(tensor)}

    def state_without_parameters(self) -> NamedTensors:
        """The running statistics and buffers in `state`."""
        parameters = {id(p) for _, p in self.named_parameters()}
        return [(name, tensor) for name, tensor in self.state().items() if id(tensor) not in parameters]

    def shards(self) -> Iterator[Placed]:
        """The parts of parameters, statistics and buffers that this rank saves. Call `RunningStatistics.sync` first:
        until then running statistics differ between ranks."""
        return self._placed_tensors(lambda name: name not in self.base)

    def base_shards(self) -> Iterator[Placed]:
        """The shards of the base, in the same form."""
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

    def main_replicas(self, tensors: Iterable[Placed]) -> Iterator[Placed]:
        """The gradients or optimizer states of which this rank is the main replica."""
        return (placed for placed in tensors if placed[2].is_main_replica(self.mesh.coords))

    def is_stored(self, tensor: paddle.Tensor) -> bool:
        """Whether this rank stores the values of a parameter, statistic or buffer between updates."""
        return self.placements.placement_of(tensor).is_stored_at(self.mesh.coords)

    @property
    def is_split(self) -> bool:
        """Whether the model on this rank lacks some weights, which other ranks have, or has slices or old values."""
        placements = map(self.placements.placement_of, self.model.parameters())
        is_cut = any(each.shard is not None or each.stored_by_owner or each.only_at for each in placements)
        return is_cut or self.mesh.axes.pipeline > 1

    def is_updated(self, parameter: paddle.Tensor) -> bool:
        """Whether this rank updates a parameter, and so keeps the optimizer's states of it."""
        return self.placements.placement_of(parameter).is_updated_at(self.mesh.coords)

    def _infinite_from_start(self) -> set[str]:
        """Frozen parameters and buffers with infinities, but no NaN, such as a mask of minus infinities."""
        frozen = [(name, p) for name, p in self.named_parameters() if p.stop_gradient and self.is_stored(p)]
        contents = not_finite(frozen + self.state_without_parameters())
        return {name for name, content in contents.items() if "NaN" not in content}
