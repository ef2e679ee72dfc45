"""Finds tensors with NaN or infinity, with one read from the device for all of them.

One more forward then names the first layer with such an output.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import paddle
from paddle import nn

from paddle_dp.core import gradients
from paddle_dp.mesh import Mesh

Named = Iterable[tuple[str, paddle.Tensor]]


def not_finite(named: Named) -> dict[str, str]:
    """The tensors that hold NaN or infinity, in the order given: {"fc1.weight": "256 NaN of 8192"}.

    It computes the sum of squares per floating-point tensor and reads all from the device at once; only tensors without
    a finite sum (it may have overflowed) are examined element by element.
    """
    with paddle.no_grad():
        floating = [(name, tensor.detach()) for name, tensor in named if _has_floats(tensor)]
        if not floating:
            return {}
        sums = [gradients.sum_of_squares(tensor).astype("float32").reshape([]) for _, tensor in floating]
        finite = paddle.isfinite(paddle.stack(sums)).tolist()
        counts = {
            name: _count(tensor)
            for (name, tensor), is_finite in zip(floating, finite, strict=True)
            if not is_finite
        }
        return {name: count for name, count in counts.items() if count}


def _has_floats(tensor: paddle.Tensor) -> bool:
    return bool(tensor.size) and tensor.is_floating_point()


def _count(tensor: paddle.Tensor) -> str:
    """ "3 NaN of 100", "1 inf of 100", "2 NaN, 1 inf of 100"; "" if only the squares of a tensor overflow."""
    nan, infinite = (int(test(tensor).sum().item()) for test in (paddle.isnan, paddle.isinf))
    kinds = ", ".join(f"{count} {kind}" for count, kind in ((nan, "NaN"), (infinite, "inf")) if count)
    return f"{kinds} of {tensor.size}" if kinds else ""


INPUTS, LOSS = "the inputs", "the loss"


@dataclass(frozen=True, order=True)
class NotFiniteOutput:
    """A layer's output that is not finite, in a forward of micro-batch `micro_batch`.

    The layer is the `call`-th to end in block `block` (0 if a rank runs all blocks). `within`: the number of a layer
    after that call that other ranks do not run. `content`: such as "3 NaN of 4096".
    """

    block: int
    call: int
    within: int
    micro_batch: int
    layer: str
    content: str


class NotFiniteOutputs:
    """Checks the outputs of forwards under `watched`, and keeps the first that is not finite per micro-batch."""

    def __init__(self) -> None:
        self.not_finite: list[NotFiniteOutput] = []
        self._calls = self._within = 0
        self._clean = True

    @contextmanager
    def watched(
        self,
        layers: Iterable[tuple[str, nn.Layer]],
        blocks: dict[int, int],
        micro_batch: int,
        uncounted: Container[int] = (),
    ) -> Iterator[None]:
        """Wraps the forward of a micro-batch. `blocks`: the number of a layer's block, by the layer's id; `uncounted`:
        the ids of layers that other ranks do not run, which do not count as calls."""
        self._calls, self._within, self._clean, hooks = 0, 0, True, []

        def look(name: str) -> Any:
            def hook(layer: nn.Layer, inputs: Any, outputs: Any) -> None:
                if id(layer) in uncounted:
                    self._within += 1
                else:
                    self._calls, self._within = self._calls + 1, 0
                self.add(name, outputs, blocks.get(id(layer), 0), micro_batch)

            return hook

        try:
            hooks = [
                layer.register_forward_post_hook(look(name or type(layer).__name__)) for name, layer in layers
            ]
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def add(self, name: str, outputs: Any, block: int, micro_batch: int) -> None:
        """Checks the outputs of a layer, unless an earlier one was not finite."""
        if not self._clean:
            return
        tensors = [x for x in paddle.utils.flatten(outputs) if isinstance(x, paddle.Tensor)]
        bad = not_finite((str(number), tensor) for number, tensor in enumerate(tensors))
        if bad:
            self._clean = False
            self.not_finite.append(
                NotFiniteOutput(block, self._calls, self._within, micro_batch, name, next(iter(bad.values())))
            )


def first(outputs: Sequence[NotFiniteOutput], mesh: Mesh) -> str:
    """A sentence about the first such output of all ranks in the model's order; "" if all outputs are finite.
    Collective."""
    rows = mesh.gather([asdict(min(outputs))] if outputs else [])
    rank_outputs = [(NotFiniteOutput(**row), rank) for rank, entries in enumerate(rows) for row in entries]
    if not rank_outputs:
        return ""
    earliest, rank = min(rank_outputs)
    where = f"in micro-batch {earliest.micro_batch}" + (f" on rank {rank}" if mesh.ranks > 1 else "")
    if earliest.layer == INPUTS:
        return f"The inputs are not finite: {earliest.content}, {where}."
    return f"The first output that is not finite is from {earliest.layer}: {earliest.content}, {where}."
