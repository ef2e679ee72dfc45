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
    the forward of the last layer that uses them, and once their gradient is there. A rank that does not run the layer
    takes part in the broadcast nevertheless: `ask` begins a round (`Rounds`) for parameters that this rank needs, in
    which all ranks call `broadcast` for each. Autograd keeps a parameter itself, not its values: those that are
    gathered before the backward are the ones it reads. (`_clear_data` and `_share_buffer_to`, by which fleet's
    GroupShardedStage3 does the same, are private to Paddle.)
    """

    def __init__(
        self,
        model: nn.Layer,
        group: Group,
        parameters: Sequence[paddle.Tensor],
        owner: Callable[[paddle.Tensor], int],
        ask: Callable[[Sequence[paddle.Tensor]], None],
    ):
        self.group, self._managed, self._owner = group, {id(parameter) for parameter in parameters}, owner
        self._ask, self._parameters = ask, parameters
        # Those that this rank has asked for. The owner asks, too, though its own are never empty: where ranks run the
        # same layers, they begin the same rounds.
        self._gathered: set[int] = set()
        self._coming: set[int] = set()  # those of them that the round which begins will bring
        self._users: dict[int, int] = {}
        for layer in model.sublayers(include_self=True):
            own = [p for p in layer.parameters(include_sublayers=False) if id(p) in self._managed]
            if own:
                self._hook(layer, own)
        for parameter in parameters:
            self._empty(parameter)

    def _hook(self, layer: nn.Layer, own: list[paddle.Tensor]) -> None:
        hook = layer.register_forward_pre_hook(partial(self._before, own))
        # First of all hooks: those of low precision (rounding.py) read the weights.
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
        """Runs when the gradient of a layer's output is there, before the layer's own are computed."""
        self._gather(own)

    def _gather(self, own: list[paddle.Tensor]) -> None:
        missing = [parameter for parameter in own if id(parameter) not in self._gathered]
        if missing:
            self._coming = {id(parameter) for parameter in missing}
            self._gathered |= self._coming
            self._ask(missing)
            self._coming = set()

    @paddle.no_grad()
    def broadcast(self, parameter: paddle.Tensor) -> None:
        """Sends the owner's values to the ranks that have asked for them; the others forget them. Collective."""
        owner = self._owner(parameter)
        mine = owner == self.group.rank
        whole = parameter if mine else paddle.empty(parameter.shape, parameter.dtype)
        dist.broadcast(whole, self.group.ranks[owner], self.group)
        if not mine and id(parameter) in self._coming:
            whole._share_buffer_to(parameter)

    def release(self, parameter: paddle.Tensor) -> None:
        """Frees a gathered parameter; does nothing where it is not gathered."""
        if id(parameter) in self._gathered:
            self._gathered.discard(id(parameter))
            self._empty(parameter)

    def release_all(self) -> None:
        """After a forward or a backward: frees what got no gradient."""
        for parameter in self._parameters:
            self.release(parameter)

    def _empty(self, parameter: paddle.Tensor) -> None:
        if self._owner(parameter) != self.group.rank:
            parameter._clear_data()
