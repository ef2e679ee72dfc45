"""ZeRO-3: a parameter is stored on its owner only, and broadcast around its layer's forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_dp.parallel.hcg import Group


class Stage3:
    """Frees every parameter that another rank owns, and gathers it around its layer's forward and backward.

    A layer's forward, and again its backward, begin with a broadcast of its own parameters. They are released after
    the forward of the last layer that uses them, and after their gradient is computed. A rank that does not run the
    layer takes part in the broadcast nevertheless: `request` begins a round (`Rounds`) for parameters that this rank
    needs, in which all ranks call `broadcast` for each. Autograd keeps a reference to the parameter, not to its values,
    so it reads those that are gathered before the backward. (`_clear_data` and `_share_buffer_to` are private to
    Paddle; fleet's GroupShardedStage3 uses them in the same way.)
    """

    def __init__(
        self,
        model: nn.Layer,
        group: Group,
        parameters: Sequence[paddle.Tensor],
        owner: Callable[[paddle.Tensor], int],
        request: Callable[[Sequence[paddle.Tensor]], None],
    ):
        self.group, self._managed, self._owner = group, {id(parameter) for parameter in parameters}, owner
        self._request, self._parameters = request, parameters
        # What this rank has requested. The owner requests its own parameters, too, although they are never empty: ranks
        # that run the same layers then begin the same rounds.
        self._gathered: set[int] = set()
        self._requested: set[int] = set()  # those in the round that begins now
        self._users: dict[int, int] = {}
        for layer in model.sublayers(include_self=True):
            own = [p for p in layer.parameters(include_sublayers=False) if id(p) in self._managed]
            if own:
                self._hook(layer, own)
        for parameter in parameters:
            self._empty(parameter)

    def _hook(self, layer: nn.Layer, own: list[paddle.Tensor]) -> None:
        hook = layer.register_forward_pre_hook(partial(self._before, own))
        # Before all other hooks: those of emulated low precision read the weights.
        layer._forward_pre_hooks.move_to_end(hook._hook_id, last=False)
        layer.register_forward_post_hook(partial(self._after, own))

    def _before(self, own: list[paddle.Tensor], *_: Any) -> None:
        for parameter in own:
            self._users[id(parameter)] = self._users.get(id(parameter), 0) + 1
        self._gather(own)

    def _after(self, own: list[paddle.Tensor], layer: nn.Layer, inputs: Any, outputs: Any) -> None:
        for parameter in own:
            self._users[id(parameter)] -= 1
            if not self._users[id(parameter)]:
                self.release(parameter)
        for output in paddle.utils.flatten(outputs):
            if isinstance(output, paddle.Tensor) and not output.stop_gradient:
                output.register_hook(partial(self._backward, own))

    def _backward(self, own: list[paddle.Tensor], gradient: paddle.Tensor) -> None:
        """Runs when the gradient of a layer's output is computed, before the layer's own gradients are."""
        self._gather(own)

    def _gather(self, own: list[paddle.Tensor]) -> None:
        missing = [parameter for parameter in own if id(parameter) not in self._gathered]
        if missing:
            self._requested = {id(parameter) for parameter in missing}
            self._gathered |= self._requested
            self._request(missing)
            self._requested = set()

    @paddle.no_grad()
    def broadcast(self, parameter: paddle.Tensor) -> None:
        """Broadcasts the owner's values; only ranks that have requested them keep them. Collective."""
        owner = self._owner(parameter)
        is_owner = owner == self.group.rank
        whole = parameter if is_owner else paddle.empty(parameter.shape, parameter.dtype)
        dist.broadcast(whole, self.group.ranks[owner], self.group)
        if not is_owner and id(parameter) in self._requested:
            whole._share_buffer_to(parameter)

    def release(self, parameter: paddle.Tensor) -> None:
        """Frees a gathered parameter; does nothing where it is not gathered."""
        if id(parameter) in self._gathered:
            self._gathered.discard(id(parameter))
            self._empty(parameter)

    def release_all(self) -> None:
        """After a forward or a backward: frees the parameters that are still gathered."""
        for parameter in self._parameters:
            self.release(parameter)

    def _empty(self, parameter: paddle.Tensor) -> None:
        if self._owner(parameter) != self.group.rank:
            parameter._clear_data()
