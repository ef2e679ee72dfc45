"""ZeRO sharding: each parameter is updated by one owner, a rank of an axis with different samples on each rank.

ZeRO (Rajbhandari et al., arXiv:1910.02054): only the owner keeps the optimizer states (stage 1), also the gradients
(stage 2), also the parameters (stage 3). Fleet makes the groups; docs/decisions/0008 explains why the stages are not
fleet's. Between updates the states may be offloaded to the host's memory.
"""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_dp.axes.sharding.broadcasts import Broadcasts
from paddle_dp.axes.sharding.param_broadcast import AsyncParamBroadcast, ParamBroadcast
from paddle_dp.axes.sharding.pulled_params import Pull
from paddle_dp.axes.sharding.stage3 import Stage3
from paddle_dp.core.batch_norm import SyncBatchNorm, statistics
from paddle_dp.core.data_group import HCG, CommGroups
from paddle_dp.core.optimizer import keep, parameters_of
from paddle_dp.core.placement import Placements
from paddle_dp.errors import UsageError
from paddle_dp.learner.memory import states
from paddle_dp.plan.memory import deal


class Offload:
    """Moves an optimizer's states to the host and back; meanwhile their tensors have no memory.

    The states take no device memory during forward and backward, at the price of one copy in each direction per update.
    On a CPU it saves nothing.
    """

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer
        self._on_host: list[tuple[paddle.Tensor, paddle.Tensor, Any]] = []

    def to_host(self) -> None:
        """Copies the states to the host and frees them on the device; does nothing if they are on the host already."""
        if self._on_host:
            return
        for tensor in states(self.optimizer):
            device = tensor.place
            self._on_host.append((tensor, tensor.clone() if device.is_cpu_place() else tensor.cpu(), device))
            tensor._clear_data()

    def to_device(self) -> None:
        """Copies the states back to their device; does nothing if they are on the device already."""
        for tensor, host, device in self._on_host:
            (host if device.is_cpu_place() else paddle.to_tensor(host, place=device))._share_buffer_to(tensor)
        self._on_host.clear()


class Zero:
    """Assigns a placed model's parameters, each as a whole, to the ranks of the sharding axis.

    `placements` records the owner of every trainable parameter, also of one that `optimizer` does not update, and in
    stage 3 of every frozen one. `optimizer` then has only this rank's parameters, possibly none. In stage 3, `prefetch`
    is the number of chunks fetched ahead, and `reduce_dtype` the dtype in which gradients travel (None: native).
    Collective.
    """

    def __init__(  # noqa: PLR0913 - the placed objects, and four settings of the strategy
        self,
        model: nn.Layer,
        optimizer: Any,
        hcg: HCG,
        placements: Placements,
        stage: int,
        offload: bool = False,
        prefetch: int = 1,
        reduce_dtype: str | None = None,
    ):
        self.group, self.stage = hcg.get_sharding_parallel_group(), stage
        trained = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
        updated = {id(parameter) for parameter in parameters_of(optimizer)}
        frozen = _frozen(model) if stage == 3 else []
        if stage == 3 and (empty := [name for name, p in model.named_parameters() if not p.size]):
            raise UsageError(
                f"strategy.sharding_stage=3: parameter {empty[0]} of the model is empty and cannot be sharded. "
                "Leave it out of the model, or set strategy.sharding_stage=2."
            )
        sizes = [[int(parameter.size) for parameter in parameters] for parameters in (trained, frozen)]
        owners_of_groups = deal(sizes[0], sizes[1], self.group.nranks)
        pairs = zip([*trained, *frozen], [*owners_of_groups[0], *owners_of_groups[1]], strict=True)
        self._owner = {id(parameter): owner for parameter, owner in pairs}
        keep(optimizer, [p for p in trained if id(p) in updated and self.owner(p) == self.group.rank])
        self.parameters = [p for p in model.parameters() if id(p) in self._owner]
        for parameter in self.parameters:
            placements.record(parameter, owner=self.owner(parameter), stored_by_owner=stage == 3)
        self._index_of = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._is_local = [self.owner(parameter) == self.group.rank for parameter in self.parameters]
        on_hosts = all(map(_is_on_host, self.parameters))
        owners = [self.group.ranks[self.owner(parameter)] for parameter in self.parameters]
        self._values = ParamBroadcast(self.group, self.parameters, owners) if on_hosts and stage < 3 else None
        self.comm_groups: CommGroups | None = None
        self._travelling: AsyncParamBroadcast | None = None
        if not on_hosts and stage < 3:
            self.comm_groups = CommGroups.make(hcg.topology().get_comm_list("sharding"), dist.get_rank())
            self._travelling = AsyncParamBroadcast(model, self.parameters, owners, self.comm_groups)
        self.stage3: Stage3 | None = None
        if stage == 3:
            lender = (
                Pull(self.group, self.parameters, owners, reduce_dtype)
                if on_hosts
                else self._broadcasts(hcg, prefetch, reduce_dtype)
            )
            owned_by = [self.owner(parameter) for parameter in self.parameters]
            self.stage3 = Stage3(model, self.parameters, owned_by, self.group, lender, prefetch)
            for layer in model.sublayers(include_self=True):
                if isinstance(layer, SyncBatchNorm):
                    # Until all ranks have reached a layer that exchanges with all, no rank waits for this one.
                    layer.register_forward_pre_hook(self.stage3.meet)
                    layer.register_forward_post_hook(self._meet_in_backward)
        self.offload = Offload(optimizer) if offload else None

    def owner(self, parameter: paddle.Tensor) -> int:
        """The rank of the axis that updates a parameter, or stores it if it is frozen."""
        return self._owner[id(parameter)]

    def keeps_gradient(self, parameter: paddle.Tensor) -> bool:
        """Whether this rank has the parameter's gradient after an update's backwards."""
        return self._owner.get(id(parameter), self.group.rank) == self.group.rank

    def finish(self) -> None:
        """In stage 3, serves other ranks' needs until none needs anything more. Call it after an update's backwards and
        after an evaluation's forward. Collective, whichever layers each rank ran."""
        if self.stage3 is not None:
            self.stage3.finish()

    def share(self) -> None:
        """Sends the new parameters to all ranks after the owners' updates; in stage 3 they stay with their owners. On
        an accelerator they travel until `settle`."""
        if self._values is not None:
            self._values.share()
        if self._travelling is not None:
            self._travelling.share()

    def settle(self) -> None:
        """Makes the device wait until this rank has the new parameters and may change the ones it owns."""
        if self._travelling is not None:
            self._travelling.settle()

    def begin(self) -> None:
        """Called before an update's forward, which may begin while new parameters travel."""
        if self._travelling is not None:
            self._travelling.begin()

    def _meet_in_backward(self, layer: nn.Layer, inputs: Any, output: paddle.Tensor) -> None:
        if not output.stop_gradient and self.stage3 is not None:
            output.register_hook(self.stage3.meet)

    def _broadcasts(self, hcg: HCG, prefetch: int, reduce_dtype: str | None) -> Broadcasts:
        """The provider for an accelerator, with a separate process group. Collective."""
        fetches: Any = None
        for ranks in hcg.topology().get_comm_list("sharding"):  # all ranks make all groups
            group = dist.new_group(ranks)
            fetches = group if dist.get_rank() in ranks else fetches
        owners = [self.owner(parameter) for parameter in self.parameters]
        coupled = hcg.get_sep_parallel_world_size() > 1
        return Broadcasts(self.group, fetches, self.parameters, owners, prefetch, coupled, reduce_dtype)


def _frozen(model: nn.Layer) -> list[paddle.Tensor]:
    """A model's frozen parameters, without running statistics, which are parameters only to Paddle."""
    running = {id(tensor) for tensor in statistics(model).values()}
    return [p for p in model.parameters() if p.stop_gradient and id(p) not in running]


def _is_on_host(parameter: paddle.Tensor) -> bool:
    """Whether a parameter is on the host, or will be if its memory is not allocated yet
    (`model.initial_weights`)."""
    if not parameter._is_initialized():
        return bool(paddle.get_device() == "cpu")
    return bool(parameter.place.is_cpu_place())
